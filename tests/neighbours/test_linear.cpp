// SPDX-License-Identifier: Apache-2.0
// fw_linear against sums taken here in fp64. A sum of n products in fp32, in whatever order, is within n + 1
// round-offs of the sum of their magnitudes (one rounding a product, n - 1 a chain at the longest; the lane-wise
// order is shorter), and the bias is one more: n + 2 are allowed in fp32, and in fp64 for the reference.
#include "alloc_count.hpp"
#include "neighbours/harness.hpp"

namespace fwtest {
namespace {

FWTEST_API(linear);

struct Shape {
  int64_t M, in, out;
};

struct Call {
  TestTensor x, weight, bias, y, dy, dx, dweight, dbias;
  fw_linear desc = {};
  fw_linear_grads grads = {};
  int64_t M, in, out;

  Call(Shape s, fw_dtype x_dtype, fw_dtype w_dtype, fw_dtype y_dtype, Layout layout = Layout::kDense,
       Layout out_layout = Layout::kDense, bool with_bias = true)
      : M(s.M), in(s.in), out(s.out) {
    x = TestTensor(x_dtype, {M, in}, layout);
    weight = TestTensor(w_dtype, {out, in}, layout);
    if (with_bias) bias = TestTensor(y_dtype, {out}, layout);
    y = TestTensor(y_dtype, {M, out}, out_layout);
    dy = TestTensor(y_dtype, {M, out}, layout);
    dx = TestTensor(x_dtype, {M, in}, out_layout);
    dweight = TestTensor(w_dtype, {out, in}, out_layout);
    if (with_bias) dbias = TestTensor(y_dtype, {out}, out_layout);
    Rng rng(7);
    x.fill_normal(rng);
    weight.fill_normal(rng);
    bias.fill_normal(rng);
    dy.fill_normal(rng);
    refresh();
  }
  void refresh() {
    desc.struct_size = sizeof desc;
    desc.x = x.view();
    desc.weight = weight.view();
    desc.bias = bias.view();
    desc.y = y.view();
    grads.struct_size = sizeof grads;
    grads.dy = dy.view();
    grads.dx = dx.view();
    grads.dweight = dweight.view();
    grads.dbias = dbias.view();
  }
  void forward(fw_context *context) { ASSERT_EQ(run_forward<linear_api>(context, desc), FW_OK) << fw_last_error(); }
  void backward(fw_context *context) {
    fw_linear without_y = desc;
    without_y.y = fw_tensor{};
    ASSERT_EQ(run_backward<linear_api>(context, without_y, grads), FW_OK) << fw_last_error();
  }
};

std::vector<Truth> products(int64_t rows, int64_t cols, int64_t depth,
                            const std::function<double(int64_t, int64_t)> &a,
                            const std::function<double(int64_t, int64_t)> &b) {
  std::vector<Truth> all;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      Truth sum;
      for (int64_t i = 0; i < depth; ++i) sum.add(a(r, i) * b(i, c));
      all.push_back(sum);
    }
  }
  return all;
}

void compare_forward(Call &c) {
  std::vector<Truth> y = products(
      c.M, c.out, c.in,
      [&](int64_t m, int64_t i) {
        return c.x.at({m, i});
      },
      [&](int64_t i, int64_t o) {
        return c.weight.at({o, i});
      });
  for (int64_t i = 0; c.bias.is_given() && i < c.M * c.out; ++i) y[static_cast<size_t>(i)].add(c.bias.get(i % c.out));
  expect_close("y", c.y, y, static_cast<double>(c.in + 2));
}
void compare_backward(Call &c) {
  const auto dy = [&](int64_t m, int64_t o) { return c.dy.at({m, o}); };
  expect_close("dx", c.dx,
               products(c.M, c.in, c.out, dy,
                        [&](int64_t o, int64_t i) {
                          return c.weight.at({o, i});
                        }),
               static_cast<double>(c.out + 2));
  expect_close("dweight", c.dweight,
               products(
                   c.out, c.in, c.M, [&](int64_t o, int64_t m) { return dy(m, o); },
                   [&](int64_t m, int64_t i) {
                     return c.x.at({m, i});
                   }),
               static_cast<double>(c.M + 2));
  if (!c.bias.is_given()) return;
  expect_close(
      "dbias", c.dbias,
      products(
          c.out, 1, c.M, [&](int64_t o, int64_t m) { return dy(m, o); }, [](int64_t, int64_t) { return 1.0; }),
      static_cast<double>(c.M + 2));
}

