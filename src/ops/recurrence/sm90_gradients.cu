// SPDX-License-Identifier: Apache-2.0
// The backward's last kernel for no gate and a scalar gate: from the kept states and rows of a chunk to dq, dk, dv, dg and
// dbeta. Nothing runs from chunk to chunk. With S the state at the chunk's start, dS its gradient at the chunk's end, V' what
// the rows wrote, E as in sm90_reverse.cu, and gate_ij = exp(G_i - G_j):
//   B1 = tril(scale gate (d_o V'^T)), B2 = -stril(beta gate (E V'^T))
//   dq = scale exp(G) d_o S^T + B1 k        dv = beta E        dbeta = E . V' / beta
//   dk = -beta exp(G) E S^T + B2 k + exp(G_end - G) V' dS^T + B1^T q + B2^T k
//   dg_i: what flows across the decay of row i, sums of products without a difference: exp(G_end) <S, dS>, the rows' reads
//   of S at and after i (q and k times the first terms of dq and dk), what rows before i left in the end (k times the fourth
//   term), and (B1 q k^T + B2 k k^T)_mj for j < i <= m. Each has the decay of row i as a factor, so dg is 0 where g is -inf.
// With a norm inside q and k are the rows as they came, whose 1 / length the factors have: the sums are then gradients of q / |q|
// and k / |k| over |q| and |k|, and leave through the norm (project_rows).
// <S, dS> takes eight more bits of both (where states are large and hold, dg is 2.2 times its bound with bf16 alone, 1.8 times with
// four more bits).
// Grid: one CTA a multiprocessor; each takes (slot, query/key head) after another, and its value heads in their order, whose
// dq and dk stay in sums. 512 threads:
//   warpgroup 0: warp 0 loads; a tile is loaded again as soon as it was read.
//   warpgroup 1: <S, dS>, dv, dg.
//   warpgroup 2: d_o S^T, 8 x m64n128k16; d_o V'^T, q k^T, E V'^T, k k^T, 8 x m64n64k16 each; flows by decays, 8 x m64n64k16 with
//                ones; B1 k, 4 x m64n128k16; dq, dbeta.
//   warpgroup 3: E S^T, V' dS^T, 8 x m64n128k16 each; B2 k, B1^T q, B2^T k, 4 x m64n128k16 each; dk.
// Barriers: full and empty of keys (q, k), rows (d_o, V', E, factors) and states; scores (B1 and B2, warpgroup 2 to 3); flows
// (warpgroups 2 and 3 to 1); tail (loads of a partial chunk to the loader, which zeroes rows past the end).
// Shared memory: S and dS 2 x 32768, q, k, d_o, V', E 5 x 16384, B1 and B2 2 x 8192, dq and dk 2 x 16384, ones 8192, flows 16384,
// small things 4700: 221 KB.
// What all warpgroups run for an item has to fit in the cache of instructions, see docs/kernels/sm90_gradients.md.
#include "ops/recurrence/sm90_chain.cuh"
#include "ops/recurrence/sm90_gradients.cuh"
#include "ops/recurrence/sm90_images.cuh"

