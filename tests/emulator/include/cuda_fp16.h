// SPDX-License-Identifier: Apache-2.0
// Stand-in: fp16 as 16 bits.
#pragma once
#include "core/tensor.hpp"
#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return fw::f16_to_f32(x.bits); }
inline __half __float2half_rn(float x) { return {fw::f32_to_f16(x)}; }
inline __half __float2half(float x) { return __float2half_rn(x); }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
