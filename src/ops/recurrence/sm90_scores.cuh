// SPDX-License-Identifier: Apache-2.0
// Scores of one chunk with a decay for every key; parts of the preps of a vector gate and of independent erase keys.
// The decay between two rows is a product of exp(g) <= 1 over the rows between them, in fp32: no exponential of a sum, no
// difference of sums, any g from -infinity, one exponential for each element. 512 threads: thread (pair, group) has two keys
// of 8 rows in registers. All scores come from one phase of tiles in shared memory and products (mma m16n8k16):
//   Between 16-row blocks: x_i (rows b .. i) and k_j (rows j + 1 .. b - 1) for a boundary b between them: both decays are at
//   most 1 and past rows alone decide. Neighbours meet at the start of the later one, the others at the start of block 2.
//   Inside a block: x_i (rows first .. i) and k_j / (rows first .. j).
// The quotients need the decay over the block to be at least kLeast and themselves to be finite. A chunk in which that fails
// anywhere is seen while its tiles are made; then the scores of those rows of a block from which on it fails are made again
// (what later rows hold does not matter to a row's bits), level by level: (i, j), j < i, belongs to level l, the highest bit
// in which i and j differ, and with b the row between them whose lower l bits are 0 the score is the product of x_i (rows
// b .. i) and k_j (rows j + 1 .. b - 1). The diagonal has no decay.
//
// What the sides are made of and where products go is the caller's, as a struct Sides:
//   kRights (right sides a left side meets), kErases (whether scores of the erase key are wanted), rows, forget()
//   total(g)                        the thread's decay over group g
//   left(r, through, before)        row r of both left sides to their tiles; decays that reach through row r, or stop before it
//   left_far(r, through, before)    of block 3, with decays from the start of block 2, to 16 rows apart
//   inside(r, inverse)              row r of all right sides to the tiles for products inside a block; returns the largest
//   between(r, decay, to)           the same to the tiles for products between blocks, `to` bytes further
//   mixed(r, decay)                 the same to the left sides' tiles (a level has other rows there)
//   plain(r)                        q and all right sides as they are, where left and inside put them
//   lefts(queries), lefts_far(queries), insides(n), betweens(n), mixeds(n)   addresses of the tiles
//   store(n, queries, row_block, column_block, acc, lane)     the scores of a 16x16 block; on the diagonal j < i (queries: j <= i)
//   store_one(n, queries, row, column, value)
#pragma once
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/scalar.cuh"
#include "ops/recurrence/sm90_gates.cuh"
#include "ops/recurrence/sm90_inverse.cuh"
#include "ops/recurrence/sm90_prep.cuh"

namespace fw::sm90 {

constexpr int kEach = 8, kGroups = kChunk / kEach, kPrepThreads = kGroups * kKey / 2;  // rows of a thread
// The smallest decay inside a block that is divided by. A left side is q times such a decay in bf16: with 2^-58 only |q| below 2^-68 loses digits there (with
// 2^-116 a q of 1e-5 lost 4 % at gates of -5), and a right side overflows for |k| above 2^69 only, which is seen.
constexpr float kLeast = 0x1p-58f;

// The chunk and head of a CTA; heads are the grid's fastest index.
struct PrepTile {
  int slot, hv, h;
  Chunk chunk;
};
inline dim3 prep_grid(const Shape &shape) {
  constexpr int kMost = 32768;
  return dim3(shape.HV, shape.slots < kMost ? shape.slots : kMost, (shape.slots + kMost - 1) / kMost);
}
__device__ __forceinline__ PrepTile tile_at(const Shape &shape, int slot, int hv) {
  PrepTile tile = {slot, hv, hv, {}};
  if (shape.HV != shape.H) tile.h = static_cast<uint32_t>(hv) / (static_cast<uint32_t>(shape.HV) / static_cast<uint32_t>(shape.H));
  if (slot >= shape.slots) return tile;
  if (shape.B == 1 && !shape.cu_seqlens) {  // what chunk_of says too, without its divisions
    tile.chunk = {0, slot * kChunk, min(shape.T - slot * kChunk, kChunk)};
  } else {
    tile.chunk = chunk_of(shape, slot);
  }
  return tile;
}
__device__ __forceinline__ PrepTile prep_tile(const Shape &shape) {
  return tile_at(shape, static_cast<int>(blockIdx.y + gridDim.y * blockIdx.z), static_cast<int>(blockIdx.x));
}

// Of two keys of the 8 rows of a thread.
struct Rows {
  float2 decay[kEach];
  uint32_t first;  // address of row 0 in a tile at the start of shared memory

