// SPDX-License-Identifier: Apache-2.0
// T = (I + L)^-1 of a strictly lower 64x64 matrix L in shared memory, by four warps. The four 16x16 diagonal blocks are
// inverted by substitution in fp32, then warp J finishes block column J from top to bottom in tf32:
// T_IJ^T = -(sum over J <= M < I of T_MJ^T L_IM^T) T_II^T, each result being the next first operand in registers.
// A doubling (Neumann) of 16x16 blocks in fp16 loses everything for similar keys; this stays below 1e-3.
#pragma once
#include "cuda/warp_product.cuh"
#include "ops/recurrence/sm90_plan.cuh"

namespace fw::sm90 {

using cuda::multiply_tf32;
using cuda::to_tf32;

constexpr int kPitch = 72;  // floats in a row of L: rows g and columns 2t of a warp's access hit 32 banks once

// Columns of the 16x16 unit lower block at l (pitch kPitch) become those of its inverse; 16 lanes, one column each.
__device__ __forceinline__ void invert_block(float *l, int column) {
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int m = 0; m < i; ++m) sum[m & 1] = fmaf(l[i * kPitch + m], x[m], sum[m & 1]);
    x[i] = (i == column ? 1.0f : 0.0f) - (sum[0] + sum[1]);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16; ++i) l[i * kPitch + column] = x[i];
}

// acc[16x16] += a[16x16] block^T, a as two m16k8 first operands whose columns are paired as the sums' are.
__device__ __forceinline__ void multiply_block(float (&acc)[2][4], const uint32_t (&a)[2][4], const float *block, int g,
                                               int t) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const float2 pair = *reinterpret_cast<const float2 *>(block + (8 * half + g) * kPitch + 8 * step + 2 * t);
      multiply_tf32(acc[half], a[step], to_tf32(pair.x), to_tf32(pair.y));
    }
  }
}

__device__ __forceinline__ void as_operand(uint32_t (&a)[2][4], const float (&acc)[2][4], float sign) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    a[step][0] = to_tf32(sign * acc[step][0]);
    a[step][1] = to_tf32(sign * acc[step][2]);
    a[step][2] = to_tf32(sign * acc[step][1]);
    a[step][3] = to_tf32(sign * acc[step][3]);
  }
}

// Block (i_block, j_block) of the image from its transpose, and what bf16 left, as bf16, of the second image behind it.
__device__ __forceinline__ void store_block(uint32_t image, const float (&acc)[2][4], int i_block, int j_block,
                                            int lane) {
  const int tile = lane / 8;
  const uint32_t address =
      image + swizzled(16 * i_block + 8 * (tile >> 1) + lane % 8, (16 * j_block + 8 * (tile & 1)) * 2);
  uint32_t high[4], low[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float x = acc[i / 2][i % 2 * 2], y = acc[i / 2][i % 2 * 2 + 1];
    high[i] = pack_bf16(x, y);
    low[i] = pack_bf16(x - low_bf16(high[i]), y - high_bf16(high[i]));
  }
  store_tiles_transposed(address, high[0], high[1], high[2], high[3]);
  store_tiles_transposed(address + kTileBytes, low[0], low[1], low[2], low[3]);
}

// T, as two swizzled bf16 images (T is their sum), of the unit lower I + L whose diagonal blocks are already inverted; warps 0 to 3.
__device__ __forceinline__ void finish_inverse(float *l, uint32_t image, int warp, int lane) {
  const int g = lane / 4, t = lane % 4, column = warp;
  float acc[2][4];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      acc[half][e] = l[(16 * column + 8 * half + 2 * t + (e & 1)) * kPitch + 16 * column + g + 8 * (e >> 1)];
    }
  }
  uint32_t done[4][2][4];
  as_operand(done[0], acc, 1.0f);
  store_block(image, acc, column, column, lane);
  const float none[2][4] = {};
  for (int i = 0; i < column; ++i) store_block(image, none, i, column, lane);
#pragma unroll
  for (int down = 1; down < 4; ++down) {
    const int i = column + down;
    if (i < 4) {
      float sum[2][4] = {}, result[2][4] = {};
#pragma unroll
      for (int m = 0; m < down; ++m) multiply_block(sum, done[m], l + 16 * i * kPitch + 16 * (column + m), g, t);
      uint32_t operand[2][4];
      as_operand(operand, sum, -1.0f);
      multiply_block(result, operand, l + 16 * i * kPitch + 16 * i, g, t);
      store_block(image, result, i, column, lane);
      if (down < 3) as_operand(done[down], result, 1.0f);
    }
  }
}

}  // namespace fw::sm90
