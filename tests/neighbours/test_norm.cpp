// SPDX-License-Identifier: Apache-2.0
// fw_norm against fp64 formulas written here. Round-offs allowed: the sum of squares is a chain of at most D / 16 + 5
// additions, whose round-offs rstd carries by half; rstd, xhat, weight and act(gate) add at most 10 (SiLU 3.2): D /
// 32 + 14 forward. Backward has a second such chain in xhat . d_xhat, relative to the sum of its terms' magnitudes: D
// / 16 + 30. dweight adds a chain of 64 rows, at most 64 tiles and the blocks.
#include "alloc_count.hpp"
#include "neighbours/harness.hpp"

namespace fwtest {
namespace {

FWTEST_API(norm);

double sigmoid(double x) { return 1 / (1 + exp(-x)); }
double act(fw_activation kind, double z) { return kind == FW_ACTIVATION_SILU ? z * sigmoid(z) : sigmoid(z); }
double act_slope(fw_activation kind, double z) {
  const double s = sigmoid(z), slope = s * sigmoid(-z);
  return kind == FW_ACTIVATION_SILU ? s + z * slope : slope;
}
double act_slope_magnitude(fw_activation kind, double z) {
  const double s = sigmoid(z), slope = s * sigmoid(-z);
  return kind == FW_ACTIVATION_SILU ? s + fabs(z) * slope : slope;
}

enum Kind { kL2, kRms, kRmsWeight, kSiluGate, kSigmoidGate, kSiluGateWeight };
const Kind kKinds[] = {kL2, kRms, kRmsWeight, kSiluGate, kSigmoidGate, kSiluGateWeight};

struct Call {
  TestTensor x, weight, gate, y, dy, dx, dweight, dgate;
  fw_norm desc = {};
  fw_norm_grads grads = {};

