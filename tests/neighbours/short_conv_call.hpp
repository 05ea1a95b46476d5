// SPDX-License-Identifier: Apache-2.0
// A call of fw_short_conv with its tensors, and what it must give, by formulas written here. Round-offs: z is a chain
// of W + 1 terms; SiLU adds 3.2 of the result and passes on z's by its slope (at most 1.1); dz passes z's on by the
// second derivative (at most 0.5); dx is a chain of W of them. dweight and dbias add a chain of 64 rows (W - 1 when
// larger), at most 64 tiles and the blocks. Copies (states) are exact but for their type.
#pragma once
#include "neighbours/harness.hpp"

namespace fwtest {

FWTEST_API(short_conv);

struct ConvShape {
  int64_t B, T, D, W;
  std::vector<int64_t> lengths;  // packed sequences; empty: one a batch entry
  int64_t n_sequences() const { return lengths.empty() ? B : static_cast<int64_t>(lengths.size()); }
};

struct ConvTypes {
  fw_dtype x = FW_F32, y = FW_F32, weight = FW_F32, state = FW_F32;
};

struct ConvCall {
  ConvShape shape;
  TestTensor x, weight, bias, initial_state, cu_seqlens, y, final_state, state, state_indices;
  TestTensor dy, d_final_state, dx, dweight, dbias, d_initial_state;
  fw_short_conv desc = {};
  fw_short_conv_grads grads = {};

