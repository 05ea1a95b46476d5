// SPDX-License-Identifier: Apache-2.0
// The backward's last kernel for a vector gate; what it computes is in sm90_gradients.cu, with a decay for every key.
// Between two rows lies a product of exp(g) <= 1 (sm90_blocks.cuh). A chunk is four blocks of 16 rows; what rows of a block
// read of rows of the same block is summed row by row in fp32, a thread two keys; what they read of other blocks by products
// in bf16 of keys decayed to a boundary between; of the states by warpgroup products.
// dg_i is the flow across the decay of row i: from the state or an earlier row to the end or a later row, each a product with
// that decay, never a difference. In a block: pairs of its rows, what comes from before to row i or later, what goes from
// rows before i past the block, and what passes the whole block, which is summed for each block from reads of the state
// (reads), from what stays to the end (writes), between blocks (passing), and <S, dS> of the key (kept).
// Grid (slots, H), 256 threads; the value heads of the query/key head one after the other, whose dq and dk are added up in
// global memory by the threads that own them.
//   1. thread 0 loads; <S, dS>; warpgroup 0 d_o S^T, d_o V'^T; warpgroup 1 E S^T, V' dS^T, E V'^T; dv, dbeta; B1 and B2 to
//      images, their diagonal blocks to fp32.
//   2. The 64x128 sums to shared memory; thread (pair, block) has two keys of 16 rows: it scales the sums; decayed q, k to tiles.
//   3. warp w: keys 16w .. 16w + 15 of the products between blocks, mma m16n8k16, added to the sums.
//   4. Rows of the block from the last to the first; dq, dk, dg leave.
// Shared memory: states and rows 114688, in their place sums 3 x 34816; tiles 3 x 16384, B1 and B2 2 x 8192, diagonal blocks
// 8192, totals 2048, flows 9728, factors 896: 197 KB. Handing over: one mbarrier for loads, else __syncthreads.
#include "cuda/launch.cuh"
#include "ops/recurrence/sm90_blocks.cuh"
#include "ops/recurrence/sm90_gradients.cuh"
#include "ops/recurrence/sm90_images.cuh"

