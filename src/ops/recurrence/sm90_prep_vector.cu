// SPDX-License-Identifier: Apache-2.0
// Decayed operands, scores and inverse of one chunk of one head for a vector gate without independent erase keys; nothing
// here depends on the state.
// Grid (slots, HV), 256 threads: thread (pair, block) has two keys of 16 rows in registers.
//   1. q, k, g from global memory, 4 or 8 bytes a thread, whole lines a warp; exp; block totals; the diagonal of q k^T.
//      kNormed: q and k are divided by the lengths of their rows here, which costs no pass. A gate that is made of logits
//      comes from a pass before (sm90_gate.cu).
//   2. x exp(G), scale q exp(G), k exp(G_end - G) to global memory as swizzled images, whole lines a warp. x, the left side
//      of L, is k, or erase_gate * k (kSeparate), whose gate waits in shared memory.
//   3. Scores (sm90_blocks.cuh), straight to L = beta x k^T in fp32 and to the image of P.
//   4. T = (I + L)^-1 by warps 0-3 (sm90_inverse.cuh); bulk stores.
// Shared memory: tiles k (then T), q, right 3 x 16384, P 2 x 8192, L 18432, totals 2048, beta 256, diagonal 512, factors 896,
// lengths 1024, an erase gate 16384.
// Handing over: __syncthreads before and after a phase's products, and between the numbered steps.
#include "cuda/launch.cuh"
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "ops/recurrence/sm90_blocks.cuh"
#include "ops/recurrence/sm90_inverse.cuh"
#include "ops/recurrence/sm90_operands.cuh"

namespace fw::sm90 {
namespace {

template <class Is>
struct __align__(1024) VectorShared {
  union {
    unsigned char k[2 * kTileBytes];
    unsigned char solve[2 * kTileBytes];
  };
  unsigned char q[2 * kTileBytes], right[2 * kTileBytes];
  unsigned char scores[(Is::kSolve ? 2 : 1) * kTileBytes];  // with a solve the low part behind it
  float l[kChunk * kPitch];
  VectorFactors factors;
  float2 total[4][kKey / 2];
  float beta[kChunk];
  float diagonal[2][kChunk];
  float2 lengths[Is::kNormed ? 2 : 0][kChunk];
  unsigned char erase_gate[Is::kSeparate ? 2 * kTileBytes : 0];
};

// The sides of sm90_blocks.cuh: x and q against k.
template <class Is>
struct VectorSides {
  static constexpr bool kBounded = Is::kBounded;
  static constexpr int kRights = 1;
  VectorShared<Is> &shared;
  int pair, block;
  float scale;
  Rows rows;
  uint32_t q[16], k[16];

  __device__ __forceinline__ VectorSides(VectorShared<Is> &memory, int p, int b, float s) : shared(memory), pair(p), block(b), scale(s) {}
  // Keeps the compiler from holding values made of the rows across this point: unpacked, they do not fit in registers.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int r = 0; r < 16; ++r) hold(q[r]), hold(k[r]), hold(rows.decay[r].x), hold(rows.decay[r].y);
  }
  __device__ __forceinline__ float2 total(int b) const { return shared.total[b][pair]; }
  __device__ __forceinline__ uint32_t scaled_erase(int r, float2 by) const {
    if constexpr (Is::kSeparate) {
      const uint32_t gate = *reinterpret_cast<const uint32_t *>(shared.erase_gate + place(rows, block, r));
      by = times(by, make_float2(low_bf16(gate), high_bf16(gate)));
    }
    return scaled<Is::kNormed>(k[r], by);
  }
  __device__ __forceinline__ void left(uint32_t at, int r, float2 through, float2) {
    put(shared.k, at, scaled_erase(r, through));
    put(shared.q, at, scaled<Is::kNormed>(q[r], through));
  }
  __device__ __forceinline__ void right(uint32_t at, int r, float2 decay, bool apart) {
    put(apart ? shared.right : shared.k, at, scaled<Is::kNormed>(k[r], decay));
  }
  __device__ __forceinline__ bool wants(bool queries) const { return Is::kSolve || queries; }
  __device__ __forceinline__ uint32_t left_tile(bool queries) const { return shared_address(queries ? shared.q : shared.k); }
  __device__ __forceinline__ uint32_t right_tile(int, bool apart) const {
    return shared_address(apart ? shared.right : shared.k);
  }
  __device__ __forceinline__ void store(int, bool queries, int row, int column, float value) {
    if (queries) {
      put_score<Is::kSolve>(shared.scores, row, column, scale * value);
    } else {
      shared.l[row * kPitch + column] = shared.beta[row] * value;
    }
  }
};

template <class Is>
__device__ __forceinline__ void load_rows(const PrepArguments &in, const Chunk &chunk, int hv, VectorSides<Is> &sides) {
  const int h = hv / (in.shape.HV / in.shape.H), pair = sides.pair, block = sides.block;
  const int key = min(2 * pair, in.shape.K - 2), inside = 2 * pair < in.shape.K ? chunk.rows - 16 * block : 0;
  const __nv_bfloat16 *q = in.q_rows + chunk.batch * in.q_strides.batch + h * in.q_strides.head + key;
  const __nv_bfloat16 *k = in.k_rows + chunk.batch * in.k_strides.batch + h * in.k_strides.head + key;
  const char *q_first = reinterpret_cast<const char *>(q + chunk.start * in.q_strides.token);
  const char *k_first = reinterpret_cast<const char *>(k + chunk.start * in.k_strides.token);
  // 32 bits for 64 rows: the host refuses longer strides.
  const uint32_t q_step = static_cast<uint32_t>(2 * in.q_strides.token);
  const uint32_t k_step = static_cast<uint32_t>(2 * in.k_strides.token);
#pragma unroll
  for (int r = 0; r < 16; ++r) {  // rows past the end read the chunk's last row
    const uint32_t row = min(16 * block + r, chunk.rows - 1);
    sides.q[r] = *reinterpret_cast<const uint32_t *>(q_first + uint64_t{row} * q_step);
    sides.k[r] = *reinterpret_cast<const uint32_t *>(k_first + uint64_t{row} * k_step);
  }
  place_rows(sides.rows, pair);
  load_gates<Is>(in, chunk, hv, pair, block, sides.rows);
  make_decays<Is>(chunk, block, sides.rows);
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    if (r >= inside) sides.q[r] = sides.k[r] = 0;
  }
  if constexpr (Is::kSeparate) {
    const __nv_bfloat16 *gate = in.x_rows + chunk.batch * in.x_strides.batch + chunk.start * in.x_strides.token +
                                h * in.x_strides.head + key;
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const int row = min(16 * block + r, chunk.rows - 1);
      const uint32_t word = *reinterpret_cast<const uint32_t *>(gate + row * in.x_strides.token);
      put(sides.shared.erase_gate, place(sides.rows, block, r), r < inside ? word : 0);
    }
  }
}

