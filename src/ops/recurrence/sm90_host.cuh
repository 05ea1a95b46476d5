// SPDX-License-Identifier: Apache-2.0
// What the host sides of the sm_90a forward and backward share: slots, segments, the workspace of prep, tensor maps.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/sm90/tensor_map.cuh"
#include "fastweight/recurrence.h"
#include "ops/recurrence/sm90_prep.cuh"

namespace fw::sm90 {

constexpr size_t kWorkspaceAlign = 1024;

inline size_t aligned(size_t bytes) { return (bytes + kWorkspaceAlign - 1) / kWorkspaceAlign * kWorkspaceAlign; }

inline bool box_strides(const void *base, const Sm90Strides &s) {
  const auto fits = [](int64_t stride) { return stride >= 0 && stride % 8 == 0 && stride < (int64_t{1} << 38); };
  return reinterpret_cast<uintptr_t>(base) % 16 == 0 && fits(s.batch) && fits(s.token) && fits(s.head);
}

inline int64_t slots(const Sm90Forward &in) {
  return in.cu_seqlens ? in.T / kChunk + in.N : in.B * ((in.T + kChunk - 1) / kChunk);
}

// How many pieces each sequence is cut into so that the pairs of CTAs fill the card; from the shapes alone. With several each
// chunk is met twice, and the further launches and links cost about as much as 13 + 2 s chunks forward and 3 + 2 s backward,
// whose chunks take three times as long (measured with gated_delta_rule, 32 to 512 chunks).
inline int segments(const Sm90Forward &in, bool is_backward) {
  constexpr int64_t kPairs = 66, kMost = 16, kLeastChunks = 4;
  if (in.batch_invariant) return 1;
  const int64_t heads = in.N * in.HV, chunks = ((in.cu_seqlens ? in.T / in.N : in.T) + kChunk - 1) / kChunk;
  const int64_t most = std::min({kPairs / heads, chunks / kLeastChunks, kMost});
  int64_t best = 1, least = chunks;
  for (int64_t s = 2; s <= most; ++s) {
    const int64_t cost = 2 * ((chunks + s - 1) / s) + (is_backward ? 3 : 13) + 2 * s;
    if (cost < least) best = s, least = cost;
  }
  return static_cast<int>(best);
}

// Parts of a workspace, one behind the other.
struct Parts {
  size_t total = 0;
  size_t take(size_t bytes) {
    const size_t offset = total;
    total += aligned(bytes);
    return offset;
  }
};

// Without a gate, factors of a token (a norm, an erase key of its own) are those of a gate of 0.
inline Sm90Gate kernel_gate(const Sm90Forward &in) {
  if (in.erase == Sm90Erase::kIndependent) return Sm90Gate::kVector;
  const bool has_factors = in.has_l2norm || in.erase == Sm90Erase::kSeparate || in.reads_before;
  return in.gate == Sm90Gate::kNone && has_factors ? Sm90Gate::kScalar : in.gate;
}

// Whether a pass before prep makes the vector gate, or widens it where prep takes fp32 alone.
inline bool makes_gate(const Sm90Forward &in) {
  if (in.gate != Sm90Gate::kVector) return false;
  return in.activations.gate_kind != FW_GATE_INPUT_LOG_DECAY || (in.has_l2norm && in.g_type != Sm90Real::kFloat32);
}
inline size_t made_gate_bytes(const Sm90Forward &in) {
  return makes_gate(in) ? static_cast<size_t>(in.B) * in.T * in.HV * in.K * sizeof(float) : 0;
}

// Of prep what forward and backward have alike, but for tensor maps.
inline PrepArguments prep_of(const Sm90Forward &in, const Shape &shape, const Tiles &tiles) {
  PrepArguments prep = {};
  prep.has_l2norm = in.has_l2norm, prep.reads_before = in.reads_before;
  prep.activations = in.activations;
  prep.q_rows = static_cast<const __nv_bfloat16 *>(in.q), prep.q_strides = in.q_strides;
  prep.k_rows = static_cast<const __nv_bfloat16 *>(in.k), prep.k_strides = in.k_strides;
  prep.shape = shape, prep.tiles = tiles;
  prep.scale = in.scale;
  prep.g = in.g, prep.g_strides = in.g_strides, prep.g_type = in.g_type;
  prep.beta = in.beta, prep.beta_strides = in.beta_strides, prep.beta_type = in.beta_type;
  return prep;
}

// The pass before prep, where there is one: prep's gate is then what it made, in `memory`.
inline cudaError_t make_gate(const Sm90Forward &in, PrepArguments &prep, void *memory, cudaStream_t stream) {
  if (!makes_gate(in)) return cudaSuccess;
  float *made = static_cast<float *>(memory);
  const cudaError_t status = launch_gate(prep, made, stream);
  const int64_t token = in.HV * in.K;
  prep.g = made, prep.g_type = Sm90Real::kFloat32, prep.g_strides = {in.T * token, token, in.K};
  return status;
}

// Where prep leaves its tiles.
struct TileLayout {
  size_t solve, factors, scores, scores_low, x_start, q_start, k_end, b_end;
};

inline TileLayout lay_out_tiles(Parts &parts, const Sm90Forward &in) {
  const size_t tiles = static_cast<size_t>(slots(in)) * in.HV;
  const bool is_vector = kernel_gate(in) == Sm90Gate::kVector, erases = in.erase != Sm90Erase::kNone;
  const bool is_independent = in.erase == Sm90Erase::kIndependent, solves = erases && !is_independent;
  TileLayout at = {};
  at.solve = parts.take(solves ? tiles * 2 * kTileBytes : 0);
  at.factors = parts.take(tiles * (is_vector ? sizeof(VectorFactors) : sizeof(Factors)));
  at.scores = parts.take(is_vector ? tiles * kTileBytes : 0);
  at.scores_low = parts.take(is_vector && solves ? tiles * kTileBytes : 0);
  at.x_start = parts.take(is_vector && erases ? tiles * 2 * kTileBytes : 0);
  at.q_start = parts.take(is_vector ? tiles * 2 * kTileBytes : 0);
  at.k_end = parts.take(is_vector ? tiles * 2 * kTileBytes : 0);
  at.b_end = parts.take(is_independent ? tiles * 2 * kTileBytes : 0);
  return at;
}

inline Tiles tiles_at(unsigned char *base, const TileLayout &at) {
  return {base + at.solve,   reinterpret_cast<Factors *>(base + at.factors),
          base + at.scores,  base + at.x_start,
          base + at.q_start, base + at.k_end,
          base + at.b_end,   reinterpret_cast<VectorFactors *>(base + at.factors),
          base + at.scores_low, nullptr};
}

// Of one state a (sequence, head, segment), in floats; 0 when there is one segment.
inline size_t segment_state_bytes(const Sm90Forward &in, bool is_backward) {
  const size_t pieces = segments(in, is_backward);
  return pieces == 1 ? 0 : static_cast<size_t>(in.N) * in.HV * pieces * (kKey * kKey * sizeof(float));
}

inline Shape shape_of(const Sm90Forward &in) {
  return {static_cast<int>(in.B),         static_cast<int>(in.T), static_cast<int>(in.H),
          static_cast<int>(in.HV),        static_cast<int>(in.N), static_cast<int>(slots(in)),
          static_cast<int>((in.T + kChunk - 1) / kChunk),         in.cu_seqlens,
          in.cu_seqlens_64,               static_cast<int>(in.K), static_cast<int>(in.V)};
}

// [B, T, heads, size] as boxes of 64 elements x 1 head x 64 tokens x 1 batch, 128-byte swizzle, zeros outside.
inline cudaError_t encode(CUtensorMap *map, const void *base, const Sm90Strides &s, int64_t heads, const Sm90Forward &in,
                          int64_t size = kKey) {
  const auto bytes = [](int64_t stride) { return 2 * std::max<int64_t>(stride, 8); };
  return encode_boxes(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, base, {size, heads, in.T, in.B},
                      {bytes(s.head), bytes(s.token), bytes(s.batch)}, {64, 1, kChunk, 1});
}

}  // namespace fw::sm90
