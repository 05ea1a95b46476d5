// SPDX-License-Identifier: Apache-2.0
// What one chunk of one head does to the state it starts from, for independent erase keys and a vector gate or none; nothing
// here depends on the state. With L = -(a b^T), L_k = a k^T (strictly lower), P_k = scale q k^T, P_b = scale q b^T (lower),
// all decayed between their rows, and T = (I + L)^-1, the chunk is
//   S_end = D S + B^T X + K^T V,  o = Q S + P V,  X = W S
//   W = T a~   M = T L_k   Q = q~ + P_b W   P = P_k + P_b M   K = k^ + M^T b^   B = b^
// a~, q~ (with scale) decayed from the chunk's start (a reads before the decay of its row), k^, b^ to its end. So the scan
// has two products in a row, and what T undoes is undone here, in fp32 sums, before anything is rounded to bf16: with W, Q,
// K, B, P and X in bf16 an emulation of ten regimes stayed within 0.57 of the bounds; rounding T and L_k V missed them.
// One CTA a head and slot, 512 threads, one a multiprocessor: thread (pair, group) has two keys of 8 rows in registers.
//   1. q, k, a, b by tensor map, to where scores and T will be; g from global memory; exp; totals of 8 rows. kNormed: q and k
//      divided by the lengths of their rows, as fp16.
//   2. Tiles of the scores (sm90_scores.cuh).
//   3. Scores: L in fp32, L_k, P_k, P_b as two bf16 images each, high and low parts.
//   4. In the tiles' places: q~ and k^ as high and low parts, a~, b^; T by warps 0-3 (sm90_inverse.cuh).
//   5. wgmma, first operands in registers, tiles of high and low parts, a warpgroup a part: 0 and 1 half of the keys of W, then
//      of Q (8 m64n64k16 each); 2 M (12 m64n64k16), then half of K; 3 P (12) and the other half. Bulk stores of each part.
// Shared memory: left a, left q, inside k, b, between k, b 6 x 16384 (then q~, k^, a~, b^; then Q, K); W, M 2 x 16384; L_k, P_k,
// P_b 3 x 16384; T 16384; L 18432; far left sides 2 x 4096; totals 4096, lengths 1024, factors 896: 224 KB.
// Handing over: __syncthreads between the numbered steps, named barriers inside the last (1 + warpgroup, 5 for M).
#include <cstddef>

#include "cuda/launch.cuh"
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/product.cuh"
#include "ops/recurrence/sm90_images.cuh"
#include "ops/recurrence/sm90_inverse.cuh"
#include "ops/recurrence/sm90_scores.cuh"

namespace fw::sm90 {
namespace {

using Tile = unsigned char[2 * kTileBytes];

struct __align__(1024) KeysShared {
  Tile left_a, left_q, inside_k, inside_b, between_k, between_b;
  Tile w, m;                                  // m: high part, low part
  Tile scores_ak, scores_qk, scores_qb;       // the same
  Tile solve;
  float l[kChunk * kPitch];
  unsigned char far[2 * 4096];  // half of the keys: 16 rows of a, then of q
  float2 total[kGroups][kKey / 2];
  VectorFactors factors;
  float2 lengths[2][kChunk];
  uint8_t fails[2][kChunk];
  alignas(16) uint8_t any_fails[16];
  uint64_t loaded;
  // as loaded:
  __device__ __forceinline__ unsigned char *input(int i) { return i == 3 ? solve : scores_ak + i * sizeof(Tile); }
  // once the scores are there:
  __device__ __forceinline__ unsigned char *q() { return left_q; }
  __device__ __forceinline__ unsigned char *q_low() { return inside_k; }
  __device__ __forceinline__ unsigned char *k() { return between_k; }
  __device__ __forceinline__ unsigned char *k_low() { return inside_b; }
  __device__ __forceinline__ unsigned char *a() { return left_a; }
  __device__ __forceinline__ unsigned char *b() { return between_b; }
};

template <bool kNormedIn, bool kWideIn>
struct Kind {
  static constexpr bool kNormed = kNormedIn, kWide = kWideIn;  // rows of q and k divided by their lengths; g is fp32
};

// The sides of sm90_scores.cuh: a and q against k and b.
template <class Is>
struct KeysSides {
  static constexpr int kRights = 2;
  static constexpr bool kErases = true;
  static constexpr uint32_t kFarHalf = 4096;
  KeysShared &shared;
  uint32_t base, far;  // far: from a row's place in a tile to that of a row of block 3 in `far`
  int pair, group;
  float scale;
  Rows rows;
  uint32_t q[kEach], k[kEach], a[kEach], b[kEach];

