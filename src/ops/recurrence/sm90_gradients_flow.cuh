// SPDX-License-Identifier: Apache-2.0
// Steps 3 and 4 of the backward's last kernel for a vector gate (sm90_gradients_vector.cu): what rows read of other rows, between
// the blocks of 16 rows of a chunk and inside one, and the flows across each row's decay that come with it.
#pragma once
#include "ops/recurrence/sm90_gradients_vector.cuh"

namespace fw::sm90 {

// Of a thread: q and k of blocks 1 to 3 decayed from the blocks' starts, k of blocks 0 to 2 to their ends.
struct BlockSides {
  uint32_t q[3][4], k[3][4], right[3][4];
};

// ---- step 3

// Sums of a thread's elements of the four blocks: what q reads, what k reads (with beta), what keys give.
struct Sums {
  float of_q[32], of_k[32], of_keys[32];
};

// total[b]: of the thread's two keys. Leaves in `sums` gradients at the blocks' starts and ends, and adds to pass[block / 2] what
// passes a whole block: sums [keys][block % 2], alike in all columns of that parity.
template <Sm90Erase kErase>
__device__ __forceinline__ void multiply_between(const VectorGradientShared &shared, const BlockSides &sides, Sums &sums,
                                                 const float (&total)[4][2], float scale, float (&pass)[2][4], const Lane &lane) {
  const float scaled[2] = {scale * total[0][0], scale * total[0][1]};
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  const uint32_t b1 = shared_address(shared.b1), b2 = shared_address(shared.b2);
  uint32_t a[4], w[4];
#pragma unroll
  for (int e = 0; e < 8; ++e) sums.of_q[e] *= scale;
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    float q[8], k[8], flow[8];
    unpack_tile(q, sides.q[i - 1]);
    if constexpr (kSolve) unpack_tile(k, sides.k[i - 1]);
    float *of_q = sums.of_q + 8 * i, *of_k = sums.of_k + 8 * i;
#pragma unroll
    for (int m = 0; m < i; ++m) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        of_q[e] *= m == 0 ? scaled[e / 2 % 2] : total[m][e / 2 % 2];
        flow[e] = q[e] * of_q[e];
        if constexpr (kSolve) of_k[e] *= total[m][e / 2 % 2], flow[e] = fmaf(k[e], of_k[e], flow[e]);
        for (int b = m + 1; b < i; ++b) flow[e] *= total[b][e / 2 % 2];
      }
      pack_tile(a, flow);
      multiply_bf16(pass[m / 2], a, m % 2 ? lane.odd : lane.even, m % 2 ? lane.odd : lane.even);
      load_scores(w, b1, i, m, lane.lane);
      multiply_block(of_q, sides.right[m], w);
      if constexpr (kSolve) {
        load_scores(w, b2, i, m, lane.lane);
        multiply_block(of_k, sides.right[m], w);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 3; ++j) {
    float right[8], flow[8];
    unpack_tile(right, sides.right[j]);
    float *of_keys = sums.of_keys + 8 * j;
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      float after = total[3][e / 2 % 2];
      for (int b = 2; b > j; --b) after *= total[b][e / 2 % 2];
      flow[e] = right[e] * (after * of_keys[e]);
    }
    pack_tile(a, flow);
    if (j == 0) multiply_bf16(pass[0], a, lane.odd, lane.odd);
    multiply_bf16(pass[1], a, j < 2 ? kOnes : lane.odd, j < 2 ? kOnes : lane.odd);
#pragma unroll
    for (int i = 3; i > j; --i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) of_keys[e] *= total[i][e / 2 % 2];
      load_scores_turned(w, b1, i, j, lane.lane);
      multiply_block(of_keys, sides.q[i - 1], w);
      if constexpr (kSolve) {
        load_scores_turned(w, b2, i, j, lane.lane);
        multiply_block(of_keys, sides.k[i - 1], w);
      }
    }
  }
}

// ---- step 4

// Of a block, of the thread's elements.
struct Block {
  float q[8], k[8];           // the rows themselves
  float dq[8], dk[8], dg[8];  // sums
};

// Rows of a block by themselves and with the row before each odd one, in fp32.
template <Sm90Erase kErase>
__device__ __forceinline__ void run_pairs(const VectorGradientShared &shared, Block &of, const TreeDecays &tree, int block, int t) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 2 half + n
    const float4 b = shared.near[8 * block + i / 2 * 4 + t];
    const int first = 2 * i, second = first + 1;
    const float decayed = tree.second[i] * of.k[first];
    of.dq[first] = fmaf(b.x, of.k[first], of.dq[first]);
    of.dk[first] = fmaf(b.x, of.q[first], of.dk[first]);
    of.dq[second] = fmaf(b.y, of.k[second], fmaf(b.z, decayed, of.dq[second]));
    of.dk[second] = fmaf(b.y, of.q[second], of.dk[second]);
    float back = b.z * of.q[second];
    if constexpr (kErase == Sm90Erase::kShared) {
      of.dk[second] = fmaf(b.w, decayed, of.dk[second]);
      back = fmaf(b.w, of.k[second], back);
    }
    of.dk[first] = fmaf(tree.second[i], back, of.dk[first]);
    of.dg[second] = fmaf(decayed, back, of.dg[second]);
  }
}

