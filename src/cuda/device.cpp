// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.hpp"

#if defined(FW_HAVE_CUDA)

#include <cuda_runtime.h>
#include <stdlib.h>

#include <atomic>

namespace fw::cuda {
namespace {

constexpr int kDevices = 64;  // of more the facts are asked at every call

// One fact of each device, asked once in the life of the process; 0 where it does not answer. `known` has it plus one, 0: not asked.
template <cudaDeviceAttr kWhat>
int32_t fact(int device) {
  static std::atomic<int32_t> known[kDevices] = {};
  if (device < kDevices) {
    const int32_t found = known[device].load(std::memory_order_relaxed);
    if (found > 0) return found - 1;
  }
  int value = 0;
  if (cudaDeviceGetAttribute(&value, kWhat, device) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  if (device < kDevices) known[device].store(value + 1, std::memory_order_relaxed);
  return value;
}

// The current device's number, or false with the reason. A device that has answered is not looked for again.
bool current_device(int *device, Reason &reason) {
  cudaError_t error = cudaGetDevice(device);
  if (error == cudaSuccess && fact<cudaDevAttrComputeCapabilityMajor>(*device) > 0) return true;
  int count = 0;
  if (error == cudaSuccess) error = cudaGetDeviceCount(&count);
  if (error == cudaSuccess && count > 0) return true;
  (void)cudaGetLastError();
  if (error == cudaSuccess) return reason.refuse("this machine has no CUDA device");
  return reason.refuse("CUDA does not start here: %s", cudaGetErrorString(error));
}

bool capability(int *device, int *major, int *minor, Reason &reason) {
  if (!current_device(device, reason)) return false;
  *major = fact<cudaDevAttrComputeCapabilityMajor>(*device);
  *minor = fact<cudaDevAttrComputeCapabilityMinor>(*device);
  if (*major > 0) return true;
  return reason.refuse("device %d does not answer: %s", *device, cudaGetErrorString(cudaGetLastError()));
}

// Of the current device; 0 when it does not answer.
template <cudaDeviceAttr kWhat>
int32_t attribute() {
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) return fact<kWhat>(device);
  (void)cudaGetLastError();
  return 0;
}

// Addresses that were memory of a device, by the thread that asked: asking CUDA takes longer than all else that is checked.
struct Passed {
  const void *data;
  int device;
};
constexpr size_t kPassed = 64;
thread_local Passed t_passed[kPassed];

Passed &passed(const void *data) {
  const uintptr_t bits = reinterpret_cast<uintptr_t>(data);
  return t_passed[(bits >> 4 ^ bits >> 9 ^ bits >> 15) % kPassed];
}

}  // namespace

bool is_available(int32_t major, int32_t minor, Reason &reason) {
  int device, found_major, found_minor;
  if (!capability(&device, &found_major, &found_minor, reason)) return false;
  if (found_major > major || (found_major == major && found_minor >= minor)) return true;
  return reason.refuse("device %d has compute capability %d.%d, this needs %d.%d", device, found_major, found_minor, major,
                       minor);
}

bool is_exactly(int32_t major, int32_t minor, Reason &reason) {
  int device, found_major, found_minor;
  if (!capability(&device, &found_major, &found_minor, reason)) return false;
  if (found_major == major && found_minor == minor) return true;
  return reason.refuse("device %d has compute capability %d.%d, this runs on %d.%d only", device, found_major, found_minor,
                       major, minor);
}

int32_t multiprocessor_count() {
  const int32_t count = attribute<cudaDevAttrMultiProcessorCount>();
  return count > 0 ? count : 1;
}
bool launches_overlap() { return attribute<cudaDevAttrComputeCapabilityMajor>() >= 9; }
int32_t shared_memory_limit() { return attribute<cudaDevAttrMaxSharedMemoryPerBlockOptin>(); }

fw_status check_memory(const char *op, const char *name, const void *data) {
  int device = 0;
  cudaPointerAttributes found = {};
  Passed &before = passed(data);
  const bool answers = cudaGetDevice(&device) == cudaSuccess;
  if (answers && before.data == data && before.device == device && data != nullptr) return FW_OK;
  if (!answers || cudaPointerGetAttributes(&found, data) != cudaSuccess) {
    return fail(FW_DEVICE_ERROR, "%s: CUDA does not answer: %s", op, cudaGetErrorString(cudaGetLastError()));
  }
  if (found.type == cudaMemoryTypeUnregistered) {
    return fail(FW_INVALID_ARGUMENT, "%s: %s is memory of the host, expected memory of CUDA device %d", op, name, device);
  }
  if (found.type == cudaMemoryTypeDevice && found.device != device) {
    return fail(FW_INVALID_ARGUMENT, "%s: %s is memory of CUDA device %d, expected the current device, %d", op, name,
                found.device, device);
  }
  if (found.type == cudaMemoryTypeDevice) before = {data, device};
  return FW_OK;
}

fw_status check_memory(const char *op, const char *name, const fw_tensor &t) {
  return given(t) && numel(t) > 0 ? check_memory(op, name, t.data) : FW_OK;
}

HostCopy::~HostCopy() { free(memory_); }

fw_status HostCopy::fetch(const char *op, const char *name, void *stream, fw_tensor *t) {
  if (!given(*t) || numel(*t) == 0) return FW_OK;
  FW_TRY(check_memory(op, name, *t));
  int64_t low = 0, high = 0;  // elements before and after the first one
  for (int32_t i = 0; i < t->ndim; ++i) {
    const int64_t reach = (t->shape[i] - 1) * t->strides[i];
    (reach < 0 ? low : high) += reach;
  }
  const int64_t size = dtype_size(t->dtype);
  const size_t bytes = static_cast<size_t>((high - low + 1) * size);
  memory_ = malloc(bytes);
  if (!memory_) return fail(FW_OUT_OF_MEMORY, "%s: no memory for %zu bytes of %s", op, bytes, name);
  const cudaStream_t ordered = static_cast<cudaStream_t>(stream);
  const char *from = static_cast<const char *>(t->data) + low * size;
  if (cudaMemcpyAsync(memory_, from, bytes, cudaMemcpyDeviceToHost, ordered) != cudaSuccess ||
      cudaStreamSynchronize(ordered) != cudaSuccess) {
    return fail(FW_DEVICE_ERROR, "%s: %s could not be read: %s", op, name, cudaGetErrorString(cudaGetLastError()));
  }
  t->data = static_cast<char *>(memory_) - low * size;
  return FW_OK;
}

fw_status check_launches(const char *op, const char *impl) { return check_launch(op, impl, cudaGetLastError()); }

fw_status check_launch(const char *op, const char *impl, int status) {
  const cudaError_t error = static_cast<cudaError_t>(status);
  if (error == cudaSuccess) return FW_OK;
  return fail(FW_DEVICE_ERROR, "%s: CUDA refused a launch or had failed before: %s (%s)", op, cudaGetErrorString(error), impl);
}

void describe_devices(TextSink &sink) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    (void)cudaGetLastError();
    sink.add("none (%s)\n", cudaGetErrorString(error));
    return;
  }
  if (count == 0) sink.add("none\n");
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties = {};
    if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) continue;
    sink.add("%s, compute capability %d.%d, %d multiprocessors\n", properties.name, properties.major, properties.minor,
             properties.multiProcessorCount);
  }
}

}  // namespace fw::cuda

#else

namespace fw::cuda {

bool is_available(int32_t, int32_t, Reason &reason) { return reason.refuse("this library is built without CUDA"); }
bool is_exactly(int32_t, int32_t, Reason &reason) { return reason.refuse("this library is built without CUDA"); }
int32_t multiprocessor_count() { return 1; }
bool launches_overlap() { return false; }
int32_t shared_memory_limit() { return 0; }
fw_status check_memory(const char *op, const char *, const void *) {
  return fail(FW_UNSUPPORTED, "%s: this library is built without CUDA", op);
}
fw_status check_memory(const char *op, const char *name, const fw_tensor &) {
  return check_memory(op, name, static_cast<const void *>(nullptr));
}
HostCopy::~HostCopy() {}
fw_status HostCopy::fetch(const char *op, const char *name, void *, fw_tensor *t) { return check_memory(op, name, *t); }
fw_status check_launch(const char *op, const char *impl, int) { return check_launches(op, impl); }
fw_status check_launches(const char *op, const char *) {
  return fail(FW_UNSUPPORTED, "%s: this library is built without CUDA", op);
}
void describe_devices(TextSink &sink) { sink.add("none (this library is built without CUDA)\n"); }

}  // namespace fw::cuda

#endif
