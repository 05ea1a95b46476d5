// SPDX-License-Identifier: Apache-2.0
// fw_gate_activation against fp64 formulas written here. Round-offs allowed: 6 of the result forward and 8 backward
// (4.1 and 5.8 measured over 3e6 logits); BOUNDED takes exp(a_log) (x + dt_bias) = u into a sigmoid, so that one
// round-off of u is |u| round-offs of the result: its magnitudes carry 1 + |u|. A sum over rows adds a chain of at
// most 64 terms, then one of at most 64 tiles, then one of the blocks.
#include "alloc_count.hpp"
#include "neighbours/harness.hpp"

namespace fwtest {
namespace {

FWTEST_API(gate_activation);

double softplus(double x) { return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x)); }
double sigmoid(double x) { return 1 / (1 + exp(-x)); }

struct GateTruth {
  double y, dx, da_log;  // derivatives for dy = 1
  double growth;         // of round-offs: 1, or 1 + |u|
};
GateTruth gate_truth(fw_gate_kind kind, double x, double a_log, double dt_bias) {
  switch (kind) {
    case FW_GATE_KIND_SOFTPLUS: {
      const double rate = exp(a_log), u = x + dt_bias;
      return {-rate * softplus(u), -rate * sigmoid(u), -rate * softplus(u), 1};
    }
    case FW_GATE_KIND_LOG_SIGMOID: return {-softplus(-x) / 16, sigmoid(-x) / 16, 0, 1};
    case FW_GATE_KIND_BOUNDED: {
      const double rate = exp(a_log), u = rate * (x + dt_bias), slope = -5 * sigmoid(u) * sigmoid(-u);
      return {-5 * sigmoid(u), slope * rate, slope * u, 1 + fabs(u)};
    }
    case FW_GATE_KIND_RWKV7: return {-exp(-0.5) * sigmoid(x), -exp(-0.5) * sigmoid(x) * sigmoid(-x), 0, 1};
    case FW_GATE_KIND_BETA: return {sigmoid(x), sigmoid(x) * sigmoid(-x), 0, 1};
    default: return {2 * sigmoid(x), 2 * sigmoid(x) * sigmoid(-x), 0, 1};
  }
}

bool takes_parameters(fw_gate_kind kind) { return kind == FW_GATE_KIND_SOFTPLUS || kind == FW_GATE_KIND_BOUNDED; }

struct Call {
  TestTensor x, a_log, dt_bias, y, dy, dx, d_a_log, d_dt_bias;
  fw_gate_activation desc = {};
  fw_gate_activation_grads grads = {};

  Call(fw_gate_kind kind, fw_dtype dtype, fw_dtype y_dtype, std::vector<int64_t> shape,
       Layout layout = Layout::kDense, Layout out_layout = Layout::kDense, bool with_a_log = true,
       bool with_dt_bias = true) {
    const fw_dtype parameter = dtype == FW_F64 ? FW_F64 : FW_F32;
    const std::vector<int64_t> heads(shape.begin() + 2, shape.end());
    x = TestTensor(dtype, shape, layout);
    dy = TestTensor(y_dtype, shape, layout);
    y = TestTensor(y_dtype, shape, out_layout);
    dx = TestTensor(dtype, shape, out_layout);
    if (takes_parameters(kind) && with_a_log) {
      a_log = TestTensor(parameter, {heads[0]}, layout == Layout::kDense ? layout : Layout::kInterleaved);
      d_a_log = TestTensor(parameter, {heads[0]}, out_layout);
    }
    if (takes_parameters(kind) && with_dt_bias) {
      dt_bias = TestTensor(parameter, heads, layout);
      d_dt_bias = TestTensor(parameter, heads, out_layout);
    }
    desc.struct_size = sizeof desc;
    desc.kind = kind;
    grads.struct_size = sizeof grads;
    Rng rng(5);
    x.fill_uniform(rng, -100, 30);
    dy.fill_normal(rng);
    a_log.fill_uniform(rng, -2, 3);
    dt_bias.fill_uniform(rng, -5, 2);
    refresh();
  }
  void refresh() {
    desc.x = x.view();
    desc.a_log = a_log.view();
    desc.dt_bias = dt_bias.view();
    desc.y = y.view();
    grads.dy = dy.view();
    grads.dx = dx.view();
    grads.d_a_log = d_a_log.view();
    grads.d_dt_bias = d_dt_bias.view();
  }
  int64_t heads() const { return x.shape()[2]; }
  int64_t channels() const { return x.size() / std::max<int64_t>(1, x.shape()[0] * x.shape()[1] * heads()); }
  GateTruth truth(int64_t i) const {
    const int64_t channel = i % (heads() * channels());
    return gate_truth(desc.kind, x.get(i), a_log.is_given() ? a_log.get(channel / channels()) : 0,
                      dt_bias.is_given() ? dt_bias.get(channel) : 0);
  }
};

