// SPDX-License-Identifier: Apache-2.0
// What the sm_90a forward kernels share: the problem as kernels see it, where a chunk lies, and the workspace map.
// Sequence n owns the slots first_slot(n) + c, c = 0 .. ceil(len / 64) - 1, of one array per head: with a pack,
// first_slot = start / 64 + n, so no list of tiles has to be made and the host never reads cu_seqlens.
#pragma once
#include <stdint.h>

#include "ops/recurrence/sm90_forward.hpp"

namespace fw::sm90 {

constexpr int kChunk = kSm90Chunk;
constexpr int kKey = 128;
constexpr int kTileBytes = 64 * 128;    // 64 rows of 64 bf16, 128-byte swizzle
// Numbers that multiply tokens, laid out as a thread of a warpgroup product reads them: thread t = lane % 4 needs the
// tokens 8j + 2t, 8j + 2t + 1 of j = 0 .. 7 and gets them as four 16-byte loads (loads from shared memory take 30 clocks
// each while products run). A row of 16 is padded to 20 so that the four rows lie in different banks.
struct alignas(16) ByToken {
  float at[4][20];
  static __device__ __forceinline__ int row(int token) { return token % 8 / 2; }
  static __device__ __forceinline__ int column(int token) { return token / 8 * 2 + token % 2; }
};

// One a (head, slot). G is the gate summed inside the chunk, in base 2 and as two floats.
// q, k and x (the erase key) stand for 1 / length of their rows, or 1 without a norm inside.
struct alignas(16) Factors {
  ByToken beta;
  ByToken beta_decay;    // x_i beta_i exp(G_i), or of G_(i-1) where the erase reads before the decay
  ByToken scale_decay;   // q_i scale exp(G_i)
  ByToken rest;          // k_i exp(G_end - G_i)
  ByToken to_block_end;  // k_i exp(G_(last row of i's block of 16) - G_i)
  ByToken key;           // k_i
  float query[kChunk];   // q_i scale
  float2 gate[kChunk];   // G_i
  float all[4];          // exp(G_end)
};

// The same for a vector gate, whose decays are in the tiles. Thread t of a warpgroup product reads exp(G_end) of the keys
// 8j + 2t, 8j + 2t + 1 of j = 0 .. 15 as eight 16-byte loads.
struct alignas(16) VectorFactors {
  ByToken beta;
  float all[4][36];
};

// K and V up to 128: keys and values past them arrive as zeros and stay so.
struct Shape {
  int B, T, H, HV, N;
  int slots;  // per head
  int dense_chunks;
  const void *cu_seqlens;
  int cu_seqlens_64;
  int K = kKey, V = kKey;
};

struct Span {
  int batch, start, length, first_slot;
};

__device__ __forceinline__ int offset_of(const Shape &shape, int n) {
  const int64_t raw = shape.cu_seqlens_64 ? static_cast<const int64_t *>(shape.cu_seqlens)[n]
                                          : static_cast<const int32_t *>(shape.cu_seqlens)[n];
  return static_cast<int>(raw < 0 ? 0 : raw > shape.T ? shape.T : raw);
}

__device__ __forceinline__ Span span_of(const Shape &shape, int n) {
  if (!shape.cu_seqlens) return {n, 0, shape.T, n * shape.dense_chunks};
  const int start = offset_of(shape, n), end = offset_of(shape, n + 1);
  return {0, start, end > start ? end - start : 0, start / kChunk + n};
}

struct Chunk {
  int batch, start, rows;  // rows 0: the slot is empty
};

__device__ __forceinline__ Chunk chunk_of(const Shape &shape, int slot) {
  int n;
  if (!shape.cu_seqlens) {
    n = slot / shape.dense_chunks;
  } else {
    int low = 0, high = shape.N - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (offset_of(shape, middle) / kChunk + middle <= slot) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    n = low;
  }
  const Span span = span_of(shape, n);
  const int first = (slot - span.first_slot) * kChunk;
  const int left = first < 0 ? 0 : span.length - first;
  return {span.batch, span.start + first, left < 0 ? 0 : left > kChunk ? kChunk : left};
}

// Of every (head, slot), what the scan reads.
struct Tiles {
  unsigned char *solve;  // T as two images in the swizzled form, high and low parts
  Factors *factors;      // of no gate or a scalar gate
  // of a vector gate, images too:
  unsigned char *scores;   // scale * masked, gated q k^T
  unsigned char *x_start;  // the erase key times exp(G), two images of 64 keys
  unsigned char *q_start;  // scale * q exp(G)
  unsigned char *k_end;    // k exp(G_end - G)
  unsigned char *b_end;    // of independent erase keys, with which all these are what sm90_prep_independent.cu says
  VectorFactors *vector_factors;
  unsigned char *scores_low;  // what bf16 left of the scores; with a solve
  float *lengths;  // 1 / length of the rows of q and of k, [H, slots, 2, 64]; of a vector gate with a norm in a backward, else null
};

}  // namespace fw::sm90
