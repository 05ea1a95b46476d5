// SPDX-License-Identifier: Apache-2.0
// fw_attention, forward and backward, against sums in fp64; the allowed errors are derived in attention_call.hpp.
#include "alloc_count.hpp"
#include "neighbours/attention_call.hpp"

namespace fwtest {
namespace {

void run_and_compare(const char *impl, const AttentionConfig &config) {
  AttentionCall a(config);
  const AttentionTruth truth(a);
  TestContext context(impl, 2);
  Watch watch;
  for (TestTensor *t : {&a.q, &a.k, &a.v, &a.cu, &a.starts, &a.d_o}) watch.input("an input", *t);
  for (TestTensor *t : {&a.o, &a.dq, &a.dk, &a.dv}) watch.output("an output", *t);
  a.forward(context);
  EXPECT_STREQ(fw_last_impl(), impl);
  a.backward(context);
  EXPECT_STREQ(fw_last_impl(), impl);
  watch.expect_intact();
  expect_close("o", a.o, truth.o, 1);
  expect_close("dq", a.dq, truth.dq, 1);
  expect_close("dk", a.dk, truth.dk, 1);
  expect_close("dv", a.dv, truth.dv, 1);
}

class Attention : public ImplTest {};

TEST_P(Attention, EveryDtype) {
  AttentionConfig c;
  c.T = 9, c.HQ = 2, c.HK = 2, c.D = 10, c.DV = 7, c.theta = 100;
  for (fw_dtype q : {FW_F32, FW_BF16, FW_F16}) {
    for (fw_dtype k : {FW_F32, FW_BF16, FW_F16}) {
      for (fw_dtype v : {FW_F32, FW_BF16, FW_F16}) {
        SCOPED_TRACE(testing::Message() << "dtypes " << q << k << v);
        c.q_dtype = q, c.k_dtype = k, c.v_dtype = v, c.o_dtype = q;
        run_and_compare(impl(), c);
      }
    }
  }
}

TEST_P(Attention, EveryWindow) {
  for (int64_t T : {1, 33, 70}) {
    for (int64_t window : {int64_t{1}, int64_t{2}, int64_t{7}, int64_t{33}, T, T + 5, int64_t{0}}) {
      SCOPED_TRACE(testing::Message() << "T " << T << " window " << window);
      AttentionConfig c;
      c.B = 2, c.T = T, c.HQ = 3, c.HK = 1, c.D = 6, c.DV = 9, c.theta = 10000, c.window = window;
      run_and_compare(impl(), c);
    }
  }
}

TEST_P(Attention, EveryGroupAndWidth) {
  const int64_t widths[][2] = {{1, 1}, {2, 3}, {3, 17}, {16, 16}, {33, 5}, {64, 40}, {130, 64}};
  for (int64_t group : {1, 2, 3}) {
    for (int64_t heads : {1, 2}) {
      for (const auto &w : widths) {
        SCOPED_TRACE(testing::Message() << "group " << group << " HK " << heads << " D " << w[0] << " DV " << w[1]);
        AttentionConfig c;
        c.T = 37, c.HQ = group * heads, c.HK = heads, c.D = w[0], c.DV = w[1], c.window = 11 * (heads - 1);
        c.theta = w[0] % 2 ? 0 : 50, c.scale = group == 2 ? -0.3 : 0;
        run_and_compare(impl(), c);
      }
    }
  }
}

TEST_P(Attention, ManyHeadsOnOneKey) {  // a group of more rows than a tile has
  AttentionConfig c;
  c.T = 5, c.HQ = 70, c.HK = 1, c.D = 4, c.DV = 3, c.window = 2;
  run_and_compare(impl(), c);
}

TEST_P(Attention, EveryLayout) {
  for (Layout in : {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved,
                    Layout::kBroadcast}) {
    for (Layout out : {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved}) {
      SCOPED_TRACE(testing::Message() << layout_name(in) << " to " << layout_name(out));
      AttentionConfig c;
      c.B = 2, c.T = 6, c.HQ = 4, c.HK = 2, c.D = 12, c.DV = 5, c.theta = 20, c.layout = in, c.out_layout = out;
      c.q_dtype = FW_BF16;
      run_and_compare(impl(), c);
    }
  }
}

TEST_P(Attention, PackedSequences) {  // the last three leave rows of no sequence: zeros
  for (const std::vector<int64_t> &cu :
       std::vector<std::vector<int64_t>>{{0, 0, 41, 41, 42, 100, 100}, {0, 100}, {0, 33, 66, 90}, {0, 0}, {0}}) {
    SCOPED_TRACE(testing::Message() << cu.size() << " offsets, last " << cu.back());
    AttentionConfig c;
    c.T = 100, c.HQ = 2, c.HK = 1, c.D = 8, c.DV = 4, c.theta = 1000, c.window = 13, c.cu = cu;
    for (size_t n = 1; n < cu.size(); ++n) c.starts.push_back(static_cast<int64_t>(n) * 17);
    run_and_compare(impl(), c);
  }
}

TEST_P(Attention, EmptyCalls) {
  AttentionConfig c;
  for (int64_t T : {0, 1}) {
    c.T = T, c.B = 1 - T;
    run_and_compare(impl(), c);
  }
}

TEST_P(Attention, AnglesAreTakenInFp64) {  // in fp32 an angle of 4e6 is wrong by 0.2
  AttentionConfig c;
  c.T = 12, c.D = 16, c.theta = 10000, c.starts = {4000003};
  run_and_compare(impl(), c);
}

TEST_P(Attention, LargeScores) {  // nearly one key a row; exponentials of differences up to thousands
  for (double scale : {30.0, 3000.0}) {
    AttentionConfig c;
    c.T = 50, c.D = 16, c.DV = 4, c.scale = scale;
    run_and_compare(impl(), c);
  }
}

TEST_P(Attention, Fp64) {
  AttentionConfig c;
  c.T = 20, c.HQ = 3, c.HK = 1, c.D = 6, c.theta = 9, c.window = 5;
  c.q_dtype = c.k_dtype = c.v_dtype = c.o_dtype = FW_F64;
  if (GetParam() == "reference") return run_and_compare(impl(), c);
  AttentionCall a(c);
  TestContext context(impl());
  const std::string sentence = "attention: implementation " + GetParam() +
                               " is forced and refuses: operands are fp64, this computes fp32, bf16 and fp16";
  a.desc.device = device_of(context);
  EXPECT_REFUSED(fw_attention_check(context, &a.desc, nullptr, FW_FORWARD), FW_UNSUPPORTED, sentence.c_str());
}

TEST_P(Attention, LaterRowsChangeNothingBefore) {
  AttentionConfig c;
  c.T = 75, c.HQ = 2, c.HK = 1, c.D = 24, c.DV = 10, c.theta = 100, c.window = 40;
  TestContext context(impl());
  AttentionCall a(c);
  a.forward(context);
  for (int64_t changed : {1, 31, 32, 50, 74}) {
    for (double value : {3e4, static_cast<double>(NAN)}) {
      AttentionCall b(c);
      for (TestTensor *t : {&b.q, &b.k, &b.v}) {
        const int64_t width = t->size() / c.T;
        for (int64_t i = changed * width; i < t->size(); ++i) t->set(i, value);
      }
      b.forward(context);
      const int64_t before = changed * c.HQ * c.DV;
      for (int64_t i = 0; i < before; ++i)
        ASSERT_EQ(a.o.get(i), b.o.get(i)) << "row " << i / (c.HQ * c.DV) << " of " << changed;
    }
  }
}

TEST_P(Attention, NanReachesOnlyTheRowsThatSeeIt) {
  AttentionConfig c;
  c.B = 2, c.T = 80, c.HQ = 4, c.HK = 2, c.D = 5, c.DV = 6, c.window = 9;
  TestContext context(impl());
  AttentionCall a(c);
  a.k.set_at({1, 40, 1, 2}, NAN);
  a.v.set_at({0, 20, 0, 3}, INFINITY);
  a.q.set_at({0, 70, 3, 0}, NAN);
  a.d_o.set_at({1, 10, 0, 1}, NAN);
  a.forward(context);
  a.backward(context);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t t = 0; t < 80; ++t) {
      for (int64_t h = 0; h < 4; ++h) {
        const bool sees_k = b == 1 && h / 2 == 1 && t >= 40 && t < 49,
                   sees_v = b == 0 && h / 2 == 0 && t >= 20 && t < 29;
        const bool own = b == 0 && h == 3 && t == 70, d_own = b == 1 && h == 0 && t == 10;
        for (int64_t d = 0; d < 6; ++d) {
          EXPECT_EQ(!isfinite(a.o.at({b, t, h, d})), sees_k || own || (sees_v && d == 3))
              << b << " " << t << " " << h << " " << d;
        }
        EXPECT_EQ(!isfinite(a.dq.at({b, t, h, 1})), sees_k || own || sees_v || d_own) << b << " " << t << " " << h;
      }
      // keys that a row with NaN sees: 9 positions back
      for (int64_t h = 0; h < 2; ++h) {
        const bool from_k = b == 1 && h == 1 && t >= 32 && t < 49, from_v = b == 0 && h == 0 && t >= 12 && t < 29;
        const bool from_q = b == 0 && h == 1 && t >= 62 && t <= 70, from_d = b == 1 && h == 0 && t >= 2 && t <= 10;
        EXPECT_EQ(!isfinite(a.dk.at({b, t, h, 1})), from_k || from_v || from_q || from_d)
            << b << " " << t << " " << h;
        EXPECT_EQ(!isfinite(a.dv.at({b, t, h, 1})), from_k || from_q || from_d) << b << " " << t << " " << h;
      }
    }
  }
}

