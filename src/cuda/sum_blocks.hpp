// SPDX-License-Identifier: Apache-2.0
// The last pass of a sum over rows: thread blocks left partial sums behind, which are added in one order.
#pragma once
#include "core/tensor.hpp"

namespace fw::cuda {

// Where the sums go: element i to (i / columns) * row_stride + (i % columns) * column_stride of the tensor.
struct SumTarget {
  fw_tensor tensor;
  int64_t n, columns, row_stride, column_stride;
};

// tensor[i] = sum over b < n_blocks of partials[b * pitch + i]; 0 without blocks.
void launch_sum_blocks(void *stream, const float *partials, int64_t n_blocks, int64_t pitch, const SumTarget &to);

}  // namespace fw::cuda