class GateActivation : public ImplTest {};

void run_and_compare(const char *impl, Call &c) {
  TestContext context(impl);
  Watch watch;
  watch.input("x", c.x);
  watch.input("a_log", c.a_log);
  watch.input("dt_bias", c.dt_bias);
  watch.input("dy", c.dy);
  watch.output("y", c.y);
  watch.output("dx", c.dx);
  watch.output("d_a_log", c.d_a_log);
  watch.output("d_dt_bias", c.d_dt_bias);
  ASSERT_EQ(run_forward<gate_activation_api>(context, c.desc), FW_OK) << fw_last_error();
  EXPECT_STREQ(fw_last_impl(), impl);
  ASSERT_EQ(run_backward<gate_activation_api>(context, c.desc, c.grads), FW_OK) << fw_last_error();
  EXPECT_STREQ(fw_last_impl(), impl);
  watch.expect_intact();
  std::vector<Truth> y, dx, d_a_log(static_cast<size_t>(c.d_a_log.size())),
      d_dt_bias(static_cast<size_t>(c.d_dt_bias.size()));
  for (int64_t i = 0; i < c.x.size(); ++i) {
    const GateTruth t = c.truth(i);
    const double dy = c.dy.get(i);
    y.push_back({t.y, fabs(t.y) * t.growth});
    dx.push_back({t.dx * dy, fabs(t.dx * dy) * t.growth});
    const int64_t channel = i % (c.heads() * c.channels());
    if (c.d_a_log.is_given()) {
      Truth &sum = d_a_log[static_cast<size_t>(channel / c.channels())];
      sum.value += t.da_log * dy;
      sum.magnitude += fabs(t.da_log * dy) * t.growth;
    }
    if (c.d_dt_bias.is_given()) {
      Truth &sum = d_dt_bias[static_cast<size_t>(channel)];
      sum.value += t.dx * dy;
      sum.magnitude += fabs(t.dx * dy) * t.growth;
    }
  }
  const double chain =
      8 + 64 + static_cast<double>(c.x.shape()[0] * c.x.shape()[1]) / 64 + static_cast<double>(c.channels()) / 4 + 8;
  expect_close("y", c.y, y, 6);
  expect_close("dx", c.dx, dx, 8);
  expect_close("d_a_log", c.d_a_log, d_a_log, chain);
  expect_close("d_dt_bias", c.d_dt_bias, d_dt_bias, chain);
}

TEST_P(GateActivation, EveryKindDtypeAndRank) {
  for (fw_gate_kind kind = FW_GATE_KIND_SOFTPLUS; kind <= FW_GATE_KIND_BETA_TWICE; ++kind) {
    for (fw_dtype dtype : {FW_F32, FW_BF16, FW_F16}) {
      for (fw_dtype y_dtype : {fw_dtype{FW_F32}, dtype}) {
        for (const std::vector<int64_t> &shape : {std::vector<int64_t>{2, 37, 5}, {2, 37, 3, 13}}) {
          SCOPED_TRACE(testing::Message()
                       << "kind " << kind << " dtypes " << dtype << " " << y_dtype << " rank " << shape.size());
          Call c(kind, dtype, y_dtype, shape);
          run_and_compare(impl(), c);
        }
      }
    }
  }
}

TEST_P(GateActivation, EveryShapeLayoutAndAbsence) {
  const std::vector<std::vector<int64_t>> shapes = {{1, 1, 1},     {0, 3, 2},    {2, 0, 3, 4}, {1, 5, 16},
                                                    {3, 70, 2, 9}, {2, 3, 4, 1}, {1, 300, 1}};
  for (const auto &shape : shapes) {
    for (Layout layout :
         {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved}) {
      for (int absent = 0; absent < 4; ++absent) {
        SCOPED_TRACE(testing::Message() << shape.size() << " dims, B " << shape[0] << ", " << layout_name(layout)
                                        << ", absent " << absent);
        Call c(absent % 2 ? FW_GATE_KIND_BOUNDED : FW_GATE_KIND_SOFTPLUS, FW_F32, FW_BF16, shape, layout,
               layout == Layout::kSwapped ? Layout::kReversed : Layout::kSwapped, !(absent & 1), !(absent & 2));
        run_and_compare(impl(), c);
      }
    }
  }
}

