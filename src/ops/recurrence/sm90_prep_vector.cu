// SPDX-License-Identifier: Apache-2.0
// Decayed operands, scores and inverse of one chunk of one head for a vector gate; nothing here depends on the state.
// The decay between two rows is a product of exp(g) <= 1 over the rows between them, in fp32: no exponential of a sum, no
// difference of sums, any g from -infinity, one exponential for each element.
// Scores are formed in two ways.
//   Between 16-row blocks, and inside them when no bound of g is declared: (i, j), j < i, belongs to level l, the highest
//   bit in which i and j differ. With b the row between them whose lower l bits are 0, the score is the product of
//   x_i (rows b .. i) and k_j (rows j + 1 .. b - 1): both decays are at most 1 and past rows alone decide.
//   Inside them when g >= -5.3 is declared (kBounded): x_i (rows first .. i) and k_j / (rows first .. j), at most e^80.
// Grid (slots, HV), 256 threads: thread (pair, block) has two keys of 16 rows in registers.
//   1. q, k, g from global memory, 4 or 8 bytes a thread, whole lines a warp; exp; block totals; the diagonal of q k^T.
//   2. k exp(G), scale q exp(G), k exp(G_end - G) to global memory as swizzled images, whole lines a warp.
//   3. Scores inside blocks: kBounded one phase, else levels 0 to 3, in which a row with bit l set is a left side, else a
//      right side. Scores between blocks (levels 4 and 5): one phase. A phase: tiles to shared memory; warps 0-3 the
//      products for L, warps 4-7 those for P, 16 rows each, mma m16n8k16, straight to L = beta k k^T in fp32 and to the
//      image of P.
//   4. T = (I + L)^-1 by warps 0-3 (sm90_inverse.cuh); bulk stores.
// Shared memory: tiles k (then T), q, right 3 x 16384, P 8192, L 18432, totals 2048, beta 256, diagonal 512, factors 896.
// Handing over: __syncthreads before and after a phase's products, and between the numbered steps.
#include "cuda/launch.cuh"
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/scalar.cuh"
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
  unsigned char q[2 * kTileBytes], right[2 * kTileBytes];
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
  uint32_t byte[8];  // of this thread's pair in rows r % 8 of a swizzled image
};

// Keeps the compiler from holding values made of the rows across this point: unpacked, they do not fit in registers.
__device__ __forceinline__ void forget(Rows &rows) {
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    hold(rows.q[r]), hold(rows.k[r]), hold(rows.decay[r].x), hold(rows.decay[r].y);
  }
}

__device__ __forceinline__ float2 times(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }

__device__ __forceinline__ uint32_t scaled(uint32_t pair, float2 by) {
  return pack_bf16(low_bf16(pair) * by.x, high_bf16(pair) * by.y);
}

// Row r of the thread in a pair of swizzled images; `block` may be another's.
__device__ __forceinline__ uint32_t place(const Rows &rows, int block, int r) {
  return block * 2048 + r * 128 + rows.byte[r % 8];
}

