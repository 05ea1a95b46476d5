// SPDX-License-Identifier: Apache-2.0
// fw_feature_map against fp64 formulas written here. Round-offs allowed: forward 4 of the result (SiLU was measured
// at 3.2, tests/neighbours/test_vec.cpp), gradients 8 of s + |x s (1 - s)| for SiLU, whose two terms cancel near x =
// -1.28.
#include "alloc_count.hpp"
#include "neighbours/harness.hpp"

namespace fwtest {
namespace {

FWTEST_API(feature_map);

double sigmoid(double x) { return 1 / (1 + exp(-x)); }

Truth forward_truth(fw_feature_map_kind kind, double x) {
  switch (kind) {
    case FW_FEATURE_IDENTITY: return x;
    case FW_FEATURE_ELU_PLUS_ONE: return x > 0 ? x + 1 : exp(x);
    case FW_FEATURE_SILU: return x * sigmoid(x);
    default: return x > 0 ? x : 0;
  }
}
Truth grad_truth(fw_feature_map_kind kind, double x, double dy) {
  switch (kind) {
    case FW_FEATURE_IDENTITY: return dy;
    case FW_FEATURE_ELU_PLUS_ONE: return x > 0 ? dy : exp(x) * dy;
    case FW_FEATURE_SILU: {
      Truth t;
      t.add(sigmoid(x) * dy);
      t.add(x * sigmoid(x) * sigmoid(-x) * dy);
      return t;
    }
    default: return x > 0 ? dy : 0;
  }
}

struct Call {
  TestTensor x, y, dy, dx;
  fw_feature_map desc = {};
  fw_feature_map_grads grads = {};