// field report: softplus by log(1 + e^x) is 0 from x = -17 on
TEST_P(GateActivation, SoftplusIsAccurateDownToMinus100) {
  TestContext context(impl());
  for (double a_log : {0.0, 2.7}) {
    Call c(FW_GATE_KIND_SOFTPLUS, FW_F32, FW_F32, {1, 1001, 1});
    c.x.fill([](int64_t i) { return -100 + 0.1 * static_cast<double>(i); });
    c.a_log.set(0, a_log);
    c.dt_bias.set(0, 0.03125);
    ASSERT_EQ(run_forward<gate_activation_api>(context, c.desc), FW_OK);
    for (int64_t i = 0; i < 1001; ++i) {
      const double want = c.truth(i).y;
      EXPECT_LT(c.y.get(i), 0);
      EXPECT_NEAR(c.y.get(i), want, 6 * (0x1p-24 * fabs(want)) + 0x1p-149) << "x = " << c.x.get(i);
    }
  }
}

// g of -inf, 0 and far tails are legal: finite gradients, 0 where the incoming one is 0
TEST_P(GateActivation, EdgesGiveFiniteGradients) {
  TestContext context(impl());
  const double edges[] = {-INFINITY, INFINITY, -3e38, 3e38, -1e4, 1e4, -104, 104,
                          0.0,       -0.0,     1e-40, -300, 300,  89,  -89,  17};
  for (fw_gate_kind kind = FW_GATE_KIND_SOFTPLUS; kind <= FW_GATE_KIND_BETA_TWICE; ++kind) {
    for (double a_log : {0.0, 3.0, -3.0}) {
      Call c(kind, FW_F32, FW_F32, {1, static_cast<int64_t>(std::size(edges)), 1});
      c.x.fill([&](int64_t i) { return edges[i]; });
      c.a_log.fill([&](int64_t) { return a_log; });
      c.dt_bias.fill([](int64_t) { return 0.5; });
      c.dy.fill([&](int64_t) { return 0.0; });
      for (int is_nonzero = 0; is_nonzero < 2; ++is_nonzero) {
        if (is_nonzero) c.dy.fill([&](int64_t i) { return fabs(edges[i]) > 1e30 ? 0.0 : 1.0; });
        ASSERT_EQ(run_forward<gate_activation_api>(context, c.desc), FW_OK);
        ASSERT_EQ(run_backward<gate_activation_api>(context, c.desc, c.grads), FW_OK);
        for (int64_t i = 0; i < c.x.size(); ++i) {
          SCOPED_TRACE(testing::Message() << "kind " << kind << " a_log " << a_log << " x " << edges[i]);
          EXPECT_FALSE(isnan(c.y.get(i)));
          EXPECT_TRUE(isfinite(c.dx.get(i)));
          if (!is_nonzero) {
            EXPECT_EQ(c.dx.get(i), 0);
          }
        }
        for (const TestTensor *t : {&c.d_a_log, &c.d_dt_bias}) {
          EXPECT_TRUE(!t->is_given() || isfinite(t->get(0)));
        }
      }
    }
  }
}

TEST_P(GateActivation, NanStaysInItsElementAndHead) {
  TestContext context(impl());
  for (fw_gate_kind kind = FW_GATE_KIND_SOFTPLUS; kind <= FW_GATE_KIND_BETA_TWICE; ++kind) {
    Call c(kind, FW_F32, FW_F32, {1, 7, 3, 5});
    const int64_t bad = 3 * 15 + 1 * 5 + 2;
    c.x.set(bad, NAN);
    ASSERT_EQ(run_forward<gate_activation_api>(context, c.desc), FW_OK);
    ASSERT_EQ(run_backward<gate_activation_api>(context, c.desc, c.grads), FW_OK);
    for (int64_t i = 0; i < c.x.size(); ++i) {
      EXPECT_EQ(isnan(c.y.get(i)), i == bad) << "kind " << kind << " at " << i;
      EXPECT_EQ(isnan(c.dx.get(i)), i == bad) << "kind " << kind << " at " << i;
    }
    for (int64_t h = 0; h < c.d_a_log.size(); ++h) EXPECT_EQ(isnan(c.d_a_log.get(h)), h == 1);
    for (int64_t i = 0; i < c.d_dt_bias.size(); ++i) EXPECT_EQ(isnan(c.d_dt_bias.get(i)), i == 7);
  }
}

