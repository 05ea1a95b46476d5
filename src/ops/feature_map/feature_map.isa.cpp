// SPDX-License-Identifier: Apache-2.0
// Feature maps, forward and backward. Plan: a piece of at most kPieceLength elements of one row is loaded to fp32
// scratch, mapped in place, stored. Scratch: x, dy, out, 3 * 4 * kPieceLength bytes.
#include "cpu/activation.hpp"
#include "cpu/rows.hpp"
#include "ops/feature_map/kernels.hpp"

namespace fw::FW_LEVEL {
namespace {

using feature_map::kPieceLength;
using feature_map::Problem;

inline __attribute__((always_inline)) Vec map(fw_feature_map_kind kind, Vec x) {
  const IntVec is_positive = x > splat(0.0f);
  switch (kind) {
    case FW_FEATURE_ELU_PLUS_ONE: return select(is_positive, x + splat(1.0f), exp((Vec)((IntVec)x & ~is_positive)));
    case FW_FEATURE_SILU: return silu(x);
    case FW_FEATURE_RELU: return (Vec)((IntVec)x & ~(x <= splat(0.0f)));  // NaN stays
    default: return x;
  }
}

inline __attribute__((always_inline)) Vec map_grad(fw_feature_map_kind kind, Vec x, Vec dy) {
  const IntVec is_positive = x > splat(0.0f);
  switch (kind) {
    case FW_FEATURE_ELU_PLUS_ONE: return dy * select(is_positive, splat(1.0f), exp((Vec)((IntVec)x & ~is_positive)));
    case FW_FEATURE_SILU: return dy * silu_slope(x);
    case FW_FEATURE_RELU: return (Vec)((IntVec)dy & ~(x <= splat(0.0f)));
    default: return dy;
  }
}

void pieces(const Problem &p, int64_t first, int64_t count, float *scratch) {
  const RowPlan &plan = p.plan;
  float *x = scratch, *dy = scratch + kPieceLength, *out = dy + kPieceLength;
  const int64_t per_row = (plan.length + kPieceLength - 1) / kPieceLength;
  const bool is_forward = p.direction == FW_FORWARD;
  const fw_tensor &to = is_forward ? p.y : p.dx;
  const int32_t i_out = is_forward ? 1 : 2;
  RowCursor row;
  seek_row(plan, first / per_row, &row);
  int64_t piece = first % per_row;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t begin = piece * kPieceLength;
    const int64_t n = plan.length - begin < kPieceLength ? plan.length - begin : kPieceLength, padded = pad_lanes(n);
    load_row(p.x.data, p.x.dtype, row.offset[0] + begin * plan.inner[0], plan.inner[0], n, padded, x);
    if (is_forward) {
      for (int64_t j = 0; j < padded; j += kLanes) store(out + j, map(p.kind, load(x + j)));
    } else {
      load_row(p.dy.data, p.dy.dtype, row.offset[1] + begin * plan.inner[1], plan.inner[1], n, padded, dy);
      for (int64_t j = 0; j < padded; j += kLanes) store(out + j, map_grad(p.kind, load(x + j), load(dy + j)));
    }
    store_row(to.data, to.dtype, row.offset[i_out] + begin * plan.inner[i_out], plan.inner[i_out], n, out);
    if (++piece == per_row) {
      piece = 0;
      next_row(plan, &row);
    }
  }
}

}  // namespace

extern const feature_map::Kernels kFeatureMap;
const feature_map::Kernels kFeatureMap = {pieces};

}  // namespace fw::FW_LEVEL
