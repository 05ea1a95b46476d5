// SPDX-License-Identifier: Apache-2.0
// Laws between rows of the catalogue and in the data: equal gates, a decay of 1, nothing written, linearity, named
// rows as calls by axes, decode as a forward.
#include "harness_pieces.hpp"

namespace fw::test {
namespace {

Spec base(int64_t op) {
  Spec s = spec_of(op);
  s.T = 41, s.K = 12, s.V = 9;
  if (s.n_sub > 1) s.n_sub = 2;
  return s;
}

// The answers of one row must be within the limits of the other's truth.
void expect_agreement(const Checked &expected, const Path &path, const Spec &spec, const Operands &operands,
                      fw_direction direction) {
  Outputs found = run_path(path, spec, operands, direction);
  found.values.erase("dg");  // of another shape, or absent, in the other row
  EXPECT_LE(expected.share(found), 1.0) << path.impl << " " << direction_name(direction) << ": " << text(spec);
  EXPECT_GE(found.values.size(), 2u);
}

TEST(Rows, VectorGateOfEqualEntriesIsAScalarGate) {
  const int64_t pairs[][2] = {{FW_OP_KDA, FW_OP_GATED_DELTA_RULE}, {FW_OP_GLA, FW_OP_SIMPLE_GLA}};
  for (const auto &pair : pairs) {
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD}) {
      const Spec scalar = base(pair[1]);
      const Checked expected(scalar, direction);
      Operands operands = expected.operands();
      const Values g = operands.at("g");
      Values wide = make_values({scalar.B, scalar.T, scalar.HV(), scalar.K});
      for (size_t i = 0; i < wide.data.size(); ++i) wide.data[i] = g.data[i / static_cast<size_t>(scalar.K)];
      operands["g"] = wide;
      Spec vector = scalar;
      vector.op = pair[0];
      for (const Path &path : paths(direction)) {
        expect_agreement(expected, path, vector, operands, direction);
        if (direction != FW_BACKWARD) continue;
        // the scalar gate's gradient is the sum of the vector gate's
        const Outputs found = run_path(path, vector, operands, direction);
        Outputs summed;
        summed.values["dg"] = make_values(g.shape);
        for (size_t i = 0; i < wide.data.size(); ++i) {
          summed.values["dg"].data[i / static_cast<size_t>(scalar.K)] += found.values.at("dg").data[i];
        }
        EXPECT_LE(expected.share(summed), 1.0) << path.impl << ", sum of dg: " << text(vector);
      }
    }
  }
}

TEST(Rows, DecayOfOneIsNoGate) {
  const int64_t pairs[][2] = {{FW_OP_GATED_DELTA_RULE, FW_OP_DELTA_RULE},
                              {FW_OP_SIMPLE_GLA, FW_OP_LINEAR_ATTN},
                              {FW_OP_KDA, FW_OP_DELTA_RULE},
                              {FW_OP_GLA, FW_OP_LINEAR_ATTN},
                              {FW_OP_DPLR, FW_OP_IPLR}};
  for (const auto &pair : pairs) {
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD}) {
      const Checked expected(base(pair[1]), direction);
      Spec gated = base(pair[1]);
      gated.op = pair[0];
      Operands operands = expected.operands();
      std::vector<int64_t> shape = {gated.B, gated.T, gated.HV()};
      if (row_of(gated).gate == FW_GATE_VECTOR) shape.push_back(gated.K);
      operands["g"] = make_values(shape, 0.0);
      for (const Path &path : paths(direction)) expect_agreement(expected, path, gated, operands, direction);
    }
  }
}

// gated_delta_product of one sub-step is gated_delta_rule, without a gate delta_rule.
TEST(Rows, OneSubStepIsTheDeltaRule) {
  for (int64_t op : {FW_OP_GATED_DELTA_RULE, FW_OP_DELTA_RULE}) {
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD}) {
      const Checked expected(base(op), direction);
      Spec product = base(op);
      product.op = FW_OP_GATED_DELTA_PRODUCT, product.n_sub = 1;
      product.operands = op == FW_OP_GATED_DELTA_RULE ? static_cast<int64_t>(recurrence::kG) : 0;
      for (const Path &path : paths(direction)) {
        expect_agreement(expected, path, product, expected.operands(), direction);
      }
    }
  }
}

// Every row is a call by its axes.
TEST(Rows, NamedRowIsACallByAxes) {
  for (const Spec &row : named_rows()) {
    if (row_of(row).has_fixed_gate || row.n_sub > 1) continue;
    Spec named = base(row.op);
    named.scale_milli = 500;
    Spec axes = named;
    axes.op = FW_OP_BY_AXES, axes.gate = row_of(named).gate, axes.erase = row_of(named).erase, axes.operands = ~0ll;
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD}) {
      const Operands all = rounded_operands(named);
      for (const Path &path : paths(direction)) {
        expect_same_bits(run_path(path, named, all, direction), run_path(path, axes, all, direction),
                         path.impl + ": " + text(named));
      }
    }
  }
}