  __device__ __forceinline__ KeysSides(KeysShared &memory, int p, int g, float s)
      : shared(memory), base(shared_address(&memory)), pair(p), group(g), scale(s) {
    far = offsetof(KeysShared, far) - 6 * (kEach * 128) - p / 32 * (kTileBytes - kFarHalf);
    place_rows(rows, base, p, g);
  }
  // Keeps the compiler from holding values made of the rows across this point: unpacked, they do not fit in registers.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      hold(q[r]), hold(k[r]), hold(a[r]), hold(b[r]), hold(rows.decay[r].x), hold(rows.decay[r].y);
    }
    hold(rows.first);
  }
  __device__ __forceinline__ float2 total(int g) const { return shared.total[g][pair]; }
  __device__ __forceinline__ void put(size_t tile, int r, uint32_t value) {
    store_word(rows.at(r) + static_cast<uint32_t>(tile), value);
  }
  // The high part, and what it left.
  __device__ __forceinline__ void put_parts(size_t high, size_t low, int r, float2 x) {
    const uint32_t packed = pack_bf16(x.x, x.y);
    put(high, r, packed);
    put(low, r, pack_bf16(x.x - low_bf16(packed), x.y - high_bf16(packed)));
  }
  __device__ __forceinline__ void left(int r, float2 through, float2 before) {
    put(offsetof(KeysShared, left_a), r, scaled<false>(a[r], before));
    put(offsetof(KeysShared, left_q), r, scaled<Is::kNormed>(q[r], through));
  }
  __device__ __forceinline__ void left_far(int r, float2 through, float2 before) {
    const uint32_t at = rows.at(r) + far;
    store_word(at, scaled<false>(a[r], before));
    store_word(at + 2048, scaled<Is::kNormed>(q[r], through));
  }
  __device__ __forceinline__ uint32_t inside(int r, float2 inverse) {
    const uint32_t of_k = scaled<Is::kNormed>(k[r], inverse), of_b = scaled<false>(b[r], inverse);
    put(offsetof(KeysShared, inside_k), r, of_k);
    put(offsetof(KeysShared, inside_b), r, of_b);
    return larger_pair(larger_pair(0, of_k), of_b);
  }
  __device__ __forceinline__ void between(int r, float2 decay, uint32_t to) {
    put(offsetof(KeysShared, between_k) + to, r, scaled<Is::kNormed>(k[r], decay));
    put(offsetof(KeysShared, between_b) + to, r, scaled<false>(b[r], decay));
  }
  __device__ __forceinline__ void mixed(int r, float2 decay) {
    put(offsetof(KeysShared, left_a), r, scaled<Is::kNormed>(k[r], decay));
    put(offsetof(KeysShared, left_q), r, scaled<false>(b[r], decay));
  }
  __device__ __forceinline__ void plain(int r) {
    const float2 one = make_float2(1.0f, 1.0f);
    put(offsetof(KeysShared, left_q), r, scaled<Is::kNormed>(q[r], one));
    put(offsetof(KeysShared, inside_k), r, scaled<Is::kNormed>(k[r], one));
    put(offsetof(KeysShared, inside_b), r, b[r]);
  }
  __device__ __forceinline__ uint32_t lefts(bool queries) const {
    return base + (queries ? offsetof(KeysShared, left_q) : offsetof(KeysShared, left_a));
  }
  __device__ __forceinline__ uint32_t lefts_far(bool queries) const { return base + offsetof(KeysShared, far) + queries * 2048; }
  __device__ __forceinline__ uint32_t insides(int n) const {
    return base + (n == 0 ? offsetof(KeysShared, inside_k) : offsetof(KeysShared, inside_b));
  }
  __device__ __forceinline__ uint32_t betweens(int n) const {
    return base + (n == 0 ? offsetof(KeysShared, between_k) : offsetof(KeysShared, between_b));
  }
  __device__ __forceinline__ uint32_t mixeds(int n) const { return lefts(n == 1); }
  __device__ __forceinline__ void store(int n, bool queries, int row_block, int column_block, const float (&acc)[2][4], int lane) {
    if (!queries && n == 1) {
      store_solved(shared.l, row_block, column_block, acc, -1.0f, -1.0f, lane);
    } else {
      const uint32_t image = base + (!queries ? offsetof(KeysShared, scores_ak) : n == 0 ? offsetof(KeysShared, scores_qk)
                                                                                         : offsetof(KeysShared, scores_qb));
      store_scores<true>(image, row_block, column_block, acc, queries ? scale : 1.0f, lane);
    }
  }
  __device__ __forceinline__ void store_one(int n, bool queries, int row, int column, float value) {
    if (!queries && n == 1) {
      shared.l[row * kPitch + column] = -value;
    } else {
      put_score<true>(queries ? n == 0 ? shared.scores_qk : shared.scores_qb : shared.scores_ak, row, column,
                      queries ? scale * value : value);
    }
  }
};

