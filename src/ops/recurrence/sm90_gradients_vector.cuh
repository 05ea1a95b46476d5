// SPDX-License-Identifier: Apache-2.0
// Pieces of the backward's last kernel for a vector gate (sm90_gradients_vector.cu): decays, scores, flows.
// Operands, sums and what is done to them element by element lie alike in registers: of 16 keys and 16 rows, thread
// (g = lane / 4, t = lane % 4) has the keys g (n = 0) and g + 8 (n = 1) of the rows 2t, 2t + 1 (half 0), 2t + 8 and
// 2t + 9 (half 1), element 4 half + 2n + row % 2. Those are the words of a first operand of mma m16n8k16, two elements
// each, its sums over two tiles of eight rows, and with eight tiles the sums of a warp of m64n64k16.
#pragma once
#include "cuda/sm90/scalar.cuh"
#include "ops/recurrence/sm90_gates.cuh"
#include "ops/recurrence/sm90_gradients.cuh"
#include "ops/recurrence/sm90_images.cuh"

namespace fw::sm90 {

constexpr int kDecayPitch = 132;  // floats: rows 2t and keys g of a warp hit 32 banks
constexpr uint32_t kOnes = 0x3f803f80u;

// One value head of a chunk.
struct Step {
  int item, member;  // item: slot * H + query/key head, or -1: none is left
  int slot, head, value_head;
  Chunk chunk;
};

struct __align__(1024) VectorGradientShared {
  unsigned char states[4 * kTileBytes], d_states[4 * kTileBytes];
  unsigned char d_o[2 * kTileBytes], written[2 * kTileBytes], e[2 * kTileBytes];
  unsigned char q[2 * kTileBytes], k[2 * kTileBytes];  // dq and dk in their place
  unsigned char b1[kTileBytes], b2[kTileBytes];
  float decay[kChunk * kDecayPitch];  // dg in its place
  float total[4][kKey];               // decay over a block
  float kept[4][kKey];                // <S, dS>, parts
  float4 near[kChunk / 2];            // of rows 2i, 2i + 1: B1 of both with themselves, B1 and B2 of the second with the first
  VectorFactors factors;
  // Of q and of k, with a norm inside: 1 / length of rows, rows times their gradients (parts of warps, then sums over |x|^2).
  float lengths[2][kChunk], along[2][kChunk][8], along_all[2][kChunk];
  uint32_t logits[kChunk][kKey / 2];  // pairs of 16-bit gate logits
  float gate_sums[4][kKey], rate_sums[8];  // of logits: parts of d_dt_bias and d_a_log
  Step steps[2];  // the one at hand and the next
  uint64_t rows_full, keys_full;
};

__device__ __forceinline__ float (&quad(float *x))[4] { return *reinterpret_cast<float (*)[4]>(x); }

__device__ __forceinline__ void pack_tile(uint32_t (&a)[4], const float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack_bf16(x[2 * i], x[2 * i + 1]);
}
__device__ __forceinline__ void unpack_tile(float (&x)[8], const uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) x[2 * i] = low_bf16(a[i]), x[2 * i + 1] = high_bf16(a[i]);
}

// Second operands of mma from a 16x16 block of scores (rows i, columns j). Plain: sums over j, words [half of i][half of j].
// Turned: sums over i, words [half of j][half of i].
__device__ __forceinline__ void load_scores(uint32_t (&w)[4], uint32_t image, int i, int j, int lane) {
  const int part = lane / 8;
  load_tiles(w, image + swizzled(16 * i + 8 * (part >> 1) + lane % 8, 32 * j + 16 * (part & 1)));
}
__device__ __forceinline__ void load_scores_turned(uint32_t (&w)[4], uint32_t image, int i, int j, int lane) {
  const int part = lane / 8;
  load_tiles_transposed(w, image + swizzled(16 * i + 8 * (part & 1) + lane % 8, 32 * j + 16 * (part >> 1)));
}

// x[16 keys][16 rows] += a times such a block.
__device__ __forceinline__ void multiply_block(float *x, const uint32_t (&a)[4], const uint32_t (&w)[4]) {
  multiply_bf16(quad(x), a, w[0], w[1]);
  multiply_bf16(quad(x + 4), a, w[2], w[3]);
}

// Of rows by row: those of a thread's elements of a block.
__device__ __forceinline__ void read_rows(float (&x)[4], const float *rows, int block, int t) {
  const float2 low = *reinterpret_cast<const float2 *>(rows + 16 * block + 2 * t);
  const float2 high = *reinterpret_cast<const float2 *>(rows + 16 * block + 2 * t + 8);
  x[0] = low.x, x[1] = low.y, x[2] = high.x, x[3] = high.y;
}