  Call(Kind kind, fw_dtype dtype, fw_dtype other, std::vector<int64_t> shape, Layout layout = Layout::kDense,
       Layout out_layout = Layout::kDense) {
    x = TestTensor(dtype, shape, layout);
    dy = TestTensor(other, shape, layout);
    y = TestTensor(other, shape, out_layout);
    dx = TestTensor(dtype, shape, out_layout);
    if (kind == kRmsWeight || kind == kSiluGateWeight) {
      weight = TestTensor(other, {shape.back()}, layout);
      dweight = TestTensor(other, {shape.back()}, out_layout);
    }
    if (kind >= kSiluGate) {
      gate = TestTensor(other, shape, layout);
      dgate = TestTensor(other, shape, out_layout);
    }
    desc.struct_size = sizeof desc;
    desc.kind = kind == kL2 ? FW_NORM_L2 : FW_NORM_RMS;
    desc.gate_activation = kind == kSigmoidGate ? FW_ACTIVATION_SIGMOID
                           : kind >= kSiluGate  ? FW_ACTIVATION_SILU
                                                : FW_ACTIVATION_NONE;
    grads.struct_size = sizeof grads;
    Rng rng(17);
    x.fill_normal(rng, 2);
    dy.fill_normal(rng);
    weight.fill_normal(rng, 0.5, 1);
    gate.fill_normal(rng, 2);
    refresh();
  }
  void refresh() {
    desc.x = x.view();
    desc.weight = weight.view();
    desc.gate = gate.view();
    desc.y = y.view();
    grads.dy = dy.view();
    grads.dx = dx.view();
    grads.dweight = dweight.view();
    grads.dgate = dgate.view();
  }
  int64_t length() const { return x.shape()[desc.x.ndim - 1]; }
};

struct NormTruth {
  std::vector<Truth> y, dx, dweight, dgate;
};
NormTruth truth_of(const Call &c) {
  NormTruth t;
  const int64_t n = c.length();
  const double eps = c.desc.eps == 0 ? 1e-6 : c.desc.eps,
               count = c.desc.kind == FW_NORM_RMS ? static_cast<double>(n) : 1;
  const auto weight = [&](int64_t i) { return c.weight.is_given() ? c.weight.get(i) : 1.0; };
  const auto activated = [&](int64_t i) {
    return c.gate.is_given() ? act(c.desc.gate_activation, c.gate.get(i)) : 1.0;
  };
  t.dweight.resize(static_cast<size_t>(c.dweight.size()));
  for (int64_t begin = 0; begin < c.x.size(); begin += n) {
    double squares = 0;
    Truth along;
    for (int64_t i = 0; i < n; ++i) squares += c.x.get(begin + i) * c.x.get(begin + i);
    const double rstd = 1 / sqrt(squares / count + eps);
    for (int64_t i = 0; i < n; ++i)
      along.add(c.x.get(begin + i) * rstd * c.dy.get(begin + i) * activated(begin + i) * weight(i) / count);
    for (int64_t i = 0; i < n; ++i) {
      const double xhat = c.x.get(begin + i) * rstd, a = activated(begin + i), dy = c.dy.get(begin + i);
      t.y.push_back(xhat * weight(i) * a);
      t.dx.push_back({rstd * (dy * a * weight(i) - xhat * along.value),
                      rstd * (fabs(dy * a * weight(i)) + fabs(xhat) * along.magnitude)});
      if (c.gate.is_given()) {
        const double z = c.gate.get(begin + i), through = dy * xhat * weight(i);
        t.dgate.push_back({through * act_slope(c.desc.gate_activation, z),
                           fabs(through) * act_slope_magnitude(c.desc.gate_activation, z)});
      }
      if (c.dweight.is_given()) t.dweight[static_cast<size_t>(i)].add(dy * a * xhat);
    }
  }
  return t;
}

void run_and_compare(const char *impl, Call &c) {
  TestContext context(impl);
  Watch watch;
  watch.input("x", c.x);
  watch.input("weight", c.weight);
  watch.input("gate", c.gate);
  watch.input("dy", c.dy);
  watch.output("y", c.y);
  watch.output("dx", c.dx);
  watch.output("dweight", c.dweight);
  watch.output("dgate", c.dgate);
  ASSERT_EQ(run_forward<norm_api>(context, c.desc), FW_OK) << fw_last_error();
  EXPECT_STREQ(fw_last_impl(), impl);
  ASSERT_EQ(run_backward<norm_api>(context, c.desc, c.grads), FW_OK) << fw_last_error();
  EXPECT_STREQ(fw_last_impl(), impl);
  watch.expect_intact();
  const NormTruth want = truth_of(c);
  const double n = static_cast<double>(c.length()), rows = n > 0 ? static_cast<double>(c.x.size()) / n : 0;
  expect_close("y", c.y, want.y, n / 32 + 14);
  expect_close("dx", c.dx, want.dx, n / 16 + 30);
  expect_close("dweight", c.dweight, want.dweight, n / 32 + 14 + 64 + rows / 64 + 8);
  expect_close("dgate", c.dgate, want.dgate, n / 32 + 20);
}

class Norm : public ImplTest {};

TEST_P(Norm, EveryKindAndDtype) {
  for (Kind kind : kKinds) {
    for (fw_dtype dtype : {FW_F32, FW_BF16, FW_F16}) {
      for (fw_dtype other : {FW_F32, FW_BF16, FW_F16}) {
        SCOPED_TRACE(testing::Message() << "kind " << kind << " dtypes " << dtype << " " << other);
        Call c(kind, dtype, other, {2, 5, 37});
        run_and_compare(impl(), c);
      }
    }
  }
}

TEST_P(Norm, EveryLengthShapeAndLayout) {
  for (int64_t length : {1, 2, 7, 8, 9, 16, 31, 33, 64, 100, 129, 512, 1023, 1025, 13000}) {
    Call c(kSiluGateWeight, FW_F32, FW_F32, {3, length});
    run_and_compare(impl(), c);
  }
  const std::vector<std::vector<int64_t>> shapes = {{40},    {0},           {3, 0},           {0, 9},
                                                    {70, 3}, {2, 3, 2, 20}, {2, 1, 3, 2, 11}, {1, 5, 1, 4, 1}};
  for (const auto &shape : shapes) {
    for (Layout layout :
         {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved}) {
      SCOPED_TRACE(testing::Message() << shape.size() << " dims from " << shape[0] << ", " << layout_name(layout));
      Call c(kSiluGateWeight, FW_F32, FW_BF16, shape, layout,
             layout == Layout::kSwapped ? Layout::kPadded : Layout::kSwapped);
      run_and_compare(impl(), c);
    }
  }
}

// field report: the L2 norm's backward blows up on all-zero rows
TEST_P(Norm, AZeroRowHasFiniteGradients) {
  TestContext context(impl());
  for (Kind kind : kKinds) {
    Call c(kind, FW_F32, FW_F32, {3, 20});
    for (int64_t i = 20; i < 40; ++i) c.x.set(i, i % 2 ? 0.0 : -0.0);
    run_and_compare(impl(), c);
    double largest = 0;
    for (int64_t i = 20; i < 40; ++i)
      largest = std::max(largest, fabs(c.dy.get(i)) * (c.weight.is_given() ? fabs(c.weight.get(i - 20)) : 1) *
                                      (c.gate.is_given() ? fabs(act(c.desc.gate_activation, c.gate.get(i))) : 1));
    for (int64_t i = 20; i < 40; ++i) {
      EXPECT_EQ(c.y.get(i), 0);
      EXPECT_TRUE(isfinite(c.dx.get(i)));
      EXPECT_LE(fabs(c.dx.get(i)), 1.0001e3 * largest);  // 1 / sqrt(1e-6)
    }
  }
}

// field report: eps moved out of the root; a row of norm 1e-4 with eps 1e-6 inside has length 0.0995, outside 0.990
TEST_P(Norm, EpsIsInsideTheRoot) {
  TestContext context(impl());
  Call c(kL2, FW_F32, FW_F32, {1, 4});
  c.x.fill([](int64_t i) { return i == 2 ? 1e-4 : 0.0; });
  ASSERT_EQ(run_forward<norm_api>(context, c.desc), FW_OK);
  EXPECT_NEAR(c.y.get(2), 0.0995037, 1e-6);
  c.desc.eps = 1e-10;
  ASSERT_EQ(run_forward<norm_api>(context, c.desc), FW_OK);
  EXPECT_NEAR(c.y.get(2), 0.9950372, 1e-6);
}

// field report: dweight taken before the gate; a gate of 0 in one column leaves nothing of its dweight
TEST_P(Norm, AZeroGateColumnHasNoWeightGradient) {
  TestContext context(impl());
  Call c(kSiluGateWeight, FW_F32, FW_F32, {5, 24});
  for (int64_t r = 0; r < 5; ++r) c.gate.set(r * 24 + 7, 0);
  run_and_compare(impl(), c);
  for (int64_t i = 0; i < 24; ++i) EXPECT_EQ(c.dweight.get(i) == 0, i == 7);
}

TEST_P(Norm, SquaresPastTheRangeOfFp32) {
  for (double scale : {1e20, 3e38, 1e-20, 1e-38}) {
    for (Kind kind : {kL2, kRms}) {
      SCOPED_TRACE(testing::Message() << "scale " << scale << " kind " << kind);
      Call c(kind, FW_F32, FW_F32, {2, 20});
      Rng rng(1);
      c.x.fill_uniform(rng, -scale, scale);
      run_and_compare(impl(), c);
    }
  }
}

TEST_P(Norm, NanStaysInItsRow) {
  TestContext context(impl());
  for (double bad : {__builtin_nan(""), __builtin_inf()}) {
    Call c(kSiluGateWeight, FW_F32, FW_F32, {5, 20});
    c.x.set(47, bad);
    ASSERT_EQ(run_forward<norm_api>(context, c.desc), FW_OK);
    ASSERT_EQ(run_backward<norm_api>(context, c.desc, c.grads), FW_OK);
    for (int64_t i = 0; i < 100; ++i) {
      if (i / 20 != 2) {
        EXPECT_TRUE(isfinite(c.y.get(i)) && isfinite(c.dx.get(i)) && isfinite(c.dgate.get(i))) << i;
      }
    }
    EXPECT_TRUE(isnan(c.y.get(47)));
  }
}

TEST_P(Norm, GradientsMatchCentralDifferences) {
  if (GetParam() != "reference") GTEST_SKIP() << "not run: the differences need fp64";
  TestContext context(impl());
  for (Kind kind : kKinds) {
    Call c(kind, FW_F64, FW_F64, {3, 7});
    c.desc.eps = 0.01;
    ASSERT_EQ(run_backward<norm_api>(context, c.desc, c.grads), FW_OK);
    const auto loss = [&] {
      EXPECT_EQ(run_forward<norm_api>(context, c.desc), FW_OK);
      double sum = 0;
      for (int64_t i = 0; i < c.y.size(); ++i) sum += c.y.get(i) * c.dy.get(i);
      return sum;
    };
    const auto compare = [&](const char *name, TestTensor &input, const TestTensor &grad) {
      for (int64_t i = 0; i < input.size(); ++i) {
        const double value = input.get(i), step = 1e-5;
        input.set(i, value + step);
        const double above = loss();
        input.set(i, value - step);
        const double below = loss();
        input.set(i, value);
        EXPECT_NEAR((above - below) / (2 * step), grad.get(i), 1e-8) << "kind " << kind << " " << name << " " << i;
      }
    };
    compare("x", c.x, c.dx);
    compare("weight", c.weight, c.dweight);
    compare("gate", c.gate, c.dgate);
  }
}

TEST_P(Norm, SameBitsOnAnyThreads) {
  Call c(kSiluGateWeight, FW_BF16, FW_F32, {300, 70});
  expect_same_bits_on_any_threads(impl(), {&c.y, &c.dx, &c.dweight, &c.dgate}, [&](fw_context *context) {
    ASSERT_EQ(run_forward<norm_api>(context, c.desc), FW_OK);
    ASSERT_EQ(run_backward<norm_api>(context, c.desc, c.grads), FW_OK);
  });
}

// field report: rows per block chosen from the batch size
TEST_P(Norm, ARowAloneHasTheSameBits) {
  TestContext context(impl());
  for (Kind kind : kKinds) {
    Call many(kind, FW_F32, FW_F32, {64, 50}), one(kind, FW_F32, FW_F32, {1, 50});
    ASSERT_EQ(run_forward<norm_api>(context, many.desc), FW_OK);
    ASSERT_EQ(run_backward<norm_api>(context, many.desc, many.grads), FW_OK);
    one.weight.fill([&](int64_t i) { return many.weight.get(i); });
    for (int64_t r = 0; r < 64; r += 7) {
      one.x.fill([&](int64_t i) { return many.x.get(r * 50 + i); });
      one.dy.fill([&](int64_t i) { return many.dy.get(r * 50 + i); });
      one.gate.fill([&](int64_t i) { return many.gate.get(r * 50 + i); });
      ASSERT_EQ(run_forward<norm_api>(context, one.desc), FW_OK);
      ASSERT_EQ(run_backward<norm_api>(context, one.desc, one.grads), FW_OK);
      for (int64_t i = 0; i < 50; ++i) {
        ASSERT_EQ(one.y.get(i), many.y.get(r * 50 + i));
        ASSERT_EQ(one.dx.get(i), many.dx.get(r * 50 + i));
      }
    }
  }
}

// which elements a sum takes together must not follow from what a layout lets it load at once
TEST_P(Norm, ARowHasTheSameBitsInEveryLayout) {
  TestContext context(impl());
  for (fw_dtype dtype : {FW_F32, FW_BF16, FW_F16}) {
    for (int64_t length : {50, 128, 1100}) {
      Call dense(kSiluGateWeight, dtype, dtype, {6, length});
      ASSERT_EQ(run_forward<norm_api>(context, dense.desc), FW_OK);
      ASSERT_EQ(run_backward<norm_api>(context, dense.desc, dense.grads), FW_OK);
      for (Layout layout : {Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved}) {
        SCOPED_TRACE(testing::Message() << layout_name(layout) << " length " << length << " dtype " << dtype);
        Call c(kSiluGateWeight, dtype, dtype, {6, length}, layout, layout);
        ASSERT_EQ(run_forward<norm_api>(context, c.desc), FW_OK);
        ASSERT_EQ(run_backward<norm_api>(context, c.desc, c.grads), FW_OK);
        expect_same_bits("y", c.y, dense.y);
        expect_same_bits("dx", c.dx, dense.dx);
        expect_same_bits("dgate", c.dgate, dense.dgate);
        expect_same_bits("dweight", c.dweight, dense.dweight);
      }
    }
  }
}

// a gradient that is not wanted changes nothing about the others
TEST_P(Norm, GradientsOneByOne) {
  TestContext context(impl());
  Call all(kSiluGateWeight, FW_F32, FW_F32, {70, 20});
  ASSERT_EQ(run_backward<norm_api>(context, all.desc, all.grads), FW_OK);
  fw_tensor fw_norm_grads::*const wanted[] = {&fw_norm_grads::dx, &fw_norm_grads::dweight, &fw_norm_grads::dgate};
  TestTensor Call::*const held[] = {&Call::dx, &Call::dweight, &Call::dgate};
  for (int i = 0; i < 3; ++i) {
    Call c(kSiluGateWeight, FW_F32, FW_F32, {70, 20});
    fw_norm_grads only = c.grads;
    for (int j = 0; j < 3; ++j) {
      if (j != i) only.*wanted[j] = fw_tensor{};
    }
    ASSERT_EQ(run_backward<norm_api>(context, c.desc, only), FW_OK);
    expect_same_bits("gradient", c.*held[i], all.*held[i]);
    for (int j = 0; j < 3; ++j) {
      EXPECT_EQ(isnan((c.*held[j]).get(0)), j != i);
    }
  }
}

TEST_P(Norm, AllocatesNothing) {
  if (fw::test::is_on_cuda()) GTEST_SKIP() << "not run: on CUDA the driver allocates for its launches";
  if (!is_counting()) GTEST_SKIP() << "not run: another allocator is in place";
  Call c(kSiluGateWeight, FW_BF16, FW_F32, {100, 70});
  TestContext context(impl(), 2);
  uint64_t bytes = 0;
  ASSERT_EQ(fw_norm_workspace_size(context, &c.desc, FW_BACKWARD, &bytes), FW_OK);
  TestWorkspace workspace(bytes);
  CountAllocations counted;
  EXPECT_EQ(fw_norm_forward(context, &c.desc, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(fw_norm_backward(context, &c.desc, &c.grads, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(counted.count(), 0);
}

FWTEST_EVERY_IMPL(Norm);

TEST(NormRefusals, EverySentence) {
  TestContext context;
  const auto refused = [&](const char *sentence, const std::function<void(Call &)> &spoil,
                           Kind kind = kSiluGateWeight) {
    Call c(kind, FW_F32, FW_F32, {2, 3});
    spoil(c);
    EXPECT_REFUSED(fw_norm_backward(context, &c.desc, &c.grads, nullptr, 0), FW_INVALID_ARGUMENT, sentence);
  };
  refused("norm: kind is 2, allowed 0 (L2) or 1 (RMS)", [](Call &c) { c.desc.kind = 2; });
  refused("norm: device is 2, allowed 0 (CPU) or 1 (CUDA)", [](Call &c) { c.desc.device = 2; });
  refused("norm: weight is given, but kind 0 (L2) takes none", [](Call &c) { c.desc.kind = FW_NORM_L2; });
  refused(
      "norm: gate is given, but kind 0 (L2) takes none", [](Call &c) { c.desc.kind = FW_NORM_L2; }, kSiluGate);
  refused("norm: gate_activation is 0, allowed 1 (SiLU) or 2 (sigmoid) with a gate",
          [](Call &c) { c.desc.gate_activation = 0; });
  refused("norm: gate_activation is 3, allowed 1 (SiLU) or 2 (sigmoid) with a gate",
          [](Call &c) { c.desc.gate_activation = 3; });
  refused("norm: eps is -1, allowed 1e-30 to 1e30 (0 means 1e-6)", [](Call &c) { c.desc.eps = -1; });
  refused("norm: eps is nan, allowed 1e-30 to 1e30 (0 means 1e-6)", [](Call &c) { c.desc.eps = __builtin_nan(""); });
  refused("norm: eps is 1e-40, allowed 1e-30 to 1e30 (0 means 1e-6)", [](Call &c) { c.desc.eps = 1e-40; });
  refused("norm: x is missing", [](Call &c) { c.desc.x.dtype = FW_NONE; });
  refused("norm: x has dtype an unknown dtype, allowed fp32, bf16, fp16, fp64", [](Call &c) { c.desc.x.dtype = 77; });
  refused("norm: weight has shape [4], expected [3]", [](Call &c) { c.desc.weight.shape[0] = 4; });
  refused("norm: weight has dtype fp64, allowed fp32, bf16, fp16", [](Call &c) { c.desc.weight.dtype = FW_F64; });
  refused("norm: gate has shape [2,4], expected [2,3]", [](Call &c) { c.desc.gate.shape[1] = 4; });
  refused("norm: y has 1 dimensions, expected 2", [](Call &c) { c.desc.y.ndim = 1; });
  refused("norm: dy is missing", [](Call &c) { c.grads.dy.dtype = FW_NONE; });
  refused("norm: dx has dtype bf16, allowed fp32", [](Call &c) { c.grads.dx.dtype = FW_BF16; });
  refused("norm: dweight has dtype fp16, allowed fp32", [](Call &c) { c.grads.dweight.dtype = FW_F16; });
  refused("norm: dweight is given, but weight is not", [](Call &c) { c.desc.weight.dtype = FW_NONE; });
  refused("norm: dgate is given, but gate is not", [](Call &c) { c.desc.gate.dtype = FW_NONE; });
  refused("norm: output dx overlaps itself: strides [0,1]", [](Call &c) { c.grads.dx.strides[0] = 0; });
  refused("norm: output dweight overlaps itself: strides [0]", [](Call &c) { c.grads.dweight.strides[0] = 0; });
  refused("norm: output dx shares memory with gate, allowed: none",
          [](Call &c) { c.grads.dx.data = c.desc.gate.data; });
  refused("norm: output dgate shares memory with dx, allowed: none",
          [](Call &c) { c.grads.dgate.data = c.grads.dx.data; });
  refused("norm: grads.reserved is 1, allowed 0", [](Call &c) { c.grads.reserved = 1; });
  refused("norm: x has a null data pointer", [](Call &c) { c.desc.x.data = nullptr; });
  refused("norm: dy has a null data pointer", [](Call &c) { c.grads.dy.data = nullptr; });
}

}  // namespace
}  // namespace fwtest
