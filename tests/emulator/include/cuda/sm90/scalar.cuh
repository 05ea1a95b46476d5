// SPDX-License-Identifier: Apache-2.0
// The emulator's file for src/cuda/sm90/scalar.cuh.
#pragma once
#include <cuda_runtime.h>

namespace fw::sm90 {

inline float power_of_two(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
inline float one_over(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(INFINITY, x) : 1.0f / x; }
inline void hold(float &) {}
inline void hold(uint32_t &) {}

}  // namespace fw::sm90
