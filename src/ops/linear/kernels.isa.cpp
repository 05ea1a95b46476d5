// SPDX-License-Identifier: Apache-2.0
// Kernels of the linear layer, once a level: dot products with the weights as they are stored, products for the
// gradients, rows in and out.
#include "ops/linear/kernels.hpp"
#include "cpu/dots.hpp"
#include "cpu/gemm.hpp"
#include "cpu/rows.hpp"

namespace fw::FW_LEVEL {
namespace {

void stored_dots(int64_t rows, int64_t outs, int64_t depth, const float *x, int64_t ldx, const void *w,
                 fw_dtype dtype, int64_t ldw, float *y, int64_t ldy) {
  if (dtype == FW_F32)
    return dots<AsF32>(rows, outs, depth, x, ldx, static_cast<const float *>(w), ldw, y, ldy, false);
  const uint16_t *bits = static_cast<const uint16_t *>(w);
  if (dtype == FW_BF16) return dots<AsBf16>(rows, outs, depth, x, ldx, bits, ldw, y, ldy, false);
  dots<AsF16>(rows, outs, depth, x, ldx, bits, ldw, y, ldy, false);
}

void products(int64_t rows, int64_t cols, int64_t depth, const float *a, int64_t a_row, int64_t a_col, const float *b,
              int64_t ldb, float *c, int64_t ldc, bool is_added) {
  if (is_added)
    gemm_nn<Keep::kAll>(rows, cols, depth, a, a_row, a_col, b, ldb, c, ldc);
  else
    gemm_nn<Keep::kNothing>(rows, cols, depth, a, a_row, a_col, b, ldb, c, ldc);
}

void load_block(const void *data, fw_dtype dtype, int64_t offset, int64_t row_stride, int64_t stride, int64_t rows,
                int64_t n, int64_t padded, float *to, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) load_row(data, dtype, offset + r * row_stride, stride, n, padded, to + r * ld);
}

void store_block(void *data, fw_dtype dtype, int64_t offset, int64_t row_stride, int64_t stride, int64_t rows,
                 int64_t n, float *from, int64_t ld, const float *bias) {
  for (int64_t r = 0; r < rows; ++r) {
    float *row = from + r * ld;
    for (int64_t i = 0; bias && i < n; ++i) row[i] += bias[i];
    store_row(data, dtype, offset + r * row_stride, stride, n, row);
  }
}

}  // namespace

extern const linear::Kernels kLinearKernels;
const linear::Kernels kLinearKernels = {stored_dots, products, load_block, store_block};

}  // namespace fw::FW_LEVEL
