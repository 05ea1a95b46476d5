// SPDX-License-Identifier: Apache-2.0
// Scores of one chunk with a decay for every key; parts of the preps of a vector gate and of independent erase keys.
// The decay between two rows is a product of exp(g) <= 1 over the rows between them, in fp32: no exponential of a sum, no
// difference of sums, any g from -infinity, one exponential for each element. Scores are formed in two ways.
//   Between 16-row blocks, and inside them when no bound of g is declared: (i, j), j < i, belongs to level l, the highest
//   bit in which i and j differ. With b the row between them whose lower l bits are 0, the score is the product of
//   x_i (rows b .. i) and k_j (rows j + 1 .. b - 1): both decays are at most 1 and past rows alone decide.
//   Inside them when g >= -5.3 is declared (kBounded): x_i (rows first .. i) and k_j / (rows first .. j), at most e^80.
// 256 threads: thread (pair, block) has the decays of two keys of 16 rows in registers. Inside blocks: kBounded one phase,
// else levels 0 to 3, in which a row with bit l set is a left side, else a right side. Between blocks (levels 4 and 5): one
// phase. A phase: both sides to tiles in shared memory; warps 0-3 the products of the erase keys, warps 4-7 those of the
// queries, 16 rows each, mma m16n8k16. __syncthreads before and after a phase's products.
//
// What the sides are made of and where products go is the caller's, as a struct Sides:
//   kBounded, kRights (right sides a left side meets), rows (Rows), forget(), total(b) (the thread's decay over block b)
//   left(at, r, through, before)   row r of both left sides to `at` of their tiles; decays that reach through row r, or
//                                  stop before it
//   right(at, r, decay, apart)     of all right sides, to the left sides' tiles (a level has other rows there) or to theirs
//   wants(queries), left_tile(queries), right_tile(n, apart), store(n, queries, row, column, value)
#pragma once
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/scalar.cuh"
#include "ops/recurrence/sm90_gates.cuh"
#include "ops/recurrence/sm90_prep.cuh"

namespace fw::sm90 {

// kNormed: rows of q and k are divided by their lengths. kWide: g is fp32.
template <Sm90Erase kEraseIn, bool kNormedIn, bool kWideIn, bool kBoundedIn>
struct Kind {
  static constexpr Sm90Erase kErase = kEraseIn;
  static constexpr bool kSolve = kErase != Sm90Erase::kNone, kSeparate = kErase == Sm90Erase::kSeparate;
  static constexpr bool kNormed = kNormedIn, kWide = kWideIn, kBounded = kBoundedIn;
};

// Of two keys of the 16 rows of a thread.
struct Rows {
  float2 decay[16];
  uint32_t byte[8];  // where they lie in rows r % 8 of a pair of swizzled images
};

__device__ __forceinline__ float2 times(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }

template <bool kNormed>
__device__ __forceinline__ float2 unpacked(uint32_t pair) {
  return kNormed ? make_float2(low_f16(pair), high_f16(pair)) : make_float2(low_bf16(pair), high_bf16(pair));
}

// A pair of bf16, or of fp16 once divided by lengths, times `by`, as bf16.
template <bool kNormed>
__device__ __forceinline__ uint32_t scaled(uint32_t pair, float2 by) {
  const float2 x = times(unpacked<kNormed>(pair), by);
  return pack_bf16(x.x, x.y);
}

// Row r of the thread in a pair of swizzled images; `block` may be another's.
__device__ __forceinline__ uint32_t place(const Rows &rows, int block, int r) {
  return block * 2048 + r * 128 + rows.byte[r % 8];
}

__device__ __forceinline__ void put(unsigned char *tile, uint32_t at, uint32_t value) {
  *reinterpret_cast<uint32_t *>(tile + at) = value;
}

// A score to an image; kLow: what bf16 left to the image behind it.
template <bool kLow>
__device__ __forceinline__ void put_score(unsigned char *image, int row, int column, float value) {
  const uint32_t at = swizzled(row, 2 * column);
  const __nv_bfloat16 high = __float2bfloat16_rn(value);
  *reinterpret_cast<__nv_bfloat16 *>(image + at) = high;
  if (kLow) *reinterpret_cast<__nv_bfloat16 *>(image + kTileBytes + at) = __float2bfloat16_rn(value - __bfloat162float(high));
}

// ---- loads

__device__ __forceinline__ void place_rows(Rows &rows, int pair) {
#pragma unroll
  for (int i = 0; i < 8; ++i) rows.byte[i] = pair / 32 * kTileBytes + ((pair % 32 * 4) ^ (i << 4));
}

// The gates as they are stored, to `decay`; make_decays goes on.
template <class Is, class Arguments>
__device__ __forceinline__ void load_gates(const Arguments &in, const Chunk &chunk, int hv, int pair, int block, Rows &rows) {
  constexpr int kBytes = Is::kWide ? 4 : 2;
  const int key = min(2 * pair, in.shape.K - 2);  // keys past the end have a decay as well; what it multiplies is 0
  const int64_t at = chunk.batch * in.g_strides.batch + chunk.start * in.g_strides.token + hv * in.g_strides.head + key;
  const char *first = static_cast<const char *>(in.g) + at * kBytes;
  const uint32_t step = static_cast<uint32_t>(kBytes * in.g_strides.token);  // 32 bits for 64 rows: the host refuses longer strides
#pragma unroll
  for (int r = 0; r < 16; ++r) {  // rows past the end read the chunk's last row
    const uint32_t row = min(16 * block + r, chunk.rows - 1);
    if constexpr (Is::kWide) {
      rows.decay[r] = *reinterpret_cast<const float2 *>(first + uint64_t{row} * step);
    } else {
      rows.decay[r].x = __uint_as_float(*reinterpret_cast<const uint32_t *>(first + uint64_t{row} * step));
    }
  }
}

// exp(g); 1 in rows past the end.
template <class Is>
__device__ __forceinline__ void make_decays(const Chunk &chunk, int block, Rows &rows) {
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const uint32_t narrow = __float_as_uint(rows.decay[r].x);
    const float2 gate = Is::kWide ? rows.decay[r] : make_float2(low_bf16(narrow), high_bf16(narrow));
    const bool here = r < chunk.rows - 16 * block;
    rows.decay[r].x = here ? power_of_two(gate.x * kLog2e) : 1.0f;
    rows.decay[r].y = here ? power_of_two(gate.y * kLog2e) : 1.0f;
  }
}

