// SPDX-License-Identifier: Apache-2.0
// fw_attention_step: the ring caches, against sums in fp64 by position (attention_call.hpp) and against forward,
// bit for bit.
#include "alloc_count.hpp"
#include "neighbours/attention_call.hpp"

namespace fwtest {
namespace {

// One call on the caches as they are; o, the rows written and all others are compared.
void step_and_compare(const char *impl, AttentionCall &a) {
  const AttentionTruth truth(a);
  const std::vector<double> k_before = a.k_cache.values(), v_before = a.v_cache.values();
  TestContext context(impl, 2);
  Watch watch;
  for (TestTensor *t : {&a.q, &a.k, &a.v, &a.cu, &a.lengths, &a.indices}) watch.input("an input", *t);
  watch.output("o", a.o);
  a.step(context);
  EXPECT_STREQ(fw_last_impl(), impl);
  watch.expect_intact();
  EXPECT_TRUE(a.k_cache.surroundings_intact() && a.v_cache.surroundings_intact());
  expect_close("o", a.o, truth.o, 1);
  const auto expected = [](const std::vector<std::vector<Truth>> &written, const std::vector<double> &before) {
    std::vector<Truth> all(before.begin(), before.end());
    const size_t width = written.empty() ? 0 : before.size() / written.size();
    for (size_t row = 0; row < written.size(); ++row) {
      if (written[row].empty()) {
        for (size_t d = 0; d < width; ++d) all[row * width + d].magnitude = 0;  // kept: exactly
      } else {
        std::copy(written[row].begin(), written[row].end(), all.begin() + static_cast<std::ptrdiff_t>(row * width));
      }
    }
    return all;
  };
  // a turn: roundings of the sine, of the cosine and of two products
  expect_close("k_cache", a.k_cache, expected(truth.written_k, k_before), 4);
  expect_close("v_cache", a.v_cache, expected(truth.written_v, v_before), 0);
}

class AttentionStep : public ImplTest {};

TEST_P(AttentionStep, EveryLengthAndCapacity) {
  for (int64_t capacity : {1, 5, 32, 40}) {
    for (int64_t window : {int64_t{0}, int64_t{3}, capacity, capacity + 9}) {
      for (int64_t length : {0, 1, 4, 31, 39, 40, 1000}) {
        for (int64_t T : {1, 2, 45}) {
          SCOPED_TRACE(testing::Message()
                       << "capacity " << capacity << " window " << window << " length " << length << " T " << T);
          AttentionConfig c;
          c.T = T, c.HQ = 2, c.HK = 1, c.D = 4, c.DV = 5, c.theta = 100, c.window = window;
          c.capacity = capacity, c.slots = 1, c.lengths = {length};
          AttentionCall a(c);
          step_and_compare(impl(), a);
        }
      }
    }
  }
}

TEST_P(AttentionStep, EveryDtypeAndLayout) {
  for (fw_dtype cache : {FW_F32, FW_BF16, FW_F16}) {
    for (Layout layout :
         {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved}) {
      for (int64_t D : {16, 10}) {
        SCOPED_TRACE(testing::Message() << "cache " << cache << " " << layout_name(layout) << " D " << D);
        AttentionConfig c;
        c.B = 2, c.T = 3, c.HQ = 6, c.HK = 2, c.D = D, c.DV = 16, c.theta = 100, c.layout = layout,
        c.out_layout = layout;
        c.q_dtype = FW_F16, c.k_dtype = FW_BF16, c.cache_dtype = cache, c.capacity = 37, c.slots = 3,
        c.lengths = {50, 7};
        AttentionCall a(c);
        step_and_compare(impl(), a);
      }
    }
  }
}

TEST_P(AttentionStep, PoolOfSlots) {
  AttentionConfig c;
  c.T = 12, c.HQ = 3, c.HK = 3, c.D = 8, c.DV = 8, c.theta = 10, c.window = 6;
  c.cu = {0, 1, 1, 4, 9, 11};  // row 11 is of no sequence
  c.capacity = 8, c.slots = 7, c.lengths = {3, 9, 20, 8, 0}, c.indices = {5, 0, -1, 3, 6};
  AttentionCall a(c);
  step_and_compare(impl(), a);
  for (int64_t i = 1 * 24; i < 4 * 24; ++i) EXPECT_EQ(a.o.get(i), 0) << "a skipped sequence";
  for (int64_t i = 11 * 24; i < 12 * 24; ++i) EXPECT_EQ(a.o.get(i), 0) << "a row of no sequence";
}

TEST_P(AttentionStep, EmptyCallsChangeNothing) {
  AttentionConfig c;
  c.T = 0, c.capacity = 4, c.slots = 1, c.lengths = {2};
  AttentionCall a(c);
  step_and_compare(impl(), a);
}

TEST_P(AttentionStep, Fp64) {
  AttentionConfig c;
  c.T = 5, c.D = 6, c.theta = 10, c.capacity = 7, c.slots = 1, c.lengths = {11};
  c.q_dtype = c.k_dtype = c.v_dtype = c.o_dtype = c.cache_dtype = FW_F64;
  AttentionCall a(c);
  if (GetParam() == "reference") return step_and_compare(impl(), a);
  TestContext context(impl());
  EXPECT_EQ(fw_attention_check(context, &a.desc, nullptr, FW_STEP), FW_UNSUPPORTED);
}

// forward over the whole sequence, and steps of the given sizes through fp32 caches: the same bits, by the same
// arithmetic in the vector path. The reference keeps fp64 inside a call and fp32 in a cache: its difference is a
// rounding of the cache.
void expect_steps_like_forward(const char *impl, AttentionConfig c, int64_t capacity,
                               const std::vector<int64_t> &pieces) {
  TestContext context(impl, 2);
  AttentionCall whole(c);
  whole.forward(context);
  AttentionConfig part = c;
  part.capacity = capacity, part.slots = 1;
  // rows never written are NaN, and never read
  TestTensor k_cache(FW_F32, {1, capacity, c.HK, c.D}), v_cache(FW_F32, {1, capacity, c.HK, c.DV});
  int64_t done = 0;
  for (size_t i = 0; done < c.T; ++i) {
    part.T = std::min(pieces[i % pieces.size()], c.T - done);
    part.lengths = {done};
    AttentionCall a(part);
    a.k_cache = k_cache, a.v_cache = v_cache;
    const auto copy = [&](TestTensor &to, const TestTensor &from) {
      to.fill([&](int64_t j) { return from.get(done * (from.size() / c.T) + j); });
    };
    copy(a.q, whole.q), copy(a.k, whole.k), copy(a.v, whole.v);
    a.refresh();
    a.step(context);
    for (int64_t j = 0; j < a.o.size(); ++j) {
      const double want = whole.o.get(done * c.HQ * c.DV + j);
      if (std::string(impl) == "reference")
        ASSERT_NEAR(a.o.get(j), want, 1e-5) << "row " << done + j / (c.HQ * c.DV);
      else
        ASSERT_EQ(a.o.get(j), want) << "row " << done + j / (c.HQ * c.DV) << " in a piece of " << part.T << " after "
                                    << done;
    }
    k_cache = a.k_cache, v_cache = a.v_cache;
    done += part.T;
  }
}

TEST_P(AttentionStep, PiecesGiveTheBitsOfOneForward) {
  AttentionConfig c;
  c.T = 150, c.HQ = 3, c.HK = 1, c.D = 16, c.DV = 16, c.theta = 1000;
  for (const std::vector<int64_t> &pieces :
       std::vector<std::vector<int64_t>>{{1}, {5}, {32}, {1, 40, 2, 17}, {149}}) {
    for (int64_t window : {1, 2, 7, 45}) {
      SCOPED_TRACE(testing::Message() << "pieces of " << pieces[0] << " window " << window);
      c.window = window;
      expect_steps_like_forward(impl(), c, window, pieces);       // the ring wraps T / window times
      expect_steps_like_forward(impl(), c, window + 13, pieces);  // and where blocks and the ring do not line up
    }
    c.window = 0;
    expect_steps_like_forward(impl(), c, 150, pieces);
  }
  c.D = 10, c.DV = 7, c.HQ = 4, c.HK = 2, c.window = 50;  // gathered rows: no padding in the caches
  expect_steps_like_forward(impl(), c, 64, {1, 9, 70});
}

TEST_P(AttentionStep, CapacityIsAWindow) {  // full attention through a small ring is a sliding window of its capacity
  AttentionConfig c;
  c.T = 100, c.HQ = 2, c.HK = 2, c.D = 16, c.DV = 16, c.theta = 1000, c.window = 24;
  TestContext context(impl());
  AttentionCall window(c);
  window.forward(context);
  c.window = 0, c.capacity = 24, c.slots = 1, c.lengths = {0};
  AttentionCall ring(c);
  ring.k_cache.poison(), ring.v_cache.poison();
  ring.step(context);
  expect_same_bits("o", ring.o, window.o);
}

TEST_P(AttentionStep, SameBitsForEveryThreadCount) {
  AttentionConfig c;
  c.B = 3, c.T = 20, c.HQ = 6, c.HK = 2, c.D = 16, c.DV = 24, c.theta = 100, c.capacity = 64, c.slots = 3,
  c.lengths = {500, 3, 64};
  AttentionCall a(c);
  const TestTensor k = a.k_cache, v = a.v_cache;
  expect_same_bits_on_any_threads(impl(), {&a.o}, [&](fw_context *context) {
    a.k_cache = k, a.v_cache = v;
    a.refresh();
    a.step(context);
  });
}

TEST_P(AttentionStep, NanStaysInItsSlotAndHead) {
  AttentionConfig c;
  c.B = 2, c.T = 1, c.HQ = 4, c.HK = 2, c.D = 16, c.DV = 16, c.capacity = 16, c.slots = 2, c.lengths = {30, 30};
  AttentionCall a(c);
  a.k_cache.set_at({1, 4, 0, 3}, NAN);
  TestContext context(impl());
  a.step(context);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 4; ++h) EXPECT_EQ(isnan(a.o.at({b, 0, h, 5})), b == 1 && h < 2) << b << " " << h;
  }
}

