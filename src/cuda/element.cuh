// SPDX-License-Identifier: Apache-2.0
// Elements of a caller's tensor on the device: any type of the interface, any stride, in fp32. Compiled by nvcc only.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/tensor.hpp"

namespace fw::cuda {

// `offset` counts elements. The type is the same for a whole launch, so the branches do not diverge.
__device__ inline float load_element(const void *data, fw_dtype dtype, int64_t offset) {
  switch (dtype) {
    case FW_F32: return static_cast<const float *>(data)[offset];
    case FW_BF16: return __bfloat162float(static_cast<const __nv_bfloat16 *>(data)[offset]);
    default: return __half2float(static_cast<const __half *>(data)[offset]);
  }
}

// To nearest even; past fp16's 65504 becomes inf, as IEEE 754 says.
__device__ inline void store_element(void *data, fw_dtype dtype, int64_t offset, float x) {
  switch (dtype) {
    case FW_F32: static_cast<float *>(data)[offset] = x; break;
    case FW_BF16: static_cast<__nv_bfloat16 *>(data)[offset] = __float2bfloat16_rn(x); break;
    default: static_cast<__half *>(data)[offset] = __float2half_rn(x); break;
  }
}

// Rows [begin, end) of sequence n of a call. Offsets of the caller are clamped to [0, tokens], so that wrong ones lead to wrong
// numbers and never outside the tensors.
struct DeviceSegment {
  int64_t batch, begin, end;
};
__device__ inline int64_t clamped_offset(const fw_tensor &cu, int64_t i, int64_t tokens) {
  const int64_t at = load_int(cu, i);
  return at < 0 ? 0 : at > tokens ? tokens : at;
}
__device__ inline DeviceSegment device_segment(const fw_tensor &cu, int64_t tokens, int64_t n) {
  if (!given(cu)) return {n, 0, tokens};
  const int64_t begin = clamped_offset(cu, n, tokens), end = clamped_offset(cu, n + 1, tokens);
  return {0, begin, end < begin ? begin : end};
}

// The sum over the 32 lanes of a warp, in every lane.
__device__ inline float warp_sum(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}
__device__ inline double warp_sum(double x) {
  for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
  return x;
}

}  // namespace fw::cuda
