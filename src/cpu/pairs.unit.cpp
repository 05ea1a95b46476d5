// SPDX-License-Identifier: Apache-2.0
// Dot units whose instruction takes vectors: vdpbf16ps, bfdot, and the model of both in the level's own arithmetic.
//
// Plan: the register tiles of gemm.hpp with pairs in place of numbers: one word of a is spread over a vector, one row
// of b is loaded, each instruction adds two products a lane. Scratch: none.
#include "cpu/dot_units.hpp"
#include "cpu/gemm.hpp"
#include "cpu/pairs.hpp"

namespace fw::FW_LEVEL {
namespace {

void multiply(bool keeps, const float *row_scale, int64_t rows, int64_t cols, int64_t depth, const uint32_t *a,
              int64_t a_row, int64_t a_col, const uint32_t *b, int64_t ldb, float *c, int64_t ldc) {
  if (row_scale) {
    gemm_nn<Keep::kScaled, Pairs>(rows, cols, depth, a, a_row, a_col, b, ldb, c, ldc, row_scale);
  } else if (keeps) {
    gemm_nn<Keep::kAll, Pairs>(rows, cols, depth, a, a_row, a_col, b, ldb, c, ldc);
  } else {
    gemm_nn<Keep::kNothing, Pairs>(rows, cols, depth, a, a_row, a_col, b, ldb, c, ldc);
  }
}

}  // namespace

extern const DotUnits kDotUnits;
const DotUnits kDotUnits = {pack_rows, pack_columns, multiply};

}  // namespace fw::FW_LEVEL