  ConvCall(ConvShape s, bool has_silu, bool has_bias, bool has_state, ConvTypes types = {},
           Layout layout = Layout::kDense, Layout out = Layout::kDense)
      : shape(std::move(s)) {
    const int64_t N = shape.n_sequences();
    x = TestTensor(types.x, {shape.B, shape.T, shape.D}, layout);
    dy = TestTensor(types.y, {shape.B, shape.T, shape.D}, layout);
    y = TestTensor(types.y, {shape.B, shape.T, shape.D}, out);
    dx = TestTensor(types.x, {shape.B, shape.T, shape.D}, out);
    weight = TestTensor(types.weight, {shape.D, shape.W}, layout);
    dweight = TestTensor(types.weight, {shape.D, shape.W}, out);
    if (has_bias) {
      bias = TestTensor(types.weight, {shape.D}, layout);
      dbias = TestTensor(types.weight, {shape.D}, out);
    }
    if (has_state) {
      initial_state = TestTensor(types.state, {N, shape.D, shape.W - 1}, layout);
      d_initial_state = TestTensor(types.state, {N, shape.D, shape.W - 1}, out);
    }
    final_state = TestTensor(types.state, {N, shape.D, shape.W - 1}, out);
    d_final_state = TestTensor(types.state, {N, shape.D, shape.W - 1}, layout);
    if (!shape.lengths.empty()) {
      cu_seqlens = TestTensor(N % 2 ? FW_I32 : FW_I64, {N + 1}, Layout::kInterleaved);
      int64_t at = 0;
      for (int64_t n = 0; n <= N; ++n) {
        cu_seqlens.set(n, static_cast<double>(at));
        if (n < N) at += shape.lengths[static_cast<size_t>(n)];
      }
    }
    Rng rng(23);
    x.fill_normal(rng);
    dy.fill_normal(rng);
    weight.fill_normal(rng, 0.7);
    bias.fill_normal(rng);
    initial_state.fill_normal(rng);
    d_final_state.fill_normal(rng);
    desc.struct_size = sizeof desc;
    desc.activation = has_silu ? FW_ACTIVATION_SILU : FW_ACTIVATION_NONE;
    grads.struct_size = sizeof grads;
    refresh();
  }
  void refresh() {
    desc.x = x.view();
    desc.weight = weight.view();
    desc.bias = bias.view();
    desc.initial_state = initial_state.view();
    desc.cu_seqlens = cu_seqlens.view();
    desc.y = y.view();
    desc.final_state = final_state.view();
    desc.state = state.view();
    desc.state_indices = state_indices.view();
    grads.dy = dy.view();
    grads.d_final_state = d_final_state.view();
    grads.dx = dx.view();
    grads.dweight = dweight.view();
    grads.dbias = dbias.view();
    grads.d_initial_state = d_initial_state.view();
  }
  // The step of the same shape: `slots` states, which start as random numbers.
  void become_step(int64_t slots, fw_dtype dtype, const std::vector<int32_t> &indices,
                   Layout layout = Layout::kDense) {
    initial_state = final_state = TestTensor();
    state = TestTensor(dtype, {slots, shape.D, shape.W - 1}, layout);
    Rng rng(29);
    state.fill_normal(rng);
    if (!indices.empty()) {
      state_indices = TestTensor(FW_I32, {static_cast<int64_t>(indices.size())}, Layout::kInterleaved);
      state_indices.fill([&](int64_t i) { return indices[static_cast<size_t>(i)]; });
    }
    refresh();
  }
  int64_t begin_of(int64_t n) const { return cu_seqlens.is_given() ? static_cast<int64_t>(cu_seqlens.get(n)) : 0; }
  int64_t end_of(int64_t n) const {
    return cu_seqlens.is_given() ? static_cast<int64_t>(cu_seqlens.get(n + 1)) : shape.T;
  }
  int64_t row_index(int64_t n, int64_t position, int64_t d) const {  // flat index of x
    const int64_t batch = cu_seqlens.is_given() ? 0 : n;
    return (batch * shape.T + begin_of(n) + position) * shape.D + d;
  }
  int64_t state_index(int64_t n, int64_t d, int64_t i) const { return (n * shape.D + d) * (shape.W - 1) + i; }
};

inline fw_status run_step(fw_context *context, const fw_short_conv &desc) {
  return run_verb<short_conv_api>(context, desc, nullptr, FW_STEP, [&](const auto &d, const auto &, void *w, uint64_t n) {
    return fw_short_conv_step(context, &d, w, n);
  });
}

struct ConvTruth {
  std::vector<Truth> y, state, dx, dweight, dbias, d_initial_state;
};

// state: what the rows before each sequence are taken from and its slot; a negative slot skips the sequence
inline ConvTruth conv_truth(const ConvCall &c, const TestTensor &state,
                            const std::function<int64_t(int64_t)> &slot_of, int64_t n_slots) {
  const int64_t D = c.shape.D, W = c.shape.W, past = W - 1;
  const bool has_silu = c.desc.activation == FW_ACTIVATION_SILU;
  const auto sigmoid = [](double z) { return 1 / (1 + exp(-z)); };
  ConvTruth t;
  t.y.resize(static_cast<size_t>(c.x.size()));
  t.dx.resize(t.y.size());
  t.state.resize(static_cast<size_t>(n_slots * D * past));
  t.d_initial_state.resize(static_cast<size_t>(c.shape.n_sequences() * D * past));
  t.dweight.resize(static_cast<size_t>(D * W));
  t.dbias.resize(static_cast<size_t>(D));
  for (int64_t i = 0; state.is_given() && i < state.size() && i < n_slots * D * past; ++i)
    t.state[static_cast<size_t>(i)] = Truth(state.get(i));
  for (int64_t n = 0; n < c.shape.n_sequences(); ++n) {
    const int64_t slot = slot_of(n), length = c.end_of(n) - c.begin_of(n);
    if (slot < 0) continue;
    for (int64_t d = 0; d < D; ++d) {
      std::vector<double> window;
      for (int64_t i = 0; i < past; ++i)
        window.push_back(state.is_given() ? state.get(c.state_index(slot, d, i)) : 0);
      for (int64_t i = 0; i < length; ++i) window.push_back(c.x.get(c.row_index(n, i, d)));
      std::vector<Truth> d_window(window.size());
      for (int64_t i = 0; i < length; ++i) {
        Truth z(c.bias.is_given() ? c.bias.get(d) : 0);
        for (int64_t tap = 0; tap < W; ++tap) z.add(c.weight.get(d * W + tap) * window[static_cast<size_t>(i + tap)]);
        const int64_t at = c.row_index(n, i, d);
        const double s = sigmoid(z.value), slope = s * sigmoid(-z.value), dy = c.dy.get(at);
        t.y[static_cast<size_t>(at)] = has_silu ? Truth(z.value * s, 1.1 * z.magnitude + fabs(z.value * s)) : z;
        const Truth dz =
            has_silu ? Truth(dy * (s + z.value * slope), fabs(dy) * (s + fabs(z.value) * slope + 0.5 * z.magnitude))
                     : Truth(dy);
        for (int64_t tap = 0; tap < W; ++tap) {
          const double w = c.weight.get(d * W + tap), x = window[static_cast<size_t>(i + tap)];
          Truth &sum = t.dweight[static_cast<size_t>(d * W + tap)], &back = d_window[static_cast<size_t>(i + tap)];
          sum = {sum.value + dz.value * x, sum.magnitude + dz.magnitude * fabs(x)};
          back = {back.value + dz.value * w, back.magnitude + dz.magnitude * fabs(w)};
        }
        Truth &sum = t.dbias[static_cast<size_t>(d)];
        sum = {sum.value + dz.value, sum.magnitude + dz.magnitude};
      }
      for (int64_t i = 0; i < past; ++i) {
        t.state[static_cast<size_t>(c.state_index(slot, d, i))] = Truth(window[static_cast<size_t>(length + i)]);
        if (c.grads.d_final_state.dtype != FW_NONE)
          d_window[static_cast<size_t>(length + i)].add(c.d_final_state.get(c.state_index(n, d, i)));
      }
      for (int64_t i = 0; i < past; ++i)
        t.d_initial_state[static_cast<size_t>(c.state_index(n, d, i))] = d_window[static_cast<size_t>(i)];
      for (int64_t i = 0; i < length; ++i)
        t.dx[static_cast<size_t>(c.row_index(n, i, d))] = d_window[static_cast<size_t>(past + i)];
    }
  }
  return t;
}

inline void expect_conv_forward_and_backward(const char *impl, ConvCall &c) {
  TestContext context(impl);
  Watch watch;
  watch.input("x", c.x);
  watch.input("weight", c.weight);
  watch.input("bias", c.bias);
  watch.input("initial_state", c.initial_state);
  watch.input("cu_seqlens", c.cu_seqlens);
  watch.input("dy", c.dy);
  watch.input("d_final_state", c.d_final_state);
  for (TestTensor *t : {&c.y, &c.final_state, &c.dx, &c.dweight, &c.dbias, &c.d_initial_state})
    watch.output("an output", *t);
  ASSERT_EQ(run_forward<short_conv_api>(context, c.desc), FW_OK) << fw_last_error();
  EXPECT_STREQ(fw_last_impl(), impl);
  fw_short_conv backward = c.desc;
  backward.y = backward.final_state = fw_tensor{};
  ASSERT_EQ(run_backward<short_conv_api>(context, backward, c.grads), FW_OK) << fw_last_error();
  EXPECT_STREQ(fw_last_impl(), impl);
  watch.expect_intact();
  const ConvTruth t = conv_truth(
      c, c.initial_state, [](int64_t n) { return n; }, c.shape.n_sequences());
  const double W = static_cast<double>(c.shape.W), rows = static_cast<double>(c.shape.B * c.shape.T);
  const double chain = 2 * W + 16 + std::max(64.0, W) + rows / 64 + 8;
  expect_close("y", c.y, t.y, W + 6);
  expect_close("final_state", c.final_state, t.state, 0);
  expect_close("dx", c.dx, t.dx, 2 * W + 16);
  expect_close("dweight", c.dweight, t.dweight, chain);
  if (c.dbias.is_given()) expect_close("dbias", c.dbias, t.dbias, chain);
  if (c.d_initial_state.is_given()) expect_close("d_initial_state", c.d_initial_state, t.d_initial_state, 2 * W + 16);
}

}  // namespace fwtest
