// SPDX-License-Identifier: Apache-2.0
// From the public descriptor to a Problem: every shape, dtype and overlap that can be wrong is refused here.
#include "core/descriptor.hpp"
#include "core/operands.hpp"
#include "ops/linear/problem.hpp"

namespace fw::linear {
namespace {

constexpr const char *kOp = Op::kName;

}  // namespace

fw_status Op::make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data,
                           Problem *problem) {
  Problem &p = *problem;
  p = Problem{};
  p.direction = direction;
  p.device = desc.device;
  p.stream = desc.stream;
  FW_TRY(check_device(kOp, desc.device));
  FW_TRY(check_reserved(kOp, "options", desc.options));
  FW_TRY(check_reserved(kOp, "reserved", desc.reserved));
  p.x = desc.x;
  p.weight = desc.weight;
  p.bias = desc.bias;
  FW_TRY(check_first(kOp, "x", p.x, 2, 2, with_data, &p.is_f64));
  if (!given(p.weight)) return fail(FW_INVALID_ARGUMENT, "%s: weight is missing", kOp);
  p.M = p.x.shape[0];
  p.in = p.x.shape[1];
  p.out = p.weight.ndim == 2 ? p.weight.shape[0] : 0;
  const int64_t weight_shape[] = {p.out, p.in}, y_shape[] = {p.M, p.out};
  FW_TRY(check_float(kOp, "weight", p.weight, weight_shape, 2, p.is_f64, with_data));
  if (given(p.bias))
    FW_TRY(check_float(kOp, "bias", p.bias, &p.out, 1, p.is_f64, with_data && direction == FW_FORWARD));

  const Operand inputs[] = {{"x", &p.x}, {"weight", &p.weight}, {"bias", &p.bias}, {"dy", &p.dy}};
  if (direction == FW_FORWARD) {
    p.y = desc.y;
    FW_TRY(check_result(kOp, "y", p.y, y_shape, 2, p.is_f64, with_data, direction));
    const Operand outputs[] = {{"y", &p.y}};
    return check_outputs(kOp, outputs, 1, inputs, 4, with_data);
  }
  if (!grads) return FW_OK;
  FW_TRY(check_reserved(kOp, "grads.reserved", grads->reserved));
  p.dy = grads->dy;
  p.dx = grads->dx;
  p.dweight = grads->dweight;
  p.dbias = grads->dbias;
  FW_TRY(check_float(kOp, "dy", p.dy, y_shape, 2, p.is_f64, with_data));
  if (given(p.dx)) FW_TRY(check_float(kOp, "dx", p.dx, p.x.shape, 2, p.is_f64, with_data, p.x.dtype));
  if (given(p.dweight)) {
    FW_TRY(check_float(kOp, "dweight", p.dweight, weight_shape, 2, p.is_f64, with_data, p.weight.dtype));
  }
  if (given(p.dbias)) {
    if (!given(p.bias)) return fail(FW_INVALID_ARGUMENT, "%s: dbias is given, but bias is absent", kOp);
    FW_TRY(check_float(kOp, "dbias", p.dbias, &p.out, 1, p.is_f64, with_data, p.bias.dtype));
  }
  const Operand outputs[] = {{"dx", &p.dx}, {"dweight", &p.dweight}, {"dbias", &p.dbias}};
  return check_outputs(kOp, outputs, 3, inputs, 4, with_data);
}

}  // namespace fw::linear