template <int kHalf>
__device__ __forceinline__ void fold(float (&v)[16], int lane) {
  const bool upper = lane & (2 * kHalf);
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = upper ? v[i] : v[i + kHalf], keep = upper ? v[i + kHalf] : v[i];
    v[i] = keep + __shfl_xor_sync(0xffffffffu, send, 2 * kHalf);
  }
}

// Sums over a warp's 64 keys of products of rows: lanes 2r and 2r + 1 get row r.
template <bool kNormed>
__device__ __forceinline__ float sum_products(const uint32_t (&a)[16], const uint32_t (&b)[16], int lane) {
  float v[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const float2 x = unpacked<kNormed>(a[r]), y = unpacked<kNormed>(b[r]);
    v[r] = x.x * y.x + x.y * y.y;
  }
  fold<8>(v, lane);
  fold<4>(v, lane);
  fold<2>(v, lane);
  fold<1>(v, lane);
  return v[0] + __shfl_xor_sync(0xffffffffu, v[0], 1);
}

// Rows of q and k (a pair of 16 rows each thread) divided by their lengths, eps 1e-6 inside the root; bf16 becomes fp16,
// whose eleven bits leave the one rounding to bf16 that tiles and images make. lengths: squared, of q and of k, each half of
// the keys. The whole block takes part.
__device__ __forceinline__ void normalize(uint32_t (&q)[16], uint32_t (&k)[16], float2 (&lengths)[2][kChunk], int thread) {
  const int lane = thread % 32, half = thread / 32 % 2, block = thread / 64;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const uint32_t (&x)[16] = which == 0 ? q : k;
    const float sum = sum_products<false>(x, x, lane);
    if (lane % 2 == 0) (&lengths[which][16 * block + lane / 2].x)[half] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    uint32_t (&x)[16] = which == 0 ? q : k;
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const float2 squared = lengths[which][16 * block + r];
      const float by = rsqrtf(squared.x + squared.y + 1e-6f);
      x[r] = pack_f16(by * low_bf16(x[r]), by * high_bf16(x[r]));
    }
  }
}

// ---- phases

// Both sides of a level inside the thread's 16 rows.
template <int kLevel, class Sides>
__device__ __forceinline__ void store_level(Sides &sides, int block) {
  constexpr int kSpan = 1 << kLevel;
  const Rows &rows = sides.rows;
#pragma unroll
  for (int first = 0; first < 16; first += kSpan) {
    float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      if ((first >> kLevel) & 1) {
        const int r = first + i;
        const float2 before = decay;
        decay = times(decay, rows.decay[r]);
        sides.left(place(rows, block, r), r, decay, before);
      } else {
        const int r = first + kSpan - 1 - i;
        sides.right(place(rows, block, r), r, decay, false);
        decay = times(decay, rows.decay[r]);
      }
    }
  }
}

// 1 / x, at most e^80; that is reached only by gates below the declared bound.
__device__ __forceinline__ float reciprocal(float x) { return fminf(one_over(x), 6e34f); }

