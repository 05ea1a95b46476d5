// SPDX-License-Identifier: Apache-2.0
// Parts of the gradients of a vector gate: decays of two keys of 16 rows a thread, as products of exp(g) <= 1, in fp32 (what
// sm90_scores.cuh says of them), and where rows lie in swizzled tiles. 256 threads: thread (pair, block).
// The caller's struct Sides: kBounded, rows, total(b) (the thread's decay over block b), left(at, r, through, before) and
// right(at, r, decay, apart), which put row r of either side to `at` of its tiles.
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

}  // namespace fw::sm90
