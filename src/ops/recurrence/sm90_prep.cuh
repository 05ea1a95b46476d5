// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "ops/recurrence/sm90_gates.cuh"

namespace fw::sm90 {

struct PrepArguments {
  CUtensorMap q, k, x, b;  // x: a separate erase key, or a; b: of independent erase keys
  const __nv_bfloat16 *q_rows, *k_rows;
  const __nv_bfloat16 *x_rows;  // p, or of a vector gate the erase gate
  Sm90Strides q_strides, k_strides, x_strides;
  bool has_l2norm, reads_before;  // a norm: g of a vector gate is fp32
  Sm90Activations activations;
  Shape shape;
  Tiles tiles;
  const void *g, *beta;
  Sm90Strides g_strides, beta_strides;
  Sm90Real g_type, beta_type;
  void *o;  // rows of no sequence are zeroed here
  Sm90Strides o_strides;
  int o_rows_left_over;
  float scale;
  bool for_backward;
};

// The prep of a backward never lets beta be smaller than this, so that V' can be divided by it; at or below, it counts as 0.
constexpr float kLeastBeta = 0x1p-40f;

// Rows of o that no sequence of a pack has, 64 a slot; 128 threads.
__device__ __forceinline__ void zero_rows_outside(const PrepArguments &in, int slot, int hv, int thread) {
  if (!in.o_rows_left_over) return;
  const int begin = offset_of(in.shape, 0), end = offset_of(in.shape, in.shape.N);
  const int row = slot * kChunk + thread / 2;
  if (row >= in.shape.T || (row >= begin && row < end)) return;
  uint4 *out = reinterpret_cast<uint4 *>(static_cast<__nv_bfloat16 *>(in.o) + row * in.o_strides.token +
                                         hv * in.o_strides.head) + thread % 2 * 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (thread % 2 * 64 + 8 * i < in.shape.V) out[i] = make_uint4(0, 0, 0, 0);
  }
}

// Vector gates of logits, or of 16 bits, as fp32 [B, T, HV, K].
cudaError_t launch_gate(const PrepArguments &, float *out, cudaStream_t);

cudaError_t launch_prep_vector(const PrepArguments &, Sm90Erase, cudaStream_t);

cudaError_t launch_prep_independent(const PrepArguments &, cudaStream_t);

cudaError_t launch_prep(const PrepArguments &, Sm90Gate, Sm90Erase, cudaStream_t);

}  // namespace fw::sm90