namespace fw::sm90 {
namespace {

constexpr int kFloatPitch = 136;  // floats: a warp's rows g and columns 2t hit 32 banks twice in two halves

struct LoadedTiles {
  unsigned char states[4 * kTileBytes], d_states[4 * kTileBytes];
  unsigned char d_o[2 * kTileBytes], written[2 * kTileBytes], e[2 * kTileBytes];
};

struct __align__(1024) VectorGradientShared {
  union {
    LoadedTiles loaded;
    float sums[3][kChunk * kFloatPitch];  // d_o S^T, E S^T, V' dS^T; then scaled, and what other blocks give added
  };
  unsigned char q_left[2 * kTileBytes], k_left[2 * kTileBytes], right[2 * kTileBytes];
  unsigned char b1[kTileBytes], b2[kTileBytes];
  float2 inner[4][16][16];  // B1, B2
  float2 total[4][kKey / 2];
  float kept[8][kKey], reads[4][kKey], writes[4][kKey], passing[3][kKey];  // passing: blocks (2, 0), (3, 0), (3, 1)
  VectorFactors factors;
  uint64_t full;
};

template <Sm90Erase kEraseIn, bool kWide>
struct GradientSides {
  using Is = Kind<kEraseIn, false, kWide, false>;
  static constexpr bool kBounded = false;
  VectorGradientShared &shared;
  int pair;
  Rows rows;
  uint32_t q[16], k[16];
  // Keeps the compiler from holding unpacked keys across this point: they do not fit in registers.
  __device__ __forceinline__ void forget() {
#pragma unroll
    for (int r = 0; r < 16; ++r) hold(q[r]), hold(k[r]);
  }
  __device__ __forceinline__ float2 total(int b) const { return shared.total[b][pair]; }
  __device__ __forceinline__ void left(uint32_t at, int r, float2 through, float2) {
    put(shared.q_left, at, scaled<false>(q[r], through));
    if (Is::kSolve) put(shared.k_left, at, scaled<false>(k[r], through));
  }
  __device__ __forceinline__ void right(uint32_t at, int r, float2 decay, bool) { put(shared.right, at, scaled<false>(k[r], decay)); }
};

__device__ __forceinline__ void load_pairs(uint32_t (&x)[16], const void *base, const Sm90Strides &s, const Chunk &chunk, int head,
                                           int pair, int block) {
  const __nv_bfloat16 *first = static_cast<const __nv_bfloat16 *>(base) + chunk.batch * s.batch + chunk.start * s.token +
                               head * s.head + 2 * pair;
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    const int row = 16 * block + r;
    x[r] = row < chunk.rows ? *reinterpret_cast<const uint32_t *>(first + row * s.token) : 0;
  }
}

__device__ __forceinline__ float2 plus(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ float2 fused(float2 a, float2 b, float2 c) { return make_float2(fmaf(a.x, b.x, c.x), fmaf(a.y, b.y, c.y)); }
__device__ __forceinline__ float2 fused(float a, float2 b, float2 c) { return make_float2(fmaf(a, b.x, c.x), fmaf(a, b.y, c.y)); }

template <Sm90Erase kErase>
__device__ __forceinline__ void load_tiles_of(const GradientArguments &in, VectorGradientShared &shared, const Chunk &chunk, int hv,
                                              int64_t index) {
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  constexpr uint32_t kPair = 2 * kTileBytes, kStates = 4 * kTileBytes;
  LoadedTiles &to = shared.loaded;
  const uint32_t full = shared_address(&shared.full);
  const auto load_rows = [&](unsigned char *tiles, const CUtensorMap *map) {
    for (int half = 0; half < 2; ++half) {
      load_box(shared_address(tiles) + half * kTileBytes, map, full, 64 * half, hv, chunk.start, chunk.batch);
    }
  };
  barrier_expect_bytes(full, 2 * kStates + (in.d_o_is_zero ? 2 : 3) * kPair + (kSolve ? sizeof(VectorFactors) : 0));
  load_bytes(shared_address(to.states), in.forward.states + index * kStates, kStates, full);
  load_bytes(shared_address(to.d_states), in.reverse.states + index * kStates, kStates, full);
  load_bytes(shared_address(to.e), in.reverse.rows + index * kPair, kPair, full);
  if (!in.d_o_is_zero) load_rows(to.d_o, &in.d_o);
  if constexpr (kSolve) {
    load_bytes(shared_address(to.written), in.forward.rows + index * kPair, kPair, full);
    load_bytes(shared_address(&shared.factors), in.tiles.vector_factors + index, sizeof(VectorFactors), full);
  } else {
    load_rows(to.written, &in.v);
  }
}

// <S, dS> of every key: the parts of eight warps.
__device__ __forceinline__ void sum_kept(const GradientArguments &in, VectorGradientShared &shared, int64_t index, int thread) {
  const int warp = thread / 32, lane = thread % 32;
  float sums[32] = {};
  multiply_kept(shared.loaded.states, shared.loaded.d_states, in.forward.dropped, in.reverse.dropped, index, thread / 128, thread % 128,
                [&](int i, float product) { sums[i / 4 * 2 + i % 2] += product; });
#pragma unroll
  for (int i = 0; i < 32; ++i) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], step);
    if (lane < 4) shared.kept[warp][i / 2 * 8 + 2 * lane + i % 2] = sums[i];
  }
}

// Gradients of scores, already scaled: the image, and the diagonal blocks in fp32 as part `part` of `inner`.
template <int kPart>
__device__ __forceinline__ void keep_scores(VectorGradientShared &shared, const float (&d)[32], int warp, int lane) {
  const int g = lane / 4, t = lane % 4;
  store_image(d, shared_address(kPart == 0 ? shared.b1 : shared.b2), warp, lane);
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    if (i / 8 != warp) continue;
    const int row = g + (i & 2) * 4, column = i % 8 / 4 * 8 + 2 * t + i % 2;
    float2 &to = shared.inner[warp][row][column];
    (kPart == 0 ? to.x : to.y) = column + kPart <= row ? d[i] : 0.0f;
  }
}

__device__ __forceinline__ void store_sums(const float (&p)[64], float *to, int warp, int lane) {
  const int row = 16 * warp + lane / 4, column = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 64; i += 2) {
    *reinterpret_cast<float2 *>(to + (row + (i & 2) * 4) * kFloatPitch + i / 4 * 8 + column) = make_float2(p[i], p[i + 1]);
  }
}