template <class Is>
__global__ void __launch_bounds__(256, 2) prep_vector_kernel(const __grid_constant__ PrepArguments in) {
  auto &shared = *cuda::dynamic_shared<VectorShared<Is>>();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int pair = thread % 64, block = thread / 64, slot = blockIdx.x, hv = blockIdx.y;
  const Chunk chunk = chunk_of(in.shape, slot);
  launch_next();
  if (thread < 128) zero_rows_outside(in, slot, hv, thread);
  if (chunk.rows == 0) return;
  const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + slot;

  VectorSides<Is> sides(shared, pair, block, in.scale);
  const Rows &rows = sides.rows;
  load_rows(in, chunk, hv, sides);
  if constexpr (Is::kNormed) {
    sides.forget();
    normalize(sides.q, sides.k, shared.lengths, thread);
    sides.forget();
  }
  if (Is::kSolve && thread < kChunk) {
    const auto &s = in.beta_strides;
    const int64_t at = chunk.batch * s.batch + (chunk.start + thread) * s.token + hv * s.head;
    const float beta = thread < chunk.rows ? load_beta(in, at) : 0.0f;
    shared.beta[thread] = shared.factors.beta.at[ByToken::row(thread)][ByToken::column(thread)] = beta;
  }
  for (int i = thread; i < static_cast<int>(sizeof(shared.scores)) / 16; i += 256) {
    reinterpret_cast<uint4 *>(shared.scores)[i] = make_uint4(0, 0, 0, 0);  // above the diagonal
  }
  float2 all = rows.decay[0];
#pragma unroll
  for (int r = 1; r < 16; ++r) all = times(all, rows.decay[r]);
  shared.total[block][pair] = all;
  sides.forget();
  if constexpr (!Is::kBounded) {
    const float sum = sum_products<Is::kNormed>(sides.q, sides.k, lane);
    if (lane % 2 == 0) shared.diagonal[warp % 2][16 * block + lane / 2] = sum;
    sides.forget();
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
      if constexpr (Is::kSolve) put(x_start, place(rows, block, r), sides.scaled_erase(r, before));
      put(q_start, place(rows, block, r), scaled<Is::kNormed>(sides.q[r], make_float2(in.scale * before.x, in.scale * before.y)));
    }
    sides.forget();
#pragma unroll
    for (int r = 15; r >= 0; --r) {
      put(k_end, place(rows, block, r), scaled<Is::kNormed>(sides.k[r], after));
      after = times(after, rows.decay[r]);
    }
  }

  run_phases(sides, thread);

  if (warp >= 4) {
    const int i = thread - 128;
    if (!Is::kBounded && i < kChunk) {
      put_score<Is::kSolve>(shared.scores, i, i, in.scale * (shared.diagonal[0][i] + shared.diagonal[1][i]));
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
      store_bytes(in.tiles.scores_low + index * kTileBytes, shared_address(shared.scores) + kTileBytes, kTileBytes);
      store_bytes(in.tiles.solve + 2 * index * kTileBytes, shared_address(shared.solve), 2 * kTileBytes);
    }
    store_bytes(in.tiles.vector_factors + index, shared_address(&shared.factors), sizeof(VectorFactors));
    store_commit();
    store_wait<0>();
  }
}

template <class Is>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  return cuda::launch({dim3(in.shape.slots, in.shape.HV), 256, sizeof(VectorShared<Is>), stream}, prep_vector_kernel<Is>, in);
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
