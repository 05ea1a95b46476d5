// SPDX-License-Identifier: Apache-2.0
// The forms: recurrent, parallel (one masked matrix for the whole sequence), chunk (dense work inside C tokens, a
// scan between them), and the tempting form with one decayed K and Y for all rows, which is wrong.
//
// Multiply-adds a token, K V C as in docs/math.md, triangles counted exactly:
//   recurrent            2KV without erase, 3KV shared, 4KV independent
//   chunk, SOLVE         2KV + (C+1)(K+V)/2 without erase, 3KV + C(K+V) shared, 4KV + 2C(K+V) independent
//   chunk, FACTORS       as SOLVE plus (C-1)K/2
#pragma once
#include "ops/forms/operators.hpp"

namespace fw::forms {

template <class Real>
struct Outputs {
  Matrix<Real> o, state, attention;  // [T,V], [K,V], [T,T] (parallel only)
};

template <class Real>
Outputs<Real> recurrent(const Problem<Real> &p) {
  Outputs<Real> out{Matrix<Real>(p.T, p.V), p.initial_state, {}};
  std::vector<Real> z(static_cast<size_t>(p.V));
  for (int64_t t = 0; t < p.T; ++t) {
    advance(p, t, p.y_row(t), p.v.row(t), out.state, z.data());
    for (int64_t i = 0; i < p.K; ++i) add_scaled(out.o.row(t), p.q(t, i), out.state.row(i), p.V);
  }
  return out;
}

// A = QK - QY (I + L)^-1 Lk and o = A V' + (Qd - QY W) S_0. With one key A = QK (I + L)^-1.
template <class Real>
Outputs<Real> parallel(const Problem<Real> &p) {
  Scores<Real> s = make_scores(p);
  Outputs<Real> out{Matrix<Real>(p.T, p.V), Matrix<Real>(p.K, p.V), s.QK};
  const Edges<Real> e = make_edges(p);
  Matrix<Real> X = e.Lk();
  substitute(e.L, X);
  add_matmul(out.attention, s.QY(), X, Sign::kMinus, Shape::kLower);
  add_matmul(s.Qd, s.QY(), solve_by(FW_BY_SUBSTITUTION, e.L, e.B), Sign::kMinus, Shape::kLower);
  add_matmul(out.o, out.attention, p.v, Sign::kPlus, Shape::kLower);
  add_matmul(out.o, s.Qd, p.initial_state);
  const Segment<Real> whole = segment(slice(p, 0, p.T), FW_BY_SUBSTITUTION);
  out.state = whole.H;
  add_matmul(out.state, whole.P, p.initial_state);
  return out;
}

// What a chunk reads back: V' - Z with a shared key (one product along k serves), Z itself with independent keys.
template <class Real>
Matrix<Real> chunk_feedback(const Problem<Real> &c, const Edges<Real> &e, fw_chunk_kind kind, const Matrix<Real> &S) {
  Matrix<Real> R = c.v;
  if (!c.erases) return R;
  const Sign sign = c.shared ? Sign::kMinus : Sign::kPlus;
  if (!c.shared) {
    R = Matrix<Real>(c.T, c.V);
    add_matmul(R, e.Lk(), c.v, Sign::kPlus, Shape::kStrict);
  }
  if (kind == FW_CHUNK_SOLVE) {
    add_matmul(R, e.B, S, sign);
    substitute(e.L, R);
    return R;
  }
  Matrix<Real> W = e.B;
  substitute(e.L, W);
  substitute(e.L, R);
  add_matmul(R, W, S, sign);
  return R;
}

template <class Real>
Outputs<Real> chunk(const Problem<Real> &p, int64_t length, fw_chunk_kind kind) {
  Outputs<Real> out{Matrix<Real>(p.T, p.V), p.initial_state, {}};
  Matrix<Real> &S = out.state;
  for (int64_t begin = 0; begin < p.T; begin += length) {
    const Problem<Real> c = slice(p, begin, p.T - begin < length ? p.T : begin + length);
    const Edges<Real> edges = make_edges(c);
    const Scores<Real> scores = make_scores(c);
    const Ends<Real> ends = make_ends(c);
    const Matrix<Real> R = chunk_feedback(c, edges, kind, S);  // [C,V]
    const bool apart = c.erases && !c.shared;

    Matrix<Real> o(c.T, c.V);
    add_matmul(o, scores.Qd, S);
    add_matmul(o, scores.QK, apart ? c.v : R, Sign::kPlus, Shape::kLower);
    if (apart) add_matmul(o, scores.QY(), R, Sign::kMinus, Shape::kLower);
    for (int64_t i = 0; i < c.T; ++i) {
      for (int64_t j = 0; j < c.V; ++j) out.o(begin + i, j) = o(i, j);
    }

    for (int64_t i = 0; p.has_gate && i < p.K; ++i) {
      for (int64_t j = 0; j < p.V; ++j) S(i, j) = S(i, j) * ends.D[static_cast<size_t>(i)];
    }
    add_transposed(S, ends.Kd, apart ? c.v : R);
    if (apart) add_transposed(S, ends.Yd(), R, Sign::kMinus);
  }
  return out;
}

// O = (Q D) S + (Q K^T . M) V' - (Q Y^T . M) Z with K and Y decayed to the end of the sequence for every row.
template <class Real>
Matrix<Real> tempting(const Problem<Real> &p) {
  const Scores<Real> s = make_scores(p);
  const Ends<Real> ends = make_ends(p);
  const Matrix<Real> Z = feedback_operator(p, FW_BY_SUBSTITUTION);
  Matrix<Real> o(p.T, p.V), QK(p.T, p.T), QY(p.T, p.T);
  for (int64_t i = 0; i < p.T; ++i) {
    for (int64_t j = 0; j <= i; ++j) {
      QK(i, j) = dot(p.q.row(i), ends.Kd.row(j), p.K);
      QY(i, j) = dot(p.q.row(i), ends.Yd().row(j), p.K);
    }
  }
  add_matmul(o, s.Qd, p.initial_state);
  add_matmul(o, QK, p.v, Sign::kPlus, Shape::kLower);
  if (p.erases) add_matmul(o, QY, Z, Sign::kMinus, Shape::kLower);
  return o;
}

}  // namespace fw::forms
