// SPDX-License-Identifier: Apache-2.0
// Rows of a call brought to shared memory as fp32, with everything that is done to an operand before the recurrence sees it:
// the L2 norm, gate and beta activations, the factors of the erase key and of v'. Shared by the portable kernels.
#pragma once
#include "cuda/activation.cuh"
#include "cuda/element.cuh"
#include "ops/recurrence/cuda_panels.hpp"
#include "ops/recurrence/saved.hpp"

namespace fw::recurrence {

template <fw_erase kErase>
constexpr bool kIsShared = kErase == FW_ERASE_SHARED_AFTER || kErase == FW_ERASE_SHARED_BEFORE;

// Packed rows in shared memory, [rows][pitch] and [rows][value_pitch].
struct PackedRows {
  float *q, *k, *x, *b;  // x: the erase key, or a
  float *decay;          // exp(g), spread over the channels for a scalar gate too
  float *u;              // v' of the panel's columns

  template <fw_gate kGate, fw_erase kErase>
  FW_HOST_DEVICE static int32_t floats(const Panels &l) {
    return (2 + (kErase != FW_ERASE_NONE) + (kErase == FW_ERASE_INDEPENDENT) + (kGate != FW_GATE_NONE)) * l.keys() + l.values();
  }
  // The first free float after it.
  template <fw_gate kGate, fw_erase kErase>
  __device__ float *lay_out(const Panels &l, float *memory) {
    q = memory;
    k = q + l.keys();
    x = k + l.keys();
    b = x + (kErase != FW_ERASE_NONE ? l.keys() : 0);
    decay = b + (kErase == FW_ERASE_INDEPENDENT ? l.keys() : 0);
    u = decay + (kGate != FW_GATE_NONE ? l.keys() : 0);
    return u + l.values();
  }
};

// Where packed rows lie: rows count sub-steps, from `first` of batch entry `batch`; h is the query/key head of hv.
struct RowRange {
  int64_t batch, first, hv, h;
  int32_t rows;
};

// The token and sub-step of a row. 64-bit divisions take about 100 instructions, so the common case makes none.
struct TokenPlace {
  int64_t token;
  int32_t sub;
};
__device__ inline TokenPlace place_of(const Problem &p, int64_t row) {
  if (p.n_sub == 1) return {row, 0};
  const int64_t token = row / p.n_sub;
  return {token, static_cast<int32_t>(row - token * p.n_sub)};
}

// Which sequence, value head and panel a block works on. 32-bit: cuda_accepts allows fewer than 2^31 of them.
struct BlockPlace {
  int64_t n, hv, h;
  int32_t panel;
};
__device__ inline BlockPlace place_of_block(const Problem &p, int32_t panels, uint32_t item) {
  const uint32_t head = item / panels, heads = static_cast<uint32_t>(p.HV), n = head / heads, hv = head - n * heads;
  const uint32_t group = heads / static_cast<uint32_t>(p.H);
  return {n, hv, hv / group, static_cast<int32_t>(item - head * panels)};
}

__device__ inline int64_t head_offset(const fw_tensor &t, int64_t batch, int64_t row, int64_t head) {
  return batch * t.strides[0] + row * t.strides[1] + head * t.strides[2];
}
__device__ inline float load_at(const fw_tensor &t, int64_t offset) { return cuda::load_element(t.data, t.dtype, offset); }
__device__ inline void store_at(const fw_tensor &t, int64_t offset, float x) {
  cuda::store_element(t.data, t.dtype, offset, x);
}

// 1 / length of a row of K numbers for the L2 norm (eps 1e-6 inside the root), by one warp.
__device__ inline float inverse_length(const fw_tensor &t, int64_t offset, int64_t K, int lane) {
  double sum = 0;
  for (int64_t d = lane; d < K; d += 32) {
    const double x = load_at(t, offset + d * t.strides[3]);
    sum += x * x;
  }
  return static_cast<float>(rsqrt(cuda::warp_sum(sum) + 1e-6));
}

__device__ __noinline__ inline float activated_decay(const Problem &p, int64_t hv, int64_t d, float x) {
  const float a_log = given(p.a_log) ? load_at(p.a_log, hv * p.a_log.strides[0]) : 0.0f;
  const int64_t column = p.gate == FW_GATE_VECTOR ? d * p.dt_bias.strides[1] : 0;
  const float dt_bias = given(p.dt_bias) ? load_at(p.dt_bias, hv * p.dt_bias.strides[0] + column) : 0.0f;
  return cuda::activate_gate({p.gate_input, p.gate_normalizer, p.gate_lower_bound}, x, a_log, dt_bias);
}

__device__ inline float log_decay(const Problem &p, int64_t hv, int64_t d, float x) {
  return p.gate_input == FW_GATE_INPUT_LOG_DECAY ? x : activated_decay(p, hv, d, x);
}

// exp(g) of a scalar gate, rounded once: where it is the same for every token, an error of expf would add up (9 %
// over the limit of an fp16 state).
__device__ __noinline__ inline float scalar_decay(double g) { return static_cast<float>(exp(g)); }

__device__ __noinline__ inline float activated_beta(const Problem &p, float x) {
  const int32_t kind = p.beta_input == FW_BETA_INPUT_SIGMOID ? FW_GATE_KIND_BETA : FW_GATE_KIND_BETA_TWICE;
  return cuda::activate_gate({kind, 0, 0}, x, 0, 0);
}
// beta itself of a row; 1 when absent.
__device__ inline float load_beta(const Problem &p, int64_t batch, int64_t row, int64_t hv) {
  if (!given(p.beta)) return 1.0f;
  const float x = load_at(p.beta, head_offset(p.beta, batch, row, hv));
  return p.beta_input == FW_BETA_INPUT_PLAIN ? x : activated_beta(p, x);
}

// What follows works on one row by one warp and is not inlined: compiled once for all instances, not 12 times. A lane
// brings kTogether numbers to registers before it writes any to shared memory: a load may not pass a store that could
// be to the same place for all the compiler knows, so one at a time would wait for global memory as often as there
// are numbers.

constexpr int kTogether = 4;

// to[d] = f(d) for the channels of a row below `pitch`.
template <class F>
__device__ inline void fill_row(int pitch, float *to, F f) {
#pragma unroll 1
  for (int first = threadIdx.x % 32; first < pitch; first += 32 * kTogether) {
    float x[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j) x[j] = first + 32 * j < pitch ? f(first + 32 * j) : 0.0f;
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (first + 32 * j < pitch) to[first + 32 * j] = x[j];
    }
  }
}

