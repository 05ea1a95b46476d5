// SPDX-License-Identifier: Apache-2.0
// Units that multiply bf16 and add in fp32: what a kernel sees of them, which ones there are, and where they pay.
// Knows no operator.
//
// The depth of a product goes in pairs: a word holds two neighbours of the depth, the first in its low half. Numbers
// become bf16 to nearest even; a unit may take subnormal numbers for 0.
#pragma once
#include <stdint.h>

namespace fw {

struct DotUnits {
  // pairs[i] = (from[2i], from[2i+1]), 2i < n; n a multiple of 16.
  void (*pack_rows)(int64_t n, const float *from, uint32_t *pairs);
  // pairs[i * cols + c] = (from[2i][c], from[2i+1][c]), 2i < padded; rows from `rows` on are 0. padded even, cols as for
  // multiply.
  void (*pack_columns)(int64_t rows, int64_t padded, int64_t cols, const float *from, int64_t ld, uint32_t *pairs);
  // c[m][n] = keep(c)[m][n] + sum over pairs k of a[m * a_row + k * a_col] . b[k * ldb + n]. Keep: c is overwritten,
  // or, with row_scale, row m is multiplied by row_scale[m] first, or, with keeps, added to. The order of a sum depends
  // on depth alone. depth in pairs, a multiple of 8, at most 16 where a_col is not 1; cols a multiple of 4 (of 16 for
  // vdpbf16ps and AMX).
  void (*multiply)(bool keeps, const float *row_scale, int64_t rows, int64_t cols, int64_t depth, const uint32_t *a,
                   int64_t a_row, int64_t a_col, const uint32_t *b, int64_t ldb, float *c, int64_t ldc);
};

// The models compute what the units do on any machine: the same code above a scalar or vector stand-in.
enum DotUnitKind : int32_t {
  kAmx = 0,         // tiles of 16 x 16 fp32, 32 deep
  kAvx512Bf16 = 1,  // vdpbf16ps
  kNeonBf16 = 2,    // bfdot
  kAmxModel = 3,
  kPairsModel = 4,
  kDotUnitCount = 5
};

const char *dot_units_name(int32_t kind);
bool dot_units_are_built(int32_t kind);
bool dot_units_are_available(int32_t kind);  // built, and this machine and its system let a program use them
const DotUnits &dot_units(int32_t kind);     // of a kind that is built
// Whether the CPU's family is in the table of those where these units were measured to beat fp32 multiply-adds. The
// flag of the instruction says nothing: where Intel's AMX is hidden, vdpbf16ps has half the rate of fp32.
bool dot_units_pay(int32_t kind);

}  // namespace fw
