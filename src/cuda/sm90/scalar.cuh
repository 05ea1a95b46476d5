// SPDX-License-Identifier: Apache-2.0
// Instructions on one number on sm_90a.
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

// Keep the compiler from moving uses or values made of this number across this point.
__device__ __forceinline__ void hold(float &x) { asm volatile("" : "+f"(x)); }
__device__ __forceinline__ void hold(uint32_t &x) { asm volatile("" : "+r"(x)); }

}  // namespace fw::sm90
