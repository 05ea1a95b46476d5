// SPDX-License-Identifier: Apache-2.0
// What one chunk of one head does to the state it starts from, for independent erase keys and a vector gate or none; nothing
// here depends on the state. With L = -(a b^T), L_k = a k^T (strictly lower), P_k = scale q k^T, P_b = scale q b^T (lower),
// all decayed between their rows, and T = (I + L)^-1, the chunk is
//   S_end = D S + B^T X + K^T V,  o = Q S + P V,  X = W S
//   W = T a~   M = T L_k   Q = q~ + P_b W   P = P_k + P_b M   K = k^ + M^T b^   B = b^
// a~, q~ (with scale) decayed from the chunk's start (a reads before the decay of its row), k^, b^ to its end. So the scan
// has two products in a row, and what T undoes is undone here, in fp32 sums, before anything is rounded to bf16: with W, Q,
// K, B, P and X in bf16 an emulation of ten regimes stayed within 0.57 of the bounds; rounding T and L_k V missed them.
// Grid (slots, HV), 256 threads, one CTA a multiprocessor: thread (pair, block) has two keys of 16 rows.
//   1. q, k, a, b by tensor map; g from global memory; exp; block totals. kNormed: q and k divided by their lengths, as fp16
//      in place.
//   2. Scores (sm90_blocks.cuh; without a bound the diagonal in a phase of its own): L in fp32, L_k, P_k, P_b as two bf16
//      images each, high and low parts.
//   3. In the places of q, k, a, b: q~ and k^ high parts (low parts elsewhere), a~, b^; T by warps 0-3 (sm90_inverse.cuh).
//   4. wgmma, first operands in registers, tiles of high and low parts: warps 0-3 W (8 m64n128k16), then Q (8); warps 4-7
//      M (12 m64n64k16), then K (8 m64n128k16) and P (12 m64n64k16). Bulk stores.
// Shared memory: q, k, a, b 4 x 16384; sides 4 x 16384 (then W, M, low parts of q~ and k^); L_k, P_k, P_b 3 x 16384; T
// 16384; L 18432; totals 2048, lengths 1024, factors 896: 214 KB.
// Handing over: __syncthreads around phases and between steps, named barriers 1 and 2 inside a warpgroup in step 4.
#include "cuda/launch.cuh"
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/product.cuh"
#include "ops/recurrence/sm90_blocks.cuh"
#include "ops/recurrence/sm90_images.cuh"
#include "ops/recurrence/sm90_inverse.cuh"

namespace fw::sm90 {
namespace {

using Tile = unsigned char[2 * kTileBytes];

template <class Is>
struct __align__(1024) KeysShared {
  Tile q, k, a, b;
  Tile left_a, left_q, right_k, right_b;
  Tile scores_ak, scores_qk, scores_qb;  // high parts, low parts
  Tile solve;
  float l[kChunk * kPitch];
  VectorFactors factors;
  float2 total[4][kKey / 2];
  float2 lengths[2][kChunk];
  uint64_t loaded;
  // once the scores are there:
  __device__ __forceinline__ unsigned char *w() { return left_a; }
  __device__ __forceinline__ unsigned char *m() { return left_q; }  // high part, low part
  __device__ __forceinline__ unsigned char *q_low() { return right_k; }
  __device__ __forceinline__ unsigned char *k_low() { return right_b; }
};

// The sides of sm90_blocks.cuh: a and q against k and b.
template <class Is>
struct KeysSides {
  static constexpr bool kBounded = Is::kBounded;
  static constexpr int kRights = 2;
  KeysShared<Is> &shared;
  int pair, block;
  float scale;
  Rows rows;

