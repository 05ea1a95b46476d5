// SPDX-License-Identifier: Apache-2.0
// Decayed operands, scores and inverse of one chunk of one head for a vector gate without independent erase keys; nothing
// here depends on the state.
// One CTA a head and slot, 512 threads, two CTAs a multiprocessor: thread (pair, group) has two keys of 8 rows in registers.
//   1. q, k by tensor map; g from global memory, 4 or 8 bytes a thread, whole lines a warp; exp; totals of 8 rows.
//      kNormed: q and k are divided by the lengths of their rows here, which costs no pass. A gate that is made of logits
//      comes from a pass before (sm90_gate.cu).
//   2. Tiles of the scores (sm90_scores.cuh). x, the left side of L, is k, or erase_gate * k (kSeparate).
//   3. Scores, straight to L = beta x k^T in fp32 and to the images of P.
//   4. x exp(G), scale q exp(G), k exp(G_end - G) as swizzled images in the tiles' places; bulk stores.
//   5. T = (I + L)^-1 by warps 0-3 (sm90_inverse.cuh) in the place of a tile; bulk store.
// Shared memory: tiles left x, left q, inside, between 4 x 16384 (then the images, and T); L 18432 (before it k as loaded);
// P 2 x 8192 (before it q); far left sides 2 x 4096; totals 4096, factors 896, beta 256, lengths 1024: 113 KB.
// Handing over: __syncthreads between the numbered steps, named barrier 1 inside the last.
#include <cstddef>

#include "cuda/launch.cuh"
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "ops/recurrence/sm90_inverse.cuh"
#include "ops/recurrence/sm90_operands.cuh"
#include "ops/recurrence/sm90_scores.cuh"

namespace fw::sm90 {
namespace {

template <Sm90Erase kEraseIn, bool kNormedIn, bool kWideIn>
struct Kind {
  static constexpr Sm90Erase kErase = kEraseIn;
  static constexpr bool kSolve = kErase != Sm90Erase::kNone, kSeparate = kErase == Sm90Erase::kSeparate;
  static constexpr bool kNormed = kNormedIn, kWide = kWideIn;  // rows of q and k divided by their lengths; g is fp32
};

struct __align__(1024) VectorShared {
  unsigned char left_x[2 * kTileBytes], left_q[2 * kTileBytes], inside[2 * kTileBytes], between[2 * kTileBytes];
  unsigned char scores[2 * kTileBytes];  // with a solve the low part behind it
  union {
    float l[kChunk * kPitch];
    unsigned char k[2 * kTileBytes];
  };
  unsigned char far[2 * 4096];  // half of the keys: 16 rows of x, then of q
  float2 total[kGroups][kKey / 2];
  VectorFactors factors;
  float beta[kChunk];
  float2 lengths[2][kChunk];
  uint8_t fails[2][kChunk];
  alignas(16) uint8_t any_fails[16];
  uint64_t loaded;
};

// The sides of sm90_scores.cuh: x and q against k.
template <class Is>
struct VectorSides {
  static constexpr int kRights = 1;
  static constexpr bool kErases = Is::kSolve;
  static constexpr uint32_t kFarHalf = 4096;
  VectorShared &shared;
  uint32_t base, far;  // far: from a row's place in a tile to that of a row of block 3 in `far`
  int pair, group;
  float scale;
  Rows rows;
  uint32_t q[kEach], k[kEach], gate[Is::kSeparate ? kEach : 1];

