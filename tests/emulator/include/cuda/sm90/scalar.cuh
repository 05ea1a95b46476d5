// SPDX-License-Identifier: Apache-2.0
// The emulator's file for src/cuda/sm90/scalar.cuh.
#pragma once
#include <cuda_runtime.h>

namespace fw::sm90 {

inline float power_of_two(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
inline float one_over(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(INFINITY, x) : 1.0f / x; }
inline uint32_t larger_pair(uint32_t magnitudes, uint32_t pair) {
  uint32_t larger = 0;
  for (uint32_t shift = 0; shift < 32; shift += 16) {  // as whole numbers: the exponent of inf and NaN is the largest
    const uint32_t a = magnitudes >> shift & 0xffff, b = pair >> shift & 0x7fff;
    larger |= (a > b ? a : b) << shift;
  }
  return larger;
}
inline bool is_finite_pair(uint32_t magnitudes) { return (((magnitudes & 0x7fff7fffu) + 0x00800080u) & 0x80008000u) == 0; }
inline void hold(float &) {}
inline void hold(uint32_t &) {}

}  // namespace fw::sm90