  Call(fw_feature_map_kind kind, fw_dtype dtype, fw_dtype y_dtype, std::vector<int64_t> shape, Layout layout,
       Layout out_layout) {
    x = TestTensor(dtype, shape, layout);
    dy = TestTensor(y_dtype, shape, layout);
    y = TestTensor(y_dtype, shape, out_layout);
    dx = TestTensor(dtype, shape, out_layout);
    desc.struct_size = sizeof desc;
    desc.kind = kind;
    grads.struct_size = sizeof grads;
    Rng rng(11);
    x.fill_normal(rng, 3);
    dy.fill_normal(rng);
    refresh();
  }
  void refresh() {
    desc.x = x.view();
    desc.y = y.view();
    grads.dy = dy.view();
    grads.dx = dx.view();
  }
};

class FeatureMap : public ImplTest {};

void run_and_compare(const char *impl, Call &c) {
  TestContext context(impl);
  Watch watch;
  watch.input("x", c.x);
  watch.input("dy", c.dy);
  watch.output("y", c.y);
  watch.output("dx", c.dx);
  ASSERT_EQ(run_forward<feature_map_api>(context, c.desc), FW_OK) << fw_last_error();
  EXPECT_STREQ(fw_last_impl(), impl);
  fw_feature_map backward = c.desc;
  backward.y = fw_tensor{};
  ASSERT_EQ(run_backward<feature_map_api>(context, backward, c.grads), FW_OK) << fw_last_error();
  EXPECT_STREQ(fw_last_impl(), impl);
  watch.expect_intact();
  std::vector<Truth> y, dx;
  for (int64_t i = 0; i < c.x.size(); ++i) {
    y.push_back(forward_truth(c.desc.kind, c.x.get(i)));
    dx.push_back(grad_truth(c.desc.kind, c.x.get(i), c.dy.get(i)));
  }
  expect_close("y", c.y, y, 4);
  expect_close("dx", c.dx, dx, 8);
}

TEST_P(FeatureMap, EveryKindAndDtype) {
  for (fw_feature_map_kind kind = FW_FEATURE_IDENTITY; kind <= FW_FEATURE_RELU; ++kind) {
    for (fw_dtype dtype : {FW_F32, FW_BF16, FW_F16}) {
      for (fw_dtype y_dtype : {FW_F32, FW_BF16, FW_F16}) {
        SCOPED_TRACE(testing::Message() << "kind " << kind << " dtypes " << dtype << " " << y_dtype);
        Call c(kind, dtype, y_dtype, {3, 37}, Layout::kDense, Layout::kDense);
        run_and_compare(impl(), c);
      }
    }
  }
}

TEST_P(FeatureMap, EveryShapeAndLayout) {
  const std::vector<std::vector<int64_t>> shapes = {
      {1}, {5}, {2500}, {0}, {3, 0}, {4, 1}, {1, 1100}, {3, 33}, {2, 3, 17}, {2, 1, 3, 9}, {2, 3, 2, 3, 5}};
  for (const auto &shape : shapes) {
    for (Layout layout : {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved,
                          Layout::kBroadcast}) {
      for (Layout out :
           {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed, Layout::kInterleaved}) {
        SCOPED_TRACE(testing::Message() << shape.size() << " dims, " << layout_name(layout) << " to "
                                        << layout_name(out));
        Call c(FW_FEATURE_SILU, FW_F32, FW_F32, shape, layout, out);
        run_and_compare(impl(), c);
      }
    }
  }
}

TEST_P(FeatureMap, EdgesOfTheNumberLine) {
  const double edges[] = {0.0,  -0.0, 1e-40, -1e-40, 1e-8,  -1e-8,  80,     -80,
                          -100, -104, -1000, 1e30,   -1e30, 3.4e38, -3.4e38};
  for (fw_feature_map_kind kind = FW_FEATURE_IDENTITY; kind <= FW_FEATURE_RELU; ++kind) {
    SCOPED_TRACE(kind);
    Call c(kind, FW_F32, FW_F32, {static_cast<int64_t>(std::size(edges))}, Layout::kDense, Layout::kDense);
    c.x.fill([&](int64_t i) { return edges[i]; });
    run_and_compare(impl(), c);
  }
}

TEST_P(FeatureMap, NanStaysInItsElement) {
  TestContext context(impl());
  for (fw_feature_map_kind kind = FW_FEATURE_IDENTITY; kind <= FW_FEATURE_RELU; ++kind) {
    Call c(kind, FW_F32, FW_F32, {19}, Layout::kDense, Layout::kDense);
    c.x.set(7, NAN);
    c.refresh();
    ASSERT_EQ(run_forward<feature_map_api>(context, c.desc), FW_OK);
    for (int64_t i = 0; i < 19; ++i) EXPECT_EQ(isnan(c.y.get(i)), i == 7) << "kind " << kind << " element " << i;
  }
}

TEST_P(FeatureMap, Fp64) {
  Call c(FW_FEATURE_SILU, FW_F64, FW_F64, {3, 37}, Layout::kPadded, Layout::kSwapped);
  if (GetParam() == "reference") {
    run_and_compare(impl(), c);
    return;
  }
  TestContext context(impl());
  const std::string sentence = "feature_map: implementation " + GetParam() +
                               " is forced and refuses: operands are fp64, this computes fp32, bf16 and fp16";
  c.desc.device = device_of(context);
  EXPECT_REFUSED(feature_map_api::check(context, &c.desc, nullptr, FW_FORWARD), FW_UNSUPPORTED, sentence.c_str());
}

TEST_P(FeatureMap, SameBitsForEveryThreadCount) {
  Call c(FW_FEATURE_SILU, FW_BF16, FW_F32, {70, 1030}, Layout::kPadded, Layout::kDense);
  expect_same_bits_on_any_threads(impl(), {&c.y, &c.dx}, [&](fw_context *context) {
    ASSERT_EQ(run_forward<feature_map_api>(context, c.desc), FW_OK);
    ASSERT_EQ(run_backward<feature_map_api>(context, c.desc, c.grads), FW_OK);
  });
}

TEST_P(FeatureMap, AllocatesNothing) {
  if (fw::test::is_on_cuda()) GTEST_SKIP() << "not run: on CUDA the driver allocates for its launches";
  if (!is_counting()) GTEST_SKIP() << "not run: another allocator is in place";
  Call c(FW_FEATURE_SILU, FW_F32, FW_F32, {20, 1030}, Layout::kDense, Layout::kDense);
  TestContext context(impl(), 2);
  uint64_t bytes = 0;
  ASSERT_EQ(fw_feature_map_workspace_size(context, &c.desc, FW_BACKWARD, &bytes), FW_OK);
  TestWorkspace workspace(bytes);
  CountAllocations counted;
  EXPECT_EQ(fw_feature_map_forward(context, &c.desc, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(fw_feature_map_backward(context, &c.desc, &c.grads, workspace.data(), bytes), FW_OK);
  EXPECT_EQ(counted.count(), 0);
}

FWTEST_EVERY_IMPL(FeatureMap);

TEST(FeatureMapRefusals, EverySentence) {
  TestContext context;
  const auto refused = [&](fw_status status, const char *sentence, const std::function<void(Call &)> &spoil) {
    Call c(FW_FEATURE_RELU, FW_F32, FW_F32, {2, 3}, Layout::kDense, Layout::kDense);
    spoil(c);
    EXPECT_REFUSED(fw_feature_map_forward(context, &c.desc, nullptr, 0), status, sentence);
  };
  const fw_status bad = FW_INVALID_ARGUMENT;
  refused(bad, "feature_map: desc.struct_size is 0, expected 216 (allowed 8 to 16384)",
          [](Call &c) { c.desc.struct_size = 0; });
  refused(bad, "feature_map: desc.struct_size is 99999, expected 216 (allowed 8 to 16384)",
          [](Call &c) { c.desc.struct_size = 99999; });
  refused(bad, "feature_map: desc.struct_size is 212, expected 216 (allowed multiples of 8)",
          [](Call &c) { c.desc.struct_size = 212; });
  refused(bad, "feature_map: device is 7, allowed 0 (CPU) or 1 (CUDA)", [](Call &c) { c.desc.device = 7; });
  refused(bad, "feature_map: kind is 4, allowed 0 to 3", [](Call &c) { c.desc.kind = 4; });
  refused(bad, "feature_map: kind is -1, allowed 0 to 3", [](Call &c) { c.desc.kind = -1; });
  refused(bad, "feature_map: reserved is 1, allowed 0", [](Call &c) { c.desc.reserved = 1; });
  refused(bad, "feature_map: x is missing", [](Call &c) { c.desc.x.dtype = FW_NONE; });
  refused(bad, "feature_map: x has dtype int32, allowed fp32, bf16, fp16, fp64",
          [](Call &c) { c.desc.x.dtype = FW_I32; });
  refused(bad, "feature_map: x has 0 dimensions, allowed 1 to 5", [](Call &c) { c.desc.x.ndim = 0; });
  refused(bad, "feature_map: x has 6 dimensions, allowed 1 to 5", [](Call &c) { c.desc.x.ndim = 6; });
  refused(bad, "feature_map: x has shape [-2,3], sizes must not be negative",
          [](Call &c) { c.desc.x.shape[0] = -2; });
  refused(bad, "feature_map: x has a null data pointer", [](Call &c) { c.desc.x.data = nullptr; });
  refused(bad, "feature_map: x has strides that reach further than 2^58 elements",
          [](Call &c) { c.desc.x.strides[0] = INT64_MAX; });
  refused(bad, "feature_map: y is missing", [](Call &c) { c.desc.y.dtype = FW_NONE; });
  refused(bad, "feature_map: y has shape [2,4], expected [2,3]", [](Call &c) { c.desc.y.shape[1] = 4; });
  refused(bad, "feature_map: y has dtype fp64, allowed fp32, bf16, fp16", [](Call &c) { c.desc.y.dtype = FW_F64; });
  refused(bad, "feature_map: output y overlaps itself: strides [0,1]", [](Call &c) { c.desc.y.strides[0] = 0; });
  refused(bad, "feature_map: output y shares memory with x, allowed: none",
          [](Call &c) { c.desc.y.data = c.desc.x.data; });
  const std::string no_cuda = cuda_refusal("feature_map");
  if (no_cuda.empty()) {
    refused(bad, "feature_map: x is memory of the host, expected memory of CUDA device 0",
            [](Call &c) { c.desc.device = FW_DEVICE_CUDA; });
  } else {
    refused(FW_UNSUPPORTED, no_cuda.c_str(), [](Call &c) { c.desc.device = FW_DEVICE_CUDA; });
  }
  Call c(FW_FEATURE_RELU, FW_F32, FW_F32, {2, 3}, Layout::kDense, Layout::kDense);
  EXPECT_REFUSED(fw_feature_map_forward(nullptr, &c.desc, nullptr, 0), bad, "feature_map: context is a null pointer");
  EXPECT_REFUSED(fw_feature_map_forward(context, nullptr, nullptr, 0), bad, "feature_map: desc is a null pointer");
  EXPECT_REFUSED(fw_feature_map_backward(context, &c.desc, nullptr, nullptr, 0), bad,
                 "feature_map: grads is a null pointer");
  EXPECT_REFUSED(fw_feature_map_check(context, &c.desc, &c.grads, FW_FORWARD), bad,
                 "feature_map: grads is given, allowed for direction 1 (backward) only");
  EXPECT_REFUSED(fw_feature_map_check(context, &c.desc, nullptr, FW_STEP), bad,
                 "feature_map: direction is 2, allowed 0 (forward) or 1 (backward)");
  EXPECT_REFUSED(fw_feature_map_workspace_size(context, &c.desc, FW_FORWARD, nullptr), bad,
                 "feature_map: bytes is a null pointer");
  fw_feature_map_grads grads = c.grads;
  grads.dx.dtype = FW_BF16;
  EXPECT_REFUSED(fw_feature_map_check(context, &c.desc, &grads, FW_BACKWARD), bad,
                 "feature_map: dx has dtype bf16, allowed fp32");
  grads = c.grads;
  grads.dy.dtype = FW_NONE;
  EXPECT_REFUSED(fw_feature_map_check(context, &c.desc, &grads, FW_BACKWARD), bad, "feature_map: dy is missing");
  grads = c.grads;
  grads.reserved = 3;
  EXPECT_REFUSED(fw_feature_map_check(context, &c.desc, &grads, FW_BACKWARD), bad,
                 "feature_map: grads.reserved is 3, allowed 0");
  EXPECT_EQ(fw_feature_map_forward(context, &c.desc, nullptr, 0), FW_WORKSPACE_TOO_SMALL);
  EXPECT_NE(strstr(fw_last_error(), "feature_map: workspace has 0 bytes, needed "), nullptr) << fw_last_error();
}

TEST(FeatureMapDescriptor, OlderAndNewerCallers) {
  TestContext context;
  Call c(FW_FEATURE_RELU, FW_F32, FW_F32, {2, 3}, Layout::kDense, Layout::kDense);
  struct {
    fw_feature_map known;
    uint64_t more[2];
  } newer = {c.desc, {0, 0}};
  newer.known.struct_size = sizeof newer;
  EXPECT_EQ(fw_feature_map_check(context, &newer.known, nullptr, FW_FORWARD), FW_OK);
  newer.more[1] = 0x500;
  EXPECT_REFUSED(
      fw_feature_map_check(context, &newer.known, nullptr, FW_FORWARD), FW_INVALID_ARGUMENT,
      "feature_map: desc.struct_size is 232, and byte 225, past the 216 that this version knows, is 5, allowed 0");
  fw_feature_map older = c.desc;
  older.struct_size = offsetof(fw_feature_map, y);  // y does not exist for that caller
  EXPECT_REFUSED(fw_feature_map_check(context, &older, nullptr, FW_FORWARD), FW_INVALID_ARGUMENT,
                 "feature_map: y is missing");
}

TEST(FeatureMapExplain, NamesEveryCandidate) {
  TestContext context("cpu_baseline");
  Call c(FW_FEATURE_RELU, FW_F32, FW_F32, {2, 3}, Layout::kDense, Layout::kDense);
  char text[600], cut[10];
  uint64_t needed = 0;
  ASSERT_EQ(fw_feature_map_explain(context, &c.desc, FW_FORWARD, text, sizeof text, &needed), FW_OK);
  EXPECT_EQ(needed, strlen(text) + 1);
  EXPECT_NE(strstr(text, "*cpu_baseline: accepted\n"), nullptr) << text;
  EXPECT_NE(strstr(text, "reference: refused: cpu_baseline is forced\n"), nullptr) << text;
  ASSERT_EQ(fw_feature_map_explain(context, &c.desc, FW_BACKWARD, cut, sizeof cut, nullptr), FW_OK);
  EXPECT_EQ(strlen(cut), 9u);
}

}  // namespace
}  // namespace fwtest