namespace fw::sm90 {
namespace {

struct __align__(1024) GradientShared {
  unsigned char q[2 * kTileBytes], k[2 * kTileBytes];
  unsigned char d_o[2 * kTileBytes], written[2 * kTileBytes], e[2 * kTileBytes];
  unsigned char states[4 * kTileBytes], d_states[4 * kTileBytes];
  unsigned char b1[kTileBytes], b2[kTileBytes];
  unsigned char dq[2 * kTileBytes], dk[2 * kTileBytes];
  unsigned char ones[kTileBytes];  // (i, j): 1 for j < i
  float4 flows[8][128];            // warpgroup 2: sums of a thread that do not fit in its registers
  Factors factors;
  float crossed[4][kChunk];                             // flows inside the chunk that cross a row's decay, to each 16 rows
  float read_q[kChunk], read_k[kChunk], wrote[kChunk];  // of S by row, into the end by row
  float total[2][4];
  uint64_t keys_full, keys_empty, rows_full, rows_empty, states_full, states_empty;
  uint64_t scores_full, scores_empty, flows_full, flows_empty, tail;
};

// One warp.
template <Sm90Gate kGate, Sm90Erase kErase>
__device__ __forceinline__ void load_items(const GradientArguments &in, GradientShared &shared, int lane) {
  constexpr bool kSolve = kErase == Sm90Erase::kShared, kFactors = kSolve || kGate != Sm90Gate::kNone;
  constexpr uint32_t kPair = 2 * kTileBytes, kStates = 4 * kTileBytes;
  const int group = in.shape.HV / in.shape.H;
  const uint32_t tail = shared_address(&shared.tail);
  uint32_t tail_parity = 0, keys_parity = 1, parity = 1;
  if (in.d_o_is_zero) zero_tile_rows<32>(shared.d_o, 0, lane), fence_async_shared();
  __syncwarp();
  const auto zero_rows_past = [&](const Chunk &chunk, uint32_t full, unsigned char *first, unsigned char *second) {
    __syncwarp();
    if (chunk.rows == kChunk) return;
    barrier_wait(tail, tail_parity);
    tail_parity ^= 1;
    zero_tile_rows<32>(first, chunk.rows, lane);
    if (second) zero_tile_rows<32>(second, chunk.rows, lane);
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(full);
  };
  for_items(in, [&](const Item &item) {
    const Chunk &chunk = item.chunk;
    const auto load_rows = [&](unsigned char *to, const CUtensorMap *map, int head, uint32_t barrier) {
      for (int half = 0; half < 2; ++half) {
        load_box(shared_address(to) + half * kTileBytes, map, barrier, 64 * half, head, chunk.start, chunk.batch);
      }
    };
    for (int r = 0; r < group; ++r, parity ^= 1) {
      const int hv = item.h * group + r;
      const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + item.slot;
      const uint32_t states_full = shared_address(&shared.states_full), rows_full = shared_address(&shared.rows_full);
      barrier_wait(shared_address(&shared.states_empty), parity);
      if (lane == 0) {
        barrier_expect_bytes(states_full, 2 * kStates);
        load_bytes(shared_address(shared.states), in.forward.states + index * kStates, kStates, states_full);
        load_bytes(shared_address(shared.d_states), in.reverse.states + index * kStates, kStates, states_full);
      }
      barrier_wait(shared_address(&shared.rows_empty), parity);
      const uint32_t barrier = chunk.rows < kChunk ? tail : rows_full;
      if (lane == 0) {
        barrier_expect_bytes(barrier, (in.d_o_is_zero ? 2 : 3) * kPair + (kFactors ? sizeof(Factors) : 0));
        load_bytes(shared_address(shared.e), in.reverse.rows + index * kPair, kPair, barrier);
        if constexpr (kFactors) load_bytes(shared_address(&shared.factors), in.tiles.factors + index, sizeof(Factors), barrier);
        if (!in.d_o_is_zero) load_rows(shared.d_o, &in.d_o, hv, barrier);
        if constexpr (kSolve) {
          load_bytes(shared_address(shared.written), in.forward.rows + index * kPair, kPair, barrier);
        } else {
          load_rows(shared.written, &in.v, hv, barrier);
        }
      }
      zero_rows_past(chunk, rows_full, shared.d_o, kSolve ? nullptr : shared.written);
      if (r > 0) continue;
      const uint32_t keys_full = shared_address(&shared.keys_full), keys = chunk.rows < kChunk ? tail : keys_full;
      barrier_wait(shared_address(&shared.keys_empty), keys_parity);
      keys_parity ^= 1;
      if (lane == 0) {
        barrier_expect_bytes(keys, 2 * kPair);
        load_rows(shared.q, &in.q, item.h, keys);
        load_rows(shared.k, &in.k, item.h, keys);
      }
      zero_rows_past(chunk, keys_full, shared.q, shared.k);
    }
  });
}

// One warp: dg from the flows that cross the decay of each row; total: those from before the chunk to behind it.
__device__ __forceinline__ void store_gate_gradient(const GradientArguments &in, const GradientShared &shared, float total,
                                                    const Chunk &chunk, int hv, int lane) {
  const auto read = [&](int row) { return shared.read_q[row] + shared.read_k[row]; };
  // Reads of the state at and after each row, what earlier rows left in the end.
  float read_low = read(lane), read_high = read(lane + 32);
  const float wrote_low = shared.wrote[lane], wrote_high = shared.wrote[lane + 32];
  float left_low = wrote_low, left_high = wrote_high;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float high = __shfl_down_sync(0xffffffffu, read_high, step), low = __shfl_down_sync(0xffffffffu, read_low, step);
    if (lane + step < 32) read_high += high, read_low += low;
    const float left = __shfl_up_sync(0xffffffffu, left_low, step), right = __shfl_up_sync(0xffffffffu, left_high, step);
    if (lane >= step) left_low += left, left_high += right;
  }
  read_low += __shfl_sync(0xffffffffu, read_high, 0);
  const float all_low = __shfl_sync(0xffffffffu, left_low, 31);
  left_low = __shfl_up_sync(0xffffffffu, left_low, 1), left_high = __shfl_up_sync(0xffffffffu, left_high, 1);
  if (lane == 0) left_low = left_high = 0.0f;
  left_high += all_low;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane + 32 * half;
    const float inside = shared.crossed[0][row] + shared.crossed[1][row] + (shared.crossed[2][row] + shared.crossed[3][row]);
    const float mine = inside + (half == 1 ? left_high : left_low) + ((half == 1 ? read_high : read_low) + total);
    const Sm90Strides &s = in.dg_strides;
    if (row < chunk.rows) {
      store_real(in.dg, in.dg_type, chunk.batch * s.batch + (chunk.start + row) * s.token + hv * s.head, mine);
    }
  }
}

