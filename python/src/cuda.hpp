// SPDX-License-Identifier: Apache-2.0
// Calls on CUDA tensors, through torch: its current stream, its caching allocator, its current device. CUDA itself is neither
// linked nor included. Everything here needs the GIL and a torch with CUDA, which whoever brings a CUDA tensor has.
#pragma once
#include <nanobind/nanobind.h>
#include <stdint.h>

#include "arrays.hpp"

namespace fastweight::python {

// torch.device("cuda", index), for the life of the process.
PyObject *cuda_device(int index);

// The cudaStream_t that torch's work on that device is ordered on now.
void *cuda_stream(int index);

// Bytes of torch's caching allocator, in the order of the current stream: once the work that uses them is launched on it the
// tensor may go. Under a capture they belong to the graph. None, and nullptr, for 0 bytes. 512 divides the address.
nb::object cuda_bytes(int index, uint64_t bytes, void **data);

// A torch or NumPy array of the host on that device, copied in the order of the current stream.
nb::object copy_to_cuda(int index, PyObject *host);

// That device is the current one of the thread for as long as this lives; nothing for index -1.
class CudaGuard {
 public:
  explicit CudaGuard(int index);
  ~CudaGuard();
  CudaGuard(const CudaGuard &) = delete;
  CudaGuard &operator=(const CudaGuard &) = delete;

 private:
  int previous_;
};

}  // namespace fastweight::python
