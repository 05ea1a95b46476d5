// SPDX-License-Identifier: Apache-2.0
// Decode on CUDA: a few tokens of each sequence against a state in place. Every row; K = 64 or 128, whole panels of
// columns, a state whose last dimension is dense; no normaliser.
//
// Plan: a warp a (sequence, value head, panel of columns), 4 warps a block that have nothing to do with each other:
// no barrier of a block anywhere. A lane owns one column of kRows = 32 or 64 state rows in registers, 32 kRows / K
// columns by K / kRows groups of rows make a panel: 4 or 8 KB of fp32 state, read once, every row of it in flight
// before anything is used, and written once after all tokens. Sums over rows are sums inside a lane and one or two
// shuffles. 64 rows where the batch fills the device (16 warps of 8 KB a multiprocessor) and for [V,K], 32 where it
// does not, so that a batch of one spreads over twice as many warps. [K,V] states: a load of a warp is one row of
// each group, 32 to 128 bytes each. [V,K] states: whole columns, 16 bytes a lane, turned through shared memory. A
// token's q, k, e, b and exp(g) come to shared memory by four channels a lane. Shared memory a warp: channels 5 x 512
// B; [V,K]: 2048 / K columns of K + 4 floats, 8.4 KB. Registers: 80 or 128. Handing over: __syncwarp behind the
// channels, behind the staging, and before the channels of the next token.
#include "cuda/device.hpp"
#include "cuda/launch.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_tile.cuh"

namespace fw::recurrence {
namespace {

constexpr int kStepWarps = 4, kChannels = 128, kChannelsOwned = kChannels / 32, kRowsTogether = 4;

struct StepPlan {
  int32_t columns, panels, items;  // of a panel; of a head; of the call
};

struct StepChannels {
  float q[kChannels], k[kChannels], x[kChannels], b[kChannels], decay[kChannels];
};

// A lane's rows of its column, four together.
template <int kRows>
using StepColumn = float[kRows / kRowsTogether][kRowsTogether][1];

template <class T>
struct alignas(sizeof(T) * 4) Pack {
  T at[4];
};

// A panel of [V,K]: `columns` runs of K elements from and to shared memory, [columns][K + 4]; 16 bytes of fp32 a
// lane.
template <int kRows, class T>
__device__ inline void load_columns(const T *from, int64_t step, int K, float *stage) {
  const int lane = threadIdx.x % 32, quads = K / 4;
  Pack<T> x[kRows / 4];
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const int at = lane + 32 * i;
    x[i] = *reinterpret_cast<const Pack<T> *>(from + at / quads * step + at % quads * 4);
  }
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const int at = lane + 32 * i;
    *reinterpret_cast<float4 *>(stage + at / quads * (K + 4) + at % quads * 4) =
        make_float4(cuda::to_float(x[i].at[0]), cuda::to_float(x[i].at[1]), cuda::to_float(x[i].at[2]),
                    cuda::to_float(x[i].at[3]));
  }
}
template <int kRows, class T>
__device__ inline void store_columns(T *to, int64_t step, int K, const float *stage) {
  const int lane = threadIdx.x % 32, quads = K / 4;
#pragma unroll
  for (int i = 0; i < kRows / 4; ++i) {
    const int at = lane + 32 * i;
    const float4 x = *reinterpret_cast<const float4 *>(stage + at / quads * (K + 4) + at % quads * 4);
    Pack<T> packed;
    cuda::from_float(x.x, packed.at), cuda::from_float(x.y, packed.at + 1);
    cuda::from_float(x.z, packed.at + 2), cuda::from_float(x.w, packed.at + 3);
    *reinterpret_cast<Pack<T> *>(to + at / quads * step + at % quads * 4) = packed;
  }
}