TEST_P(GateActivation, GradientsMatchCentralDifferences) {
  if (GetParam() != "reference") GTEST_SKIP() << "not run: the differences need fp64";
  TestContext context(impl());
  for (fw_gate_kind kind = FW_GATE_KIND_SOFTPLUS; kind <= FW_GATE_KIND_BETA_TWICE; ++kind) {
    for (const std::vector<int64_t> &shape : {std::vector<int64_t>{2, 3, 2}, {2, 3, 2, 3}}) {
      Call c(kind, FW_F64, FW_F64, shape);
      Rng rng(3);
      c.x.fill_uniform(rng, -6, 6);
      c.a_log.fill_uniform(rng, -1, 0.3);
      ASSERT_EQ(run_backward<gate_activation_api>(context, c.desc, c.grads), FW_OK);
      const auto loss = [&] {
        EXPECT_EQ(run_forward<gate_activation_api>(context, c.desc), FW_OK);
        double sum = 0;
        for (int64_t i = 0; i < c.y.size(); ++i) sum += c.y.get(i) * c.dy.get(i);
        return sum;
      };
      const auto compare = [&](const char *name, TestTensor &input, const TestTensor &grad) {
        for (int64_t i = 0; i < input.size(); ++i) {
          const double at = input.get(i), step = 1e-5;
          input.set(i, at + step);
          const double above = loss();
          input.set(i, at - step);
          const double below = loss();
          input.set(i, at);
          EXPECT_NEAR((above - below) / (2 * step), grad.get(i), 1e-8) << "kind " << kind << " " << name << " " << i;
        }
      };
      compare("x", c.x, c.dx);
      compare("a_log", c.a_log, c.d_a_log);
      compare("dt_bias", c.dt_bias, c.d_dt_bias);
    }
  }
}

TEST_P(GateActivation, SameBitsOnAnyThreads) {
  for (const std::vector<int64_t> &shape : {std::vector<int64_t>{2, 300, 3}, {2, 150, 3, 20}}) {
    Call c(FW_GATE_KIND_SOFTPLUS, FW_BF16, FW_F32, shape);
    expect_same_bits_on_any_threads(impl(), {&c.y, &c.dx, &c.d_a_log, &c.d_dt_bias}, [&](fw_context *context) {
      ASSERT_EQ(run_forward<gate_activation_api>(context, c.desc), FW_OK);
      ASSERT_EQ(run_backward<gate_activation_api>(context, c.desc, c.grads), FW_OK);
    });
  }
}

TEST_P(GateActivation, ATokenAloneHasTheSameBits) {
  TestContext context(impl());
  Call many(FW_GATE_KIND_SOFTPLUS, FW_F32, FW_F32, {1, 64, 3, 20}),
      one(FW_GATE_KIND_SOFTPLUS, FW_F32, FW_F32, {1, 1, 3, 20});
  ASSERT_EQ(run_forward<gate_activation_api>(context, many.desc), FW_OK);
  for (int64_t t = 0; t < 64; ++t) {
    one.x.fill([&](int64_t i) { return many.x.get(t * 60 + i); });
    one.a_log.fill([&](int64_t i) { return many.a_log.get(i); });
    one.dt_bias.fill([&](int64_t i) { return many.dt_bias.get(i); });
    ASSERT_EQ(run_forward<gate_activation_api>(context, one.desc), FW_OK);
    for (int64_t i = 0; i < 60; ++i) ASSERT_EQ(one.y.get(i), many.y.get(t * 60 + i));
  }
}

