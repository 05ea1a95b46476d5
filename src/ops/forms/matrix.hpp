// SPDX-License-Identifier: Apache-2.0
// Dense row-major matrices and the few products that the forms are made of. Plain loops on any real type.
//
// Every multiply-add of a product goes through add_product, so that a counting type can tell them from the scalings
// by decays (tests/ops/test_forms_costs.cpp). Each sum runs in the order of its index.
#pragma once
#include <stdint.h>

#include <vector>

namespace fw::forms {

template <class Real>
struct Matrix {
  int64_t rows = 0, cols = 0;
  std::vector<Real> data;  // [rows, cols]

  Matrix() = default;
  Matrix(int64_t n_rows, int64_t n_cols) : rows(n_rows), cols(n_cols), data(static_cast<size_t>(n_rows * n_cols)) {}
  Real *row(int64_t i) { return data.data() + i * cols; }
  const Real *row(int64_t i) const { return data.data() + i * cols; }
  Real &operator()(int64_t i, int64_t j) { return data[static_cast<size_t>(i * cols + j)]; }
  const Real &operator()(int64_t i, int64_t j) const { return data[static_cast<size_t>(i * cols + j)]; }
};

template <class Real>
Matrix<Real> identity(int64_t n) {
  Matrix<Real> m(n, n);
  for (int64_t i = 0; i < n; ++i) m(i, i) = Real(1);
  return m;
}

template <class Real>
inline void add_product(Real &sum, const Real &a, const Real &b) {
  sum += a * b;
}

// to += s * from
template <class Real>
inline void add_scaled(Real *to, const Real &s, const Real *from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) add_product(to[i], s, from[i]);
}

template <class Real>
inline Real dot(const Real *a, const Real *b, int64_t n) {
  Real sum(0);
  for (int64_t i = 0; i < n; ++i) add_product(sum, a[i], b[i]);
  return sum;
}

template <class Real>
inline void scale_rows(Real *to, const Real *factors, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = to[i] * factors[i];
}

enum class Sign { kPlus, kMinus };
// Which j of row i of a square left operand hold anything: all, j <= i, or j < i.
enum class Shape { kFull, kLower, kStrict };

inline int64_t row_length(Shape shape, int64_t i, int64_t cols) {
  return shape == Shape::kFull ? cols : (shape == Shape::kLower ? i + 1 : i);
}

// C += sign * A B, with A of the given shape.
template <class Real>
void add_matmul(Matrix<Real> &c, const Matrix<Real> &a, const Matrix<Real> &b, Sign sign = Sign::kPlus,
                Shape shape = Shape::kFull) {
  for (int64_t i = 0; i < a.rows; ++i) {
    for (int64_t j = 0; j < row_length(shape, i, a.cols); ++j) {
      add_scaled(c.row(i), sign == Sign::kMinus ? -a(i, j) : a(i, j), b.row(j), b.cols);
    }
  }
}

// C += sign * A^T B
template <class Real>
void add_transposed(Matrix<Real> &c, const Matrix<Real> &a, const Matrix<Real> &b, Sign sign = Sign::kPlus) {
  for (int64_t j = 0; j < a.rows; ++j) {
    for (int64_t i = 0; i < a.cols; ++i) {
      add_scaled(c.row(i), sign == Sign::kMinus ? -a(j, i) : a(j, i), b.row(j), b.cols);
    }
  }
}

template <class Real>
void subtract(Matrix<Real> &c, const Matrix<Real> &a) {
  for (size_t i = 0; i < c.data.size(); ++i) c.data[i] = c.data[i] - a.data[i];
}

template <class Real>
void add(Matrix<Real> &c, const Matrix<Real> &a) {
  for (size_t i = 0; i < c.data.size(); ++i) c.data[i] = c.data[i] + a.data[i];
}

}  // namespace fw::forms