// Step 1 after the loads. Leaves the sums in shared memory.
template <Sm90Erase kErase>
__device__ __forceinline__ void run_products(const GradientArguments &in, VectorGradientShared &shared, const Chunk &chunk, int hv,
                                             int thread) {
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  const int group = thread / 128, warp = thread / 32 % 4, lane = thread % 32, g = lane / 4, t = lane % 4;
  const LoadedTiles &from = shared.loaded;
  float p[64], d[32];
  if (group == 0) {
    hold(d);
    product_fence();
    multiply_rows_of(d, from.d_o, from.written);
    product_commit();
    store_value_gradient(in, from.e, kSolve ? &shared.factors.beta : nullptr, chunk, hv, thread);
    product_wait<0>();
    hold(d);
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] *= in.scale;
    keep_scores<0>(shared, d, warp, lane);
    hold(p);
    product_fence();
    multiply_states(p, from.d_o, from.states);
    product_commit();
    product_wait<0>();
    hold(p);
    __syncthreads();
    store_sums(p, shared.sums[0], warp, lane);
  } else {
    float reads[64];
    if constexpr (kSolve) {
      hold(d);
      product_fence();
      multiply_rows_of(d, from.e, from.written);
      product_commit();
      const float beta0 = at_token(shared.factors.beta, 16 * warp + g), beta8 = at_token(shared.factors.beta, 16 * warp + g + 8);
      product_wait<0>();
      hold(d);
      if (in.dbeta) store_beta_gradient(in, d, beta0, beta8, chunk, hv, warp, g, t);
#pragma unroll
      for (int i = 0; i < 32; ++i) d[i] *= i & 2 ? -beta8 : -beta0;
      keep_scores<1>(shared, d, warp, lane);
      hold(reads);
      product_fence();
      multiply_states(reads, from.e, from.states);
      product_commit();
      product_wait<0>();
      hold(reads);
    }
    hold(p);
    product_fence();
    multiply_states(p, from.written, from.d_states);
    product_commit();
    product_wait<0>();
    hold(p);
    __syncthreads();
    store_sums(p, shared.sums[2], warp, lane);
    if constexpr (kSolve) store_sums(reads, shared.sums[1], warp, lane);
  }
  __syncthreads();
}

// Step 3. Sums of a warp's 16 keys: [what q, k of a block read, what keys of a block give][two tiles of 8 keys].
template <Sm90Erase kErase>
__device__ __forceinline__ void multiply_between(VectorGradientShared &shared, int warp, int lane) {
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  const int g = lane / 4, t = lane % 4, part = lane / 8;
  const uint32_t corner = warp / 4 * kTileBytes;
  float of_q[3][2][4] = {}, of_k[3][2][4] = {}, of_keys[3][2][4] = {};
  const auto multiply = [&](float (&d)[2][4], const uint32_t (&a)[4], const unsigned char *tiles, int block) {
    uint32_t b[4];
    load_tiles_transposed(b, shared_address(tiles) + corner +
                                 swizzled(16 * block + 8 * (part & 1) + lane % 8, warp % 4 * 32 + (part >> 1) * 16));
    multiply_bf16(d[0], a, b[0], b[1]);
    multiply_bf16(d[1], a, b[2], b[3]);
  };
  const auto add = [&](float (&to)[2][4], const float (&from)[2][4], bool is_decayed, int block) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 by = is_decayed ? shared.total[block][8 * warp + 4 * n + t] : make_float2(1.0f, 1.0f);
#pragma unroll
      for (int e = 0; e < 4; ++e) to[n][e] = fmaf(e % 2 ? by.y : by.x, from[n][e], to[n][e]);
    }
  };
  const auto add_flow = [&](float (&flow)[2][2], const float (&d)[2][4], const unsigned char *left, int block) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t x = *reinterpret_cast<const uint32_t *>(left + corner +
                                                               swizzled(16 * block + g + 8 * half, warp % 4 * 32 + n * 16 + 4 * t));
        flow[n][0] = fmaf(low_bf16(x), d[n][2 * half], flow[n][0]);
        flow[n][1] = fmaf(high_bf16(x), d[n][2 * half + 1], flow[n][1]);
      }
    }
  };