template <bool kWide>
__device__ __forceinline__ void load_rows(const PrepArguments &in, const Chunk &chunk, int hv, int pair, int block,
                                          Rows &rows) {
  const int h = hv / (in.shape.HV / in.shape.H);
  const __nv_bfloat16 *q = in.q_rows + chunk.batch * in.q_strides.batch + h * in.q_strides.head + 2 * pair;
  const __nv_bfloat16 *k = in.k_rows + chunk.batch * in.k_strides.batch + h * in.k_strides.head + 2 * pair;
  const int64_t g_at = chunk.batch * in.g_strides.batch + chunk.start * in.g_strides.token + hv * in.g_strides.head + 2 * pair;
  const char *q_first = reinterpret_cast<const char *>(q + chunk.start * in.q_strides.token);
  const char *k_first = reinterpret_cast<const char *>(k + chunk.start * in.k_strides.token);
  const char *g_first = static_cast<const char *>(in.g) + g_at * (kWide ? 4 : 2);
  // 32 bits for 64 rows: the host refuses longer strides.
  const uint32_t q_step = static_cast<uint32_t>(2 * in.q_strides.token);
  const uint32_t k_step = static_cast<uint32_t>(2 * in.k_strides.token);
  const uint32_t g_step = static_cast<uint32_t>((kWide ? 4 : 2) * in.g_strides.token);
  const int inside = chunk.rows - 16 * block;
#pragma unroll
  for (int i = 0; i < 8; ++i) rows.byte[i] = pair / 32 * kTileBytes + ((pair % 32 * 4) ^ (i << 4));
#pragma unroll
  for (int r = 0; r < 16; ++r) {  // rows past the end read the chunk's last row
    const uint32_t row = min(16 * block + r, chunk.rows - 1);
    rows.q[r] = *reinterpret_cast<const uint32_t *>(q_first + uint64_t{row} * q_step);
    rows.k[r] = *reinterpret_cast<const uint32_t *>(k_first + uint64_t{row} * k_step);
    if constexpr (kWide) {
      rows.decay[r] = *reinterpret_cast<const float2 *>(g_first + uint64_t{row} * g_step);
    } else {
      rows.decay[r].x = __uint_as_float(*reinterpret_cast<const uint32_t *>(g_first + uint64_t{row} * g_step));
    }
  }
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const uint32_t narrow = __float_as_uint(rows.decay[r].x);
    const float2 gate = kWide ? rows.decay[r] : make_float2(low_bf16(narrow), high_bf16(narrow));
    const bool here = r < inside;
    rows.decay[r].x = here ? power_of_two(gate.x * kLog2e) : 1.0f;
    rows.decay[r].y = here ? power_of_two(gate.y * kLog2e) : 1.0f;
    rows.q[r] = here ? rows.q[r] : 0;
    rows.k[r] = here ? rows.k[r] : 0;
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

__device__ __forceinline__ void put(unsigned char *tile, uint32_t at, uint32_t value) {
  *reinterpret_cast<uint32_t *>(tile + at) = value;
}

// Both sides of a level inside the thread's 16 rows.
template <int kLevel>
__device__ __forceinline__ void store_level(const Rows &rows, VectorShared &shared, int block) {
  constexpr int kSpan = 1 << kLevel;
#pragma unroll
  for (int first = 0; first < 16; first += kSpan) {
    float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      if ((first >> kLevel) & 1) {
        const int r = first + i;
        decay = times(decay, rows.decay[r]);
        put(shared.k, place(rows, block, r), scaled(rows.k[r], decay));
        put(shared.q, place(rows, block, r), scaled(rows.q[r], decay));
      } else {
        const int r = first + kSpan - 1 - i;
        put(shared.k, place(rows, block, r), scaled(rows.k[r], decay));
        decay = times(decay, rows.decay[r]);
      }
    }
  }
}

__device__ __forceinline__ float reciprocal(float x) {
  return fminf(one_over(x), 6e34f);  // e^80; reached only by gates below the declared bound
}

// Both sides of the products inside a block of gates with a declared bound.
__device__ __forceinline__ void store_bounded(const Rows &rows, VectorShared &shared, int block) {
  float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    decay = times(decay, rows.decay[r]);
    put(shared.k, place(rows, block, r), scaled(rows.k[r], decay));
    put(shared.q, place(rows, block, r), scaled(rows.q[r], decay));
    put(shared.right, place(rows, block, r), scaled(rows.k[r], make_float2(reciprocal(decay.x), reciprocal(decay.y))));
  }
}

// Both sides of the products between blocks. Left sides from the block's start in the block's rows of k and q (kBounded:
// they are there), block 3 from the start of block 2 in the rows of block 0; right sides to the block's end in the block's
// rows of right, block 0 to the end of block 1 in the rows of block 3.
template <bool kBounded>
__device__ __forceinline__ void store_blocks(const Rows &rows, VectorShared &shared, int pair, int block) {
  if (block == 3 || (!kBounded && block > 0)) {
    const float2 more = shared.total[2][pair];
    float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      decay = times(decay, rows.decay[r]);
      if (!kBounded) {
        put(shared.k, place(rows, block, r), scaled(rows.k[r], decay));
        put(shared.q, place(rows, block, r), scaled(rows.q[r], decay));
      }
      if (block == 3) {
        put(shared.k, place(rows, 0, r), scaled(rows.k[r], times(decay, more)));
        put(shared.q, place(rows, 0, r), scaled(rows.q[r], times(decay, more)));
      }
    }
  }
  if (block < 3) {
    const float2 more = shared.total[1][pair];
    float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int r = 15; r >= 0; --r) {
      put(shared.right, place(rows, block, r), scaled(rows.k[r], decay));
      if (block == 0) put(shared.right, place(rows, 3, r), scaled(rows.k[r], times(decay, more)));
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
  forget(rows);
  store_level<kLevel>(rows, shared, thread / 64);
  __syncthreads();
  if (kErase == Sm90Erase::kShared || queries) {
    float acc[2][4];
    multiply_rows(acc, shared_address(queries ? shared.q : shared.k), shared_address(shared.k), block, block, lane);
    store_scores(shared, acc, queries, scale, block, block, lane,
                 [](int i, int j) { return i > j && ((i >> kLevel) ^ (j >> kLevel)) == 1; });
  }
  __syncthreads();
}