void run_and_compare(const char *impl, Call &c) {
  TestContext context(impl, 2);
  Watch watch;
  watch.input("x", c.x);
  watch.input("weight", c.weight);
  watch.input("bias", c.bias);
  watch.input("dy", c.dy);
  for (TestTensor *t : {&c.y, &c.dx, &c.dweight, &c.dbias}) watch.output("an output", *t);
  c.forward(context);
  EXPECT_STREQ(fw_last_impl(), impl);
  c.backward(context);
  EXPECT_STREQ(fw_last_impl(), impl);
  watch.expect_intact();
  compare_forward(c);
  compare_backward(c);
}

class Linear : public ImplTest {};

TEST_P(Linear, EveryDtype) {
  for (fw_dtype x : {FW_F32, FW_BF16, FW_F16}) {
    for (fw_dtype w : {FW_F32, FW_BF16, FW_F16}) {
      for (fw_dtype y : {FW_F32, FW_BF16, FW_F16}) {
        SCOPED_TRACE(testing::Message() << "dtypes " << x << w << y);
        Call c({5, 37, 19}, x, w, y);
        run_and_compare(impl(), c);
      }
    }
  }
}

TEST_P(Linear, EverySize) {
  const Shape shapes[] = {{1, 1, 1},   {1, 320, 25}, {2, 17, 49}, {3, 16, 9},   {4, 8, 3},    {5, 33, 50},
                          {7, 100, 8}, {8, 5, 23},   {33, 7, 97}, {70, 65, 24}, {9, 1030, 7}, {1, 2049, 10}};
  for (const Shape &s : shapes) {
    for (fw_dtype w : {FW_F32, FW_BF16}) {
      SCOPED_TRACE(testing::Message() << s.M << "x" << s.in << "x" << s.out << " weights " << w);
      Call c(s, FW_F32, w, FW_F32, Layout::kDense, Layout::kDense, s.M % 2 == 1);
      run_and_compare(impl(), c);
    }
  }
}

TEST_P(Linear, EveryLayout) {
  for (Layout in : {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved,
                    Layout::kBroadcast}) {
    for (Layout out : {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved}) {
      for (fw_dtype w : {FW_F32, FW_BF16, FW_F16}) {
        SCOPED_TRACE(testing::Message() << layout_name(in) << " to " << layout_name(out) << " weights " << w);
        Call c({9, 21, 26}, w == FW_F16 ? FW_BF16 : FW_F32, w, FW_F32, in, out);
        run_and_compare(impl(), c);
      }
    }
  }
}

TEST_P(Linear, EmptySizes) {
  for (const Shape &s : {Shape{0, 5, 3}, Shape{4, 0, 3}, Shape{4, 5, 0}, Shape{0, 0, 0}}) {
    SCOPED_TRACE(testing::Message() << s.M << "x" << s.in << "x" << s.out);
    Call c(s, FW_F32, FW_BF16, FW_F32);
    run_and_compare(impl(), c);  // in = 0: y is the bias; M = 0: dweight and dbias are 0; out = 0: dx is 0
  }
}

