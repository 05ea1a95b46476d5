// SPDX-License-Identifier: Apache-2.0
// Checks of a caller's fw_form_problem_* and of the plain arguments around it: operation, argument, found, allowed.
#pragma once
#include <math.h>
#include <string.h>

#include "core/status.hpp"
#include "fastweight/forms.h"
#include "ops/forms/problem.hpp"

namespace fw::forms {

constexpr int64_t kMaxSize = 512;  // K, V
constexpr int64_t kMaxTokens = int64_t{1} << 30;
constexpr int64_t kMaxSquare = 16384;  // T where a [T,T] matrix is held; hop counts
constexpr int64_t kMaxInverse = 1024;  // n of a lone inverse

inline fw_status check_range(const char *op, const char *name, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: %s is %lld, allowed %lld to %lld", op, name, static_cast<long long>(value),
              static_cast<long long>(low), static_cast<long long>(high));
}

inline fw_status check_pointer(const char *op, const char *name, const void *pointer) {
  if (pointer) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: %s is a null pointer", op, name);
}

struct Needs {
  bool q;       // an output of the sequence is asked for
  bool square;  // a [T,T] matrix is held
};

template <class Real, class Desc>
fw_status check_problem(const char *op, const Desc *given, Needs needs, Operands<Real> &out) {
  FW_TRY(check_pointer(op, "problem", given));
  Desc d = {};
  constexpr uint32_t kOldest = sizeof(Desc);
  if (given->struct_size < kOldest || given->struct_size > 4096) {
    return fail(FW_INVALID_ARGUMENT, "%s: problem.struct_size is %u, expected %u", op, given->struct_size, kOldest);
  }
  memcpy(&d, given, sizeof d);
  if (d.reserved != 0) return fail(FW_INVALID_ARGUMENT, "%s: problem.reserved is %u, expected 0", op, d.reserved);
  FW_TRY(check_range(op, "gate", d.gate, FW_GATE_NONE, FW_GATE_VECTOR));
  FW_TRY(check_range(op, "erase", d.erase, FW_ERASE_NONE, FW_ERASE_INDEPENDENT));
  FW_TRY(check_range(op, "T", d.T, 0, needs.square ? kMaxSquare : kMaxTokens));
  FW_TRY(check_range(op, "K", d.K, 1, kMaxSize));
  FW_TRY(check_range(op, "V", d.V, 1, kMaxSize));
  if (!isfinite(d.scale)) return fail(FW_INVALID_ARGUMENT, "%s: scale is %g, allowed any finite number", op, d.scale);

  const bool independent = d.erase == FW_ERASE_INDEPENDENT;
  const bool shared = d.erase == FW_ERASE_SHARED_AFTER || d.erase == FW_ERASE_SHARED_BEFORE;
  const struct {
    const char *name;
    const Real *pointer;
    bool required, allowed;
    const char *why_not;
  } arrays[] = {
      {"q", d.q, needs.q, true, ""},
      {"k", d.k, true, true, ""},
      {"v", d.v, true, true, ""},
      {"g", d.g, d.gate != FW_GATE_NONE, d.gate != FW_GATE_NONE, "gate is none"},
      {"a", d.a, independent, independent, "the keys are not independent"},
      {"b", d.b, independent, independent, "the keys are not independent"},
      {"p", d.p, false, shared, "the key is not shared"},
      {"beta", d.beta, false, shared, "the key is not shared"},
      {"erase_gate", d.erase_gate, false, shared, "the key is not shared"},
      {"write_gate", d.write_gate, false, shared, "the key is not shared"},
  };
  for (const auto &array : arrays) {
    if (array.pointer && !array.allowed) {
      return fail(FW_INVALID_ARGUMENT, "%s: %s is given, but %s", op, array.name, array.why_not);
    }
    if (d.T > 0 && array.required) FW_TRY(check_pointer(op, array.name, array.pointer));
  }
  using std::sqrt;
  const Real scale = d.scale == 0 ? Real(1) / sqrt(static_cast<Real>(d.K)) : static_cast<Real>(d.scale);
  out = {d.gate,       d.erase,      d.T, d.K, d.V, scale,          d.q, d.k, d.v, d.p, d.beta,
         d.erase_gate, d.write_gate, d.a, d.b, d.g, d.initial_state};
  return FW_OK;
}

}  // namespace fw::forms
