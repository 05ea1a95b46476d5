// SPDX-License-Identifier: Apache-2.0
// Conversions of the half types, checks of shapes, strides and sharing, the workspace ledger.
#include <gtest/gtest.h>
#include <math.h>

#include <algorithm>
#include <set>
#include <vector>

#include "core/ledger.hpp"
#include "core/status.hpp"
#include "core/tensor.hpp"

TEST(Tensor, HalfTypesRoundTripEveryValue) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const uint16_t h = static_cast<uint16_t>(bits);
    const float from_f16 = fw::f16_to_f32(h), from_bf16 = fw::bf16_to_f32(h);
    if (isnan(from_f16)) {
      EXPECT_TRUE(isnan(fw::f16_to_f32(fw::f32_to_f16(from_f16))));
    } else {
      ASSERT_EQ(fw::f32_to_f16(from_f16), h);
    }
    if (isnan(from_bf16)) {
      EXPECT_TRUE(isnan(fw::bf16_to_f32(fw::f32_to_bf16(from_bf16))));
    } else {
      ASSERT_EQ(fw::f32_to_bf16(from_bf16), h);
      ASSERT_EQ(fw::f64_to_bf16(from_bf16), h);
    }
  }
}

// A value between two neighbours goes to the nearer, a tie to the even one.
TEST(Tensor, HalfTypesRoundToNearestEven) {
  for (uint32_t bits = 0; bits + 1 < 0x7c00; ++bits) {
    const uint16_t low = static_cast<uint16_t>(bits), high = static_cast<uint16_t>(bits + 1);
    const double a = fw::f16_to_f32(low), b = fw::f16_to_f32(high), middle = (a + b) / 2;
    ASSERT_EQ(fw::f64_to_f16(middle), low % 2 == 0 ? low : high);
    ASSERT_EQ(fw::f64_to_f16(nextafter(middle, a)), low);
    ASSERT_EQ(fw::f64_to_f16(nextafter(middle, b)), high);
  }
  for (uint32_t bits = 0; bits + 1 < 0x7f80; ++bits) {
    const uint16_t low = static_cast<uint16_t>(bits), high = static_cast<uint16_t>(bits + 1);
    const double a = fw::bf16_to_f32(low), b = fw::bf16_to_f32(high), middle = (a + b) / 2;
    ASSERT_EQ(fw::f64_to_bf16(middle), low % 2 == 0 ? low : high);
    ASSERT_EQ(fw::f64_to_bf16(nextafter(middle, a)), low);
    ASSERT_EQ(fw::f64_to_bf16(nextafter(middle, b)), high);
    ASSERT_EQ(fw::f32_to_bf16(static_cast<float>(middle)), low % 2 == 0 ? low : high);
  }
  EXPECT_EQ(fw::f32_to_f16(65519.9f), 0x7bff);
  EXPECT_EQ(fw::f32_to_f16(65520.0f), 0x7c00);
  EXPECT_EQ(fw::f32_to_f16(-INFINITY), 0xfc00);
}

TEST(Tensor, ShapeChecksSayWhatWasFound) {
  const int64_t shape[] = {2, 3}, other[] = {2, 4};
  float x[8];
  fw_tensor t = fw_dense(x, FW_F32, 2, shape);
  EXPECT_EQ(fw::check_tensor("op", "x", t, shape, 2, true), FW_OK);
  EXPECT_EQ(fw::check_tensor("op", "x", t, other, 2, true), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw::last_error(), "op: x has shape [2,3], expected [2,4]");
  EXPECT_EQ(fw::check_tensor("op", "x", t, shape, 1, true), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw::last_error(), "op: x has 2 dimensions, expected 1");
  t.data = nullptr;
  EXPECT_EQ(fw::check_tensor("op", "x", t, shape, 2, false), FW_OK);
  EXPECT_EQ(fw::check_tensor("op", "x", t, shape, 2, true), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw::last_error(), "op: x has a null data pointer");
  t.strides[0] = INT64_MAX;
  EXPECT_EQ(fw::check_tensor("op", "x", t, shape, 2, false), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw::last_error(), "op: x has strides that reach further than 2^58 elements");
  t.dtype = 77;
  EXPECT_EQ(fw::check_tensor("op", "x", t, shape, 2, false), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw::last_error(), "op: x has dtype number 77, allowed 1 to 6");
}

TEST(Tensor, OutputsMustNotOverlapThemselves) {
  const int64_t shape[] = {4, 3, 5};
  float x[64];
  fw_tensor t = fw_dense(x, FW_F32, 3, shape);
  EXPECT_EQ(fw::check_output("op", "y", t), FW_OK);
  std::swap(t.strides[0], t.strides[2]);
  std::swap(t.shape[0], t.shape[2]);
  EXPECT_EQ(fw::check_output("op", "y", t), FW_OK);
  t = fw_dense(x + 59, FW_F32, 3, shape);
  for (int64_t &stride : t.strides) stride = -stride;
  EXPECT_EQ(fw::check_output("op", "y", t), FW_OK);
  t = fw_dense(x, FW_F32, 3, shape);
  t.strides[1] = 0;
  EXPECT_EQ(fw::check_output("op", "y", t), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw::last_error(), "op: output y overlaps itself: strides [15,0,1]");
  t.strides[1] = 4;
  EXPECT_EQ(fw::check_output("op", "y", t), FW_INVALID_ARGUMENT);
}