  __device__ __forceinline__ uint32_t at(int r) const { return (first ^ (r << 4)) + r * 128; }
};

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

__device__ __forceinline__ void place_rows(Rows &rows, uint32_t shared, int pair, int group) {
  rows.first = shared + pair / 32 * kTileBytes + group * (kEach * 128) + pair % 32 * 4;
}

// ---- loads

// exp(g); 1 in rows past the end. Returns their product.
template <bool kWide>
__device__ __forceinline__ float2 make_decays(const Chunk &chunk, int group, Rows &rows) {
  float2 all = make_float2(1.0f, 1.0f);
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const uint32_t narrow = __float_as_uint(rows.decay[r].x);
    const float2 gate = kWide ? rows.decay[r] : make_float2(low_bf16(narrow), high_bf16(narrow));
    rows.decay[r] = make_float2(power_of_two(gate.x * kLog2e), power_of_two(gate.y * kLog2e));
  }
  if (chunk.rows < kChunk) {
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      if (kEach * group + r >= chunk.rows) rows.decay[r] = make_float2(1.0f, 1.0f);
    }
  }
#pragma unroll
  for (int r = 0; r < kEach; ++r) all = times(all, rows.decay[r]);
  return all;
}

// 1 / length of the squared length of a row, in two parts.
__device__ __forceinline__ float inverse_length(float2 squared) { return rsqrtf(squared.x + squared.y + 1e-6f); }

// Rows of q and k (a pair of 8 rows each thread) divided by their lengths, eps 1e-6 inside the root; bf16 becomes fp16,
// whose eleven bits leave the one rounding to bf16 that tiles and images make. lengths: squared, of q and of k, each half of
// the keys. The whole block takes part.
__device__ __forceinline__ void normalize(uint32_t (&q)[kEach], uint32_t (&k)[kEach], float2 (&lengths)[2][kChunk], int thread) {
  const int lane = thread % 32, half = thread / 32 % 2, group = thread / 64;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    const uint32_t (&x)[kEach] = which == 0 ? q : k;
    float v[kEach];
#pragma unroll
    for (int r = 0; r < kEach; ++r) v[r] = low_bf16(x[r]) * low_bf16(x[r]) + high_bf16(x[r]) * high_bf16(x[r]);
    fold<4>(v, lane);
    fold<2>(v, lane);
    fold<1>(v, lane);  // lanes 4r .. 4r + 3 have row r
    v[0] += __shfl_xor_sync(0xffffffffu, v[0], 2);
    v[0] += __shfl_xor_sync(0xffffffffu, v[0], 1);
    if (lane % 4 == 0) (&lengths[which][kEach * group + lane / 4].x)[half] = v[0];
  }
  __syncthreads();
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    uint32_t (&x)[kEach] = which == 0 ? q : k;
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const float by = inverse_length(lengths[which][kEach * group + r]);
      x[r] = pack_f16(by * low_bf16(x[r]), by * high_bf16(x[r]));
    }
  }
}

// The decays from the chunk's start to the thread's group, and from its end to the chunk's. A warp is of one group.
template <class Sides>
__device__ __forceinline__ void totals_around(const Sides &sides, int group, float2 &before, float2 &after) {
  before = after = make_float2(1.0f, 1.0f);
#pragma unroll
  for (int here = 0; here < kGroups; ++here) {
    if (here != group) continue;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      if (g < here) before = times(before, sides.total(g));
      if (g > here) after = times(after, sides.total(g));
    }
  }
}

// ---- tiles

// All tiles of the phase; returns whether the products inside the thread's block can not be had from them.
template <class Sides>
__device__ __forceinline__ bool store_sides(Sides &sides, int group) {
  const Rows &rows = sides.rows;
  const float2 one = make_float2(1.0f, 1.0f);
  const int block = group / 2, half = group % 2;
  float2 decay = half ? sides.total(group - 1) : one;
  uint32_t largest = 0;
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const float2 before = decay;
    decay = times(decay, rows.decay[r]);
    sides.left(r, decay, before);
    largest = larger_pair(largest, sides.inside(r, make_float2(one_over(decay.x), one_over(decay.y))));
  }
  const bool fails = !(decay.x >= kLeast && decay.y >= kLeast) || !is_finite_pair(largest);
  sides.forget();
  if (block == 3) {
    float2 far = times(sides.total(4), sides.total(5));
    if (half) far = times(far, sides.total(6));
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const float2 before = far;
      far = times(far, rows.decay[r]);
      sides.left_far(r, far, before);
    }
  } else {
    float2 after = half ? one : sides.total(group + 1);
#pragma unroll
    for (int r = kEach - 1; r >= 0; --r) {
      sides.between(r, after, 0);
      after = times(after, rows.decay[r]);
    }
    if (block == 0) {
      sides.forget();
      after = times(sides.total(2), sides.total(3));
      if (!half) after = times(after, sides.total(1));
#pragma unroll
      for (int r = kEach - 1; r >= 0; --r) {
        sides.between(r, after, 3 * 2048);
        after = times(after, rows.decay[r]);
      }
    }
  }
  sides.forget();
  return fails;
}

