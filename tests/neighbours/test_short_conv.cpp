// SPDX-License-Identifier: Apache-2.0
// fw_short_conv, forward and backward, against the formulas of short_conv_call.hpp; its laws; its refusals. Steps:
// test_short_conv_step.cpp.
#include "alloc_count.hpp"
#include "neighbours/short_conv_call.hpp"

namespace fwtest {
namespace {

class ShortConv : public ImplTest {};

// field report: widths beyond 2 to 4, and width 1, wrong
TEST_P(ShortConv, EveryWidthBiasActivationAndState) {
  for (int64_t W : {1, 2, 3, 4, 5, 6, 7, 8, 9, 70}) {
    for (int options = 0; options < 8; ++options) {
      SCOPED_TRACE(testing::Message() << "W " << W << " options " << options);
      ConvCall c({2, W == 70 ? 90 : 21, 7, W, {}}, options & 1, options & 2, options & 4);
      expect_conv_forward_and_backward(impl(), c);
    }
  }
}

TEST_P(ShortConv, EveryDtype) {
  for (fw_dtype x : {FW_F32, FW_BF16, FW_F16}) {
    for (fw_dtype other : {FW_F32, FW_BF16, FW_F16}) {
      for (fw_dtype state : {FW_F32, FW_BF16, FW_F16}) {
        SCOPED_TRACE(testing::Message() << "dtypes " << x << " " << other << " " << state);
        ConvCall c({1, 19, 13, 4, {}}, true, true, true, {x, other, other, state});
        expect_conv_forward_and_backward(impl(), c);
      }
    }
  }
}

// field report: strides must be multiples of 8; D = 7 and 66, channel-first and channel-last, with packing
TEST_P(ShortConv, EveryShapeAndLayout) {
  const std::vector<ConvShape> shapes = {{1, 1, 1, 4, {}},
                                         {2, 0, 5, 3, {}},
                                         {0, 4, 5, 3, {}},
                                         {2, 4, 0, 3, {}},
                                         {3, 2, 66, 4, {}},
                                         {2, 131, 7, 4, {}},
                                         {1, 70, 130, 2, {}},
                                         {5, 1, 9, 4, {}},
                                         {1, 75, 66, 4, {1, 2, 3, 5, 64}},
                                         {1, 90, 7, 5, {0, 3, 0, 0, 70, 1, 0}},
                                         {1, 4, 3, 4, {}}};
  for (const ConvShape &shape : shapes) {
    for (Layout layout :
         {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved}) {
      SCOPED_TRACE(testing::Message() << "B " << shape.B << " T " << shape.T << " D " << shape.D << " W " << shape.W
                                      << " " << layout_name(layout));
      ConvCall c(shape, true, true, true, {}, layout,
                 layout == Layout::kSwapped ? Layout::kPadded : Layout::kSwapped);
      expect_conv_forward_and_backward(impl(), c);
    }
  }
}

// field reports: packed sequences and initial states together; the convolution slides over sample boundaries
TEST_P(ShortConv, PackedSequencesAreSeparateCalls) {
  TestContext context(impl());
  const std::vector<int64_t> lengths = {1, 2, 3, 5, 0, 66};
  ConvCall packed({1, 77, 10, 4, lengths}, true, true, true);
  ASSERT_EQ(run_forward<short_conv_api>(context, packed.desc), FW_OK);
  ASSERT_EQ(run_backward<short_conv_api>(context, packed.desc, packed.grads), FW_OK);
  for (int64_t n = 0; n < static_cast<int64_t>(lengths.size()); ++n) {
    const int64_t length = lengths[static_cast<size_t>(n)], begin = packed.begin_of(n);
    ConvCall one({1, length, 10, 4, {}}, true, true, true);
    one.x.fill([&](int64_t i) { return packed.x.get(begin * 10 + i); });
    one.dy.fill([&](int64_t i) { return packed.dy.get(begin * 10 + i); });
    one.weight.fill([&](int64_t i) { return packed.weight.get(i); });
    one.bias.fill([&](int64_t i) { return packed.bias.get(i); });
    one.initial_state.fill([&](int64_t i) { return packed.initial_state.get(n * 30 + i); });
    one.d_final_state.fill([&](int64_t i) { return packed.d_final_state.get(n * 30 + i); });
    ASSERT_EQ(run_forward<short_conv_api>(context, one.desc), FW_OK);
    ASSERT_EQ(run_backward<short_conv_api>(context, one.desc, one.grads), FW_OK);
    for (int64_t i = 0; i < length * 10; ++i) {
      ASSERT_EQ(one.y.get(i), packed.y.get(begin * 10 + i));
      ASSERT_EQ(one.dx.get(i), packed.dx.get(begin * 10 + i));
    }
    for (int64_t i = 0; i < 30; ++i) {
      ASSERT_EQ(one.final_state.get(i), packed.final_state.get(n * 30 + i));
      ASSERT_EQ(one.d_initial_state.get(i), packed.d_initial_state.get(n * 30 + i));
    }
  }
}

TEST_P(ShortConv, SplittingAnywhereGivesTheSameBits) {
  TestContext context(impl());
  ConvCall whole({2, 70, 9, 5, {}}, true, true, true);
  ASSERT_EQ(run_forward<short_conv_api>(context, whole.desc), FW_OK);
  for (int64_t split : {0, 1, 2, 4, 5, 64, 65, 69, 70}) {
    ConvCall head({2, split, 9, 5, {}}, true, true, true), tail({2, 70 - split, 9, 5, {}}, true, true, true);
    head.x.fill([&](int64_t i) { return whole.x.get(i / (split * 9) * 70 * 9 + i % (split * 9)); });
    tail.x.fill(
        [&](int64_t i) { return whole.x.get((i / ((70 - split) * 9) * 70 + split) * 9 + i % ((70 - split) * 9)); });
    for (ConvCall *c : {&head, &tail}) {
      c->weight.fill([&](int64_t i) { return whole.weight.get(i); });
      c->bias.fill([&](int64_t i) { return whole.bias.get(i); });
    }
    head.initial_state.fill([&](int64_t i) { return whole.initial_state.get(i); });
    ASSERT_EQ(run_forward<short_conv_api>(context, head.desc), FW_OK);
    tail.initial_state.fill([&](int64_t i) { return head.final_state.get(i); });
    ASSERT_EQ(run_forward<short_conv_api>(context, tail.desc), FW_OK);
    for (int64_t i = 0; i < whole.x.size(); ++i) {
      const int64_t batch = i / 630, row = i % 630 / 9, d = i % 9;
      const double y = row < split ? head.y.get((batch * split + row) * 9 + d)
                                   : tail.y.get((batch * (70 - split) + row - split) * 9 + d);
      ASSERT_EQ(whole.y.get(i), y) << "split " << split << " at " << whole.y.index_text(i);
    }
    expect_same_bits("final_state", whole.final_state, tail.final_state);
  }
}

TEST_P(ShortConv, ALaterTokenChangesNothingBefore) {
  TestContext context(impl());
  ConvCall c({1, 70, 9, 4, {}}, true, true, true);
  ASSERT_EQ(run_forward<short_conv_api>(context, c.desc), FW_OK);
  const std::vector<double> before = c.y.values();
  for (int64_t t : {0, 1, 40, 63, 64, 69}) {
    ConvCall changed({1, 70, 9, 4, {}}, true, true, true);
    for (int64_t d = 0; d < 9; ++d) changed.x.set(t * 9 + d, -1e30);
    ASSERT_EQ(run_forward<short_conv_api>(context, changed.desc), FW_OK);
    for (int64_t i = 0; i < t * 9; ++i) ASSERT_EQ(changed.y.get(i), before[static_cast<size_t>(i)]);
    EXPECT_NE(changed.y.get(t * 9), before[static_cast<size_t>(t * 9)]);
  }
}

TEST_P(ShortConv, ABatchEntryOrChannelAloneHasTheSameBits) {
  TestContext context(impl());
  ConvCall many({64, 6, 67, 4, {}}, true, true, true);
  ASSERT_EQ(run_forward<short_conv_api>(context, many.desc), FW_OK);
  ASSERT_EQ(run_backward<short_conv_api>(context, many.desc, many.grads), FW_OK);
  for (int64_t b : {0, 13, 63}) {
    for (int64_t d : {0, 63, 66}) {
      ConvCall one({1, 6, 1, 4, {}}, true, true, true);
      one.x.fill([&](int64_t i) { return many.x.get((b * 6 + i) * 67 + d); });
      one.dy.fill([&](int64_t i) { return many.dy.get((b * 6 + i) * 67 + d); });
      one.weight.fill([&](int64_t i) { return many.weight.get(d * 4 + i); });
      one.bias.fill([&](int64_t) { return many.bias.get(d); });
      one.initial_state.fill([&](int64_t i) { return many.initial_state.get((b * 67 + d) * 3 + i); });
      one.d_final_state.fill([&](int64_t i) { return many.d_final_state.get((b * 67 + d) * 3 + i); });
      ASSERT_EQ(run_forward<short_conv_api>(context, one.desc), FW_OK);
      ASSERT_EQ(run_backward<short_conv_api>(context, one.desc, one.grads), FW_OK);
      for (int64_t t = 0; t < 6; ++t) {
        ASSERT_EQ(one.y.get(t), many.y.get((b * 6 + t) * 67 + d));
        ASSERT_EQ(one.dx.get(t), many.dx.get((b * 6 + t) * 67 + d));
      }
    }
  }
}

// field report: changing one packed sample changes the next; a NaN stays in its channel, its sequence and its W rows
TEST_P(ShortConv, NanStaysInItsSequenceAndChannel) {
  TestContext context(impl());
  ConvCall c({1, 30, 5, 4, {10, 20}}, true, true, true);
  c.x.set(8 * 5 + 2, NAN);
  ASSERT_EQ(run_forward<short_conv_api>(context, c.desc), FW_OK);
  ASSERT_EQ(run_backward<short_conv_api>(context, c.desc, c.grads), FW_OK);
  for (int64_t t = 0; t < 30; ++t) {
    for (int64_t d = 0; d < 5; ++d) {
      EXPECT_EQ(isnan(c.y.at({0, t, d})), d == 2 && (t == 8 || t == 9)) << t << "," << d;
      EXPECT_EQ(isnan(c.dx.at({0, t, d})), d == 2 && t >= 5 && t <= 9) << t << "," << d;
    }
  }
  for (int64_t i = 0; i < c.final_state.size(); ++i) EXPECT_EQ(isnan(c.final_state.get(i)), i == 2 * 3 + 1);
  for (int64_t d = 0; d < 5; ++d) EXPECT_EQ(isnan(c.dweight.at({d, 0})), d == 2);
}

TEST_P(ShortConv, RowsOfNoSequenceAreZero) {
  ConvCall c({1, 12, 5, 3, {4, 3}}, true, true, false);
  expect_conv_forward_and_backward(impl(), c);
  for (int64_t i = 7 * 5; i < 12 * 5; ++i) {
    EXPECT_EQ(c.y.get(i), 0);
    EXPECT_EQ(c.dx.get(i), 0);
  }
}

TEST_P(ShortConv, GradientsWithoutOneOfTheIncoming) {
  for (bool has_dy : {false, true}) {
    ConvCall c({2, 9, 5, 4, {}}, true, true, true);
    if (has_dy) {
      c.d_final_state = TestTensor();
    } else {
      c.dy.fill([](int64_t) { return 0.0; });
    }
    c.refresh();
    expect_conv_forward_and_backward(impl(), c);
    if (has_dy) continue;
    ConvCall absent({2, 9, 5, 4, {}}, true, true, true);
    absent.grads.dy = fw_tensor{};
    TestContext context(impl());
    ASSERT_EQ(run_backward<short_conv_api>(context, absent.desc, absent.grads), FW_OK);
    for (int64_t i = 0; i < c.dx.size(); ++i) EXPECT_EQ(absent.dx.get(i), c.dx.get(i));
    for (int64_t i = 0; i < c.dweight.size(); ++i) EXPECT_EQ(absent.dweight.get(i), 0);
    for (int64_t i = 0; i < c.d_initial_state.size(); ++i)
      EXPECT_EQ(absent.d_initial_state.get(i), c.d_initial_state.get(i));
  }
}

TEST_P(ShortConv, GradientsMatchCentralDifferences) {
  if (GetParam() != "reference") GTEST_SKIP() << "not run: the differences need fp64";
  TestContext context(impl());
  const fw_dtype f64 = FW_F64;
  for (const ConvShape &shape : {ConvShape{2, 4, 3, 3, {}}, ConvShape{1, 8, 2, 4, {2, 0, 5}}}) {
    ConvCall c(shape, true, true, true, {f64, f64, f64, f64});
    ASSERT_EQ(run_backward<short_conv_api>(context, c.desc, c.grads), FW_OK);
    const auto loss = [&] {
      EXPECT_EQ(run_forward<short_conv_api>(context, c.desc), FW_OK);
      double sum = 0;
      for (int64_t i = 0; i < c.y.size(); ++i) sum += c.y.get(i) * c.dy.get(i);
      for (int64_t i = 0; i < c.final_state.size(); ++i) sum += c.final_state.get(i) * c.d_final_state.get(i);
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
        EXPECT_NEAR((above - below) / (2 * step), grad.get(i), 1e-8) << name << " " << input.index_text(i);
      }
    };
    compare("x", c.x, c.dx);
    compare("weight", c.weight, c.dweight);
    compare("bias", c.bias, c.dbias);
    compare("initial_state", c.initial_state, c.d_initial_state);
  }
}

TEST_P(ShortConv, SameBitsOnAnyThreads) {
  for (const ConvShape &shape : {ConvShape{3, 90, 130, 4, {}}, ConvShape{1, 200, 70, 3, {60, 0, 100, 30}}}) {
    ConvCall c(shape, true, true, true, {FW_BF16, FW_F32, FW_F32, FW_F32});
    expect_same_bits_on_any_threads(impl(), {&c.y, &c.final_state, &c.dx, &c.dweight, &c.dbias, &c.d_initial_state},
                                    [&](fw_context *context) {
                                      ASSERT_EQ(run_forward<short_conv_api>(context, c.desc), FW_OK);
                                      ASSERT_EQ(run_backward<short_conv_api>(context, c.desc, c.grads), FW_OK);
                                    });
  }
}

TEST_P(ShortConv, AllocatesNothing) {
  if (fw::test::is_on_cuda()) GTEST_SKIP() << "not run: on CUDA the driver allocates for its launches";
  if (!is_counting()) GTEST_SKIP() << "not run: another allocator is in place";
  ConvCall c({2, 70, 70, 4, {}}, true, true, true);
  TestContext context(impl(), 2);
  uint64_t bytes = 0;
  ASSERT_EQ(fw_short_conv_workspace_size(context, &c.desc, FW_BACKWARD, &bytes), FW_OK);
  TestWorkspace workspace(bytes);
  CountAllocations counted;
  EXPECT_EQ(fw_short_conv_forward(context, &c.desc, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(fw_short_conv_backward(context, &c.desc, &c.grads, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(counted.count(), 0);
}

FWTEST_EVERY_IMPL(ShortConv);

TEST(ShortConvRefusals, EverySentence) {
  TestContext context;
  const auto refused = [&](const char *sentence, const std::function<void(ConvCall &)> &spoil,
                           bool is_packed = false) {
    ConvCall c(is_packed ? ConvShape{1, 6, 3, 4, {2, 3}} : ConvShape{2, 6, 3, 4, {}}, true, true, true);
    spoil(c);
    EXPECT_REFUSED(fw_short_conv_backward(context, &c.desc, &c.grads, nullptr, 0), FW_INVALID_ARGUMENT, sentence);
  };
  refused("short_conv: device is 3, allowed 0 (CPU) or 1 (CUDA)", [](ConvCall &c) { c.desc.device = 3; });
  refused("short_conv: activation is 2, allowed 0 (none) or 1 (SiLU)", [](ConvCall &c) { c.desc.activation = 2; });
  refused("short_conv: options is 8, allowed bits 7", [](ConvCall &c) { c.desc.options = 8; });
  refused("short_conv: x has 2 dimensions, allowed 3 to 3", [](ConvCall &c) { c.desc.x.ndim = 2; });
  refused("short_conv: weight is missing", [](ConvCall &c) { c.desc.weight.dtype = FW_NONE; });
  refused("short_conv: weight has 1 dimensions, expected 2", [](ConvCall &c) { c.desc.weight.ndim = 1; });
  refused("short_conv: weight has W = 0, allowed 1 to 1073741824", [](ConvCall &c) { c.desc.weight.shape[1] = 0; });
  refused("short_conv: weight has shape [4,4], expected [3,4]", [](ConvCall &c) { c.desc.weight.shape[0] = 4; });
  refused("short_conv: bias has shape [2], expected [3]", [](ConvCall &c) { c.desc.bias.shape[0] = 2; });
  refused("short_conv: initial_state has shape [2,3,4], expected [2,3,3]",
          [](ConvCall &c) { c.desc.initial_state.shape[2] = 4; });
  refused("short_conv: final_state has shape [2,3,2], expected [2,3,3]",
          [](ConvCall &c) { c.desc.final_state.shape[2] = 2; });
  refused("short_conv: state is given, but only a step has it",
          [](ConvCall &c) { c.desc.state = c.desc.initial_state; });
  refused("short_conv: state_indices is given, but only a step has it",
          [](ConvCall &c) { c.desc.state_indices = c.desc.initial_state; });
  refused("short_conv: dy and d_final_state are both missing, expected at least one",
          [](ConvCall &c) { c.grads.dy = c.grads.d_final_state = fw_tensor{}; });
  refused("short_conv: dx has dtype bf16, allowed fp32", [](ConvCall &c) { c.grads.dx.dtype = FW_BF16; });
  refused("short_conv: dweight has dtype fp16, allowed fp32", [](ConvCall &c) { c.grads.dweight.dtype = FW_F16; });
  refused("short_conv: dbias is given, but bias is not", [](ConvCall &c) { c.desc.bias.dtype = FW_NONE; });
  refused("short_conv: d_initial_state is given, but initial_state is not",
          [](ConvCall &c) { c.desc.initial_state.dtype = FW_NONE; });
  refused("short_conv: d_final_state has shape [2,3,9], expected [2,3,3]",
          [](ConvCall &c) { c.grads.d_final_state.shape[2] = 9; });
  refused("short_conv: output dx overlaps itself: strides [0,3,1]", [](ConvCall &c) { c.grads.dx.strides[0] = 0; });
  refused("short_conv: output dx shares memory with x, allowed: none",
          [](ConvCall &c) { c.grads.dx.data = c.desc.x.data; });
  refused("short_conv: output dbias shares memory with dweight, allowed: none",
          [](ConvCall &c) { c.grads.dbias.data = c.grads.dweight.data; });
  refused("short_conv: batch is 2, must be 1 with cu_seqlens", [](ConvCall &c) {
    ConvCall packed({1, 6, 3, 4, {2, 3}}, true, true, true);
    c.cu_seqlens = packed.cu_seqlens;
    c.refresh();
  });
  refused(
      "short_conv: cu_seqlens[0] is 1, must be 0", [](ConvCall &c) { c.cu_seqlens.set(0, 1); }, true);
  refused(
      "short_conv: cu_seqlens[2] is 1, below the entry before it, 2", [](ConvCall &c) { c.cu_seqlens.set(2, 1); },
      true);
  refused(
      "short_conv: cu_seqlens[2] is 7, allowed at most T = 6", [](ConvCall &c) { c.cu_seqlens.set(2, 7); }, true);
  refused(
      "short_conv: cu_seqlens has dtype fp32, allowed int32, int64",
      [](ConvCall &c) { c.desc.cu_seqlens.dtype = FW_F32; }, true);
}

// check looks at values on request only, size queries never
TEST(ShortConvCheck, ValuesOnRequest) {
  TestContext context;
  ConvCall c({1, 6, 3, 4, {2, 3}}, true, true, true);
  c.cu_seqlens.set(2, 100);
  EXPECT_EQ(fw_short_conv_check(context, &c.desc, nullptr, FW_FORWARD), FW_OK);
  c.desc.options = FW_CHECK_VALUES;
  EXPECT_REFUSED(fw_short_conv_check(context, &c.desc, nullptr, FW_FORWARD), FW_INVALID_ARGUMENT,
                 "short_conv: cu_seqlens[2] is 100, allowed at most T = 6");
  uint64_t bytes = 0;
  EXPECT_EQ(fw_short_conv_workspace_size(context, &c.desc, FW_FORWARD, &bytes), FW_OK);
  c.desc.y = fw_tensor{};
  EXPECT_EQ(fw_short_conv_workspace_size(context, &c.desc, FW_FORWARD, &bytes), FW_OK);
  EXPECT_REFUSED(fw_short_conv_check(context, &c.desc, nullptr, FW_FORWARD), FW_INVALID_ARGUMENT,
                 "short_conv: y is missing");
}

}  // namespace
}  // namespace fwtest
