// SPDX-License-Identifier: Apache-2.0
// Instructions on one number, or on a pair of bf16, on sm_90a.
#pragma once
#include <stdint.h>

namespace fw::sm90 {

// 2^x; 0 below -126. Relative error at most 2^-22.
__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x; inf for 0 and for denormal x. At most 1 unit in the last place off.
__device__ __forceinline__ float one_over(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Of two pairs of bf16 the larger magnitudes, NaN if one is, and whether both of a pair of magnitudes are finite.
__device__ __forceinline__ uint32_t larger_pair(uint32_t magnitudes, uint32_t pair) {
  uint32_t larger;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(magnitudes), "r"(pair & 0x7fff7fffu));
  return larger;
}
__device__ __forceinline__ bool is_finite_pair(uint32_t magnitudes) {
  return (((magnitudes & 0x7fff7fffu) + 0x00800080u) & 0x80008000u) == 0;
}

// Keep the compiler from moving uses or values made of this number across this point.
__device__ __forceinline__ void hold(float &x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void hold(uint32_t &x) { asm volatile("" : "+r"(x)); }

}  // namespace fw::sm90
