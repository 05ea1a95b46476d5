// SPDX-License-Identifier: Apache-2.0
// Sequences, inputs and parameters of the short convolution as its CUDA kernels read them. Compiled by nvcc only.
#pragma once
#include "cuda/activation.cuh"
#include "cuda/rows.cuh"
#include "ops/short_conv/problem.hpp"

namespace fw::short_conv {

// A sequence as the device sees it; n < 0: none.
struct Rows {
  int64_t n, batch, begin, end, slot;
};
__device__ inline Rows rows_of(const Problem &p, int64_t n) {
  const cuda::DeviceSegment s = cuda::device_segment(p.cu_seqlens, p.T, n);
  int64_t slot = n;
  if (p.direction == FW_STEP) {
    if (given(p.state_indices)) slot = load_int(p.state_indices, n);
    if (slot >= p.state.shape[0]) slot = -1;
  }
  return {n, s.batch, s.begin, s.end, slot};
}
__device__ inline Rows rows_around(const Problem &p, int64_t batch, int64_t row) {
  const int64_t n = cuda::sequence_of_row(p.cu_seqlens, p.N, p.T, batch, row);
  return n < 0 ? Rows{-1, batch, row, p.T, -1} : rows_of(p, n);
}

__device__ inline cuda::Row channels(const fw_tensor &t, int64_t batch, int64_t row) {
  return cuda::row_at(t, batch * t.strides[0] + row * t.strides[1], t.strides[2]);
}
__device__ inline float state_at(const fw_tensor &t, int64_t slot, int64_t d, int64_t i) {
  return given(t) ? cuda::load_element(t.data, t.dtype, slot * t.strides[0] + d * t.strides[1] + i * t.strides[2])
                  : 0.0f;
}
__device__ inline float weight_at(const Problem &p, int64_t d, int64_t tap) {
  return cuda::load_element(p.weight.data, p.weight.dtype, d * p.weight.strides[0] + tap * p.weight.strides[1]);
}
__device__ inline float bias_at(const Problem &p, int64_t d) {
  return given(p.bias) ? cuda::load_element(p.bias.data, p.bias.dtype, d * p.bias.strides[0]) : 0.0f;
}

// Inputs of four channels at a position of the sequence, at least -(W - 1).
__device__ __noinline__ inline float4 load_input(const Problem &p, const Rows &s, int64_t position, int64_t d) {
  float x[4];
  if (position >= 0) {
    cuda::load_quad(channels(p.x, s.batch, s.begin + position), d, p.D, x);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      x[j] = d + j < p.D ? state_at(p.initial_state, s.slot, d + j, p.W - 1 + position) : 0.0f;
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}
__device__ inline void load_input(const Problem &p, const Rows &s, int64_t position, int64_t d, float (&x)[4]) {
  const float4 quad = load_input(p, s, position, d);
  x[0] = quad.x, x[1] = quad.y, x[2] = quad.z, x[3] = quad.w;
}

}  // namespace fw::short_conv
