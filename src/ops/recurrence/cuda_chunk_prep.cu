// SPDX-License-Identifier: Apache-2.0
// The images of all chunks of 16 rows, for the chunk form of every row in bf16 and fp16.
//
// Plan: a block of 256 threads a (slot, value head). Rows are packed to shared memory as fp32, a warp a row; scores and decayed rows come
// from products of decays row by row, all of them at most 1; then one thread a column solves: of the inverse (16), of t xk and of t reads_x.
// Shared memory: packed and decayed rows, at most 10 arrays of 8 KB at K = 128, values and scores. Barriers: after the packing, the
// scores, the clearing of what lies past the rows, and the solve.
#include "cuda/launch.cuh"
#include "cuda/tf32.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_chunk.cuh"
#include "ops/recurrence/cuda_tile.cuh"

namespace fw::recurrence {
namespace {

// A whole chunk with all columns as one panel.
Panels plan_chunk(const ChunkImages &images) { return {images.width / kColumnsOwned, 1, kChunkRows, images.keys}; }

struct PrepShared {
  DeviceChunk chunk;
  float *t, *m;  // [16][16]

  template <fw_gate kGate, fw_erase kErase>
  FW_HOST_DEVICE static int32_t floats(const Panels &l) {
    return DeviceChunk::floats<kGate, kErase>(l) + 2 * kChunkScores;
  }
  template <fw_gate kGate, fw_erase kErase>
  __device__ void lay_out(const Panels &l, float *memory) {
    t = chunk.lay_out<kGate, kErase>(l, memory);
    m = t + kChunkScores;
  }
};

// Scores past the rows or the diagonal become 0. 256 threads, one an entry.
template <fw_erase kErase>
__device__ inline void clear_scores(const DeviceChunk &c, int n) {
  const int at = threadIdx.x, i = at / kChunkRows, j = at % kChunkRows;
  if (i >= n || j > i) c.qk[at] = c.qb[at] = 0.0f;
  if (i >= n || j >= i) c.xk[at] = c.xb[at] = 0.0f;
}

// A column of (I + sign L)^-1 times from; L strictly lower.
template <class From>
__device__ __forceinline__ void solve_column(const float *lower, float sign, float *to, int pitch, From from) {
  float x[kChunkRows];
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) x[i] = from(i);
#pragma unroll
  for (int j = 0; j < kChunkRows; ++j) {
    const float known = -sign * x[j];
#pragma unroll
    for (int i = j + 1; i < kChunkRows; ++i) x[i] = fmaf(lower[i * kChunkRows + j], known, x[i]);
  }
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) to[i * pitch] = x[i];
}

template <fw_erase kErase>
__device__ inline void solve(const Panels &l, const PrepShared &s, int n) {
  const DeviceChunk &c = s.chunk;
  const int column = threadIdx.x;
  if constexpr (kIsShared<kErase>) {
    if (column < kChunkRows) {
      solve_column(c.xk, 1.0f, s.t + column, kChunkRows, [&](int i) { return i == column ? 1.0f : 0.0f; });
    }
  }
  if constexpr (kErase == FW_ERASE_INDEPENDENT) {
    const int other = column - l.pitch;
    if (other < 0) {
      float *x = c.reads_x + column;
      solve_column(c.xb, -1.0f, x, l.pitch, [&](int i) { return i < n ? x[i * l.pitch] : 0.0f; });
    } else if (other < kChunkRows) {
      solve_column(c.xb, -1.0f, s.m + other, kChunkRows, [&](int i) { return c.xk[i * kChunkRows + other]; });
    } else if (other < 2 * kChunkRows) {
      const int unit = other - kChunkRows;
      solve_column(c.xb, -1.0f, s.t + unit, kChunkRows, [&](int i) { return i == unit ? 1.0f : 0.0f; });
    }
  }
}

