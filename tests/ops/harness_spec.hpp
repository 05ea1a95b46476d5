// SPDX-License-Identifier: Apache-2.0
// A test case is a Spec: a handful of integers that name an operator, sizes, types, layouts, a regime of the data and
// a seed. Its text is the repro line. generate() makes the operands, rounded to the types in which they will be
// given.
#pragma once
#include <map>
#include <string>

#include "fastweight/recurrence.h"
#include "harness_tensor.hpp"
#include "ops/recurrence/catalogue.hpp"

namespace fw::test {

enum Regime : int64_t {
  kDefault = 0, kStrongGates = 1, kSimilarKeys = 2, kHold = 3, kOneSign = 4, kNoGate = 5, kUnnormalised = 6,
  kRegimeCount = 7
};

struct Spec {
  int64_t op = FW_OP_GATED_DELTA_RULE, gate = 0, erase = 0;  // gate, erase: by axes only
  int64_t operands = 0;  // optional operands that are given, as bits of catalogue.hpp
  int64_t B = 1, T = 13, H = 1, group = 1, K = 5, V = 7, n_sub = 1;
  int64_t pack = 0, tail = 0;  // sequences in the pack (0: no cu_seqlens); rows of no sequence behind it
  int64_t dtype = FW_F32, gate_dtype = FW_F32, state_dtype = FW_F32, o_dtype = FW_NONE;  // FW_NONE: dtype
  int64_t layout = FW_STATE_KV, normalizer = 0, qk_norm = 0, gate_input = 0, beta_input = 0, parameters = 0;
  int64_t regime = kDefault, strides = 0, initial = 1, final = 1, form = FW_FORM_AUTO, scale_milli = 0;
  int64_t layer_idx = 0, num_layers = 0, seed = 1;
  std::vector<int64_t> offsets;  // of the pack, when they are not drawn from the seed; not part of the text

  int64_t HV() const { return H * group; }
  int64_t R() const { return T * n_sub; }
  int64_t N() const { return pack > 0 ? pack : B; }
};

struct SpecField { const char *name; int64_t Spec::*member; };
inline const std::vector<SpecField> &spec_fields() {
  static const std::vector<SpecField> fields = {{"op", &Spec::op},
                                                {"gate", &Spec::gate},
                                                {"erase", &Spec::erase},
                                                {"operands", &Spec::operands},
                                                {"B", &Spec::B},
                                                {"T", &Spec::T},
                                                {"H", &Spec::H},
                                                {"group", &Spec::group},
                                                {"K", &Spec::K},
                                                {"V", &Spec::V},
                                                {"n_sub", &Spec::n_sub},
                                                {"pack", &Spec::pack},
                                                {"tail", &Spec::tail},
                                                {"dtype", &Spec::dtype},
                                                {"gate_dtype", &Spec::gate_dtype},
                                                {"state_dtype", &Spec::state_dtype},
                                                {"o_dtype", &Spec::o_dtype},
                                                {"layout", &Spec::layout},
                                                {"normalizer", &Spec::normalizer},
                                                {"qk_norm", &Spec::qk_norm},
                                                {"gate_input", &Spec::gate_input},
                                                {"beta_input", &Spec::beta_input},
                                                {"parameters", &Spec::parameters},
                                                {"regime", &Spec::regime},
                                                {"strides", &Spec::strides},
                                                {"initial", &Spec::initial},
                                                {"final", &Spec::final},
                                                {"form", &Spec::form},
                                                {"scale_milli", &Spec::scale_milli},
                                                {"layer_idx", &Spec::layer_idx},
                                                {"num_layers", &Spec::num_layers},
                                                {"seed", &Spec::seed}};
  return fields;
}

// Fields that differ from the default Spec, "op=9 T=37 seed=4".
inline std::string text(const Spec &spec) {
  const Spec usual;
  std::string line;
  for (const SpecField &field : spec_fields()) {
    if (spec.*field.member == usual.*field.member) continue;
    line.append(line.empty() ? "" : " ").append(field.name).append("=").append(std::to_string(spec.*field.member));
  }
  return line;
}
inline Spec parse_spec(const std::string &line) {
  Spec spec;
  for (const SpecField &field : spec_fields()) {
    std::string key = " ";
    key.append(field.name).append("=");
    std::string padded = " ";
    padded.append(line);
    const size_t at = padded.find(key);
    if (at != std::string::npos) spec.*field.member = strtoll(padded.c_str() + at + key.size(), nullptr, 10);
  }
  return spec;
}

inline recurrence::Row row_of(const Spec &s) {
  if (s.op == FW_OP_BY_AXES)
    return recurrence::axes_row(static_cast<fw_gate>(s.gate), static_cast<fw_erase>(s.erase));
  return *recurrence::find_row(static_cast<fw_op>(s.op));
}
inline bool takes(const Spec &s, uint32_t operand) {
  const recurrence::Row row = row_of(s);
  return (row.required & operand) || (row.optional & static_cast<uint32_t>(s.operands) & operand);
}
inline bool has_gate_tensor(const Spec &s) { return takes(s, recurrence::kG); }
inline bool erases(const Spec &s) { return row_of(s).erase != FW_ERASE_NONE; }
inline bool is_independent(const Spec &s) { return row_of(s).erase == FW_ERASE_INDEPENDENT; }

// Offsets of the pack: random lengths, the second sequence empty when there are three or more.
inline std::vector<int64_t> offsets_of(const Spec &s) {
  if (!s.offsets.empty()) return s.offsets;
  std::vector<int64_t> at = {0};
  Random random(static_cast<uint64_t>(s.seed) + 77);
  const int64_t rows = s.T - s.tail;
  for (int64_t n = 1; n < s.pack; ++n) {
    const bool is_empty = n == 2 && s.pack >= 3;
    at.push_back(is_empty ? at.back() : random.integer(at.back(), rows));
  }
  at.push_back(rows);
  return at;
}

using Operands = std::map<std::string, Values>;

namespace detail {

struct Generator {
  const Spec &s;
  Random random;

