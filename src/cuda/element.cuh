// SPDX-License-Identifier: Apache-2.0
// Elements of a caller's tensor on the device: any type of the interface, any stride, in fp32. Compiled by nvcc only.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/tensor.hpp"

namespace fw::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }

// To nearest even; past fp16's 65504 becomes inf, as IEEE 754 says.
__device__ inline void from_float(float x, float *to) { *to = x; }
__device__ inline void from_float(float x, __nv_bfloat16 *to) { *to = __float2bfloat16_rn(x); }
__device__ inline void from_float(float x, __half *to) { *to = __float2half_rn(x); }

// f(data as a pointer to its type). The type is the same for a whole launch, so the branches do not diverge.
template <class F>
__device__ inline void with_type(void *data, fw_dtype dtype, F f) {
  if (dtype == FW_F32) {
    f(static_cast<float *>(data));
  } else if (dtype == FW_BF16) {
    f(static_cast<__nv_bfloat16 *>(data));
  } else {
    f(static_cast<__half *>(data));
  }
}

// `offset` counts elements.
__device__ inline float load_element(const void *data, fw_dtype dtype, int64_t offset) {
  switch (dtype) {
    case FW_F32: return static_cast<const float *>(data)[offset];
    case FW_BF16: return to_float(static_cast<const __nv_bfloat16 *>(data)[offset]);
    default: return to_float(static_cast<const __half *>(data)[offset]);
  }
}
__device__ inline void store_element(void *data, fw_dtype dtype, int64_t offset, float x) {
  switch (dtype) {
    case FW_F32: static_cast<float *>(data)[offset] = x; break;
    case FW_BF16: from_float(x, static_cast<__nv_bfloat16 *>(data) + offset); break;
    default: from_float(x, static_cast<__half *>(data) + offset); break;
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
