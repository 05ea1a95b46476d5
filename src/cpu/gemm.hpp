// SPDX-License-Identifier: Apache-2.0
// Dense products of small fp32 matrices held in cache. Included by *.isa.cpp files only.
//
// Plan: register tiles of kTileRows x (kTileVecs * kLanes) accumulators for nn, kDotRows x kDotCols lane-wise accumulators
// for nt. Every element is summed in one fixed order that depends on the depth alone: a row's or a column's bits do not
// depend on how many others are computed with it.
#pragma once
#include "cpu/vec.hpp"

namespace fw::FW_LEVEL {

#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTileVecs = 2, kDotRows = 4, kDotCols = 4;
#else
constexpr int kTileRows = 6, kTileVecs = 2, kDotRows = 4, kDotCols = 3;
#endif

// How nn treats what c holds: it is overwritten, added to, or scaled a row first.
enum class Keep { kNothing, kAll, kScaled };

namespace gemm_detail {

template <int kRows, int kVecs, Keep kKeep>
inline __attribute__((always_inline)) void nn_tile(int64_t depth, const float *a, int64_t a_row, int64_t a_col, const float *b,
                                                   int64_t ldb, float *c, int64_t ldc, const float *row_scale) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kVecs; ++n) {
      if constexpr (kKeep == Keep::kNothing) acc[m][n] = Vec{};
      if constexpr (kKeep == Keep::kAll) acc[m][n] = load(c + m * ldc + n * kLanes);
      if constexpr (kKeep == Keep::kScaled) acc[m][n] = load(c + m * ldc + n * kLanes) * splat(row_scale[m]);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec row[kVecs];
#pragma GCC unroll 4
    for (int n = 0; n < kVecs; ++n) row[n] = load(b + k * ldb + n * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Vec x = splat(a[m * a_row + k * a_col]);
#pragma GCC unroll 4
      for (int n = 0; n < kVecs; ++n) acc[m][n] = fma(x, row[n], acc[m][n]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < kVecs; ++n) store(c + m * ldc + n * kLanes, acc[m][n]);
  }
}

template <int kRows, Keep kKeep>
FW_NOINLINE void nn_rows(int64_t cols, int64_t depth, const float *a, int64_t a_row, int64_t a_col, const float *b, int64_t ldb, float *c,
             int64_t ldc, const float *row_scale) {
  int64_t n = 0;
  for (; n + kTileVecs * kLanes <= cols; n += kTileVecs * kLanes) {
    nn_tile<kRows, kTileVecs, kKeep>(depth, a, a_row, a_col, b + n, ldb, c + n, ldc, row_scale);
  }
  for (; n < cols; n += kLanes) nn_tile<kRows, 1, kKeep>(depth, a, a_row, a_col, b + n, ldb, c + n, ldc, row_scale);
}

template <int kRows, Keep kKeep>
void nn_rest(int64_t rows, int64_t cols, int64_t depth, const float *a, int64_t a_row, int64_t a_col, const float *b,
             int64_t ldb, float *c, int64_t ldc, const float *row_scale) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return nn_rows<kRows, kKeep>(cols, depth, a, a_row, a_col, b, ldb, c, ldc, row_scale);
    nn_rest<kRows - 1, kKeep>(rows, cols, depth, a, a_row, a_col, b, ldb, c, ldc, row_scale);
  }
}

// Sums of four accumulators, each by the same tree.
inline __attribute__((always_inline)) void sum_lanes_4(Vec w, Vec x, Vec y, Vec z, float *to) {
#if defined(__AVX512F__)
  const __m256 a = (__m256)fold_halves(w), b = (__m256)fold_halves(x);
  const __m256 c = (__m256)fold_halves(y), d = (__m256)fold_halves(z);
#elif defined(__AVX2__)
  const __m256 a = (__m256)w, b = (__m256)x, c = (__m256)y, d = (__m256)z;
#endif
#if defined(__AVX2__)
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
  to[0] = (w[0] + w[1]) + (w[2] + w[3]);
  to[1] = (x[0] + x[1]) + (x[2] + x[3]);
  to[2] = (y[0] + y[1]) + (y[2] + y[3]);
  to[3] = (z[0] + z[1]) + (z[2] + z[3]);
#endif
}

