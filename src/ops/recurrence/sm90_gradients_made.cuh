// SPDX-License-Identifier: Apache-2.0
// Part of the backward's last kernel for a vector gate (sm90_gradients_vector.cu): gradients leave through what operands were made
// of, the norm of q and k and the activation of gate logits.
#pragma once
#include "ops/recurrence/sm90_gradients_flow.cuh"
#include "ops/recurrence/sm90_operands.cuh"

namespace fw::sm90 {

// Where a lane's rows of the 8x8 tiles of a block lie in q and k.
__device__ __forceinline__ uint32_t block_corner(int warp, int block, int lane) {
  const int part = lane / 8;
  return warp / 4 * kTileBytes + swizzled(16 * block + 8 * (part >> 1) + lane % 8, 32 * (warp % 4) + 16 * (part & 1));
}

// ---- the norm

// dq and dk of a block wait in the places of sums that are used up until the rows' products with them are known, of which the warp
// leaves its keys' part.
__device__ __forceinline__ void keep_gradients(VectorGradientShared &shared, const Block &of, Sums &sums, int block, const Lane &lane) {
  float along[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 2 half + row % 2
    const int first = i / 2 * 4 + i % 2;
    along[i] = fmaf(of.q[first], of.dq[first], of.q[first + 2] * of.dq[first + 2]);
    along[4 + i] = fmaf(of.k[first], of.dk[first], of.k[first + 2] * of.dk[first + 2]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) sums.of_q[8 * block + i] = of.dq[i], sums.of_keys[8 * block + i] = of.dk[i];
  fold<4>(along, lane.lane);
  fold<2>(along, lane.lane);
  fold<1>(along, lane.lane);  // lane (g, t) has along[g]
  shared.along[lane.g / 4][16 * block + lane.g / 2 % 2 * 8 + 2 * lane.t + lane.g % 2][lane.warp] = along[0];
}

// Thread (which, row) of 128: x . d / |x| over |x|^2, d the gradient over the normed row.
__device__ __forceinline__ void add_along(VectorGradientShared &shared, int thread) {
  const int which = thread / kChunk, row = thread % kChunk;
  const float4 *parts = reinterpret_cast<const float4 *>(shared.along[which][row]);
  const float4 a = parts[0], b = parts[1];
  const float inverse = shared.lengths[which][row];
  shared.along_all[which][row] = inverse * inverse * (((a.x + a.y) + (a.z + a.w)) + ((b.x + b.y) + (b.z + b.w)));
}

// d of a block of q or k leaves through the norm: (d - y (y . d)) / |x| with y = x / |x|.
__device__ __forceinline__ void project_block(VectorGradientShared &shared, unsigned char *tiles, const float *d, int which, int block,
                                              const Lane &lane) {
  const uint32_t at = shared_address(tiles) + block_corner(lane.warp, block, lane.lane);
  uint32_t words[4];
  float x[8], inverse[4], along[4];
  load_tiles_transposed(words, at);
  unpack_tile(x, words);
  read_rows(inverse, shared.lengths[which], block, lane.t);
  read_rows(along, shared.along_all[which], block, lane.t);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = fmaf(-along[i / 4 * 2 + i % 2], x[i], inverse[i / 4 * 2 + i % 2] * d[i]);
  pack_tile(words, x);
  store_tiles_transposed(at, words[0], words[1], words[2], words[3]);
}

// ---- gates

// dg of the pairs whose decays the thread has put there.
template <bool kWide>
__device__ __forceinline__ void store_gate_gradient(const GradientArguments &in, const VectorGradientShared &shared,
                                                    const Chunk &chunk, int hv, int pair, int block) {
  const Sm90Strides &s = in.dg_strides;
  const int64_t at = chunk.batch * s.batch + (chunk.start + 16 * block) * s.token + hv * s.head + 2 * pair;
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const float2 d = *reinterpret_cast<const float2 *>(shared.decay + (16 * block + r) * kDecayPitch + 2 * pair);
    if (16 * block + r >= chunk.rows) continue;
    if (kWide) {
      *reinterpret_cast<float2 *>(static_cast<float *>(in.dg) + at + r * s.token) = d;
    } else {
      *reinterpret_cast<uint32_t *>(static_cast<__nv_bfloat16 *>(in.dg) + at + r * s.token) = pack_bf16(d.x, d.y);
    }
  }
}

// The thread's pairs of a step's logits on their way: of 16 bits to shared memory (copy_words_wait), of 32, for which that has no room, to
// the second-level cache.
__device__ __forceinline__ void fetch_logits(const GradientArguments &in, VectorGradientShared &shared, const Step &step, int pair, int block) {
  const Sm90Strides &s = in.logits_strides;
  const int64_t at = step.chunk.batch * s.batch + (step.chunk.start + 16 * block) * s.token + step.value_head * s.head + 2 * pair;
  const int rows = min(step.chunk.rows - 16 * block, 16);
  if (in.logits_type == Sm90Real::kFloat32) {
    if (pair % 16 != 0) return;
    const float *from = static_cast<const float *>(in.logits) + at;
    for (int r = 0; r < rows; ++r, from += s.token) prefetch_line(from);
  } else {
    const __nv_bfloat16 *from = static_cast<const __nv_bfloat16 *>(in.logits) + at;
    uint32_t to = shared_address(&shared.logits[16 * block][pair]);
#pragma unroll
    for (int r = 0; r < 16; ++r, from += s.token, to += sizeof shared.logits[0]) {
      if (r < rows) copy_word(to, from);
    }
  }
}

// dg through the activation of logits, and the thread's parts of the sums of a slot.
template <bool kWide>
__device__ __forceinline__ void store_logit_gradient(const GradientArguments &in, VectorGradientShared &shared, const Step &step,
                                                     int pair, int block) {
  constexpr int kBytes = kWide ? 4 : 2;
  const int rows = min(step.chunk.rows - 16 * block, 16), hv = step.value_head;
  const auto place = [&](const Sm90Strides &s) {
    return kBytes * (step.chunk.batch * s.batch + (step.chunk.start + 16 * block) * s.token + hv * s.head + 2 * pair);
  };
  const float rate = expf(a_log_of(in.activations, hv));
  const float bias[2] = {dt_bias_of(in.activations, hv, 2 * pair), dt_bias_of(in.activations, hv, 2 * pair + 1)};
  float of_rate = 0.0f, of_bias[2] = {0.0f, 0.0f};
  if (!kWide) copy_words_wait();
  cuda::for_gate_kind(gate_settings(in.activations), [&](const cuda::GateSettings &settings) {
    const char *logit = static_cast<const char *>(in.logits) + place(in.logits_strides);
    char *to = static_cast<char *>(in.dg) + place(in.dg_strides);
    const float *from = shared.decay + 16 * block * kDecayPitch + 2 * pair;
    const uint32_t *word = &shared.logits[16 * block][pair];
#pragma unroll 4
    for (int r = 0; r < rows; ++r) {
      const float2 x = kWide ? *reinterpret_cast<const float2 *>(logit) : make_float2(low_bf16(*word), high_bf16(*word));
      const float2 d = *reinterpret_cast<const float2 *>(from);
      const cuda::GateGradient low = cuda::activate_gate_gradient_at<float>(settings, x.x, rate, bias[0], d.x);
      const cuda::GateGradient high = cuda::activate_gate_gradient_at<float>(settings, x.y, rate, bias[1], d.y);
      of_rate += low.da_log + high.da_log;
      of_bias[0] += low.dx, of_bias[1] += high.dx;
      if (in.dg && kWide) *reinterpret_cast<float2 *>(to) = make_float2(low.dx, high.dx);
      if (in.dg && !kWide) *reinterpret_cast<uint32_t *>(to) = pack_bf16(low.dx, high.dx);
      logit += in.logits_strides.token * kBytes, to += in.dg_strides.token * kBytes, from += kDecayPitch, word += kKey / 2;
    }
  });
  if (!in.gate_sums) return;
#pragma unroll
  for (int lanes = 16; lanes; lanes /= 2) of_rate += __shfl_xor_sync(0xffffffffu, of_rate, lanes);
  *reinterpret_cast<float2 *>(shared.gate_sums[block] + 2 * pair) = make_float2(of_bias[0], of_bias[1]);
  if (pair % 32 == 0) shared.rate_sums[2 * block + pair / 32] = of_rate;
}

// Sums of a slot to global memory.
__device__ __forceinline__ void store_gate_sums(const GradientArguments &in, const VectorGradientShared &shared, const Step &step, int thread) {
  if (thread > kKey) return;
  float *to = in.gate_sums + (static_cast<int64_t>(step.slot) * in.shape.HV + step.value_head) * (1 + kKey);
  float sum = 0.0f;
  if (thread < kKey) {
    for (int block = 0; block < 4; ++block) sum += shared.gate_sums[block][thread];
    to[1 + thread] = sum;
  } else {
    for (int i = 0; i < 8; ++i) sum += shared.rate_sums[i];
    to[0] = sum;
  }
}

// All threads: dg of a value head, as it leaves.
template <bool kWide, bool kNormed>
__device__ __forceinline__ void store_gates(const GradientArguments &in, VectorGradientShared &shared, const Step &step, int thread) {
  const int pair = thread % 64, block = thread / 64;
  if (kWide && in.logits) {
    if (in.logits_type == Sm90Real::kFloat32) {
      store_logit_gradient<true>(in, shared, step, pair, block);
    } else {
      store_logit_gradient<false>(in, shared, step, pair, block);
    }
    if (!in.gate_sums) return;
    __syncthreads();
    store_gate_sums(in, shared, step, thread);
  } else if (in.dg && kNormed && in.dg_type == Sm90Real::kBfloat16) {
    store_gate_gradient<false>(in, shared, step.chunk, step.value_head, pair, block);
  } else if (in.dg) {
    store_gate_gradient<kWide>(in, shared, step.chunk, step.value_head, pair, block);
  }
}

}  // namespace fw::sm90