// ---- products

// acc[16x16] = 16 rows at `left` times 16 rows at `right`, over the 128 keys; halves of the keys lie `left_half` bytes and a
// tile apart. Both places are multiples of eight rows.
__device__ __forceinline__ void multiply_rows(float (&acc)[2][4], uint32_t left, uint32_t left_half, uint32_t right, int lane) {
  const int part = lane / 8;
  const uint32_t left_row = left + (8 * (part & 1) + lane % 8) * 128, right_row = right + (8 * (part >> 1) + lane % 8) * 128;
#pragma unroll
  for (int i = 0; i < 8; ++i) acc[i / 4][i % 4] = 0.0f;
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    const uint32_t byte = step % 4 * 32, turn = lane % 8 << 4;
    uint32_t a[4], b[4];
    load_tiles(a, left_row + step / 4 * left_half + ((byte + (part >> 1) * 16) ^ turn));
    load_tiles(b, right_row + step / 4 * kTileBytes + ((byte + (part & 1) * 16) ^ turn));
    multiply_bf16(acc[0], a, b[0], b[1]);
    multiply_bf16(acc[1], a, b[2], b[3]);
  }
}

// The 10 blocks of the scores of one left side: 0 to 3 the diagonal, 4 to 6 the neighbours, then (2, 0), (3, 0), (3, 1).
template <class Sides>
__device__ __forceinline__ void score_block(Sides &sides, bool queries, int task, int lane) {
  const auto digit = [task](uint64_t digits) { return static_cast<int>(digits >> 4 * task) & 3; };
  const int row_block = digit(0x3323213210), column_block = digit(0x1002103210), right_block = digit(0x1332103210);
  const bool is_far = task >= 8;
  const uint32_t left = is_far ? sides.lefts_far(queries) : sides.lefts(queries) + row_block * 2048;
  const uint32_t half = is_far ? Sides::kFarHalf : kTileBytes;
#pragma unroll
  for (int n = 0; n < Sides::kRights; ++n) {
    float acc[2][4];
    multiply_rows(acc, left, half, (task < 4 ? sides.insides(n) : sides.betweens(n)) + right_block * 2048, lane);
    if (task < 4) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int i = lane / 4 + e % 4 / 2 * 8, j = e / 4 * 8 + lane % 4 * 2 + e % 2;
        if (j >= i + queries) acc[e / 4][e % 4] = 0.0f;
      }
    }
    sides.store(n, queries, row_block, column_block, acc, lane);
  }
}

// All of them by 16 warps.
template <class Sides>
__device__ __forceinline__ void score_all(Sides &sides, int warp, int lane) {
  constexpr int kTasks = Sides::kErases ? 20 : 10;  // those of the erase key first
  for (int task = warp; task < kTasks; task += kPrepThreads / 32) {
    const bool queries = !Sides::kErases || task >= 10;
    score_block(sides, queries, Sides::kErases && queries ? task - 10 : task, lane);
  }
}

// The 16x16 block of scores to an image, scaled; kLow: what bf16 left to the image behind it.
template <bool kLow>
__device__ __forceinline__ void store_scores(uint32_t image, int row_block, int column_block, const float (&acc)[2][4],
                                             float scale, int lane) {
  const int part = lane / 8;
  const uint32_t at = image + swizzled(16 * row_block + 8 * (part & 1) + lane % 8, 32 * column_block + 16 * (part >> 1));
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = scale * acc[i / 2][i % 2 * 2], y = scale * acc[i / 2][i % 2 * 2 + 1];
    high[i] = pack_bf16(x, y);
    low[i] = pack_bf16(x - low_bf16(high[i]), y - high_bf16(high[i]));
  }
  store_tiles(at, high[0], high[1], high[2], high[3]);
  if (kLow) store_tiles(at + kTileBytes, low[0], low[1], low[2], low[3]);
}