template <Sm90Erase kErase, bool kFlows>
__device__ __forceinline__ void run_values(const GradientArguments &in, GradientShared &shared, int thread) {
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  const int group = in.shape.HV / in.shape.H, lane = thread % 32;
  uint32_t parity = 0;
  for_items(in, [&](const Item &item) {
    for (int r = 0; r < group; ++r, parity ^= 1) {
      const int hv = item.h * group + r;
      const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + item.slot;
      float total = 0.0f;
      if constexpr (kFlows) {
        // A sixteenth of a thread's elements at a time, by one body of code: what does not fit in the cache of instructions costs
        // more than what it does. Dropped bits are loaded two turns ahead.
        const uint4 *from = in.forward.dropped + index * 1024 + thread, *d_from = in.reverse.dropped + index * 1024 + thread;
        uint4 bits[3] = {from[0], from[128], from[256]}, d_bits[3] = {d_from[0], d_from[128], d_from[256]};
        barrier_wait(shared_address(&shared.states_full), parity);
#pragma unroll 1
        for (int part = 0; part < 8; ++part) {
          total += multiply_kept_part(shared.states, shared.d_states, bits[0], d_bits[0], part, thread);
          bits[0] = bits[1], bits[1] = bits[2], d_bits[0] = d_bits[1], d_bits[1] = d_bits[2];
          if (part < 5) bits[2] = from[128 * (part + 3)], d_bits[2] = d_from[128 * (part + 3)];
        }
      } else {
        barrier_wait(shared_address(&shared.states_full), parity);
      }
      arrive_warp(&shared.states_empty, lane);
      barrier_wait(shared_address(&shared.rows_full), parity);
      if constexpr (kFlows) total *= shared.factors.all[0];
      store_value_gradient(in, shared.e, kSolve ? &shared.factors.beta : nullptr, item.chunk, hv, thread);
      arrive_warp(&shared.rows_empty, lane);
      if constexpr (kFlows) {
        barrier_wait(shared_address(&shared.flows_full), parity);
        float(&of_warps)[4] = shared.total[parity];
#pragma unroll
        for (int step = 16; step; step /= 2) total += __shfl_xor_sync(0xffffffffu, total, step);
        if (lane == 0) of_warps[thread / 32] = total;
        named_barrier(1, 128);
        total = of_warps[0] + of_warps[1] + (of_warps[2] + of_warps[3]);
        if (thread < 32) store_gate_gradient(in, shared, total, item.chunk, hv, lane);
        arrive_warp(&shared.flows_empty, lane);
      }
    }
  });
}

