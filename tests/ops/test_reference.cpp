// SPDX-License-Identifier: Apache-2.0
// The fp64 reference against itself: gradients by differences of the forward, the parallel form, step against
// forward.
#include "harness_rows.hpp"

namespace fw::test {
namespace {

constexpr double kAgree = 1e-11;  // two fp64 computations of the same sums, relative to the largest element

double largest(const Values &v) {
  double most = 0;
  for (double x : v.data) most = fmax(most, fabs(x));
  return most;
}
void expect_close(const Values &found, const Values &expected, double tolerance, const std::string &what) {
  ASSERT_EQ(found.shape, expected.shape) << what;
  const double limit = tolerance * (1e-30 + largest(expected));
  for (size_t i = 0; i < expected.data.size(); ++i) {
    const double difference = fabs(found.data[i] - expected.data[i]);
    if (!(difference <= limit)) {
      FAIL() << what << " at " << index_text(expected.shape, static_cast<int64_t>(i)) << ": " << found.data[i]
             << ", expected " << expected.data[i];
    }
  }
}

double dot(const Values &a, const Values &b) {
  double sum = 0;
  for (size_t i = 0; i < a.data.size(); ++i) sum += a.data[i] * b.data[i];
  return sum;
}

// The scalar whose gradients backward computes.
double loss(const Spec &spec, const Operands &operands) {
  const Outputs out = truth(spec, operands, FW_FORWARD);
  double sum = dot(out.values.at("o"), operands.at("d_o"));
  if (spec.final) sum += dot(out.values.at("final_state"), operands.at("d_final_state"));
  if (spec.final && spec.normalizer) sum += dot(out.values.at("final_z"), operands.at("d_final_z"));
  return sum;
}

// Five-point differences: the error of the formula is of order h^4, that of rounding about 1e-16 / h.
double slope(const Spec &spec, Operands &operands, double &x) {
  const double h = 2e-3, at = x;
  double f[4];
  const double steps[4] = {-2, -1, 1, 2};
  for (int i = 0; i < 4; ++i) {
    x = at + steps[i] * h;
    f[i] = loss(spec, operands);
  }
  x = at;
  return (f[0] - 8 * f[1] + 8 * f[2] - f[3]) / (12 * h);
}

void check_gradients(const Spec &spec, int64_t n_probes) {
  SCOPED_TRACE(row_name(spec) + ": " + text(spec));
  Operands operands = generate(spec);
  const Outputs out = truth(spec, operands, FW_BACKWARD);
  if (out.status != FW_OK) return;
  Random random(static_cast<uint64_t>(spec.seed) + 5);
  int64_t n_checked = 0;
  for (const OutGradField &field : grad_outputs()) {
    if (!operands.count(field.of)) continue;
    const Values &gradient = out.values.at(field.name);
    Values &x = operands.at(field.of);
    const double limit = 1e-7 * (1 + largest(gradient));
    for (int64_t probe = 0; probe < n_probes; ++probe) {
      const int64_t i = random.integer(0, x.count() - 1);
      const double expected = slope(spec, operands, x.data[static_cast<size_t>(i)]);
      const double found = gradient.data[static_cast<size_t>(i)];
      EXPECT_LE(fabs(found - expected), limit) << field.name << " at " << index_text(x.shape, i) << ": " << found
                                               << ", by differences " << expected;
      ++n_checked;
    }
  }
  EXPECT_GE(n_checked, 3 * n_probes);
}

TEST(Reference, GradientsOfNamedRows) {
  for (const Spec &spec : named_rows()) check_gradients(spec, 6);
}
TEST(Reference, GradientsByAxes) {
  for (const Spec &spec : axes_rows()) check_gradients(spec, 4);
}
TEST(Reference, GradientsWithOptions) {
  for (const Spec &spec : option_rows()) check_gradients(spec, 3);
}
// More tokens than one piece of the reverse recurrence (pieces have about sqrt(T) tokens).
TEST(Reference, GradientsOverPieces) {
  for (int64_t op : {FW_OP_GATED_DELTA_PRODUCT, FW_OP_DPLR, FW_OP_LINEAR_ATTN}) {
    Spec spec = spec_of(op);
    spec.T = 41, spec.pack = 3, spec.B = 1, spec.group = 3;
    if (op == FW_OP_LINEAR_ATTN) spec.normalizer = FW_NORMALIZER_SUM;
    check_gradients(spec, 6);
  }
}

TEST(Reference, ParallelFormAgrees) {
  static const Context parallel("reference_parallel");
  std::vector<Spec> all = named_rows();
  for (const Spec &spec : axes_rows()) all.push_back(spec);
  for (const Spec &spec : option_rows()) all.push_back(spec);
  for (Spec spec : all) {
    SCOPED_TRACE(row_name(spec) + ": " + text(spec));
    const Operands operands = generate(spec);
    const Outputs expected = truth(spec, operands, FW_FORWARD);
    Spec matrix = as_f64(spec);
    matrix.form = FW_FORM_PARALLEL;
    const Outputs found = run_call(parallel, matrix, operands, FW_FORWARD);
    ASSERT_EQ(found.status, FW_OK) << found.error;
    EXPECT_EQ(found.impl, "reference_parallel");
    for (const auto &[name, values] : expected.values) expect_close(found.values.at(name), values, kAgree, name);
  }
}

// Tokens one by one through a pool of states give what forward gives; skipped sequences keep their state.
TEST(Reference, StepAgreesWithForward) {
  for (Spec spec : named_rows()) {
    spec.B = 3, spec.normalizer = spec.op == FW_OP_LINEAR_ATTN ? 1 : 0;
    SCOPED_TRACE(row_name(spec) + ": " + text(spec));
    const Operands operands = generate(spec, true);
    const std::vector<int64_t> indices = {4, -1, 0};
    const Outputs found = truth(spec, operands, FW_STEP, indices);
    ASSERT_EQ(found.status, FW_OK);
    Operands plain = generate(spec);
    const int64_t state_size = spec.HV() * spec.K * spec.V, z_size = spec.H * spec.K;
    for (int64_t n = 0; n < 3; ++n) {
      const int64_t slot = indices[static_cast<size_t>(n)] < 0 ? 1 : indices[static_cast<size_t>(n)];
      std::copy_n(operands.at("state").data.begin() + slot * state_size, state_size,
                  plain.at("initial_state").data.begin() + n * state_size);
      if (spec.normalizer) {
        std::copy_n(operands.at("state_z").data.begin() + slot * z_size, z_size,
                    plain.at("initial_z").data.begin() + n * z_size);
      }
    }
    for (const auto &[name, values] : operands) {
      if (plain.count(name) && name.find("initial") == std::string::npos) plain[name] = values;
    }
    const Outputs expected = truth(spec, plain, FW_FORWARD);
    Values o = expected.values.at("o"), state = operands.at("state");
    const int64_t o_size = o.count() / 3;
    std::fill_n(o.data.begin() + o_size, o_size, 0.0);
    EXPECT_EQ(found.values.at("o").data, o.data);
    for (int64_t n : {0, 2}) {
      std::copy_n(expected.values.at("final_state").data.begin() + n * state_size, state_size,
                  state.data.begin() + indices[static_cast<size_t>(n)] * state_size);
    }
    EXPECT_EQ(found.values.at("state").data, state.data);
    if (!spec.normalizer) continue;
    Values z = operands.at("state_z");
    for (int64_t n : {0, 2}) {
      std::copy_n(expected.values.at("final_z").data.begin() + n * z_size, z_size,
                  z.data.begin() + indices[static_cast<size_t>(n)] * z_size);
    }
    EXPECT_EQ(found.values.at("state_z").data, z.data);
  }
}

// A state in a half type is rounded once a call, whatever the number of tokens, and never in between.
TEST(Reference, HalfStateIsRoundedOnce) {
  static const Context context("reference_recurrent");
  for (int64_t dtype : {FW_BF16, FW_F16}) {
    Spec spec = spec_of(FW_OP_KDA);
    spec.state_dtype = dtype;
    Operands operands = generate(spec, true);
    round_operands(spec, operands);
    const Outputs half = run_call(context, spec, operands, FW_STEP);
    spec.state_dtype = FW_F32;
    const Outputs full = run_call(context, spec, operands, FW_STEP);
    ASSERT_EQ(half.status, FW_OK) << half.error;
    ASSERT_EQ(full.status, FW_OK) << full.error;
    EXPECT_EQ(half.bits.at("o"), full.bits.at("o"));
    Values rounded = full.values.at("state");
    round_to(static_cast<fw_dtype>(dtype), rounded);
    // the two slots that no sequence uses are not rounded again, they were given in the half type
    EXPECT_EQ(half.values.at("state").data, rounded.data);
  }
}

TEST(Reference, DecayOfMinusInfinity) {
  for (Spec spec : named_rows()) {
    if (!has_gate_tensor(spec)) continue;
    SCOPED_TRACE(row_name(spec));
    Operands operands = generate(spec);
    Values &g = operands.at("g");
    for (size_t i = 0; i < g.data.size(); i += 3) g.data[i] = i % 2 ? -INFINITY : -1000.0;
    const Outputs out = truth(spec, operands, FW_BACKWARD);
    for (const auto &[name, values] : out.values) {
      for (double x : values.data) ASSERT_TRUE(isfinite(x)) << name;
    }
    for (size_t i = 0; i < g.data.size(); ++i) {
      if (g.data[i] == -INFINITY) {
        ASSERT_EQ(out.values.at("dg").data[i], 0.0);
      }
    }
    // the same through logits: softplus(inf) makes the decay -inf
    spec.gate_input = FW_GATE_INPUT_SOFTPLUS, spec.parameters = 1;
    Operands logits = generate(spec);
    for (size_t i = 0; i < g.data.size(); i += 3) logits.at("g").data[i] = i % 2 ? INFINITY : 1e5;
    const Outputs from_logits = truth(spec, logits, FW_BACKWARD);
    for (const auto &[name, values] : from_logits.values) {
      for (double x : values.data) ASSERT_TRUE(isfinite(x)) << name;
    }
  }
}

TEST(Reference, EmptySequencesKeepTheState) {
  for (Spec spec : named_rows()) {
    spec.T = 0;
    SCOPED_TRACE(row_name(spec));
    const Operands operands = generate(spec);
    const Outputs forward = truth(spec, operands, FW_FORWARD);
    EXPECT_EQ(forward.values.at("final_state").data, operands.at("initial_state").data);
    const Outputs backward = truth(spec, operands, FW_BACKWARD);
    EXPECT_EQ(backward.values.at("d_initial_state").data, operands.at("d_final_state").data);
  }
}

TEST(Reference, RefusesWhatItIsNot) {
  const Context recurrent("reference_recurrent"), parallel("reference_parallel");
  Spec spec = as_f64(spec_of(FW_OP_GLA));
  spec.form = FW_FORM_PARALLEL;
  EXPECT_EQ(run_call(recurrent, spec, generate(spec), FW_FORWARD).error,
            "gla: implementation reference_recurrent is forced and refuses: form is parallel");
  spec.T = 4097, spec.B = spec.H = spec.group = spec.K = spec.V = 1;
  EXPECT_EQ(run_call(parallel, spec, generate(spec), FW_FORWARD).error,
            "gla: implementation reference_parallel is forced and refuses: T * n_sub is 4097, allowed at most 4096");
}

}  // namespace
}  // namespace fw::test
