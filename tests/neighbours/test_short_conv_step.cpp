// SPDX-License-Identifier: Apache-2.0
// fw_short_conv_step: the state in place, pools, negative indices, against short_conv_call.hpp and against the
// forward.
#include "alloc_count.hpp"
#include "neighbours/short_conv_call.hpp"

namespace fwtest {
namespace {

class ShortConvStep : public ImplTest {};

void expect_step(const char *impl, ConvCall &c) {
  TestContext context(impl);
  const bool has_indices = c.state_indices.is_given();
  const auto slot_of = [&](int64_t n) { return has_indices ? static_cast<int64_t>(c.state_indices.get(n)) : n; };
  const ConvTruth want = conv_truth(c, c.state, slot_of, c.state.shape()[0]);
  Watch watch;
  watch.input("x", c.x);
  watch.input("weight", c.weight);
  watch.input("bias", c.bias);
  watch.input("cu_seqlens", c.cu_seqlens);
  watch.input("state_indices", c.state_indices);
  watch.output("y", c.y);
  ASSERT_EQ(run_step(context, c.desc), FW_OK) << fw_last_error();
  EXPECT_STREQ(fw_last_impl(), impl);
  watch.expect_intact();
  EXPECT_TRUE(c.state.surroundings_intact());
  expect_close("y", c.y, want.y, static_cast<double>(c.shape.W) + 6);
  expect_close("state", c.state, want.state, 0);
}

TEST_P(ShortConvStep, EveryWidthLengthAndType) {
  for (int64_t W : {1, 2, 3, 4, 5, 8, 70}) {
    for (int64_t T : {0, 1, 2, 3, 66}) {
      for (fw_dtype dtype : {FW_F32, FW_BF16, FW_F16}) {
        SCOPED_TRACE(testing::Message() << "W " << W << " T " << T << " dtype " << dtype);
        ConvCall c({2, T, 7, W, {}}, true, true, false, {dtype, dtype, dtype, dtype});
        c.become_step(2, dtype, {});
        expect_step(impl(), c);
      }
    }
  }
}

TEST_P(ShortConvStep, EveryLayout) {
  for (Layout layout : {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved}) {
    SCOPED_TRACE(layout_name(layout));
    ConvCall c({3, 2, 66, 4, {}}, true, false, false, {}, layout, layout);
    c.become_step(5, FW_F32, {4, 0, 2}, layout);
    expect_step(impl(), c);
    ConvCall packed({1, 9, 7, 4, {1, 0, 5, 2}}, false, true, false, {}, layout, layout);  // one row of no sequence
    packed.become_step(4, FW_BF16, {}, layout);
    expect_step(impl(), packed);
    EXPECT_EQ(packed.y.at({0, 8, 3}), 0);
  }
}

// field report: rows with a negative index are skipped, and no slot is touched by them
TEST_P(ShortConvStep, NegativeIndicesSkip) {
  ConvCall c({3, 2, 5, 4, {}}, true, true, false);
  c.become_step(3, FW_F32, {2, -1, 0});
  const std::vector<double> before = c.state.values();
  expect_step(impl(), c);
  for (int64_t i = 0; i < 10; ++i) EXPECT_EQ(c.y.get(10 + i), 0);
  for (int64_t i = 15; i < 30; ++i) EXPECT_EQ(c.state.get(i), before[static_cast<size_t>(i)]);
}

// field report: writing back the last W-1 inputs fails when a chunk is shorter; chunks of 1, 1, 2, 1
TEST_P(ShortConvStep, ShortChunksGiveTheForwardsBits) {
  TestContext context(impl());
  ConvCall whole({1, 15, 9, 4, {}}, true, true, false);
  ASSERT_EQ(run_forward<short_conv_api>(context, whole.desc), FW_OK);
  TestTensor state(FW_F32, {1, 9, 3});
  state.fill([](int64_t) { return 0.0; });
  int64_t at = 0;
  for (int64_t length : {1, 1, 2, 1, 0, 7, 3}) {
    ConvCall c({1, length, 9, 4, {}}, true, true, false);
    c.become_step(1, FW_F32, {});
    c.state.fill([&](int64_t i) { return state.get(i); });
    c.weight.fill([&](int64_t i) { return whole.weight.get(i); });
    c.bias.fill([&](int64_t i) { return whole.bias.get(i); });
    c.x.fill([&](int64_t i) { return whole.x.get(at * 9 + i); });
    ASSERT_EQ(run_step(context, c.desc), FW_OK);
    for (int64_t i = 0; i < length * 9; ++i) ASSERT_EQ(c.y.get(i), whole.y.get(at * 9 + i)) << "token " << at;
    state.fill([&](int64_t i) { return c.state.get(i); });
    at += length;
  }
  ASSERT_EQ(at, 15);
  expect_same_bits("state", state, whole.final_state);
}

TEST_P(ShortConvStep, SameBitsOnAnyThreads) {
  ConvCall c({9, 3, 130, 4, {}}, true, true, false);
  c.become_step(9, FW_BF16, {8, 7, -1, 5, 4, 3, 2, 1, 0});
  const std::vector<double> start = c.state.values();
  expect_same_bits_on_any_threads(impl(), {&c.y}, [&](fw_context *context) {
    c.state.fill([&](int64_t i) { return start[static_cast<size_t>(i)]; });
    ASSERT_EQ(run_step(context, c.desc), FW_OK);
  });
}

TEST_P(ShortConvStep, AllocatesNothing) {
  if (fw::test::is_on_cuda()) GTEST_SKIP() << "not run: on CUDA the driver allocates for its launches";
  if (!is_counting()) GTEST_SKIP() << "not run: another allocator is in place";
  ConvCall c({3, 2, 70, 4, {}}, true, true, false);
  c.become_step(3, FW_F32, {2, -1, 0});
  TestContext context(impl(), 2);
  uint64_t bytes = 0;
  ASSERT_EQ(fw_short_conv_workspace_size(context, &c.desc, FW_STEP, &bytes), FW_OK);
  TestWorkspace workspace(bytes);
  CountAllocations counted;
  EXPECT_EQ(fw_short_conv_step(context, &c.desc, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(counted.count(), 0);
}

FWTEST_EVERY_IMPL(ShortConvStep);

TEST(ShortConvStepRefusals, EverySentence) {
  TestContext context;
  const auto refused = [&](const char *sentence, const std::function<void(ConvCall &)> &spoil) {
    ConvCall c({3, 2, 5, 4, {}}, true, true, false);
    c.become_step(4, FW_F32, {2, -1, 0});
    spoil(c);
    const std::vector<uint8_t> before = c.state.memory();
    EXPECT_REFUSED(fw_short_conv_step(context, &c.desc, nullptr, 0), FW_INVALID_ARGUMENT, sentence);
    EXPECT_TRUE(c.state.is_same_memory(before));
  };
  refused("short_conv: state is missing", [](ConvCall &c) { c.desc.state.dtype = FW_NONE; });
  refused("short_conv: state has 2 dimensions, expected 3", [](ConvCall &c) { c.desc.state.ndim = 2; });
  refused("short_conv: state has shape [4,5,4], expected [4,5,3]", [](ConvCall &c) { c.desc.state.shape[2] = 4; });
  refused("short_conv: state has 2 slots, expected at least N = 3 without state_indices", [](ConvCall &c) {
    c.desc.state.shape[0] = 2;
    c.desc.state_indices.dtype = FW_NONE;
  });
  refused("short_conv: state_indices[0] is 4, allowed below 4", [](ConvCall &c) { c.state_indices.set(0, 4); });
  refused("short_conv: state_indices[2] is 2, a slot that an earlier sequence has",
          [](ConvCall &c) { c.state_indices.set(2, 2); });
  refused("short_conv: state_indices has dtype int64, allowed int32",
          [](ConvCall &c) { c.desc.state_indices.dtype = FW_I64; });
  refused("short_conv: state_indices has shape [2], expected [3]",
          [](ConvCall &c) { c.desc.state_indices.shape[0] = 2; });
  refused("short_conv: initial_state is given, but a step reads state",
          [](ConvCall &c) { c.desc.initial_state = c.desc.state; });
  refused("short_conv: final_state is given, but a step writes state",
          [](ConvCall &c) { c.desc.final_state = c.desc.state; });
  refused("short_conv: output state overlaps itself: strides [0,3,1]",
          [](ConvCall &c) { c.desc.state.strides[0] = 0; });
  refused("short_conv: output state shares memory with x, allowed: none",
          [](ConvCall &c) { c.desc.state.data = c.desc.x.data; });
  refused("short_conv: y is missing", [](ConvCall &c) { c.desc.y.dtype = FW_NONE; });
}

}  // namespace
}  // namespace fwtest
