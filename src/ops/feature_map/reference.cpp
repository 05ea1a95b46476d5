// SPDX-License-Identifier: Apache-2.0
// Feature maps in fp64, element by element.
#include "core/activation_f64.hpp"
#include "ops/feature_map/problem.hpp"

namespace fw::feature_map {
namespace {

double value(fw_feature_map_kind kind, double x) {
  switch (kind) {
    case FW_FEATURE_ELU_PLUS_ONE: return x > 0 ? x + 1.0 : ::exp(x);
    case FW_FEATURE_SILU: return silu_f64(x);
    case FW_FEATURE_RELU: return x <= 0 ? 0.0 : x;
    default: return x;
  }
}
double slope(fw_feature_map_kind kind, double x) {
  switch (kind) {
    case FW_FEATURE_ELU_PLUS_ONE: return x > 0 ? 1.0 : ::exp(x);
    case FW_FEATURE_SILU: return silu_slope_f64(x);
    default: return 1.0;
  }
}

}  // namespace

void reference_run(fw_context &, const Problem &p, void *) {
  const RowPlan &plan = p.plan;
  if (p.direction == FW_BACKWARD && !given(p.dx)) return;
  RowCursor row;
  seek_row(plan, 0, &row);
  for (int64_t r = 0; r < plan.n_rows; ++r, next_row(plan, &row)) {
    for (int64_t i = 0; i < plan.length; ++i) {
      const double x = load_f64(p.x.data, p.x.dtype, row.offset[0] + i * plan.inner[0]);
      if (p.direction == FW_FORWARD) {
        store_f64(p.y.data, p.y.dtype, row.offset[1] + i * plan.inner[1], value(p.kind, x));
        continue;
      }
      const double dy = load_f64(p.dy.data, p.dy.dtype, row.offset[1] + i * plan.inner[1]);
      const bool is_cut = p.kind == FW_FEATURE_RELU && x <= 0;
      store_f64(p.dx.data, p.dx.dtype, row.offset[2] + i * plan.inner[2], is_cut ? 0.0 : slope(p.kind, x) * dy);
    }
  }
}

}  // namespace fw::feature_map