TEST_P(Linear, RowsDoNotDependOnHowManyThereAre) {
  for (fw_dtype w : {FW_F32, FW_BF16, FW_F16}) {
    for (int64_t in : {40, 53, 1100}) {
      SCOPED_TRACE(testing::Message() << "weights " << w << " in " << in);
      Call all({71, in, 53}, FW_F32, w, FW_F32);
      TestContext context(impl());
      all.forward(context);
      for (int64_t rows : {1, 2, 3, 5, 8, 33}) {
        for (int64_t first = 0; first + rows <= 71; first += 23) {
          Call some({rows, in, 53}, FW_F32, w, FW_F32, Layout::kPadded);
          some.x.fill([&](int64_t i) { return all.x.get(first * in + i); });
          some.weight.fill([&](int64_t i) { return all.weight.get(i); });
          some.bias.fill([&](int64_t i) { return all.bias.get(i); });
          some.refresh();
          some.forward(context);
          for (int64_t i = 0; i < rows * 53; ++i)
            ASSERT_EQ(some.y.get(i), all.y.get(first * 53 + i)) << rows << " rows from " << first;
        }
      }
    }
  }
}

TEST_P(Linear, OutputsDoNotDependOnTheirNeighbours) {
  Call all({6, 77, 61}, FW_F32, FW_BF16, FW_F32);
  TestContext context(impl());
  all.forward(context);
  Call one({6, 77, 1}, FW_F32, FW_BF16, FW_F32);
  for (int64_t o = 0; o < 61; ++o) {
    one.x.fill([&](int64_t i) { return all.x.get(i); });
    one.weight.fill([&](int64_t i) { return all.weight.get(o * 77 + i); });
    one.bias.fill([&](int64_t) { return all.bias.get(o); });
    one.forward(context);
    for (int64_t m = 0; m < 6; ++m) ASSERT_EQ(one.y.get(m), all.y.at({m, o})) << "output " << o;
  }
}

TEST_P(Linear, SameBitsForEveryThreadCount) {
  Call c({70, 130, 150}, FW_F32, FW_BF16, FW_F32, Layout::kPadded);
  expect_same_bits_on_any_threads(impl(), {&c.y, &c.dx, &c.dweight, &c.dbias}, [&](fw_context *context) {
    c.forward(context);
    c.backward(context);
  });
  Call decode({1, 600, 400}, FW_F32, FW_BF16, FW_F32);
  expect_same_bits_on_any_threads(impl(), {&decode.y}, [&](fw_context *context) { decode.forward(context); });
}

TEST_P(Linear, NanStaysInItsRowAndOutput) {
  TestContext context(impl());
  for (double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
    Call c({13, 41, 29}, FW_F32, FW_F32, FW_F32);
    c.x.set_at({6, 11}, bad);
    c.weight.set_at({17, 3}, NAN);
    c.dy.set_at({4, 9}, NAN);
    c.refresh();
    c.forward(context);
    c.backward(context);
    for (int64_t m = 0; m < 13; ++m) {
      for (int64_t o = 0; o < 29; ++o) EXPECT_EQ(!isfinite(c.y.at({m, o})), m == 6 || o == 17) << m << " " << o;
      for (int64_t i = 0; i < 41; ++i) EXPECT_EQ(!isfinite(c.dx.at({m, i})), m == 4 || i == 3) << m << " " << i;
    }
    for (int64_t o = 0; o < 29; ++o) {
      for (int64_t i = 0; i < 41; ++i) EXPECT_EQ(!isfinite(c.dweight.at({o, i})), o == 9 || i == 11) << o << " " << i;
      EXPECT_EQ(!isfinite(c.dbias.get(o)), o == 9) << o;
    }
  }
}

TEST_P(Linear, GradientsOneByOneAreTheGradientsTogether) {
  Call c({9, 21, 26}, FW_F32, FW_BF16, FW_F32);
  TestContext context(impl());
  c.backward(context);
  TestTensor *const outputs[] = {&c.dx, &c.dweight, &c.dbias};
  for (int kept = 0; kept < 3; ++kept) {
    const std::vector<uint8_t> together = outputs[kept]->bits();
    c.refresh();
    fw_tensor *const views[] = {&c.grads.dx, &c.grads.dweight, &c.grads.dbias};
    for (int i = 0; i < 3; ++i) {
      if (i != kept) *views[i] = fw_tensor{};
    }
    outputs[kept]->poison();
    c.backward(context);
    EXPECT_TRUE(outputs[kept]->bits() == together) << "output " << kept;
  }
}

