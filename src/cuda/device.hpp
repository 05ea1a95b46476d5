// SPDX-License-Identifier: Apache-2.0
// Facts of the CUDA device that is current on the calling thread, and the errors of its calls as statuses. Without CUDA in
// the build every question is answered by a refusal. What is remembered between calls: facts of a device, which never change, and by
// each thread a few addresses that check_memory let pass.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "core/impl_list.hpp"
#include "core/tensor.hpp"

namespace fw::cuda {

// Whether this library can run calls on the current device; the reason names what is missing: CUDA in the build, a driver,
// a device, or a device of compute capability `major`.`minor` or later.
bool is_available(int32_t major, int32_t minor, Reason &reason);

// Whether the current device is exactly of that capability (the sm_90a kernels run on no other).
bool is_exactly(int32_t major, int32_t minor, Reason &reason);

int32_t multiprocessor_count();
// Whether a kernel of the current device may start while the one before it ends (programmatic dependent launch).
bool launches_overlap();
// Bytes of shared memory that a thread block may ask for; 0 without a device.
int32_t shared_memory_limit();

// Whether the memory behind a tensor can be reached by the current device; absent and empty tensors pass.
fw_status check_memory(const char *op, const char *name, const fw_tensor &t);
fw_status check_memory(const char *op, const char *name, const void *data);

// A copy of a device tensor that the host can read, in order with the work on `stream`; for checks alone.
class HostCopy {
 public:
  HostCopy() = default;
  HostCopy(const HostCopy &) = delete;
  HostCopy &operator=(const HostCopy &) = delete;
  ~HostCopy();
  // *t then points into the copy. An absent or empty tensor stays as it is.
  fw_status fetch(const char *op, const char *name, void *stream, fw_tensor *t);

 private:
  [[maybe_unused]] void *memory_ = nullptr;  // a build without CUDA has no use for it
};

// FW_OK, or FW_DEVICE_ERROR with the text of an error that a launch of this thread left. The error is taken back, unless it
// is one that the device does not recover from.
fw_status check_launches(const char *op, const char *impl);
fw_status check_launch(const char *op, const char *impl, int status);  // of a cudaError_t at hand

// One line about each device for `fastweight info`: "NVIDIA H200, compute capability 9.0, 132 multiprocessors".
void describe_devices(TextSink &sink);

}  // namespace fw::cuda