#pragma unroll
  for (int i = 1; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < i; ++j) {
      const bool far = (i ^ j) >= 2;
      const int left = far && i == 3 ? 0 : i, right = far && j == 0 ? 3 : j;
      const uint32_t plain = swizzled(16 * i + 8 * (part & 1) + lane % 8, 32 * j + 16 * (part >> 1));
      const uint32_t turned = swizzled(16 * i + 8 * (part >> 1) + lane % 8, 32 * j + 16 * (part & 1));
      float flow[2][2] = {}, q[2][4] = {}, keys[2][4] = {};
      uint32_t a[4];
      load_tiles(a, shared_address(shared.b1) + plain);
      multiply(q, a, shared.right, right);
      add(of_q[i - 1], q, far && i == 3, 2);
      load_tiles_transposed(a, shared_address(shared.b1) + turned);
      multiply(keys, a, shared.q_left, left);
      if (far) add_flow(flow, q, shared.q_left, left);
      if constexpr (kSolve) {
        float k[2][4] = {};
        load_tiles(a, shared_address(shared.b2) + plain);
        multiply(k, a, shared.right, right);
        add(of_k[i - 1], k, far && i == 3, 2);
        load_tiles_transposed(a, shared_address(shared.b2) + turned);
        multiply(keys, a, shared.k_left, left);
        if (far) add_flow(flow, k, shared.k_left, left);
      }
      add(of_keys[j], keys, far && j == 0, 1);
      if (!far || (i == 2 && j == 1)) continue;  // blocks 2 and 1 have none between them
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float &x = flow[e / 2][e % 2];
#pragma unroll
        for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
        if (g == 0) shared.passing[i - 2 + j][16 * warp + e / 2 * 8 + 2 * t + e % 2] = x;
      }
    }
  }
#pragma unroll
  for (int block = 0; block < 3; ++block) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const int n = i / 4, e = i % 4, at = (16 * block + g + e * 4) * kFloatPitch + 16 * warp + 8 * n + 2 * t;
      const auto add_pair = [&](int which, int place, const float (&x)[2][4]) {
        float2 *to = reinterpret_cast<float2 *>(shared.sums[which] + place);
        *to = plus(*to, make_float2(x[n][e], x[n][e + 1]));
      };
      add_pair(0, at + 16 * kFloatPitch, of_q[block]);
      if (kSolve) add_pair(1, at + 16 * kFloatPitch, of_k[block]);
      add_pair(2, at, of_keys[block]);
    }
  }
}

// What passes a whole block, of two keys.
__device__ __forceinline__ float2 passing_flow(const VectorGradientShared &shared, int pair, int block) {
  const auto at = [pair](const float (&x)[kKey]) { return *reinterpret_cast<const float2 *>(x + 2 * pair); };
  float2 flow = make_float2(0.0f, 0.0f);
  for (int warp = 0; warp < 8; ++warp) flow = plus(flow, at(shared.kept[warp]));
  for (int b = 0; b < 4; ++b) flow = times(flow, shared.total[b][pair]);
  for (int b = block + 1; b < 4; ++b) flow = plus(flow, at(shared.reads[b]));
  for (int b = 0; b < block; ++b) flow = plus(flow, at(shared.writes[b]));
  if (block == 1 || block == 2) flow = plus(flow, plus(at(shared.passing[1]), at(shared.passing[block == 1 ? 0 : 2])));
  return flow;
}

// Two keys of a row to a bf16 tensor, through the sum over value heads when there are several.
__device__ __forceinline__ void store_pair(float2 d, void *out, const Sm90Strides &s, const Chunk &chunk, int head, int row, int pair,
                                           float *partial, bool is_first, bool is_last) {
  if (partial) {
    float2 *sum = reinterpret_cast<float2 *>(partial + row * kKey) + pair;
    if (!is_first) d = plus(d, *sum);
    if (!is_last) *sum = d;
  }
  if (!out || !is_last) return;
  __nv_bfloat16 *to = static_cast<__nv_bfloat16 *>(out) + chunk.batch * s.batch + (chunk.start + row) * s.token + head * s.head;
  reinterpret_cast<uint32_t *>(to)[pair] = pack_bf16(d.x, d.y);
}

