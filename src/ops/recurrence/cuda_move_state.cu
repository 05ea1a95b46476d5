// SPDX-License-Identifier: Apache-2.0
// Import and export of the opaque state on CUDA: one thread an element of [slot, head, k, padded v].
#include "cuda/device.hpp"
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "ops/recurrence/cuda_paths.hpp"
#include "ops/recurrence/cuda_rows.cuh"

namespace fw::recurrence {
namespace {

__global__ void __launch_bounds__(kThreads) move_state(const __grid_constant__ Problem p, const __grid_constant__ fw_tensor plain,
                                                       fw_state_layout layout, bool is_import) {
  const int64_t width = pad_to(p.V, kStatePad), count = p.state.shape[0] * p.HV * p.K * width;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x; i < count; i += stride) {
    const int64_t v = i % width, k = i / width % p.K, hv = i / width / p.K % p.HV, slot = i / width / p.K / p.HV;
    const int64_t inside = slot * p.state.strides[0] + hv * p.state.strides[1] + (k * width + v) * p.state.strides[2];
    if (v >= p.V) {
      if (is_import) store_at(p.state, inside, 0.0f);
      continue;
    }
    const int64_t outside = state_offset(plain, layout, slot, hv, k, v);
    if (is_import) {
      store_at(p.state, inside, load_at(plain, outside));
    } else {
      store_at(plain, outside, load_at(p.state, inside));
    }
  }
}

}  // namespace

fw_status cuda_move_state(const Problem &p, const fw_tensor &plain, fw_state_layout layout, bool is_import) {
  FW_TRY(cuda::check_memory(p.op_name, "state", p.state));
  FW_TRY(cuda::check_memory(p.op_name, "plain", plain));
  const int64_t count = p.state.shape[0] * p.HV * p.K * pad_to(p.V, kStatePad);
  if (count > 0) {
    cuda::launch({cuda::grid_of(count, kThreads), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, move_state, p, plain, layout, is_import);
  }
  return cuda::check_launches(p.op_name, "cuda_portable");
}

}  // namespace fw::recurrence