// q~ and k^ as high and low parts, a~ and b^ in bf16.
template <class Is>
__device__ __forceinline__ void store_ends(KeysSides<Is> &sides) {
  const Rows &rows = sides.rows;
  float2 before, after;
  totals_around(sides, sides.group, before, after);
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    sides.put(offsetof(KeysShared, left_a), r, scaled<false>(sides.a[r], before));
    before = times(before, rows.decay[r]);
    const float2 q = times(unpacked<Is::kNormed>(sides.q[r]), before);
    sides.put_parts(offsetof(KeysShared, left_q), offsetof(KeysShared, inside_k), r, make_float2(sides.scale * q.x, sides.scale * q.y));
  }
  if (sides.group == kGroups - 1) {
    float *to = sides.shared.factors.all[sides.pair % 4] + sides.pair / 4 * 2;
    to[0] = before.x, to[1] = before.y;
  }
#pragma unroll
  for (int r = kEach - 1; r >= 0; --r) {
    sides.put_parts(offsetof(KeysShared, between_k), offsetof(KeysShared, inside_b), r, times(unpacked<Is::kNormed>(sides.k[r]), after));
    sides.put(offsetof(KeysShared, between_b), r, scaled<false>(sides.b[r], after));
    after = times(after, rows.decay[r]);
  }
}

// A warpgroup's image is whole and may be stored; which of its threads does that.
__device__ __forceinline__ bool image_done(int warpgroup, int thread) {
  fence_async_shared();
  named_barrier(1 + warpgroup, 128);
  return thread == 0;
}

// 64 keys of W and Q by one warpgroup.
template <class Store>
__device__ __forceinline__ void make_reads(KeysShared &shared, int half, int thread, Store store) {
  const int warp = thread / 32, lane = thread % 32, part = half * kTileBytes;
  uint32_t high[4][4], low[4][4];
  float d[32];
  load_operand(high, shared_address(shared.solve), warp, lane);
  load_operand(low, shared_address(shared.solve) + kTileBytes, warp, lane);
  multiply_parts(d, high, low, shared_address(shared.a()) + part, false);
  store_image(d, shared_address(shared.w) + part, warp, lane);
  if (image_done(half, thread)) store(0, shared.w + part, part, kTileBytes);
  load_operand(high, shared_address(shared.scores_qb), warp, lane);
  load_operand(low, shared_address(shared.scores_qb) + kTileBytes, warp, lane);
  load_image(d, shared_address(shared.q()) + part, shared_address(shared.q_low()) + part, warp, lane);
  multiply_parts(d, high, low, shared_address(shared.w) + part, true);
  store_image(d, shared_address(shared.q()) + part, warp, lane);
  if (image_done(half, thread)) store(1, shared.q() + part, part, kTileBytes);
}

// M by warpgroup 2; then 64 keys of K by each of two, and P by warpgroup 3.
template <class Store>
__device__ __forceinline__ void make_writes(KeysShared &shared, int half, int thread, Store store) {
  const int warp = thread / 32, lane = thread % 32, part = half * kTileBytes;
  const uint32_t m = shared_address(shared.m), p = shared_address(shared.scores_qk);
  uint32_t high[4][4], low[4][4];
  float d[32];
  if (half == 0) {
    load_operand(high, shared_address(shared.solve), warp, lane);
    load_operand(low, shared_address(shared.solve) + kTileBytes, warp, lane);
    multiply_both_parts(d, high, low, shared_address(shared.scores_ak), false);
    store_image(d, m, warp, lane);
    store_image_rest(d, m + kTileBytes, warp, lane);
    fence_async_shared();
  } else if (thread == 0) {
    store(2, shared.b(), 0, 2 * kTileBytes);
  }
  named_barrier(5, 256);
  load_operand_transposed(high, m, warp, lane);
  load_operand_transposed(low, m + kTileBytes, warp, lane);
  load_image(d, shared_address(shared.k()) + part, shared_address(shared.k_low()) + part, warp, lane);
  multiply_parts(d, high, low, shared_address(shared.b()) + part, true);
  store_image(d, shared_address(shared.k()) + part, warp, lane);
  if (image_done(2 + half, thread)) store(3, shared.k() + part, part, kTileBytes);
  if (half == 1) {
    load_operand(high, shared_address(shared.scores_qb), warp, lane);
    load_operand(low, shared_address(shared.scores_qb) + kTileBytes, warp, lane);
    load_image(d, p, p + kTileBytes, warp, lane);
    multiply_both_parts(d, high, low, m, true);
    store_image(d, p, warp, lane);
    if (image_done(2 + half, thread)) store(4, shared.scores_qk, 0, kTileBytes);
  }
}