// A thread's elements of a block of q (0) or k (1), of which `words` are as they came; kNormed: over the rows' lengths.
template <bool kNormed>
__device__ __forceinline__ void unpack_rows(float (&x)[8], const uint32_t (&words)[4], const VectorGradientShared &shared, int which,
                                            int block, int t) {
  unpack_tile(x, words);
  if constexpr (kNormed) {
    float by[4];
    read_rows(by, shared.lengths[which], block, t);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= by[i / 4 * 2 + i % 2];
  }
}

// ---- gates: thread (pair, block) has two keys of 16 rows

using RowDecays = float2[16];

// exp(g); 1 in rows past the end.
template <bool kWide>
__device__ __forceinline__ void make_decays(const Chunk &chunk, int block, RowDecays &decay) {
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const uint32_t narrow = __float_as_uint(decay[r].x);
    const float2 gate = kWide ? decay[r] : make_float2(low_bf16(narrow), high_bf16(narrow));
    const bool here = r < chunk.rows - 16 * block;
    decay[r].x = here ? power_of_two(gate.x * kLog2e) : 1.0f;
    decay[r].y = here ? power_of_two(gate.y * kLog2e) : 1.0f;
  }
}

// ---- decays

struct Lane {
  int warp, lane, g, t;
  // The same again, of a number that the compiler does not know to be what it was: addresses made of it before a loop, or for
  // all parts of a loop at once, do not fit in registers.
  __device__ __forceinline__ void place(uint32_t &thread) {
    hold(thread);
    warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  }
  uint32_t level1, level2;    // ~0 where row g and rows 2t, 2t + 1 of eight first differ in bit 1, bit 2
  uint32_t flow1, flow2;      // second operands that make of flows by row the flow across each row, see run_tree
  uint32_t suffix, prefix;    // of eight rows: at or behind, before
  uint32_t even, odd;         // ones for sums that go to even, odd blocks
};

__device__ __forceinline__ Lane make_lane(int lane) {
  const int g = lane / 4, t = lane % 4;
  const auto word = [](bool low, bool high) { return (low ? 0x3f80u : 0u) | (high ? 0x3f800000u : 0u); };
  // Of level l: from rows of the same 2^l, behind (the row's bit l set) or before.
  const auto flow = [&](int l) {
    const bool same = (2 * t) >> l == g >> l, left = g >> l & 1;
    return word(same && (left ? 2 * t >= g : 2 * t < g), same && (left ? 2 * t + 1 >= g : 2 * t + 1 < g));
  };
  Lane of = {};
  of.level1 = (g ^ 2 * t) >> 1 == 1 ? ~0u : 0u;
  of.level2 = (g ^ 2 * t) >> 2 == 1 ? ~0u : 0u;
  of.flow1 = flow(1), of.flow2 = flow(2);
  of.suffix = word(2 * t >= g, 2 * t + 1 >= g);
  of.prefix = word(2 * t < g, 2 * t + 1 < g);
  of.even = g % 2 == 0 ? kOnes : 0u, of.odd = g % 2 == 0 ? 0u : kOnes;
  return of;
}

// Products of decays: start: from the block's first row through the row; end: of the rows behind the row to the block's last.
struct BlockDecays {
  float start[8], end[8];
};
// Of rows whose bit l is set, from the last row whose lower l bits are 0 through the row; of others, of the rows behind to the
// next such row. level[0] is of level 1. second: of odd rows, [2 half + n].
struct TreeDecays {
  float level[3][8], second[4];
};

// kTree: `tree` is filled.
template <bool kTree>
__device__ __forceinline__ void make_products(const VectorGradientShared &shared, const Lane &lane, int block, int key,
                                              BlockDecays &of, TreeDecays &tree) {
  const bool odd = lane.t & 1, upper = lane.t & 2, outer = lane.t == 0 || lane.t == 3;
  const float *from = shared.decay + (16 * block + 2 * lane.t) * kDecayPitch + key;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const auto at = [from, n](int row) { return from[row * kDecayPitch + 8 * n]; };
    const float d0 = at(0), d1 = at(1), d2 = at(8), d3 = at(9), a = d0 * d1, b = d2 * d3;
    const float a1 = __shfl_xor_sync(0xffffffffu, a, 1), b1 = __shfl_xor_sync(0xffffffffu, b, 1), a2 = a * a1, b2 = b * b1;
    const float a4 = __shfl_xor_sync(0xffffffffu, a2, 2), b4 = __shfl_xor_sync(0xffffffffu, b2, 2);
    const float before_a = (odd ? a1 : 1.0f) * (upper ? a4 : 1.0f), behind_a = (odd ? 1.0f : a1) * (upper ? 1.0f : a4);
    const float before_b = (odd ? b1 : 1.0f) * (upper ? b4 : 1.0f), behind_b = (odd ? 1.0f : b1) * (upper ? 1.0f : b4);
    const float far[4] = {d1 * behind_a, behind_a, d2 * before_b, b * before_b};
    of.start[2 * n] = d0 * before_a, of.start[2 * n + 1] = a * before_a;
    of.start[4 + 2 * n] = far[2] * (a2 * a4), of.start[5 + 2 * n] = far[3] * (a2 * a4);
    of.end[2 * n] = far[0] * (b2 * b4), of.end[2 * n + 1] = far[1] * (b2 * b4);
    of.end[4 + 2 * n] = d3 * behind_b, of.end[5 + 2 * n] = behind_b;
    if constexpr (kTree) {
      tree.second[n] = d1, tree.second[2 + n] = d3;
      tree.level[0][2 * n] = odd ? d0 : d1, tree.level[0][2 * n + 1] = odd ? a : 1.0f;
      tree.level[0][4 + 2 * n] = odd ? d2 : d3, tree.level[0][5 + 2 * n] = odd ? b : 1.0f;
      const float more_a = outer ? a1 : 1.0f, more_b = outer ? b1 : 1.0f;
      tree.level[1][2 * n] = (upper ? d0 : d1) * more_a, tree.level[1][2 * n + 1] = upper ? a * more_a : more_a;
      tree.level[1][4 + 2 * n] = (upper ? d2 : d3) * more_b, tree.level[1][5 + 2 * n] = upper ? b * more_b : more_b;
      tree.level[2][2 * n] = far[0], tree.level[2][2 * n + 1] = far[1];
      tree.level[2][4 + 2 * n] = far[2], tree.level[2][5 + 2 * n] = far[3];
    }
  }
}

