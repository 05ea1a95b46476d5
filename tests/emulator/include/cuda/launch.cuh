// SPDX-License-Identifier: Apache-2.0
// The emulator's file for src/cuda/launch.cuh: a launch runs the kernel at once, or when the graph runs that it is captured for.
#pragma once
#include <cuda_runtime.h>

namespace fw::cuda {

struct Launch {
  dim3 grid;
  uint32_t threads;
  int64_t shared_bytes;
  cudaStream_t stream;
  uint32_t cluster = 1;
  bool overlaps = false;
};

template <class... Parameters, class... Arguments>
cudaError_t launch(const Launch &how, void (*kernel)(Parameters...), const Arguments &...arguments) {
  const emulator::Launched launched = {__PRETTY_FUNCTION__, {how.grid.x, how.grid.y, how.grid.z}, how.threads,
                                       static_cast<size_t>(how.shared_bytes), how.cluster};
  const auto body = [kernel, ... values = arguments] { kernel(static_cast<Parameters>(values)...); };
  const auto work = [launched, body] { emulator::run(launched, body); };
  if (!emulator::is_captured(how.stream, work)) work();
  return cudaSuccess;
}

template <class T>
T *dynamic_shared() {
  return reinterpret_cast<T *>(emulator::dynamic_shared());
}

}  // namespace fw::cuda
