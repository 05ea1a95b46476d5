// SPDX-License-Identifier: Apache-2.0
// From the caller's tensors to the operands of one sub-step in the accumulation type (activations of gate and beta,
// L2 norm, the finished erase key and value), and the chain rule back.
#pragma once
#include <math.h>

#include <cmath>

#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

template <class Real>
Real sigmoid_of(Real x) {  // no exponential of a positive number
  const Real e = std::exp(-std::fabs(x));
  return x >= 0 ? 1 / (1 + e) : e / (1 + e);
}
template <class Real>
Real softplus_of(Real x) {
  return (x > 0 ? x : Real(0)) + std::log1p(std::exp(-std::fabs(x)));
}

template <class Real>
void load_vector(const fw_tensor &t, int64_t offset, int64_t stride, int64_t n, Real *to) {
  for (int64_t i = 0; i < n; ++i) to[i] = static_cast<Real>(load_f64(t.data, t.dtype, offset + i * stride));
}
template <class Real>
void store_vector(const fw_tensor &t, int64_t offset, int64_t stride, int64_t n, const Real *from) {
  for (int64_t i = 0; i < n; ++i) store_f64(t.data, t.dtype, offset + i * stride, static_cast<double>(from[i]));
}
inline int64_t row_offset(const fw_tensor &t, int64_t batch, int64_t row, int64_t head) {
  return batch * t.strides[0] + row * t.strides[1] + head * t.strides[2];
}
// Rows of a [B, rows, heads, n] tensor.
template <class Real>
void load_row_of(const fw_tensor &t, int64_t batch, int64_t row, int64_t head, int64_t n, Real *to) {
  load_vector(t, row_offset(t, batch, row, head), t.strides[3], n, to);
}
template <class Real>
void store_row_of(const fw_tensor &t, int64_t batch, int64_t row, int64_t head, int64_t n, const Real *from) {
  if (given(t)) store_vector(t, row_offset(t, batch, row, head), t.strides[3], n, from);
}

// x / sqrt(sum x^2 + 1e-6); returns the factor.
template <class Real>
Real l2_normalise(Real *x, int64_t n) {
  Real sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const Real factor = 1 / std::sqrt(sum + Real(1e-6));
  for (int64_t i = 0; i < n; ++i) x[i] *= factor;
  return factor;
}
// Gradient of the normalised vector to that of the raw one, in place.
template <class Real>
void l2_reverse(const Real *normalised, Real factor, int64_t n, Real *d) {
  Real dot = 0;
  for (int64_t i = 0; i < n; ++i) dot += normalised[i] * d[i];
  for (int64_t i = 0; i < n; ++i) d[i] = factor * (d[i] - normalised[i] * dot);
}

// The gate's log decay and the gradients of what it is made from.
template <class Real>
struct GateValue {
  Real g, dx, da_log;  // dx: dg/d(logit), also dg/d(dt_bias); da_log: dg/d(a_log)
};

