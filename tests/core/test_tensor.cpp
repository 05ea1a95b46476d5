// SPDX-License-Identifier: Apache-2.0
// Conversions of the half types, checks of shapes, strides and sharing, the workspace ledger.
#include <gtest/gtest.h>
#include <math.h>

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
