// SPDX-License-Identifier: Apache-2.0
// One chunk: packed, scored, solved for what its rows write, and carried into the state.
//
// Plan: packing and the products with the state run once a row or a chunk and branch on gate and erase. The loops
// over pairs of rows j <= i are compiled once a <gate, erase>: with a scalar gate 16 x 16 products scaled by the
// decays between the rows, with a vector gate each earlier key decayed row by row (C/2 x Kp a row). Scratch:
// cpu_chunk.hpp.
#include "ops/recurrence/cpu_chunk.hpp"

#include "cpu/activation.hpp"
#include "ops/recurrence/axes.hpp"

namespace fw::FW_LEVEL {

void Chunk::lay_out(Ledger &ledger, const Problem &p, int64_t width, bool is_backward) {
  Kp = pad_lanes(p.K);
  W = width;
  const int64_t rows = kChunk * Kp;
  x = ledger.take<float>(2 * rows);
  q = x ? x + rows : nullptr;
  k = ledger.take<float>(rows);
  b = ledger.take<float>(rows);
  u = ledger.take<float>(kChunk * W);
  w = ledger.take<float>(kChunk * W);
  row_decay = ledger.take<float>(rows);
  runs = ledger.take<float>(rows);
  decay = ledger.take<float>(kChunk * kChunk);
  reads_x = ledger.take<float>(2 * rows);
  reads_q = reads_x ? reads_x + rows : nullptr;
  ends_k = ledger.take<float>(rows);
  ends_b = ledger.take<float>(rows);
  qk = ledger.take<float>(kChunk * kChunk);
  qb = ledger.take<float>(kChunk * kChunk);
  xk = ledger.take<float>(kChunk * kChunk);
  xb = ledger.take<float>(kChunk * kChunk);
  total = ledger.take<float>(Kp);
  beta = ledger.take<float>(kChunk);
  parameters = ledger.take<float>(2 * Kp);
  g = ledger.take<float>(rows);
  logits = ledger.take<float>(rows);
  norm_q = ledger.take<float>(kChunk);
  norm_k = ledger.take<float>(kChunk);
  norm_p = ledger.take<float>(kChunk);
  key = erase_gate = v = write_gate = nullptr;
  if (is_backward) {
    key = ledger.take<float>(rows);
    erase_gate = ledger.take<float>(rows);
    v = ledger.take<float>(kChunk * W);
    write_gate = ledger.take<float>(kChunk * W);
  }
}

void load_head_row(const fw_tensor &t, int64_t batch, int64_t row, int64_t head, int64_t n, int64_t padded,
                   float *to) {
  load_row(t.data, t.dtype, head_offset(t, batch, row, head), t.strides[3], n, padded, to);
}

void load_gate_parameters(const Problem &p, int64_t hv, Chunk &c) {
  if (!given(p.a_log) && !given(p.dt_bias)) return;
  const int64_t n = p.gate == FW_GATE_VECTOR ? p.K : 1;
  for (int64_t i = 0; i < c.Kp; ++i) c.parameters[i] = c.parameters[c.Kp + i] = 0.0f;
  for (int64_t i = 0; i < n; ++i) {
    if (given(p.a_log)) c.parameters[i] = load_f32(p.a_log.data, p.a_log.dtype, hv * p.a_log.strides[0]);
    if (!given(p.dt_bias)) continue;
    const int64_t offset = hv * p.dt_bias.strides[0] + (p.gate == FW_GATE_VECTOR ? i * p.dt_bias.strides[1] : 0);
    c.parameters[c.Kp + i] = load_f32(p.dt_bias.data, p.dt_bias.dtype, offset);
  }
}

void load_key_row(const Problem &p, const fw_tensor &t, int64_t batch, int64_t row, int64_t head, int64_t padded,
                  float *to, float *inverse_length) {
  load_head_row(t, batch, row, head, p.K, padded, to);
  if (p.has_l2norm) *inverse_length = l2norm_row(to, padded, 1e-6f, to);
}

namespace {

// n logits, activated to the log decay.
void activate_gate(const Problem &p, const Chunk &c, const float *x, int64_t n, float *g) {
  activate_gate_row(p.gate_input, x, n, given(p.a_log) ? c.parameters : nullptr,
                    given(p.dt_bias) ? c.parameters + c.Kp : nullptr, static_cast<float>(p.gate_normalizer),
                    static_cast<float>(p.gate_lower_bound), g);
}

inline float activate_beta(const Problem &p, float x) {
  if (p.beta_input == FW_BETA_INPUT_PLAIN) return x;
  const float s = sigmoid(splat(x))[0];
  return p.beta_input == FW_BETA_INPUT_SIGMOID_TWICE ? 2.0f * s : s;
}

void pack_gates(const Problem &p, const Rows &r, Chunk &c) {
  if (p.gate == FW_GATE_NONE) return;
  for (int64_t i = 0; i < r.rows; ++i) {
    const int64_t row = r.first_row + i, token = row / p.n_sub;
    if (p.gate == FW_GATE_SCALAR) {
      float g = 0;
      if (row % p.n_sub == 0) {
        g = p.has_fixed_gate ? static_cast<float>(recurrence::fixed_gate(p, r.hv))
                             : load_f32(p.g.data, p.g.dtype, head_offset(p.g, r.batch, token, r.hv));
      }
      c.g[i] = c.logits[i] = g;
      if (p.gate_input != FW_GATE_INPUT_LOG_DECAY && row % p.n_sub == 0) {
        const float logits[kLanes] = {g};
        float activated[kLanes];
        activate_gate(p, c, logits, 1, activated);
        c.g[i] = activated[0];
      }
      c.row_decay[i] = exp(splat(c.g[i]))[0];
    } else {
      float *g = c.g + i * c.Kp;
      load_head_row(p.g, r.batch, token, r.hv, p.K, c.Kp, g);
      if (p.gate_input != FW_GATE_INPUT_LOG_DECAY) {
        float *logits = c.logits + i * c.Kp;
        memcpy(logits, g, static_cast<size_t>(c.Kp) * 4);
        activate_gate(p, c, logits, p.K, g);
        for (int64_t d = p.K; d < c.Kp; ++d) g[d] = 0.0f;
      }
      for (int64_t d = 0; d < c.Kp; d += kLanes) store(c.row_decay + i * c.Kp + d, exp(load(g + d)));
    }
  }
}

}  // namespace

void pack_keys(const Problem &p, const Rows &r, Chunk &c) {
  const int64_t h = r.hv / p.group(), Kp = c.Kp;
  pack_gates(p, r, c);
  for (int64_t i = 0; i < r.rows; ++i) {
    const int64_t row = r.first_row + i, token = row / p.n_sub;
    if (row % p.n_sub == p.n_sub - 1) {
      load_key_row(p, p.q, r.batch, token, h, Kp, c.q + i * Kp, c.norm_q + i);
    } else {
      memset(c.q + i * Kp, 0, static_cast<size_t>(Kp) * 4);
    }
    load_key_row(p, p.k, r.batch, row, h, Kp, c.k + i * Kp, c.norm_k + i);
    if (is_shared(p.erase)) {
      float *x = c.x + i * Kp;
      if (given(p.p)) {
        load_key_row(p, p.p, r.batch, token, h, Kp, x, c.norm_p + i);
      } else {
        memcpy(x, c.k + i * Kp, static_cast<size_t>(Kp) * 4);
      }
      if (c.key) memcpy(c.key + i * Kp, x, static_cast<size_t>(Kp) * 4);
      if (given(p.erase_gate)) {
        float factor_row[recurrence::kMaxWidth];
        float *gate = c.erase_gate ? c.erase_gate + i * Kp : factor_row;
        load_head_row(p.erase_gate, r.batch, token, h, p.K, Kp, gate);
        multiply_row(x, gate, Kp);
      }
      if (given(p.beta)) {
        const float x_beta = load_f32(p.beta.data, p.beta.dtype, head_offset(p.beta, r.batch, row, r.hv));
        c.beta[i] = activate_beta(p, x_beta);
        scale_row(x, c.beta[i], Kp, x);
      }
    }
    if (p.erase == FW_ERASE_INDEPENDENT) {
      load_head_row(p.a, r.batch, token, h, p.K, Kp, c.x + i * Kp);
      load_head_row(p.b, r.batch, token, h, p.K, Kp, c.b + i * Kp);
    }
  }
}

void pack_values(const Problem &p, const Rows &r, const Panel &panel, Chunk &c) {
  const int64_t W = c.W;
  for (int64_t i = 0; i < r.rows; ++i) {
    const int64_t row = r.first_row + i, token = row / p.n_sub;
    float *u = c.u + i * W;
    load_row(p.v.data, p.v.dtype, head_offset(p.v, r.batch, row, r.hv) + panel.first * p.v.strides[3], p.v.strides[3],
             panel.count, W, u);
    if (panel.has_sum) u[panel.count] = 1.0f;
    if (!is_shared(p.erase)) continue;
    if (c.v) memcpy(c.v + i * W, u, static_cast<size_t>(W) * 4);
    if (given(p.write_gate)) {
      float factor_row[recurrence::kMaxWidth];
      float *gate = c.write_gate ? c.write_gate + i * W : factor_row;
      load_row(p.write_gate.data, p.write_gate.dtype,
               head_offset(p.write_gate, r.batch, token, r.hv) + panel.first * p.write_gate.strides[3],
               p.write_gate.strides[3], panel.count, W, gate);
      multiply_row(u, gate, W);
    }
    if (given(p.beta)) scale_row(u, c.beta[i], W, u);
  }
}

void pack_chunk(const Problem &p, const Rows &r, const Panel &panel, Chunk &c) {
  pack_keys(p, r, c);
  pack_values(p, r, panel, c);
}

namespace {

// Scores and decayed rows of a chunk with no gate or one decay a row.
template <fw_gate kGate, fw_erase kErase>
FW_NOINLINE void score_scalar(int64_t rows, Chunk &c) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  constexpr bool kAfter = kErase == FW_ERASE_SHARED_AFTER;
  const int64_t Kp = c.Kp;
  gemm_nt(rows, rows, Kp, c.q, Kp, c.k, Kp, c.qk, kChunk, false);
  if constexpr (kErases) gemm_nt(rows, rows, Kp, c.x, Kp, c.k, Kp, c.xk, kChunk, false);
  if constexpr (kIndependent) {
    gemm_nt(rows, rows, Kp, c.q, Kp, c.b, Kp, c.qb, kChunk, false);
    gemm_nt(rows, rows, Kp, c.x, Kp, c.b, Kp, c.xb, kChunk, false);
  }
  if constexpr (kGate == FW_GATE_NONE) {
    memcpy(c.reads_q, c.q, static_cast<size_t>(rows * Kp) * 4);
    if constexpr (kErases) memcpy(c.reads_x, c.x, static_cast<size_t>(rows * Kp) * 4);
    memcpy(c.ends_k, c.k, static_cast<size_t>(rows * Kp) * 4);
    if constexpr (kIndependent) memcpy(c.ends_b, c.b, static_cast<size_t>(rows * Kp) * 4);
    return;
  }
  float run = 1.0f, before[kChunk] = {}, after[kChunk] = {};  // D_{j+1:i-1}, D_{j+1:i}
  for (int64_t i = 0; i < rows; ++i) {
    const float row_decay = c.row_decay[i], run_before = run;
    run *= row_decay;
    c.runs[i] = run;
    for (int64_t j = 0; j < i; ++j) after[j] = before[j] * row_decay;
    after[i] = 1.0f;
    for (int64_t j = 0; j < i; ++j) {
      c.qk[i * kChunk + j] *= after[j];
      if constexpr (kErases) c.xk[i * kChunk + j] *= kAfter ? after[j] : before[j];
      if constexpr (kIndependent) {
        c.qb[i * kChunk + j] *= after[j];
        c.xb[i * kChunk + j] *= before[j];
      }
    }
    for (int64_t j = 0; j <= i; ++j) c.decay[i * kChunk + j] = before[j] = after[j];
    scale_row(c.q + i * Kp, run, Kp, c.reads_q + i * Kp);
    if constexpr (kErases) scale_row(c.x + i * Kp, kAfter ? run : run_before, Kp, c.reads_x + i * Kp);
  }
  for (int64_t j = 0; j < rows; ++j) {
    scale_row(c.k + j * Kp, after[j], Kp, c.ends_k + j * Kp);
    if constexpr (kIndependent) scale_row(c.b + j * Kp, after[j], Kp, c.ends_b + j * Kp);
  }
  for (int64_t d = 0; d < Kp; ++d) c.total[d] = run;
}

// One earlier key against row i of a vector-gated chunk: decays the key by row i and takes its products with q_i and
// x_i.
template <bool kErases, bool kAfter>
inline __attribute__((always_inline)) void score_pair(int64_t Kp, const float *row_decay, const float *q,
                                                      const float *x, float *key, float *qk, float *xk) {
  Vec sum_q = {}, sum_x = {};
  for (int64_t d = 0; d < Kp; d += kLanes) {
    const Vec earlier = load(key + d), decayed = earlier * load(row_decay + d);
    store(key + d, decayed);
    sum_q = fma(load(q + d), decayed, sum_q);
    if constexpr (kErases) sum_x = fma(load(x + d), kAfter ? decayed : earlier, sum_x);
  }
  float sums[4];
  sum_lanes_4(sum_q, sum_x, Vec{}, Vec{}, sums);
  *qk = sums[0];
  if constexpr (kErases) *xk = sums[1];
}

template <fw_erase kErase>
FW_NOINLINE void score_vector(int64_t rows, Chunk &c) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  constexpr bool kAfter = kErase == FW_ERASE_SHARED_AFTER;
  const int64_t Kp = c.Kp;
  float *total = c.total;
  for (int64_t d = 0; d < Kp; ++d) total[d] = 1.0f;
  for (int64_t i = 0; i < rows; ++i) {
    const float *row_decay = c.row_decay + i * Kp, *q = c.q + i * Kp, *x = c.x + i * Kp;
    for (int64_t j = 0; j < i; ++j) {
      score_pair<kErases, kAfter>(Kp, row_decay, q, x, c.ends_k + j * Kp, c.qk + i * kChunk + j,
                                  c.xk + i * kChunk + j);
      if constexpr (kIndependent) {
        score_pair<true, false>(Kp, row_decay, q, x, c.ends_b + j * Kp, c.qb + i * kChunk + j, c.xb + i * kChunk + j);
      }
    }
    memcpy(c.ends_k + i * Kp, c.k + i * Kp, static_cast<size_t>(Kp) * 4);
    c.qk[i * kChunk + i] = dot(Kp, q, c.k + i * Kp);
    if constexpr (kIndependent) {
      memcpy(c.ends_b + i * Kp, c.b + i * Kp, static_cast<size_t>(Kp) * 4);
      c.qb[i * kChunk + i] = dot(Kp, q, c.b + i * Kp);
    }
    for (int64_t d = 0; d < Kp; d += kLanes) {
      const Vec before = load(total + d), run = before * load(row_decay + d);
      store(total + d, run);
      store(c.runs + i * Kp + d, run);
      store(c.reads_q + i * Kp + d, run * load(q + d));
      if constexpr (kErases) store(c.reads_x + i * Kp + d, (kAfter ? run : before) * load(x + d));
    }
  }
}

