// SPDX-License-Identifier: Apache-2.0
// Dense products of small fp32 matrices held in cache. Included by *.isa.cpp files only.
//
// Plan: register tiles of up to kTileRows x (vecs_of(rows) * kLanes) accumulators for nn, the tiles of dots.hpp
// for nt. Every element is summed in one fixed order that depends on the depth alone: a row's or a column's bits
// do not depend on how many others are computed with it.
#pragma once
#include "cpu/dots.hpp"
#include "cpu/vec.hpp"

namespace fw::FW_LEVEL {

#if defined(__AVX512F__)
constexpr int kTileRows = 12, kTileVecs = 2;
#elif defined(__aarch64__)
constexpr int kTileRows = 8, kTileVecs = 2;
#else
constexpr int kTileRows = 6, kTileVecs = 2;
#endif

// How nn treats what c holds: it is overwritten, added to, or scaled a row first.
enum class Keep { kNothing, kAll, kScaled };

namespace gemm_detail {

template <int kRows, int kVecs, Keep kKeep>
inline __attribute__((always_inline)) void nn_tile(int64_t depth, const float *a, int64_t a_row, int64_t a_col,
                                                   const float *b, int64_t ldb, float *c, int64_t ldc,
                                                   const float *row_scale) {
  Vec acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kVecs; ++n) {
      if constexpr (kKeep == Keep::kNothing) acc[m][n] = Vec{};
      if constexpr (kKeep == Keep::kAll) acc[m][n] = load(c + m * ldc + n * kLanes);
      if constexpr (kKeep == Keep::kScaled) acc[m][n] = load(c + m * ldc + n * kLanes) * splat(row_scale[m]);
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    if constexpr (kRows < kVecs) {  // the side with fewer stays in registers, the other passes by
      Vec x[kRows];
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) x[m] = splat(a[m * a_row + k * a_col]);
#pragma GCC unroll 8
      for (int n = 0; n < kVecs; ++n) {
        const Vec row = load(b + k * ldb + n * kLanes);
#pragma GCC unroll 16
        for (int m = 0; m < kRows; ++m) acc[m][n] = fma(x[m], row, acc[m][n]);
      }
    } else {
      Vec row[kVecs];
#pragma GCC unroll 8
      for (int n = 0; n < kVecs; ++n) row[n] = load(b + k * ldb + n * kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < kRows; ++m) {
        const Vec x = splat(a[m * a_row + k * a_col]);
#pragma GCC unroll 8
        for (int n = 0; n < kVecs; ++n) acc[m][n] = fma(x, row[n], acc[m][n]);
      }
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < kVecs; ++n) store(c + m * ldc + n * kLanes, acc[m][n]);
  }
}

// Few rows take more columns at a time: as many sums as hide the latency of the fused multiply-add.
constexpr int vecs_of(int rows) { return rows == 1 ? 8 : rows <= 3 ? 4 : kTileVecs; }

template <int kRows, int kVecs, Keep kKeep>
FW_NOINLINE void nn_rows(int64_t cols, int64_t depth, const float *a, int64_t a_row, int64_t a_col, const float *b,
                         int64_t ldb, float *c, int64_t ldc, const float *row_scale) {
  int64_t n = 0;
  for (; n + kVecs * kLanes <= cols; n += kVecs * kLanes) {
    nn_tile<kRows, kVecs, kKeep>(depth, a, a_row, a_col, b + n, ldb, c + n, ldc, row_scale);
  }
  if constexpr (kVecs > 1) {
    if (n < cols)
      nn_rows<kRows, kVecs / 2, kKeep>(cols - n, depth, a, a_row, a_col, b + n, ldb, c + n, ldc, row_scale);
  }
}

template <int kRows, Keep kKeep>
void nn_rest(int64_t rows, int64_t cols, int64_t depth, const float *a, int64_t a_row, int64_t a_col, const float *b,
             int64_t ldb, float *c, int64_t ldc, const float *row_scale) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      return nn_rows<kRows, vecs_of(kRows), kKeep>(cols, depth, a, a_row, a_col, b, ldb, c, ldc, row_scale);
    }
    nn_rest<kRows - 1, kKeep>(rows, cols, depth, a, a_row, a_col, b, ldb, c, ldc, row_scale);
  }
}

}  // namespace gemm_detail

// c[m][n] = keep(c)[m][n] + sum_k a[m * a_row + k * a_col] * b[k * ldb + n]; cols a multiple of kLanes.
// Keep::kScaled multiplies row m of c by row_scale[m] first. The sum runs over k upward.
template <Keep kKeep>
FW_NOINLINE inline void gemm_nn(int64_t rows, int64_t cols, int64_t depth, const float *a, int64_t a_row,
                                int64_t a_col, const float *b, int64_t ldb, float *c, int64_t ldc,
                                const float *row_scale = nullptr) {
  using namespace gemm_detail;
  int64_t m = 0;
  for (; m + kTileRows <= rows; m += kTileRows) {
    nn_rows<kTileRows, kTileVecs, kKeep>(cols, depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc,
                                         row_scale ? row_scale + m : nullptr);
  }
  nn_rest<kTileRows - 1, kKeep>(rows - m, cols, depth, a + m * a_row, a_row, a_col, b, ldb, c + m * ldc, ldc,
                                row_scale ? row_scale + m : nullptr);
}

// c[m][n] (+)= sum_k a[m * lda + k] * b[n * ldb + k]; the order of dots().
inline void gemm_nt(int64_t rows, int64_t cols, int64_t depth, const float *a, int64_t lda, const float *b,
                    int64_t ldb, float *c, int64_t ldc, bool is_added) {
  dots<AsF32>(rows, cols, depth, a, lda, b, ldb, c, ldc, is_added);
}

// sum_k a[k] * b[k], k < padded (a multiple of kLanes), in the order of gemm_nt.
inline float dot(int64_t padded, const float *a, const float *b) {
  Vec acc = {};
  for (int64_t k = 0; k < padded; k += kLanes) acc = fma(load(a + k), load(b + k), acc);
  float sums[4];
  sum_lanes_4(acc, Vec{}, Vec{}, Vec{}, sums);
  return sums[0];
}

// Compiled once a level, in gemm.isa.cpp: copies in every kernel file cost 3 s of compiling each, 8 s with
// sanitizers.
extern template void dots<AsF32>(int64_t, int64_t, int64_t, const float *, int64_t, const float *, int64_t, float *,
                                 int64_t, bool);
extern template void gemm_nn<Keep::kNothing>(int64_t, int64_t, int64_t, const float *, int64_t, int64_t,
                                             const float *, int64_t, float *, int64_t, const float *);
extern template void gemm_nn<Keep::kAll>(int64_t, int64_t, int64_t, const float *, int64_t, int64_t, const float *,
                                         int64_t, float *, int64_t, const float *);
extern template void gemm_nn<Keep::kScaled>(int64_t, int64_t, int64_t, const float *, int64_t, int64_t, const float *,
                                            int64_t, float *, int64_t, const float *);

}  // namespace fw::FW_LEVEL