// A token's operands as the warp needs them: channels in shared memory, the lane's column of v' in u, q . k and q .
// b.
struct StepToken {
  float u, qk, qb;
};
template <fw_gate kGate, fw_erase kErase>
__device__ inline StepToken load_token(const Problem &p, int64_t batch, int64_t token, int64_t hv, int64_t h,
                                       int64_t column, StepChannels &s) {
  const int lane = threadIdx.x % 32, K = static_cast<int>(p.K);
  const auto load = [&](const fw_tensor &t, int64_t head, float(&to)[kChannelsOwned]) {
    const int64_t offset = head_offset(t, batch, token, head);
#pragma unroll
    for (int i = 0; i < kChannelsOwned; ++i) {
      const int d = lane + 32 * i;
      to[i] = d < K ? load_at(t, offset + d * t.strides[3]) : 0.0f;
    }
  };
  // every number in a register before any goes to shared memory: the loads then wait for global memory once, together
  float q[kChannelsOwned], k[kChannelsOwned], x[kChannelsOwned] = {}, b[kChannelsOwned] = {},
                                              decay[kChannelsOwned] = {};
  float source[kChannelsOwned], gate[kChannelsOwned], beta = 1, write_gate = 1, g = 0;
  load(p.q, h, q);
  load(p.k, h, k);
  StepToken own = {load_at(p.v, head_offset(p.v, batch, token, hv) + column * p.v.strides[3]), 0, 0};
  if constexpr (kGate == FW_GATE_VECTOR) load(p.g, hv, decay);
  if constexpr (kGate == FW_GATE_SCALAR) {
    if (!p.has_fixed_gate) g = load_at(p.g, head_offset(p.g, batch, token, hv));
  }
  if constexpr (kErase == FW_ERASE_INDEPENDENT) load(p.a, h, x), load(p.b, h, b);
  if constexpr (kIsShared<kErase>) {
    if (given(p.beta)) beta = load_at(p.beta, head_offset(p.beta, batch, token, hv));
    if (given(p.p)) load(p.p, h, source);
    if (given(p.erase_gate)) load(p.erase_gate, h, gate);
    if (given(p.write_gate)) {
      write_gate =
          load_at(p.write_gate, head_offset(p.write_gate, batch, token, hv) + column * p.write_gate.strides[3]);
    }
    if (given(p.beta) && p.beta_input != FW_BETA_INPUT_PLAIN) beta = activated_beta(p, beta);
    own.u *= write_gate * beta;
#pragma unroll
    for (int i = 0; i < kChannelsOwned; ++i) {
      if (!given(p.p)) source[i] = k[i];
      x[i] = source[i] * (given(p.erase_gate) ? gate[i] : 1.0f) * beta;
    }
  }
  if (p.has_l2norm) {
    const auto inverse = [](const float(&from)[kChannelsOwned]) {
      double sum = 0;
      for (int i = 0; i < kChannelsOwned; ++i) sum += static_cast<double>(from[i]) * from[i];
      return static_cast<float>(rsqrt(cuda::warp_sum(sum) + 1e-6));
    };
    const float of_q = inverse(q), of_k = inverse(k);
    float of_x = of_k;
    if constexpr (kIsShared<kErase>) {
      if (given(p.p)) of_x = inverse(source);
    }
#pragma unroll
    for (int i = 0; i < kChannelsOwned; ++i) {
      q[i] *= of_q, k[i] *= of_k;
      if constexpr (kIsShared<kErase>) x[i] *= of_x;
    }
  }
  if constexpr (kGate == FW_GATE_SCALAR)
    g = scalar_decay(p.has_fixed_gate ? fixed_gate(p, hv) : log_decay(p, hv, 0, g));
#pragma unroll
  for (int i = 0; i < kChannelsOwned; ++i) {
    const int d = lane + 32 * i;
    s.q[d] = q[i];
    s.k[d] = k[i];
    if constexpr (kErase != FW_ERASE_NONE) s.x[d] = x[i];
    if constexpr (kErase == FW_ERASE_INDEPENDENT) s.b[d] = b[i];
    if constexpr (kGate == FW_GATE_SCALAR) s.decay[d] = g;
    if constexpr (kGate == FW_GATE_VECTOR) s.decay[d] = d < K ? expf(log_decay(p, hv, d, decay[i])) : 0.0f;
    own.qk = fmaf(q[i], k[i], own.qk);
    own.qb = fmaf(q[i], b[i], own.qb);
  }
  own.qk = cuda::warp_sum(own.qk);
  if constexpr (kErase == FW_ERASE_INDEPENDENT) own.qb = cuda::warp_sum(own.qb);
  return own;
}