TEST_P(Attention, SameBitsForEveryThreadCount) {
  AttentionConfig c;
  c.B = 2, c.T = 90, c.HQ = 6, c.HK = 2, c.D = 20, c.DV = 24, c.theta = 100, c.window = 50;
  AttentionCall a(c);
  expect_same_bits_on_any_threads(impl(), {&a.o, &a.dq, &a.dk, &a.dv}, [&](fw_context *context) {
    a.forward(context);
    a.backward(context);
  });
}

TEST_P(Attention, SameBitsForEveryPackingAndStart) {
  AttentionConfig c;
  c.T = 90, c.HQ = 4, c.HK = 2, c.D = 20, c.DV = 24, c.theta = 100, c.window = 37, c.cu = {0, 41, 90},
  c.starts = {5, 1000};
  TestContext context(impl());
  AttentionCall packed(c);
  packed.forward(context);
  packed.backward(context);
  for (int64_t n = 0; n < 2; ++n) {
    AttentionConfig alone = c;
    alone.cu.clear();
    alone.T = c.cu[static_cast<size_t>(n) + 1] - c.cu[static_cast<size_t>(n)];
    alone.starts = {c.starts[static_cast<size_t>(n)]};
    AttentionCall a(alone);
    const auto copy = [&](TestTensor &to, const TestTensor &from) {
      const int64_t skipped = c.cu[static_cast<size_t>(n)] * (from.size() / c.T);
      to.fill([&](int64_t i) { return from.get(skipped + i); });
    };
    copy(a.q, packed.q), copy(a.k, packed.k), copy(a.v, packed.v), copy(a.d_o, packed.d_o);
    a.forward(context);
    a.backward(context);
    const TestTensor *pairs[][2] = {{&a.o, &packed.o}, {&a.dq, &packed.dq}, {&a.dk, &packed.dk}, {&a.dv, &packed.dv}};
    for (const auto &pair : pairs) {
      const int64_t skipped = c.cu[static_cast<size_t>(n)] * (pair[1]->size() / c.T);
      for (int64_t i = 0; i < pair[0]->size(); ++i)
        ASSERT_EQ(pair[0]->get(i), pair[1]->get(skipped + i)) << "sequence " << n << " " << i;
    }
  }
}

