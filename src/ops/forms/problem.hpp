// SPDX-License-Identifier: Apache-2.0
// The normal form of every row of the family, S_t = (D_t - y_t x_t^T) S_{t-1} + k_t v'_t^T and o_t = S_t^T q_t (q
// scaled),
//   shared key, read after the decay    y = k, x = D_t e     (D_t S_{t-1})^T e = S_{t-1}^T (D_t e)
//   shared key, read before the decay   y = k, x = e
//   independent keys                    y = -b, x = a
//   no erase                            y = k, x = 0
// and the two loops over tokens that all forms share: advance (forward, on a memory), walk_back (backward, on a
// vector).
#pragma once
#include <math.h>
#include <stdint.h>

#include "fastweight/recurrence.h"
#include "ops/forms/matrix.hpp"

namespace fw::forms {

template <class Real>
struct Problem {
  int64_t T = 0, K = 0, V = 0;
  bool has_gate = false;
  bool erases = false;
  bool shared = true;          // y = k: `y` stays empty
  Matrix<Real> q, k, x, y, v;  // [T,K] four times, [T,V] (v')
  Matrix<Real> decay;          // [T,K] exp(g); [0,0] without a gate
  Matrix<Real> initial_state;  // [K,V]

  const Real *y_row(int64_t t) const { return shared ? k.row(t) : y.row(t); }
};

// Arrays as in fw_form_problem_*; null: absent. `scale` is settled.
template <class Real>
struct Operands {
  fw_gate gate;
  fw_erase erase;
  int64_t T, K, V;
  Real scale;
  const Real *q, *k, *v, *p, *beta, *erase_gate, *write_gate, *a, *b, *g, *initial_state;
};

template <class Real>
Problem<Real> make_problem(const Operands<Real> &in) {
  using std::exp;
  Problem<Real> p;
  p.T = in.T, p.K = in.K, p.V = in.V;
  p.has_gate = in.gate != FW_GATE_NONE;
  p.erases = in.erase != FW_ERASE_NONE;
  p.shared = in.erase != FW_ERASE_INDEPENDENT;
  p.q = p.k = p.x = Matrix<Real>(in.T, in.K);
  p.v = Matrix<Real>(in.T, in.V);
  if (!p.shared) p.y = Matrix<Real>(in.T, in.K);
  if (p.has_gate) p.decay = Matrix<Real>(in.T, in.K);
  p.initial_state = Matrix<Real>(in.K, in.V);
  if (in.initial_state) p.initial_state.data.assign(in.initial_state, in.initial_state + in.K * in.V);
  const bool has_factors = p.erases && p.shared;
  for (int64_t t = 0; t < in.T; ++t) {
    const Real beta = has_factors && in.beta ? in.beta[t] : Real(1);
    for (int64_t i = 0; i < in.K; ++i) {
      const int64_t at = t * in.K + i;
      if (in.q) p.q(t, i) = in.q[at] * in.scale;
      p.k(t, i) = in.k[at];
      if (p.has_gate) p.decay(t, i) = exp(in.g[in.gate == FW_GATE_VECTOR ? at : t]);
      if (!p.erases) continue;
      if (!p.shared) {
        p.x(t, i) = in.a[at];
        p.y(t, i) = -in.b[at];
        continue;
      }
      Real e = beta * (in.p ? in.p[at] : in.k[at]);
      if (in.erase_gate) e = e * in.erase_gate[at];
      p.x(t, i) = p.has_gate && in.erase == FW_ERASE_SHARED_AFTER ? p.decay(t, i) * e : e;
    }
    for (int64_t j = 0; j < in.V; ++j) {
      const int64_t at = t * in.V + j;
      Real v = has_factors ? beta * in.v[at] : in.v[at];
      if (has_factors && in.write_gate) v = v * in.write_gate[at];
      p.v(t, j) = v;
    }
  }
  return p;
}

// Tokens begin .. end-1, starting from an empty memory.
template <class Real>
Problem<Real> slice(const Problem<Real> &p, int64_t begin, int64_t end) {
  const auto rows = [&](const Matrix<Real> &m) {
    Matrix<Real> part(m.rows > 0 ? end - begin : 0, m.cols);
    if (m.rows > 0) part.data.assign(m.row(begin), m.row(end));
    return part;
  };
  Problem<Real> s;
  s.T = end - begin, s.K = p.K, s.V = p.V;
  s.has_gate = p.has_gate, s.erases = p.erases, s.shared = p.shared;
  s.q = rows(p.q), s.k = rows(p.k), s.x = rows(p.x), s.y = rows(p.y), s.v = rows(p.v), s.decay = rows(p.decay);
  s.initial_state = Matrix<Real>(p.K, p.V);
  return s;
}

// One token on a memory S [K,N] of any width: S <- (D_t - y x_t^T) S + k_t v^T. v null: nothing is written. z [N]
// receives S_{t-1}^T x_t. When y is k, the two outer products are one, k (v - z)^T.
template <class Real>
void advance(const Problem<Real> &p, int64_t t, const Real *y, const Real *v, Matrix<Real> &S, Real *z) {
  const int64_t N = S.cols;
  for (int64_t j = 0; j < N; ++j) z[j] = Real(0);
  if (p.erases) {
    for (int64_t i = 0; i < p.K; ++i) add_scaled(z, p.x(t, i), S.row(i), N);
  }
  const bool in_one = p.erases && v && y == p.k.row(t);
  std::vector<Real> pseudo(static_cast<size_t>(N));  // v - z
  for (int64_t j = 0; in_one && j < N; ++j) pseudo[j] = v[j] - z[j];
  for (int64_t i = 0; i < p.K; ++i) {
    Real *row = S.row(i);
    for (int64_t j = 0; p.has_gate && j < N; ++j) row[j] = row[j] * p.decay(t, i);
    if (in_one) {
      add_scaled(row, p.k(t, i), pseudo.data(), N);
      continue;
    }
    if (p.erases) add_scaled(row, -y[i], static_cast<const Real *>(z), N);
    if (v) add_scaled(row, p.k(t, i), v, N);
  }
}

// Carries a vector over the decays of tokens from, from-1, ..., 0. At token j it is D_{j+1:from} left, and
//   to_y[j] = left^T D_{j+1:from} y_j,  to_k[j] the same with k_j   (each may be null)
// are taken. At the end left is D_{0:from} left. All factors are exp(g) <= 1: no quotient, no difference of sums.
template <class Real>
void walk_back(const Problem<Real> &p, int64_t from, Real *left, Real *to_y, Real *to_k) {
  for (int64_t j = from; j >= 0; --j) {
    if (to_y) to_y[j] = dot(left, p.y_row(j), p.K);
    if (to_k) to_k[j] = dot(left, p.k.row(j), p.K);
    if (p.has_gate) scale_rows(left, p.decay.row(j), p.K);
  }
}

}  // namespace fw::forms
