// SPDX-License-Identifier: Apache-2.0
// From the reverse's fp32 rows to the gradients that leave: sums over value panels and over the heads of a group, always in the
// same order; then back through what an operand was made of (beta, erase gate, L2 norm, gate activation); then one rounding.
//
// Plan: finish_keys, 4 warps a block, one warp a (row, query/key head), a lane every 32nd quad of channels, in registers, so that no
// barrier is needed. finish_gates, a block of 8 warps a (64 tokens, value head), whose warps sum the parameters' gradients of their
// tokens and add them up through shared memory in the order of the warps; sum_gates adds the blocks' sums in their order, a block a
// value head.
#include <initializer_list>

#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "cuda/rows.cuh"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_rows.cuh"

namespace fw::recurrence {
namespace {

constexpr int64_t kTokensABlock = 64;
constexpr int kKeyWarps = 4;  // finish_keys: warps a block

__device__ inline bool is_owned(const Problem &p, int64_t token) {
  if (!given(p.cu_seqlens)) return true;
  return token >= cuda::clamped_offset(p.cu_seqlens, 0, p.T) && token < cuda::clamped_offset(p.cu_seqlens, p.N, p.T);
}

// 32-bit where that does, since 64-bit divisions take about 100 instructions.
__device__ inline int64_t quotient(int64_t a, int64_t b) {
  return static_cast<uint64_t>(a | b) >> 32 == 0 ? static_cast<uint32_t>(a) / static_cast<uint32_t>(b) : a / b;
}

// A row of keys in the registers of a warp: quad i of a lane has the channels from 4 (lane + 32 i) on; zeros past K.
template <int kQuads>
struct KeyRow {
  float x[kQuads][4];
};
// The quads of this lane that exist.
template <int kQuads, class F>
__device__ __forceinline__ void for_quads(const Problem &p, F f) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
    const int d = 4 * (threadIdx.x % 32 + 32 * i);
    if (d < p.K) f(i, d);
  }
}

// A row as a tensor has it: what many loads bring is used after all of them.
template <int kQuads>
struct KeyBits {
  cuda::QuadBits quads[kQuads];
};
template <int kQuads>
__device__ __forceinline__ KeyBits<kQuads> load_key(const Problem &p, const fw_tensor &t, int64_t offset) {
  KeyBits<kQuads> to = {};
  const cuda::Row row = cuda::row_at(t, offset, t.strides[3]);
  for_quads<kQuads>(p, [&](int i, int d) {
    if (row.is_packed && d + 4 <= p.K) {
      to.quads[i] = cuda::load_quad_bits(row.data, row.dtype, row.offset + d);
    } else {
      const uint4 x = cuda::load_loose_quad(row.data, row.dtype, row.offset + d * row.stride, row.stride, p.K - d);
      const bool is_fp32 = row.dtype == FW_F32;
      to.quads[i] = {{is_fp32 ? x.x : x.x | x.y << 16, is_fp32 ? x.y : x.z | x.w << 16, x.z, x.w}};
    }
  });
  return to;
}
template <int kQuads>
__device__ __forceinline__ KeyRow<kQuads> floats_of(const KeyBits<kQuads> &bits, const fw_tensor &t) {
  KeyRow<kQuads> to;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) cuda::from_quad_bits(bits.quads[i], t.dtype, to.x[i]);
  return to;
}
// A row of a [..][K] buffer in fp32, or zeros without the buffer.
template <int kQuads>
__device__ __forceinline__ KeyRow<kQuads> load_row(const Problem &p, const float *from, int64_t at) {
  KeyRow<kQuads> to = {};
  if (!from) return to;
  from += at * p.K;
  if (p.K % 4 == 0) {
    for_quads<kQuads>(p, [&](int i, int d) {
      const float4 x = *reinterpret_cast<const float4 *>(from + d);
      to.x[i][0] = x.x, to.x[i][1] = x.y, to.x[i][2] = x.z, to.x[i][3] = x.w;
    });
  } else {
    for_quads<kQuads>(p, [&](int i, int d) {
      for (int e = 0; e < 4 && d + e < p.K; ++e) to.x[i][e] = from[d + e];
    });
  }
  return to;
}
// f of every element, its quad and place.
template <int kQuads, class F>
__device__ __forceinline__ void for_key(KeyRow<kQuads> &a, F f) {
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) f(a.x[i][e], i, e);
  }
}
template <int kQuads>
__device__ __forceinline__ float dot(const KeyRow<kQuads> &a, const KeyRow<kQuads> &b) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kQuads; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum = fmaf(a.x[i][e], b.x[i][e], sum);
  }
  return cuda::warp_sum(sum);
}

template <int kQuads>
__device__ __forceinline__ void add(const KeyRow<kQuads> &from, KeyRow<kQuads> &sum) {
  for_key(sum, [&](float &x, int i, int e) { x += from.x[i][e]; });
}

