// SPDX-License-Identifier: Apache-2.0
// What a level brings to the linear layer.
#pragma once
#include <stdint.h>

#include "cpu/levels.hpp"
#include "fastweight/types.h"

namespace fw::linear {

struct Kernels {
  // y[r * ldy + o] = sum_i x[r * ldx + i] * w[o * ldw + i], w stored as dtype, i < depth. The order of the sum
  // depends on depth alone: neither on rows nor on outs.
  void (*dots)(int64_t rows, int64_t outs, int64_t depth, const float *x, int64_t ldx, const void *w, fw_dtype dtype,
               int64_t ldw, float *y, int64_t ldy);
  // c[m * ldc + n] (+)= sum_k a[m * a_row + k * a_col] * b[k * ldb + n], k upward; cols a multiple of 16
  void (*products)(int64_t rows, int64_t cols, int64_t depth, const float *a, int64_t a_row, int64_t a_col,
                   const float *b, int64_t ldb, float *c, int64_t ldc, bool is_added);
  // to[r * ld + i] = data[offset + r * row_stride + i * stride], i < n; 0 for n <= i < padded
  void (*load_block)(const void *data, fw_dtype dtype, int64_t offset, int64_t row_stride, int64_t stride,
                     int64_t rows, int64_t n, int64_t padded, float *to, int64_t ld);
  // the way back, rounded to nearest even, after adding bias[i] where there is one
  void (*store_block)(void *data, fw_dtype dtype, int64_t offset, int64_t row_stride, int64_t stride, int64_t rows,
                      int64_t n, float *from, int64_t ld, const float *bias);
};

}  // namespace fw::linear

FW_DECLARE_LEVEL_TABLES(::fw::linear::Kernels, kLinearKernels)