// exp(g), spread over the channels for a scalar gate too.
__device__ __noinline__ inline void pack_decay(const Problem &p, int pitch, int64_t batch, TokenPlace at, int64_t hv,
                                               float *decay) {
  const int64_t token = at.token;
  if (p.gate == FW_GATE_SCALAR) {
    float e = 1.0f;
    if (p.has_fixed_gate) {
      e = scalar_decay(fixed_gate(p, hv));
    } else if (at.sub == 0) {
      e = scalar_decay(log_decay(p, hv, 0, load_at(p.g, head_offset(p.g, batch, token, hv))));
    }
    fill_row(pitch, decay, [&](int) { return e; });
  } else {
    const int64_t offset = head_offset(p.g, batch, token, hv);
    if (p.gate_input == FW_GATE_INPUT_LOG_DECAY) {
      fill_row(pitch, decay, [&](int d) { return d < p.K ? expf(load_at(p.g, offset + d * p.g.strides[3])) : 0.0f; });
    } else {
      fill_row(pitch, decay, [&](int d) {
        return d < p.K ? expf(activated_decay(p, hv, d, load_at(p.g, offset + d * p.g.strides[3]))) : 0.0f;
      });
    }
  }
}

// n numbers at `offset`, zeros to the pitch; normed: through the L2 norm.
__device__ __noinline__ inline void pack_row(const fw_tensor &t, int64_t offset, int n, int pitch, bool is_normed, float *to) {
  const float factor = is_normed ? inverse_length(t, offset, n, threadIdx.x % 32) : 1.0f;
  fill_row(pitch, to, [&](int d) { return d < n ? load_at(t, offset + d * t.strides[3]) * factor : 0.0f; });
}

