// SPDX-License-Identifier: Apache-2.0
// The C++ wrapper against the shared library: it changes nothing of what the C functions do, owns what it should, and
// turns every refusal into an exception or a status, by choice.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "fastweight/fastweight.hpp"

namespace {

namespace fw = fastweight;

constexpr int64_t kT = 5, kH = 2, kK = 3, kV = 4;

struct Kda {
  std::vector<float> q, k, v, g, beta, o, state;
  fw::Recurrence call{FW_OP_KDA};

  Kda() : o(kT * kH * kV, NAN), state(kH * kK * kV, NAN) {
    for (int64_t i = 0; i < kT * kH * kK; ++i) {
      q.push_back(0.1f * static_cast<float>(i % 7) - 0.2f);
      k.push_back(0.2f * static_cast<float>(i % 5) - 0.3f);
      g.push_back(-0.1f * static_cast<float>(i % 3));
    }
    for (int64_t i = 0; i < kT * kH * kV; ++i) v.push_back(0.3f * static_cast<float>(i % 4) - 0.4f);
    beta.assign(kT * kH, 0.5f);
    call.q = fw::tensor(q, {1, kT, kH, kK});
    call.k = fw::tensor(k, {1, kT, kH, kK});
    call.v = fw::tensor(v, {1, kT, kH, kV});
    call.g = fw::tensor(g, {1, kT, kH, kK});
    call.beta = fw::tensor(beta, {1, kT, kH});
    call.o = fw::tensor(o, {1, kT, kH, kV});
    call.final_state = fw::tensor(state, {1, kH, kK, kV});
  }
};

TEST(Tensor, TakesItsTypeFromTheElements) {
  std::vector<float> f(6);
  std::vector<double> d(6);
  std::vector<fw::Bf16> b(6);
  std::vector<fw::F16> h(6);
  std::vector<int32_t> i(6);
  std::vector<int64_t> l(6);
  EXPECT_EQ(fw::tensor(f, {2, 3}).dtype, FW_F32);
  EXPECT_EQ(fw::tensor(d, {2, 3}).dtype, FW_F64);
  EXPECT_EQ(fw::tensor(b, {2, 3}).dtype, FW_BF16);
  EXPECT_EQ(fw::tensor(h, {2, 3}).dtype, FW_F16);
  EXPECT_EQ(fw::tensor(i, {6}).dtype, FW_I32);
  EXPECT_EQ(fw::tensor(l, {6}).dtype, FW_I64);
}

TEST(Tensor, IsADenseViewOfVectorsArraysSpansAndPointers) {
  std::array<float, 6> array{};
  float plain[6] = {};
  const std::vector<float> fixed(6);
  for (const fw_tensor &t : {fw::tensor(array, {2, 3}), fw::tensor(std::span<float>(array), {2, 3}),
                             fw::tensor(array.data(), {2, 3})}) {
    EXPECT_EQ(t.data, array.data());
    EXPECT_EQ(t.ndim, 2);
    EXPECT_EQ(t.shape[0], 2);
    EXPECT_EQ(t.shape[1], 3);
    EXPECT_EQ(t.strides[0], 3);
    EXPECT_EQ(t.strides[1], 1);
  }
  EXPECT_EQ(fw::tensor(plain, {6}).data, plain);
  EXPECT_EQ(fw::tensor(fixed, {3, 2}).data, fixed.data());
}

TEST(Tensor, HasAnyStrides) {
  std::vector<float> x(12);
  const fw_tensor t = fw::tensor(x.data() + 11, {3, 4}, {-4, -1});
  EXPECT_EQ(t.strides[0], -4);
  EXPECT_EQ(t.strides[1], -1);
}

TEST(Tensor, RefusesASpanOfAnotherSize) {
  std::vector<float> x(5);
  try {
    (void)fw::tensor(x, {2, 3});
    FAIL() << "a span of 5 elements became a [2,3]";
  } catch (const fw::Error &error) {
    EXPECT_EQ(error.status(), FW_INVALID_ARGUMENT);
    EXPECT_STREQ(error.what(), "tensor: the span has 5 elements, the shape needs 6");
  }
}

TEST(Context, IsOwnedMovedAndDestroyedOnce) {
  static_assert(!std::is_copy_constructible_v<fw::Context>);
  fw::Context first(2);
  fw_context *raw = first.get();
  fw::Context second(std::move(first));
  EXPECT_EQ(second.get(), raw);
  EXPECT_EQ(first.get(), nullptr);  // NOLINT: a moved-from context is empty
  EXPECT_EQ(second.n_threads(), 2);
  EXPECT_NE(std::string(second.cpu_level()), "");
}

TEST(Context, CudaDevicesAreToldInTheRoomThatThereIs) {
  const std::string text = fw::cuda_devices();
  ASSERT_FALSE(text.empty());
  EXPECT_EQ(text.back(), '\n');
  EXPECT_TRUE(text.rfind("none", 0) == 0 || text.find(", compute capability ") != std::string::npos) << text;
  uint64_t needed = 0;
  EXPECT_EQ(fw_cuda_devices(nullptr, 0, &needed), FW_OK);
  EXPECT_EQ(needed, text.size() + 1);
  char few[] = "xxxxx";
  EXPECT_EQ(fw_cuda_devices(few, 3, nullptr), FW_OK);
  EXPECT_EQ(std::string(few), text.substr(0, 2));
  EXPECT_EQ(few[3], 'x');
}

TEST(Context, RefusalIsAnExceptionOrAStatus) {
  try {
    fw::Context context(-3);
    FAIL() << "a context with -3 threads";
  } catch (const fw::Error &error) {
    EXPECT_EQ(error.status(), FW_INVALID_ARGUMENT);
    EXPECT_NE(std::string(error.what()).find("n_threads is -3"), std::string::npos) << error.what();
  }
  fw::ContextOptions options;
  options.n_threads = -3;
  fw::Context context(nullptr);
  const fw::Status status = fw::Context::try_create(options, context);
  EXPECT_EQ(status.code(), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(status.name(), "FW_INVALID_ARGUMENT");
  EXPECT_NE(std::string(status.message()).find("n_threads is -3"), std::string::npos);
  EXPECT_EQ(context.get(), nullptr);
  options.n_threads = 1;
  EXPECT_TRUE(fw::Context::try_create(options, context).ok());
  EXPECT_EQ(context.n_threads(), 1);
}

TEST(Workspace, OnlyGrows) {
  fw::Workspace workspace;
  EXPECT_EQ(workspace.data(), nullptr);
  ASSERT_TRUE(workspace.try_reserve(100).ok());
  void *first = workspace.data();
  ASSERT_TRUE(workspace.try_reserve(10).ok());
  EXPECT_EQ(workspace.data(), first);
  EXPECT_EQ(workspace.size(), 100u);
  const fw::Status status = workspace.try_reserve(std::numeric_limits<uint64_t>::max() / 4);
  EXPECT_EQ(status.code(), FW_OUT_OF_MEMORY);
  EXPECT_STREQ(status.message(), "workspace: no memory for the size that the call needs");
  EXPECT_EQ(workspace.size(), 100u);
}

TEST(Verbs, ForwardGivesTheBitsOfTheCFunction) {
  fw::Context context(1);
  fw::Workspace workspace;
  Kda wrapped, plain;
  fw::forward(context, wrapped.call, workspace);

  uint64_t bytes = 0;
  ASSERT_EQ(fw_recurrence_workspace_size(context.get(), &plain.call, FW_FORWARD, &bytes), FW_OK) << fw_last_error();
  std::vector<char> scratch(bytes + 1);
  ASSERT_EQ(fw_recurrence_forward(context.get(), &plain.call, scratch.data(), bytes), FW_OK) << fw_last_error();
  EXPECT_EQ(wrapped.o, plain.o);
  EXPECT_EQ(wrapped.state, plain.state);
  for (const float x : wrapped.o) EXPECT_TRUE(std::isfinite(x));
}

TEST(Verbs, BackwardWritesTheGradientsThatAreGiven) {
  fw::Context context(1);
  fw::Workspace workspace;
  Kda one;
  std::vector<float> d_o(one.o.size(), 1.0f), dq(one.q.size(), NAN), dbeta(one.beta.size(), NAN);
  fw::RecurrenceGrads grads;
  grads.d_o = fw::tensor(d_o, {1, kT, kH, kV});
  grads.dq = fw::tensor(dq, {1, kT, kH, kK});
  grads.dbeta = fw::tensor(dbeta, {1, kT, kH});
  fw::check(context, one.call, FW_BACKWARD, &grads);
  fw::backward(context, one.call, grads, workspace);
  for (const float x : dq) EXPECT_TRUE(std::isfinite(x));
  for (const float x : dbeta) EXPECT_TRUE(std::isfinite(x));
}

TEST(Verbs, StepContinuesWhereForwardEnded) {
  fw::Context context(1);
  fw::Workspace workspace;
  Kda whole, parts;
  fw::forward(context, whole.call, workspace);

  std::vector<float> state(parts.state.size(), 0.0f);
  parts.call.final_state = {};
  parts.call.state = fw::tensor(state, {1, kH, kK, kV});
  fw::step(context, parts.call, workspace);
  for (size_t i = 0; i < whole.o.size(); ++i) EXPECT_NEAR(whole.o[i], parts.o[i], 1e-6f) << i;
  for (size_t i = 0; i < state.size(); ++i) EXPECT_NEAR(whole.state[i], state[i], 1e-6f) << i;
}

TEST(Verbs, RefusalIsAnExceptionOrAStatusWithTheSameSentence) {
  fw::Context context(1);
  fw::Workspace workspace;
  Kda one;
  one.call.beta.shape[1] = kT - 1;
  const fw::Status status = fw::try_forward(context, one.call, workspace);
  EXPECT_EQ(status.code(), FW_INVALID_ARGUMENT);
  const std::string sentence = status.message();
  EXPECT_NE(sentence.find("beta"), std::string::npos) << sentence;
  try {
    fw::forward(context, one.call, workspace);
    FAIL() << "beta of another length was taken";
  } catch (const fw::Error &error) {
    EXPECT_EQ(error.status(), FW_INVALID_ARGUMENT);
    EXPECT_EQ(error.what(), sentence);
  }
  for (const float x : one.o) EXPECT_TRUE(std::isnan(x)) << "a refused call wrote";
}

TEST(Verbs, ExplainHasOneChosenLine) {
  fw::Context context(1);
  Kda one;
  const std::string text = fw::explain(context, one.call, FW_FORWARD);
  EXPECT_EQ(text.find('\0'), std::string::npos);
  size_t chosen = 0;
  for (size_t at = text.find('*'); at != std::string::npos; at = text.find('*', at + 1)) ++chosen;
  EXPECT_EQ(chosen, 1u) << text;
  EXPECT_GT(fw::chunk_length(context, one.call), 0);
}

TEST(Verbs, ByItsAxesIsTheNamedRow) {
  fw::Context context(1);
  fw::Workspace workspace;
  Kda named, axes;
  axes.call.op = FW_OP_BY_AXES;
  axes.call.gate = FW_GATE_VECTOR;
  axes.call.erase = FW_ERASE_SHARED_AFTER;
  fw::forward(context, named.call, workspace);
  fw::forward(context, axes.call, workspace);
  EXPECT_EQ(named.o, axes.o);
}

TEST(Neighbours, HaveTheSameVerbs) {
  fw::Context context(1);
  fw::Workspace workspace;
  std::vector<float> x = {3, 4}, y(2, NAN);
  fw::Norm norm;
  norm.kind = FW_NORM_L2;
  norm.x = fw::tensor(x, {1, 2});
  norm.y = fw::tensor(y, {1, 2});
  fw::check(context, norm, FW_FORWARD);
  fw::forward(context, norm, workspace);
  EXPECT_NEAR(y[0], 0.6f, 1e-6f);
  EXPECT_NEAR(y[1], 0.8f, 1e-6f);
}

}  // namespace