  __device__ __forceinline__ VectorSides(VectorShared &memory, int p, int g, float s)
      : shared(memory), base(shared_address(&memory)), pair(p), group(g), scale(s) {
    far = offsetof(VectorShared, far) - 6 * (kEach * 128) - p / 32 * (kTileBytes - kFarHalf);
    place_rows(rows, base, p, g);
  }
  // Keeps the compiler from holding values made of the rows across this point: unpacked, they do not fit in registers.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int r = 0; r < kEach; ++r) hold(q[r]), hold(k[r]), hold(rows.decay[r].x), hold(rows.decay[r].y);
    hold(rows.first);
  }
  __device__ __forceinline__ float2 total(int g) const { return shared.total[g][pair]; }
  __device__ __forceinline__ void put(size_t tile, int r, uint32_t value) {
    store_word(rows.at(r) + static_cast<uint32_t>(tile), value);
  }
  __device__ __forceinline__ uint32_t scaled_erase(int r, float2 by) const {
    if constexpr (Is::kSeparate) by = times(by, make_float2(low_bf16(gate[r]), high_bf16(gate[r])));
    return scaled<Is::kNormed>(k[r], by);
  }
  __device__ __forceinline__ void left(int r, float2 through, float2) {
    if constexpr (Is::kSolve) put(offsetof(VectorShared, left_x), r, scaled_erase(r, through));
    put(offsetof(VectorShared, left_q), r, scaled<Is::kNormed>(q[r], through));
  }
  __device__ __forceinline__ void left_far(int r, float2 through, float2) {
    const uint32_t at = rows.at(r) + far;
    if constexpr (Is::kSolve) store_word(at, scaled_erase(r, through));
    store_word(at + 2048, scaled<Is::kNormed>(q[r], through));
  }
  __device__ __forceinline__ uint32_t inside(int r, float2 inverse) {
    const uint32_t word = scaled<Is::kNormed>(k[r], inverse);
    put(offsetof(VectorShared, inside), r, word);
    return word;
  }
  __device__ __forceinline__ void between(int r, float2 decay, uint32_t to) {
    put(offsetof(VectorShared, between) + to, r, scaled<Is::kNormed>(k[r], decay));
  }
  __device__ __forceinline__ void mixed(int r, float2 decay) {
    put(offsetof(VectorShared, left_x), r, scaled<Is::kNormed>(k[r], decay));
  }
  __device__ __forceinline__ void plain(int r) {
    const float2 one = make_float2(1.0f, 1.0f);
    put(offsetof(VectorShared, left_q), r, scaled<Is::kNormed>(q[r], one));
    put(offsetof(VectorShared, inside), r, scaled<Is::kNormed>(k[r], one));
  }
  __device__ __forceinline__ uint32_t lefts(bool queries) const {
    return base + (queries ? offsetof(VectorShared, left_q) : offsetof(VectorShared, left_x));
  }
  __device__ __forceinline__ uint32_t lefts_far(bool queries) const { return base + offsetof(VectorShared, far) + queries * 2048; }
  __device__ __forceinline__ uint32_t insides(int) const { return base + offsetof(VectorShared, inside); }
  __device__ __forceinline__ uint32_t betweens(int) const { return base + offsetof(VectorShared, between); }
  __device__ __forceinline__ uint32_t mixeds(int) const { return base + offsetof(VectorShared, left_x); }
  __device__ __forceinline__ void store(int, bool queries, int row_block, int column_block, const float (&acc)[2][4], int lane) {
    if (queries) {
      store_scores<Is::kSolve>(base + offsetof(VectorShared, scores), row_block, column_block, acc, scale, lane);
    } else {
      const float *beta = shared.beta + 16 * row_block + lane / 4;
      store_solved(shared.l, row_block, column_block, acc, beta[0], beta[8], lane);
    }
  }
  __device__ __forceinline__ void store_one(int, bool queries, int row, int column, float value) {
    if (queries) {
      put_score<Is::kSolve>(shared.scores, row, column, scale * value);
    } else {
      shared.l[row * kPitch + column] = shared.beta[row] * value;
    }
  }
};

template <class Is>
__device__ __forceinline__ void load_erase_gate(const PrepArguments &in, const Chunk &chunk, int h, VectorSides<Is> &sides) {
  if constexpr (Is::kSeparate) {
    const __nv_bfloat16 *gate = in.x_rows + chunk.batch * in.x_strides.batch + chunk.start * in.x_strides.token +
                                h * in.x_strides.head + min(2 * sides.pair, in.shape.K - 2);
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      const int row = min(kEach * sides.group + r, chunk.rows - 1);
      sides.gate[r] = *reinterpret_cast<const uint32_t *>(gate + row * in.x_strides.token);
    }
  }
}

// The rows of the images.
template <class Is>
__device__ __forceinline__ void store_images(VectorSides<Is> &sides) {
  const Rows &rows = sides.rows;
  float2 before, after;
  totals_around(sides, sides.group, before, after);
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    before = times(before, rows.decay[r]);
    if constexpr (Is::kSolve) sides.put(offsetof(VectorShared, left_x), r, sides.scaled_erase(r, before));
    const float2 by = make_float2(sides.scale * before.x, sides.scale * before.y);
    sides.put(offsetof(VectorShared, left_q), r, scaled<Is::kNormed>(sides.q[r], by));
  }
  if (sides.group == kGroups - 1) {
    float *to = sides.shared.factors.all[sides.pair % 4] + sides.pair / 4 * 2;
    to[0] = before.x, to[1] = before.y;
  }
  sides.forget();
#pragma unroll
  for (int r = kEach - 1; r >= 0; --r) {
    sides.put(offsetof(VectorShared, inside), r, scaled<Is::kNormed>(sides.k[r], after));
    after = times(after, rows.decay[r]);
  }
}

template <class Is>
__device__ __noinline__ void score_failing_chunk(VectorSides<Is> &sides, int thread) {
  score_failing_rows(sides, sides.shared.fails, thread);
}

