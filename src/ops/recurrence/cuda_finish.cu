// SPDX-License-Identifier: Apache-2.0
// From the reverse's fp32 rows to the gradients that leave: sums over value panels and over the heads of a group, always in the
// same order; then back through what an operand was made of (beta, erase gate, L2 norm, gate activation); then one rounding.
//
// Plan: finish_keys, 4 warps a block, one warp a (row, query/key head); a lane owns every 32nd channel of the rows that its warp
// sums up in shared memory (7 rows of K floats a warp, 14 KB at K = V = 128), so no barrier is needed. finish_gates, a block of
// 8 warps a (64 tokens, value head), whose warps sum the parameters' gradients of their tokens and add them up through shared
// memory in the order of the warps; sum_gates adds the blocks' sums in their order, a block a value head.
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_rows.cuh"

namespace fw::recurrence {
namespace {

constexpr int64_t kTokensABlock = 64;
constexpr int kKeyWarps = 4, kKeyRows = 7;  // finish_keys: warps a block, rows of a warp

__device__ inline bool is_owned(const Problem &p, int64_t token) {
  if (!given(p.cu_seqlens)) return true;
  return token >= cuda::clamped_offset(p.cu_seqlens, 0, p.T) && token < cuda::clamped_offset(p.cu_seqlens, p.N, p.T);
}

// A row of K floats in shared memory, of which a lane touches every 32nd.
template <class F>
__device__ inline void for_channels(const Problem &p, F f) {
#pragma unroll 1
  for (int d = threadIdx.x % 32; d < p.K; d += 32) f(d);
}

// sum[d] += the panels' rows of one value head.
__device__ __noinline__ void add_panels(const Problem &p, int32_t panels, const float *from, int64_t at, float *sum) {
  const int64_t size = p.B * p.R * p.HV * p.K;
  for_channels(p, [&](int d) {
    float total = sum[d];
    for (int32_t panel = 0; panel < panels; ++panel) total += from[panel * size + at * p.K + d];
    sum[d] = total;
  });
}

// The row that a key operand became; returns 1 / length.
__device__ __noinline__ float load_key(const Problem &p, const fw_tensor &t, int64_t offset, bool is_normed, float *to) {
  const float inverse = is_normed ? inverse_length(t, offset, p.K, threadIdx.x % 32) : 1.0f;
  for_channels(p, [&](int d) { to[d] = load_at(t, offset + d * t.strides[3]) * inverse; });
  return inverse;
}

// Stores a gradient, through the L2 norm of its operand when there is one: (dy - y (y . dy)) / length. y: scratch.
__device__ __noinline__ void store_key(const Problem &p, const fw_tensor &d_t, const fw_tensor &t, bool is_normed, int64_t batch,
                                       int64_t row, int64_t h, const float *d_row, float *y) {
  if (!given(d_t)) return;
  const int64_t to = head_offset(d_t, batch, row, h);
  if (!is_normed) {
    for_channels(p, [&](int d) { store_at(d_t, to + d * d_t.strides[3], d_row ? d_row[d] : 0.0f); });
    return;
  }
  const float inverse = load_key(p, t, head_offset(t, batch, row, h), true, y);
  float along = 0.0f;
  for_channels(p, [&](int d) { along = fmaf(y[d], d_row[d], along); });
  along = cuda::warp_sum(along);
  for_channels(p, [&](int d) { store_at(d_t, to + d * d_t.strides[3], inverse * fmaf(-along, y[d], d_row[d])); });
}

// The part of one value head that goes through the erase key e = beta * erase_gate * (p or k).
__device__ __noinline__ void finish_erase_key(const Problem &p, int32_t panels, int64_t batch, int64_t row, int64_t h, int64_t hv,
                                              const RowGradients &in, const float *d_x, float *key, float *d_key, float *d_gate) {
  const int64_t token = row / p.n_sub, at = (batch * p.R + row) * p.HV + hv;
  const fw_tensor &source = given(p.p) ? p.p : p.k;
  load_key(p, source, head_offset(source, batch, given(p.p) ? token : row, h), p.has_l2norm, key);
  const float beta = load_beta(p, batch, row, hv);
  const int64_t gate_offset = head_offset(p.erase_gate, batch, token, h);
  float dot = 0;
  for_channels(p, [&](int d) {
    const float gate = given(p.erase_gate) ? load_at(p.erase_gate, gate_offset + d * p.erase_gate.strides[3]) : 1.0f;
    dot = fmaf(d_x[d], key[d] * gate, dot);
    d_gate[d] = fmaf(d_x[d] * beta, key[d], d_gate[d]);
    d_key[d] = fmaf(d_x[d] * beta, gate, d_key[d]);
  });
  dot = cuda::warp_sum(dot);
  if (!given(p.dbeta) || threadIdx.x % 32 != 0) return;
  for (int32_t panel = 0; panel < panels; ++panel) dot += in.d_beta[panel * p.B * p.R * p.HV + at];
  if (p.beta_input != FW_BETA_INPUT_PLAIN) {
    const int32_t kind = p.beta_input == FW_BETA_INPUT_SIGMOID ? FW_GATE_KIND_BETA : FW_GATE_KIND_BETA_TWICE;
    dot = cuda::activate_gate_gradient({kind, 0, 0}, load_at(p.beta, head_offset(p.beta, batch, row, hv)), 0, 0, dot).dx;
  }
  store_at(p.dbeta, head_offset(p.dbeta, batch, row, hv), dot);
}

// A row of no sequence.
__device__ __noinline__ void clear_keys(const Problem &p, int64_t batch, int64_t row, int64_t h) {
  const int64_t token = row / p.n_sub;
  if (row % p.n_sub == 0) {
    store_key(p, p.dq, p.q, false, batch, token, h, nullptr, nullptr);
    store_key(p, p.da, p.a, false, batch, token, h, nullptr, nullptr);
    store_key(p, p.db, p.b, false, batch, token, h, nullptr, nullptr);
    store_key(p, p.dp, p.p, false, batch, token, h, nullptr, nullptr);
    store_key(p, p.d_erase_gate, p.erase_gate, false, batch, token, h, nullptr, nullptr);
  }
  store_key(p, p.dk, p.k, false, batch, row, h, nullptr, nullptr);
  if (!given(p.dbeta)) return;
  for (int64_t i = threadIdx.x % 32; i < p.group(); i += 32) {
    store_at(p.dbeta, head_offset(p.dbeta, batch, row, h * p.group() + i), 0.0f);
  }
}

__global__ void __launch_bounds__(32 * kKeyWarps) finish_keys(const __grid_constant__ Problem p, int32_t panels,
                                                              const __grid_constant__ RowGradients in) {
  float *d_q = cuda::dynamic_shared<float>() + threadIdx.x / 32 * kKeyRows * p.K, *d_k = d_q + p.K, *d_x = d_k + p.K, *scratch = d_x + p.K;
  float *third = scratch + p.K, *fourth = third + p.K;  // third: of p or a; fourth: of erase_gate or b
  const int64_t rows = p.B * p.R * p.H, stride = static_cast<int64_t>(gridDim.x) * kKeyWarps;
  for (int64_t item = blockIdx.x * static_cast<int64_t>(kKeyWarps) + threadIdx.x / 32; item < rows; item += stride) {
    const int64_t h = item % p.H, row = item / p.H % p.R, batch = item / p.H / p.R, token = row / p.n_sub;
    if (!is_owned(p, token)) {
      clear_keys(p, batch, row, h);
      continue;
    }
    for_channels(p, [&](int d) { d_q[d] = d_k[d] = third[d] = fourth[d] = 0.0f; });
    for (int64_t hv = h * p.group(); hv < (h + 1) * p.group(); ++hv) {
      const int64_t at = (batch * p.R + row) * p.HV + hv;
      add_panels(p, panels, in.d_q, at, d_q);
      add_panels(p, panels, in.d_k, at, d_k);
      if (p.erase == FW_ERASE_INDEPENDENT) {
        add_panels(p, panels, in.d_x, at, third);
        add_panels(p, panels, in.d_b, at, fourth);
      } else if (p.erase != FW_ERASE_NONE) {
        for_channels(p, [&](int d) { d_x[d] = 0.0f; });
        add_panels(p, panels, in.d_x, at, d_x);
        finish_erase_key(p, panels, batch, row, h, hv, in, d_x, scratch, given(p.p) ? third : d_k, fourth);
      }
    }
    if (row % p.n_sub == p.n_sub - 1) store_key(p, p.dq, p.q, p.has_l2norm, batch, token, h, d_q, scratch);
    store_key(p, p.dk, p.k, p.has_l2norm, batch, row, h, d_k, scratch);
    if (p.erase == FW_ERASE_INDEPENDENT) {
      store_key(p, p.da, p.a, false, batch, row, h, third, scratch);
      store_key(p, p.db, p.b, false, batch, row, h, fourth, scratch);
    } else {
      store_key(p, p.dp, p.p, p.has_l2norm, batch, row, h, third, scratch);
      store_key(p, p.d_erase_gate, p.erase_gate, false, batch, row, h, fourth, scratch);
    }
  }
}

__global__ void __launch_bounds__(kThreads) finish_gates(const __grid_constant__ Problem p, int32_t panels,
                                                         const __grid_constant__ RowGradients in) {
  __shared__ float sums[kWarps][1 + 512];
  const int64_t hv = blockIdx.x % p.HV, block = blockIdx.x / p.HV, tokens = p.B * p.T;
  const int width = p.gate == FW_GATE_VECTOR ? static_cast<int>(p.K) : 1;
  const int64_t size = p.B * p.R * p.HV * width;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float a_log = given(p.a_log) ? load_at(p.a_log, hv * p.a_log.strides[0]) : 0.0f;
  const bool is_vector = p.gate == FW_GATE_VECTOR;
  const int64_t bias_stride = is_vector ? p.dt_bias.strides[1] : 0;
  const int64_t g_stride = is_vector ? p.g.strides[3] : 0, dg_stride = is_vector ? p.dg.strides[3] : 0;
  float d_a_log = 0, *d_bias = sums[warp] + 1;
  for (int d = lane; d < width; d += 32) d_bias[d] = 0.0f;
  for (int64_t i = warp; i < kTokensABlock && block * kTokensABlock + i < tokens; i += kWarps) {
    const int64_t batch = (block * kTokensABlock + i) / p.T, token = (block * kTokensABlock + i) % p.T;
    const bool is_real = is_owned(p, token);
    const int64_t at = ((batch * p.R + token * p.n_sub) * p.HV + hv) * width;
    const int64_t from = head_offset(p.g, batch, token, hv), to = head_offset(p.dg, batch, token, hv);
#pragma unroll 1
    for (int d = lane; d < width; d += 32) {
      float sum = 0;
      for (int32_t panel = 0; is_real && panel < panels; ++panel) sum += in.d_g[panel * size + at + d];
      if (p.gate_input != FW_GATE_INPUT_LOG_DECAY) {
        const float x = load_at(p.g, from + d * g_stride);
        const float bias = given(p.dt_bias) ? load_at(p.dt_bias, hv * p.dt_bias.strides[0] + d * bias_stride) : 0.0f;
        const cuda::GateGradient grad =
            cuda::activate_gate_gradient({p.gate_input, p.gate_normalizer, p.gate_lower_bound}, x, a_log, bias, sum);
        sum = grad.dx;
        d_a_log += grad.da_log;
        d_bias[d] += grad.dx;
      }
      if (given(p.dg)) store_at(p.dg, to + d * dg_stride, sum);
    }
  }
  if (!in.gate_sums) return;
  d_a_log = cuda::warp_sum(d_a_log);
  if (lane == 0) sums[warp][0] = d_a_log;
  __syncthreads();  // every warp's sums are there
  for (int d = threadIdx.x; d < 1 + width; d += kThreads) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += sums[w][d];
    in.gate_sums[(block * p.HV + hv) * (1 + p.K) + d] = sum;
  }
}

__global__ void __launch_bounds__(kThreads) sum_gates(const __grid_constant__ Problem p, int64_t blocks, const float *gate_sums) {
  const int64_t hv = blockIdx.x, width = p.gate == FW_GATE_VECTOR ? p.K : 1;
  for (int64_t d = threadIdx.x; d < 1 + width; d += kThreads) {
    float sum = 0;
    for (int64_t block = 0; block < blocks; ++block) sum += gate_sums[(block * p.HV + hv) * (1 + p.K) + d];
    if (d == 0) {
      if (given(p.d_a_log)) store_at(p.d_a_log, hv * p.d_a_log.strides[0], sum);
    } else if (given(p.d_dt_bias)) {
      const int64_t column = p.gate == FW_GATE_VECTOR ? (d - 1) * p.d_dt_bias.strides[1] : 0;
      store_at(p.d_dt_bias, hv * p.d_dt_bias.strides[0] + column, sum);
    }
  }
}

}  // namespace

int64_t finish_blocks(const Problem &p) { return (p.B * p.T + kTokensABlock - 1) / kTokensABlock; }

void launch_finish(const Problem &p, const RowGradients &rows) {
  const int32_t panels = rows.panels;
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  const int64_t key_rows = p.B * p.R * p.H, blocks = finish_blocks(p);
  const int32_t key_bytes = static_cast<int32_t>(4 * kKeyWarps * kKeyRows * p.K);
  if (key_rows > 0) {
    cuda::launch({cuda::grid_of(key_rows, kKeyWarps), 32 * kKeyWarps, key_bytes, stream}, finish_keys, p, panels, rows);
  }
  if (p.gate == FW_GATE_NONE || p.has_fixed_gate) return;
  if (blocks > 0) cuda::launch({static_cast<uint32_t>(blocks * p.HV), kThreads, 0, stream}, finish_gates, p, panels, rows);
  // without tokens there are no sums, and maybe no workspace, but zeros to write
  if (given(p.d_a_log) || given(p.d_dt_bias)) cuda::launch({static_cast<uint32_t>(p.HV), kThreads, 0, stream}, sum_gates, p, blocks, rows.gate_sums);
}

}  // namespace fw::recurrence