template <Sm90Erase kErase, bool kBounded>
__device__ __forceinline__ void run_blocks(Rows &rows, VectorShared &shared, float scale, int thread) {
  const int lane = thread % 32, block = thread / 32 % 4;
  const bool queries = thread >= 128;
  const uint32_t left = shared_address(queries ? shared.q : shared.k), right = shared_address(shared.right);
  float acc[2][4];
  if constexpr (kBounded) {
    forget(rows);
    store_bounded(rows, shared, thread / 64);
    __syncthreads();
    if (kErase == Sm90Erase::kShared || queries) {
      multiply_rows(acc, left, right, block, block, lane);
      const int least = queries ? 0 : 1;
      store_scores(shared, acc, queries, scale, block, block, lane, [least](int i, int j) { return i >= j + least; });
    }
    __syncthreads();
  }
  forget(rows);
  store_blocks<kBounded>(rows, shared, thread % 64, thread / 64);
  __syncthreads();
  if (kErase == Sm90Erase::kShared || queries) {
    const auto whole = [](int, int) { return true; };
    for (int b = 0; b < block; ++b) {
      const bool far = (b ^ block) >= 2;
      multiply_rows(acc, left, right, far && block == 3 ? 0 : block, far && b == 0 ? 3 : b, lane);
      store_scores(shared, acc, queries, scale, block, b, lane, whole);
    }
  }
  __syncthreads();
}

template <Sm90Erase kErase, bool kWide, bool kBounded>
__global__ void __launch_bounds__(256, 2) prep_vector_kernel(const __grid_constant__ PrepArguments in) {
  VectorShared &shared = *cuda::dynamic_shared<VectorShared>();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int pair = thread % 64, block = thread / 64, slot = blockIdx.x, hv = blockIdx.y;
  const Chunk chunk = chunk_of(in.shape, slot);
  launch_next();
  if (thread < 128) zero_rows_outside(in, slot, hv, thread);
  if (chunk.rows == 0) return;
  const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + slot;

  Rows rows;
  load_rows<kWide>(in, chunk, hv, pair, block, rows);
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
  if constexpr (!kBounded) {
    const float sum = diagonal_sum(rows, lane);
    if (lane % 2 == 0) shared.diagonal[warp % 2][16 * block + lane / 2] = sum;
    forget(rows);
  }
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
    unsigned char *k_start = in.tiles.k_start + index * (2 * kTileBytes);
    unsigned char *q_start = in.tiles.q_start + index * (2 * kTileBytes);
    unsigned char *k_end = in.tiles.k_end + index * (2 * kTileBytes);
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      before = times(before, rows.decay[r]);
      if constexpr (kErase == Sm90Erase::kShared) put(k_start, place(rows, block, r), scaled(rows.k[r], before));
      put(q_start, place(rows, block, r), scaled(rows.q[r], make_float2(in.scale * before.x, in.scale * before.y)));
    }
    forget(rows);
#pragma unroll
    for (int r = 15; r >= 0; --r) {
      put(k_end, place(rows, block, r), scaled(rows.k[r], after));
      after = times(after, rows.decay[r]);
    }
  }

  if constexpr (!kBounded) {
    run_level<0, kErase>(rows, shared, in.scale, thread);
    run_level<1, kErase>(rows, shared, in.scale, thread);
    run_level<2, kErase>(rows, shared, in.scale, thread);
    run_level<3, kErase>(rows, shared, in.scale, thread);
  }
  run_blocks<kErase, kBounded>(rows, shared, in.scale, thread);

  if (warp >= 4) {
    const int i = thread - 128;
    if (!kBounded && i < kChunk) {
      *reinterpret_cast<__nv_bfloat16 *>(shared.scores + swizzled(i, 2 * i)) =
          __float2bfloat16_rn(in.scale * (shared.diagonal[0][i] + shared.diagonal[1][i]));
    }
  } else if constexpr (kErase == Sm90Erase::kShared) {
    if (warp < 2) {
      const int b = 2 * warp + lane / 16;
      invert_block(shared.l + 16 * b * kPitch + 16 * b, lane % 16);
    }
    named_barrier(1, 128);
    finish_inverse<false>(shared.l, shared_address(shared.solve), warp, lane);
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

template <Sm90Erase kErase, bool kWide, bool kBounded>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  return cuda::launch({dim3(in.shape.slots, in.shape.HV), 256, sizeof(VectorShared), stream},
                      prep_vector_kernel<kErase, kWide, kBounded>, in);
}

template <Sm90Erase kErase, bool kWide>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  return in.g_is_bounded ? launch<kErase, kWide, true>(in, stream) : launch<kErase, kWide, false>(in, stream);
}

template <Sm90Erase kErase>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  return in.g_type == Sm90Real::kFloat32 ? launch<kErase, true>(in, stream) : launch<kErase, false>(in, stream);
}

}  // namespace

cudaError_t launch_prep_vector(const PrepArguments &in, Sm90Erase erase, cudaStream_t stream) {
  return erase == Sm90Erase::kShared ? launch<Sm90Erase::kShared>(in, stream) : launch<Sm90Erase::kNone>(in, stream);
}

}  // namespace fw::sm90
