// SPDX-License-Identifier: Apache-2.0
// Operands of the sm_90a kernels that are made inside: the log gate and beta from logits, the lengths of rows of q, k and p.
#pragma once
#include "cuda/activation.cuh"
#include "ops/recurrence/problem.hpp"
#include "ops/recurrence/sm90_gates.cuh"
#include "ops/recurrence/sm90_prep.cuh"

namespace fw::sm90 {

__device__ __forceinline__ cuda::GateSettings gate_settings(const Sm90Activations &act) {
  return {act.gate_kind, act.normalizer, act.lower_bound};
}
__device__ __forceinline__ cuda::GateSettings beta_settings(const Sm90Activations &act) {
  return {act.beta_kind == FW_BETA_INPUT_SIGMOID ? FW_GATE_KIND_BETA : FW_GATE_KIND_BETA_TWICE, 0, 0};
}
__device__ __forceinline__ float dt_bias_of(const Sm90Activations &act, int hv, int key) {
  return act.dt_bias ? act.dt_bias[hv * act.dt_bias_head + key * act.dt_bias_key] : 0.0f;
}
__device__ __forceinline__ float a_log_of(const Sm90Activations &act, int hv) { return act.a_log ? act.a_log[hv * act.a_log_head] : 0.0f; }

// Log gate of the logit x of head hv, of key `key` for a vector gate.
__device__ __forceinline__ float activated_gate(const Sm90Activations &act, float x, int hv, int key) {
  return cuda::activate_gate<float>(gate_settings(act), x, a_log_of(act, hv), dt_bias_of(act, hv, key));
}

// Scalar log gate of a token; without g that of retention or lightning, or 0.
__device__ __forceinline__ double load_gate(const PrepArguments &in, int64_t at, int hv) {
  const Sm90Activations &act = in.activations;
  if (!in.g) return act.fixed_op == 0 ? 0.0 : recurrence::fixed_gate(act.fixed_op, act.lightning_slope, hv);
  const float x = load_real(in.g, in.g_type, at);
  return act.gate_kind == FW_GATE_INPUT_LOG_DECAY ? x : activated_gate(act, x, hv, 0);
}

// 1 without beta.
__device__ __forceinline__ float load_beta(const PrepArguments &in, int64_t at) {
  if (!in.beta) return 1.0f;
  float beta = load_real(in.beta, in.beta_type, at);
  if (in.activations.beta_kind != FW_BETA_INPUT_PLAIN) beta = cuda::activate_gate<float>(beta_settings(in.activations), beta, 0, 0);
  return in.for_backward && fabsf(beta) < kLeastBeta ? copysignf(kLeastBeta, beta) : beta;
}

// store(row, 1 / length), eps 1e-6 inside the root, of the rows of a chunk of one head; 128 threads, eight rows at a time,
// 16 bytes a thread, whole lines a warp. Rows past the end get that of the last one.
template <class Store>
__device__ __forceinline__ void inverse_lengths(const __nv_bfloat16 *rows, const Sm90Strides &s, const Chunk &chunk, int head,
                                                int K, int thread, Store store) {
  const bool here = thread % 16 * 8 < K;
  const __nv_bfloat16 *first = rows + chunk.batch * s.batch + chunk.start * s.token + head * s.head + thread % 16 * 8;
  uint4 words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    words[i] = make_uint4(0, 0, 0, 0);
    if (here) words[i] = *reinterpret_cast<const uint4 *>(first + min(8 * i + thread / 16, chunk.rows - 1) * s.token);
  }
  float sums[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t pairs[4] = {words[i].x, words[i].y, words[i].z, words[i].w};
    sums[i] = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sums[i] = fmaf(low_bf16(pairs[e]), low_bf16(pairs[e]), sums[i]);
      sums[i] = fmaf(high_bf16(pairs[e]), high_bf16(pairs[e]), sums[i]);
    }
  }
  fold<4, 16>(sums, thread);
  fold<2, 16>(sums, thread);
  fold<1, 16>(sums, thread);  // lanes 2i and 2i + 1 of 16 have sums[i]
  const float sum = sums[0] + __shfl_xor_sync(0xffffffffu, sums[0], 1);
  if (thread % 2 == 0) store(thread % 16 / 2 * 8 + thread / 16, rsqrtf(sum + 1e-6f));
}

}  // namespace fw::sm90
