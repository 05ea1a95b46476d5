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
//      kNormed: q and k are divided by the lengths of their rows here, which costs no pass, and stay in registers as fp16,
//      whose eleven bits leave the one rounding to bf16 that the images and tiles make. A gate that is made of logits
//      comes from a pass before (sm90_gate.cu).
//   2. x exp(G), scale q exp(G), k exp(G_end - G) to global memory as swizzled images, whole lines a warp. x, the left side
//      of L, is k, or erase_gate * k (kSeparate), whose gate waits in shared memory.
//   3. Scores inside blocks: kBounded one phase, else levels 0 to 3, in which a row with bit l set is a left side, else a
//      right side. Scores between blocks (levels 4 and 5): one phase. A phase: tiles to shared memory; warps 0-3 the
//      products for L, warps 4-7 those for P, 16 rows each, mma m16n8k16, straight to L = beta k k^T in fp32 and to the
//      image of P.
//   4. T = (I + L)^-1 by warps 0-3 (sm90_inverse.cuh); bulk stores.
// Shared memory: tiles k (then T), q, right 3 x 16384, P 8192, L 18432, totals 2048, beta 256, diagonal 512, factors 896,
// lengths 1024, an erase gate 16384.
// Handing over: __syncthreads before and after a phase's products, and between the numbered steps.
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "ops/recurrence/sm90_gates.cuh"
#include "ops/recurrence/sm90_inverse.cuh"
#include "ops/recurrence/sm90_operands.cuh"
#include "ops/recurrence/sm90_prep.cuh"

namespace fw::sm90 {
namespace {

// kNormed: rows of q and k are divided by their lengths. kWide: g is fp32.
template <Sm90Erase kEraseIn, bool kNormedIn, bool kWideIn, bool kBoundedIn>
struct Kind {
  static constexpr Sm90Erase kErase = kEraseIn;
  static constexpr bool kSolve = kErase != Sm90Erase::kNone, kSeparate = kErase == Sm90Erase::kSeparate;
  static constexpr bool kNormed = kNormedIn, kWide = kWideIn, kBounded = kBoundedIn;
};

template <class Is>
struct __align__(1024) VectorShared {
  union {
    unsigned char k[2 * kTileBytes];
    unsigned char solve[2 * kTileBytes];
  };
  unsigned char q[2 * kTileBytes], right[2 * kTileBytes];
  unsigned char scores[kTileBytes];
  float l[kChunk * kPitch];
  VectorFactors factors;
  float2 total[4][kKey / 2];
  float beta[kChunk];
  float diagonal[2][kChunk];
  float2 lengths[Is::kNormed ? 2 : 0][kChunk];  // squared, of q and of k, each half of the keys
  unsigned char erase_gate[Is::kSeparate ? 2 * kTileBytes : 0];
};

// Two keys of the 16 rows of a thread.
template <class Is>
struct Rows {
  float2 decay[16];
  uint32_t q[16], k[16];  // bf16, or fp16 once they are divided by lengths
  uint32_t byte[8];  // of this thread's pair in rows r % 8 of a swizzled image
};

// Keeps the compiler from holding values made of the rows across this point: unpacked, they do not fit in registers.
template <class Is>
__device__ __forceinline__ void forget(Rows<Is> &rows) {
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    asm volatile("" : "+r"(rows.q[r]), "+r"(rows.k[r]), "+f"(rows.decay[r].x), "+f"(rows.decay[r].y));
  }
}

__device__ __forceinline__ float2 times(float2 a, float2 b) { return make_float2(a.x * b.x, a.y * b.y); }

template <class Is>
__device__ __forceinline__ float2 unpacked(uint32_t pair) {
  return Is::kNormed ? make_float2(low_f16(pair), high_f16(pair)) : make_float2(low_bf16(pair), high_bf16(pair));
}

template <class Is>
__device__ __forceinline__ uint32_t scaled(uint32_t pair, float2 by) {
  const float2 x = times(unpacked<Is>(pair), by);
  return pack_bf16(x.x, x.y);
}

// Row r of the thread in a pair of swizzled images; `block` may be another's.
template <class Is>
__device__ __forceinline__ uint32_t place(const Rows<Is> &rows, int block, int r) {
  return block * 2048 + r * 128 + rows.byte[r % 8];
}

// The erase key of row r of the thread, whose own block is `block`, times `by`.
template <class Is>
__device__ __forceinline__ uint32_t scaled_erase(const Rows<Is> &rows, const VectorShared<Is> &shared, int block, int r,
                                                 float2 by) {
  if constexpr (Is::kSeparate) {
    const uint32_t gate = *reinterpret_cast<const uint32_t *>(shared.erase_gate + place(rows, block, r));
    by = times(by, make_float2(low_bf16(gate), high_bf16(gate)));
  }
  return scaled<Is>(rows.k[r], by);
}

template <class Is>
__device__ __forceinline__ void load_rows(const PrepArguments &in, const Chunk &chunk, int hv, int pair, int block,
                                          Rows<Is> &rows) {
  constexpr bool kWide = Is::kWide;
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

// Sums over a warp's 64 keys of products of rows: lanes 2r and 2r + 1 get row r.
template <class Is>
__device__ __forceinline__ float sum_products(const uint32_t (&a)[16], const uint32_t (&b)[16], int lane) {
  float v[16];
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const float2 x = unpacked<Is>(a[r]), y = unpacked<Is>(b[r]);
    v[r] = x.x * y.x + x.y * y.y;
  }
  fold<8>(v, lane);
  fold<4>(v, lane);
  fold<2>(v, lane);
  fold<1>(v, lane);
  return v[0] + __shfl_xor_sync(0xffffffffu, v[0], 1);
}

// Rows of q and k divided by their lengths, eps 1e-6 inside the root; bf16 becomes fp16. The whole block takes part.
template <class Is>
__device__ __forceinline__ void normalize(Rows<Is> &rows, VectorShared<Is> &shared, int thread) {
  using Stored = Kind<Is::kErase, false, Is::kWide, Is::kBounded>;
  const int lane = thread % 32, half = thread / 32 % 2, block = thread / 64;
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    uint32_t (&x)[16] = which == 0 ? rows.q : rows.k;
    const float sum = sum_products<Stored>(x, x, lane);
    if (lane % 2 == 0) (&shared.lengths[which][16 * block + lane / 2].x)[half] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    uint32_t (&x)[16] = which == 0 ? rows.q : rows.k;
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const float2 squared = shared.lengths[which][16 * block + r];
      const float by = rsqrtf(squared.x + squared.y + 1e-6f);
      x[r] = pack_f16(by * low_bf16(x[r]), by * high_bf16(x[r]));
    }
  }
}