// [16][columns] of shared memory to an image; rows from n on are 0.
template <bool kRounds>
__device__ inline void store_image(float *to, const float *from, int columns, int pitch, int n) {
  const int quads = columns / 4;
  for (int at = threadIdx.x; at < kChunkRows * quads; at += kThreads) {
    const int row = at / quads, column = at % quads;
    float4 x = make_float4(0, 0, 0, 0);
    if (row < n) x = *reinterpret_cast<const float4 *>(from + row * pitch + 4 * column);
    if constexpr (kRounds) {
      x = make_float4(__uint_as_float(cuda::to_tf32(x.x)), __uint_as_float(cuda::to_tf32(x.y)), __uint_as_float(cuda::to_tf32(x.z)),
                      __uint_as_float(cuda::to_tf32(x.w)));
    }
    reinterpret_cast<float4 *>(to)[at] = x;
  }
}

template <fw_gate kGate, fw_erase kErase, bool kRounds>
__global__ void __launch_bounds__(kThreads) prep(const __grid_constant__ Problem p, const __grid_constant__ Panels l,
                                                 const __grid_constant__ ChunkImages images) {
  const uint32_t heads = static_cast<uint32_t>(p.HV), slot = blockIdx.x / heads, hv = blockIdx.x - slot * heads;
  const ChunkPlace place = find_chunk(p, slot);
  const int n = place.rows;
  if (n <= 0) return;
  PrepShared s;
  s.lay_out<kGate, kErase>(l, cuda::dynamic_shared<float>());
  const DeviceChunk &c = s.chunk;
  pack_rows<kGate, kErase>(p, l, {place.batch, place.first, hv, hv / static_cast<uint32_t>(p.group()), n}, 0, c.rows);
  __syncthreads();  // rows are there
  score_rows<kGate, kErase>(l, c, n);
  clear_scores<kErase>(c, n);
  __syncthreads();  // scores are whole
  float *record = record_at(p, images, slot, hv);
  const auto store_keys = [&](int32_t offset, const float *from) {
    if (offset >= 0) store_image<kRounds>(record + offset, from, l.pitch, l.pitch, n);
  };
  const auto store_scores = [&](int32_t offset, const float *from) {
    if (offset >= 0) store_image<kRounds>(record + offset, from, kChunkRows, kChunkRows, kChunkRows);
  };
  store_keys(images.reads_q, c.reads_q);
  store_keys(images.ends_k, c.ends_k);
  store_keys(images.reads_x, c.reads_x);
  store_keys(images.ends_b, c.ends_b);
  store_image<false>(record + images.values, c.rows.u, images.width, l.value_pitch(), n);
  for (int d = threadIdx.x; d < l.pitch; d += kThreads) {
    record[images.total + d] = kGate == FW_GATE_NONE ? 1.0f : c.runs[(n - 1) * l.pitch + d];
  }
  store_scores(images.qk, c.qk);
  store_scores(images.qb, c.qb);
  store_scores(images.xk, c.xk);
  if constexpr (kErase == FW_ERASE_NONE) return;
  __syncthreads();  // reads_x is stored
  solve<kErase>(l, s, n);
  __syncthreads();  // t, m and the solved keys are there
  store_keys(images.solved_x, c.reads_x);
  store_scores(images.t, s.t);
  store_scores(images.m, s.m);
}

struct Launch {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p, const ChunkImages &images) {
    const Panels l = plan_chunk(images);
    const int32_t bytes = 4 * PrepShared::floats<kGate, kErase>(l);
    const cuda::Launch how = {static_cast<uint32_t>(chunk_slots(p) * p.HV), kThreads, bytes, static_cast<cudaStream_t>(p.stream)};
    if (chunk_parts(p) == 1) {
      cuda::launch(how, prep<kGate, kErase, true>, p, l, images);
    } else {
      cuda::launch(how, prep<kGate, kErase, false>, p, l, images);
    }
  }
};

struct SharedBytes {
  template <fw_gate kGate, fw_erase kErase>
  static int32_t run(const ChunkImages &images) {
    return 4 * PrepShared::floats<kGate, kErase>(plan_chunk(images));
  }
};

}  // namespace

int32_t chunk_shared_bytes(const Problem &p) { return dispatch_axes<SharedBytes>(p, plan_chunk_images(p, nullptr, false)); }

void launch_chunk_prep(const Problem &p, const ChunkImages &images) {
  if (chunk_slots(p) > 0) dispatch_axes<Launch>(p, p, images);
}

}  // namespace fw::recurrence