template <class Is>
__global__ void __launch_bounds__(kPrepThreads, 2) prep_vector_kernel(const __grid_constant__ PrepArguments in) {
  auto &shared = *cuda::dynamic_shared<VectorShared>();
  const int thread = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pair = threadIdx.x % 64, group = threadIdx.x / 64;
  const auto [slot, hv, h, chunk] = prep_tile(in.shape);
  launch_next();
  if (in.o_rows_left_over && thread < 128) zero_rows_outside(in, slot, hv, thread);
  if (chunk.rows == 0) return;
  const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + slot;

  const uint32_t loaded = shared_address(&shared.loaded);
  if (thread == 0) {
    barrier_init(loaded, 1);
    barrier_init_fence();
    barrier_expect_bytes(loaded, 4 * kTileBytes);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_box(shared_address(shared.k) + i * kTileBytes, &in.k, loaded, 64 * i, h, chunk.start, chunk.batch);
      load_box(shared_address(shared.scores) + i * kTileBytes, &in.q, loaded, 64 * i, h, chunk.start, chunk.batch);
    }
  }
  VectorSides<Is> sides(shared, pair, group, in.scale);
  Rows &rows = sides.rows;
  load_gates<Is::kWide>(in, chunk, hv, pair, group, rows.decay);
  load_erase_gate(in, chunk, h, sides);
  if (Is::kSolve && thread < kChunk) {
    const auto &s = in.beta_strides;
    const int64_t at = chunk.batch * s.batch + (chunk.start + thread) * s.token + hv * s.head;
    const float beta = thread < chunk.rows ? load_beta(in, at) : 0.0f;
    shared.beta[thread] = shared.factors.beta.at[ByToken::row(thread)][ByToken::column(thread)] = beta;
  }
  shared.total[group][pair] = make_decays<Is::kWide>(chunk, group, rows);
  __syncthreads();
  barrier_wait(loaded, 0);
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    sides.q[r] = load_word(rows.at(r) + static_cast<uint32_t>(offsetof(VectorShared, scores)));
    sides.k[r] = load_word(rows.at(r) + static_cast<uint32_t>(offsetof(VectorShared, k)));
  }
  if (chunk.rows < kChunk) {  // they are of another sequence
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      if (kEach * group + r >= chunk.rows) sides.q[r] = sides.k[r] = 0;
    }
  }
  if constexpr (Is::kNormed) {
    normalize(sides.q, sides.k, shared.lengths, thread);
    if (in.tiles.lengths && thread < 2 * kChunk && hv % (in.shape.HV / in.shape.H) == 0) {
      const float2 squared = shared.lengths[thread / kChunk][thread % kChunk];
      float *to = in.tiles.lengths + (static_cast<int64_t>(h) * in.shape.slots + slot) * (2 * kChunk);
      to[thread] = inverse_length(squared);
    }
  }
  sides.forget();

  const bool fails = __any_sync(0xffffffffu, store_sides(sides, group));
  if (lane == 0) shared.any_fails[warp] = fails;
  __syncthreads();

  score_all(sides, warp, lane);
  if (warp >= 10) zero_scores<Is::kSolve>(shared_address(shared.scores), warp - 10, lane);
  const uint4 failing = *reinterpret_cast<const uint4 *>(shared.any_fails);
  __syncthreads();
  if ((failing.x | failing.y | failing.z | failing.w) != 0) {
    VectorSides<Is> copy = sides;  // by way of memory, or the other path would lose the registers that this one needs
    score_failing_chunk(copy, thread);
    sides.rows = copy.rows;
#pragma unroll
    for (int r = 0; r < kEach; ++r) sides.q[r] = copy.q[r], sides.k[r] = copy.k[r];
  }

  load_erase_gate(in, chunk, h, sides);
  store_images(sides);
  fence_async_shared();
  __syncthreads();
  const auto store_tile = [&](unsigned char *to, const unsigned char *from, int images) {
    store_bytes(to + images * index * kTileBytes, shared_address(from), images * kTileBytes);
  };
  if (thread == kPrepThreads - 32) {
    store_tile(in.tiles.q_start, shared.left_q, 2);
    store_tile(in.tiles.k_end, shared.inside, 2);
    store_tile(in.tiles.scores, shared.scores, 1);
    if constexpr (Is::kSolve) {
      store_tile(in.tiles.x_start, shared.left_x, 2);
      store_tile(in.tiles.scores_low, shared.scores + kTileBytes, 1);
    }
    store_bytes(in.tiles.vector_factors + index, shared_address(&shared.factors), sizeof(VectorFactors));
    store_commit();
    store_wait_read<0>();
  }
  if constexpr (Is::kSolve) {
    if (warp < 4) {
      if (warp < 2) {
        const int b = 2 * warp + lane / 16;
        invert_block(shared.l + 16 * b * kPitch + 16 * b, lane % 16);
      }
      named_barrier(1, 128);
      finish_inverse(shared.l, shared_address(shared.between), warp, lane);
      fence_async_shared();
      named_barrier(1, 128);
      if (thread == 0) {
        store_tile(in.tiles.solve, shared.between, 2);
        store_commit();
        store_wait_read<0>();
      }
    }
  }
}

template <class Is>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  static_assert(sizeof(VectorShared) <= 113 * 1024);
  return cuda::launch({prep_grid(in.shape), kPrepThreads, sizeof(VectorShared), stream}, prep_vector_kernel<Is>, in);
}

template <Sm90Erase kErase>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  if (in.has_l2norm) return launch<Kind<kErase, true, true>>(in, stream);
  return in.g_type == Sm90Real::kFloat32 ? launch<Kind<kErase, false, true>>(in, stream) : launch<Kind<kErase, false, false>>(in, stream);
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
