// SPDX-License-Identifier: Apache-2.0
// How work is cut into thread blocks. Every kernel walks its items with the grid's size as its step, so a grid is never too small.
#pragma once
#include <stdint.h>

namespace fw::cuda {

// Thread blocks for n items, `together` a block.
inline uint32_t grid_of(int64_t n, int64_t together) {
  constexpr int64_t kMost = int64_t{1} << 20;
  const int64_t blocks = n / together + (n % together != 0);
  return static_cast<uint32_t>(blocks < kMost ? blocks : kMost);
}

// Blocks of rows whose sums are added afterwards: at least `least` rows each, at most 2048 blocks; chosen by the
// shape alone.
struct SumBlocks {
  int64_t rows, n;
};
inline SumBlocks sum_blocks_of(int64_t n_rows, int64_t least) {
  const int64_t share = n_rows / 2048 + (n_rows % 2048 != 0), rows = share < least ? least : share;
  return {rows, n_rows / rows + (n_rows % rows != 0)};
}

}  // namespace fw::cuda
