// SPDX-License-Identifier: Apache-2.0
#include "core/row_plan.hpp"

namespace fw {
namespace {

// For a shape with a 0, whose other sizes and strides are unbounded.
RowPlan no_rows(int32_t n_tensors) {
  RowPlan plan = {};
  plan.n_tensors = n_tensors;
  return plan;
}

// order: dimensions from the inside out. The first is always kept; others of size 1 are dropped, and one joins the
// dimension inside it when every tensor steps over that one exactly; the first can be joined when inner_may_grow.
RowPlan merge(const fw_tensor *const *tensors, int32_t n_tensors, const int32_t *order, bool inner_may_grow) {
  RowPlan plan = {};
  plan.n_tensors = n_tensors;
  const int32_t ndim = tensors[0]->ndim;
  int64_t shape[FW_MAX_DIMS] = {}, strides[RowPlan::kMaxTensors][FW_MAX_DIMS] = {};
  int32_t n = 0;
  for (int32_t i = 0; i < ndim; ++i) {
    const int32_t d = order[i];
    const int64_t size = tensors[0]->shape[d];
    if (i > 0 && size == 1) continue;
    bool joins = n >= (inner_may_grow ? 1 : 2);
    for (int32_t t = 0; joins && t < n_tensors; ++t) {
      joins = !given(*tensors[t]) || tensors[t]->strides[d] == strides[t][n - 1] * shape[n - 1];
    }
    if (joins) {
      shape[n - 1] *= size;
      continue;
    }
    shape[n] = size;
    for (int32_t t = 0; t < n_tensors; ++t) strides[t][n] = given(*tensors[t]) ? tensors[t]->strides[d] : 0;
    ++n;
  }
  plan.length = shape[0];
  plan.n_dims = n - 1;
  plan.n_rows = 1;
  for (int32_t t = 0; t < n_tensors; ++t) plan.inner[t] = strides[t][0];
  for (int32_t i = 0; i < plan.n_dims; ++i) {
    plan.shape[i] = shape[n - 1 - i];
    plan.n_rows *= plan.shape[i];
    for (int32_t t = 0; t < n_tensors; ++t) plan.strides[t][i] = strides[t][n - 1 - i];
  }
  return plan;
}

}  // namespace

RowPlan plan_rows(const fw_tensor *const *tensors, int32_t n_tensors) {
  if (numel(*tensors[0]) == 0) return no_rows(n_tensors);
  int32_t order[FW_MAX_DIMS];
  const int32_t ndim = tensors[0]->ndim;
  for (int32_t i = 0; i < ndim; ++i) order[i] = ndim - 1 - i;
  return merge(tensors, n_tensors, order, false);
}

RowPlan plan_elements(const fw_tensor *const *tensors, int32_t n_tensors) {
  if (numel(*tensors[0]) == 0) return no_rows(n_tensors);
  int32_t order[FW_MAX_DIMS];
  const fw_tensor &first = *tensors[0];
  const auto reach = [&](int32_t d) {  // a dimension of size 1 goes outermost, whatever its stride
    const int64_t stride = first.strides[d];
    return first.shape[d] <= 1 ? INT64_MAX : stride < 0 ? -stride : stride;
  };
  for (int32_t i = 0; i < first.ndim; ++i) {
    int32_t at = i;
    const int32_t d = first.ndim - 1 - i;
    while (at > 0 && reach(order[at - 1]) > reach(d)) {
      order[at] = order[at - 1];
      --at;
    }
    order[at] = d;
  }
  return merge(tensors, n_tensors, order, true);
}

void seek_row(const RowPlan &plan, int64_t row, RowCursor *cursor) {
  for (int32_t t = 0; t < plan.n_tensors; ++t) cursor->offset[t] = 0;
  for (int32_t i = plan.n_dims - 1; i >= 0; --i) {
    cursor->index[i] = row % plan.shape[i];
    row /= plan.shape[i];
    for (int32_t t = 0; t < plan.n_tensors; ++t) cursor->offset[t] += cursor->index[i] * plan.strides[t][i];
  }
}

void next_row(const RowPlan &plan, RowCursor *cursor) {
  for (int32_t i = plan.n_dims - 1; i >= 0; --i) {
    if (++cursor->index[i] < plan.shape[i]) {
      for (int32_t t = 0; t < plan.n_tensors; ++t) cursor->offset[t] += plan.strides[t][i];
      return;
    }
    cursor->index[i] = 0;
    for (int32_t t = 0; t < plan.n_tensors; ++t) cursor->offset[t] -= (plan.shape[i] - 1) * plan.strides[t][i];
  }
}

RowBlocks row_blocks(int64_t n_rows) {
  const int64_t least = n_rows / 256 + (n_rows % 256 != 0);
  const int64_t rows = least <= 64 ? 64 : (least / 64 + (least % 64 != 0)) * 64;
  return {rows, n_rows / rows + (n_rows % rows != 0)};
}

}  // namespace fw
