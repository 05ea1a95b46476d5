// SPDX-License-Identifier: Apache-2.0
// The decay quotient with one anchor at the start of a chunk. Outside promise 1: far_factor grows without bound.
#pragma once
#include <math.h>

#include "ops/forms/matrix.hpp"

namespace fw::forms {

template <class Real>
struct DecayQuotient {
  Matrix<Real> near_factor, far_factor, phi, rest;  // [n,K] [n,K] [1,K] [n,K]
};

// Tokens s .. e-1 of g [T,K]. G runs forward from the anchor; rest sums backward from the end, so that it stays exact
// where phi * far_factor is 0 * inf.
template <class Real>
DecayQuotient<Real> decay_quotient(int64_t K, const Real *g, int64_t s, int64_t e) {
  using std::exp;
  const int64_t n = e - s;
  DecayQuotient<Real> d{Matrix<Real>(n, K), Matrix<Real>(n, K), Matrix<Real>(1, K), Matrix<Real>(n, K)};
  for (int64_t c = 0; c < K; ++c) {
    Real G(0), to_end(0);
    for (int64_t i = 0; i < n; ++i) {
      G += g[(s + i) * K + c];
      d.near_factor(i, c) = exp(G);
      d.far_factor(i, c) = exp(-G);
    }
    d.phi(0, c) = exp(G);
    for (int64_t i = n - 1; i >= 0; --i) {
      d.rest(i, c) = exp(to_end);
      to_end += g[(s + i) * K + c];
    }
  }
  return d;
}

}  // namespace fw::forms
