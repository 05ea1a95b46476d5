// SPDX-License-Identifier: Apache-2.0
// Decode on CUDA: a few tokens of each sequence against a state in place. Every row; K = 64 or 128, whole panels of columns, a
// state whose rows can be read 4 elements at a time; no normaliser.
//
// Plan: grid (sequence, value head, value panel), 128 threads; 16 or 8 lanes by 8 or 16 groups of 8 state rows, so a panel is
// 64 columns at K = 64 and 32 at 128, 16 KB of fp32 state a block: one head spreads over 4 blocks and a batch of 1 over the
// whole device. The panel is read once with 16-byte accesses (8 a thread, all in flight before anything is used), stays in
// registers (8 x 4 a thread) over all tokens, and is written once. One thread a channel brings a token's q, k, e, b and exp(g)
// to shared memory. Two barriers a token, behind the channels and behind the warps' partial sums, one between tokens and two more
// with the L2 norm. Shared memory: 5 x 512 B of channels, 4 warps of partial sums, 5 KB. Registers: at most 80, so that 6 blocks
// (96 KB of state in flight) fit. What a call seldom needs (activations, norms) is not inlined: the kernel's length decides how long a batch of 1 takes.
#include "cuda/launch.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_tile.cuh"

namespace fw::recurrence {
namespace {

constexpr int kStepThreads = 128, kStepWarps = kStepThreads / 32, kChannels = 128;

struct StepPlan {
  int32_t lanes, panels;  // threads a state row, panels a head
};

// A token's channels, and what its warps reduced.
struct StepShared {
  float q[kChannels], k[kChannels], x[kChannels], b[kChannels], decay[kChannels];
  float v[64];
  float dots[2][kStepWarps];                 // q . k, q . b
  double squares[3][kStepWarps];             // of q, k and p
  float4 partial[kStepWarps * 2 * 16];       // of share_sums
};

template <class T>
struct alignas(sizeof(T) * 4) Pack {
  T at[4];
};

// A tile whose columns (KV) or rows (VK) are side by side in memory, whole and aligned.
template <class T>
__device__ inline void load_vectors(const T *from, const StatePlace &at, Tile &S) {
  if (at.column == 1) {
#pragma unroll
    for (int r = 0; r < kRowsOwned; ++r) {
      const Pack<T> x = *reinterpret_cast<const Pack<T> *>(from + r * at.row);
#pragma unroll
      for (int c = 0; c < kColumnsOwned; ++c) S[r][c] = cuda::to_float(x.at[c]);
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < kColumnsOwned; ++c) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Pack<T> x = *reinterpret_cast<const Pack<T> *>(from + c * at.column + 4 * half);
#pragma unroll
      for (int r = 0; r < 4; ++r) S[4 * half + r][c] = cuda::to_float(x.at[r]);
    }
  }
}
template <class T>
__device__ inline void store_vectors(T *to, const StatePlace &at, const Tile &S) {
  if (at.column == 1) {
#pragma unroll
    for (int r = 0; r < kRowsOwned; ++r) {
      Pack<T> x;
#pragma unroll
      for (int c = 0; c < kColumnsOwned; ++c) cuda::from_float(S[r][c], x.at + c);
      *reinterpret_cast<Pack<T> *>(to + r * at.row) = x;
    }
    return;
  }
#pragma unroll
  for (int c = 0; c < kColumnsOwned; ++c) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Pack<T> x;
#pragma unroll
      for (int r = 0; r < 4; ++r) cuda::from_float(S[4 * half + r][c], x.at + r);
      *reinterpret_cast<Pack<T> *>(to + c * at.column + 4 * half) = x;
    }
  }
}