struct Score {
  template <fw_gate kGate, fw_erase kErase>
  static void run(int64_t rows, Chunk &c) {
    if constexpr (kGate == FW_GATE_VECTOR) {
      score_vector<kErase>(rows, c);
    } else {
      score_scalar<kGate, kErase>(rows, c);
    }
  }
};

}  // namespace

void score_chunk(const Problem &p, int64_t rows, Chunk &c) { recurrence::dispatch_axes<Score>(p, rows, c); }

void add_rows(int64_t n, const float *factor, int64_t stride, const float *rows, int64_t pitch, int64_t width,
              float *to) {
  int64_t d = 0;
  for (; d + 4 * kLanes <= width; d += 4 * kLanes) {
    Vec s0 = load(to + d), s1 = load(to + d + kLanes), s2 = load(to + d + 2 * kLanes), s3 = load(to + d + 3 * kLanes);
    for (int64_t j = 0; j < n; ++j) {
      const Vec x = splat(factor[j * stride]);
      const float *row = rows + j * pitch + d;
      s0 = fma(x, load(row), s0);
      s1 = fma(x, load(row + kLanes), s1);
      s2 = fma(x, load(row + 2 * kLanes), s2);
      s3 = fma(x, load(row + 3 * kLanes), s3);
    }
    store(to + d, s0);
    store(to + d + kLanes, s1);
    store(to + d + 2 * kLanes, s2);
    store(to + d + 3 * kLanes, s3);
  }
  for (; d < width; d += kLanes) {
    Vec sum = load(to + d);
    for (int64_t j = 0; j < n; ++j) sum = fma(splat(factor[j * stride]), load(rows + j * pitch + d), sum);
    store(to + d, sum);
  }
}