// Both sides of the products inside a block of gates with a declared bound.
template <class Sides>
__device__ __forceinline__ void store_bounded(Sides &sides, int block) {
  const Rows &rows = sides.rows;
  float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const float2 before = decay;
    decay = times(decay, rows.decay[r]);
    sides.left(place(rows, block, r), r, decay, before);
    sides.right(place(rows, block, r), r, make_float2(reciprocal(decay.x), reciprocal(decay.y)), true);
  }
}

// Both sides of the products between blocks. Left sides from the block's start in the block's rows of their tiles
// (kBounded: they are there), block 3 from the start of block 2 in the rows of block 0; right sides to the block's end in
// the block's rows of theirs, block 0 to the end of block 1 in the rows of block 3.
template <class Sides>
__device__ __forceinline__ void store_blocks(Sides &sides, int block) {
  const Rows &rows = sides.rows;
  if (block == 3 || (!Sides::kBounded && block > 0)) {
    const float2 more = sides.total(2);
    float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const float2 before = decay;
      decay = times(decay, rows.decay[r]);
      if (!Sides::kBounded) sides.left(place(rows, block, r), r, decay, before);
      if (block == 3) sides.left(place(rows, 0, r), r, times(decay, more), times(before, more));
    }
  }
  if (block < 3) {
    const float2 more = sides.total(1);
    float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int r = 15; r >= 0; --r) {
      sides.right(place(rows, block, r), r, decay, true);
      if (block == 0) sides.right(place(rows, 3, r), r, times(decay, more), true);
      decay = times(decay, rows.decay[r]);
    }
  }
}

// acc[16x16] = rows [16 left_block, + 16) of `left` times rows [16 right_block, + 16) of `right`, over the 128 keys.
__device__ __forceinline__ void multiply_rows(float (&acc)[2][4], uint32_t left, uint32_t right, int left_block,
                                              int right_block, int lane) {
  const int part = lane / 8;
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t corner = step / 4 * kTileBytes, byte = step % 4 * 32;
    uint32_t a[4], b[4];
    load_tiles(a, left + corner + swizzled(16 * left_block + 8 * (part & 1) + lane % 8, byte + (part >> 1) * 16));
    load_tiles(b, right + corner + swizzled(16 * right_block + 8 * (part >> 1) + lane % 8, byte + (part & 1) * 16));
    multiply_bf16(acc[0], a, b[0], b[1]);
    multiply_bf16(acc[1], a, b[2], b[3]);
  }
}

// The products of block (row_block, column_block) that `belongs`; the sides lie in rows of left_block and right_block.
template <class Sides, class Belongs>
__device__ __forceinline__ void score_block(Sides &sides, bool queries, bool apart, int left_block, int right_block,
                                            int row_block, int column_block, int lane, Belongs belongs) {
#pragma unroll
  for (int n = 0; n < Sides::kRights; ++n) {
    float acc[2][4];
    multiply_rows(acc, sides.left_tile(queries), sides.right_tile(n, apart), left_block, right_block, lane);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const int i = lane / 4 + e % 4 / 2 * 8, j = e / 4 * 8 + lane % 4 * 2 + e % 2;
      if (belongs(i, j)) sides.store(n, queries, 16 * row_block + i, 16 * column_block + j, acc[e / 4][e % 4]);
    }
  }
}

template <int kLevel, class Sides>
__device__ __forceinline__ void run_level(Sides &sides, int thread) {
  const int lane = thread % 32, block = thread / 32 % 4;
  const bool queries = thread >= 128;
  sides.forget();
  store_level<kLevel>(sides, thread / 64);
  __syncthreads();
  if (sides.wants(queries)) {
    score_block(sides, queries, false, block, block, block, block, lane,
                [](int i, int j) { return i > j && ((i >> kLevel) ^ (j >> kLevel)) == 1; });
  }
  __syncthreads();
}

// All phases but, without a bound, the diagonal.
template <class Sides>
__device__ __forceinline__ void run_phases(Sides &sides, int thread) {
  const int lane = thread % 32, block = thread / 32 % 4;
  const bool queries = thread >= 128;
  if constexpr (Sides::kBounded) {
    sides.forget();
    store_bounded(sides, thread / 64);
    __syncthreads();
    if (sides.wants(queries)) {
      const int least = queries ? 0 : 1;
      score_block(sides, queries, true, block, block, block, block, lane, [least](int i, int j) { return i >= j + least; });
    }
    __syncthreads();
  } else {
    run_level<0>(sides, thread);
    run_level<1>(sides, thread);
    run_level<2>(sides, thread);
    run_level<3>(sides, thread);
  }
  sides.forget();
  store_blocks(sides, thread / 64);
  __syncthreads();
  if (sides.wants(queries)) {
    for (int b = 0; b < block; ++b) {
      const bool far = (b ^ block) >= 2;
      score_block(sides, queries, true, far && block == 3 ? 0 : block, far && b == 0 ? 3 : b, block, b, lane,
                  [](int, int) { return true; });
    }
  }
  __syncthreads();
}

}  // namespace fw::sm90
