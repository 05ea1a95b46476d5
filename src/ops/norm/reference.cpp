// SPDX-License-Identifier: Apache-2.0
// Norms in fp64, row by row. The workspace holds the sums of dweight.
#include "core/activation_f64.hpp"
#include "core/ledger.hpp"
#include "ops/norm/problem.hpp"

namespace fw::norm {
namespace {

double at(const fw_tensor &t, int64_t offset, double absent) {
  return given(t) ? load_f64(t.data, t.dtype, offset) : absent;
}
double weight_at(const Problem &p, int64_t i) { return at(p.weight, i * p.weight.strides[0], 1.0); }
double x_at(const Problem &p, const RowCursor &row, int64_t i) {
  return at(p.x, row.offset[kX] + i * p.plan.inner[kX], 0.0);
}
double gate_at(const Problem &p, const RowCursor &row, int64_t i) {
  return at(p.gate, row.offset[kGate] + i * p.plan.inner[kGate], 0.0);
}
double act_at(const Problem &p, const RowCursor &row, int64_t i) {
  return given(p.gate) ? activation_f64(p.gate_activation, gate_at(p, row, i)) : 1.0;
}
double dy_at(const Problem &p, const RowCursor &row, int64_t i) {
  return at(p.dy, row.offset[kDy] + i * p.plan.inner[kDy], 0.0);
}

double rstd_of(const Problem &p, const RowCursor &row) {
  double sum = 0;
  for (int64_t i = 0; i < p.plan.length; ++i) {
    const double x = x_at(p, row, i);
    sum += x * x;
  }
  return 1.0 / ::sqrt(sum / p.count + p.eps);
}

void backward_row(const Problem &p, const RowCursor &row, double rstd, double *dweight) {
  double along = 0;
  for (int64_t i = 0; i < p.plan.length; ++i) {
    along += x_at(p, row, i) * rstd * dy_at(p, row, i) * act_at(p, row, i) * weight_at(p, i);
  }
  along /= p.count;
  for (int64_t i = 0; i < p.plan.length; ++i) {
    const double xhat = x_at(p, row, i) * rstd, dy = dy_at(p, row, i);
    if (given(p.dweight)) dweight[i] += dy * act_at(p, row, i) * xhat;
    if (given(p.dx)) {
      const double d_xhat = dy * act_at(p, row, i) * weight_at(p, i);
      store_f64(p.dx.data, p.dx.dtype, row.offset[kDx] + i * p.plan.inner[kDx], rstd * (d_xhat - xhat * along));
    }
    if (given(p.dgate)) {
      const double slope = activation_slope_f64(p.gate_activation, gate_at(p, row, i));
      store_f64(p.dgate.data, p.dgate.dtype, row.offset[kDgate] + i * p.plan.inner[kDgate],
                dy * xhat * weight_at(p, i) * slope);
    }
  }
}

}  // namespace

uint64_t reference_workspace(const fw_context &, const Problem &p) {
  Ledger ledger(nullptr);
  if (given(p.weight) && p.direction == FW_BACKWARD) ledger.take<double>(p.weight.shape[0]);
  return ledger.bytes();
}

void reference_run(fw_context &, const Problem &p, void *workspace) {
  const RowPlan &plan = p.plan;
  Ledger ledger(workspace);
  double *dweight = given(p.dweight) ? ledger.take<double>(p.dweight.shape[0]) : nullptr;
  for (int64_t i = 0; dweight && i < p.dweight.shape[0]; ++i) dweight[i] = 0;
  RowCursor row;
  seek_row(plan, 0, &row);
  for (int64_t r = 0; r < plan.n_rows; ++r, next_row(plan, &row)) {
    const double rstd = rstd_of(p, row);
    if (p.direction == FW_BACKWARD) {
      backward_row(p, row, rstd, dweight);
      continue;
    }
    for (int64_t i = 0; i < plan.length; ++i) {
      store_f64(p.y.data, p.y.dtype, row.offset[kY] + i * plan.inner[kY],
                x_at(p, row, i) * rstd * weight_at(p, i) * act_at(p, row, i));
    }
  }
  for (int64_t i = 0; dweight && i < p.dweight.shape[0]; ++i) {
    store_f64(p.dweight.data, p.dweight.dtype, i * p.dweight.strides[0], dweight[i]);
  }
}

}  // namespace fw::norm