TEST_P(Attention, GradientsOneByOneAreTheGradientsTogether) {
  AttentionConfig c;
  c.T = 21, c.theta = 7;
  AttentionCall a(c);
  TestContext context(impl());
  a.backward(context);
  TestTensor *const outputs[] = {&a.dq, &a.dk, &a.dv};
  for (int kept = 0; kept < 3; ++kept) {
    const std::vector<uint8_t> together = outputs[kept]->bits();
    a.refresh();
    fw_tensor *const views[] = {&a.grads.dq, &a.grads.dk, &a.grads.dv};
    for (int i = 0; i < 3; ++i) {
      if (i != kept) *views[i] = fw_tensor{};
    }
    outputs[kept]->poison();
    a.backward(context);
    EXPECT_TRUE(outputs[kept]->bits() == together) << "output " << kept;
  }
}

TEST_P(Attention, AllocatesNothing) {
  if (fw::test::is_on_cuda()) GTEST_SKIP() << "not run: on CUDA the driver allocates for its launches";
  if (!is_counting()) GTEST_SKIP() << "not run: another allocator is in place";
  AttentionConfig c;
  c.T = 70, c.HQ = 4, c.HK = 2, c.D = 64, c.DV = 64, c.theta = 100, c.q_dtype = FW_BF16;
  AttentionCall a(c);
  TestContext context(impl(), 2);
  uint64_t bytes = 0;
  ASSERT_EQ(fw_attention_workspace_size(context, &a.desc, FW_BACKWARD, &bytes), FW_OK);
  TestWorkspace workspace(bytes);
  CountAllocations counted;
  EXPECT_EQ(fw_attention_forward(context, &a.desc, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(fw_attention_backward(context, &a.desc, &a.grads, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(counted.count(), 0);
}

FWTEST_EVERY_IMPL(Attention);

TEST(AttentionGradients, AgreeWithCentralDifferencesOfTheReference) {
  // step h = 1e-4 in fp64: truncation h^2 times a third derivative of order 1, round-off 1e-16 / h: 1e-7 covers both
  AttentionConfig c;
  c.T = 7, c.HQ = 4, c.HK = 2, c.D = 4, c.DV = 3, c.theta = 10, c.window = 4, c.cu = {0, 2, 7}, c.starts = {3, 0};
  c.q_dtype = c.k_dtype = c.v_dtype = c.o_dtype = FW_F64;
  AttentionCall a(c);
  TestContext context("reference");
  a.backward(context);
  const auto loss = [&] {
    a.forward(context);
    double sum = 0;
    for (int64_t i = 0; i < a.o.size(); ++i) sum += a.o.get(i) * a.d_o.get(i);
    return sum;
  };
  const auto compare = [&](const char *name, TestTensor &input, const TestTensor &gradient) {
    for (int64_t i = 0; i < input.size(); ++i) {
      const double kept = input.get(i), step = 1e-4;
      input.set(i, kept + step);
      const double above = loss();
      input.set(i, kept - step);
      const double below = loss();
      input.set(i, kept);
      EXPECT_NEAR(gradient.get(i), (above - below) / (2 * step), 1e-7) << name << " " << input.index_text(i);
    }
  };
  compare("dq", a.q, a.dq);
  compare("dk", a.k, a.dk);
  compare("dv", a.v, a.dv);
}

TEST(AttentionGradients, AgreeWithTheReferenceOnTheSameInputs) {
  AttentionConfig c;
  c.T = 60, c.HQ = 4, c.HK = 2, c.D = 32, c.DV = 16, c.theta = 10000, c.window = 25;
  AttentionCall reference(c);
  TestContext reference_context("reference");
  reference.backward(reference_context);
  for (const std::string &name : impls_that_run()) {
    AttentionCall a(c);
    TestContext context(name.c_str());
    a.backward(context);
    const TestTensor *pairs[][2] = {{&a.dq, &reference.dq}, {&a.dk, &reference.dk}, {&a.dv, &reference.dv}};
    for (const auto &pair : pairs) {
      // RMS of the difference against the RMS: the terms of attention_call.hpp are of order 100 round-offs here
      double difference = 0, all = 0;
      for (int64_t i = 0; i < pair[0]->size(); ++i) {
        difference += pow(pair[0]->get(i) - pair[1]->get(i), 2);
        all += pow(pair[1]->get(i), 2);
      }
      EXPECT_LE(sqrt(difference / all), 100 * 0x1p-24) << name;
    }
  }
}

}  // namespace
}  // namespace fwtest