TEST_P(Linear, Fp64) {
  Call c({5, 37, 19}, FW_F64, FW_F64, FW_F64, Layout::kPadded, Layout::kSwapped);
  if (GetParam() == "reference") return run_and_compare(impl(), c);
  TestContext context(impl());
  const std::string sentence = "linear: implementation " + GetParam() +
                               " is forced and refuses: operands are fp64, this computes fp32, bf16 and fp16";
  c.desc.device = device_of(context);
  EXPECT_REFUSED(fw_linear_check(context, &c.desc, nullptr, FW_FORWARD), FW_UNSUPPORTED, sentence.c_str());
}

TEST_P(Linear, AllocatesNothing) {
  if (fw::test::is_on_cuda()) GTEST_SKIP() << "not run: on CUDA the driver allocates for its launches";
  if (!is_counting()) GTEST_SKIP() << "not run: another allocator is in place";
  Call c({40, 130, 150}, FW_BF16, FW_F16, FW_F32, Layout::kSwapped);
  TestContext context(impl(), 2);
  uint64_t forward = 0, backward = 0;
  ASSERT_EQ(fw_linear_workspace_size(context, &c.desc, FW_FORWARD, &forward), FW_OK);
  ASSERT_EQ(fw_linear_workspace_size(context, &c.desc, FW_BACKWARD, &backward), FW_OK);
  TestWorkspace workspace(std::max(forward, backward));
  CountAllocations counted;
  EXPECT_EQ(fw_linear_forward(context, &c.desc, workspace.data(), workspace.size()), FW_OK);
  EXPECT_EQ(fw_linear_backward(context, &c.desc, &c.grads, workspace.data(), workspace.size()), FW_OK);
  EXPECT_EQ(counted.count(), 0);
}

FWTEST_EVERY_IMPL(Linear);

TEST(LinearGradients, AgreeWithCentralDifferencesOfTheReference) {
  // the loss is linear in each operand, so that a central difference has no truncation error: round-offs of 1 /
  // step remain
  Call c({3, 5, 4}, FW_F64, FW_F64, FW_F64);
  TestContext context("reference");
  c.backward(context);
  const auto loss = [&] {
    c.forward(context);
    double sum = 0;
    for (int64_t i = 0; i < c.y.size(); ++i) sum += c.y.get(i) * c.dy.get(i);
    return sum;
  };
  const auto compare = [&](const char *name, TestTensor &input, const TestTensor &gradient) {
    for (int64_t i = 0; i < input.size(); ++i) {
      const double kept = input.get(i), step = 0.5;
      input.set(i, kept + step);
      const double above = loss();
      input.set(i, kept - step);
      const double below = loss();
      input.set(i, kept);
      EXPECT_NEAR(gradient.get(i), (above - below) / (2 * step), 1e-12) << name << " " << input.index_text(i);
    }
  };
  compare("dx", c.x, c.dx);
  compare("dweight", c.weight, c.dweight);
  compare("dbias", c.bias, c.dbias);
}