// The token's operands, one thread a channel, columns of v by the first threads. Factors of 1 / length are applied by
// `normalize`. Ends without a barrier.
template <fw_gate kGate, fw_erase kErase>
__device__ inline void load_channels(const Problem &p, int64_t batch, int64_t token, int64_t hv, int64_t h, int64_t first_column,
                                     int width, StepShared &s) {
  const int d = threadIdx.x, warp = threadIdx.x / 32;
  const bool is_inside = d < p.K;
  const auto load = [&](const fw_tensor &t) {
    return is_inside ? load_at(t, head_offset(t, batch, token, h) + d * t.strides[3]) : 0.0f;
  };
  // every number in a register before any goes to shared memory: the loads then wait for global memory once, together
  const float q = load(p.q), k = load(p.k);
  const bool has_column = d < width;
  const int64_t value = head_offset(p.v, batch, token, hv) + (first_column + d) * p.v.strides[3];
  float v = has_column ? load_at(p.v, value) : 0.0f, x = 0, b = 0, source = k, gate = 1, write_gate = 1, beta = 1, decay = 1;
  if constexpr (kGate == FW_GATE_VECTOR) {
    decay = is_inside ? load_at(p.g, head_offset(p.g, batch, token, hv) + d * p.g.strides[3]) : 0.0f;
  }
  if constexpr (kGate == FW_GATE_SCALAR) {
    if (!p.has_fixed_gate) decay = load_at(p.g, head_offset(p.g, batch, token, hv));
  }
  if constexpr (kIsShared<kErase>) {
    if (given(p.beta)) beta = load_at(p.beta, head_offset(p.beta, batch, token, hv));
    if (given(p.p)) source = load(p.p);
    if (given(p.erase_gate)) gate = load(p.erase_gate);
    if (given(p.write_gate) && has_column) {
      write_gate = load_at(p.write_gate, head_offset(p.write_gate, batch, token, hv) + (first_column + d) * p.write_gate.strides[3]);
    }
  }
  if constexpr (kErase == FW_ERASE_INDEPENDENT) x = load(p.a), b = load(p.b);
  if constexpr (kIsShared<kErase>) {
    if (given(p.beta) && p.beta_input != FW_BETA_INPUT_PLAIN) beta = activated_beta(p, beta);
    x = source * gate * beta;
    v *= write_gate * beta;
  }
  if constexpr (kGate == FW_GATE_VECTOR) decay = is_inside ? expf(log_decay(p, hv, d, decay)) : 0.0f;
  if constexpr (kGate == FW_GATE_SCALAR) decay = p.has_fixed_gate ? fixed_decay(p, hv) : expf(log_decay(p, hv, 0, decay));
  s.q[d] = q;
  s.k[d] = k;
  if constexpr (kErase != FW_ERASE_NONE) s.x[d] = x;
  if constexpr (kErase == FW_ERASE_INDEPENDENT) s.b[d] = b;
  if constexpr (kGate != FW_GATE_NONE) s.decay[d] = decay;
  if (has_column) s.v[d] = v;
  const float qk = cuda::warp_sum(q * k), qb = kErase == FW_ERASE_INDEPENDENT ? cuda::warp_sum(q * b) : 0.0f;
  if (d % 32 == 0) s.dots[0][warp] = qk, s.dots[1][warp] = qb;
  if (!p.has_l2norm) return;
  const double values[3] = {q, k, source};
  for (int i = 0; i < 3; ++i) {
    const double sum = cuda::warp_sum(values[i] * values[i]);
    if (d % 32 == 0) s.squares[i][warp] = sum;
  }
}

// q, k and the erase key through the L2 norm. Begins and ends with a barrier.
template <fw_erase kErase>
__device__ __noinline__ void normalize(const Problem &p, StepShared &s) {
  __syncthreads();
  float factor[3];
  for (int i = 0; i < 3; ++i) {
    double sum = 0;
    for (int w = 0; w < kStepWarps; ++w) sum += s.squares[i][w];
    factor[i] = static_cast<float>(rsqrt(sum + 1e-6));
  }
  const int d = threadIdx.x, warp = threadIdx.x / 32;
  const float q = s.q[d] * factor[0], k = s.k[d] * factor[1];
  s.q[d] = q;
  s.k[d] = k;
  if constexpr (kIsShared<kErase>) s.x[d] *= given(p.p) ? factor[2] : factor[1];
  const float qk = cuda::warp_sum(q * k), qb = kErase == FW_ERASE_INDEPENDENT ? cuda::warp_sum(q * s.b[d]) : 0.0f;
  if (d % 32 == 0) s.dots[0][warp] = qk, s.dots[1][warp] = qb;
  __syncthreads();
}

