// SPDX-License-Identifier: Apache-2.0
#include <math.h>

#include "core/descriptor.hpp"
#include "core/operands.hpp"
#include "ops/gate/problem.hpp"

namespace fw::gate {
namespace {

constexpr const char *kOp = GateActivation::kName;

// The tensor without its head dimension, from head 0: [B,T,HV,K] -> [B,T,K]; [B,T,HV] stays.
fw_tensor first_group(const fw_tensor &t) {
  if (!given(t) || t.ndim == 3) return t;
  fw_tensor rows = t;
  rows.ndim = 3;
  rows.shape[2] = t.shape[3];
  rows.strides[2] = t.strides[3];
  return rows;
}

fw_status check_settings(const fw_gate_activation &desc, Problem *p) {
  FW_TRY(check_device(kOp, desc.device));
  FW_TRY(check_reserved(kOp, "reserved", desc.reserved));
  if (desc.kind < FW_GATE_KIND_SOFTPLUS || desc.kind > FW_GATE_KIND_BETA_TWICE) {
    return fail(FW_INVALID_ARGUMENT, "%s: kind is %d, allowed 1 to 6", kOp, desc.kind);
  }
  p->device = desc.device;
  p->stream = desc.stream;
  p->kind = desc.kind;
  p->normalizer = desc.normalizer == 0 ? 16.0 : desc.normalizer;
  p->lower_bound = desc.lower_bound == 0 ? -5.0 : desc.lower_bound;
  if (desc.kind == FW_GATE_KIND_LOG_SIGMOID && !(p->normalizer >= 1e-30 && p->normalizer <= 1e30)) {
    return fail(FW_INVALID_ARGUMENT, "%s: normalizer is %g, allowed 1e-30 to 1e30 (0 means 16)", kOp,
                desc.normalizer);
  }
  if (desc.kind == FW_GATE_KIND_BOUNDED && !(p->lower_bound <= -1e-30 && p->lower_bound >= -1e30)) {
    return fail(FW_INVALID_ARGUMENT, "%s: lower_bound is %g, allowed -1e30 to -1e-30 (0 means -5)", kOp,
                desc.lower_bound);
  }
  return FW_OK;
}

// a_log [HV], dt_bias [HV] or [HV,K], fp32 (fp64 in an fp64 call).
fw_status check_parameters(const Problem &p, const fw_tensor &a_log, const fw_tensor &dt_bias, const char *a_name,
                           const char *bias_name, bool with_data) {
  const int64_t *shape = p.x.shape + 2;
  const fw_dtype dtype = p.is_f64 ? FW_F64 : FW_F32;
  if (given(a_log)) FW_TRY(check_float(kOp, a_name, a_log, shape, 1, p.is_f64, with_data, dtype));
  if (!given(dt_bias)) return FW_OK;
  return check_float(kOp, bias_name, dt_bias, shape, p.has_vectors ? 2 : 1, p.is_f64, with_data, dtype);
}

}  // namespace

fw_status GateActivation::make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data,
                                       Problem *p) {
  FW_TRY(check_settings(desc, p));
  p->direction = direction;
  p->x = desc.x;
  p->a_log = desc.a_log;
  p->dt_bias = desc.dt_bias;
  FW_TRY(check_first(kOp, "x", p->x, 3, 4, with_data, &p->is_f64));
  p->has_vectors = p->x.ndim == 4;
  p->n_groups = p->has_vectors ? p->x.shape[2] : 1;
  p->length = p->x.shape[p->x.ndim - 1];
  if (p->kind != FW_GATE_KIND_SOFTPLUS && p->kind != FW_GATE_KIND_BOUNDED) {
    char why[48];
    snprintf(why, sizeof why, "kind %d takes none", p->kind);
    FW_TRY(check_absent(kOp, "a_log", p->a_log, why));
    FW_TRY(check_absent(kOp, "dt_bias", p->dt_bias, why));
  }
  FW_TRY(check_parameters(*p, p->a_log, p->dt_bias, "a_log", "dt_bias", with_data));
  const int64_t *shape = p->x.shape;
  const int32_t ndim = p->x.ndim;
  FW_TRY(check_result(kOp, "y", desc.y, shape, ndim, p->is_f64, with_data, direction));
  if (direction == FW_FORWARD) {
    p->y = desc.y;
    const Operand inputs[] = {{"x", &p->x}, {"a_log", &p->a_log}, {"dt_bias", &p->dt_bias}},
                  outputs[] = {{"y", &p->y}};
    FW_TRY(check_outputs(kOp, outputs, 1, inputs, 3, with_data));
  } else if (grads) {
    FW_TRY(check_reserved(kOp, "grads.reserved", grads->reserved));
    p->dy = grads->dy;
    p->dx = grads->dx;
    p->d_a_log = grads->d_a_log;
    p->d_dt_bias = grads->d_dt_bias;
    FW_TRY(check_float(kOp, "dy", p->dy, shape, ndim, p->is_f64, with_data));
    if (given(p->dx)) FW_TRY(check_float(kOp, "dx", p->dx, shape, ndim, p->is_f64, with_data, p->x.dtype));
    if (!given(p->a_log)) FW_TRY(check_absent(kOp, "d_a_log", p->d_a_log, "a_log is not"));
    if (!given(p->dt_bias)) FW_TRY(check_absent(kOp, "d_dt_bias", p->d_dt_bias, "dt_bias is not"));
    FW_TRY(check_parameters(*p, p->d_a_log, p->d_dt_bias, "d_a_log", "d_dt_bias", with_data));
    const Operand inputs[] = {{"x", &p->x}, {"a_log", &p->a_log}, {"dt_bias", &p->dt_bias}, {"dy", &p->dy}};
    const Operand outputs[] = {{"dx", &p->dx}, {"d_a_log", &p->d_a_log}, {"d_dt_bias", &p->d_dt_bias}};
    FW_TRY(check_outputs(kOp, outputs, 3, inputs, 4, with_data));
  }
  const bool is_forward = direction == FW_FORWARD;
  const fw_tensor *all[] = {&p->x, is_forward ? &p->y : &p->dy, &p->dx};
  fw_tensor rows[3];
  const fw_tensor *walked[3];
  for (int32_t i = 0; i < 3; ++i) {
    rows[i] = first_group(*all[i]);
    walked[i] = &rows[i];
    p->group_stride[i] = p->has_vectors && given(*all[i]) ? all[i]->strides[2] : 0;
  }
  p->plan = plan_rows(walked, is_forward ? 2 : 3);
  if (numel(p->x) == 0) p->plan.n_rows = 0;
  return FW_OK;
}

fw_status GateActivation::check_more(const Problem &p) { return check_present(kOp, "y", p.y, p.direction); }

}  // namespace fw::gate
