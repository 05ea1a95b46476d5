// SPDX-License-Identifier: Apache-2.0
// The reverse of rows, of a chunk in any form: what comes in as d_o, what a pair of rows sends back, what leaves of v. Shared by the
// portable kernels.
#pragma once
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_rows.cuh"

namespace fw::recurrence {

// d_o of the rows times scale, through the normaliser's division, to [rows][pitch]; one warp a row.
__device__ __noinline__ inline void load_d_o(const Problem &p, const Panels &l, const RowRange &r, int32_t panel, const float *divisors,
                                             float scale, float *to, int pitch) {
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < r.rows; i += kWarps) {
    const TokenPlace place = place_of(p, r.first + i);
    const int64_t token = place.token, first = static_cast<int64_t>(panel) * l.width();
    const bool is_read = given(p.d_o) && place.sub == p.n_sub - 1;
    const float divisor = divisors ? divisors[(r.batch * p.T + token) * p.H + r.h] : 1.0f;
    const int64_t offset = is_read ? head_offset(p.d_o, r.batch, token, r.hv) : 0;
    for (int c = threadIdx.x % 32; c < pitch; c += 32) {
      const bool is_there = is_read && c < l.width() && first + c < p.V;
      to[i * pitch + c] = is_there ? load_at(p.d_o, offset + (first + c) * p.d_o.strides[3]) / divisor * scale : 0.0f;
    }
  }
}

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

// dv, d_write_gate, and what v' gives of dbeta, from d_u [rows][pitch]; one of `warps` warps a row.
template <fw_erase kErase>
__device__ __noinline__ inline void store_values(const Problem &p, const Panels &l, const RowRange &r, int32_t panel, const float *d_u, int pitch,
                                                 int warp, int warps, int64_t first_out, const RowGradients &out) {
#pragma unroll 1
  for (int i = warp; i < r.rows; i += warps) {
    const int64_t row = r.first + i, token = place_of(p, row).token, first = static_cast<int64_t>(panel) * l.width();
    const float beta = kIsShared<kErase> ? load_beta(p, r.batch, row, r.hv) : 1.0f;
    const bool has_gate = kIsShared<kErase> && given(p.write_gate);
    const int64_t from = head_offset(p.v, r.batch, row, r.hv), to = head_offset(p.dv, r.batch, row, r.hv);
    const int64_t gate = head_offset(p.write_gate, r.batch, token, r.hv);
    float sum = 0;
    for (int c = threadIdx.x % 32; c < l.width() && first + c < p.V; c += 32) {
      const float d = d_u[i * pitch + c], v = load_at(p.v, from + (first + c) * p.v.strides[3]);
      const float g = has_gate ? load_at(p.write_gate, gate + (first + c) * p.write_gate.strides[3]) : 1.0f;
      sum = fmaf(d, v * g, sum);
      if (given(p.dv)) store_at(p.dv, to + (first + c) * p.dv.strides[3], d * beta * g);
      if (has_gate && given(p.d_write_gate)) {
        store_at(p.d_write_gate, head_offset(p.d_write_gate, r.batch, token, r.hv) + (first + c) * p.d_write_gate.strides[3], d * beta * v);
      }
    }
    sum = cuda::warp_sum(sum);
    if (out.d_beta && threadIdx.x % 32 == 0) out.d_beta[first_out + i * p.HV] = sum;
  }
}

}  // namespace fw::recurrence