  __device__ __forceinline__ KeysSides(KeysShared<Is> &memory, int p, int b, float s) : shared(memory), pair(p), block(b), scale(s) {}
  __device__ __forceinline__ void forget() {}
  __device__ __forceinline__ float2 total(int b) const { return shared.total[b][pair]; }
  __device__ __forceinline__ uint32_t word(const Tile &tile, int r) const {
    return *reinterpret_cast<const uint32_t *>(tile + place(rows, block, r));
  }
  __device__ __forceinline__ void left(uint32_t at, int r, float2 through, float2 before) {
    put(shared.left_a, at, scaled<false>(word(shared.a, r), before));
    put(shared.left_q, at, scaled<Is::kNormed>(word(shared.q, r), through));
  }
  __device__ __forceinline__ void right(uint32_t at, int r, float2 decay, bool apart) {
    put(apart ? shared.right_k : shared.left_a, at, scaled<Is::kNormed>(word(shared.k, r), decay));
    put(apart ? shared.right_b : shared.left_q, at, scaled<false>(word(shared.b, r), decay));
  }
  __device__ __forceinline__ bool wants(bool) const { return true; }
  __device__ __forceinline__ uint32_t left_tile(bool queries) const {
    return shared_address(queries ? shared.left_q : shared.left_a);
  }
  __device__ __forceinline__ uint32_t right_tile(int n, bool apart) const {
    if (apart) return shared_address(n == 0 ? shared.right_k : shared.right_b);
    return shared_address(n == 0 ? shared.left_a : shared.left_q);
  }
  __device__ __forceinline__ void store(int n, bool queries, int row, int column, float value) {
    if (!queries && n == 1) {
      shared.l[row * kPitch + column] = -value;
      return;
    }
    put_score<true>(queries ? n == 0 ? shared.scores_qk : shared.scores_qb : shared.scores_ak, row, column,
                    queries ? scale * value : value);
  }
};

// The diagonals of q k^T and q b^T.
template <class Is>
__device__ __forceinline__ void run_diagonal(KeysSides<Is> &sides, int thread) {
  const float2 one = make_float2(1.0f, 1.0f);
  const int block = thread / 32 % 4;
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    sides.left(place(sides.rows, sides.block, r), r, one, one);
    sides.right(place(sides.rows, sides.block, r), r, one, true);
  }
  __syncthreads();
  if (thread >= 128) {
    score_block(sides, true, true, block, block, block, block, thread % 32, [](int i, int j) { return i == j; });
  }
  __syncthreads();
}

// q~ and k^ as high and low parts, a~ and b^ in bf16, in the places of q, k, a and b.
template <class Is>
__device__ __forceinline__ void store_ends(KeysSides<Is> &sides) {
  KeysShared<Is> &shared = sides.shared;
  const Rows &rows = sides.rows;
  const auto split = [](unsigned char *high, unsigned char *low, uint32_t at, float2 x) {
    const uint32_t packed = pack_bf16(x.x, x.y);
    put(high, at, packed);
    put(low, at, pack_bf16(x.x - low_bf16(packed), x.y - high_bf16(packed)));
  };
  float2 before = make_float2(1.0f, 1.0f), after = before;
  for (int b = 0; b < sides.block; ++b) before = times(before, shared.total[b][sides.pair]);
  for (int b = 3; b > sides.block; --b) after = times(after, shared.total[b][sides.pair]);
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const uint32_t at = place(rows, sides.block, r);
    put(shared.a, at, scaled<false>(sides.word(shared.a, r), before));
    before = times(before, rows.decay[r]);
    const float2 q = times(unpacked<Is::kNormed>(sides.word(shared.q, r)), before);
    split(shared.q, shared.q_low(), at, make_float2(sides.scale * q.x, sides.scale * q.y));
  }
#pragma unroll
  for (int r = 15; r >= 0; --r) {
    const uint32_t at = place(rows, sides.block, r);
    split(shared.k, shared.k_low(), at, times(unpacked<Is::kNormed>(sides.word(shared.k, r)), after));
    put(shared.b, at, scaled<false>(sides.word(shared.b, r), after));
    after = times(after, rows.decay[r]);
  }
}