template <Sm90Gate kGate, Sm90Erase kErase, bool kNormed, bool kFlows>
__device__ __forceinline__ void run_queries(const GradientArguments &in, GradientShared &shared, int thread) {
  constexpr bool kGated = kGate == Sm90Gate::kScalar, kSolve = kErase == Sm90Erase::kShared;
  const int group = in.shape.HV / in.shape.H, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int row0 = 16 * warp + g, row8 = row0 + 8;
  uint32_t parity = 0, keys_parity = 0;
  for_items(in, [&](const Item &item) {
    float dq[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) dq[i] = 0.0f;
    [[maybe_unused]] float inverse0 = 1.0f, inverse8 = 1.0f;  // 1 / length of the rows of q
    for (int r = 0; r < group; ++r, parity ^= 1) {
      const int hv = item.h * group + r;
      float2 read = {};
      [[maybe_unused]] float flows[32];  // (m, j): what row m reads of what row j wrote, times its gradient
      barrier_wait(shared_address(&shared.states_full), parity);
      barrier_wait(shared_address(&shared.rows_full), parity);
      {
        float p[64];
        hold(p);
        product_fence();
        multiply_states(p, shared.d_o, shared.states);
        product_commit();
        float by0 = in.scale, by8 = in.scale;
        if constexpr (kGated) by0 = at_token(shared.factors.scale_decay, row0), by8 = at_token(shared.factors.scale_decay, row8);
        if (r == 0) barrier_wait(shared_address(&shared.keys_full), keys_parity);
        product_wait<0>();
        hold(p);
        arrive_warp(&shared.states_empty, lane);
#pragma unroll
        for (int i = 0; i < 64; ++i) p[i] *= i & 2 ? by8 : by0;
        if constexpr (kFlows) read = row_dots(p, shared.q, row0, t);
#pragma unroll
        for (int i = 0; i < 64; ++i) dq[i] += p[i];
      }
      {
        float d[32], z[32];
        hold(d);
        product_fence();
        multiply_rows_of(d, shared.d_o, shared.written);
        product_commit();
        product_wait<0>();
        hold(d);
        float scale0 = in.scale, scale8 = in.scale;
        if constexpr (kNormed) {
          scale0 = shared.factors.query[row0], scale8 = shared.factors.query[row8];
          inverse0 = scale0 * in.inverse_scale, inverse8 = scale8 * in.inverse_scale;
        }
        decay_scores<kGated, false>(d, shared.factors, scale0, scale8, warp, g, t);
        barrier_wait(shared_address(&shared.scores_empty), parity ^ 1);
        store_image(d, shared_address(shared.b1), warp, lane);
        if constexpr (kFlows) {
          hold(z);
          product_fence();
          multiply_rows_of(z, shared.q, shared.k);
          product_commit();
          product_wait<0>();
          hold(z);
          if constexpr (kSolve) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
              shared.flows[i][thread] = make_float4(z[4 * i] * d[4 * i], z[4 * i + 1] * d[4 * i + 1], z[4 * i + 2] * d[4 * i + 2],
                                                    z[4 * i + 3] * d[4 * i + 3]);
            }
          } else {
#pragma unroll
            for (int i = 0; i < 32; ++i) flows[i] = z[i] * d[i];
          }
        }
      }
      if constexpr (kSolve) {
        const float beta0 = at_token(shared.factors.beta, row0), beta8 = at_token(shared.factors.beta, row8);
        float d[32], z[32];
        hold(d);
        product_fence();
        multiply_rows_of(d, shared.e, shared.written);
        product_commit();
        product_wait<0>();
        hold(d);
        if (in.dbeta) store_beta_gradient(in, d, beta0, beta8, item.chunk, hv, warp, g, t);
        float left0 = -beta0, left8 = -beta8;
        if constexpr (kNormed) left0 *= at_token(shared.factors.key, row0), left8 *= at_token(shared.factors.key, row8);
        decay_scores<kGated, true>(d, shared.factors, left0, left8, warp, g, t);
        store_image(d, shared_address(shared.b2), warp, lane);
        if constexpr (kFlows) {
          hold(z);
          product_fence();
          multiply_rows_of(z, shared.k, shared.k);
          product_commit();
          product_wait<0>();
          hold(z);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const float4 four = shared.flows[i][thread];
            const float before[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int e = 0; e < 4; ++e) flows[4 * i + e] = fmaf(z[4 * i + e], d[4 * i + e], before[e]);
          }
        }
      }
      fence_async_shared();
      arrive_warp(&shared.rows_empty, lane);
      arrive_warp(&shared.scores_full, lane);
      if constexpr (kFlows) {
        // Flows summed over columns j < i by a product with ones, the flows as two bf16.
        uint32_t a[4][4];
        float sums[32];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          a[i / 4][i % 4] = pack_bf16(flows[2 * i], flows[2 * i + 1]);
          flows[2 * i] -= low_bf16(a[i / 4][i % 4]), flows[2 * i + 1] -= high_bf16(a[i / 4][i % 4]);
        }
        const uint64_t ones = rows_along_sum(shared_address(shared.ones));
        hold(sums);
        product_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) multiply_n64(sums, a[step], advance(ones, step * 32), step > 0);
        product_commit();
        product_wait<0>();
        hold(sums);
