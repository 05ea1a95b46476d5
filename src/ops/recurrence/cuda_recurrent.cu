// SPDX-License-Identifier: Apache-2.0
// Token by token on CUDA: the forward and the step of every row, type and size. The path that is always there.
//
// Plan: grid (sequence, value head, value panel), 256 threads. The panel of the state stays in registers (8 x 4 a thread);
// rows are packed to shared memory 1024 / padded K at a time. A row takes one pass over the state, which decays it and sums
// both what is erased and what is read, S~^T e and S~^T q; one exchange through shared memory; and one rank-one update. What a
// row writes reaches its own output as (q . k) u. Shared memory: packed keys of at most 5 x 4 KB, values of rows x width,
// 2 x 8 warps of partial sums: 30 KB at K = V = 128. Registers: 32 of state of about 100. One barrier a row: the partial sums
// have two buffers, and a warp writes one again only past the barrier of the row between.
#include "cuda/launch.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_tile.cuh"

namespace fw::recurrence {
namespace {

// Products of the row's query with its own write keys, by the warp that packed the row.
template <fw_erase kErase>
__device__ inline void row_products(const Panels &l, const PackedRows &rows, int n, float *qk, float *qb) {
  const int lane = threadIdx.x % 32;
  for (int i = threadIdx.x / 32; i < n; i += kWarps) {
    float with_k = 0, with_b = 0;
    for (int d = lane; d < l.pitch; d += 32) {
      const float q = rows.q[i * l.pitch + d];
      with_k = fmaf(q, rows.k[i * l.pitch + d], with_k);
      if constexpr (kErase == FW_ERASE_INDEPENDENT) with_b = fmaf(q, rows.b[i * l.pitch + d], with_b);
    }
    with_k = cuda::warp_sum(with_k);
    with_b = cuda::warp_sum(with_b);
    if (lane == 0) qk[i] = with_k, qb[i] = with_b;
  }
}

// Shared memory of a block.
template <fw_gate kGate, fw_erase kErase>
struct Shared {
  PackedRows rows;
  float *qk, *qb;   // [16]
  float4 *partial;  // [2][kWarps][2][lanes]
  static int32_t floats(const Panels &l) {
    return PackedRows::floats<kGate, kErase>(l) + 32 + 2 * kWarps * 2 * l.width();
  }
  __device__ Shared(const Panels &l, float *memory) {
    qk = rows.lay_out<kGate, kErase>(l, memory);
    qb = qk + 16;
    partial = reinterpret_cast<float4 *>(qb + 16);
  }
};

// divisors: [B,T,H] of the normaliser, or nullptr. saved: states for the backward, or nullptr.
template <fw_gate kGate, fw_erase kErase>
__global__ void __launch_bounds__(kThreads, 2) recurrent(const __grid_constant__ Problem p, const __grid_constant__ Panels l,
                                                      const float *divisors, float *saved) {
  const Shared<kGate, kErase> shared(l, cuda::dynamic_shared<float>());
  const BlockPlace block = place_of_block(p, l.count, blockIdx.x);
  const int32_t panel = block.panel;
  const int64_t hv = block.hv, n = block.n;
  const cuda::DeviceSegment segment = cuda::device_segment(p.cu_seqlens, p.T, n);
  const int64_t begin = segment.begin * p.n_sub, end = segment.end * p.n_sub;
  const bool is_step = p.direction == FW_STEP, has_output = given(p.o);
  const Owner own(l, panel);
  int64_t slot = n;
  if (is_step && given(p.state_indices)) {
    slot = load_int(p.state_indices, n);
    if (slot >= p.state.shape[0]) slot = -1;
  }
  const bool stores_output = has_output && own.row == 0;
  if (slot < 0) {
    for (int64_t token = segment.begin; stores_output && token < segment.end; ++token) {
      const int64_t offset = head_offset(p.o, segment.batch, token, hv);
      for (int c = 0; c < kColumnsOwned; ++c) {
        if (own.column + c < p.V) store_at(p.o, offset + (own.column + c) * p.o.strides[3], 0.0f);
      }
    }
    return;
  }
  if (is_step && begin == end) return;
  Tile S;
  load_tile(p, is_step ? p.state : p.initial_state, slot, hv, own, S);
  int buffer = 0;
  for (int64_t row = begin; row < end; row += l.rows) {
    const int count = end - row < l.rows ? static_cast<int>(end - row) : l.rows;
    if (saved && (row - begin) % kSegmentRows == 0) {
      save_tile(p, saved_slot_at(p, n, begin) + (row - begin) / kSegmentRows, hv, own, S, saved);
    }
    __syncthreads();  // every thread is done with the rows before
    pack_rows<kGate, kErase>(p, l, {segment.batch, row, hv, block.h, count}, panel, shared.rows);
    row_products<kErase>(l, shared.rows, count, shared.qk, shared.qb);
    __syncthreads();  // the rows are there
    for (int i = 0; i < count; ++i, buffer ^= 1) {
      const int at = i * l.pitch + own.row;
      const PackedRows &rows = shared.rows;
      float4 *partial = shared.partial + buffer * kWarps * 2 * l.lanes;
      RowSums sums = {};
      read_tile<kGate, kErase>(rows.q + at, rows.x + at, rows.decay + at, S, sums);
      share_sums<kErase>(l.lanes, own.lane, sums, partial);
      __syncthreads();  // every warp's sums are there; the other buffer may be written from here on
      collect_sums<kErase>(l.lanes, own.lane, partial, sums);
      const float4 v = reinterpret_cast<const float4 *>(rows.u + i * l.value_pitch())[own.lane];
      float u[kColumnsOwned] = {v.x, v.y, v.z, v.w};
      erase_value<kErase>(sums, u);
      write_tile<kErase>(rows.k + at, rows.b + at, sums, u, S);
      if (!stores_output) continue;
      const TokenPlace place = place_of(p, row + i);
      if (place.sub != p.n_sub - 1) continue;
      const int64_t offset = head_offset(p.o, segment.batch, place.token, hv);
      const float divisor = divisors ? divisors[(segment.batch * p.T + place.token) * p.H + block.h] : 1.0f;
#pragma unroll
      for (int c = 0; c < kColumnsOwned; ++c) {
        float o = row_output<kErase>(sums, u, c, shared.qk[i], shared.qb[i], p.scale_f32);
        if (divisors) o /= divisor;
        if (own.column + c < p.V) store_at(p.o, offset + (own.column + c) * p.o.strides[3], o);
      }
    }
  }
  store_tile(p, is_step ? p.state : p.final_state, slot, hv, own, S);
}

struct Launch {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p, const Panels &l, const float *divisors, float *saved) {
    const int64_t blocks = p.N * p.HV * l.count;
    const int32_t bytes = 4 * Shared<kGate, kErase>::floats(l);
    cuda::launch({static_cast<uint32_t>(blocks), kThreads, bytes, static_cast<cudaStream_t>(p.stream)}, recurrent<kGate, kErase>, p, l, divisors, saved);
  }
};

}  // namespace

void launch_recurrent(const Problem &p, const float *divisors, float *saved) {
  dispatch_axes<Launch>(p, p, plan_panels(p), divisors, saved);
}

}  // namespace fw::recurrence