// Block i of the six above the diagonal.
template <bool kLow>
__device__ __forceinline__ void zero_scores(uint32_t image, int i, int lane) {
  const float none[2][4] = {};
  store_scores<kLow>(image, i < 3 ? 0 : i < 5 ? 1 : 2, i < 3 ? i + 1 : i < 5 ? i - 1 : 3, none, 0.0f, lane);
}

__device__ __forceinline__ void store_one_score(unsigned char *image, uint32_t at, float value) {
  *reinterpret_cast<__nv_bfloat16 *>(image + at) = __float2bfloat16_rn(value);
}
template <bool kLow>
__device__ __forceinline__ void put_score(unsigned char *image, int row, int column, float value) {
  const uint32_t at = swizzled(row, 2 * column);
  const float high = __bfloat162float(__float2bfloat16_rn(value));
  store_one_score(image, at, high);
  if (kLow) store_one_score(image + kTileBytes, at, value - high);
}

// The block times a number of each row, to rows of kPitch floats.
__device__ __forceinline__ void store_solved(float *l, int row_block, int column_block, const float (&acc)[2][4], float by0,
                                             float by8, int lane) {
  float *to = l + (16 * row_block + lane / 4) * kPitch + 16 * column_block + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    *reinterpret_cast<float2 *>(to + 8 * half) = make_float2(by0 * acc[half][0], by0 * acc[half][1]);
    *reinterpret_cast<float2 *>(to + 8 * kPitch + 8 * half) = make_float2(by8 * acc[half][2], by8 * acc[half][3]);
  }
}

// ---- rows of which a block's decay is too small

template <class Sides, class Belongs>
__device__ __forceinline__ void score_again(Sides &sides, const uint8_t (&fails)[2][kChunk], bool is_level, int thread,
                                            Belongs belongs) {
  const int lane = thread % 32, block = thread / 32 % 4;
  const bool queries = thread >= 128;
  __syncthreads();
  if (thread < 256 && (is_level ? queries || Sides::kErases : queries)) {
#pragma unroll
    for (int n = 0; n < Sides::kRights; ++n) {
      float acc[2][4];
      multiply_rows(acc, sides.lefts(queries) + block * 2048, kTileBytes,
                    (is_level ? sides.mixeds(n) : sides.insides(n)) + block * 2048, lane);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int i = lane / 4 + e % 4 / 2 * 8, j = e / 4 * 8 + lane % 4 * 2 + e % 2, row = 16 * block + i;
        const bool fails_here = fails[0][row] | fails[1][row] | (i >= 8 && (fails[0][16 * block + 7] | fails[1][16 * block + 7]));
        if (fails_here && belongs(i, j)) sides.store_one(n, queries, row, 16 * block + j, acc[e / 4][e % 4]);
      }
    }
  }
  __syncthreads();
}

// The whole block takes part, after all other scores are stored. The tiles are lost.
template <class Sides>
__device__ __forceinline__ void score_failing_rows(Sides &sides, uint8_t (&fails)[2][kChunk], int thread) {
  const Rows &rows = sides.rows;
  const float2 one = make_float2(1.0f, 1.0f);
  const int lane = thread % 32, group = thread / 64, half = group % 2;
  sides.forget();
  float2 decay = half ? sides.total(group - 1) : one;
  uint32_t largest = 0;
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    decay = times(decay, rows.decay[r]);
    largest = larger_pair(largest, sides.inside(r, make_float2(one_over(decay.x), one_over(decay.y))));
    const bool fails_here = !(decay.x >= kLeast && decay.y >= kLeast) || !is_finite_pair(largest);
    const bool any = __any_sync(0xffffffffu, fails_here);
    if (lane == 0) fails[thread / 32 % 2][kEach * group + r] = any;
  }
  sides.forget();
#pragma unroll
  for (int r = 0; r < kEach; ++r) sides.plain(r);
  score_again(sides, fails, false, thread, [](int i, int j) { return i == j; });
#pragma unroll 1
  for (int level = 0; level < 4; ++level) {
    const int span = 1 << level;
    sides.forget();
    float2 from = one, to = one;
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const int row = kEach * half + r;
      if (row % span == 0) from = one;
      const float2 before = from;
      from = times(from, rows.decay[r]);
      if (row & span) sides.left(r, from, before);
    }
    sides.forget();
#pragma unroll
    for (int r = kEach - 1; r >= 0; --r) {
      const int row = kEach * half + r;
      if (row % span == span - 1) to = one;
      if (!(row & span)) sides.mixed(r, to);
      to = times(to, rows.decay[r]);
    }
    score_again(sides, fails, true, thread, [level](int i, int j) { return i > j && ((i >> level) ^ (j >> level)) == 1; });
  }
}

}  // namespace fw::sm90