template <fw_gate kGate, fw_erase kErase>
__global__ void __launch_bounds__(kStepThreads, 6) step(const __grid_constant__ Problem p, const __grid_constant__ StepPlan plan) {
  __shared__ StepShared s;
  const int lane = threadIdx.x % plan.lanes, row = threadIdx.x / plan.lanes * kRowsOwned, width = kColumnsOwned * plan.lanes;
  const BlockPlace block = place_of_block(p, plan.panels, blockIdx.x);
  const int32_t panel = block.panel;
  const int64_t hv = block.hv, n = block.n;
  const int64_t first_column = static_cast<int64_t>(panel) * width, column = first_column + kColumnsOwned * lane;
  const cuda::DeviceSegment segment = cuda::device_segment(p.cu_seqlens, p.T, n);
  int64_t slot = n;
  if (given(p.state_indices)) {
    slot = load_int(p.state_indices, n);
    if (slot >= p.state.shape[0]) slot = -1;
  }
  if (slot < 0 || segment.begin == segment.end) {
    for (int64_t token = segment.begin; row == 0 && token < segment.end; ++token) {
      for (int c = 0; c < kColumnsOwned; ++c) {
        store_at(p.o, head_offset(p.o, segment.batch, token, hv) + (column + c) * p.o.strides[3], 0.0f);
      }
    }
    return;
  }
  const StatePlace at = find_state(p, p.state, slot, hv);
  const int64_t first = at.base + row * at.row + column * at.column;
  Tile S;
  cuda::with_type(p.state.data, p.state.dtype, [&](const auto *from) { load_vectors(from + first, at, S); });
  for (int64_t token = segment.begin; token < segment.end; ++token) {
    load_channels<kGate, kErase>(p, segment.batch, token, hv, block.h, first_column, width, s);
    if (p.has_l2norm) normalize<kErase>(p, s);
    __syncthreads();  // the channels are there
    RowSums sums;
    float u[kColumnsOwned], qk = 0, qb = 0;
    read_tile<kGate, kErase>(s.q + row, s.x + row, s.decay + row, S, sums);
    share_sums<kErase>(plan.lanes, lane, sums, s.partial);
    __syncthreads();  // the partial sums are there
    collect_sums<kErase, kStepWarps>(plan.lanes, lane, s.partial, sums);
    for (int w = 0; w < kStepWarps; ++w) qk += s.dots[0][w], qb += s.dots[1][w];
    write_tile<kErase>(s.k + row, s.b + row, sums, reinterpret_cast<const float4 *>(s.v)[lane], u, S);
    if (row == 0) {
      const int64_t offset = head_offset(p.o, segment.batch, token, hv);
#pragma unroll
      for (int c = 0; c < kColumnsOwned; ++c) {
        const float o = row_output<kErase>(sums, u, c, qk, qb, p.scale_f32);
        store_at(p.o, offset + (column + c) * p.o.strides[3], o);
      }
    }
    if (token + 1 < segment.end) __syncthreads();  // channels, partial sums and v may be written again
  }
  cuda::with_type(p.state.data, p.state.dtype, [&](auto *to) { store_vectors(to + first, at, S); });
}

struct Launch {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p, const StepPlan &plan) {
    const int64_t blocks = p.N * p.HV * plan.panels;
    cuda::launch({static_cast<uint32_t>(blocks), kStepThreads, 0, static_cast<cudaStream_t>(p.stream)}, step<kGate, kErase>, p, plan);
  }
};

}  // namespace

void launch_step(const Problem &p) {
  StepPlan plan = {};
  plan.lanes = static_cast<int32_t>(step_panel(p.K)) / kColumnsOwned;
  plan.panels = static_cast<int32_t>(p.V / step_panel(p.K));
  dispatch_axes<Launch>(p, p, plan);
}

}  // namespace fw::recurrence
