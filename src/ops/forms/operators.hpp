// SPDX-License-Identifier: Apache-2.0
// The three operators of a segment, each by recursion on a memory or by a triangular system of its graph, and the
// segment as an affine map. W = (I + L)^-1 B, U = (I + Lk)^-1 V', Z = (I + L)^-1 (B S_0 + Lk V').
#pragma once
#include "ops/forms/graph.hpp"
#include "ops/forms/inverse.hpp"

namespace fw::forms {

// Term m is (-L)^m R: what arrives over exactly m edges. One [T,N] matrix a hop count.
template <class Real>
std::vector<Matrix<Real>> hops(const Matrix<Real> &L, const Matrix<Real> &R, int64_t n_hops) {
  std::vector<Matrix<Real>> terms;
  for (int64_t m = 0; m < n_hops; ++m) {
    Matrix<Real> term(R.rows, R.cols);
    if (m == 0) {
      term = R;
    } else {
      add_matmul(term, L, terms.back(), Sign::kMinus, Shape::kStrict);
    }
    terms.push_back(static_cast<Matrix<Real> &&>(term));
  }
  return terms;
}

template <class Real>
Matrix<Real> solve_by(fw_form_method method, const Matrix<Real> &L, Matrix<Real> R) {
  if (method == FW_BY_SUBSTITUTION) {
    substitute(L, R);
    return R;
  }
  Matrix<Real> result(R.rows, R.cols);
  if (method == FW_BY_INVERSE) {
    add_matmul(result, inverse_by_substitution(L, Exact()), R, Sign::kPlus, Shape::kLower);
    return result;
  }
  Matrix<Real> term = R;
  for (int64_t m = 0; m < L.rows; ++m) {
    add(result, term);
    Matrix<Real> next(R.rows, R.cols);
    add_matmul(next, L, term, Sign::kMinus, Shape::kStrict);
    term = static_cast<Matrix<Real> &&>(next);
  }
  return result;
}

// Rows S_{t-1}^T x_t of a memory that starts as S, erases along y (k when along_k) and writes v' (or nothing).
// S ends as S_T.
template <class Real>
Matrix<Real> reads(const Problem<Real> &p, bool along_k, bool writes, Matrix<Real> &S) {
  Matrix<Real> z(p.T, S.cols);
  for (int64_t t = 0; t < p.T; ++t) {
    const Real *v = writes ? p.v.row(t) : nullptr;
    advance(p, t, along_k ? p.k.row(t) : p.y_row(t), v, S, z.row(t));
  }
  return z;
}

template <class Real>
Matrix<Real> erase_operator(const Problem<Real> &p, fw_form_method method) {
  if (method == FW_BY_RECURSION) {
    Matrix<Real> P = identity<Real>(p.K);
    return reads(p, false, false, P);
  }
  Edges<Real> e = make_edges(p);
  return solve_by(method, e.L, e.B);
}

template <class Real>
Matrix<Real> write_operator(const Problem<Real> &p, fw_form_method method) {
  if (method == FW_BY_RECURSION) {
    Matrix<Real> H(p.K, p.V), U = p.v;
    subtract(U, reads(p, true, true, H));
    return U;
  }
  return solve_by(method, make_edges(p).Lk(), p.v);
}

// B S_0 + Lk V': what token t would read if nothing were erased inside the segment.
template <class Real>
Matrix<Real> feedback_source(const Problem<Real> &p, const Edges<Real> &e) {
  Matrix<Real> R(p.T, p.V);
  add_matmul(R, e.B, p.initial_state);
  add_matmul(R, e.Lk(), p.v, Sign::kPlus, Shape::kStrict);
  return R;
}

template <class Real>
Matrix<Real> feedback_operator(const Problem<Real> &p, fw_form_method method) {
  if (method == FW_BY_RECURSION) {
    Matrix<Real> S = p.initial_state;
    return reads(p, false, true, S);
  }
  const Edges<Real> e = make_edges(p);
  return solve_by(method, e.L, feedback_source(p, e));
}

template <class Real>
struct Segment {
  Matrix<Real> P, H;  // [K,K], [K,V]
};

// P = D - Yd^T W, H = Kd^T V' - Yd^T Z with Z from an empty memory. p comes from slice.
template <class Real>
Segment<Real> segment(const Problem<Real> &p, fw_form_method method) {
  Segment<Real> s{identity<Real>(p.K), Matrix<Real>(p.K, p.V)};
  if (method == FW_BY_RECURSION) {
    reads(p, false, false, s.P);
    reads(p, false, true, s.H);
    return s;
  }
  const Ends<Real> ends = make_ends(p);
  for (int64_t i = 0; i < p.K; ++i) s.P(i, i) = ends.D[static_cast<size_t>(i)];
  add_transposed(s.P, ends.Yd(), erase_operator(p, method), Sign::kMinus);
  add_transposed(s.H, ends.Kd, p.v);
  add_transposed(s.H, ends.Yd(), feedback_operator(p, method), Sign::kMinus);
  return s;
}

}  // namespace fw::forms
