// SPDX-License-Identifier: Apache-2.0
// Dot units that multiply whole tiles (AMX), and the model of them.
//
// Plan: blocks of 2 x 2 tiles of sums, 32 rows x 32 columns; along the depth, 16 pairs at a time (8 where that does not
// divide it), two tiles of a and two of b make four products. An a that is not contiguous along the depth is turned, 32
// rows at a time, on the stack. Rows of c are scaled before they are loaded. Scratch: 2 KB of stack.
#include "cpu/dot_units.hpp"
#include "cpu/gemm.hpp"
#include "cpu/pairs.hpp"
#include "cpu/tiles.hpp"

namespace fw::FW_LEVEL {
namespace {

constexpr int64_t kTile = 16;

inline int64_t part(int64_t rest) { return rest < 0 ? 0 : rest < kTile ? rest : kTile; }

struct Block {
  const uint32_t *a, *b;
  int64_t lda, ldb, depth;
  float *c;
  int64_t ldc;
};

void multiply_block(Tiles &tiles, const TileShape &s, const Block &x, bool keeps) {
  const bool low = s.rows[1] > 0, right = s.cols[1] > 0;
  float *c = x.c, *c_low = c + kTile * x.ldc;
  if (keeps) {
    tiles.load<0>(c, x.ldc);
    if (right) tiles.load<1>(c + kTile, x.ldc);
    if (low) tiles.load<2>(c_low, x.ldc);
    if (low && right) tiles.load<3>(c_low + kTile, x.ldc);
  } else {
    tiles.zero<0>();
    if (right) tiles.zero<1>();
    if (low) tiles.zero<2>();
    if (low && right) tiles.zero<3>();
  }
  for (int64_t k = 0; k < x.depth; k += s.pairs) {
    const uint32_t *a = x.a + k, *b = x.b + k * x.ldb;
    tiles.load<4>(a, x.lda);
    if (low) tiles.load<5>(a + kTile * x.lda, x.lda);
    tiles.load<6>(b, x.ldb);
    tiles.multiply<0, 0>();
    if (low) tiles.multiply<1, 0>();
    if (right) {
      tiles.load<7>(b + kTile, x.ldb);
      tiles.multiply<0, 1>();
      if (low) tiles.multiply<1, 1>();
    }
  }
  tiles.store<0>(c, x.ldc);
  if (right) tiles.store<1>(c + kTile, x.ldc);
  if (low) tiles.store<2>(c_low, x.ldc);
  if (low && right) tiles.store<3>(c_low + kTile, x.ldc);
}

// Rows [0, rows) of an a whose rows are adjacent.
void turn(const uint32_t *a, int64_t a_row, int64_t a_col, int64_t rows, int64_t depth, uint32_t *to) {
  for (int64_t k = 0; k < depth; ++k) {
    for (int64_t m = 0; m < rows; ++m) to[m * kTile + k] = a[m * a_row + k * a_col];
  }
}

void multiply(bool keeps, const float *row_scale, int64_t rows, int64_t cols, int64_t depth, const uint32_t *a,
              int64_t a_row, int64_t a_col, const uint32_t *b, int64_t ldb, float *c, int64_t ldc) {
  for (int64_t m = 0; row_scale && m < rows; ++m) {
    for (int64_t n = 0; n < cols; n += kLanes) store(c + m * ldc + n, load(c + m * ldc + n) * splat(row_scale[m]));
  }
  Tiles tiles;
  TileShape shape = {};
  uint32_t turned[2 * kTile * kTile];
  for (int64_t m = 0; m < rows; m += 2 * kTile) {
    const bool turns = a_col != 1;
    if (turns) turn(a + m * a_row, a_row, a_col, part(rows - m) + part(rows - m - kTile), depth, turned);
    const uint32_t *block_a = turns ? turned : a + m * a_row;
    for (int64_t n = 0; n < cols; n += 2 * kTile) {
      const TileShape wanted = {{part(rows - m), part(rows - m - kTile)},
                                {part(cols - n), part(cols - n - kTile)},
                                depth % kTile == 0 ? kTile : kTile / 2};
      if (!(wanted == shape)) tiles.configure(shape = wanted);
      const Block block = {block_a, b + n, turns ? kTile : a_row, ldb, depth, c + m * ldc + n, ldc};
      multiply_block(tiles, shape, block, keeps || row_scale);
    }
  }
  tiles.release();
}

}  // namespace

extern const DotUnits kDotUnits;
const DotUnits kDotUnits = {pack_rows, pack_columns, multiply};

}  // namespace fw::FW_LEVEL
