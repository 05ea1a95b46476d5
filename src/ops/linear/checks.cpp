// SPDX-License-Identifier: Apache-2.0
// From the public descriptor to a Problem: every shape, dtype and overlap that can be wrong is refused here.
#include "core/descriptor.hpp"
#include "ops/linear/problem.hpp"

namespace fw::linear {
namespace {

constexpr const char *kOp = Op::kName;

struct Named {
  const char *name;
  const fw_tensor *tensor;
};

// An output in `dtype` (FW_NONE: any that this call computes in) that meets none of `others`.
fw_status check_out(const char *name, const fw_tensor &t, const int64_t *shape, int32_t ndim, fw_dtype dtype, bool is_f64,
                    bool with_data, const Named *others, int32_t n_others) {
  const fw_dtype single[] = {dtype}, f64[] = {FW_F64}, floats[] = {FW_F32, FW_BF16, FW_F16};
  FW_TRY(check_tensor(kOp, name, t, shape, ndim, with_data));
  if (dtype != FW_NONE) {
    FW_TRY(check_dtype(kOp, name, t, single, 1));
  } else {
    FW_TRY(is_f64 ? check_dtype(kOp, name, t, f64, 1) : check_dtype(kOp, name, t, floats, 3));
  }
  FW_TRY(check_output(kOp, name, t));
  for (int32_t i = 0; with_data && i < n_others; ++i) {
    FW_TRY(check_disjoint(kOp, name, t, others[i].name, *others[i].tensor));
  }
  return FW_OK;
}

fw_status check_in(const char *name, const fw_tensor &t, const int64_t *shape, int32_t ndim, bool is_f64, bool with_data) {
  const fw_dtype f64[] = {FW_F64}, floats[] = {FW_F32, FW_BF16, FW_F16};
  FW_TRY(check_tensor(kOp, name, t, shape, ndim, with_data));
  return is_f64 ? check_dtype(kOp, name, t, f64, 1) : check_dtype(kOp, name, t, floats, 3);
}

}  // namespace

fw_status Op::make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data, Problem *problem) {
  Problem &p = *problem;
  p = Problem{};
  p.direction = direction;
  p.device = desc.device;
  FW_TRY(check_device(kOp, desc.device));
  FW_TRY(check_reserved(kOp, "options", desc.options));
  FW_TRY(check_reserved(kOp, "reserved", desc.reserved));
  p.x = desc.x;
  p.weight = desc.weight;
  p.bias = desc.bias;
  p.is_f64 = desc.x.dtype == FW_F64;

  char found[160];
  if (!given(p.x)) return fail(FW_INVALID_ARGUMENT, "%s: x is missing", kOp);
  if (p.x.ndim != 2) return fail(FW_INVALID_ARGUMENT, "%s: x has %d dimensions, expected 2", kOp, p.x.ndim);
  if (!given(p.weight)) return fail(FW_INVALID_ARGUMENT, "%s: weight is missing", kOp);
  if (p.weight.ndim != 2) {
    return fail(FW_INVALID_ARGUMENT, "%s: weight has %d dimensions, expected 2", kOp, p.weight.ndim);
  }
  p.M = p.x.shape[0];
  p.in = p.x.shape[1];
  p.out = p.weight.shape[0];
  FW_TRY(check_in("x", p.x, p.x.shape, 2, p.is_f64, with_data));
  if (p.weight.shape[1] != p.in) {
    return fail(FW_INVALID_ARGUMENT, "%s: weight has shape %s, expected [out,%lld]", kOp,
                shape_text(p.weight, found, sizeof found), static_cast<long long>(p.in));
  }
  FW_TRY(check_in("weight", p.weight, p.weight.shape, 2, p.is_f64, with_data));
  if (given(p.bias)) FW_TRY(check_in("bias", p.bias, &p.out, 1, p.is_f64, with_data && direction == FW_FORWARD));

  const int64_t y_shape[] = {p.M, p.out};
  const Named inputs[] = {{"x", &p.x}, {"weight", &p.weight}, {"bias", &p.bias}};
  if (direction == FW_FORWARD) {
    p.y = desc.y;
    return check_out("y", p.y, y_shape, 2, FW_NONE, p.is_f64, with_data, inputs, 3);
  }
  if (!grads) return FW_OK;
  FW_TRY(check_reserved(kOp, "grads.reserved", grads->reserved));
  p.dy = grads->dy;
  p.dx = grads->dx;
  p.dweight = grads->dweight;
  p.dbias = grads->dbias;
  FW_TRY(check_in("dy", p.dy, y_shape, 2, p.is_f64, with_data));
  const Named others[] = {{"x", &p.x}, {"weight", &p.weight}, {"bias", &p.bias}, {"dy", &p.dy},
                          {"dx", &p.dx}, {"dweight", &p.dweight}};
  if (given(p.dx)) FW_TRY(check_out("dx", p.dx, p.x.shape, 2, p.x.dtype, p.is_f64, with_data, others, 4));
  if (given(p.dweight)) {
    FW_TRY(check_out("dweight", p.dweight, p.weight.shape, 2, p.weight.dtype, p.is_f64, with_data, others, 5));
  }
  if (given(p.dbias)) {
    if (!given(p.bias)) return fail(FW_INVALID_ARGUMENT, "%s: dbias is given, but bias is absent", kOp);
    FW_TRY(check_out("dbias", p.dbias, &p.out, 1, p.bias.dtype, p.is_f64, with_data, others, 6));
  }
  return FW_OK;
}

}  // namespace fw::linear