#pragma unroll
        for (int i = 0; i < 16; ++i) a[i / 4][i % 4] = pack_bf16(flows[2 * i], flows[2 * i + 1]);
        hold(sums);
        product_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) multiply_n64(sums, a[step], advance(ones, step * 32), 1);
        product_commit();
        product_wait<0>();
        hold(sums);
        barrier_wait(shared_address(&shared.flows_empty), parity ^ 1);
        sum_columns(sums, shared.crossed[warp], warp, lane);
        if (t == 0) shared.read_q[row0] = read.x, shared.read_q[row8] = read.y;
        arrive_warp(&shared.flows_full, lane);
      }
      barrier_wait(shared_address(&shared.scores_full), parity);  // the rows of the other warps
      hold(dq);
      product_fence();
      add_scores(dq, shared.b1, shared.k);
      product_commit();
      product_wait<0>();
      hold(dq);
      arrive_warp(&shared.scores_empty, lane);
    }
    if constexpr (kNormed) project_rows(dq, shared.q, inverse0, inverse8, row0, t);
    arrive_warp(&shared.keys_empty, lane);
    keys_parity ^= 1;
    store_rows(dq, shared.dq, &in.dq_map, in.dq, in.dq_strides, item.chunk, item.h, thread, 2);
  });
  if (thread == 0) store_wait<0>();
}

template <Sm90Gate kGate, Sm90Erase kErase, bool kNormed, bool kFlows>
__device__ __forceinline__ void run_keys(const GradientArguments &in, GradientShared &shared, int thread) {
  constexpr bool kGated = kGate == Sm90Gate::kScalar, kSolve = kErase == Sm90Erase::kShared;
  const int group = in.shape.HV / in.shape.H, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int row0 = 16 * warp + g, row8 = row0 + 8;
  uint32_t parity = 0, keys_parity = 0;
  for_items(in, [&](const Item &item) {
    float dk[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) dk[i] = 0.0f;
    [[maybe_unused]] float inverse0 = 1.0f, inverse8 = 1.0f;  // 1 / length of the rows of k
    for (int r = 0; r < group; ++r, parity ^= 1) {
      float2 read = {}, wrote = {};
      barrier_wait(shared_address(&shared.states_full), parity);
      barrier_wait(shared_address(&shared.rows_full), parity);
      float p[64];  // is multiplied and added apart: fused it lives on beside what it becomes, and registers do not suffice
      if constexpr (kSolve) {
        hold(p);
        product_fence();
        multiply_states(p, shared.e, shared.states);
        product_commit();
        const ByToken &by = kGated ? shared.factors.beta_decay : shared.factors.beta;
        const float by0 = -at_token(by, row0), by8 = -at_token(by, row8);
        if (r == 0) barrier_wait(shared_address(&shared.keys_full), keys_parity);
        product_wait<0>();
        hold(p);
#pragma unroll
        for (int i = 0; i < 64; ++i) p[i] = __fmul_rn(p[i], i & 2 ? by8 : by0);
        if constexpr (kFlows) read = row_dots(p, shared.k, row0, t);
#pragma unroll
        for (int i = 0; i < 64; ++i) dk[i] = __fadd_rn(dk[i], p[i]);
      } else if (r == 0) {
        barrier_wait(shared_address(&shared.keys_full), keys_parity);
      }
      hold(p);
      product_fence();
      multiply_states(p, shared.written, shared.d_states);
      product_commit();
      product_wait<0>();
      hold(p);
      if constexpr (kGated) {
        const float by0 = at_token(shared.factors.rest, row0), by8 = at_token(shared.factors.rest, row8);
#pragma unroll
        for (int i = 0; i < 64; ++i) p[i] = __fmul_rn(p[i], i & 2 ? by8 : by0);
        if constexpr (kFlows) wrote = row_dots(p, shared.k, row0, t);
      }
      if constexpr (kNormed) inverse0 = at_token(shared.factors.key, row0), inverse8 = at_token(shared.factors.key, row8);
      arrive_warp(&shared.states_empty, lane);
      arrive_warp(&shared.rows_empty, lane);
#pragma unroll
      for (int i = 0; i < 64; ++i) dk[i] = __fadd_rn(dk[i], p[i]);
      if constexpr (kFlows) {
        barrier_wait(shared_address(&shared.flows_empty), parity ^ 1);
        if (t == 0) {
          shared.read_k[row0] = read.x, shared.read_k[row8] = read.y;
          shared.wrote[row0] = wrote.x, shared.wrote[row8] = wrote.y;
        }
        arrive_warp(&shared.flows_full, lane);
      }
      barrier_wait(shared_address(&shared.scores_full), parity);
      hold(dk);
      product_fence();
      add_turned_scores(dk, shared.b1, shared.q);
      if constexpr (kSolve) {
        add_scores(dk, shared.b2, shared.k);
        add_turned_scores(dk, shared.b2, shared.k);
      }
      product_commit();
      product_wait<0>();
      hold(dk);
      arrive_warp(&shared.scores_empty, lane);
    }
    if constexpr (kNormed) project_rows(dk, shared.k, inverse0, inverse8, row0, t);
    arrive_warp(&shared.keys_empty, lane);
    keys_parity ^= 1;
    store_rows(dk, shared.dk, &in.dk_map, in.dk, in.dk_strides, item.chunk, item.h, thread, 3);
  });
  if (thread == 0) store_wait<0>();
}

