// SPDX-License-Identifier: Apache-2.0
#include "core/descriptor.hpp"
#include "core/operands.hpp"
#include "ops/norm/problem.hpp"

namespace fw::norm {
namespace {

constexpr const char *kOp = Norm::kName;

fw_status check_settings(const fw_norm &desc, Problem *p) {
  FW_TRY(check_device(kOp, desc.device));
  if (desc.kind != FW_NORM_L2 && desc.kind != FW_NORM_RMS) {
    return fail(FW_INVALID_ARGUMENT, "%s: kind is %d, allowed 0 (L2) or 1 (RMS)", kOp, desc.kind);
  }
  if (desc.kind == FW_NORM_L2) {
    FW_TRY(check_absent(kOp, "weight", desc.weight, "kind 0 (L2) takes none"));
    FW_TRY(check_absent(kOp, "gate", desc.gate, "kind 0 (L2) takes none"));
  }
  if (given(desc.gate) && desc.gate_activation != FW_ACTIVATION_SILU &&
      desc.gate_activation != FW_ACTIVATION_SIGMOID) {
    return fail(FW_INVALID_ARGUMENT, "%s: gate_activation is %d, allowed 1 (SiLU) or 2 (sigmoid) with a gate", kOp,
                desc.gate_activation);
  }
  p->eps = desc.eps == 0 ? 1e-6 : desc.eps;
  if (!(p->eps >= 1e-30 && p->eps <= 1e30)) {
    return fail(FW_INVALID_ARGUMENT, "%s: eps is %g, allowed 1e-30 to 1e30 (0 means 1e-6)", kOp, desc.eps);
  }
  p->device = desc.device;
  p->stream = desc.stream;
  p->gate_activation = desc.gate_activation;
  return FW_OK;
}

}  // namespace

fw_status Norm::make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data,
                             Problem *p) {
  FW_TRY(check_settings(desc, p));
  p->direction = direction;
  p->x = desc.x;
  p->weight = desc.weight;
  p->gate = desc.gate;
  FW_TRY(check_first(kOp, "x", p->x, 1, FW_MAX_DIMS, with_data, &p->is_f64));
  const int64_t *shape = p->x.shape;
  const int32_t ndim = p->x.ndim;
  const int64_t *length = shape + ndim - 1;
  p->count = desc.kind == FW_NORM_RMS ? static_cast<double>(*length) : 1.0;
  if (given(p->weight)) FW_TRY(check_float(kOp, "weight", p->weight, length, 1, p->is_f64, with_data));
  if (given(p->gate)) FW_TRY(check_float(kOp, "gate", p->gate, shape, ndim, p->is_f64, with_data));
  FW_TRY(check_result(kOp, "y", desc.y, shape, ndim, p->is_f64, with_data, direction));
  if (direction == FW_FORWARD) {
    p->y = desc.y;
    const Operand inputs[] = {{"x", &p->x}, {"weight", &p->weight}, {"gate", &p->gate}}, outputs[] = {{"y", &p->y}};
    FW_TRY(check_outputs(kOp, outputs, 1, inputs, 3, with_data));
    const fw_tensor *walked[] = {&p->x, &p->gate, &p->y};
    p->plan = plan_rows(walked, 3);
    return FW_OK;
  }
  if (grads) {
    FW_TRY(check_reserved(kOp, "grads.reserved", grads->reserved));
    p->dy = grads->dy;
    p->dx = grads->dx;
    p->dweight = grads->dweight;
    p->dgate = grads->dgate;
    FW_TRY(check_float(kOp, "dy", p->dy, shape, ndim, p->is_f64, with_data));
    if (given(p->dx)) FW_TRY(check_float(kOp, "dx", p->dx, shape, ndim, p->is_f64, with_data, p->x.dtype));
    if (!given(p->weight)) FW_TRY(check_absent(kOp, "dweight", p->dweight, "weight is not"));
    if (!given(p->gate)) FW_TRY(check_absent(kOp, "dgate", p->dgate, "gate is not"));
    if (given(p->dweight))
      FW_TRY(check_float(kOp, "dweight", p->dweight, length, 1, p->is_f64, with_data, p->weight.dtype));
    if (given(p->dgate))
      FW_TRY(check_float(kOp, "dgate", p->dgate, shape, ndim, p->is_f64, with_data, p->gate.dtype));
    const Operand inputs[] = {{"x", &p->x}, {"weight", &p->weight}, {"gate", &p->gate}, {"dy", &p->dy}};
    const Operand outputs[] = {{"dx", &p->dx}, {"dweight", &p->dweight}, {"dgate", &p->dgate}};
    FW_TRY(check_outputs(kOp, outputs, 3, inputs, 4, with_data));
  }
  const fw_tensor *walked[] = {&p->x, &p->gate, &p->dy, &p->dx, &p->dgate};
  p->plan = plan_rows(walked, 5);
  return FW_OK;
}

fw_status Norm::check_more(const Problem &p) { return check_present(kOp, "y", p.y, p.direction); }

}  // namespace fw::norm
