// SPDX-License-Identifier: Apache-2.0
// What the chains over the chunks share, forward and in reverse: scores, a state as first operands, and its place.
#pragma once
#include "cuda/launch.cuh"
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/product.cuh"
#include "ops/recurrence/sm90_gates.cuh"
#include "ops/recurrence/sm90_scan_data.cuh"

namespace fw::sm90 {

// What bf16 left of two floats, as bf16.
__device__ __forceinline__ uint32_t pack_rest(float low, float high, uint32_t packed) {
  return pack_bf16(low - low_bf16(packed), high - high_bf16(packed));
}

// The 64x128 sums as eight m64k16 first operands.
__device__ __forceinline__ void pack_state(uint32_t (&a)[8][4], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

// One warpgroup of two: the scores of every other chunk, rows = queries, as the swizzled image that P^T is read from.
template <Sm90Gate kGate, class Shared>
__device__ __forceinline__ void make_scores(const ScanArguments &in, Shared &shared, const Work &work, int turn, int thread) {
  const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4, part = lane / 8;
  const int row = 16 * warp + 8 * (part & 1) + lane % 8;
  const uint32_t scores = shared_address(scores_of(shared, 0, turn));
  Ring<Shared::kDepth> ring, past;  // past: two chunks back
  for (int left = work.length; left > 0; left -= kChunk, ring.next(), turn ^= 1) {
    barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);  // every phase, or a parity would be mistaken
    if (Shared::kApart && work.length - left >= 2 * kChunk) {
      if (turn == 0) barrier_wait(shared_address(&shared.empty[past.slot]), past.parity);  // its scores lie where these go
      past.next();
    }
    if (turn != 0) continue;
    auto &stage = shared.stage[ring.slot];
    const uint32_t image = Shared::kApart ? scores : shared_address(scores_of(shared, ring.slot, 0));
    float d[32];
    hold(d);
    product_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint32_t offset = step / 4 * kTileBytes + step % 4 * 32;
      multiply_n64_shared(d, rows_along_sum(shared_address(stage.q) + offset),
                          rows_along_sum(shared_address(stage.k) + offset), step > 0);
    }
    product_commit();
    product_wait<0>();
    hold(d);
    const Factors &factors = shared.factors[ring.slot];
    float scale0 = in.scale, scale8 = in.scale;
    if constexpr (kGate == Sm90Gate::kScalar) scale0 = factors.query[16 * warp + g], scale8 = factors.query[16 * warp + g + 8];
    decay_scores<kGate == Sm90Gate::kScalar, false>(d, factors, scale0, scale8, warp, g, t);
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float *p = d + 8 * pair;
      const uint32_t to = swizzled(row, (2 * pair + (part >> 1)) * 16);
      uint32_t high[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) high[i] = pack_bf16(p[2 * i], p[2 * i + 1]);
      store_tiles(image + to, high[0], high[1], high[2], high[3]);
      if constexpr (Shared::kLow) {
        store_tiles(image + kTileBytes + to, pack_rest(p[0], p[1], high[0]), pack_rest(p[2], p[3], high[1]),
                    pack_rest(p[4], p[5], high[2]), pack_rest(p[6], p[7], high[3]));
      }
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(shared_address(&shared.scored[ring.slot]));
  }
}

// Element i of a thread's 64: value row (from the first of its warpgroup), key column.
__device__ __forceinline__ int64_t state_at(int i, int thread, int64_t key, int64_t value) {
  return (thread / 32 * 16 + thread % 32 / 4 + (i & 2) * 4) * value + (i / 4 * 8 + thread % 4 * 2 + (i & 1)) * key;
}

__device__ __forceinline__ bool is_inside(int i, int thread, int keys, int values) {
  return state_at(i, thread, 1, 0) < keys && state_at(i, thread, 0, 1) < values;
}

__device__ __forceinline__ void load_state(float (&s)[64], const ScanArguments &in, int64_t state, int rank, int thread) {
  const float *start = in.start_state + state * in.start_keys * in.start_values + 64 * rank * in.start_value;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const bool here = in.start_state && is_inside(i, thread, in.start_keys, in.start_values - 64 * rank);
    s[i] = here ? start[state_at(i, thread, in.start_key, in.start_value)] : 0.0f;
  }
}

__device__ __forceinline__ void store_state(const float (&s)[64], const ScanArguments &in, int64_t head, int rank, int thread) {
  if (!in.end_state) return;
  float *end = in.end_state + head * in.shape.K * in.shape.V + 64 * rank * in.end_value;
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    if (is_inside(i, thread, in.shape.K, in.shape.V - 64 * rank)) end[state_at(i, thread, in.end_key, in.end_value)] = s[i];
  }
}

// Barriers of the stages; `chain_warps` of both CTAs give a slot back.
template <class Shared>
__device__ __forceinline__ void init_chain_barriers(Shared &shared, int chain_warps) {
  for (int s = 0; s < Shared::kDepth; ++s) {
    barrier_init(shared_address(&shared.full[s]), 1);
    barrier_init(shared_address(&shared.scored[s]), 4);
    barrier_init(shared_address(&shared.empty[s]), chain_warps);
  }
  barrier_init(shared_address(&shared.tail), 1);
}

// One pair of CTAs a (sequence, head, segment), overlapping the launch before it.
template <class Shared>
cudaError_t launch_pairs(void (*kernel)(ScanArguments), const ScanArguments &in, int segments, int threads, cudaStream_t stream) {
  constexpr int kBytes = sizeof(Shared);
  static_assert(kBytes <= 232448);
  const dim3 grid(static_cast<unsigned>(in.shape.N) * in.shape.HV * segments * 2);
  return cuda::launch({grid, static_cast<uint32_t>(threads), kBytes, stream, 2, true}, kernel, in);
}

// Body::run<gate, erase>(args) without an erase or with k as its key.
template <class Body, class... Args>
cudaError_t dispatch_rows(Sm90Gate gate, Sm90Erase erase, Args &...args) {
  constexpr Sm90Gate kNone = Sm90Gate::kNone, kScalar = Sm90Gate::kScalar, kVector = Sm90Gate::kVector;
  if (erase == Sm90Erase::kShared) {
    if (gate == kNone) return Body::template run<kNone, Sm90Erase::kShared>(args...);
    if (gate == kScalar) return Body::template run<kScalar, Sm90Erase::kShared>(args...);
    if (gate == kVector) return Body::template run<kVector, Sm90Erase::kShared>(args...);
  } else if (erase == Sm90Erase::kNone) {
    if (gate == kNone) return Body::template run<kNone, Sm90Erase::kNone>(args...);
    if (gate == kScalar) return Body::template run<kScalar, Sm90Erase::kNone>(args...);
    if (gate == kVector) return Body::template run<kVector, Sm90Erase::kNone>(args...);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fw::sm90
