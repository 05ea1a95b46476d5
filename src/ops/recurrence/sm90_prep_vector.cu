// SPDX-License-Identifier: Apache-2.0
// Decayed operands, scores and inverse of one chunk of one head for a vector gate; nothing here depends on the state.
// The decay between two rows is a product of exp(g) <= 1 over the rows between them, in fp32: no exponential of a sum, no
// difference of sums, any g from -infinity, one exponential for each element.
// Score (i, j), j < i, belongs to level l, the highest bit in which i and j differ. With b the row between them whose
// lower l bits are 0, it is the product of x_i (rows b .. i) and k_j (rows j + 1 .. b - 1): both decays are at most 1 and
// past rows alone decide. One tile of 64 rows serves a level: a row with bit l set is a left side, else a right side.
// Grid (slots, HV), 256 threads: thread (pair, block) has two keys of 16 rows in registers.
//   1. q, k, g from global memory, 4 or 8 bytes a thread, whole lines a warp; exp; block totals; the diagonal of q k^T.
//   2. k exp(G), scale q exp(G), k exp(G_end - G) to global memory as swizzled images, whole lines a warp.
//   3. For l = 0 .. 5: the level's tiles of k and of q to shared memory; warps 0-3 the products for L, warps 4-7 those for
//      P, 16 rows each, mma m16n8k16, straight to L = beta k k^T in fp32 and to the image of P.
//   4. T = (I + L)^-1 by warps 0-3 (sm90_inverse.cuh); bulk stores.
// Shared memory: tiles of k (then T) and q 2 x 16384, P 8192, L 18432, totals 2048, beta 256, diagonal 512, factors 896.
// Handing over: __syncthreads before and after a level's products, and between the numbered steps.
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "ops/recurrence/sm90_gates.cuh"
#include "ops/recurrence/sm90_inverse.cuh"
#include "ops/recurrence/sm90_prep.cuh"

