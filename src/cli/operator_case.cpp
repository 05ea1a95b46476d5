// SPDX-License-Identifier: Apache-2.0
#include "cli/operator_case.hpp"

#include <math.h>
#include <string.h>

#include <algorithm>

#include "model/error.hpp"

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

constexpr const char *kDirections[] = {"forward", "backward", "step"};

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

OperatorCase::OperatorCase(fw_op op, fw_dtype dtype, const CaseSize &z, bool with_data) : make_(with_data) {
  fw_gate gate = FW_GATE_NONE;
  fw_erase erase = FW_ERASE_NONE;
  check(fw_op_axes(op, &gate, &erase));
  const int64_t n_sub = op == FW_OP_GATED_DELTA_PRODUCT ? 2 : 1, R = z.T * n_sub;
  fw_recurrence &d = desc_;
  d.struct_size = sizeof d;
  d.op = op;
  d.n_sub = static_cast<int32_t>(n_sub);
  d.q = make_.unit_rows({z.B, z.T, z.H, z.K}, dtype);
  d.k = make_.unit_rows({z.B, R, z.H, z.K}, dtype);
  d.v = make_.random({z.B, R, z.HV, z.V}, dtype, -1, 1);
  const uint32_t operands = operands_of(op, gate, erase, n_sub);
  if ((operands & kG) && gate == FW_GATE_SCALAR) d.g = make_.random({z.B, z.T, z.HV}, FW_F32, -0.2, 0);
  if ((operands & kG) && gate == FW_GATE_VECTOR) d.g = make_.random({z.B, z.T, z.HV, z.K}, FW_F32, -0.2, 0);
  if (operands & kBeta) d.beta = make_.random({z.B, R, z.HV}, FW_F32, 0, 1);
  if (operands & kP) d.p = make_.unit_rows({z.B, z.T, z.H, z.K}, dtype);
  if (operands & kEraseGate) d.erase_gate = make_.random({z.B, z.T, z.H, z.K}, dtype, 0, 1);
  if (operands & kWriteGate) d.write_gate = make_.random({z.B, z.T, z.HV, z.V}, dtype, 0, 1);
  if (erase == FW_ERASE_INDEPENDENT) {
    d.a = make_.unit_rows({z.B, z.T, z.H, z.K}, dtype);
    d.b = make_.tensor({z.B, z.T, z.H, z.K}, dtype);
    // b = -a/2 forgets half of what a reads, so that the state stays bounded
    for (int64_t i = 0; make_.has_data() && i < count(d.b); ++i) put(d.b, i, -0.5 * get(d.a, i));
  }
  initial_ = make_.random({z.B, z.HV, z.K, z.V}, FW_F32, -1, 1);
  final_ = make_.tensor({z.B, z.HV, z.K, z.V}, FW_F32);
  state_ = make_.tensor({z.B, z.HV, z.K, z.V}, FW_F32);
  d.o = make_.tensor({z.B, z.T, z.HV, z.V}, dtype);
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
  grads_.d_o = make_.random_like(desc_.o);
  grads_.d_final_state = make_.random_like(final_);
  for (size_t i = 0; i < kInputCount; ++i) grads_.*kGradients[i] = make_.like(desc_.*kInputs[i]);
  grads_.d_initial_state = make_.like(initial_);
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
OperatorCase::OperatorCase(const OperatorCase &other, fw_dtype dtype) : desc_(other.desc_), make_(true) {
  const auto copy = [&](fw_tensor &t) { t = make_.copy_as(t, dtype); };
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

Work OperatorCase::work(fw_direction direction) {
  fw_gate gate = FW_GATE_NONE;
  fw_erase erase = FW_ERASE_NONE;
  check(fw_op_axes(desc_.op, &gate, &erase));
  const double products[][2] = {{2, 5}, {3, 8}, {4, 10}};  // forward or step, backward
  const int kind = erase == FW_ERASE_NONE ? 0 : erase == FW_ERASE_INDEPENDENT ? 2 : 1;
  const double rows = static_cast<double>(count(desc_.v)) / static_cast<double>(desc_.v.shape[3]);
  const double state = static_cast<double>(desc_.q.shape[3] * desc_.v.shape[3]);
  Work work = {0, 2 * products[kind][direction == FW_BACKWARD] * state * rows};
  for (const auto input : kInputs) work.bytes += static_cast<double>(bytes_of(desc_.*input));
  if (direction == FW_BACKWARD) {
    make_gradients();
    for (const auto gradient : kGradients) work.bytes += static_cast<double>(bytes_of(grads_.*gradient));
    for (const fw_tensor &t : {grads_.d_o, grads_.d_final_state, grads_.d_initial_state, initial_}) {
      work.bytes += static_cast<double>(bytes_of(t));
    }
  } else {  // the state once in and once out
    work.bytes += static_cast<double>(bytes_of(desc_.o) + 2 * bytes_of(state_));
  }
  return work;
}

}  // namespace fw::cli