template <fw_gate kGate, fw_erase kErase, int kRows, bool kByColumn>
__global__ void __launch_bounds__(32 * kStepWarps, kRows == 64 ? 4 : 6)
    step(const __grid_constant__ Problem p, const __grid_constant__ StepPlan plan) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, K = static_cast<int>(p.K);
  const uint32_t item = blockIdx.x * kStepWarps + warp;
  if (item >= static_cast<uint32_t>(plan.items)) return;
  StepChannels &s = cuda::dynamic_shared<StepChannels>()[warp];
  const BlockPlace place = place_of_block(p, plan.panels, item);
  const int64_t hv = place.hv, n = place.n;
  const int own_column = lane % plan.columns, row = lane / plan.columns * kRows;
  const int64_t first_column = static_cast<int64_t>(place.panel) * plan.columns, column = first_column + own_column;
  const cuda::DeviceSegment segment = cuda::device_segment(p.cu_seqlens, p.T, n);
  int64_t slot = n;
  if (given(p.state_indices)) {
    slot = load_int(p.state_indices, n);
    if (slot >= p.state.shape[0]) slot = -1;
  }
  if (slot < 0 || segment.begin == segment.end) {
    for (int64_t token = segment.begin; row == 0 && token < segment.end; ++token) {
      store_at(p.o, head_offset(p.o, segment.batch, token, hv) + column * p.o.strides[3], 0.0f);
    }
    return;
  }
  const StatePlace at = find_state(p, p.state, slot, hv);
  const int64_t base = at.base, stride = kByColumn ? at.column : at.row;  // elements from one column or row to the next
  StepColumn<kRows> S;
  float *stage =
      reinterpret_cast<float *>(cuda::dynamic_shared<StepChannels>() + kStepWarps) + warp * plan.columns * (K + 4);
  if constexpr (kByColumn) {
    cuda::with_type(p.state.data, p.state.dtype, [&](const auto *from) {
      load_columns<kRows>(from + base + first_column * stride, stride, K, stage);
    });
    __syncwarp();  // the panel is staged
#pragma unroll
    for (int i = 0; i < kRows / kRowsTogether; ++i) {
      const float4 x = *reinterpret_cast<const float4 *>(stage + own_column * (K + 4) + row + 4 * i);
      S[i][0][0] = x.x, S[i][1][0] = x.y, S[i][2][0] = x.z, S[i][3][0] = x.w;
    }
  } else {
    cuda::with_type(p.state.data, p.state.dtype, [&](const auto *from) {
      from += base + row * stride + column;
#pragma unroll
      for (int r = 0; r < kRows; ++r) S[r / 4][r % 4][0] = cuda::to_float(from[r * stride]);
    });
  }
  for (int64_t token = segment.begin; token < segment.end; ++token) {
    const StepToken own = load_token<kGate, kErase>(p, segment.batch, token, hv, place.h, column, s);
    __syncwarp();  // the channels are there
    float sums[2][1] = {}, u[1] = {own.u};
    const auto four = [&](const float *from, int i) { return *reinterpret_cast<const float4 *>(from + row + 4 * i); };
#pragma unroll
    for (int i = 0; i < kRows / kRowsTogether; ++i) {
      const float4 q = four(s.q, i), x = kErase != FW_ERASE_NONE ? four(s.x, i) : q;
      const float4 decay = kGate != FW_GATE_NONE ? four(s.decay, i) : q;
      read_tile<kGate, kErase>(&q.x, &x.x, &decay.x, S[i], sums);
    }
    for (int offset = plan.columns; offset < 32; offset *= 2) {
      sums[0][0] += __shfl_xor_sync(0xffffffffu, sums[0][0], offset);
      if constexpr (kErase != FW_ERASE_NONE) sums[1][0] += __shfl_xor_sync(0xffffffffu, sums[1][0], offset);
    }
    erase_value<kErase>(sums, u);
#pragma unroll
    for (int i = 0; i < kRows / kRowsTogether; ++i) {
      const float4 k = four(s.k, i), b = kErase == FW_ERASE_INDEPENDENT ? four(s.b, i) : k;
      write_tile<kErase>(&k.x, &b.x, sums, u, S[i]);
    }
    if (row == 0) {
      const float o = row_output<kErase>(sums, u, 0, own.qk, own.qb, p.scale_f32);
      store_at(p.o, head_offset(p.o, segment.batch, token, hv) + column * p.o.strides[3], o);
    }
    __syncwarp();  // the channels may be written again
  }
  if constexpr (kByColumn) {
#pragma unroll
    for (int i = 0; i < kRows / kRowsTogether; ++i) {
      *reinterpret_cast<float4 *>(stage + own_column * (K + 4) + row + 4 * i) =
          make_float4(S[i][0][0], S[i][1][0], S[i][2][0], S[i][3][0]);
    }
    __syncwarp();  // the panel is staged
    cuda::with_type(p.state.data, p.state.dtype, [&](auto *to) {
      store_columns<kRows>(to + base + first_column * stride, stride, K, stage);
    });
  } else {
    cuda::with_type(p.state.data, p.state.dtype, [&](auto *to) {
      to += base + row * stride + column;
#pragma unroll
      for (int r = 0; r < kRows; ++r) cuda::from_float(S[r / 4][r % 4][0], to + r * stride);
    });
  }
}

struct Launch {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p) {
    constexpr int kFullWarps = 16;  // of 64 rows a multiprocessor holds
    const int64_t wide = p.N * p.HV * (p.V * p.K / (32 * 64));
    if (p.state_layout == FW_STATE_VK) {
      run_rows<kGate, kErase, 64, true>(p);
    } else if (wide >= kFullWarps * cuda::multiprocessor_count()) {
      run_rows<kGate, kErase, 64, false>(p);
    } else {
      run_rows<kGate, kErase, 32, false>(p);
    }
  }

  template <fw_gate kGate, fw_erase kErase, int kRows, bool kByColumn>
  static void run_rows(const Problem &p) {
    StepPlan plan = {};
    plan.columns = static_cast<int32_t>(32 * kRows / p.K);
    plan.panels = static_cast<int32_t>(p.V / plan.columns);
    plan.items = static_cast<int32_t>(p.N * p.HV * plan.panels);
    const int64_t stage = kByColumn ? plan.columns * (p.K + 4) * static_cast<int64_t>(sizeof(float)) : 0;
    const cuda::Launch how = {static_cast<uint32_t>((plan.items + kStepWarps - 1) / kStepWarps), 32 * kStepWarps,
                              kStepWarps * (static_cast<int64_t>(sizeof(StepChannels)) + stage),
                              static_cast<cudaStream_t>(p.stream)};
    cuda::launch(how, step<kGate, kErase, kRows, kByColumn>, p, plan);
  }
};

}  // namespace

void launch_step(const Problem &p) { dispatch_axes<Launch>(p, p); }

}  // namespace fw::recurrence