namespace fw::sm90 {
namespace {

struct __align__(1024) VectorShared {
  union {
    unsigned char k[2 * kTileBytes];
    unsigned char solve[kTileBytes];
  };
  unsigned char q[2 * kTileBytes];
  unsigned char scores[kTileBytes];
  float l[kChunk * kPitch];
  VectorFactors factors;
  float2 total[4][kKey / 2];
  float beta[kChunk];
  float diagonal[2][kChunk];
};

// Two keys of the 16 rows of a thread.
struct Rows {
  float2 decay[16];
  uint32_t q[16], k[16];
};

// Keeps the compiler from holding values made of the rows across this point: unpacked, they do not fit in registers.
__device__ __forceinline__ void forget(Rows &rows) {
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    asm volatile("" : "+r"(rows.q[r]), "+r"(rows.k[r]), "+f"(rows.decay[r].x), "+f"(rows.decay[r].y));
  }
}

__device__ __forceinline__ float2 times(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }

__device__ __forceinline__ uint32_t scaled(uint32_t pair, float2 by) {
  return pack_bf16(low_bf16(pair) * by.x, high_bf16(pair) * by.y);
}

__device__ __forceinline__ void load_rows(const PrepArguments &in, const Chunk &chunk, int hv, int pair, int block,
                                          Rows &rows) {
  const int h = hv / (in.shape.HV / in.shape.H);
  const __nv_bfloat16 *q = in.q_rows + chunk.batch * in.q_strides.batch + h * in.q_strides.head + 2 * pair;
  const __nv_bfloat16 *k = in.k_rows + chunk.batch * in.k_strides.batch + h * in.k_strides.head + 2 * pair;
  const int64_t g = chunk.batch * in.g_strides.batch + hv * in.g_strides.head + 2 * pair;
  const bool wide = in.g_type == Sm90Real::kFloat32;
  uint32_t narrow[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const int64_t token = chunk.start + 16 * block + r;
    const bool inside = 16 * block + r < chunk.rows;
    rows.q[r] = inside ? *reinterpret_cast<const uint32_t *>(q + token * in.q_strides.token) : 0;
    rows.k[r] = inside ? *reinterpret_cast<const uint32_t *>(k + token * in.k_strides.token) : 0;
    const int64_t at = g + token * in.g_strides.token;
    rows.decay[r] = make_float2(0.0f, 0.0f);
    narrow[r] = 0;
    if (inside && wide) rows.decay[r] = *reinterpret_cast<const float2 *>(static_cast<const float *>(in.g) + at);
    if (inside && !wide) narrow[r] = *reinterpret_cast<const uint32_t *>(static_cast<const uint16_t *>(in.g) + at);
  }
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const float2 gate = wide ? rows.decay[r] : make_float2(low_bf16(narrow[r]), high_bf16(narrow[r]));
    rows.decay[r] = make_float2(power_of_two(gate.x * kLog2e), power_of_two(gate.y * kLog2e));
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

// Sums over a warp's 64 keys of q k: lanes 2r and 2r + 1 get row r.
__device__ __forceinline__ float diagonal_sum(const Rows &rows, int lane) {
  float v[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    v[r] = low_bf16(rows.q[r]) * low_bf16(rows.k[r]) + high_bf16(rows.q[r]) * high_bf16(rows.k[r]);
  }
  fold<8>(v, lane);
  fold<4>(v, lane);
  fold<2>(v, lane);
  fold<1>(v, lane);
  return v[0] + __shfl_xor_sync(0xffffffffu, v[0], 1);
}

// The level's tiles. Levels 0 to 3 split the thread's 16 rows, 4 and 5 the blocks.
template <int kLevel>
__device__ __forceinline__ void store_level(const Rows &rows, VectorShared &shared, int pair, int block) {
  constexpr int kSpan = kLevel < 4 ? 1 << kLevel : 16;
  const uint32_t corner = pair / 32 * kTileBytes, byte = pair % 32 * 4;
  const auto put = [&](unsigned char *tile, int r, uint32_t value) {
    *reinterpret_cast<uint32_t *>(tile + corner + swizzled(16 * block + r, byte)) = value;
  };
  const bool block_left = kLevel == 4 ? block & 1 : block & 2;
#pragma unroll
  for (int first = 0; first < 16; first += kSpan) {
    const bool left = kLevel < 4 ? (first >> kLevel) & 1 : block_left;
    float2 decay = make_float2(1.0f, 1.0f);
    if (left) {
      if (kLevel == 5 && block == 3) decay = shared.total[2][pair];
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        const int r = first + i;
        decay = times(decay, rows.decay[r]);
        put(shared.k, r, scaled(rows.k[r], decay));
        put(shared.q, r, scaled(rows.q[r], decay));
      }
    } else {
      if (kLevel == 5 && block == 0) decay = shared.total[1][pair];
#pragma unroll
      for (int i = kSpan - 1; i >= 0; --i) {
        const int r = first + i;
        put(shared.k, r, scaled(rows.k[r], decay));
        decay = times(decay, rows.decay[r]);
      }
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

// A 16x16 block of sums to its place: beta_i times it to L (queries false), scale times it as bf16 to the image of P.
template <class Belongs>
__device__ __forceinline__ void store_scores(VectorShared &shared, const float (&acc)[2][4], bool queries, float scale,
                                             int row_block, int column_block, int lane, Belongs belongs) {
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const int i = lane / 4 + e % 4 / 2 * 8, j = e / 4 * 8 + lane % 4 * 2 + e % 2;
    if (!belongs(i, j)) continue;
    const int row = 16 * row_block + i, column = 16 * column_block + j;
    if (queries) {
      *reinterpret_cast<__nv_bfloat16 *>(shared.scores + swizzled(row, 2 * column)) =
          __float2bfloat16_rn(scale * acc[e / 4][e % 4]);
    } else {
      shared.l[row * kPitch + column] = shared.beta[row] * acc[e / 4][e % 4];
    }
  }
}

template <int kLevel, Sm90Erase kErase>
__device__ __forceinline__ void run_level(Rows &rows, VectorShared &shared, float scale, int thread) {
  const int lane = thread % 32, block = thread / 32 % 4;
  const bool queries = thread >= 128;
  const uint32_t left = shared_address(queries ? shared.q : shared.k), right = shared_address(shared.k);
  forget(rows);
  store_level<kLevel>(rows, shared, thread % 64, thread / 64);
  __syncthreads();
  if (kErase == Sm90Erase::kShared || queries) {
    float acc[2][4];
    const auto whole = [](int, int) { return true; };
    if constexpr (kLevel < 4) {
      multiply_rows(acc, left, right, block, block, lane);
      store_scores(shared, acc, queries, scale, block, block, lane,
                   [](int i, int j) { return i > j && ((i >> kLevel) ^ (j >> kLevel)) == 1; });
    } else if constexpr (kLevel == 4) {
      if (block & 1) {
        multiply_rows(acc, left, right, block, block - 1, lane);
        store_scores(shared, acc, queries, scale, block, block - 1, lane, whole);
      }
    } else {
      for (int b = 0; b < (block & 2); ++b) {
        multiply_rows(acc, left, right, block, b, lane);
        store_scores(shared, acc, queries, scale, block, b, lane, whole);
      }
    }
  }
  __syncthreads();
}

template <Sm90Erase kErase>
__global__ void __launch_bounds__(256, 2) prep_vector_kernel(const __grid_constant__ PrepArguments in) {
  extern __shared__ __align__(1024) unsigned char raw[];
  VectorShared &shared = *reinterpret_cast<VectorShared *>(raw);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int pair = thread % 64, block = thread / 64, slot = blockIdx.x, hv = blockIdx.y;
  const Chunk chunk = chunk_of(in.shape, slot);
  launch_next();
  if (thread < 128) zero_rows_outside(in, slot, hv, thread);
  if (chunk.rows == 0) return;
  const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + slot;

  Rows rows;
  load_rows(in, chunk, hv, pair, block, rows);
  if (kErase == Sm90Erase::kShared && thread < kChunk) {
    const auto &s = in.beta_strides;
    const int64_t at = chunk.batch * s.batch + (chunk.start + thread) * s.token + hv * s.head;
    const float beta = thread < chunk.rows ? load_real(in.beta, in.beta_type, at) : 0.0f;
    shared.beta[thread] = shared.factors.beta.at[ByToken::row(thread)][ByToken::column(thread)] = beta;
  }
  for (int i = thread; i < kTileBytes / 16; i += 256) {
    reinterpret_cast<uint4 *>(shared.scores)[i] = make_uint4(0, 0, 0, 0);  // above the diagonal
  }
  float2 all = rows.decay[0];
#pragma unroll
  for (int r = 1; r < 16; ++r) all = times(all, rows.decay[r]);
  shared.total[block][pair] = all;
  forget(rows);
  const float sum = diagonal_sum(rows, lane);
  forget(rows);
  if (lane % 2 == 0) shared.diagonal[warp % 2][16 * block + lane / 2] = sum;
  __syncthreads();

  {
    float2 before = make_float2(1.0f, 1.0f), after = before;
    for (int b = 0; b < block; ++b) before = times(before, shared.total[b][pair]);
    for (int b = 3; b > block; --b) after = times(after, shared.total[b][pair]);
    if (block == 0) {
      const float2 whole = times(all, after);
      float *to = shared.factors.all[pair % 4] + pair / 4 * 2;
      to[0] = whole.x, to[1] = whole.y;
    }
    const int64_t corner = index * (2 * kTileBytes) + pair / 32 * kTileBytes;
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      before = times(before, rows.decay[r]);
      const int64_t at = corner + swizzled(16 * block + r, pair % 32 * 4);
      if constexpr (kErase == Sm90Erase::kShared) {
        *reinterpret_cast<uint32_t *>(in.tiles.k_start + at) = scaled(rows.k[r], before);
      }
      *reinterpret_cast<uint32_t *>(in.tiles.q_start + at) =
          scaled(rows.q[r], make_float2(in.scale * before.x, in.scale * before.y));
    }
#pragma unroll
    for (int r = 15; r >= 0; --r) {
      const int64_t at = corner + swizzled(16 * block + r, pair % 32 * 4);
      *reinterpret_cast<uint32_t *>(in.tiles.k_end + at) = scaled(rows.k[r], after);
      after = times(after, rows.decay[r]);
    }
  }

  run_level<0, kErase>(rows, shared, in.scale, thread);
  run_level<1, kErase>(rows, shared, in.scale, thread);
  run_level<2, kErase>(rows, shared, in.scale, thread);
  run_level<3, kErase>(rows, shared, in.scale, thread);
  run_level<4, kErase>(rows, shared, in.scale, thread);
  run_level<5, kErase>(rows, shared, in.scale, thread);

  if (warp >= 4) {
    const int i = thread - 128;
    if (i < kChunk) {
      *reinterpret_cast<__nv_bfloat16 *>(shared.scores + swizzled(i, 2 * i)) =
          __float2bfloat16_rn(in.scale * (shared.diagonal[0][i] + shared.diagonal[1][i]));
    }
  } else if constexpr (kErase == Sm90Erase::kShared) {
    if (warp < 2) {
      const int b = 2 * warp + lane / 16;
      invert_block(shared.l + 16 * b * kPitch + 16 * b, lane % 16);
    }
    named_barrier(1, 128);
    finish_inverse(shared.l, shared_address(shared.solve), warp, lane);
  }
  fence_async_shared();
  __syncthreads();
  if (thread == 0) {
    store_bytes(in.tiles.scores + index * kTileBytes, shared_address(shared.scores), kTileBytes);
    if constexpr (kErase == Sm90Erase::kShared) {
      store_bytes(in.tiles.solve + index * kTileBytes, shared_address(shared.solve), kTileBytes);
    }
    store_bytes(in.tiles.vector_factors + index, shared_address(&shared.factors), sizeof(VectorFactors));
    store_commit();
    store_wait<0>();
  }
}

template <Sm90Erase kErase>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  auto kernel = prep_vector_kernel<kErase>;
  constexpr int kBytes = sizeof(VectorShared);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  kernel<<<dim3(in.shape.slots, in.shape.HV), 256, kBytes, stream>>>(in);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_prep_vector(const PrepArguments &in, Sm90Erase erase, cudaStream_t stream) {
  return erase == Sm90Erase::kShared ? launch<Sm90Erase::kShared>(in, stream) : launch<Sm90Erase::kNone>(in, stream);
}

}  // namespace fw::sm90