template <class Real>
GateValue<Real> gate_value(const Problem &p, int64_t batch, int64_t t, int64_t hv, int64_t k) {
  if (p.has_fixed_gate) return {static_cast<Real>(fixed_gate(p, hv)), 0, 0};
  const bool is_vector = p.gate == FW_GATE_VECTOR;
  const int64_t offset = row_offset(p.g, batch, t, hv) + (is_vector ? k * p.g.strides[3] : 0);
  Real x = static_cast<Real>(load_f64(p.g.data, p.g.dtype, offset));
  if (p.gate_input == FW_GATE_INPUT_LOG_DECAY) return {x, 1, 0};
  const bool has_parameters = p.gate_input == FW_GATE_INPUT_SOFTPLUS || p.gate_input == FW_GATE_INPUT_BOUNDED;
  if (has_parameters && given(p.dt_bias)) {
    x += static_cast<Real>(load_f64(p.dt_bias.data, p.dt_bias.dtype,
                                    hv * p.dt_bias.strides[0] + (is_vector ? k * p.dt_bias.strides[1] : 0)));
  }
  Real rate = 1;
  if (given(p.a_log)) {
    rate = std::exp(static_cast<Real>(load_f64(p.a_log.data, p.a_log.dtype, hv * p.a_log.strides[0])));
  }
  if (p.gate_input == FW_GATE_INPUT_SOFTPLUS) {
    const Real g = -rate * softplus_of(x);
    return {g, -rate * sigmoid_of(x), g};
  }
  if (p.gate_input == FW_GATE_INPUT_LOG_SIGMOID) {
    const Real normalizer = static_cast<Real>(p.gate_normalizer);
    return {-softplus_of(-x) / normalizer, sigmoid_of(-x) / normalizer, 0};
  }
  if (p.gate_input == FW_GATE_INPUT_BOUNDED) {
    const Real bound = static_cast<Real>(p.gate_lower_bound), y = rate * x;
    const Real slope = bound * sigmoid_of(y) * sigmoid_of(-y);
    return {bound * sigmoid_of(y), slope == 0 ? 0 : slope * rate, slope == 0 ? 0 : slope * y};
  }
  const Real bound = -std::exp(Real(-0.5));
  return {bound * sigmoid_of(x), bound * sigmoid_of(x) * sigmoid_of(-x), 0};
}

// Where an activation's slope meets a gradient that is exactly 0 (g = -inf), the product is 0.
template <class Real>
Real chain(Real slope, Real gradient) {
  return gradient == 0 ? Real(0) : slope * gradient;
}

// Operands of one sub-step of one value head. Absent factors are 1.
template <class Real>
struct RowOperands {
  Real *q, *k, *x, *b;        // [K]
  Real *base, *erase_gate;    // [K]: x = beta * erase_gate * base
  Real *decay;                // [K]
  Real *v, *v_raw, *write_gate;  // [V]: v = beta * write_gate * v_raw
  Real beta, dbeta_dx;        // dbeta_dx: the slope of beta's activation
};

template <class Real>
void load_beta(const Problem &p, int64_t batch, int64_t row, int64_t hv, RowOperands<Real> &to) {
  to.beta = to.dbeta_dx = 1;
  if (!given(p.beta)) return;
  const Real x = static_cast<Real>(load_f64(p.beta.data, p.beta.dtype, row_offset(p.beta, batch, row, hv)));
  to.beta = x;
  if (p.beta_input == FW_BETA_INPUT_PLAIN) return;
  const Real top = p.beta_input == FW_BETA_INPUT_SIGMOID_TWICE ? 2 : 1;
  to.beta = top * sigmoid_of(x);
  to.dbeta_dx = to.beta * sigmoid_of(-x);
}

// k, x, b, v of row r (= t * n_sub + j).
template <class Real>
void load_sub_step(const Problem &p, int64_t batch, int64_t row, int64_t hv, RowOperands<Real> &to) {
  const int64_t h = hv / p.group(), K = p.K, V = p.V;
  load_row_of(p.k, batch, row, h, K, to.k);
  if (p.has_l2norm) l2_normalise(to.k, K);
  load_row_of(p.v, batch, row, hv, V, to.v_raw);
  if (p.erase == FW_ERASE_INDEPENDENT) {
    load_row_of(p.a, batch, row, h, K, to.x);
    load_row_of(p.b, batch, row, h, K, to.b);
  }
  if (p.erase == FW_ERASE_NONE || p.erase == FW_ERASE_INDEPENDENT) {
    for (int64_t i = 0; i < V; ++i) to.v[i] = to.v_raw[i];
    return;
  }
  load_beta(p, batch, row, hv, to);
  if (given(p.p)) {
    load_row_of(p.p, batch, row, h, K, to.base);
    if (p.has_l2norm) l2_normalise(to.base, K);
  } else {
    for (int64_t i = 0; i < K; ++i) to.base[i] = to.k[i];
  }
  for (int64_t i = 0; i < K; ++i) to.erase_gate[i] = 1;
  for (int64_t i = 0; i < V; ++i) to.write_gate[i] = 1;
  if (given(p.erase_gate)) load_row_of(p.erase_gate, batch, row, h, K, to.erase_gate);
  if (given(p.write_gate)) load_row_of(p.write_gate, batch, row, hv, V, to.write_gate);
  for (int64_t i = 0; i < K; ++i) to.x[i] = to.beta * to.erase_gate[i] * to.base[i];
  for (int64_t i = 0; i < V; ++i) to.v[i] = to.beta * to.write_gate[i] * to.v_raw[i];
}