TEST(LinearRefusals, EverySentence) {
  TestContext context;
  const auto refused = [&](fw_status status, const char *sentence, const std::function<void(Call &)> &spoil) {
    Call c({2, 3, 4}, FW_F32, FW_F32, FW_F32);
    spoil(c);
    EXPECT_REFUSED(fw_linear_forward(context, &c.desc, nullptr, 0), status, sentence);
    for (int64_t i = 0; i < c.y.size(); ++i) EXPECT_TRUE(isnan(c.y.get(i))) << "y was written: " << sentence;
  };
  const fw_status bad = FW_INVALID_ARGUMENT;
  refused(bad, "linear: desc.struct_size is 0, expected 408 (allowed 8 to 16384)",
          [](Call &c) { c.desc.struct_size = 0; });
  refused(bad, "linear: device is 7, allowed 0 (CPU) or 1 (CUDA)", [](Call &c) { c.desc.device = 7; });
  refused(bad, "linear: options is 4, allowed 0", [](Call &c) { c.desc.options = 4; });
  refused(bad, "linear: reserved is 1, allowed 0", [](Call &c) { c.desc.reserved = 1; });
  refused(bad, "linear: x is missing", [](Call &c) { c.desc.x.dtype = FW_NONE; });
  refused(bad, "linear: x has dtype int32, allowed fp32, bf16, fp16, fp64", [](Call &c) { c.desc.x.dtype = FW_I32; });
  refused(bad, "linear: x has 3 dimensions, allowed 2 to 2", [](Call &c) { c.desc.x.ndim = 3; });
  refused(bad, "linear: x has shape [-2,3], sizes must not be negative", [](Call &c) { c.desc.x.shape[0] = -2; });
  refused(bad, "linear: x has a null data pointer", [](Call &c) { c.desc.x.data = nullptr; });
  refused(bad, "linear: weight is missing", [](Call &c) { c.desc.weight.dtype = FW_NONE; });
  refused(bad, "linear: weight has 1 dimensions, expected 2", [](Call &c) { c.desc.weight.ndim = 1; });
  refused(bad, "linear: weight has shape [4,5], expected [4,3]", [](Call &c) { c.desc.weight.shape[1] = 5; });
  refused(bad, "linear: weight has shape [-4,3], sizes must not be negative",
          [](Call &c) { c.desc.weight.shape[0] = -4; });
  refused(bad, "linear: weight has dtype fp64, allowed fp32, bf16, fp16",
          [](Call &c) { c.desc.weight.dtype = FW_F64; });
  refused(bad, "linear: bias has shape [3], expected [4]", [](Call &c) { c.desc.bias.shape[0] = 3; });
  refused(bad, "linear: bias has dtype int64, allowed fp32, bf16, fp16", [](Call &c) { c.desc.bias.dtype = FW_I64; });
  refused(bad, "linear: y is missing", [](Call &c) { c.desc.y.dtype = FW_NONE; });
  refused(bad, "linear: y has shape [2,5], expected [2,4]", [](Call &c) { c.desc.y.shape[1] = 5; });
  refused(bad, "linear: y has dtype fp64, allowed fp32, bf16, fp16", [](Call &c) { c.desc.y.dtype = FW_F64; });
  refused(bad, "linear: output y overlaps itself: strides [0,1]", [](Call &c) { c.desc.y.strides[0] = 0; });
  refused(bad, "linear: output y shares memory with weight, allowed: none",
          [](Call &c) { c.desc.y.data = c.desc.weight.data; });
  const std::string no_cuda = cuda_refusal("linear");
  if (!no_cuda.empty()) refused(FW_UNSUPPORTED, no_cuda.c_str(), [](Call &c) { c.desc.device = FW_DEVICE_CUDA; });

  const auto refused_backward = [&](const char *sentence, const std::function<void(Call &)> &spoil) {
    Call c({2, 3, 4}, FW_F32, FW_BF16, FW_F32);
    spoil(c);
    EXPECT_REFUSED(fw_linear_backward(context, &c.desc, &c.grads, nullptr, 0), bad, sentence);
  };
  refused_backward("linear: grads.struct_size is 3, expected 392 (allowed 8 to 16384)",
                   [](Call &c) { c.grads.struct_size = 3; });
  refused_backward("linear: grads.reserved is 2, allowed 0", [](Call &c) { c.grads.reserved = 2; });
  refused_backward("linear: dy is missing", [](Call &c) { c.grads.dy.dtype = FW_NONE; });
  refused_backward("linear: dy has shape [2,3], expected [2,4]", [](Call &c) { c.grads.dy.shape[1] = 3; });
  refused_backward("linear: dx has dtype bf16, allowed fp32", [](Call &c) { c.grads.dx.dtype = FW_BF16; });
  refused_backward("linear: dx has shape [3,3], expected [2,3]", [](Call &c) { c.grads.dx.shape[0] = 3; });
  refused_backward("linear: dweight has dtype fp32, allowed bf16", [](Call &c) { c.grads.dweight.dtype = FW_F32; });
  refused_backward("linear: dbias is given, but bias is absent", [](Call &c) { c.desc.bias.dtype = FW_NONE; });
  refused_backward("linear: output dweight overlaps itself: strides [1,1]",
                   [](Call &c) { c.grads.dweight.strides[0] = 1; });
  refused_backward("linear: output dbias shares memory with dx, allowed: none",
                   [](Call &c) { c.grads.dbias.data = c.grads.dx.data; });

  Call c({2, 3, 4}, FW_F32, FW_F32, FW_F32);
  EXPECT_REFUSED(fw_linear_backward(context, &c.desc, nullptr, nullptr, 0), bad, "linear: grads is a null pointer");
  EXPECT_REFUSED(fw_linear_check(context, &c.desc, nullptr, FW_STEP), bad,
                 "linear: direction is 2, allowed 0 (forward) or 1 (backward)");
  EXPECT_EQ(fw_linear_backward(context, &c.desc, &c.grads, nullptr, 0), FW_WORKSPACE_TOO_SMALL);
  EXPECT_NE(strstr(fw_last_error(), "linear: workspace has 0 bytes, needed "), nullptr) << fw_last_error();
}