// to = from * factor, times the numbers at `offset` of `gate` when that is given.
__device__ __noinline__ inline void multiply_row(const float *from, float factor, const fw_tensor &gate, int64_t offset, int n,
                                          int pitch, float *to) {
  if (given(gate)) {
    fill_row(pitch, to,
             [&](int d) { return d < n ? from[d] * load_at(gate, offset + d * gate.strides[3]) * factor : 0.0f; });
  } else {
    fill_row(pitch, to, [&](int d) { return from[d] * factor; });
  }
}

// One warp a row. The block synchronises before the rows are read.
template <fw_gate kGate, fw_erase kErase>
__device__ __noinline__ inline void pack_rows(const Problem &p, const Panels &l, const RowRange &r, int32_t panel, const PackedRows &to) {
  const int64_t h = r.h;
  const int K = static_cast<int>(p.K), pitch = l.pitch;
  for (int i = threadIdx.x / 32; i < r.rows; i += kWarps) {
    const int64_t row = r.first + i;
    const TokenPlace place = place_of(p, row);
    const int64_t token = place.token;
    float *q = to.q + i * pitch, *k = to.k + i * pitch, *u = to.u + i * l.value_pitch();
    const bool is_read = place.sub == p.n_sub - 1;  // o of a token is read after its last sub-step
    pack_row(p.q, is_read ? head_offset(p.q, r.batch, token, h) : 0, is_read ? K : 0, pitch, is_read && p.has_l2norm, q);
    pack_row(p.k, head_offset(p.k, r.batch, row, h), K, pitch, p.has_l2norm, k);
    if constexpr (kGate != FW_GATE_NONE) pack_decay(p, pitch, r.batch, place, r.hv, to.decay + i * pitch);
    const int64_t first = static_cast<int64_t>(panel) * l.width(), rest = p.V - first;
    const int columns = rest < l.width() ? static_cast<int>(rest) : l.width();
    pack_row(p.v, head_offset(p.v, r.batch, row, r.hv) + first * p.v.strides[3], columns, l.value_pitch(), false, u);
    if constexpr (kIsShared<kErase>) {
      const float beta = load_beta(p, r.batch, row, r.hv);
      float *x = to.x + i * pitch;
      if (given(p.p)) pack_row(p.p, head_offset(p.p, r.batch, token, h), K, pitch, p.has_l2norm, x);
      multiply_row(given(p.p) ? x : k, beta, p.erase_gate, head_offset(p.erase_gate, r.batch, token, h), K, pitch, x);
      const int64_t gate = head_offset(p.write_gate, r.batch, token, r.hv) + first * p.write_gate.strides[3];
      multiply_row(u, beta, p.write_gate, gate, columns, l.value_pitch(), u);
    }
    if constexpr (kErase == FW_ERASE_INDEPENDENT) {
      pack_row(p.a, head_offset(p.a, r.batch, token, h), K, pitch, false, to.x + i * pitch);
      pack_row(p.b, head_offset(p.b, r.batch, token, h), K, pitch, false, to.b + i * pitch);
    }
  }
}

// ---- the panel of a state that a thread block owns -----------------------------------------------------------------

struct Owner {
  int lane;            // of the `lanes` threads a row; owns columns column .. column + 3
  int row;             // first of the kRowsOwned state rows
  int64_t column;      // first column in V
  __device__ Owner(const Panels &l, int32_t panel)
      : lane(threadIdx.x % l.lanes), row(threadIdx.x / l.lanes * kRowsOwned),
        column(static_cast<int64_t>(panel) * l.width() + kColumnsOwned * lane) {}
};
using Tile = float[kRowsOwned][kColumnsOwned];