  double normal() { return s.regime == kOneSign ? fabs(random.normal()) : random.normal(); }
  void fill_normal(Values &v, double factor) {
    for (double &x : v.data) x = factor * normal();
  }
  // Rows of unit length; similar keys share a direction, so that their mean cosine is 0.9.
  Values unit_rows(const std::vector<int64_t> &shape, bool is_positive, bool is_normalised_inside) {
    Values v = make_values(shape);
    const int64_t K = shape.back(), heads = shape[2], rows = shape[1];
    for (int64_t b = 0; b < shape[0]; ++b) {
      for (int64_t h = 0; h < heads; ++h) {
        std::vector<double> shared(static_cast<size_t>(K));
        for (double &x : shared) x = normal();
        for (int64_t t = 0; t < rows; ++t) {
          double *row = &v.data[static_cast<size_t>(((b * rows + t) * heads + h) * K)];
          double sum = 0;
          for (int64_t i = 0; i < K; ++i) {
            row[i] = s.regime == kSimilarKeys ? sqrt(0.9) * shared[static_cast<size_t>(i)] + sqrt(0.1) * normal()
                                              : normal();
            if (is_positive) row[i] = fabs(row[i]);
            sum += row[i] * row[i];
          }
          double length = s.regime == kUnnormalised ? random.uniform(0.5, 1.35) : 1.0;
          if (is_normalised_inside) length = random.uniform(0.5, 4.0);
          for (int64_t i = 0; i < K; ++i) row[i] *= length / sqrt(sum + 1e-30);
        }
      }
    }
    return v;
  }
  double strength() {
    if (s.regime == kSimilarKeys) return random.uniform(0.9, 1.0);
    if (s.regime == kHold) return 0.02;
    return random.uniform(0.05, 0.95);
  }
  double log_decay() {
    if (s.regime == kNoGate) return 0;
    if (s.regime == kHold) return -1e-3;
    if (s.regime == kSimilarKeys || s.regime == kOneSign) return -random.uniform(0.0, 0.05);
    if (s.regime == kStrongGates) {
      const double which = random.uniform();
      return which < 0.7 ? -random.uniform(0.0, 10.0) : which < 0.8 ? -80.0 : which < 0.9 ? -1e-8 : 0.0;
    }
    return -log1p(exp(-(random.normal() + 2.0)));
  }
  double gate_element() {
    if (s.gate_input == FW_GATE_INPUT_LOG_DECAY) return log_decay();
    if (s.regime == kHold || s.regime == kNoGate) return s.gate_input == FW_GATE_INPUT_LOG_SIGMOID ? 7.0 : -7.0;
    return (s.regime == kStrongGates ? 4.0 : 1.0) * random.normal();
  }
  double beta_element() {
    const double beta = strength();
    if (s.beta_input == FW_BETA_INPUT_PLAIN) return beta;
    return log(beta / (1 - beta)) * 0.9;
  }
};

}  // namespace detail

// Operands, incoming states and incoming gradients, under the names of recurrence.h. `is_step`: state and state_z in
// place of initial_state and initial_z.
inline Operands generate(const Spec &s, bool is_step = false) {
  using namespace recurrence;
  detail::Generator g = {s, Random(static_cast<uint64_t>(s.seed))};
  const bool is_positive = s.normalizer != 0;
  const std::vector<int64_t> query = {s.B, s.T, s.H, s.K}, key = {s.B, s.R(), s.H, s.K},
                             value = {s.B, s.R(), s.HV(), s.V};
  Operands all;
  all["q"] = make_values(query);
  g.fill_normal(all["q"], 1);
  for (double &x : all["q"].data) x = is_positive ? fabs(x) : x;
  all["k"] = g.unit_rows(key, is_positive, s.qk_norm != FW_QK_NORM_NONE);
  all["v"] = make_values(value);
  g.fill_normal(all["v"], 1);
  if (takes(s, kA)) {
    all["b"] = g.unit_rows(key, false, false);
    all["a"] = all["b"];
    for (double &x : all["a"].data) x = -x;
    for (size_t i = 0, row = static_cast<size_t>(s.K); i < all["b"].data.size(); i += row) {
      const double beta = g.strength();
      for (size_t j = i; j < i + row; ++j) {
        all["b"].data[j] = beta * all["b"].data[j] + 0.02 * g.normal() / sqrt(static_cast<double>(s.K));
      }
    }
  }
  if (takes(s, kP)) {
    all["p"] = all["k"];
    for (double &x : all["p"].data) x += 0.3 * g.normal() / sqrt(static_cast<double>(s.K));
  }
  if (takes(s, kEraseGate)) all["erase_gate"] = make_values(key);
  if (takes(s, kWriteGate)) all["write_gate"] = make_values(value);
  for (const char *name : {"erase_gate", "write_gate"}) {
    if (all.count(name)) for (double &x : all[name].data) x = g.strength();
  }
  if (takes(s, kG)) {
    std::vector<int64_t> shape = {s.B, s.T, s.HV()};
    if (row_of(s).gate == FW_GATE_VECTOR) shape.push_back(s.K);
    all["g"] = make_values(shape);
    for (double &x : all["g"].data) x = g.gate_element();
    if (s.parameters) {
      all["a_log"] = make_values({s.HV()});
      for (double &x : all["a_log"].data) x = g.random.uniform(-1, 0.5);
      all["dt_bias"] = make_values(row_of(s).gate == FW_GATE_VECTOR ? std::vector<int64_t>{s.HV(), s.K}
                                                                   : std::vector<int64_t>{s.HV()});
      for (double &x : all["dt_bias"].data) x = 0.5 * g.random.normal();
    }
  }
  if (takes(s, kBeta)) {
    all["beta"] = make_values({s.B, s.R(), s.HV()});
    for (double &x : all["beta"].data) x = g.beta_element();
  }
  const bool is_vk = s.layout == FW_STATE_VK;
  const int64_t slots = s.N() + (is_step ? 2 : 0);
  const std::vector<int64_t> state = {slots, s.HV(), is_vk ? s.V : s.K, is_vk ? s.K : s.V};
  const double held = s.regime == kHold ? 30 : 1;
  const char *state_name = is_step ? "state" : "initial_state", *z_name = is_step ? "state_z" : "initial_z";
  if (s.initial || is_step) {
    all[state_name] = make_values(state);
    g.fill_normal(all[state_name], held);
  }
  if (s.normalizer && (s.initial || is_step)) {
    all[z_name] = make_values({slots, s.H, s.K});
    for (double &x : all[z_name].data) x = g.random.uniform(0.2, 1.0);
  }
  all["d_o"] = make_values({s.B, s.T, s.HV(), s.V});
  g.fill_normal(all["d_o"], 1);
  if (s.final) {
    all["d_final_state"] = make_values(state);
    g.fill_normal(all["d_final_state"], held);
    if (s.normalizer) {
      all["d_final_z"] = make_values({slots, s.H, s.K});
      g.fill_normal(all["d_final_z"], 1);
    }
  }
  if (static_cast<Strides>(s.strides) == Strides::kBroadcast) {  // one row for all tokens, of what has rows
    for (auto &[name, v] : all) {
      if (v.shape.size() < 3 || name.find("state") != std::string::npos || name.find("_z") != std::string::npos)
        continue;
      const int64_t inner = v.count() / (v.shape[0] * v.shape[1] > 0 ? v.shape[0] * v.shape[1] : 1);
      for (int64_t i = 0; i < v.count(); ++i) {
        const int64_t batch = i / (v.shape[1] * inner);
        v.data[static_cast<size_t>(i)] = v.data[static_cast<size_t>(batch * v.shape[1] * inner + i % inner)];
      }
    }
  }
  return all;
}

// The type in which an operand or its gradient is stored.
inline fw_dtype dtype_of(const Spec &s, const std::string &name) {
  if (name == "o" || name == "d_o") return static_cast<fw_dtype>(s.o_dtype == FW_NONE ? s.dtype : s.o_dtype);
  if (name == "g" || name == "beta" || name == "dg" || name == "dbeta") return static_cast<fw_dtype>(s.gate_dtype);
  if (name == "initial_state" || name == "d_initial_state" || name == "state")
    return static_cast<fw_dtype>(s.state_dtype);
  for (const char *plain : {"a_log", "dt_bias", "d_a_log", "d_dt_bias", "final_state", "d_final_state", "initial_z",
                            "final_z", "d_initial_z", "d_final_z", "state_z"}) {
    if (name == plain) return s.dtype == FW_F64 ? FW_F64 : FW_F32;
  }
  return static_cast<fw_dtype>(s.dtype);
}
inline void round_operands(const Spec &s, Operands &all) {
  for (auto &[name, values] : all) round_to(dtype_of(s, name), values);
}

}  // namespace fw::test