template <Sm90Erase kErase, bool kWide>
__global__ void __launch_bounds__(256, 1) gradients_vector_kernel(const __grid_constant__ GradientArguments in) {
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  auto &shared = *cuda::dynamic_shared<VectorGradientShared>();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, pair = thread % 64, block = thread / 64;
  const int slot = blockIdx.x, h = blockIdx.y, group = in.shape.HV / in.shape.H;
  if (thread == 0) {
    barrier_init(shared_address(&shared.full), 1);
    barrier_init_fence();
  }
  __syncthreads();
  launch_wait();
  const Chunk chunk = chunk_of(in.shape, slot);
  if (chunk.rows == 0) return;
  float *partial = in.partial ? in.partial + (static_cast<int64_t>(slot) * in.shape.H + h) * (2 * kChunk * kKey) : nullptr;

  for (int member = 0; member < group; ++member) {
    const int hv = h * group + member;
    const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + slot;
    if (thread == 0) load_tiles_of<kErase>(in, shared, chunk, hv, index);
    barrier_wait(shared_address(&shared.full), member & 1);
    if (in.d_o_is_zero || chunk.rows < kChunk) {
      const int from = in.d_o_is_zero ? 0 : chunk.rows;
      for (int i = thread; i < (kChunk - from) * 16; i += 256) {
        const int row = from + i / 16, at = i % 2 * kTileBytes + row * 128 + i % 16 / 2 * 16;
        *reinterpret_cast<uint4 *>(shared.loaded.d_o + at) = make_uint4(0, 0, 0, 0);
        if (!kSolve && row >= chunk.rows) *reinterpret_cast<uint4 *>(shared.loaded.written + at) = make_uint4(0, 0, 0, 0);
      }
      fence_async_shared();
      __syncthreads();
    }
    if (in.dg) sum_kept(in, shared, index, thread);
    run_products<kErase>(in, shared, chunk, hv, thread);

    GradientSides<kErase, kWide> sides = {shared, pair, {}, {}, {}};
    Rows &rows = sides.rows;
    place_rows(rows, pair);
    load_gates<typename GradientSides<kErase, kWide>::Is>(in, chunk, hv, pair, block, rows);
    load_pairs(sides.q, in.q_rows, in.q_strides, chunk, h, pair, block);
    load_pairs(sides.k, in.k_rows, in.k_strides, chunk, h, pair, block);
    make_decays<typename GradientSides<kErase, kWide>::Is>(chunk, block, rows);
    float2 all = rows.decay[0];
#pragma unroll
    for (int r = 1; r < 16; ++r) all = times(all, rows.decay[r]);
    shared.total[block][pair] = all;
    __syncthreads();

    // The sums become gradients of what q and k read before the block, at its start, and of its keys at its end.
    const auto sum_at = [&](int which, int r) -> float2 & {
      return *reinterpret_cast<float2 *>(shared.sums[which] + (16 * block + r) * kFloatPitch + 2 * pair);
    };
    float2 before = make_float2(1.0f, 1.0f), after = before;
    for (int b = 0; b < block; ++b) before = times(before, shared.total[b][pair]);
    for (int b = 3; b > block; --b) after = times(after, shared.total[b][pair]);
    float2 run = make_float2(1.0f, 1.0f), flow = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int r = 0; r < 16; ++r) {
      const float2 of_q = times(times(before, make_float2(in.scale, in.scale)), sum_at(0, r));
      sum_at(0, r) = of_q;
      run = times(run, rows.decay[r]);
      float2 read = times(unpacked<false>(sides.q[r]), of_q);
      if constexpr (kSolve) {
        const float beta = -at_token(shared.factors.beta, 16 * block + r);
        const float2 of_k = times(times(before, make_float2(beta, beta)), sum_at(1, r));
        sum_at(1, r) = of_k;
        read = fused(unpacked<false>(sides.k[r]), of_k, read);
      }
      flow = fused(run, read, flow);
    }
    *reinterpret_cast<float2 *>(shared.reads[block] + 2 * pair) = flow;
    sides.forget();
    run = make_float2(1.0f, 1.0f), flow = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int r = 15; r >= 0; --r) {
      const float2 of_key = times(after, sum_at(2, r));
      sum_at(2, r) = of_key;
      flow = fused(times(run, unpacked<false>(sides.k[r])), of_key, flow);
      run = times(run, rows.decay[r]);
    }
    *reinterpret_cast<float2 *>(shared.writes[block] + 2 * pair) = flow;
    sides.forget();
    store_blocks(sides, block);
    __syncthreads();
    multiply_between<kErase>(shared, warp, lane);
    __syncthreads();
    float2 of_keys[16];