// The rows of the erase gate to shared memory, whole lines a warp; rows past the end are the chunk's last.
template <class Is>
__device__ __forceinline__ void load_erase_gate(const PrepArguments &in, const Chunk &chunk, int hv, const Rows<Is> &rows,
                                                VectorShared<Is> &shared, int pair, int block) {
  const __nv_bfloat16 *gate = in.x_rows + chunk.batch * in.x_strides.batch + chunk.start * in.x_strides.token +
                              hv / (in.shape.HV / in.shape.H) * in.x_strides.head + 2 * pair;
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const int row = min(16 * block + r, chunk.rows - 1);
    *reinterpret_cast<uint32_t *>(shared.erase_gate + place(rows, block, r)) =
        *reinterpret_cast<const uint32_t *>(gate + row * in.x_strides.token);
  }
}

__device__ __forceinline__ void put(unsigned char *tile, uint32_t at, uint32_t value) {
  *reinterpret_cast<uint32_t *>(tile + at) = value;
}

// Both sides of a level inside the thread's 16 rows.
template <int kLevel, class Is>
__device__ __forceinline__ void store_level(const Rows<Is> &rows, VectorShared<Is> &shared, int block) {
  constexpr int kSpan = 1 << kLevel;
#pragma unroll
  for (int first = 0; first < 16; first += kSpan) {
    float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      if ((first >> kLevel) & 1) {
        const int r = first + i;
        decay = times(decay, rows.decay[r]);
        put(shared.k, place(rows, block, r), scaled_erase(rows, shared, block, r, decay));
        put(shared.q, place(rows, block, r), scaled<Is>(rows.q[r], decay));
      } else {
        const int r = first + kSpan - 1 - i;
        put(shared.k, place(rows, block, r), scaled<Is>(rows.k[r], decay));
        decay = times(decay, rows.decay[r]);
      }
    }
  }
}

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return fminf(y, 6e34f);  // e^80; reached only by gates below the declared bound
}

