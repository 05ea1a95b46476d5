// SPDX-License-Identifier: Apache-2.0
// Gate activations in fp64. The parameters' gradients are summed in fp64 one parameter at a time: once over all rows
// each.
#include "core/activation_f64.hpp"
#include "ops/gate/problem.hpp"

namespace fw::gate {
namespace {

double parameter(const Problem &p, const fw_tensor &t, int64_t group, int64_t i) {
  return given(t) ? load_f64(t.data, t.dtype, parameter_offset(p, t, group, i)) : 0.0;
}

struct Sums {
  double a_log, dt_bias;
};

// Element (group, i) of every token.
Sums run_column(const Problem &p, int64_t group, int64_t i) {
  const RowPlan &plan = p.plan;
  const double a_log = parameter(p, p.a_log, group, i), dt_bias = parameter(p, p.dt_bias, group, i);
  Sums sums = {0, 0};
  RowCursor row;
  seek_row(plan, 0, &row);
  for (int64_t r = 0; r < plan.n_rows; ++r, next_row(plan, &row)) {
    int64_t at[3];
    for (int32_t t = 0; t < plan.n_tensors; ++t)
      at[t] = row.offset[t] + group * p.group_stride[t] + i * plan.inner[t];
    const double x = load_f64(p.x.data, p.x.dtype, at[0]);
    if (p.direction == FW_FORWARD) {
      store_f64(p.y.data, p.y.dtype, at[1], gate_f64(p.kind, x, a_log, dt_bias, p.normalizer, p.lower_bound));
      continue;
    }
    double dx, da_log;
    gate_grad_f64(p.kind, x, a_log, dt_bias, p.normalizer, p.lower_bound, load_f64(p.dy.data, p.dy.dtype, at[1]), &dx,
                  &da_log);
    if (given(p.dx)) store_f64(p.dx.data, p.dx.dtype, at[2], dx);
    sums.a_log += da_log;
    sums.dt_bias += dx;
  }
  return sums;
}

}  // namespace

void reference_run(fw_context &, const Problem &p, void *) {
  for (int64_t group = 0; group < p.n_groups; ++group) {
    double da_log = 0;
    for (int64_t i = 0; i < p.length; ++i) {
      const Sums sums = run_column(p, group, i);
      da_log += sums.a_log;
      if (given(p.d_dt_bias))
        store_f64(p.d_dt_bias.data, p.d_dt_bias.dtype, parameter_offset(p, p.d_dt_bias, group, i), sums.dt_bias);
      if (given(p.d_a_log) && !p.has_vectors) {
        store_f64(p.d_a_log.data, p.d_a_log.dtype, parameter_offset(p, p.d_a_log, group, i), sums.a_log);
      }
    }
    if (given(p.d_a_log) && p.has_vectors) {
      store_f64(p.d_a_log.data, p.d_a_log.dtype, parameter_offset(p, p.d_a_log, group, 0), da_log);
    }
  }
}

}  // namespace fw::gate
