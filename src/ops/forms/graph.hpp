// SPDX-License-Identifier: Apache-2.0
// What a segment's tokens are to each other and to its two ends. Tokens 0 .. T-1 of the problem, one segment.
//   Edges   B_i = D_{0:i-1} x_i                 [T,K]   how token i reads the memory at the start
//           L_ij = x_i^T D_{j+1:i-1} y_j, j < i [T,T]   how token i reads what token j erased;  Lk with k_j
//   Scores  Qd_i = D_{0:i} q_i                  [T,K]   QK_ij = q_i^T D_{j+1:i} k_j, j <= i [T,T];  QY with y_j
//   Ends    Kd_j = D_{j+1:T-1} k_j              [T,K]   what is left of a write at the end;  Yd the same with y_j
//           D = D_{0:T-1}                       [K]
// With one key for erasing and writing Lk, QY, Yd stay empty and the accessors give L, QK, Kd.
#pragma once
#include "ops/forms/problem.hpp"

namespace fw::forms {

template <class Real>
struct Edges {
  Matrix<Real> B, L, own_Lk;
  bool shared;
  const Matrix<Real> &Lk() const { return shared ? L : own_Lk; }
};

template <class Real>
Edges<Real> make_edges(const Problem<Real> &p) {
  Edges<Real> e{p.x, Matrix<Real>(p.T, p.T), Matrix<Real>(p.shared ? 0 : p.T, p.T), p.shared};
  for (int64_t i = 0; p.erases && i < p.T; ++i) {
    walk_back(p, i - 1, e.B.row(i), e.L.row(i), p.shared ? static_cast<Real *>(nullptr) : e.own_Lk.row(i));
  }
  return e;
}

template <class Real>
struct Scores {
  Matrix<Real> Qd, QK, own_QY;
  bool shared;
  const Matrix<Real> &QY() const { return shared ? QK : own_QY; }
};

template <class Real>
Scores<Real> make_scores(const Problem<Real> &p) {
  Scores<Real> s{p.q, Matrix<Real>(p.T, p.T), Matrix<Real>(p.shared ? 0 : p.T, p.T), p.shared};
  for (int64_t i = 0; i < p.T; ++i) {
    walk_back(p, i, s.Qd.row(i), p.shared ? static_cast<Real *>(nullptr) : s.own_QY.row(i), s.QK.row(i));
  }
  return s;
}

template <class Real>
struct Ends {
  Matrix<Real> Kd, own_Yd;
  std::vector<Real> D;
  bool shared;
  const Matrix<Real> &Yd() const { return shared ? Kd : own_Yd; }
};

template <class Real>
Ends<Real> make_ends(const Problem<Real> &p) {
  Ends<Real> e{p.k, p.y, std::vector<Real>(static_cast<size_t>(p.K), Real(1)), p.shared};
  if (!p.has_gate) return e;
  for (int64_t j = p.T - 1; j >= 0; --j) {
    scale_rows(e.Kd.row(j), e.D.data(), p.K);
    if (!p.shared) scale_rows(e.own_Yd.row(j), e.D.data(), p.K);
    scale_rows(e.D.data(), p.decay.row(j), p.K);
  }
  return e;
}

}  // namespace fw::forms