TEST_P(AttentionStep, AllocatesNothing) {
  if (fw::test::is_on_cuda()) GTEST_SKIP() << "not run: on CUDA the driver allocates for its launches";
  if (!is_counting()) GTEST_SKIP() << "not run: another allocator is in place";
  AttentionConfig c;
  c.T = 3, c.HQ = 4, c.HK = 2, c.D = 64, c.DV = 64, c.theta = 100, c.capacity = 512, c.slots = 1, c.lengths = {2000};
  AttentionCall a(c);
  TestContext context(impl(), 2);
  uint64_t bytes = 0;
  ASSERT_EQ(fw_attention_workspace_size(context, &a.desc, FW_STEP, &bytes), FW_OK);
  TestWorkspace workspace(bytes);
  CountAllocations counted;
  EXPECT_EQ(fw_attention_step(context, &a.desc, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(counted.count(), 0);
}

FWTEST_EVERY_IMPL(AttentionStep);

TEST(AttentionRefusals, EverySentence) {
  TestContext context;
  AttentionConfig c;
  c.B = 2, c.T = 3, c.HQ = 4, c.HK = 2, c.D = 6, c.DV = 5;
  const fw_status bad = FW_INVALID_ARGUMENT;
  using Spoil = std::function<void(AttentionCall &)>;
  const auto refused = [&](const char *sentence, const Spoil &spoil, fw_status status = FW_INVALID_ARGUMENT) {
    AttentionCall a(c);
    spoil(a);
    EXPECT_REFUSED(fw_attention_forward(context, &a.desc, nullptr, 0), status, sentence);
    for (int64_t i = 0; i < a.o.size(); ++i) EXPECT_TRUE(isnan(a.o.get(i))) << "o was written: " << sentence;
  };
  using Call = AttentionCall;
  refused("attention: desc.struct_size is 4, expected 1000 (allowed 8 to 16384)",
          [](Call &a) { a.desc.struct_size = 4; });
  refused("attention: device is 7, allowed 0 (CPU) or 1 (CUDA)", [](Call &a) { a.desc.device = 7; });
  refused("attention: window is -1, allowed 0 (full) or more", [](Call &a) { a.desc.window = -1; });
  refused("attention: scale is nan, allowed a finite number", [](Call &a) { a.desc.scale = NAN; });
  refused("attention: rope_theta is -1, allowed 0 or a positive number", [](Call &a) { a.desc.rope_theta = -1; });
  refused("attention: rope_theta is inf, allowed 0 or a positive number",
          [](Call &a) { a.desc.rope_theta = INFINITY; });
  refused("attention: q is missing", [](Call &a) { a.desc.q.dtype = FW_NONE; });
  refused("attention: q has dtype int32, allowed fp32, bf16, fp16, fp64", [](Call &a) { a.desc.q.dtype = FW_I32; });
  refused("attention: q has 3 dimensions, allowed 4 to 4", [](Call &a) { a.desc.q.ndim = 3; });
  refused("attention: k has a null data pointer", [](Call &a) { a.desc.k.data = nullptr; });
  refused("attention: q has 4 heads, must be a multiple of the 3 of k", [](Call &a) { a.desc.k.shape[2] = 3; });
  refused("attention: HQ, HK, D, DV are 4, 0, 6, 5, allowed at least 1", [](Call &a) { a.desc.k.shape[2] = 0; });
  refused("attention: k has shape [2,3,2,7], expected [2,3,2,6]", [](Call &a) { a.desc.k.shape[3] = 7; });
  refused("attention: v has shape [2,4,2,5], expected [2,3,2,5]", [](Call &a) { a.desc.v.shape[1] = 4; });
  refused("attention: v has dtype fp64, allowed fp32, bf16, fp16", [](Call &a) { a.desc.v.dtype = FW_F64; });
  refused("attention: o is missing", [](Call &a) { a.desc.o.dtype = FW_NONE; });
  refused("attention: o has shape [2,3,4,6], expected [2,3,4,5]", [](Call &a) { a.desc.o.shape[3] = 6; });
  refused("attention: output o overlaps itself: strides [60,20,5,0]", [](Call &a) { a.desc.o.strides[3] = 0; });
  refused("attention: output o shares memory with v, allowed: none", [](Call &a) { a.desc.o.data = a.desc.v.data; });
  refused("attention: k_cache is given, but caches are for step only", [](Call &a) { a.desc.k_cache = a.desc.k; });
  refused("attention: cache_lengths is given, but caches are for step only",
          [](Call &a) { a.desc.cache_lengths = a.desc.k; });
  c.D = 7;
  refused("attention: q has D = 7, rope_theta needs an even number", [](Call &a) { a.desc.rope_theta = 10; });
  c.D = 6;
  c.starts = {4, -2};
  refused("attention: start_positions[1] is -2, allowed 0 to 2^52", [](Call &) {});
  c.starts = {4, 5, 6};
  refused("attention: start_positions has shape [3], expected [2]", [](Call &) {});
  c.starts.clear();
  c.cu = {0, 3};
  refused("attention: batch is 2, must be 1 with cu_seqlens", [](Call &) {});
  c.B = 1;
  c.cu = {0, 2, 1};
  refused("attention: cu_seqlens[2] is 1, below the entry before it, 2", [](Call &) {});
  c.cu.clear();
  const std::string no_cuda = cuda_refusal("attention");
  if (!no_cuda.empty()) refused(no_cuda.c_str(), [](Call &a) { a.desc.device = FW_DEVICE_CUDA; }, FW_UNSUPPORTED);

  const auto refused_backward = [&](const char *sentence, const Spoil &spoil) {
    AttentionCall a(c);
    spoil(a);
    EXPECT_REFUSED(fw_attention_backward(context, &a.desc, &a.grads, nullptr, 0), bad, sentence);
  };
  refused_backward("attention: grads.reserved is 2, allowed 0", [](Call &a) { a.grads.reserved = 2; });
  refused_backward("attention: d_o is missing", [](Call &a) { a.grads.d_o.dtype = FW_NONE; });
  refused_backward("attention: d_o has shape [1,3,4,4], expected [1,3,4,5]",
                   [](Call &a) { a.grads.d_o.shape[3] = 4; });
  refused_backward("attention: dq has dtype bf16, allowed fp32", [](Call &a) { a.grads.dq.dtype = FW_BF16; });
  refused_backward("attention: dk has shape [1,3,1,6], expected [1,3,2,6]", [](Call &a) { a.grads.dk.shape[2] = 1; });
  refused_backward("attention: output dv shares memory with d_o, allowed: none",
                   [](Call &a) { a.grads.dv.data = a.grads.d_o.data; });
  refused_backward("attention: output dk shares memory with dq, allowed: none",
                   [](Call &a) { a.grads.dk.data = a.grads.dq.data; });

  const auto refused_step = [&](const char *sentence, const Spoil &spoil) {
    AttentionCall a(c);
    spoil(a);
    EXPECT_REFUSED(fw_attention_step(context, &a.desc, nullptr, 0), bad, sentence);
  };
  refused_step("attention: k_cache is missing", [](Call &) {});
  c.B = 2, c.capacity = 4, c.slots = 3, c.lengths = {0, 1};
  refused_step("attention: k_cache has 3 dimensions, expected 4", [](Call &a) { a.desc.k_cache.ndim = 3; });
  refused_step("attention: k_cache has shape [3,4,1,6], expected [3,4,2,6]",
               [](Call &a) { a.desc.k_cache.shape[2] = 1; });
  refused_step("attention: v_cache has shape [3,5,2,5], expected [3,4,2,5]",
               [](Call &a) { a.desc.v_cache.shape[1] = 5; });
  refused_step("attention: v_cache is missing", [](Call &a) { a.desc.v_cache.dtype = FW_NONE; });
  refused_step("attention: k_cache has dtype int64, allowed fp32, bf16, fp16",
               [](Call &a) { a.desc.k_cache.dtype = FW_I64; });
  refused_step("attention: cache_lengths is missing", [](Call &a) { a.desc.cache_lengths.dtype = FW_NONE; });
  refused_step("attention: cache_lengths has dtype int32, allowed int64",
               [](Call &a) { a.desc.cache_lengths.dtype = FW_I32; });
  refused_step("attention: start_positions is given, but cache_lengths says where a step starts",
               [](Call &a) { a.desc.start_positions = a.desc.cache_lengths; });
  refused_step("attention: output v_cache shares memory with v, allowed: none",
               [](Call &a) { a.desc.v_cache.data = a.desc.v.data; });
  c.lengths = {0, -7};
  refused_step("attention: cache_lengths[1] is -7, allowed 0 to 2^52", [](Call &) {});
  c.lengths = {0, 1};
  c.indices = {2, 3};
  refused_step("attention: cache_indices[1] is 3, allowed below 3", [](Call &) {});
  c.indices = {1, 1};
  refused_step("attention: cache_indices[1] is 1, a slot that an earlier sequence has", [](Call &) {});
  c.indices.clear();
  c.slots = 1;
  refused_step("attention: k_cache has 1 slots, expected at least N = 2 without cache_indices", [](Call &) {});
  c.slots = 3, c.capacity = 0;
  AttentionCall a(c);
  a.refresh();
  const int64_t none[] = {3, 0, 2, 6}, none_v[] = {3, 0, 2, 5};
  a.desc.k_cache = fw_dense(nullptr, FW_F32, 4, none), a.desc.v_cache = fw_dense(nullptr, FW_F32, 4, none_v);
  EXPECT_REFUSED(fw_attention_step(context, &a.desc, nullptr, 0), bad,
                 "attention: k_cache has capacity 0, allowed at least 1");
  EXPECT_REFUSED(fw_attention_check(context, &a.desc, nullptr, 3), bad,
                 "attention: direction is 3, allowed 0 (forward), 1 (backward) or 2 (step)");
}

TEST(AttentionQueries, TheOutputMayBeAbsent) {
  TestContext context;
  AttentionCall c{AttentionConfig()};
  uint64_t with = 0, without = 0;
  ASSERT_EQ(fw_attention_workspace_size(context, &c.desc, FW_FORWARD, &with), FW_OK);
  c.desc.o = fw_tensor{};
  ASSERT_EQ(fw_attention_workspace_size(context, &c.desc, FW_FORWARD, &without), FW_OK);
  EXPECT_EQ(with, without);
  EXPECT_REFUSED(fw_attention_check(context, &c.desc, nullptr, FW_FORWARD), FW_INVALID_ARGUMENT,
                 "attention: o is missing");
}

TEST(AttentionExplain, NamesEveryCandidate) {
  TestContext context("cpu_baseline");
  AttentionCall a{AttentionConfig()};
  char text[600];
  uint64_t needed = 0;
  ASSERT_EQ(fw_attention_explain(context, &a.desc, FW_FORWARD, text, sizeof text, &needed), FW_OK);
  EXPECT_EQ(needed, strlen(text) + 1);
  EXPECT_NE(strstr(text, "*cpu_baseline: accepted\n"), nullptr) << text;
  EXPECT_NE(strstr(text, "reference: refused: cpu_baseline is forced\n"), nullptr) << text;
}

}  // namespace
}  // namespace fwtest