template <class Is>
__global__ void __launch_bounds__(kPrepThreads, 1) prep_independent_kernel(const __grid_constant__ PrepArguments in) {
  auto &shared = *cuda::dynamic_shared<KeysShared>();
  const int thread = threadIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int pair = threadIdx.x % 64, group = threadIdx.x / 64;
  const auto [slot, hv, h, chunk] = prep_tile(in.shape);
  launch_next();
  if (in.o_rows_left_over && thread < 128) zero_rows_outside(in, slot, hv, thread);
  if (chunk.rows == 0) return;
  const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + slot;

  const uint32_t loaded = shared_address(&shared.loaded);
  if (thread == 0) {
    const CUtensorMap *const maps[4] = {&in.q, &in.k, &in.x, &in.b};
    barrier_init(loaded, 1);
    barrier_init_fence();
    barrier_expect_bytes(loaded, 8 * kTileBytes);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      load_box(shared_address(shared.input(i / 2)) + i % 2 * kTileBytes, maps[i / 2], loaded, 64 * (i % 2), h, chunk.start, chunk.batch);
    }
  }
  KeysSides<Is> sides(shared, pair, group, in.scale);
  Rows &rows = sides.rows;
  if (in.g) {
    load_gates<Is::kWide>(in, chunk, hv, pair, group, rows.decay);
  } else {
#pragma unroll
    for (int r = 0; r < kEach; ++r) rows.decay[r] = make_float2(0.0f, 0.0f);
  }
  shared.total[group][pair] = make_decays<Is::kWide>(chunk, group, rows);
  __syncthreads();
  barrier_wait(loaded, 0);
#pragma unroll
  for (int r = 0; r < kEach; ++r) {
    const uint32_t at = rows.at(r) + static_cast<uint32_t>(offsetof(KeysShared, scores_ak));
    sides.q[r] = load_word(at), sides.k[r] = load_word(at + sizeof(Tile)), sides.a[r] = load_word(at + 2 * sizeof(Tile));
    sides.b[r] = load_word(rows.at(r) + static_cast<uint32_t>(offsetof(KeysShared, solve)));
  }
  if (chunk.rows < kChunk) {  // they are of another sequence
#pragma unroll
    for (int r = 0; r < kEach; ++r) {
      if (kEach * group + r >= chunk.rows) sides.q[r] = sides.k[r] = sides.a[r] = sides.b[r] = 0;
    }
  }
  if constexpr (Is::kNormed) normalize(sides.q, sides.k, shared.lengths, thread);
  sides.forget();

  const bool fails = __any_sync(0xffffffffu, store_sides(sides, group));
  if (lane == 0) shared.any_fails[warp] = fails;
  __syncthreads();

  score_all(sides, warp, lane);
  if (warp >= 10) {
#pragma unroll
    for (int i = 0; i < 3; ++i) zero_scores<true>(shared_address(shared.scores_ak) + i * sizeof(Tile), warp - 10, lane);
  }
  const uint4 failing = *reinterpret_cast<const uint4 *>(shared.any_fails);
  __syncthreads();
  if ((failing.x | failing.y | failing.z | failing.w) != 0) score_failing_rows(sides, shared.fails, thread);

  if (warp < 4) {
    if (warp < 2) {
      const int b = 2 * warp + lane / 16;
      invert_block(shared.l + 16 * b * kPitch + 16 * b, lane % 16);
    }
    named_barrier(1, 128);
    finish_inverse(shared.l, shared_address(shared.solve), warp, lane);
  }
  sides.forget();
  store_ends(sides);
  fence_async_shared();
  __syncthreads();
  const auto store = [&](int which, const unsigned char *from, int part, uint32_t bytes) {
    const Tiles &to = in.tiles;
    unsigned char *const image = which == 0 ? to.x_start : which == 1 ? to.q_start : which == 2 ? to.b_end : which == 3 ? to.k_end : to.scores;
    store_bytes(image + (which == 4 ? 1 : 2) * index * kTileBytes + part, shared_address(from), bytes);
    store_commit();
  };
  if (warp < 8) {
    make_reads(shared, warp / 4, thread % 128, store);
  } else {
    make_writes(shared, warp / 4 - 2, thread % 128, store);
  }
  if (thread == 0) {
    store_bytes(in.tiles.vector_factors + index, shared_address(&shared.factors), sizeof(VectorFactors));
    store_commit();
  }
  if (thread % 128 == 0) store_wait_read<0>();
}

template <class Is>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  static_assert(sizeof(KeysShared) <= 232448);
  return cuda::launch({prep_grid(in.shape), kPrepThreads, sizeof(KeysShared), stream}, prep_independent_kernel<Is>, in);
}

}  // namespace

cudaError_t launch_prep_independent(const PrepArguments &in, cudaStream_t stream) {
  if (in.has_l2norm) return launch<Kind<true, true>>(in, stream);
  return in.g_type == Sm90Real::kFloat32 ? launch<Kind<false, true>>(in, stream) : launch<Kind<false, false>>(in, stream);
}

}  // namespace fw::sm90
