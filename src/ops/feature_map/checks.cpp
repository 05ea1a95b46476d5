// SPDX-License-Identifier: Apache-2.0
#include "core/descriptor.hpp"
#include "core/operands.hpp"
#include "ops/feature_map/problem.hpp"

namespace fw::feature_map {

fw_status FeatureMap::make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data,
                                   Problem *p) {
  FW_TRY(check_device(kName, desc.device));
  FW_TRY(check_reserved(kName, "reserved", desc.reserved));
  if (desc.kind < FW_FEATURE_IDENTITY || desc.kind > FW_FEATURE_RELU) {
    return fail(FW_INVALID_ARGUMENT, "%s: kind is %d, allowed 0 to 3", kName, desc.kind);
  }
  p->device = desc.device;
  p->stream = desc.stream;
  p->direction = direction;
  p->kind = desc.kind;
  p->x = desc.x;
  FW_TRY(check_first(kName, "x", p->x, 1, FW_MAX_DIMS, with_data, &p->is_f64));
  const int64_t *shape = p->x.shape;
  const int32_t ndim = p->x.ndim;
  FW_TRY(check_result(kName, "y", desc.y, shape, ndim, p->is_f64, with_data, direction));
  if (direction == FW_FORWARD) {
    p->y = desc.y;
    const Operand inputs[] = {{"x", &p->x}}, outputs[] = {{"y", &p->y}};
    FW_TRY(check_outputs(kName, outputs, 1, inputs, 1, with_data));
    const fw_tensor *walked[] = {&p->x, &p->y};
    p->plan = plan_elements(walked, 2);
    return FW_OK;
  }
  if (grads) {
    FW_TRY(check_reserved(kName, "grads.reserved", grads->reserved));
    p->dy = grads->dy;
    p->dx = grads->dx;
    FW_TRY(check_float(kName, "dy", p->dy, shape, ndim, p->is_f64, with_data));
    if (given(p->dx)) FW_TRY(check_float(kName, "dx", p->dx, shape, ndim, p->is_f64, with_data, p->x.dtype));
    const Operand inputs[] = {{"x", &p->x}, {"dy", &p->dy}}, outputs[] = {{"dx", &p->dx}};
    FW_TRY(check_outputs(kName, outputs, 1, inputs, 2, with_data));
  }
  const fw_tensor *walked[] = {&p->x, &p->dy, &p->dx};
  p->plan = plan_elements(walked, 3);
  return FW_OK;
}

fw_status FeatureMap::check_more(const Problem &p) { return check_present(kName, "y", p.y, p.direction); }

}  // namespace fw::feature_map