// W and Q by one warpgroup.
template <class Is>
__device__ __forceinline__ void make_reads(KeysShared<Is> &shared, int warp, int lane) {
  uint32_t high[4][4], low[4][4];
  float d[64];
  load_operand(high, shared_address(shared.solve), warp, lane);
  load_operand(low, shared_address(shared.solve) + kTileBytes, warp, lane);
  multiply_parts(d, high, low, shared_address(shared.a), false);
  store_image(d, shared_address(shared.w()), warp, lane);
  fence_async_shared();
  named_barrier(1, 128);
  load_operand(high, shared_address(shared.scores_qb), warp, lane);
  load_operand(low, shared_address(shared.scores_qb) + kTileBytes, warp, lane);
  load_image(d, shared_address(shared.q), shared_address(shared.q_low()), warp, lane);
  multiply_parts(d, high, low, shared_address(shared.w()), true);
  store_image(d, shared_address(shared.q), warp, lane);
}

// M, then K and P, by the other.
template <class Is>
__device__ __forceinline__ void make_writes(KeysShared<Is> &shared, int warp, int lane) {
  const uint32_t m = shared_address(shared.m()), p = shared_address(shared.scores_qk);
  uint32_t high[4][4], low[4][4];
  float d[64], x[32];
  load_operand(high, shared_address(shared.solve), warp, lane);
  load_operand(low, shared_address(shared.solve) + kTileBytes, warp, lane);
  multiply_both_parts(x, high, low, shared_address(shared.scores_ak), false);
  store_image(x, m, warp, lane);
  store_image_rest(x, m + kTileBytes, warp, lane);
  fence_async_shared();
  named_barrier(2, 128);
  load_operand_transposed(high, m, warp, lane);
  load_operand_transposed(low, m + kTileBytes, warp, lane);
  load_image(d, shared_address(shared.k), shared_address(shared.k_low()), warp, lane);
  multiply_parts(d, high, low, shared_address(shared.b), true);
  store_image(d, shared_address(shared.k), warp, lane);
  load_operand(high, shared_address(shared.scores_qb), warp, lane);
  load_operand(low, shared_address(shared.scores_qb) + kTileBytes, warp, lane);
  load_image(x, p, p + kTileBytes, warp, lane);
  multiply_both_parts(x, high, low, m, true);
  store_image(x, p, warp, lane);
}

template <class Is>
__global__ void __launch_bounds__(256, 1) prep_independent_kernel(const __grid_constant__ PrepArguments in) {
  auto &shared = *cuda::dynamic_shared<KeysShared<Is>>();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int pair = thread % 64, block = thread / 64, slot = blockIdx.x, hv = blockIdx.y;
  const int h = hv / (in.shape.HV / in.shape.H);
  const Chunk chunk = chunk_of(in.shape, slot);
  launch_next();
  if (thread < 128) zero_rows_outside(in, slot, hv, thread);
  if (chunk.rows == 0) return;
  const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + slot;

  unsigned char *const tiles[4] = {shared.q, shared.k, shared.a, shared.b};
  const uint32_t loaded = shared_address(&shared.loaded);
  if (thread == 0) {
    const CUtensorMap *const maps[4] = {&in.q, &in.k, &in.x, &in.b};
    barrier_init(loaded, 1);
    barrier_init_fence();
    barrier_expect_bytes(loaded, 8 * kTileBytes);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      load_box(shared_address(tiles[i / 2]) + i % 2 * kTileBytes, maps[i / 2], loaded, 64 * (i % 2), h, chunk.start, chunk.batch);
    }
  }
  KeysSides<Is> sides(shared, pair, block, in.scale);
  Rows &rows = sides.rows;
  place_rows(rows, pair);
  if (in.g) {
    load_gates<Is>(in, chunk, hv, pair, block, rows);
  } else {
#pragma unroll
    for (int r = 0; r < 16; ++r) rows.decay[r] = make_float2(0.0f, 0.0f);
  }
  for (int i = thread; i < 3 * 2 * kTileBytes / 16; i += 256) {  // scores above the diagonal
    reinterpret_cast<uint4 *>(shared.scores_ak)[i] = make_uint4(0, 0, 0, 0);
  }
  make_decays<Is>(chunk, block, rows);
  float2 all = rows.decay[0];