// All shapes and strides of a range against a count of the addresses.
TEST(Tensor, OutputsOverlapExactlyWhenTwoElementsShareAnAddress) {
  int64_t n_none = 0, n_some = 0, n_interleaved = 0;
  const auto compare = [&](int32_t ndim, const int64_t *shape, const int64_t *strides) {
    fw_tensor t = fw_dense(nullptr, FW_F32, ndim, shape);
    std::set<int64_t> addresses;
    int64_t count = 1;
    for (int32_t i = 0; i < ndim; ++i) t.strides[i] = strides[i], count *= shape[i];
    for (int64_t at = 0; at < count; ++at) {
      int64_t offset = 0, rest = at;
      for (int32_t i = 0; i < ndim; ++i) offset += rest % shape[i] * strides[i], rest /= shape[i];
      addresses.insert(offset);
    }
    const bool is_apart = static_cast<int64_t>(addresses.size()) == count;
    ASSERT_EQ(fw::check_output("op", "y", t) == FW_OK, is_apart)
        << testing::PrintToString(std::vector<int64_t>(shape, shape + ndim)) << " "
        << testing::PrintToString(std::vector<int64_t>(strides, strides + ndim));
    (is_apart ? n_none : n_some) += 1;
    if (is_apart && ndim == 2 && strides[1] > 0 && strides[0] > strides[1] && strides[0] <= strides[1] * (shape[1] - 1))
      ++n_interleaved;
  };
  for (int64_t a = 1; a <= 5; ++a) {
    for (int64_t b = 1; b <= 5; ++b) {
      for (int64_t s = -12; s <= 12; ++s) {
        for (int64_t r = -12; r <= 12; ++r) {
          const int64_t shape[] = {a, b}, strides[] = {s, r};
          compare(2, shape, strides);
        }
      }
    }
  }
  EXPECT_GT(n_interleaved, 100);
  uint64_t random = 1;
  const auto draw = [&](int64_t n) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    return static_cast<int64_t>((random >> 33) % static_cast<uint64_t>(n));
  };
  n_none = n_some = 0;
  for (int repeat = 0; repeat < 6000; ++repeat) {
    const int32_t ndim = 3 + repeat % 3;
    int64_t shape[5], strides[5];
    for (int32_t i = 0; i < ndim; ++i) shape[i] = 1 + draw(4), strides[i] = draw(121) - 60;
    compare(ndim, shape, strides);
  }
  EXPECT_GT(n_none, 500);
  EXPECT_GT(n_some, 500);
}

TEST(Tensor, LargeInterleavedOutputs) {
  const auto check = [](std::vector<int64_t> shape, std::vector<int64_t> strides) {
    fw_tensor t = fw_dense(nullptr, FW_F32, static_cast<int32_t>(shape.size()), shape.data());
    std::copy(strides.begin(), strides.end(), t.strides);
    return fw::check_output("op", "y", t);
  };
  const int64_t big = int64_t{1} << 28;
  EXPECT_EQ(check({3, 2}, {2, 3}), FW_OK);
  EXPECT_EQ(check({big + 1, big}, {big, big + 1}), FW_OK);
  EXPECT_EQ(check({big + 2, big}, {big, big + 1}), FW_OK);
  EXPECT_EQ(check({big + 2, big + 1}, {big, big + 1}), FW_INVALID_ARGUMENT);
  // 5 a + 7 b reaches 3 (a = 2, b = -1) but not with fewer steps; the longest axes are far apart
  EXPECT_EQ(check({3, 2, 2}, {5, 7, 3}), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw::last_error(), "op: output y overlaps itself: strides [5,7,3]");
  EXPECT_EQ(check({2, 2, 2}, {5, 7, 3}), FW_OK);
  EXPECT_EQ(check({40000, 40000, 40000}, {40001, 40003, 40007}), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw::last_error(),
               "op: output y may overlap itself: strides [40001,40003,40007] need more than 65536 cases to tell");
  EXPECT_EQ(check({0, 2, 2}, {0, 0, 0}), FW_OK);
}

TEST(Tensor, DenseOutputsMustNotShareInterleavedViewsMay) {
  const int64_t shape[] = {4, 3};
  float x[64];
  fw_tensor a = fw_dense(x, FW_F32, 2, shape), b = fw_dense(x + 12, FW_F32, 2, shape);
  EXPECT_EQ(fw::check_disjoint("op", "y", a, "x", b), FW_OK);
  b.data = x + 11;
  EXPECT_EQ(fw::check_disjoint("op", "y", a, "x", b), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw::last_error(), "op: output y shares memory with x, allowed: none");
  a.strides[0] = b.strides[0] = 6;  // columns 0..2 and 3..5 of one buffer
  b.data = x + 3;
  EXPECT_EQ(fw::check_disjoint("op", "y", a, "x", b), FW_OK);
  b.data = x;
  EXPECT_EQ(fw::check_disjoint("op", "y", a, "x", b), FW_INVALID_ARGUMENT);
}

TEST(Ledger, CountsWhatItHandsOut) {
  fw::Ledger count(nullptr);
  count.take<float>(3);
  count.take<double>(0);
  count.take<char>(100);
  EXPECT_EQ(count.bytes(), 64u + 128u + 64u);
  alignas(64) char memory[512];
  fw::Ledger hand(memory + 1);
  float *first = hand.take<float>(3);
  char *second = hand.take<char>(100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0u);
  EXPECT_EQ(second - reinterpret_cast<char *>(first), 64);
  EXPECT_LE(second + 100, memory + 1 + count.bytes());
  fw::Ledger huge(nullptr);
  huge.take<double>(INT64_MAX / 2);
  EXPECT_TRUE(huge.overflow());
}
