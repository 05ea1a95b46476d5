// SPDX-License-Identifier: Apache-2.0
// The yardstick: the token loop and its reverse with fp32 state and sums, whose products read states, pseudo-values
// and their gradients rounded to the storage type and q, k, a, b and the finished erase key rounded off the storage
// grid, x -> round(c x) / c. Two runs, c = 1.3, and c = 1.7 with the key axis reversed (not with the normaliser); for
// fp32 storage nothing is rounded and the order of keys is the only difference. linear_attn's form (no gate, no
// erase) has no operand that a decay or an inverse multiplies, so its operands stay on the grid. Why off the grid: a
// chunk computation rounds k exp(G_C - G) and its like, which a token loop never forms; values on the grid would go
// through the loop without any error, and no chunk computation could pass.
#pragma once
#include <algorithm>

#include "harness_call.hpp"
#include "ops/recurrence/checks.hpp"
#include "ops/recurrence/reference.hpp"
#include "ops/recurrence/reference_run.hpp"
#include "tolerances.hpp"

namespace fw::test {

// Nearest even to a significand shortened by `bits`, without limits of the exponent.
inline float shorten(float x, uint32_t bits) {
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t rounded = (u + ((1u << (bits - 1)) - 1u) + ((u >> bits) & 1u)) & ~((1u << bits) - 1u);
  u = (u & 0x7f800000u) == 0x7f800000u ? u : rounded;
  memcpy(&x, &u, 4);
  return x;
}

struct StorageRounding {
  static constexpr bool kIsExact = false;
  uint32_t bits;  // 16: bf16, 13: fp16
  float c;        // 0: operands stay as they are
  float operand(float x) const { return c == 0 ? x : shorten(x * c, bits) / c; }
  float stored(float x) const { return shorten(x, bits); }
};

namespace detail {

// Turns the axis that holds keys round, by a negative stride.
inline void flip(fw_tensor &t, int32_t axis) {
  if (t.dtype == FW_NONE || t.shape[axis] == 0) return;
  t.data = static_cast<char *>(t.data) + (t.shape[axis] - 1) * t.strides[axis] * dtype_size(t.dtype);
  t.strides[axis] = -t.strides[axis];
}
inline void reverse_keys(recurrence::Problem &p) {
  for (fw_tensor *t :
       {&p.q, &p.k, &p.a, &p.b, &p.p, &p.erase_gate, &p.dq, &p.dk, &p.da, &p.db, &p.dp, &p.d_erase_gate}) {
    flip(*t, 3);
  }
  if (p.gate == FW_GATE_VECTOR) {
    for (fw_tensor *t : {&p.g, &p.dg}) flip(*t, 3);
    for (fw_tensor *t : {&p.dt_bias, &p.d_dt_bias}) flip(*t, 1);
  }
  const int32_t key_axis = p.state_layout == FW_STATE_VK ? 3 : 2;
  for (fw_tensor *t : {&p.initial_state, &p.final_state, &p.d_initial_state, &p.d_final_state, &p.state})
    flip(*t, key_axis);
}

}  // namespace detail

// One run, as the caller would get it: every output in its own type.
inline Outputs yardstick_run(const Spec &spec, const Operands &operands, fw_direction direction,
                             const std::vector<int64_t> &indices, bool is_second) {
  static const Context context(nullptr, 1);
  Spec plain = spec;
  plain.strides = 0, plain.form = FW_FORM_AUTO;
  Call call(plain, operands, direction, indices);
  recurrence::Problem p;
  Outputs out;
  out.status =
      recurrence::make_problem(&call.desc, direction == FW_BACKWARD ? &call.grads : nullptr, direction, true, &p);
  EXPECT_EQ(out.status, FW_OK) << fw_last_error() << ": " << text(spec);
  if (out.status != FW_OK) return out;
  if (is_second && !p.has_normalizer) detail::reverse_keys(p);
  std::vector<unsigned char> workspace;
  if (spec.dtype == FW_F32) {
    workspace.resize(recurrence::reference_recurrent_workspace(*context.get(), p));
    recurrence::run_reference_recurrent(*context.get(), p, workspace.data());
  } else {
    const bool is_exact = p.gate == FW_GATE_NONE && p.erase == FW_ERASE_NONE;
    const StorageRounding rounding = {spec.dtype == FW_BF16 ? 16u : 13u, is_exact ? 0.0f : is_second ? 1.7f : 1.3f};
    const recurrence::ReferenceRun<float, StorageRounding> reference(p, rounding);
    workspace.resize(reference.workspace(*context.get()));
    reference.run(*context.get(), workspace.data());
  }
  for (const auto &[name, buffer] : call.outputs) out.values[name] = buffer->values();
  return out;
}

inline double rms(const Values &v) {
  double sum = 0;
  for (double x : v.data) sum += x * x;
  return v.data.empty() ? 0 : sqrt(sum / static_cast<double>(v.data.size()));
}
inline double peak(const Values &v) {
  double most = 0;
  for (double x : v.data) most = fmax(most, fabs(x));
  return most;
}
inline Values difference(const Values &a, const Values &b) {
  Values d = a;
  for (size_t i = 0; i < d.data.size(); ++i) d.data[i] -= b.data[i];
  return d;
}

struct Allowed { double rms, max; };

namespace detail {

// |q dq| or |k dk|: for a vector gate elementwise, for a scalar gate summed over K.
inline Values products(const Spec &s, const Values &x, const Values &dx) {
  Values all = x;
  for (size_t i = 0; i < all.data.size(); ++i) all.data[i] = fabs(x.data[i] * dx.data[i]);
  if (row_of(s).gate == FW_GATE_VECTOR) return all;
  Values sums = make_values({s.B, x.shape[1], s.H});
  for (size_t i = 0; i < all.data.size(); ++i) sums.data[i / static_cast<size_t>(s.K)] += all.data[i];
  return sums;
}

// What is added to dg and to the sums of dg, in RMS and maximum.
inline Allowed gate_allowance(const Spec &spec, const Operands &operands, const Outputs &exact) {
  Spec s = spec;
  Operands given = operands;
  Outputs out = exact;
  if (s.qk_norm != FW_QK_NORM_NONE) {  // the products of the normalised rows
    for (const char *name : {"q", "k", "p"}) {
      if (!given.count(name)) continue;
      std::vector<double> &x = given.at(name).data;
      for (size_t i = 0; i < x.size(); i += static_cast<size_t>(s.K)) {
        recurrence::l2_normalise(&x[i], s.K);
      }
    }
    s.qk_norm = FW_QK_NORM_NONE;
    out = truth(s, given, FW_BACKWARD);
  }
  Allowed all = {0, 0};
  for (const char *name : {"q", "k"}) {
    const Values v = products(s, given.at(name), out.values.at(std::string("d") + name));
    all.rms += kAddedRoundOffs * round_off(FW_F32) * rms(v);
    all.max += kAddedRoundOffs * round_off(FW_F32) * peak(v);
  }
  return all;
}

// Largest slope of the gate's activation, times the number of terms that are summed for a parameter.
inline double gate_slope(const Spec &s, const Operands &operands, const std::string &name) {
  double rate = 1;
  if (operands.count("a_log")) {
    rate = 0;
    for (double x : operands.at("a_log").data) rate = fmax(rate, exp(x));
  }
  double slope = 1;
  if (s.gate_input == FW_GATE_INPUT_SOFTPLUS) slope = rate;
  if (s.gate_input == FW_GATE_INPUT_LOG_SIGMOID) slope = 1.0 / 16;
  if (s.gate_input == FW_GATE_INPUT_BOUNDED) slope = 5 * rate / 4;
  if (s.gate_input == FW_GATE_INPUT_RWKV7) slope = exp(-0.5) / 4;
  if (name == "dg") return slope;
  const double tokens = static_cast<double>(s.B * s.T);
  if (name == "d_dt_bias") return slope * tokens;
  double most = 0;  // d g / d a_log is at most rate (|x| + |dt_bias| + 1) in both activations
  for (double x : operands.at("g").data) most = fmax(most, fabs(x));
  return rate * (most + 3) * tokens * static_cast<double>(row_of(s).gate == FW_GATE_VECTOR ? s.K : 1);
}

}  // namespace detail

// name -> limits of every output, from the truth and both runs of the yardstick on the same rounded operands.
inline std::map<std::string, Allowed> limits(const Spec &spec, const Operands &operands, fw_direction direction,
                                             const Outputs &exact, const std::vector<int64_t> &indices = {}) {
  std::map<std::string, Allowed> errors;
  for (bool is_second : {false, true}) {
    const Outputs run = yardstick_run(spec, operands, direction, indices, is_second);
    for (const auto &[name, values] : exact.values) {
      const Values error = difference(run.values.at(name), values);
      errors[name] = {std::max(errors[name].rms, rms(error)), std::max(errors[name].max, peak(error))};
    }
  }
  double relative_rms = 0, relative_max = 0;
  for (const auto &[name, values] : exact.values) {
    if (rms(values) > 0) relative_rms = std::max(relative_rms, errors[name].rms / rms(values));
    if (peak(values) > 0) relative_max = std::max(relative_max, errors[name].max / peak(values));
  }
  std::map<std::string, Allowed> all;
  const double of_dtype = spec.dtype == FW_F32 ? kFp32Factor : 1.0;
  for (const auto &[name, values] : exact.values) {
    Allowed yard = errors[name];
    if (values.count() < kSmallTensor) yard = {relative_rms * rms(values), relative_max * peak(values)};
    const double factor = factor_of(name) * of_dtype * scatter(values.count());
    const double added = kAddedRoundOffs * round_off(FW_F32);
    Allowed a = {factor * yard.rms + added * rms(values), kMaximumFactor * factor * yard.max + added * peak(values)};
    const fw_dtype stored = dtype_of(spec, name);
    if (is_half(stored)) a.max += round_off(stored) * peak(values);
    if (name == "dg" || name == "d_a_log" || name == "d_dt_bias") {
      const Allowed gate = detail::gate_allowance(spec, operands, exact);
      const double slope = detail::gate_slope(spec, operands, name);
      a.rms += slope * gate.rms;
      a.max += slope * gate.max;
    }
    all[name] = a;
  }
  return all;
}

}  // namespace fw::test
