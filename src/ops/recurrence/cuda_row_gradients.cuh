// SPDX-License-Identifier: Apache-2.0
// What a pair of rows sends back in the reverse of a chunk; of the portable kernels and of those of the chunk form.
#pragma once
#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

// What a later row i sends back to an earlier key, met as `key` D_{j+1:i-1}; see reverse_pair in cpu_reverse.isa.cpp.
template <fw_gate kGate, bool kErases, bool kAfter>
__device__ inline float reverse_pair(float key, float decay, float q, float x, float d_qk, float d_xk, float d_key, float *d_q,
                                     float *d_x, float *d_g) {
  const float decayed = kGate == FW_GATE_NONE ? key : key * decay;
  float back = fmaf(d_qk, q, d_key);
  *d_q = fmaf(d_qk, decayed, *d_q);
  if constexpr (kErases && kAfter) {
    back = fmaf(d_xk, x, back);
    *d_x = fmaf(d_xk, decayed, *d_x);
  }
  if constexpr (kGate != FW_GATE_NONE) {
    *d_g = fmaf(decayed, back, *d_g);
    back *= decay;
  }
  if constexpr (kErases && !kAfter) {
    back = fmaf(d_xk, x, back);
    *d_x = fmaf(d_xk, key, *d_x);
  }
  return back;
}

}  // namespace fw::recurrence
