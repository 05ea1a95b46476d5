// SPDX-License-Identifier: Apache-2.0
// The backward's last kernel: what it is given, and the pieces that its kinds of gate share.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/product.cuh"
#include "ops/recurrence/sm90_kept.cuh"
#include "ops/recurrence/sm90_prep.cuh"

namespace fw::sm90 {

struct GradientArguments {
  CUtensorMap q, k, v, d_o;  // v: rows without an erase
  CUtensorMap dq_map, dk_map;
  Shape shape;
  Tiles tiles;
  Kept forward, reverse;  // V' and S at the chunks' starts; E and dS at their ends
  void *dq, *dk, *dv;     // bf16, or null
  Sm90Strides dq_strides, dk_strides, dv_strides;
  void *dg, *dbeta;  // of log gates and beta, for what they are made of see sm90_finish.cu; or null
  Sm90Strides dg_strides, dbeta_strides;
  Sm90Real dg_type, dbeta_type;
  bool has_l2norm;
  const void *g;  // log gates of a vector gate
  Sm90Strides g_strides;
  Sm90Real g_type;
  float *partial;  // vector gate, several value heads a query head: [slots, H, 2 (dq, dk), 64, 128], else null
  bool d_o_is_zero;
  float scale, inverse_scale;  // inverse_scale: 0 where it would not be finite
  // Vector gate of logits:
  const void *logits;  // or null
  Sm90Strides logits_strides;
  Sm90Real logits_type;
  Sm90Activations activations;
  float *gate_sums;        // see FinishArguments, or null
  bool has_gate_gradient;  // whether dg or gate_sums is wanted
};

// What is left of an operand that was made inside, after the gradients.
struct FinishArguments {
  Shape shape;
  Sm90Activations activations;
  // Scalar gate, beta: gradients of log gates and of beta [B, T, HV] fp32 or null, logits, and where their gradients go or null.
  const float *dg, *dbeta;
  const void *g, *beta;
  Sm90Real g_type, beta_type;
  Sm90Strides g_strides, beta_strides;
  void *to_g, *to_beta;
  Sm90Strides to_g_strides, to_beta_strides;
  float *gate_sums;  // [slots, HV, width]: of d_a_log, then of d_dt_bias; or null
  int width;         // 2, or 1 + K of a vector gate
  float *d_a_log, *d_dt_bias;
  int64_t d_a_log_head, d_dt_bias_head, d_dt_bias_key;
};


cudaError_t launch_gradients(const GradientArguments &, Sm90Gate, Sm90Erase, cudaStream_t);
cudaError_t launch_gradients_vector(const GradientArguments &, Sm90Erase, cudaStream_t);
cudaError_t launch_finish(const FinishArguments &, cudaStream_t);

// A chunk of a query/key head.
struct Item {
  int slot, h;
  Chunk chunk;
};

// Items of a CTA, without empty slots: f(item).
template <class F>
__device__ __forceinline__ void for_items(const GradientArguments &in, F f) {
  const int items = in.shape.slots * in.shape.H;
  for (int i = blockIdx.x; i < items; i += gridDim.x) {
    const Item item = {i / in.shape.H, i % in.shape.H, chunk_of(in.shape, i / in.shape.H)};
    if (item.chunk.rows > 0) f(item);
  }
}

__device__ __forceinline__ void store_real(void *base, Sm90Real type, int64_t index, float value) {
  if (type == Sm90Real::kFloat32) {
    static_cast<float *>(base)[index] = value;
  } else {
    static_cast<uint16_t *>(base)[index] = static_cast<uint16_t>(pack_bf16(value, 0.0f));
  }
}

__device__ __forceinline__ float at_token(const ByToken &x, int token) { return x.at[ByToken::row(token)][ByToken::column(token)]; }

// dbeta = E . V' / beta from the diagonal of E V'^T.
__device__ __forceinline__ void store_beta_gradient(const GradientArguments &in, const float (&d)[32], float beta0, float beta8,
                                                    const Chunk &chunk, int hv, int warp, int g, int t) {
  float upper = 0.0f, lower = 0.0f;  // elements (row, row) of rows 16 warp + g and + 8 are in the threads with t = g / 2
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i / 8 != warp || i % 2 != g % 2) continue;
    if (i % 8 < 2) upper = d[i];
    if (i % 8 >= 6) lower = d[i];
  }
  if (t != g / 2) return;
  const Sm90Strides &s = in.dbeta_strides;
  const int row = 16 * warp + g;
  const int64_t at = chunk.batch * s.batch + (chunk.start + row) * s.token + hv * s.head;
  if (row < chunk.rows) store_real(in.dbeta, in.dbeta_type, at, upper / beta0);
  if (row + 8 < chunk.rows) store_real(in.dbeta, in.dbeta_type, at + 8 * s.token, lower / beta8);
}

// The word of two bf16 at (row, 8 column + 2 t) of two images of 64 columns.
__device__ __forceinline__ uint32_t word_at(const unsigned char *tiles, int row, int column, int t) {
  return *reinterpret_cast<const uint32_t *>(tiles + column / 8 * kTileBytes + swizzled(row, column % 8 * 16 + 4 * t));
}

