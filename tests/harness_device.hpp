// SPDX-License-Identifier: Apache-2.0
// The switch of the tests: with FW_TEST_DEVICE=cuda a call of the harness runs on the current CUDA device. Its tensors, guard
// bands included, are copied to device memory before the call and back after it, so that every check of the host's buffers
// (values, NaN, gaps, inputs unchanged) is one of the device's.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"

#if defined(FW_HAVE_CUDA)
#include <cuda_runtime.h>
#endif

namespace fw::test {

inline bool is_on_cuda() {
  const char *device = getenv("FW_TEST_DEVICE");
  if (!device || !*device || strcmp(device, "cpu") == 0) return false;
  if (strcmp(device, "cuda") == 0) return true;
  throw std::runtime_error(std::string("FW_TEST_DEVICE is ") + device + ", allowed cpu or cuda");
}

#if defined(FW_HAVE_CUDA)

inline void must(cudaError_t error, const char *what) {
  if (error != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
}

// Device memory of one call, from one allocation that a thread keeps; a stream of the thread's own that the default stream does
// not wait for, so that work ordered elsewhere is found.
class DeviceMirror {
 public:
  DeviceMirror() { used_ = 0; }
  cudaStream_t stream() { return kept().stream; }
  // A copy of the host's bytes, remembered for `find` and `fetch`.
  void *add(void *host, size_t size) {
    char *device = arena() + used_;
    used_ += (size + 511) / 256 * 256;
    if (used_ > kArena) throw std::runtime_error("a call of the tests needs more device memory than is kept for it");
    if (size) must(cudaMemcpyAsync(device, host, size, cudaMemcpyHostToDevice, stream()), "copy to the device");
    ranges_.push_back({static_cast<char *>(host), device, size});
    return device;
  }
  // The device's place of a host pointer; pointers into nothing that was added stay as they are.
  void *find(void *host) const {
    for (const Range &r : ranges_) {
      const char *at = static_cast<char *>(host);
      if (at >= r.host && at < r.host + r.size) return r.device + (at - r.host);
    }
    return host;
  }
  // Everything is there, for work on any stream.
  void settle() { must(cudaStreamSynchronize(stream()), "copies to the device"); }
  void fetch() {
    must(cudaDeviceSynchronize(), "the call");
    for (const Range &r : ranges_) {
      if (r.size) must(cudaMemcpy(r.host, r.device, r.size, cudaMemcpyDeviceToHost), "copy from the device");
    }
  }

 private:
  struct Range {
    char *host, *device;
    size_t size;
  };
  static constexpr size_t kArena = size_t{3} << 30;
  struct Kept {
    void *memory = nullptr;
    cudaStream_t stream = nullptr;
    Kept() {
      must(cudaMalloc(&memory, kArena), "device memory");
      must(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
    }
    ~Kept() {
      cudaFree(memory);
      cudaStreamDestroy(stream);
    }
  };
  static Kept &kept() {
    thread_local Kept kept;
    return kept;
  }
  static char *arena() { return static_cast<char *>(kept().memory); }
  size_t used_;
  std::vector<Range> ranges_;
};

#endif

}  // namespace fw::test