// Both sides of the products inside a block of gates with a declared bound.
template <class Is>
__device__ __forceinline__ void store_bounded(const Rows<Is> &rows, VectorShared<Is> &shared, int block) {
  float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    decay = times(decay, rows.decay[r]);
    put(shared.k, place(rows, block, r), scaled_erase(rows, shared, block, r, decay));
    put(shared.q, place(rows, block, r), scaled<Is>(rows.q[r], decay));
    put(shared.right, place(rows, block, r), scaled<Is>(rows.k[r], make_float2(reciprocal(decay.x), reciprocal(decay.y))));
  }
}

// Both sides of the products between blocks. Left sides from the block's start in the block's rows of k and q (kBounded:
// they are there), block 3 from the start of block 2 in the rows of block 0; right sides to the block's end in the block's
// rows of right, block 0 to the end of block 1 in the rows of block 3.
template <class Is>
__device__ __forceinline__ void store_blocks(const Rows<Is> &rows, VectorShared<Is> &shared, int pair, int block) {
  constexpr bool kBounded = Is::kBounded;
  if (block == 3 || (!kBounded && block > 0)) {
    const float2 more = shared.total[2][pair];
    float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      decay = times(decay, rows.decay[r]);
      if (!kBounded) {
        put(shared.k, place(rows, block, r), scaled_erase(rows, shared, block, r, decay));
        put(shared.q, place(rows, block, r), scaled<Is>(rows.q[r], decay));
      }
      if (block == 3) {
        put(shared.k, place(rows, 0, r), scaled_erase(rows, shared, block, r, times(decay, more)));
        put(shared.q, place(rows, 0, r), scaled<Is>(rows.q[r], times(decay, more)));
      }
    }
  }
  if (block < 3) {
    const float2 more = shared.total[1][pair];
    float2 decay = make_float2(1.0f, 1.0f);
#pragma unroll
    for (int r = 15; r >= 0; --r) {
      put(shared.right, place(rows, block, r), scaled<Is>(rows.k[r], decay));
      if (block == 0) put(shared.right, place(rows, 3, r), scaled<Is>(rows.k[r], times(decay, more)));
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
template <class Is, class Belongs>
__device__ __forceinline__ void store_scores(VectorShared<Is> &shared, const float (&acc)[2][4], bool queries, float scale,
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

template <int kLevel, class Is>
__device__ __forceinline__ void run_level(Rows<Is> &rows, VectorShared<Is> &shared, float scale, int thread) {
  const int lane = thread % 32, block = thread / 32 % 4;
  const bool queries = thread >= 128;
  forget(rows);
  store_level<kLevel>(rows, shared, thread / 64);
  __syncthreads();
  if (Is::kSolve || queries) {
    float acc[2][4];
    multiply_rows(acc, shared_address(queries ? shared.q : shared.k), shared_address(shared.k), block, block, lane);
    store_scores(shared, acc, queries, scale, block, block, lane,
                 [](int i, int j) { return i > j && ((i >> kLevel) ^ (j >> kLevel)) == 1; });
  }
  __syncthreads();
}

template <class Is>
__device__ __forceinline__ void run_blocks(Rows<Is> &rows, VectorShared<Is> &shared, float scale, int thread) {
  const int lane = thread % 32, block = thread / 32 % 4;
  const bool queries = thread >= 128;
  const uint32_t left = shared_address(queries ? shared.q : shared.k), right = shared_address(shared.right);
  float acc[2][4];
  if constexpr (Is::kBounded) {
    forget(rows);
    store_bounded(rows, shared, thread / 64);
    __syncthreads();
    if (Is::kSolve || queries) {
      multiply_rows(acc, left, right, block, block, lane);
      const int least = queries ? 0 : 1;
      store_scores(shared, acc, queries, scale, block, block, lane, [least](int i, int j) { return i >= j + least; });
    }
    __syncthreads();
  }
  forget(rows);
  store_blocks(rows, shared, thread % 64, thread / 64);
  __syncthreads();
  if (Is::kSolve || queries) {
    const auto whole = [](int, int) { return true; };
    for (int b = 0; b < block; ++b) {
      const bool far = (b ^ block) >= 2;
      multiply_rows(acc, left, right, far && block == 3 ? 0 : block, far && b == 0 ? 3 : b, lane);
      store_scores(shared, acc, queries, scale, block, b, lane, whole);
    }
  }
  __syncthreads();
}

template <class Is>
__global__ void __launch_bounds__(256, 2) prep_vector_kernel(const __grid_constant__ PrepArguments in) {
  extern __shared__ __align__(1024) unsigned char raw[];
  auto &shared = *reinterpret_cast<VectorShared<Is> *>(raw);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int pair = thread % 64, block = thread / 64, slot = blockIdx.x, hv = blockIdx.y;
  const Chunk chunk = chunk_of(in.shape, slot);
  launch_next();
  if (thread < 128) zero_rows_outside(in, slot, hv, thread);
  if (chunk.rows == 0) return;
  const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + slot;

  Rows<Is> rows;
  load_rows(in, chunk, hv, pair, block, rows);
  if constexpr (Is::kSeparate) load_erase_gate(in, chunk, hv, rows, shared, pair, block);
  if constexpr (Is::kNormed) normalize(rows, shared, thread);
  if (Is::kSolve && thread < kChunk) {
    const auto &s = in.beta_strides;
    const int64_t at = chunk.batch * s.batch + (chunk.start + thread) * s.token + hv * s.head;
    const float beta = thread < chunk.rows ? load_beta(in, at) : 0.0f;
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
  if constexpr (!Is::kBounded) {
    const float sum = sum_products<Is>(rows.q, rows.k, lane);
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
    unsigned char *x_start = in.tiles.x_start + index * (2 * kTileBytes);
    unsigned char *q_start = in.tiles.q_start + index * (2 * kTileBytes);
    unsigned char *k_end = in.tiles.k_end + index * (2 * kTileBytes);
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      before = times(before, rows.decay[r]);
      if constexpr (Is::kSolve) put(x_start, place(rows, block, r), scaled_erase(rows, shared, block, r, before));
      put(q_start, place(rows, block, r), scaled<Is>(rows.q[r], make_float2(in.scale * before.x, in.scale * before.y)));
    }
    forget(rows);
#pragma unroll
    for (int r = 15; r >= 0; --r) {
      put(k_end, place(rows, block, r), scaled<Is>(rows.k[r], after));
      after = times(after, rows.decay[r]);
    }
  }

  if constexpr (!Is::kBounded) {
    run_level<0>(rows, shared, in.scale, thread);
    run_level<1>(rows, shared, in.scale, thread);
    run_level<2>(rows, shared, in.scale, thread);
    run_level<3>(rows, shared, in.scale, thread);
  }
  run_blocks(rows, shared, in.scale, thread);

  if (warp >= 4) {
    const int i = thread - 128;
    if (!Is::kBounded && i < kChunk) {
      *reinterpret_cast<__nv_bfloat16 *>(shared.scores + swizzled(i, 2 * i)) =
          __float2bfloat16_rn(in.scale * (shared.diagonal[0][i] + shared.diagonal[1][i]));
    }
  } else if constexpr (Is::kSolve) {
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
    if constexpr (Is::kSolve) {
      store_bytes(in.tiles.solve + 2 * index * kTileBytes, shared_address(shared.solve), 2 * kTileBytes);
    }
    store_bytes(in.tiles.vector_factors + index, shared_address(&shared.factors), sizeof(VectorFactors));
    store_commit();
    store_wait<0>();
  }
}

template <class Is>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  auto kernel = prep_vector_kernel<Is>;
  constexpr int kBytes = sizeof(VectorShared<Is>);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  kernel<<<dim3(in.shape.slots, in.shape.HV), 256, kBytes, stream>>>(in);
  return cudaGetLastError();
}

template <Sm90Erase kErase, bool kNormed, bool kWide>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  return in.g_is_bounded ? launch<Kind<kErase, kNormed, kWide, true>>(in, stream)
                         : launch<Kind<kErase, kNormed, kWide, false>>(in, stream);
}

template <Sm90Erase kErase>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  if (in.has_l2norm) return launch<kErase, true, true>(in, stream);
  return in.g_type == Sm90Real::kFloat32 ? launch<kErase, false, true>(in, stream) : launch<kErase, false, false>(in, stream);
}

}  // namespace

cudaError_t launch_prep_vector(const PrepArguments &in, Sm90Erase erase, cudaStream_t stream) {
  switch (erase) {
    case Sm90Erase::kNone: return launch<Sm90Erase::kNone>(in, stream);
    case Sm90Erase::kShared: return launch<Sm90Erase::kShared>(in, stream);
    default: return launch<Sm90Erase::kSeparate>(in, stream);
  }
}

}  // namespace fw::sm90