#pragma unroll
    for (int r = 0; r < 16; ++r) of_keys[r] = sum_at(2, r);
    const float2 passing = in.dg ? passing_flow(shared, pair, block) : make_float2(0.0f, 0.0f);

    float d_run[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 15; i >= 0; --i) {
      sides.forget();
      hold(d_run);  // and loads of scores stay behind
      const float2 q = unpacked<false>(sides.q[i]), k = unpacked<false>(sides.k[i]), decay = rows.decay[i];
      const float diagonal = shared.inner[block][i][i].x;
      float2 dq = make_float2(diagonal * k.x, diagonal * k.y), dx = make_float2(0.0f, 0.0f), between = dx, dg = passing;
      between = make_float2(1.0f, 1.0f);
      float2 dk = fused(diagonal, q, of_keys[i]);
      const float2 of_q = sum_at(0, i);
      float2 of_k = make_float2(0.0f, 0.0f), later = fused(q, of_q, make_float2(d_run[0], d_run[1]));
      if constexpr (kSolve) of_k = sum_at(1, i), later = fused(k, of_k, later);
#pragma unroll
      for (int j = i - 1; j >= 0; --j) {
        const float2 b = shared.inner[block][i][j];
        const float2 decayed = times(times(unpacked<false>(sides.k[j]), between), decay);
        float2 back = fused(b.x, q, of_keys[j]);
        dq = fused(b.x, decayed, dq);
        if constexpr (kSolve) {
          back = fused(b.y, k, back);
          dx = fused(b.y, decayed, dx);
        }
        dg = fused(decayed, back, dg);
        of_keys[j] = times(back, decay);
        between = times(between, rows.decay[j]);
      }
      const float2 whole = times(between, decay);  // from the block's start
      dq = fused(whole, of_q, dq);
      dg = fused(whole, later, dg);
      d_run[0] = later.x * decay.x, d_run[1] = later.y * decay.y;
      if constexpr (kSolve) dk = plus(dk, fused(whole, of_k, dx));
      const int row = 16 * block + i;
      if (row >= chunk.rows) continue;
      const bool is_first = member == 0, is_last = member + 1 == group;
      store_pair(dq, in.dq, in.dq_strides, chunk, h, row, pair, partial, is_first, is_last);
      store_pair(dk, in.dk, in.dk_strides, chunk, h, row, pair, partial ? partial + kChunk * kKey : nullptr, is_first, is_last);
      if (in.dg) {
        const Sm90Strides &s = in.dg_strides;
        const int64_t at = chunk.batch * s.batch + (chunk.start + row) * s.token + hv * s.head + 2 * pair;
        if (kWide) {
          *reinterpret_cast<float2 *>(static_cast<float *>(in.dg) + at) = dg;
        } else {
          *reinterpret_cast<uint32_t *>(static_cast<__nv_bfloat16 *>(in.dg) + at) = pack_bf16(dg.x, dg.y);
        }
      }
    }
    fence_async_shared();
    __syncthreads();
  }
}

template <Sm90Erase kErase, bool kWide>
cudaError_t launch(const GradientArguments &in, cudaStream_t stream) {
  constexpr int kBytes = sizeof(VectorGradientShared);
  static_assert(kBytes <= 232448);
  return cuda::launch({dim3(in.shape.slots, in.shape.H), 256, kBytes, stream, 1, true}, gradients_vector_kernel<kErase, kWide>, in);
}

template <Sm90Erase kErase>
cudaError_t launch(const GradientArguments &in, cudaStream_t stream) {
  return in.g_type == Sm90Real::kFloat32 ? launch<kErase, true>(in, stream) : launch<kErase, false>(in, stream);
}

}  // namespace

cudaError_t launch_gradients_vector(const GradientArguments &in, Sm90Erase erase, cudaStream_t stream) {
  return erase == Sm90Erase::kShared ? launch<Sm90Erase::kShared>(in, stream) : launch<Sm90Erase::kNone>(in, stream);
}

}  // namespace fw::sm90