template <Sm90Gate kGate, Sm90Erase kErase, bool kNormed, bool kFlows>
__global__ void __launch_bounds__(512, 1) gradients_kernel(const __grid_constant__ GradientArguments in) {
  GradientShared &shared = *cuda::dynamic_shared<GradientShared>();
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    const auto init = [](uint64_t &barrier, int arrivals) { barrier_init(shared_address(&barrier), arrivals); };
    init(shared.keys_full, 1), init(shared.keys_empty, 8);
    init(shared.rows_full, 1), init(shared.rows_empty, 12);
    init(shared.states_full, 1), init(shared.states_empty, 12);
    init(shared.scores_full, 4), init(shared.scores_empty, 8);
    init(shared.flows_full, 8), init(shared.flows_empty, 4);
    init(shared.tail, 1);
    barrier_init_fence();
  }
  if constexpr (kFlows) {
    const int row = threadIdx.x / 8, first = threadIdx.x % 8 * 8;
    const auto pair = [&](int j) { return (j < row ? 0x3f80u : 0u) | (j + 1 < row ? 0x3f800000u : 0u); };
    *reinterpret_cast<uint4 *>(shared.ones + swizzled(row, 2 * first)) =
        make_uint4(pair(first), pair(first + 2), pair(first + 4), pair(first + 6));
    fence_async_shared();
  }
  __syncthreads();
  launch_wait();
  if (group == 0) {
    registers_shrink<24>();
    if (thread < 32) load_items<kGate, kErase>(in, shared, thread);
  } else if (group == 1) {
    registers_shrink<104>();
    run_values<kErase, kFlows>(in, shared, thread);
  } else if (group == 2) {
    registers_grow<216>();
    run_queries<kGate, kErase, kNormed, kFlows>(in, shared, thread);
  } else {
    registers_grow<168>();
    run_keys<kGate, kErase, kNormed, kFlows>(in, shared, thread);
  }
}

struct Gradients {
  template <Sm90Gate kGate, Sm90Erase kErase>
  static cudaError_t run(const GradientArguments &in, cudaStream_t stream) {
    if constexpr (kGate == Sm90Gate::kVector) {
      return launch_gradients_vector(in, kErase, stream);
    } else {
      constexpr int kBytes = sizeof(GradientShared);
      static_assert(kBytes <= 232448);
      int device = 0, count = 1;
      cudaError_t status = cudaGetDevice(&device);
      if (status == cudaSuccess) status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
      if (status != cudaSuccess) return status;
      const int64_t items = static_cast<int64_t>(in.shape.slots) * in.shape.H;
      const auto start = [&](void (*kernel)(GradientArguments)) {
        return cuda::launch({dim3(static_cast<unsigned>(items < count ? items : count)), 512, kBytes, stream, 1, true}, kernel, in);
      };
      if constexpr (kGate == Sm90Gate::kScalar) {
        if (in.has_l2norm && in.dg) return start(gradients_kernel<kGate, kErase, true, true>);
        if (in.has_l2norm) return start(gradients_kernel<kGate, kErase, true, false>);
        if (in.dg) return start(gradients_kernel<kGate, kErase, false, true>);
      }
      return start(gradients_kernel<kGate, kErase, false, false>);
    }
  }
};

}  // namespace

cudaError_t launch_gradients(const GradientArguments &in, Sm90Gate gate, Sm90Erase erase, cudaStream_t stream) {
  return dispatch_rows<Gradients>(gate, erase, in, stream);
}

}  // namespace fw::sm90