template <int kRows, int kCols>
inline __attribute__((always_inline)) void nt_tile(int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb,
                                                   float *c, int64_t ldc, bool is_added) {
  Vec acc[kCols][4];
#pragma GCC unroll 4
  for (int n = 0; n < kCols; ++n) {
#pragma GCC unroll 4
    for (int m = 0; m < 4; ++m) acc[n][m] = Vec{};
  }
  for (int64_t k = 0; k < depth; k += kLanes) {
    Vec col[kCols];
#pragma GCC unroll 4
    for (int n = 0; n < kCols; ++n) col[n] = load(b + n * ldb + k);
#pragma GCC unroll 4
    for (int m = 0; m < kRows; ++m) {
      const Vec x = load(a + m * lda + k);
#pragma GCC unroll 4
      for (int n = 0; n < kCols; ++n) acc[n][m] = fma(x, col[n], acc[n][m]);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < kCols; ++n) {
    float sums[4];
    sum_lanes_4(acc[n][0], acc[n][1], acc[n][2], acc[n][3], sums);
    for (int m = 0; m < kRows; ++m) c[m * ldc + n] = is_added ? c[m * ldc + n] + sums[m] : sums[m];
  }
}

template <int kRows>
FW_NOINLINE void nt_rows(int64_t cols, int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb, float *c, int64_t ldc,
             bool is_added) {
  int64_t n = 0;
  for (; n + kDotCols <= cols; n += kDotCols) nt_tile<kRows, kDotCols>(depth, a, lda, b + n * ldb, ldb, c + n, ldc, is_added);
  for (; n < cols; ++n) nt_tile<kRows, 1>(depth, a, lda, b + n * ldb, ldb, c + n, ldc, is_added);
}

}  // namespace gemm_detail

// c[m][n] = keep(c)[m][n] + sum_k a[m * a_row + k * a_col] * b[k * ldb + n]; cols a multiple of kLanes.
// Keep::kScaled multiplies row m of c by row_scale[m] first. The sum runs over k upward.
template <Keep kKeep>
FW_NOINLINE inline void gemm_nn(int64_t rows, int64_t cols, int64_t depth, const float *a, int64_t a_row, int64_t a_col, const float *b,
                    int64_t ldb, float *c, int64_t ldc, const float *row_scale = nullptr) {
  using namespace gemm_detail;
  int64_t m = 0;
  for (; m + kTileRows <= rows; m += kTileRows) {
    nn_rows<kTileRows, kKeep>(cols, depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc,
                              row_scale ? row_scale + m : nullptr);
  }
  nn_rest<kTileRows - 1, kKeep>(rows - m, cols, depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc,
                                row_scale ? row_scale + m : nullptr);
}

// c[m][n] (+)= sum_k a[m * lda + k] * b[n * ldb + k]; depth a multiple of kLanes, the padding holding zeros.
FW_NOINLINE inline void gemm_nt(int64_t rows, int64_t cols, int64_t depth, const float *a, int64_t lda, const float *b, int64_t ldb,
                    float *c, int64_t ldc, bool is_added) {
  using namespace gemm_detail;
  int64_t m = 0;
  for (; m + kDotRows <= rows; m += kDotRows) nt_rows<kDotRows>(cols, depth, a + m * lda, lda, b, ldb, c + m * ldc, ldc, is_added);
  switch (rows - m) {
    case 3: nt_rows<3>(cols, depth, a + m * lda, lda, b, ldb, c + m * ldc, ldc, is_added); break;
    case 2: nt_rows<2>(cols, depth, a + m * lda, lda, b, ldb, c + m * ldc, ldc, is_added); break;
    case 1: nt_rows<1>(cols, depth, a + m * lda, lda, b, ldb, c + m * ldc, ldc, is_added); break;
    default: break;
  }
}

// sum_k a[k] * b[k], k < padded (a multiple of kLanes), in the order of gemm_nt.
inline float dot(int64_t padded, const float *a, const float *b) {
  Vec acc = {};
  for (int64_t k = 0; k < padded; k += kLanes) acc = fma(load(a + k), load(b + k), acc);
  float sums[4];
  gemm_detail::sum_lanes_4(acc, Vec{}, Vec{}, Vec{}, sums);
  return sums[0];
}

}  // namespace fw::FW_LEVEL
