// SPDX-License-Identifier: Apache-2.0
// The inverse of I + L, L strictly lower triangular [n,n], and the triangular solve. docs/math.md, "The inverse".
//
// `Round` says how an operand of a product is rounded when it is read; sums and stored results keep the type Real.
#pragma once
#include "fastweight/forms.h"
#include "ops/forms/matrix.hpp"

namespace fw::forms {

struct Exact {
  template <class Real>
  Real operator()(const Real &x) const {
    return x;
  }
};

// R <- (I + L)^-1 R by forward substitution: row i takes away L_ij times the finished rows j < i.
template <class Real, class Round = Exact>
void substitute(const Matrix<Real> &L, Matrix<Real> &R, Round round = Round()) {
  Matrix<Real> finished(R.rows, R.cols);  // the rows as operands
  for (int64_t i = 0; i < R.rows; ++i) {
    for (int64_t j = 0; j < i; ++j) add_scaled(R.row(i), -round(L(i, j)), finished.row(j), R.cols);
    for (int64_t c = 0; c < R.cols; ++c) finished(i, c) = round(R(i, c));
  }
}

template <class Real, class Round>
Matrix<Real> rounded(const Matrix<Real> &a, Round round) {
  Matrix<Real> r = a;
  for (Real &x : r.data) x = round(x);
  return r;
}

// A B of lower triangular matrices: the zeros above the diagonal are not multiplied.
template <class Real, class Round>
Matrix<Real> multiply_lower(const Matrix<Real> &a, const Matrix<Real> &b, Round round) {
  const Matrix<Real> left = rounded(a, round), right = rounded(b, round);
  Matrix<Real> c(a.rows, a.rows);
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j <= i; ++j) add_scaled(c.row(i), left(i, j), right.row(j), j + 1);
  }
  return c;
}

template <class Real>
Matrix<Real> block_of(const Matrix<Real> &a, int64_t row, int64_t rows, int64_t col, int64_t cols) {
  Matrix<Real> b(rows, cols);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) b(i, j) = a(row + i, col + j);
  }
  return b;
}

// X[row.., col..] += sign * b
template <class Real>
void add_block(Matrix<Real> &a, int64_t row, int64_t col, const Matrix<Real> &b, Sign sign) {
  for (int64_t i = 0; i < b.rows; ++i) {
    for (int64_t j = 0; j < b.cols; ++j) {
      Real &to = a(row + i, col + j);
      to = sign == Sign::kMinus ? to - b(i, j) : to + b(i, j);
    }
  }
}

template <class Real, class Round>
Matrix<Real> multiply(const Matrix<Real> &a, const Matrix<Real> &b, Round round) {
  Matrix<Real> c(a.rows, b.cols);
  add_matmul(c, rounded(a, round), rounded(b, round));
  return c;
}

template <class Real, class Round>
Matrix<Real> inverse_by_substitution(const Matrix<Real> &L, Round round) {
  Matrix<Real> X = identity<Real>(L.rows);
  substitute(L, X, round);
  return X;
}

template <class Real, class Round>
Matrix<Real> inverse_by_neumann(const Matrix<Real> &L, Round round) {
  const int64_t n = L.rows;
  Matrix<Real> X = identity<Real>(n), term = identity<Real>(n);
  for (int64_t m = 1; m < n; ++m) {
    term = multiply_lower(L, term, round);
    for (Real &t : term.data) t = -t;
    add(X, term);
  }
  return X;
}

template <class Real, class Round>
Matrix<Real> inverse_by_doubling(const Matrix<Real> &L, Round round) {
  const int64_t n = L.rows;
  Matrix<Real> X = identity<Real>(n), power = L;
  subtract(X, L);
  for (int64_t terms = 2; terms < n; terms *= 2) {
    power = multiply_lower(power, power, round);
    add(X, multiply_lower(X, power, round));
  }
  return X;
}

template <class Real, class Round>
Matrix<Real> inverse_by_horner(const Matrix<Real> &L, Round round) {
  const int64_t n = L.rows;
  Matrix<Real> X = identity<Real>(n);
  for (int64_t m = 1; m < n; ++m) {
    const Matrix<Real> operand = rounded(X, round);
    X = identity<Real>(n);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < i; ++j) add_scaled(X.row(i), -round(L(i, j)), operand.row(j), n);
    }
  }
  return X;
}

template <class Real, class Round>
void invert_diagonal_blocks(const Matrix<Real> &L, int64_t block, Round round, Matrix<Real> &X) {
  const int64_t n = L.rows;
  for (int64_t r = 0; r < n; r += block) {
    const int64_t rows = n - r < block ? n - r : block;
    add_block(X, r, r, inverse_by_substitution(block_of(L, r, rows, r, rows), round), Sign::kPlus);
  }
}

// [A 0; C B]^-1 = [A^-1 0; -B^-1 (C A^-1) B^-1], widths block, 2 block, 4 block, ...
template <class Real, class Round>
Matrix<Real> inverse_by_merging(const Matrix<Real> &L, int64_t block, Round round) {
  const int64_t n = L.rows;
  Matrix<Real> X(n, n);
  invert_diagonal_blocks(L, block, round, X);
  for (int64_t width = block; width < n; width *= 2) {
    for (int64_t r = width; r < n; r += 2 * width) {
      const int64_t rows = n - r < width ? n - r : width, c = r - width;
      const Matrix<Real> CA = multiply(block_of(L, r, rows, c, width), block_of(X, c, width, c, width), round);
      add_block(X, r, c, multiply(block_of(X, r, rows, r, rows), CA, round), Sign::kMinus);
    }
  }
  return X;
}

// X_IJ = -X_II (sum over J <= M < I of L_IM X_MJ), block rows I from the top down.
template <class Real, class Round>
Matrix<Real> inverse_by_block_rows(const Matrix<Real> &L, int64_t block, Round round) {
  const int64_t n = L.rows;
  Matrix<Real> X(n, n);
  invert_diagonal_blocks(L, block, round, X);
  for (int64_t r = block; r < n; r += block) {
    const int64_t rows = n - r < block ? n - r : block;
    const Matrix<Real> above = multiply(block_of(L, r, rows, 0, r), block_of(X, 0, r, 0, r), round);
    add_block(X, r, 0, multiply(block_of(X, r, rows, r, rows), above, round), Sign::kMinus);
  }
  return X;
}

template <class Real, class Round>
Matrix<Real> inverse(fw_inverse_method method, const Matrix<Real> &L, int64_t block, Round round) {
  switch (method) {
    case FW_INVERSE_NEUMANN:
      return inverse_by_neumann(L, round);
    case FW_INVERSE_DOUBLING:
      return inverse_by_doubling(L, round);
    case FW_INVERSE_BLOCK_MERGE:
      return inverse_by_merging(L, block, round);
    case FW_INVERSE_BLOCK_ROWS:
      return inverse_by_block_rows(L, block, round);
    case FW_INVERSE_HORNER:
      return inverse_by_horner(L, round);
    default:
      return inverse_by_substitution(L, round);
  }
}

}  // namespace fw::forms