// Sums over the 128 columns of a 64x128 sum times two images: of rows 16 warp + g and + 8, the same in the four lanes of a row.
__device__ __forceinline__ float2 row_dots(const float (&p)[64], const unsigned char *tiles, int row, int t) {
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    if (j % 4 == 0) hold(sum);  // loads of all words at once do not fit in registers
    const uint32_t upper = word_at(tiles, row, j, t), lower = word_at(tiles, row + 8, j, t);
    sum[0] = fmaf(low_bf16(upper), p[4 * j], fmaf(high_bf16(upper), p[4 * j + 1], sum[0]));
    sum[1] = fmaf(low_bf16(lower), p[4 * j + 2], fmaf(high_bf16(lower), p[4 * j + 3], sum[1]));
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    sum[0] += __shfl_xor_sync(0xffffffffu, sum[0], step);
    sum[1] += __shfl_xor_sync(0xffffffffu, sum[1], step);
  }
  return make_float2(sum[0], sum[1]);
}

// Rows of sums leave through the norm of an operand: with x / |x| the sums are gradients over |x|, of which the part along x goes.
__device__ __forceinline__ void project_rows(float (&p)[64], const unsigned char *tiles, float inverse0, float inverse8, int row, int t) {
  const float2 along = row_dots(p, tiles, row, t);
  const float by0 = -along.x * inverse0 * inverse0, by8 = -along.y * inverse8 * inverse8;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
    const uint32_t upper = word_at(tiles, row, j, t), lower = word_at(tiles, row + 8, j, t);
    p[4 * j] = fmaf(by0, low_bf16(upper), p[4 * j]), p[4 * j + 1] = fmaf(by0, high_bf16(upper), p[4 * j + 1]);
    p[4 * j + 2] = fmaf(by8, low_bf16(lower), p[4 * j + 2]), p[4 * j + 3] = fmaf(by8, high_bf16(lower), p[4 * j + 3]);
  }
}

// d[tokens][keys] (+)= rows states^T over the 128 values: rows two images [tokens][64 values], states as Kept has them.
__device__ __forceinline__ void multiply_states(float (&d)[64], const unsigned char *rows, const unsigned char *states) {
  const uint64_t a = rows_along_sum(shared_address(rows)), b = rows_along_free(shared_address(states), kTileBytes);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    multiply_n128_free_shared(d, advance(a, step / 4 * kTileBytes + step % 4 * 32),
                              advance(b, step / 4 * 2 * kTileBytes + step % 4 * 2048), step > 0);
  }
}

// d[tokens][tokens] = a b^T over 128 columns of two images each.
__device__ __forceinline__ void multiply_rows_of(float (&d)[32], const unsigned char *left, const unsigned char *right) {
  const uint64_t a = rows_along_sum(shared_address(left)), b = rows_along_sum(shared_address(right));
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t offset = step / 4 * kTileBytes + step % 4 * 32;
    multiply_n64_shared(d, advance(a, offset), advance(b, offset), step > 0);
  }
}

// One warpgroup: 64x128 sums to rows of a bf16 tensor through two images. `barrier`: a named barrier of its own.
__device__ __forceinline__ void store_rows(const float (&d)[64], unsigned char *place, const CUtensorMap *map, void *out,
                                           const Sm90Strides &s, const Chunk &chunk, int head, int thread, int barrier) {
  if (!out) return;
  const int warp = thread / 32, lane = thread % 32, part = lane / 8, row = 16 * warp + 8 * (part & 1) + lane % 8;
  if (thread == 0) store_wait_read<0>();
  named_barrier(barrier, 128);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const float *x = d + 8 * step;
    store_tiles(shared_address(place) + step / 4 * kTileBytes + swizzled(row, step % 4 * 32 + (part >> 1) * 16),
                pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7]));
  }
  fence_async_shared();
  named_barrier(barrier, 128);
  if (chunk.rows == kChunk) {
    if (thread == 0) {
      for (int half = 0; half < 2; ++half) {
        store_box(map, shared_address(place) + half * kTileBytes, 64 * half, head, chunk.start, chunk.batch);
      }
      store_commit();
    }
  } else {
    __nv_bfloat16 *to = static_cast<__nv_bfloat16 *>(out) + chunk.batch * s.batch + chunk.start * s.token + head * s.head;
    for (int i = thread; i < chunk.rows * 16; i += 128) {
      *reinterpret_cast<uint4 *>(to + i / 16 * s.token + i % 16 * 8) =
          *reinterpret_cast<const uint4 *>(place + i % 16 / 8 * kTileBytes + swizzled(i / 16, i % 8 * 16));
    }
  }
}

