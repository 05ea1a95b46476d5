// SPDX-License-Identifier: Apache-2.0
// How row-wise operations walk tensors of one shape and any strides: outer dimensions merged where every tensor
// allows it, one inner dimension; rows cut into blocks whose size follows from the shape alone, for sums over rows in
// a fixed order.
#pragma once
#include <stdint.h>

#include "core/tensor.hpp"

namespace fw {

struct RowPlan {
  static constexpr int32_t kMaxTensors = 6;
  int32_t n_tensors, n_dims;  // n_dims: outer dimensions left after merging
  int64_t n_rows, length;     // rows, elements in each
  int64_t shape[FW_MAX_DIMS];
  int64_t strides[kMaxTensors][FW_MAX_DIMS];
  int64_t inner[kMaxTensors];  // stride of the inner dimension
};

// Rows along the last dimension. tensors[0] is given; absent ones get strides 0.
RowPlan plan_rows(const fw_tensor *const *tensors, int32_t n_tensors);
// Any order of the elements will do: the inner dimension is the one that tensors[0] has closest together, merged too.
RowPlan plan_elements(const fw_tensor *const *tensors, int32_t n_tensors);

// Element offsets of one row in every tensor.
struct RowCursor {
  int64_t index[FW_MAX_DIMS];
  int64_t offset[RowPlan::kMaxTensors];
};
void seek_row(const RowPlan &plan, int64_t row, RowCursor *cursor);
void next_row(const RowPlan &plan, RowCursor *cursor);  // past the last row: the first

// Blocks of rows: a multiple of 64 rows each, at most 256 blocks.
struct RowBlocks {
  int64_t rows, n;
};
RowBlocks row_blocks(int64_t n_rows);

}  // namespace fw