// ---- <S, dS>

// Of one half of the values, two parts of 32 keys.
struct DroppedBits {
  uint4 state[2], d_state[2];
};

__device__ __forceinline__ void load_dropped(DroppedBits &to, const GradientArguments &in, const Step &step, int rank, int thread) {
  const int64_t index = static_cast<int64_t>(step.value_head) * in.shape.slots + step.slot;
  const int64_t at = (index * 2 + rank) * 512 + thread / 128 * 256 + thread % 128;
#pragma unroll
  for (int i = 0; i < 2; ++i) to.state[i] = in.forward.dropped[at + 128 * i], to.d_state[i] = in.reverse.dropped[at + 128 * i];
}

// <S, dS> of every key; a warpgroup 64 keys, a warp 32 values. dropped: of rank 0.
__device__ __forceinline__ void sum_kept(const GradientArguments &in, const Step &step, VectorGradientShared &shared,
                                         DroppedBits &dropped, int thread) {
  const int group = thread / 128, warp = thread / 32 % 4, lane = thread % 32;
  float sums[16] = {};
#pragma unroll 1
  for (int rank = 0; rank < 2; ++rank) {
    DroppedBits next;
    load_dropped(next, in, step, 1, thread);
#pragma unroll
    for (int tiles = 0; tiles < 4; ++tiles) {
      const uint32_t corner = rank * 2 * kTileBytes + group * kTileBytes + image_corner(tiles, warp, lane);
      uint32_t x[4], y[4];
      load_tiles(x, shared_address(shared.states) + corner);
      load_tiles(y, shared_address(shared.d_states) + corner);
      const uint4 &four = dropped.state[tiles / 2], &d_four = dropped.d_state[tiles / 2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t rest = (tiles % 2 ? half ? four.w : four.z : half ? four.y : four.x);
        const uint32_t d_rest = (tiles % 2 ? half ? d_four.w : d_four.z : half ? d_four.y : d_four.x);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float product = with_dropped(x[2 * half + e / 2], rest, e) * with_dropped(y[2 * half + e / 2], d_rest, e);
          sums[4 * tiles + 2 * half + e % 2] += product;
        }
      }
    }
    dropped = next;
  }
  fold<8>(sums, lane);
  fold<4>(sums, lane);
  fold<2>(sums, lane);  // lane (g, t): keys 8g + 2t, 8g + 2t + 1
  *reinterpret_cast<float2 *>(shared.kept[warp] + 64 * group + 2 * lane) = make_float2(sums[0], sums[1]);
}

// ---- scores

// One warpgroup: gradients of scores (kPart 0: B1, 1: B2), already scaled, to their image, 0 above the diagonal, and to `near`.
template <int kPart>
__device__ __forceinline__ void keep_scores(VectorGradientShared &shared, float (&d)[32], int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block != warp) continue;
    float *x = d + 8 * block;
    if (t == g / 2) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float *near = &shared.near[8 * block + 4 * half + t].x;
        if (kPart == 0) near[g % 2] = g % 2 ? x[6 * half + 1] : x[6 * half];
        if (g % 2) near[2 + kPart] = x[6 * half];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = g + (i & 2) * 4, column = i / 4 * 8 + 2 * t + i % 2;
      if (column + kPart > row) x[i] = 0.0f;
    }
  }
  store_image(d, shared_address(kPart == 0 ? shared.b1 : shared.b2), warp, lane);
}

}  // namespace fw::sm90
