// SPDX-License-Identifier: Apache-2.0
// Gates inside one chunk on sm_90a. Scalar: exp(G_i - G_j) applied to a 64x64 product of tokens. Vector: two keys of a thread's rows.
#pragma once
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/product.cuh"
#include "cuda/sm90/scalar.cuh"
#include "ops/recurrence/sm90_plan.cuh"

namespace fw::sm90 {

constexpr float kLog2e = 1.4426950408889634f;

__device__ __forceinline__ float load_real(const void *base, Sm90Real type, int64_t index) {
  if (type == Sm90Real::kFloat32) return static_cast<const float *>(base)[index];
  return low_bf16(static_cast<const uint16_t *>(base)[index]);
}

// Sums over pairs of lanes, of which each keeps one half of its numbers, v[0 .. kHalf) then: the upper half where lane & kOther.
template <int kHalf, int kLanes = 32, int kCount>
__device__ __forceinline__ void fold(float (&v)[kCount], int lane) {
  constexpr int kOther = kLanes * kHalf / kCount;
  const bool upper = lane & kOther;
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
    const float send = upper ? v[i] : v[i + kHalf], keep = upper ? v[i + kHalf] : v[i];
    v[i] = keep + __shfl_xor_sync(0xffffffffu, send, kOther);
  }
}

__device__ __forceinline__ float2 times(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }

// Gates of keys 2 pair and 2 pair + 1 of kRows rows from kRows * group on, as they are stored; the kernel's make_decays goes on.
template <bool kWide, class Arguments, int kRows>
__device__ __forceinline__ void load_gates(const Arguments &in, const Chunk &chunk, int hv, int pair, int group, float2 (&decay)[kRows]) {
  constexpr int kBytes = kWide ? 4 : 2;
  const int key = min(2 * pair, in.shape.K - 2);  // keys past the end have a decay as well; what it multiplies is 0
  const int64_t at = chunk.batch * in.g_strides.batch + chunk.start * in.g_strides.token + hv * in.g_strides.head + key;
  const char *first = static_cast<const char *>(in.g) + at * kBytes;
  const uint32_t step = static_cast<uint32_t>(kBytes * in.g_strides.token);  // 32 bits for 64 rows: the host refuses longer strides
#pragma unroll
  for (int r = 0; r < kRows; ++r) {  // rows past the end read the chunk's last row
    const uint32_t row = min(kRows * group + r, chunk.rows - 1);
    if constexpr (kWide) {
      decay[r] = *reinterpret_cast<const float2 *>(first + uint64_t{row} * step);
    } else {
      decay[r].x = __uint_as_float(*reinterpret_cast<const uint32_t *>(first + uint64_t{row} * step));
    }
  }
}

// G_i - G_j of gates kept as two floats.
__device__ __forceinline__ float difference(float2 a, float2 b) { return (a.x - b.x) + (a.y - b.y); }

// A thread's 16 numbers of the tokens 8j + 2t, 8j + 2t + 1.
__device__ __forceinline__ void read_tokens(float (&to)[16], const ByToken &from, int t) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 four = *reinterpret_cast<const float4 *>(from.at[t] + 4 * i);
    to[4 * i] = four.x, to[4 * i + 1] = four.y, to[4 * i + 2] = four.z, to[4 * i + 3] = four.w;
  }
}

// d (rows 16 warp + g and + 8 of an m64n64 sum) becomes d_ij exp(G_i - G_j) times the row's and the column's factor for
// j < i, or j <= i when !kStrict, and 0 above. Left of the diagonal 16x16 block the decay is split at the last row of the
// column's block: exp(G_i - G_end(J)) exp(G_end(J) - G_j), both at most 1 for g <= 0 and made of past rows only.
// back 1: G_(i-1) in the place of G_i; only with kStrict.
template <bool kGated, bool kStrict>
__device__ __forceinline__ void decay_scores(float (&d)[32], const Factors &factors, float factor0, float factor8,
                                             int warp, int g, int t, int back = 0) {
  const int row0 = 16 * warp + g, row8 = row0 + 8;
  float2 gate0 = {}, gate8 = {};
  float column[16], key[4];
  if constexpr (kGated) {
    gate0 = factors.gate[max(row0 - back, 0)], gate8 = factors.gate[row8 - back];
    read_tokens(column, factors.to_block_end, t);
    const float4 four = *reinterpret_cast<const float4 *>(factors.key.at[t] + 4 * warp);
    key[0] = four.x, key[1] = four.y, key[2] = four.z, key[3] = four.w;
  }
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    float *x = d + 8 * block;
    if (block < warp) {
      float left0 = factor0, left8 = factor8;
      if constexpr (kGated) {
        const float2 end = factors.gate[16 * block + 15];
        left0 *= power_of_two(difference(gate0, end)), left8 *= power_of_two(difference(gate8, end));
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float left = e & 2 ? left8 : left0;
        x[e] *= kGated ? left * column[4 * block + e / 4 * 2 + e % 2] : left;
      }
    } else if (block == warp) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int i = e & 2 ? row8 : row0, j = 16 * block + e / 4 * 8 + 2 * t + e % 2;
        float left = e & 2 ? factor8 : factor0;
        if constexpr (kGated) {
          left *= key[e / 4 * 2 + e % 2] * power_of_two(difference(e & 2 ? gate8 : gate0, factors.gate[j]));
        }
        x[e] = (kStrict ? j < i : j <= i) ? left * x[e] : 0.0f;
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = 0.0f;
    }
  }
}

}  // namespace fw::sm90