// y = x / length; returns 1 / length (eps 1e-6 inside the root).
template <int kQuads>
__device__ __forceinline__ float normalize(KeyRow<kQuads> &row) {
  double sum = 0;
  for_key(row, [&](float x, int, int) { sum += static_cast<double>(x) * x; });
  const float inverse = static_cast<float>(rsqrt(cuda::warp_sum(sum) + 1e-6));
  for_key(row, [&](float &x, int, int) { x *= inverse; });
  return inverse;
}

// Stores a gradient, through the L2 norm of its operand when there is one: (dy - y (y . dy)) / length; y, inverse: of the operand.
template <int kQuads>
__device__ __forceinline__ void store_key(const Problem &p, const fw_tensor &d_t, int64_t batch, int64_t row, int64_t h, const KeyRow<kQuads> &d_row) {
  if (!given(d_t)) return;
  const cuda::Row to = cuda::row_at(d_t, head_offset(d_t, batch, row, h), d_t.strides[3]);
  for_quads<kQuads>(p, [&](int i, int d) { cuda::store_quad(to, d, p.K, d_row.x[i]); });
}
template <int kQuads>
__device__ __forceinline__ void store_normed_key(const Problem &p, const fw_tensor &d_t, int64_t batch, int64_t row, int64_t h, KeyRow<kQuads> d_row,
                                                 const KeyRow<kQuads> &y, float inverse) {
  if (!given(d_t)) return;
  if (p.has_l2norm) {
    const float along = dot(y, d_row);
    for_key(d_row, [&](float &x, int i, int e) { x = inverse * fmaf(-along, y.x[i][e], x); });
  }
  store_key(p, d_t, batch, row, h, d_row);
}

// What d_x of a value head gives through the erase key e = beta * erase_gate * (p or k).
template <int kQuads>
__device__ __forceinline__ void finish_erase_key(const Problem &p, int64_t batch, int64_t row, int64_t hv, int64_t at, const RowGradients &in,
                                                 const KeyRow<kQuads> &d_x, const KeyRow<kQuads> &key, const KeyRow<kQuads> &gate, KeyRow<kQuads> &d_key,
                                                 KeyRow<kQuads> &d_gate) {
  KeyRow<kQuads> gated = key;
  const float beta = load_beta(p, batch, row, hv);
  for_key(gated, [&](float &x, int i, int e) {
    const float d = d_x.x[i][e] * beta;
    d_gate.x[i][e] = fmaf(d, x, d_gate.x[i][e]);
    d_key.x[i][e] = fmaf(d, gate.x[i][e], d_key.x[i][e]);
    x *= gate.x[i][e];
  });
  if (!given(p.dbeta)) return;
  float d_beta = dot(d_x, gated);
  if (threadIdx.x % 32 != 0) return;
  for (int32_t panel = 0; panel < in.panels; ++panel) d_beta += in.d_beta[panel * p.B * p.R * p.HV + at];
  if (p.beta_input != FW_BETA_INPUT_PLAIN) {
    const int32_t kind = p.beta_input == FW_BETA_INPUT_SIGMOID ? FW_GATE_KIND_BETA : FW_GATE_KIND_BETA_TWICE;
    d_beta = cuda::activate_gate_gradient({kind, 0, 0}, load_at(p.beta, head_offset(p.beta, batch, row, hv)), 0, 0, d_beta).dx;
  }
  store_at(p.dbeta, head_offset(p.dbeta, batch, row, hv), d_beta);
}

// A row of no sequence.
template <int kQuads>
__device__ __noinline__ void clear_keys(const Problem &p, int64_t batch, int64_t row, int64_t h) {
  const TokenPlace place = place_of(p, row);
  const KeyRow<kQuads> zero = {};
  if (place.sub == 0) {
    for (const fw_tensor *t : {&p.dq, &p.da, &p.db, &p.dp, &p.d_erase_gate}) store_key(p, *t, batch, place.token, h, zero);
  }
  store_key(p, p.dk, batch, row, h, zero);
  if (!given(p.dbeta)) return;
  for (int64_t i = threadIdx.x % 32; i < p.group(); i += 32) {
    store_at(p.dbeta, head_offset(p.dbeta, batch, row, h * p.group() + i), 0.0f);
  }
}