#pragma unroll
  for (int r = 1; r < 16; ++r) all = times(all, rows.decay[r]);
  shared.total[block][pair] = all;
  __syncthreads();
  if (block == 0) {
    for (int b = 1; b < 4; ++b) all = times(all, shared.total[b][pair]);
    float *to = shared.factors.all[pair % 4] + pair / 4 * 2;
    to[0] = all.x, to[1] = all.y;
  }
  barrier_wait(loaded, 0);
  for (int r = 0; r < 16; ++r) {
    if (16 * block + r < chunk.rows) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) put(tiles[i], block * 2048 + r * 128 + pair / 32 * kTileBytes + pair % 32 * 4, 0);
  }
  if (chunk.rows < kChunk) __syncthreads();  // the rows were zeroed by whole lines, not by the threads that have them
  if constexpr (Is::kNormed) {
    uint32_t q[16], k[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) q[r] = sides.word(shared.q, r), k[r] = sides.word(shared.k, r);
    normalize(q, k, shared.lengths, thread);
#pragma unroll
    for (int r = 0; r < 16; ++r) put(shared.q, place(rows, block, r), q[r]), put(shared.k, place(rows, block, r), k[r]);
  }

  if constexpr (!Is::kBounded) run_diagonal(sides, thread);
  run_phases(sides, thread);

  store_ends(sides);
  if (warp < 2) {
    const int b = 2 * warp + lane / 16;
    invert_block(shared.l + 16 * b * kPitch + 16 * b, lane % 16);
  }
  __syncthreads();
  if (warp < 4) finish_inverse(shared.l, shared_address(shared.solve), warp, lane);
  fence_async_shared();
  __syncthreads();
  if (warp < 4) {
    make_reads(shared, warp, lane);
  } else {
    make_writes(shared, warp - 4, lane);
  }
  fence_async_shared();
  __syncthreads();
  if (thread == 0) {
    const auto store_tile = [&](unsigned char *to, const unsigned char *from, int images) {
      store_bytes(to + images * index * kTileBytes, shared_address(from), images * kTileBytes);
    };
    store_tile(in.tiles.x_start, shared.w(), 2);
    store_tile(in.tiles.q_start, shared.q, 2);
    store_tile(in.tiles.k_end, shared.k, 2);
    store_tile(in.tiles.b_end, shared.b, 2);
    store_tile(in.tiles.scores, shared.scores_qk, 1);
    store_bytes(in.tiles.vector_factors + index, shared_address(&shared.factors), sizeof(VectorFactors));
    store_commit();
    store_wait<0>();
  }
}

template <class Is>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  static_assert(sizeof(KeysShared<Is>) <= 232448);
  return cuda::launch({dim3(in.shape.slots, in.shape.HV), 256, sizeof(KeysShared<Is>), stream}, prep_independent_kernel<Is>, in);
}

template <bool kNormed, bool kWide>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  return in.g_is_bounded ? launch<Kind<Sm90Erase::kIndependent, kNormed, kWide, true>>(in, stream)
                         : launch<Kind<Sm90Erase::kIndependent, kNormed, kWide, false>>(in, stream);
}

}  // namespace

cudaError_t launch_prep_independent(const PrepArguments &in, cudaStream_t stream) {
  if (in.has_l2norm) return launch<true, true>(in, stream);
  return in.g_type == Sm90Real::kFloat32 ? launch<false, true>(in, stream) : launch<false, false>(in, stream);
}

}  // namespace fw::sm90