TEST_P(GateActivation, AllocatesNothing) {
  if (fw::test::is_on_cuda()) GTEST_SKIP() << "not run: on CUDA the driver allocates for its launches";
  if (!is_counting()) GTEST_SKIP() << "not run: another allocator is in place";
  Call c(FW_GATE_KIND_SOFTPLUS, FW_BF16, FW_F32, {2, 100, 3, 20});
  TestContext context(impl(), 2);
  uint64_t bytes = 0;
  ASSERT_EQ(fw_gate_activation_workspace_size(context, &c.desc, FW_BACKWARD, &bytes), FW_OK);
  TestWorkspace workspace(bytes);
  CountAllocations counted;
  EXPECT_EQ(fw_gate_activation_forward(context, &c.desc, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(fw_gate_activation_backward(context, &c.desc, &c.grads, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(counted.count(), 0);
}

FWTEST_EVERY_IMPL(GateActivation);

TEST(GateActivationRefusals, EverySentence) {
  TestContext context;
  const auto refused = [&](const char *sentence, const std::function<void(Call &)> &spoil,
                           fw_gate_kind kind = FW_GATE_KIND_SOFTPLUS) {
    Call c(kind, FW_F32, FW_F32, {1, 2, 3, 4});
    spoil(c);
    EXPECT_REFUSED(fw_gate_activation_backward(context, &c.desc, &c.grads, nullptr, 0), FW_INVALID_ARGUMENT,
                   sentence);
  };
  refused("gate_activation: kind is 0, allowed 1 to 6", [](Call &c) { c.desc.kind = 0; });
  refused("gate_activation: kind is 7, allowed 1 to 6", [](Call &c) { c.desc.kind = 7; });
  refused("gate_activation: reserved is 9, allowed 0", [](Call &c) { c.desc.reserved = 9; });
  refused("gate_activation: device is -1, allowed 0 (CPU) or 1 (CUDA)", [](Call &c) { c.desc.device = -1; });
  refused(
      "gate_activation: normalizer is -1, allowed 1e-30 to 1e30 (0 means 16)",
      [](Call &c) { c.desc.normalizer = -1; }, FW_GATE_KIND_LOG_SIGMOID);
  refused(
      "gate_activation: normalizer is nan, allowed 1e-30 to 1e30 (0 means 16)",
      [](Call &c) { c.desc.normalizer = __builtin_nan(""); }, FW_GATE_KIND_LOG_SIGMOID);
  refused(
      "gate_activation: lower_bound is 5, allowed -1e30 to -1e-30 (0 means -5)",
      [](Call &c) { c.desc.lower_bound = 5; }, FW_GATE_KIND_BOUNDED);
  refused(
      "gate_activation: lower_bound is -inf, allowed -1e30 to -1e-30 (0 means -5)",
      [](Call &c) { c.desc.lower_bound = -INFINITY; }, FW_GATE_KIND_BOUNDED);
  refused("gate_activation: x has 2 dimensions, allowed 3 to 4", [](Call &c) { c.desc.x.ndim = 2; });
  refused("gate_activation: a_log is given, but kind 5 takes none", [](Call &c) { c.desc.kind = FW_GATE_KIND_BETA; });
  refused("gate_activation: dt_bias is given, but kind 2 takes none", [](Call &c) {
    c.desc.kind = FW_GATE_KIND_LOG_SIGMOID;
    c.desc.a_log.dtype = FW_NONE;
  });
  refused("gate_activation: a_log has dtype bf16, allowed fp32", [](Call &c) { c.desc.a_log.dtype = FW_BF16; });
  refused("gate_activation: a_log has shape [4], expected [3]", [](Call &c) { c.desc.a_log.shape[0] = 4; });
  refused("gate_activation: dt_bias has 1 dimensions, expected 2", [](Call &c) { c.desc.dt_bias.ndim = 1; });
  refused("gate_activation: dt_bias has shape [3,5], expected [3,4]", [](Call &c) { c.desc.dt_bias.shape[1] = 5; });
  refused("gate_activation: dy is missing", [](Call &c) { c.grads.dy.dtype = FW_NONE; });
  refused("gate_activation: dx has dtype fp16, allowed fp32", [](Call &c) { c.grads.dx.dtype = FW_F16; });
  refused("gate_activation: d_a_log is given, but a_log is not", [](Call &c) { c.desc.a_log.dtype = FW_NONE; });
  refused("gate_activation: d_dt_bias is given, but dt_bias is not", [](Call &c) { c.desc.dt_bias.dtype = FW_NONE; });
  refused("gate_activation: output d_dt_bias overlaps itself: strides [0,1]",
          [](Call &c) { c.grads.d_dt_bias.strides[0] = 0; });
  refused("gate_activation: output dx shares memory with dy, allowed: none",
          [](Call &c) { c.grads.dx.data = c.grads.dy.data; });
  refused("gate_activation: output d_a_log shares memory with dx, allowed: none",
          [](Call &c) { c.grads.d_a_log.data = c.grads.dx.data; });
  refused("gate_activation: grads.struct_size is 4, expected 392 (allowed 8 to 16384)",
          [](Call &c) { c.grads.struct_size = 4; });
}

}  // namespace
}  // namespace fwtest
