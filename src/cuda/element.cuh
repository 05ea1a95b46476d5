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

// An element as it lies in memory; `offset` counts elements. Numbers that are asked for as bits before any is made a float wait for
// memory once, together: with the conversion behind each load the decode kernel waited for its operands one after the other.
__device__ inline uint32_t load_bits(const void *data, fw_dtype dtype, int64_t offset) {
  return dtype == FW_F32 ? static_cast<const uint32_t *>(data)[offset] : static_cast<const uint16_t *>(data)[offset];
}
__device__ inline float from_bits(uint32_t bits, fw_dtype dtype) {
  const float half = to_float(__ushort_as_half(static_cast<uint16_t>(bits)));
  return dtype == FW_F32 ? __uint_as_float(bits) : dtype == FW_BF16 ? __uint_as_float(bits << 16) : half;
}
__device__ inline float load_element(const void *data, fw_dtype dtype, int64_t offset) {
  return from_bits(load_bits(data, dtype, offset), dtype);
}
__device__ inline void store_element(void *data, fw_dtype dtype, int64_t offset, float x) {
  switch (dtype) {
    case FW_F32: static_cast<float *>(data)[offset] = x; break;
    case FW_BF16: from_float(x, static_cast<__nv_bfloat16 *>(data) + offset); break;
    default: from_float(x, static_cast<__half *>(data) + offset); break;
  }
}

// e^x, within 0.54 of a unit in the last place: expf's two would add up where a factor is the same for every token.
__device__ inline float exp_rounded(float x) {
  const float bounded = x < -110.0f ? -110.0f : x > 100.0f ? 100.0f : x;  // NaN stays
  const float n = rintf(bounded * 1.44269504f);
  const float high = fmaf(n, -0.693359375f, bounded), low = n * 2.12194440e-4f;  // ln 2 = 0.693359375 - 2.1219444e-4
  const float r = high + low, rest = (high - r) + low;
  float q = fmaf(r, 1.0f / 5040, 1.0f / 720);
  q = fmaf(q, r, 1.0f / 120), q = fmaf(q, r, 1.0f / 24), q = fmaf(q, r, 1.0f / 6), q = fmaf(q, r, 0.5f);
  const float sum = 1.0f + r, carry = r - (sum - 1.0f);
  return ldexpf(sum + (carry + fmaf(q, r * r, rest)), static_cast<int>(n));
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