TEST(Rows, NothingWrittenOnlyDecays) {
  for (int64_t op : {FW_OP_DELTA_RULE, FW_OP_GATED_DELTA_RULE, FW_OP_COMBA, FW_OP_KDA, FW_OP_GATED_DELTA_PRODUCT}) {
    Spec spec = base(op);
    Operands all = rounded_operands(spec);
    for (double &x : all.at("beta").data) x = 0;
    for (const Path &path : paths(FW_FORWARD)) {
      const Outputs found = run_path(path, spec, all, FW_FORWARD);
      Operands other = all;
      for (double &x : other.at("v").data) x = 3 - x;
      expect_same_bits(found, run_path(path, spec, other, FW_FORWARD), "other values, " + path.impl);
      const int64_t K = spec.K, V = spec.V, HV = spec.HV();
      const bool is_vector = row_of(spec).gate == FW_GATE_VECTOR;
      for (int64_t i = 0; i < spec.B * HV * K; ++i) {
        const int64_t b = i / (HV * K), hv = i / K % HV, k = i % K;
        double sum = 0;
        for (int64_t t = 0; all.count("g") && t < spec.T; ++t) {
          const int64_t at = (b * spec.T + t) * HV + hv;
          sum += all.at("g").data[static_cast<size_t>(is_vector ? at * K + k : at)];
        }
        for (int64_t v = 0; v < V; ++v) {
          const double expected = exp(sum) * all.at("initial_state").data[static_cast<size_t>(i * V + v)];
          const double x = found.values.at("final_state").data[static_cast<size_t>(i * V + v)];
          // a product of T decays or the exponential of a sum of T logarithms, each rounded
          ASSERT_LE(fabs(x - expected), static_cast<double>(spec.T + 4) * (1 - sum) * 0x1p-23 * fabs(expected))
              << path.impl << " at " << i << "," << v << ": " << text(spec);
        }
      }
    }
  }
}

// o and final_state are linear in (v, initial_state).
TEST(Rows, LinearInValuesAndState) {
  for (const Spec &row : named_rows()) {
    const Spec spec = base(row.op);
    Spec other = spec;
    other.seed += 50;
    const Operands one = rounded_operands(spec), two = rounded_operands(other);
    Operands mixed = one;
    for (const char *name : {"v", "initial_state"}) {
      for (size_t i = 0; i < one.at(name).data.size(); ++i) {
        mixed[name].data[i] = 0.75 * one.at(name).data[i] - 0.5 * two.at(name).data[i];
      }
    }
    round_operands(spec, mixed);
    Operands second = one;
    second["v"] = two.at("v"), second["initial_state"] = two.at("initial_state");
    for (const Path &path : paths(FW_FORWARD)) {
      const Outputs a = run_path(path, spec, one, FW_FORWARD), b = run_path(path, spec, second, FW_FORWARD);
      const Outputs c = run_path(path, spec, mixed, FW_FORWARD);
      for (const auto &[name, values] : c.values) {
        const double size = peak(a.values.at(name)) + peak(b.values.at(name));
        for (size_t i = 0; i < values.data.size(); ++i) {
          const double expected = 0.75 * a.values.at(name).data[i] - 0.5 * b.values.at(name).data[i];
          // three computations in fp32, each of some T * n_sub + K terms
          const double allowed = 3 * static_cast<double>(spec.R() + spec.K) * 0x1p-23 * size;
          ASSERT_LE(fabs(values.data[i] - expected), allowed) << name << ", " << path.impl << ": " << text(spec);
        }
      }
    }
  }
}

// Steps of 1, 3, 0 and the remaining tokens reach the state of one forward.
TEST(Rows, StepsAreAForward) {
  for (const Spec &row : named_rows()) {
    Spec spec = base(row.op);
    spec.T = 9;
    if (spec.op == FW_OP_LINEAR_ATTN) spec.normalizer = FW_NORMALIZER_SUM;
    const Checked checked(spec, FW_FORWARD);
    for (const Path &path : paths(FW_STEP)) {
      Outputs joined;
      joined.values["o"] = checked.exact().values.at("o");
      Values state = checked.operands().at("initial_state"), z;
      if (spec.normalizer) z = checked.operands().at("initial_z");
      const std::vector<int64_t> at = {0, 1, 4, 4, 9};
      for (size_t i = 0; i + 1 < at.size(); ++i) {
        Operands part = tokens_between(spec, checked.operands(), at[i], at[i + 1]);
        for (const char *name : {"initial_state", "initial_z", "d_o", "d_final_state", "d_final_z"}) part.erase(name);
        part["state"] = state;
        if (spec.normalizer) part["state_z"] = z;
        Spec piece = spec;
        piece.T = at[i + 1] - at[i];
        const Outputs one = run_path(path, piece, part, FW_STEP);
        if (one.status != FW_OK) return;
        paste(joined.values["o"], 1, at[i], one.values.at("o"));
        state = one.values.at("state");
        if (spec.normalizer) z = one.values.at("state_z");
      }
      joined.values["final_state"] = state;
      if (spec.normalizer) joined.values["final_z"] = z;
      EXPECT_LE(checked.share(joined), 1.0) << checked.repro(path.impl);
    }
  }
}

}  // namespace
}  // namespace fw::test
