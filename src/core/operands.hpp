// SPDX-License-Identifier: Apache-2.0
// Checks that operations with a few float operands share. The first operand, x, settles whether a call is fp64 (then
// every operand is, and only reference implementations accept) or any mix of fp32, bf16 and fp16.
#pragma once
#include <stdint.h>

#include "core/status.hpp"
#include "core/tensor.hpp"

namespace fw {

// Shape and dtype of a float operand. expected_dtype FW_NONE: any that goes with is_f64.
inline fw_status check_float(const char *op, const char *name, const fw_tensor &t, const int64_t *shape, int32_t ndim,
                             bool is_f64, bool with_data, fw_dtype expected_dtype = FW_NONE) {
  FW_TRY(check_tensor(op, name, t, shape, ndim, with_data));
  if (expected_dtype != FW_NONE) return check_dtype(op, name, t, &expected_dtype, 1);
  const fw_dtype doubles[] = {FW_F64}, floats[] = {FW_F32, FW_BF16, FW_F16};
  return is_f64 ? check_dtype(op, name, t, doubles, 1) : check_dtype(op, name, t, floats, 3);
}

// x itself: its dtype and number of dimensions are the caller's choice within limits.
inline fw_status check_first(const char *op, const char *name, const fw_tensor &t, int32_t min_dims, int32_t max_dims,
                             bool with_data, bool *is_f64) {
  if (!given(t)) return fail(FW_INVALID_ARGUMENT, "%s: %s is missing", op, name);
  const fw_dtype floats[] = {FW_F32, FW_BF16, FW_F16, FW_F64};
  FW_TRY(check_dtype(op, name, t, floats, 4));
  if (t.ndim < min_dims || t.ndim > max_dims) {
    return fail(FW_INVALID_ARGUMENT, "%s: %s has %d dimensions, allowed %d to %d", op, name, t.ndim, min_dims,
                max_dims);
  }
  *is_f64 = t.dtype == FW_F64;
  return check_tensor(op, name, t, t.shape, t.ndim, with_data);
}

// The output of a forward or a step. It may be absent in a size query; in a backward it is not read and may be
// absent.
inline fw_status check_result(const char *op, const char *name, const fw_tensor &t, const int64_t *shape,
                              int32_t ndim, bool is_f64, bool with_data, fw_direction direction) {
  const bool is_written = direction != FW_BACKWARD;
  if (!given(t) && !(is_written && with_data)) return FW_OK;
  return check_float(op, name, t, shape, ndim, is_f64, with_data && is_written);
}
// What the verb check asks of it.
inline fw_status check_present(const char *op, const char *name, const fw_tensor &t, fw_direction direction) {
  return given(t) || direction == FW_BACKWARD ? FW_OK : fail(FW_INVALID_ARGUMENT, "%s: %s is missing", op, name);
}

struct Operand {
  const char *name;
  const fw_tensor *tensor;
};

// No output overlaps itself and, where memory is known, another output or an input. Absent ones are skipped.
inline fw_status check_outputs(const char *op, const Operand *outputs, int32_t n_outputs, const Operand *inputs,
                               int32_t n_inputs, bool with_data) {
  for (int32_t i = 0; i < n_outputs; ++i) {
    if (!given(*outputs[i].tensor)) continue;
    FW_TRY(check_output(op, outputs[i].name, *outputs[i].tensor));
    if (!with_data) continue;
    for (int32_t j = 0; j < n_inputs; ++j) {
      FW_TRY(check_disjoint(op, outputs[i].name, *outputs[i].tensor, inputs[j].name, *inputs[j].tensor));
    }
    for (int32_t j = 0; j < i; ++j) {
      FW_TRY(check_disjoint(op, outputs[i].name, *outputs[i].tensor, outputs[j].name, *outputs[j].tensor));
    }
  }
  return FW_OK;
}

FW_HOST_DEVICE inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
// A product of sizes for Ledger::take: -1, which it counts as an overflow, when it does not fit.
inline int64_t product(int64_t a, int64_t b) {
  int64_t c;
  return a >= 0 && b >= 0 && mul_fits(a, b, &c) ? c : -1;
}

}  // namespace fw