void solve_rows(const Problem &p, int64_t rows, const float *from_x, const Columns &columns, Chunk &c) {
  const int64_t W = c.W, width = columns.width;
  const float *us = c.u + columns.first, *ws = c.w + columns.first;
  for (int64_t i = 0; i < rows; ++i) {
    const float *from = from_x + i * W + columns.first;
    if (is_shared(p.erase)) {
      float z[recurrence::kMaxWidth];  // what row i erases
      memcpy(z, from, static_cast<size_t>(width) * 4);
      add_rows(i, c.xk + i * kChunk, 1, us, W, width, z);
      float *u = c.u + i * W + columns.first;
      for (int64_t d = 0; d < width; d += kLanes) store(u + d, load(u + d) - load(z + d));
    }
    if (p.erase == FW_ERASE_INDEPENDENT) {
      float *w = c.w + i * W + columns.first;
      memcpy(w, from, static_cast<size_t>(width) * 4);
      add_rows(i, c.xk + i * kChunk, 1, us, W, width, w);
      add_rows(i, c.xb + i * kChunk, 1, ws, W, width, w);
    }
  }
}

void advance_state(const Problem &p, int64_t rows, const Chunk &c, const Columns &columns, float *state) {
  const int64_t W = c.W, first = columns.first, width = columns.width;
  if (p.gate == FW_GATE_NONE) {
    gemm_nn<Keep::kAll>(p.K, width, rows, c.ends_k, 1, c.Kp, c.u + first, W, state + first, W);
  } else {
    gemm_nn<Keep::kScaled>(p.K, width, rows, c.ends_k, 1, c.Kp, c.u + first, W, state + first, W, c.total);
  }
  if (p.erase == FW_ERASE_INDEPENDENT) {
    gemm_nn<Keep::kAll>(p.K, width, rows, c.ends_b, 1, c.Kp, c.w + first, W, state + first, W);
  }
}

}  // namespace fw::FW_LEVEL
