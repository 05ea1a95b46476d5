// SPDX-License-Identifier: Apache-2.0
// Lists of Specs that the tests run over: every catalogue row, every call by axes, and the options of each row.
#pragma once
#include "harness_call.hpp"

namespace fw::test {

// One a catalogue row, small sizes that all differ, K != V, HV = 2H, T odd.
inline Spec spec_of(int64_t op) {
  Spec s;
  s.op = op;
  s.B = 2, s.T = 7, s.H = 2, s.group = 2, s.K = 5, s.V = 3;
  if (op == FW_OP_GATED_DELTA_PRODUCT) s.n_sub = 3, s.operands = recurrence::kG;
  if (op == FW_OP_LIGHTNING) s.layer_idx = 1, s.num_layers = 3;
  s.seed = 100 + op;
  return s;
}

inline std::string row_name(const Spec &s) {
  if (s.op != FW_OP_BY_AXES) return row_of(s).name;
  static const char *const gates[] = {"none", "scalar", "vector"};
  static const char *const erases[] = {"none", "after", "before", "independent"};
  return std::string("by_axes_") + gates[s.gate] + "_" + erases[s.erase];
}

inline std::vector<Spec> named_rows() {
  std::vector<Spec> all;
  for (int64_t op = 1; op < FW_OP_COUNT; ++op) all.push_back(spec_of(op));
  return all;
}
// Gate x erase with no optional operand, with each alone, and with all of them.
inline std::vector<Spec> axes_rows() {
  using namespace recurrence;
  std::vector<Spec> all;
  for (int64_t gate = 0; gate <= FW_GATE_VECTOR; ++gate) {
    for (int64_t erase = 0; erase <= FW_ERASE_INDEPENDENT; ++erase) {
      const bool is_shared = erase == FW_ERASE_SHARED_AFTER || erase == FW_ERASE_SHARED_BEFORE;
      for (uint32_t operands : {uint32_t{kBeta}, uint32_t{0}, uint32_t{kP}, uint32_t{kEraseGate},
                                uint32_t{kWriteGate}, kBeta | kP | kEraseGate | kWriteGate}) {
        if (!is_shared && operands != 0) continue;
        Spec s = spec_of(FW_OP_BY_AXES);
        s.gate = gate, s.erase = erase, s.operands = operands;
        s.seed = 200 + gate * 100 + erase * 20 + operands;
        all.push_back(s);
      }
    }
  }
  return all;
}
// What a row allows beside its operands: packing, layouts, norms, activations, the normaliser, sub-steps.
inline std::vector<Spec> option_rows() {
  std::vector<Spec> all;
  for (const Spec &row : named_rows()) {
    Spec s = row;
    s.B = 1, s.T = 17, s.pack = 4, s.tail = 2, s.layout = FW_STATE_VK, s.seed += 1000;
    all.push_back(s);
    s = row;
    s.initial = 0, s.seed += 2000, s.scale_milli = 700;
    all.push_back(s);
    s.final = 0;
    all.push_back(s);
    s = row;
    s.qk_norm = FW_QK_NORM_L2, s.seed += 3000;
    all.push_back(s);
    for (int64_t input = 1; has_gate_tensor(row) && input <= FW_GATE_INPUT_RWKV7; ++input) {
      const bool may_have_parameters = input == FW_GATE_INPUT_SOFTPLUS || input == FW_GATE_INPUT_BOUNDED;
      for (int64_t parameters = 0; parameters <= (may_have_parameters ? 1 : 0); ++parameters) {
        s = row;
        s.gate_input = input, s.parameters = parameters, s.seed += 4000 + 10 * input;
        all.push_back(s);
      }
    }
    for (int64_t input = 1; takes(row, recurrence::kBeta) && input <= FW_BETA_INPUT_SIGMOID_TWICE; ++input) {
      s = row;
      s.beta_input = input, s.seed += 5000 + input;
      all.push_back(s);
    }
    if (row.op == FW_OP_LINEAR_ATTN) {
      s = row;
      s.normalizer = FW_NORMALIZER_SUM, s.seed += 6000;
      all.push_back(s);
      s.B = 1, s.T = 11, s.pack = 3, s.tail = 1;
      all.push_back(s);
    }
    if (row.op == FW_OP_GATED_DELTA_PRODUCT) {
      s = row;
      s.operands = 0, s.n_sub = 2, s.seed += 7000;
      all.push_back(s);
    }
  }
  return all;
}

}  // namespace fw::test
