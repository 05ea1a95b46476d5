// SPDX-License-Identifier: Apache-2.0
// Stand-in: fp16 as the compiler's own type holds it.
#pragma once
#include "cuda_runtime.h"

struct __half {
  uint16_t bits;
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half x) {
  _Float16 value;
  memcpy(&value, &x, 2);
  return static_cast<float>(value);
}
inline __half __float2half_rn(float x) {
  const _Float16 value = static_cast<_Float16>(x);
  __half half;
  memcpy(&half, &value, 2);
  return half;
}
inline __half __float2half(float x) { return __float2half_rn(x); }
inline uint16_t __half_as_ushort(__half x) { return x.bits; }
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
