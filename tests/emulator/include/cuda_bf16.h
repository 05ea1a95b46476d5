// SPDX-License-Identifier: Apache-2.0
// Stand-in: bfloat16 as 16 bits.
#pragma once
#include "core/tensor.hpp"
#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
inline float __bfloat162float(__nv_bfloat16 x) { return fw::bf16_to_f32(x.bits); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return {fw::f32_to_bf16(x)}; }
inline __nv_bfloat16 __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
inline uint16_t __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(uint16_t bits) { return {bits}; }