// Levels 1 to 3 of the rows of a block; reads, writes: flows by row from before the block and to behind it.
template <Sm90Erase kErase>
__device__ __forceinline__ void run_tree(const VectorGradientShared &shared, Block &of, const TreeDecays &tree,
                                         const float (&reads)[8], const float (&writes)[8], int block, const Lane &lane) {
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  uint32_t b1[4], b1_turned[4], b2[4], b2_turned[4], flows[3][4];
  load_scores(b1, shared_address(shared.b1), block, block, lane.lane);
  load_scores_turned(b1_turned, shared_address(shared.b1), block, block, lane.lane);
  if constexpr (kSolve) {
    load_scores(b2, shared_address(shared.b2), block, block, lane.lane);
    load_scores_turned(b2_turned, shared_address(shared.b2), block, block, lane.lane);
  }
#pragma unroll
  for (int level = 0; level < 2; ++level) {  // 1 and 2: of eight rows each; a row is a left side or a right side
    const float (&decay)[8] = tree.level[level];
    const uint32_t mask = level == 0 ? lane.level1 : lane.level2;
    float q[8], k[8], flow[8], of_q[8] = {}, of_k[8] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) q[i] = of.q[i] * decay[i], k[i] = of.k[i] * decay[i];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float *from_k = k + 4 * half, *from_q = q + 4 * half;
      const uint32_t a[4] = {pack_bf16(from_k[0], from_k[1]), pack_bf16(from_k[2], from_k[3]), pack_bf16(from_q[0], from_q[1]),
                             pack_bf16(from_q[2], from_q[3])};
      multiply_bf16(quad(of_q + 4 * half), a, b1[3 * half] & mask, 0u);
      const uint32_t of_both = kSolve ? (b2[3 * half] | b2_turned[3 * half]) & mask : 0u;
      multiply_bf16(quad(of_k + 4 * half), a, of_both, b1_turned[3 * half] & mask);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      flow[i] = fmaf(q[i], of_q[i], k[i] * of_k[i]);
      of.dq[i] = fmaf(decay[i], of_q[i], of.dq[i]);
      of.dk[i] = fmaf(decay[i], of_k[i], of.dk[i]);
    }
    pack_tile(flows[level], flow);
  }
  {  // level 3: rows 0 to 7 are right sides
    const float (&decay)[8] = tree.level[2];
    float q[4], k[8], flow[8], of_q[4] = {}, of_k[4] = {}, of_keys[4] = {};
    uint32_t k_words[4];
#pragma unroll
    for (int i = 0; i < 8; ++i) k[i] = of.k[i] * decay[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) q[i] = of.q[4 + i] * decay[4 + i];
    pack_tile(k_words, k);
    const uint32_t left[4] = {pack_bf16(q[0], q[1]), pack_bf16(q[2], q[3]), k_words[2], k_words[3]};
    multiply_bf16(of_q, k_words, b1[2], 0u);
    if constexpr (kSolve) multiply_bf16(of_k, k_words, b2[2], 0u);
    multiply_bf16(of_keys, left, b1_turned[1], kSolve ? b2_turned[1] : 0u);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      flow[i] = k[i] * of_keys[i];
      flow[4 + i] = q[i] * of_q[i];
      if constexpr (kSolve) flow[4 + i] = fmaf(k[4 + i], of_k[i], flow[4 + i]);
      of.dk[i] = fmaf(decay[i], of_keys[i], of.dk[i]);
      of.dq[4 + i] = fmaf(decay[4 + i], of_q[i], of.dq[4 + i]);
      if constexpr (kSolve) of.dk[4 + i] = fmaf(decay[4 + i], of_k[i], of.dk[4 + i]);
    }
    pack_tile(flows[2], flow);
  }
  uint32_t read[4], write[4];
  pack_tile(read, reads);
  pack_tile(write, writes);
  float (&low)[4] = quad(of.dg), (&high)[4] = quad(of.dg + 4);
  const auto multiply = [](float (&to)[4], const uint32_t *first, const uint32_t *second, uint32_t b0, uint32_t b1) {
    const uint32_t a[4] = {first[0], first[1], second[0], second[1]};
    multiply_bf16(to, a, b0, b1);
  };
  multiply(low, flows[0], flows[1], lane.flow1, lane.flow2);
  multiply(high, flows[0] + 2, flows[1] + 2, lane.flow1, lane.flow2);
  multiply(low, flows[2], read, lane.prefix, lane.suffix);
  multiply(high, flows[2] + 2, write + 2, lane.suffix, lane.prefix);
  multiply(low, write, read + 2, lane.prefix, kOnes);
  multiply(high, write, read + 2, kOnes, lane.suffix);
}

}  // namespace fw::sm90
