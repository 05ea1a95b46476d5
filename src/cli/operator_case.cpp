// SPDX-License-Identifier: Apache-2.0
#include "cli/operator_case.hpp"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "model/error.hpp"
#include "model/sampler.hpp"

namespace fw::cli {
namespace {

using model::check;

// What a row may be given beside q, k, v and the keys of an independent erase.
enum Optional : uint32_t { kBeta = 1, kP = 2, kEraseGate = 4, kWriteGate = 8, kG = 16, kAll = 31 };

// The largest set of those operands with which the library accepts a call of the row.
uint32_t operands_of(fw_op op, fw_gate gate, fw_erase erase, int64_t n_sub) {
  fw_context_options options = {};
  options.struct_size = sizeof options;
  options.n_threads = 1;
  fw_context *context = nullptr;
  check(fw_context_create(&options, &context));
  const int64_t row[] = {1, 1, 1, 1}, rows[] = {1, n_sub, 1, 1};
  uint32_t best = 0;
  int most = -1;
  for (uint32_t set = 0; set <= kAll; ++set) {
    fw_recurrence d = {};
    d.struct_size = sizeof d;
    d.op = op;
    d.n_sub = static_cast<int32_t>(n_sub);
    d.q = fw_dense(nullptr, FW_F32, 4, row);
    d.k = d.v = fw_dense(nullptr, FW_F32, 4, rows);
    if (erase == FW_ERASE_INDEPENDENT) d.a = d.b = d.q;
    if (set & kBeta) d.beta = fw_dense(nullptr, FW_F32, 3, rows);
    if (set & kP) d.p = d.q;
    if (set & kEraseGate) d.erase_gate = d.q;
    if (set & kWriteGate) d.write_gate = d.q;
    if (set & kG) d.g = fw_dense(nullptr, FW_F32, gate == FW_GATE_VECTOR ? 4 : 3, row);
    uint64_t bytes = 0;
    if (fw_recurrence_saved_size(context, &d, &bytes) != FW_OK || __builtin_popcount(set) <= most) continue;
    best = set;
    most = __builtin_popcount(set);
  }
  fw_context_destroy(context);
  if (most < 0) FW_MODEL_FAIL("%s: %s", fw_op_name(op), fw_last_error());
  return best;
}

struct NamedType {
  const char *name;
  fw_dtype dtype;
  uint64_t size;
};
constexpr NamedType kTypes[] = {{"f32", FW_F32, 4}, {"bf16", FW_BF16, 2}, {"f16", FW_F16, 2}, {"f64", FW_F64, 8}};
constexpr const char *kDirections[] = {"forward", "backward", "step"};

const NamedType &type_of(fw_dtype dtype) {
  for (const NamedType &type : kTypes) {
    if (type.dtype == dtype) return type;
  }
  return kTypes[0];
}

int64_t count(const fw_tensor &t) {
  int64_t n = 1;
  for (int32_t i = 0; i < t.ndim; ++i) n *= t.shape[i];
  return n;
}

uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Within the range of the operands here (|x| below 16); smaller than the smallest normal number becomes 0.
uint16_t to_f16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude < 0x38800000) return static_cast<uint16_t>(sign);
  const uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

float from_f16(uint16_t half) {
  const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
  const float magnitude = exponent == 0
                              ? ldexpf(static_cast<float>(fraction), -24)
                              : ldexpf(static_cast<float>(fraction + 1024), static_cast<int>(exponent) - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

double get(const fw_tensor &t, int64_t i) {
  switch (t.dtype) {
    case FW_F64: return static_cast<const double *>(t.data)[i];
    case FW_BF16: return from_bf16(static_cast<const uint16_t *>(t.data)[i]);
    case FW_F16: return from_f16(static_cast<const uint16_t *>(t.data)[i]);
    default: return static_cast<const float *>(t.data)[i];
  }
}

void put(const fw_tensor &t, int64_t i, double value) {
  switch (t.dtype) {
    case FW_F64: static_cast<double *>(t.data)[i] = value; break;
    case FW_BF16: static_cast<uint16_t *>(t.data)[i] = to_bf16(static_cast<float>(value)); break;
    case FW_F16: static_cast<uint16_t *>(t.data)[i] = to_f16(static_cast<float>(value)); break;
    default: static_cast<float *>(t.data)[i] = static_cast<float>(value);
  }
}

std::vector<double> values(const fw_tensor &t) {
  std::vector<double> out;
  for (int64_t i = 0; i < count(t); ++i) out.push_back(get(t, i));
  return out;
}

double relative_difference(const std::vector<double> &a, const std::vector<double> &reference) {
  double largest = 0, square = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const double difference = fabs(a[i] - reference[i]);
    if (!(difference <= largest)) largest = difference;
    if (largest != largest) return largest;
    square += reference[i] * reference[i];
  }
  return square > 0 ? largest / sqrt(square / static_cast<double>(reference.size())) : largest;
}

constexpr fw_tensor fw_recurrence::*kInputs[] = {
    &fw_recurrence::q, &fw_recurrence::k,   &fw_recurrence::v,          &fw_recurrence::a,
    &fw_recurrence::b, &fw_recurrence::p,   &fw_recurrence::erase_gate, &fw_recurrence::write_gate,
    &fw_recurrence::g, &fw_recurrence::beta};

// The gradients of those inputs, in the same order.
constexpr fw_tensor fw_recurrence_grads::*kGradients[] = {
    &fw_recurrence_grads::dq,           &fw_recurrence_grads::dk,           &fw_recurrence_grads::dv,
    &fw_recurrence_grads::da,           &fw_recurrence_grads::db,           &fw_recurrence_grads::dp,
    &fw_recurrence_grads::d_erase_gate, &fw_recurrence_grads::d_write_gate, &fw_recurrence_grads::dg,
    &fw_recurrence_grads::dbeta};
constexpr size_t kInputCount = sizeof kInputs / sizeof kInputs[0];
static_assert(kInputCount == sizeof kGradients / sizeof kGradients[0]);

}  // namespace

fw_dtype dtype_named(const std::string &name) {
  for (const NamedType &type : kTypes) {
    if (name == type.name && type.dtype != FW_F64) return type.dtype;
  }
  FW_MODEL_FAIL("dtype is %s, allowed f32, bf16 and f16", model::quote(name).c_str());
}

const char *dtype_name(fw_dtype dtype) { return type_of(dtype).name; }

fw_op op_named(const std::string &name) {
  std::string names;
  for (fw_op op = 1; op < FW_OP_COUNT; ++op) {
    if (name == fw_op_name(op)) return op;
    names += std::string(op > 1 ? ", " : "") + fw_op_name(op);
  }
  FW_MODEL_FAIL("operator is %s, allowed %s", model::quote(name).c_str(), names.c_str());
}

fw_direction direction_named(const std::string &name) {
  for (int32_t i = 0; i < 3; ++i) {
    if (name == kDirections[i]) return i;
  }
  FW_MODEL_FAIL("direction is %s, allowed forward, backward and step", model::quote(name).c_str());
}

const char *direction_name(fw_direction direction) { return kDirections[direction]; }

OperatorCase::OperatorCase(fw_op op, fw_dtype dtype, const CaseSize &z, bool with_data) : has_data_(with_data) {
  fw_gate gate = FW_GATE_NONE;
  fw_erase erase = FW_ERASE_NONE;
  check(fw_op_axes(op, &gate, &erase));
  const int64_t n_sub = op == FW_OP_GATED_DELTA_PRODUCT ? 2 : 1, R = z.T * n_sub;
  fw_recurrence &d = desc_;
  d.struct_size = sizeof d;
  d.op = op;
  d.n_sub = static_cast<int32_t>(n_sub);
  d.q = unit_rows({z.B, z.T, z.H, z.K}, dtype);
  d.k = unit_rows({z.B, R, z.H, z.K}, dtype);
  d.v = random({z.B, R, z.HV, z.V}, dtype, -1, 1);
  const uint32_t operands = operands_of(op, gate, erase, n_sub);
  if ((operands & kG) && gate == FW_GATE_SCALAR) d.g = random({z.B, z.T, z.HV}, FW_F32, -0.2, 0);
  if ((operands & kG) && gate == FW_GATE_VECTOR) d.g = random({z.B, z.T, z.HV, z.K}, FW_F32, -0.2, 0);
  if (operands & kBeta) d.beta = random({z.B, R, z.HV}, FW_F32, 0, 1);
  if (operands & kP) d.p = unit_rows({z.B, z.T, z.H, z.K}, dtype);
  if (operands & kEraseGate) d.erase_gate = random({z.B, z.T, z.H, z.K}, dtype, 0, 1);
  if (operands & kWriteGate) d.write_gate = random({z.B, z.T, z.HV, z.V}, dtype, 0, 1);
  if (erase == FW_ERASE_INDEPENDENT) {
    d.a = unit_rows({z.B, z.T, z.H, z.K}, dtype);
    d.b = tensor({z.B, z.T, z.H, z.K}, dtype);
    // b = -a/2 forgets half of what a reads, so that the state stays bounded
    for (int64_t i = 0; has_data_ && i < count(d.b); ++i) put(d.b, i, -0.5 * get(d.a, i));
  }
  initial_ = random({z.B, z.HV, z.K, z.V}, FW_F32, -1, 1);
  final_ = tensor({z.B, z.HV, z.K, z.V}, FW_F32);
  state_ = tensor({z.B, z.HV, z.K, z.V}, FW_F32);
  d.o = tensor({z.B, z.T, z.HV, z.V}, dtype);
}

double OperatorCase::uniform() { return model::uniform_draw(7, random_++); }

fw_tensor OperatorCase::tensor(std::initializer_list<int64_t> shape, fw_dtype dtype) {
  fw_tensor t = fw_dense(nullptr, dtype, static_cast<int32_t>(shape.size()), shape.begin());
  if (has_data_) {
    owned_.emplace_back(static_cast<uint64_t>(count(t)) * type_of(dtype).size);
    t.data = owned_.back().data();
  }
  return t;
}

fw_tensor OperatorCase::random(std::initializer_list<int64_t> shape, fw_dtype dtype, double low, double high) {
  const fw_tensor t = tensor(shape, dtype);
  for (int64_t i = 0; has_data_ && i < count(t); ++i) put(t, i, low + (high - low) * uniform());
  return t;
}

fw_tensor OperatorCase::unit_rows(std::initializer_list<int64_t> shape, fw_dtype dtype) {
  const fw_tensor t = random(shape, dtype, -1, 1);
  const int64_t size = t.shape[t.ndim - 1];
  for (int64_t row = 0; has_data_ && row < count(t); row += size) {
    double square = 1e-12;
    for (int64_t i = 0; i < size; ++i) square += get(t, row + i) * get(t, row + i);
    for (int64_t i = 0; i < size; ++i) put(t, row + i, get(t, row + i) / sqrt(square));
  }
  return t;
}

fw_recurrence OperatorCase::forward() const {
  fw_recurrence d = desc_;
  d.initial_state = initial_;
  d.final_state = final_;
  return d;
}

fw_recurrence OperatorCase::step() const {
  fw_recurrence d = desc_;
  d.state = state_;
  return d;
}

void OperatorCase::reset_state() {
  memcpy(state_.data, initial_.data, static_cast<size_t>(count(state_)) * sizeof(float));
}

// d_o and the final state's gradient at random, room for the gradient of every operand and of the initial state.
void OperatorCase::make_gradients() {
  if (grads_.struct_size != 0) return;
  grads_.struct_size = sizeof grads_;
  const auto like = [&](const fw_tensor &t) {
    fw_tensor made = t;
    if (t.dtype == FW_NONE) return made;
    owned_.emplace_back(static_cast<uint64_t>(count(t)) * type_of(t.dtype).size);
    made.data = owned_.back().data();
    return made;
  };
  const auto filled = [&](const fw_tensor &t) {
    const fw_tensor made = like(t);
    for (int64_t i = 0; i < count(made); ++i) put(made, i, 2 * uniform() - 1);
    return made;
  };
  grads_.d_o = filled(desc_.o);
  grads_.d_final_state = filled(final_);
  for (size_t i = 0; i < kInputCount; ++i) grads_.*kGradients[i] = like(desc_.*kInputs[i]);
  grads_.d_initial_state = like(initial_);
}

void OperatorCase::run(fw_context *context, fw_direction direction) {
  if (direction == FW_BACKWARD) make_gradients();
  const fw_recurrence d = direction == FW_STEP ? step() : forward();
  uint64_t bytes = 0;
  check(fw_recurrence_workspace_size(context, &d, direction, &bytes));
  if (bytes > workspace_.size()) workspace_ = model::Buffer(bytes);
  if (direction == FW_STEP) {
    check(fw_recurrence_step(context, &d, workspace_.data(), workspace_.size()));
  } else if (direction == FW_BACKWARD) {
    check(fw_recurrence_backward(context, &d, &grads_, workspace_.data(), workspace_.size()));
  } else {
    check(fw_recurrence_forward(context, &d, workspace_.data(), workspace_.size()));
  }
}

void OperatorCase::run_reference(fw_context *context) {
  if (!reference_o_.empty()) return;
  OperatorCase wide(*this, FW_F64);
  wide.run(context, FW_FORWARD);
  reference_o_ = values(wide.desc_.o);
  reference_state_ = values(wide.final_);
}

// The same values in another type.
OperatorCase::OperatorCase(const OperatorCase &other, fw_dtype dtype) : desc_(other.desc_), has_data_(true) {
  const auto copy = [&](fw_tensor &t) {
    if (t.dtype == FW_NONE) return;
    const fw_tensor from = t;
    owned_.emplace_back(static_cast<uint64_t>(count(t)) * type_of(dtype).size);
    t.data = owned_.back().data();
    t.dtype = dtype;
    for (int64_t i = 0; i < count(t); ++i) put(t, i, get(from, i));
  };
  initial_ = other.initial_;
  final_ = other.final_;
  for (fw_tensor *t : {&initial_, &final_, &desc_.o}) copy(*t);
  for (const auto input : kInputs) copy(desc_.*input);
  grads_ = other.grads_;
  for (fw_tensor *t : {&grads_.d_o, &grads_.d_final_state, &grads_.d_initial_state}) copy(*t);
  for (const auto gradient : kGradients) copy(grads_.*gradient);
}

double OperatorCase::error(const fw_tensor &o, const fw_tensor &state) const {
  return std::max(relative_difference(values(o), reference_o_), relative_difference(values(state), reference_state_));
}

double OperatorCase::error_of_forward(fw_context *context) {
  run_reference(context);
  run(context, FW_FORWARD);
  return error(desc_.o, final_);
}

double OperatorCase::error_of_step(fw_context *context) {
  run_reference(context);
  reset_state();
  run(context, FW_STEP);
  return error(desc_.o, state_);
}

double OperatorCase::error_of_backward(fw_context *context) {
  run(context, FW_BACKWARD);
  OperatorCase wide(*this, FW_F64);
  wide.run(context, FW_BACKWARD);
  const auto difference = [&](fw_tensor fw_recurrence_grads::*member) {
    return relative_difference(values(grads_.*member), values(wide.grads_.*member));
  };
  double worst = difference(&fw_recurrence_grads::d_initial_state);
  for (size_t i = 0; i < kInputCount; ++i) {
    if ((desc_.*kInputs[i]).dtype == FW_NONE) continue;
    const double one = difference(kGradients[i]);
    if (!(one <= worst)) worst = one;
  }
  return worst;
}

}  // namespace fw::cli