// Where state [n, hv] starts and how far apart its rows and columns are. The opaque layout is KV with padded rows.
struct StatePlace {
  int64_t base, row, column;
};
__device__ inline StatePlace find_state(const Problem &p, const fw_tensor &t, int64_t n, int64_t hv) {
  const int64_t base = n * t.strides[0] + hv * t.strides[1];
  if (t.ndim == 3) return {base, pad_to(p.V, kStatePad) * t.strides[2], t.strides[2]};
  const bool is_vk = p.state_layout == FW_STATE_VK;
  return {base, t.strides[is_vk ? 3 : 2], t.strides[is_vk ? 2 : 3]};
}

// f(r, c, offset in elements) for the elements of a tile that exist.
template <class F>
__device__ inline void for_tile(const Problem &p, const Owner &own, const StatePlace &at, F f) {
  const int rows = static_cast<int>(p.K) - own.row;
  const int64_t columns = p.V - own.column;
  int64_t row = at.base + own.row * at.row + own.column * at.column;
#pragma unroll
  for (int r = 0; r < kRowsOwned; ++r, row += at.row) {
    int64_t offset = row;
#pragma unroll
    for (int c = 0; c < kColumnsOwned; ++c, offset += at.column) {
      if (r < rows && c < columns) f(r, c, offset);
    }
  }
}

__device__ inline void load_tile(const Problem &p, const fw_tensor &t, int64_t n, int64_t hv, const Owner &own, Tile &S) {
#pragma unroll
  for (int r = 0; r < kRowsOwned; ++r) {
#pragma unroll
    for (int c = 0; c < kColumnsOwned; ++c) S[r][c] = 0.0f;
  }
  if (!given(t)) return;
  const StatePlace at = find_state(p, t, n, hv);
  if (t.dtype == FW_F32) {
    for_tile(p, own, at, [&](int r, int c, int64_t i) { S[r][c] = static_cast<const float *>(t.data)[i]; });
  } else if (t.dtype == FW_BF16) {
    for_tile(p, own, at, [&](int r, int c, int64_t i) { S[r][c] = __bfloat162float(static_cast<const __nv_bfloat16 *>(t.data)[i]); });
  } else {
    for_tile(p, own, at, [&](int r, int c, int64_t i) { S[r][c] = __half2float(static_cast<const __half *>(t.data)[i]); });
  }
}

__device__ inline void store_tile(const Problem &p, const fw_tensor &t, int64_t n, int64_t hv, const Owner &own, const Tile &S) {
  if (!given(t)) return;
  const StatePlace at = find_state(p, t, n, hv);
  if (t.dtype == FW_F32) {
    for_tile(p, own, at, [&](int r, int c, int64_t i) { static_cast<float *>(t.data)[i] = S[r][c]; });
  } else if (t.dtype == FW_BF16) {
    for_tile(p, own, at, [&](int r, int c, int64_t i) { static_cast<__nv_bfloat16 *>(t.data)[i] = __float2bfloat16_rn(S[r][c]); });
  } else {
    for_tile(p, own, at, [&](int r, int c, int64_t i) { static_cast<__half *>(t.data)[i] = __float2half_rn(S[r][c]); });
  }
}

// Saved states, fp32, see saved.hpp.
__device__ inline StatePlace find_saved(const Problem &p, int64_t slot, int64_t hv) {
  return {(slot * p.HV + hv) * p.K * saved_width(p), saved_width(p), 1};
}
__device__ inline void save_tile(const Problem &p, int64_t slot, int64_t hv, const Owner &own, const Tile &S, float *saved) {
  for_tile(p, own, find_saved(p, slot, hv), [&](int r, int c, int64_t i) { saved[i] = S[r][c]; });
}
__device__ inline void load_saved_tile(const Problem &p, int64_t slot, int64_t hv, const Owner &own, const float *saved, Tile &S) {
#pragma unroll
  for (int r = 0; r < kRowsOwned; ++r) {
#pragma unroll
    for (int c = 0; c < kColumnsOwned; ++c) S[r][c] = 0.0f;
  }
  for_tile(p, own, find_saved(p, slot, hv), [&](int r, int c, int64_t i) { S[r][c] = saved[i]; });
}

}  // namespace fw::recurrence