TEST(LinearRefusals, SizesPastMemory) {
  TestContext context("cpu_baseline", 1000);
  fw_linear desc = {};
  desc.struct_size = sizeof desc;
  const int64_t x[] = {1, int64_t{1} << 57}, w[] = {1, int64_t{1} << 57}, y[] = {1, 1};
  desc.x = fw_dense(nullptr, FW_BF16, 2, x);
  desc.weight = fw_dense(nullptr, FW_BF16, 2, w);
  desc.y = fw_dense(nullptr, FW_BF16, 2, y);
  desc.weight.strides[1] = -2;
  desc.x.strides[0] = desc.weight.strides[0] = 0;
  uint64_t bytes = 0;
  EXPECT_REFUSED(fw_linear_workspace_size(context, &desc, FW_FORWARD, &bytes), FW_INVALID_ARGUMENT,
                 "linear: the workspace of this call has more than 2^64 bytes (cpu_baseline)");
}

TEST(LinearQueries, TheOutputMayBeAbsent) {
  TestContext context;
  Call c({2, 3, 4}, FW_F32, FW_F32, FW_F32);
  uint64_t with = 0, without = 0;
  ASSERT_EQ(fw_linear_workspace_size(context, &c.desc, FW_FORWARD, &with), FW_OK);
  c.desc.y = fw_tensor{};
  ASSERT_EQ(fw_linear_workspace_size(context, &c.desc, FW_FORWARD, &without), FW_OK);
  EXPECT_EQ(with, without);
  EXPECT_REFUSED(fw_linear_check(context, &c.desc, nullptr, FW_FORWARD), FW_INVALID_ARGUMENT, "linear: y is missing");
}

TEST(LinearExplain, NamesEveryCandidate) {
  TestContext context("cpu_baseline");
  Call c({2, 3, 4}, FW_F32, FW_F32, FW_F32);
  char text[600];
  uint64_t needed = 0;
  ASSERT_EQ(fw_linear_explain(context, &c.desc, FW_FORWARD, text, sizeof text, &needed), FW_OK);
  EXPECT_EQ(needed, strlen(text) + 1);
  EXPECT_NE(strstr(text, "*cpu_baseline: accepted\n"), nullptr) << text;
  EXPECT_NE(strstr(text, "reference: refused: cpu_baseline is forced\n"), nullptr) << text;
}

}  // namespace
}  // namespace fwtest
