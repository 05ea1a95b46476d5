// SPDX-License-Identifier: Apache-2.0
// Part of the sm_90a scan: its shared memory, which part of a sequence a pair of CTAs scans, and the roles that move data.
#pragma once
#include <type_traits>

#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "ops/recurrence/sm90_scan.cuh"

namespace fw::sm90 {

// A tile of the erase key (with a vector gate the image in the place of k is of it) and one of the write gate.
template <Sm90Gate kGate, Sm90Erase kErase>
constexpr bool kHasX = kErase == Sm90Erase::kSeparate && kGate != Sm90Gate::kVector;
template <Sm90Gate kGate, Sm90Erase kErase>
constexpr bool kHasWriteGate = kErase == Sm90Erase::kSeparate && kGate == Sm90Gate::kVector;

// Whether V' is T times what X left of V, and whether there is X at all: what the erase reads.
template <Sm90Erase kErase>
constexpr bool kSolves = kErase == Sm90Erase::kShared || kErase == Sm90Erase::kSeparate;
template <Sm90Erase kErase>
constexpr bool kReads = kErase != Sm90Erase::kNone;

// Whether scores lie apart from the stages, in two places that the warpgroups of scores fill in turn: made there and as two
// bf16 they would leave room for two stages only.
template <Sm90Gate kGate, Sm90Erase kErase>
constexpr bool kScoresApart = kGate != Sm90Gate::kVector && kSolves<kErase>;

// How deep loads run ahead; with a vector gate or a tile of the erase key a third stage does not fit.
template <Sm90Gate kGate, Sm90Erase kErase>
constexpr int kStages = kGate == Sm90Gate::kVector || kErase == Sm90Erase::kSeparate ? 2 : 3;

// kLow: the scores have a second image, of what bf16 left. kApart: they lie elsewhere.
template <Sm90Gate kGate, Sm90Erase kErase, bool kLow = false, bool kApart = false>
struct __align__(1024) Stage {
  static constexpr bool kVector = kGate == Sm90Gate::kVector;
  unsigned char k[2 * kTileBytes];  // vector gate: the erase key times exp(G), and q likewise
  unsigned char q[2 * kTileBytes];
  unsigned char x[kHasX<kGate, kErase> ? 2 * kTileBytes : 0];
  unsigned char k_end[kVector ? 2 * kTileBytes : 0];  // k exp(G_end - G)
  unsigned char b_end[kErase == Sm90Erase::kIndependent ? 2 * kTileBytes : 0];
  unsigned char v[kTileBytes];
  unsigned char write_gate[kHasWriteGate<kGate, kErase> ? kTileBytes : 0];
  unsigned char solve[kSolves<kErase> ? kTileBytes : 0], solve_low[kSolves<kErase> ? kTileBytes : 0];
  unsigned char scores[kApart ? 0 : kTileBytes];
  unsigned char scores_low[kLow && !kApart ? kTileBytes : 0];
};

template <Sm90Gate kGate, Sm90Erase kErase, bool kScores = true>
struct __align__(1024) ScanShared {
  static constexpr int kDepth = kStages<kGate, kErase>;
  static constexpr bool kLow = kSolves<kErase>, kApart = kScoresApart<kGate, kErase>;
  Stage<kGate, kErase, kLow, kApart> stage[kDepth];
  unsigned char apart[kApart && kScores ? 2 : 0][2 * kTileBytes];
  unsigned char o[kTileBytes];
  std::conditional_t<kGate == Sm90Gate::kVector, VectorFactors, Factors> factors[kDepth];
  uint64_t full[kDepth], scored[kDepth], empty[kDepth], tail, o_filled, o_emptied;
};

// The scores of a chunk, in every stage or in two places; a low part is the image behind.
template <class Shared>
__device__ __forceinline__ auto scores_of(Shared &shared, int slot, int turn) {
  if constexpr (Shared::kApart) {
    return &shared.apart[turn][0];
  } else {
    return &shared.stage[slot].scores[0];
  }
}

// The part of a sequence that one pair scans.
struct Work {
  int batch, start, length, first_slot;
  int n, hv, segment, rank;
};

__device__ __forceinline__ Work work_of(const ScanArguments &in, int segments_done, int first_segment = 0) {
  Work work;
  work.rank = static_cast<int>(cluster_rank());
  int tile = blockIdx.x / 2;
  work.segment = first_segment + tile % segments_done;
  tile /= segments_done;
  work.hv = tile % in.shape.HV, work.n = tile / in.shape.HV;
  const Span span = span_of(in.shape, work.n);
  const int chunks = (span.length + kChunk - 1) / kChunk, each = (chunks + in.segments - 1) / in.segments;
  const int first = min(work.segment * each, chunks);
  work.batch = span.batch, work.start = span.start + first * kChunk, work.first_slot = span.first_slot + first;
  work.length = max(0, min(each * kChunk, span.length - first * kChunk));
  return work;
}

// kSummary: without q and scores. kReverse: from the last chunk to the first, v may be absent.
template <Sm90Gate kGate, Sm90Erase kErase, bool kSummary, bool kReverse = false, class Shared>
__device__ __forceinline__ void load_chunks(const ScanArguments &in, Shared &shared, const Work &work, int lane) {
  constexpr bool kVector = kGate == Sm90Gate::kVector, kSolve = kSolves<kErase>;
  constexpr bool kIndependent = kErase == Sm90Erase::kIndependent;
  constexpr bool kX = kHasX<kGate, kErase>, kWriteGate = kHasWriteGate<kGate, kErase>;
  constexpr bool kKeys = kReads<kErase> || !kVector, kFactors = kReads<kErase> || kGate != Sm90Gate::kNone;
  constexpr uint32_t kTiles = 1 + kKeys * 2 + !kSummary * 2 + kVector * 2 + kSolve * 2 + (kVector && !kSummary) * (1 + Shared::kLow) +
                              kX * 2 + kWriteGate + kIndependent * 2;
  constexpr uint32_t kBytes = kTiles * kTileBytes + (kFactors ? static_cast<uint32_t>(sizeof(shared.factors[0])) : 0);
  const int h = work.hv / (in.shape.HV / in.shape.H), rank = work.rank;
  const int half = rank * kTileBytes, part = rank * (kTileBytes / 2);
  const bool has_v = !kReverse || !in.v_is_zero;
  const int chunks = (work.length + kChunk - 1) / kChunk;
  Ring<Shared::kDepth> ring;
  for (int i = 0; i < chunks; ++i, ring.next()) {
    const int chunk = kReverse ? chunks - 1 - i : i, row = work.start + chunk * kChunk, left = work.length - chunk * kChunk;
    const int64_t index = static_cast<int64_t>(work.hv) * in.shape.slots + work.first_slot + chunk;
    auto &stage = shared.stage[ring.slot];
    const uint32_t full = shared_address(&shared.full[ring.slot]);
    const uint32_t barrier = left < kChunk ? shared_address(&shared.tail) : full;
    barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
    if (!has_v) {
      for (int j = lane; j < kTileBytes / 16; j += 32) reinterpret_cast<uint4 *>(stage.v)[j] = make_uint4(0, 0, 0, 0);
      __syncwarp();
    }
    if (lane == 0) {
      barrier_expect_bytes(barrier, has_v ? kBytes : kBytes - kTileBytes);
      const uint32_t factors = shared_address(&shared.factors[ring.slot]);
      const int64_t image = index * kTileBytes;
      if constexpr (kVector) {
        const auto both = [&](unsigned char *to, const unsigned char *from) {
          load_bytes_to(shared_address(to) + half, from + 2 * image + half, kTileBytes, barrier, 3);
        };
        if constexpr (kKeys) both(stage.k, in.tiles.x_start);
        if (has_v) load_box(shared_address(stage.v), &in.v, barrier, 64 * rank, work.hv, row, work.batch);
        if constexpr (kWriteGate) load_box(shared_address(stage.write_gate), &in.x, barrier, 64 * rank, work.hv, row, work.batch);
        load_bytes(factors, in.tiles.vector_factors + index, sizeof(VectorFactors), barrier);
        both(stage.k_end, in.tiles.k_end);
        if constexpr (kIndependent) both(stage.b_end, in.tiles.b_end);
        if constexpr (!kSummary) {
          both(stage.q, in.tiles.q_start);
          load_bytes_to(shared_address(stage.scores) + part, in.tiles.scores + image + part, kTileBytes / 2, barrier, 3);
          if constexpr (Shared::kLow) {
            load_bytes_to(shared_address(stage.scores_low) + part, in.tiles.scores_low + image + part, kTileBytes / 2, barrier, 3);
          }
        }
      } else {
        if constexpr (kX) load_box_to(shared_address(stage.x) + half, &in.x, barrier, 3, 64 * rank, h, row, work.batch);
        load_box_to(shared_address(stage.k) + half, &in.k, barrier, 3, 64 * rank, h, row, work.batch);
        if (has_v) load_box(shared_address(stage.v), &in.v, barrier, 64 * rank, work.hv, row, work.batch);
        if constexpr (kFactors) load_bytes(factors, in.tiles.factors + index, sizeof(Factors), barrier);
        if constexpr (!kSummary) {
          load_box_to(shared_address(stage.q) + half, &in.q, barrier, 3, 64 * rank, h, row, work.batch);
        }
      }
      if constexpr (kSolve) {
        const unsigned char *from = in.tiles.solve + 2 * image + part;
        load_bytes_to(shared_address(stage.solve) + part, from, kTileBytes / 2, barrier, 3);
        load_bytes_to(shared_address(stage.solve_low) + part, from + kTileBytes, kTileBytes / 2, barrier, 3);
      }
    }
    __syncwarp();
    if (left < kChunk) {
      barrier_wait(barrier, 0);
      const uint4 zero = make_uint4(0, 0, 0, 0);
      for (int i = lane; i < (kChunk - left) * 8; i += 32) {
        const int offset = (left + i / 8) * 128 + i % 8 * 16;
        *reinterpret_cast<uint4 *>(stage.v + offset) = zero;
        if constexpr (kWriteGate) *reinterpret_cast<uint4 *>(stage.write_gate + offset) = zero;
        for (int side = 0; side < (kVector ? 0 : 2); ++side) {
          *reinterpret_cast<uint4 *>(stage.k + side * kTileBytes + offset) = zero;
          if constexpr (kX) *reinterpret_cast<uint4 *>(stage.x + side * kTileBytes + offset) = zero;
          if constexpr (!kSummary) *reinterpret_cast<uint4 *>(stage.q + side * kTileBytes + offset) = zero;
        }
      }
      fence_async_shared();
      __syncwarp();
      if (lane == 0) barrier_arrive(full);
    }
  }
}

// One warp: the outputs, a chunk at a time, from the staging tile to rows of o.
template <Sm90Gate kGate, Sm90Erase kErase>
__device__ __forceinline__ void store_outputs(const ScanArguments &in, ScanShared<kGate, kErase> &shared, const Work &work,
                                              int lane) {
  const uint32_t filled = shared_address(&shared.o_filled), emptied = shared_address(&shared.o_emptied);
  if (work.length > 0) {  // the chain fills the tile once before it has outputs
    barrier_wait(filled, 0);
    if (lane == 0) barrier_arrive(emptied);
  }
  uint32_t parity = 1;
  for (int row = work.start, left = work.length; left > 0; row += kChunk, left -= kChunk, parity ^= 1) {
    barrier_wait(filled, parity);
    if (left >= kChunk) {
      if (lane == 0) {
        fence_async_shared();  // here and not in the chain: 175 clocks a chunk
        store_box(&in.o, shared_address(shared.o), 64 * work.rank, work.hv, row, work.batch);
        store_commit();
        store_wait_read<0>();
        barrier_arrive(emptied);
      }
    } else {
      __nv_bfloat16 *out = static_cast<__nv_bfloat16 *>(in.o_rows) + work.batch * in.o_strides.batch +
                           row * in.o_strides.token + work.hv * in.o_strides.head + 64 * work.rank;
      for (int i = lane; i < left * 8; i += 32) {
        if (64 * work.rank + i % 8 * 8 >= in.shape.V) continue;
        *reinterpret_cast<uint4 *>(out + i / 8 * in.o_strides.token + i % 8 * 8) =
            *reinterpret_cast<const uint4 *>(shared.o + swizzled(i / 8, i % 8 * 16));
      }
    }
  }
  if (lane == 0) store_wait<0>();
}

}  // namespace fw::sm90