template <class Real>
void load_decay(const Problem &p, int64_t batch, int64_t t, int64_t hv, RowOperands<Real> &to) {
  if (p.gate == FW_GATE_NONE) return;
  if (p.gate == FW_GATE_SCALAR) {
    const Real decay = std::exp(gate_value<Real>(p, batch, t, hv, 0).g);
    for (int64_t i = 0; i < p.K; ++i) to.decay[i] = decay;
    return;
  }
  for (int64_t i = 0; i < p.K; ++i) to.decay[i] = std::exp(gate_value<Real>(p, batch, t, hv, i).g);
}

template <class Real>
void load_query(const Problem &p, int64_t batch, int64_t t, int64_t h, RowOperands<Real> &to) {
  load_row_of(p.q, batch, t, h, p.K, to.q);
  if (p.has_l2norm) l2_normalise(to.q, p.K);
}

// States and their gradients, [K,V] inside.
template <class Real>
void load_state(const fw_tensor &t, fw_state_layout layout, int64_t n, int64_t hv, int64_t K, int64_t V, Real *S) {
  for (int64_t k = 0; k < K; ++k) {
    for (int64_t v = 0; v < V; ++v) {
      const int64_t offset = given(t) ? state_offset(t, layout, n, hv, k, v) : 0;
      S[k * V + v] = given(t) ? static_cast<Real>(load_f64(t.data, t.dtype, offset)) : 0;
    }
  }
}
template <class Real>
void store_state(const fw_tensor &t, fw_state_layout layout, int64_t n, int64_t hv, int64_t K, int64_t V,
                 const Real *S) {
  if (!given(t)) return;
  for (int64_t k = 0; k < K; ++k) {
    for (int64_t v = 0; v < V; ++v) {
      store_f64(t.data, t.dtype, state_offset(t, layout, n, hv, k, v), static_cast<double>(S[k * V + v]));
    }
  }
}
// [N, H, K] tensors of the normaliser.
template <class Real>
void load_z(const fw_tensor &t, int64_t n, int64_t h, int64_t K, Real *z) {
  for (int64_t i = 0; i < K; ++i) z[i] = 0;
  if (given(t)) load_vector(t, n * t.strides[0] + h * t.strides[1], t.strides[2], K, z);
}
template <class Real>
void store_z(const fw_tensor &t, int64_t n, int64_t h, int64_t K, const Real *z) {
  if (given(t)) store_vector(t, n * t.strides[0] + h * t.strides[1], t.strides[2], K, z);
}

// Rows [begin, end) of a [B, rows, heads, ...] output become 0.
inline void zero_rows(const fw_tensor &t, int64_t batch, int64_t begin, int64_t end, int64_t head) {
  if (!given(t)) return;
  const int64_t n = t.ndim == 4 ? t.shape[3] : 1, stride = t.ndim == 4 ? t.strides[3] : 0;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t i = 0; i < n; ++i) store_f64(t.data, t.dtype, row_offset(t, batch, row, head) + i * stride, 0.0);
  }
}

// Rows that belong to no sequence: everything after the last one of a pack.
inline Segment unowned_rows(const Problem &p) {
  if (!given(p.cu_seqlens)) return {0, 0, 0};
  return {0, load_int(p.cu_seqlens, p.N), p.T};
}

}  // namespace fw::recurrence