// kThreads threads: dv = beta E, or E, of a chunk from two images; `beta` null without an erase.
template <int kThreads = 128>
__device__ __forceinline__ void store_value_gradient(const GradientArguments &in, const unsigned char *e, const ByToken *beta,
                                                     const Chunk &chunk, int hv, int thread) {
  if (!in.dv) return;
  const Sm90Strides &s = in.dv_strides;
  __nv_bfloat16 *to = static_cast<__nv_bfloat16 *>(in.dv) + chunk.batch * s.batch + chunk.start * s.token + hv * s.head;
#pragma unroll(kThreads == 128 ? 2 : 4)  // of 128 threads few: what code costs says sm90_gradients.md
  for (int i = thread; i < kChunk * 16; i += kThreads) {
    const int row = i / 16;
    uint4 four = *reinterpret_cast<const uint4 *>(e + i % 16 / 8 * kTileBytes + swizzled(row, i % 8 * 16));
    if (beta) {
      float by = beta->at[ByToken::row(row)][ByToken::column(row)];
      by = fabsf(by) <= kLeastBeta ? 0.0f : by;
      uint32_t *words = &four.x;
#pragma unroll
      for (int w = 0; w < 4; ++w) words[w] = pack_bf16(by * low_bf16(words[w]), by * high_bf16(words[w]));
    }
    if (row < chunk.rows) *reinterpret_cast<uint4 *>(to + row * s.token + i % 16 * 8) = four;
  }
}

// Sum of 16 elements of the state times its gradient as kept, with their dropped bits: those that a chain's thread has as elements
// 16 (part % 4) and on (see state_at), of half part / 4 of the values.
__device__ __forceinline__ float multiply_kept_part(const unsigned char *states, const unsigned char *d_states, const uint4 &dropped,
                                                    const uint4 &d_dropped, int part, int thread) {
  const int row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
  const uint32_t rest[4] = {dropped.x, dropped.y, dropped.z, dropped.w};
  const uint32_t d_rest[4] = {d_dropped.x, d_dropped.y, d_dropped.z, d_dropped.w};
  float sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int e = 0; e < 16; e += 2) {
    const int column = part % 2 * 4 + e / 4;
    const uint32_t a = word_at(states + part / 2 * kTileBytes, row + (e & 2) * 4, column, t);
    const uint32_t b = word_at(d_states + part / 2 * kTileBytes, row + (e & 2) * 4, column, t);
    sum[0] = fmaf(with_dropped(a, rest[e / 4], e % 4), with_dropped(b, d_rest[e / 4], e % 4), sum[0]);
    sum[1] = fmaf(with_dropped(a, rest[e / 4], e % 4 + 1), with_dropped(b, d_rest[e / 4], e % 4 + 1), sum[1]);
  }
  return sum[0] + sum[1];
}

// Rows of two images from `from` on become 0, by kThreads threads.
template <int kThreads>
__device__ __forceinline__ void zero_tile_rows(unsigned char *tiles, int from, int thread) {
#pragma unroll 1
  for (int i = thread; i < (kChunk - from) * 16; i += kThreads) {
    *reinterpret_cast<uint4 *>(tiles + i % 2 * kTileBytes + (from + i / 16) * 128 + i % 16 / 2 * 16) = make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void arrive_warp(uint64_t *barrier, int lane) {
  __syncwarp();
  barrier_arrive_if(shared_address(barrier), lane == 0);
}

// Sums over the warp's 16 rows m of d[m][i] with m >= i, to one float a column i.
__device__ __forceinline__ void sum_columns(const float (&d)[32], float *to, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, row0 = 16 * warp + g, row8 = row0 + 8;
  float c[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int column = i / 2 * 8 + 2 * t + i % 2, at = i / 2 * 4 + i % 2;
    c[i] = (row0 >= column ? d[at] : 0.0f) + (row8 >= column ? d[at + 2] : 0.0f);
  }
  // Lanes of the same columns share them out: after each step half as many sums, of twice as many rows.
#pragma unroll
  for (int count = 8; count >= 2; count /= 2) {
    const bool upper = lane & 2 * count;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float keep = upper ? c[count + i] : c[i], give = upper ? c[i] : c[count + i];
      c[i] = keep + __shfl_xor_sync(0xffffffffu, give, 2 * count);
    }
  }
  *reinterpret_cast<float2 *>(to + 8 * g + 2 * t) = make_float2(c[0], c[1]);
}

// d[tokens][keys] += scores keys, and with the scores turned.
__device__ __forceinline__ void add_scores(float (&d)[64], const unsigned char *scores, const unsigned char *keys) {
  const uint64_t a = rows_along_sum(shared_address(scores)), b = rows_along_free(shared_address(keys), kTileBytes);
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply_n128_free_shared(d, advance(a, step * 32), advance(b, step * 2048), 1);
}
__device__ __forceinline__ void add_turned_scores(float (&d)[64], const unsigned char *scores, const unsigned char *keys) {
  const uint64_t a = rows_along_free(shared_address(scores), kTileBytes), b = rows_along_free(shared_address(keys), kTileBytes);
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply_n128_free_turned(d, advance(a, step * 2048), advance(b, step * 2048), 1);
}

}  // namespace fw::sm90