template <int kQuads>
__global__ void __launch_bounds__(32 * kKeyWarps, kQuads == 1 ? 4 : 1) finish_keys(const __grid_constant__ Problem p, const __grid_constant__ RowGradients in) {
  const int64_t rows = p.B * p.R * p.H, stride = static_cast<int64_t>(gridDim.x) * kKeyWarps, group = p.group(), size = p.B * p.R * p.HV;
  const bool is_independent = p.erase == FW_ERASE_INDEPENDENT, is_shared = p.erase != FW_ERASE_NONE && !is_independent;
  for (int64_t item = blockIdx.x * static_cast<int64_t>(kKeyWarps) + threadIdx.x / 32; item < rows; item += stride) {
    const int64_t of_batch = quotient(item, p.H), h = item - of_batch * p.H, batch = quotient(of_batch, p.R), row = of_batch - batch * p.R;
    const TokenPlace place = place_of(p, row);
    const int64_t token = place.token;
    if (!is_owned(p, token)) {
      clear_keys<kQuads>(p, batch, row, h);
      continue;
    }
    const bool is_read = place.sub == p.n_sub - 1;
    KeyBits<kQuads> q_bits = {}, k_bits = {}, p_bits = {}, gate_bits = {};
    if (p.has_l2norm && is_read) q_bits = load_key<kQuads>(p, p.q, head_offset(p.q, batch, token, h));
    if (p.has_l2norm || is_shared) k_bits = load_key<kQuads>(p, p.k, head_offset(p.k, batch, row, h));
    if (is_shared && given(p.p)) p_bits = load_key<kQuads>(p, p.p, head_offset(p.p, batch, token, h));
    if (is_shared && given(p.erase_gate)) gate_bits = load_key<kQuads>(p, p.erase_gate, head_offset(p.erase_gate, batch, token, h));
    KeyRow<kQuads> d_q = {}, d_k = {}, third = {}, fourth = {}, k = {}, other = {}, gate = {};  // third: of p or a; fourth: of erase_gate or b
    float k_inverse = 1.0f, other_inverse = 1.0f;
    for (int64_t i = 0; i < group; ++i) {
      const int64_t hv = h * group + i, at = of_batch * p.HV + hv;
      KeyRow<kQuads> of_q = load_row<kQuads>(p, in.d_q, at), of_k = load_row<kQuads>(p, in.d_k, at);
      KeyRow<kQuads> of_x = load_row<kQuads>(p, in.d_x, at), of_b = load_row<kQuads>(p, in.d_b, at);
      for (int32_t panel = 1; panel < in.panels; ++panel) {
        add(load_row<kQuads>(p, in.d_q, panel * size + at), of_q), add(load_row<kQuads>(p, in.d_k, panel * size + at), of_k);
        add(load_row<kQuads>(p, in.d_x, panel * size + at), of_x), add(load_row<kQuads>(p, in.d_b, panel * size + at), of_b);
      }
      if (i == 0 && (p.has_l2norm || is_shared)) {
        k = floats_of(k_bits, p.k);
        if (p.has_l2norm) k_inverse = normalize(k);
        if (is_shared && given(p.p)) {
          other = floats_of(p_bits, p.p);
          if (p.has_l2norm) other_inverse = normalize(other);
        }
        gate = floats_of(gate_bits, p.erase_gate);
        if (!given(p.erase_gate)) for_key(gate, [](float &x, int, int) { x = 1.0f; });
      }
      add(of_q, d_q), add(of_k, d_k);
      if (is_shared) {
        finish_erase_key(p, batch, row, hv, at, in, of_x, given(p.p) ? other : k, gate, given(p.p) ? third : d_k, fourth);
      } else if (is_independent) {
        add(of_x, third), add(of_b, fourth);
      }
    }
    store_normed_key(p, p.dk, batch, row, h, d_k, k, k_inverse);
    if (is_read) {
      KeyRow<kQuads> q = floats_of(q_bits, p.q);
      const float inverse = p.has_l2norm ? normalize(q) : 1.0f;
      store_normed_key(p, p.dq, batch, token, h, d_q, q, inverse);
    }
    if (is_independent) {
      store_key(p, p.da, batch, row, h, third);
      store_key(p, p.db, batch, row, h, fourth);
    } else if (is_shared) {
      store_normed_key(p, p.dp, batch, row, h, third, other, other_inverse);
      store_key(p, p.d_erase_gate, batch, row, h, fourth);
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
  if (key_rows > 0) {
    const auto run = [&](auto kernel) { cuda::launch({cuda::grid_of(key_rows, kKeyWarps), 32 * kKeyWarps, 0, stream}, kernel, p, rows); };
    p.K <= 128 ? run(finish_keys<1>) : p.K <= 256 ? run(finish_keys<2>) : run(finish_keys<4>);
  }
  if (p.gate == FW_GATE_NONE || p.has_fixed_gate) return;
  if (blocks > 0) cuda::launch({static_cast<uint32_t>(blocks * p.HV), kThreads, 0, stream}, finish_gates, p, panels, rows);
  // without tokens there are no sums, and maybe no workspace, but zeros to write
  if (given(p.d_a_log) || given(p.d_dt_bias)) cuda::launch({static_cast<uint32_t>(p.HV), kThreads, 0, stream}, sum_gates, p, blocks, rows.gate_sums);
}

}  // namespace fw::recurrence
