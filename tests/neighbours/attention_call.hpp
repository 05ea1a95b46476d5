// SPDX-License-Identifier: Apache-2.0
// A call of fw_attention with its tensors, and what it must give, summed here in fp64 by position.
//
// Allowed error, in round-offs u of the computing type. A score of D products of turned operands is within
// (D + 12) u M of the truth, M = sum |q'| |k'| with |x'| <= |x1| + |x2| (12: scale, two turns of 4, the product,
// slack). A weight exp(score - top), rescaled once a block, is within e u of its truth relative to itself, up to a
// factor that all weights of the row share:
//   e = max over keys (D + 12) M + 2 (highest - lowest score) + 3 blocks + keys + 6
// (argument and result of each exponential; the chain of sums). Then, with p the weights:
//   o    2 e sum p |v|                      (numerator and divisor)
//   dv   sum over rows p |d_o| (2 e + rows)
//   ds = p (dp - delta), |ds| <= p (A + B), A = sum |d_o| |v|, B = sum p A; within p (A + B) (4 e + DV + 4)
//   dq   scale * sum over keys p (A + B) |k'| (4 e + DV + keys + 16), both halves of a turned pair together
//   dk   likewise over rows
// A weight below 2^-149 underflows: in a bound p stands for p + 2^-125, which is 2^-149 after the factor u.
#pragma once
#include "neighbours/harness.hpp"

namespace fwtest {

struct attention_api {
  using Desc = fw_attention;
  using Grads = fw_attention_grads;
  static constexpr auto check = fw_attention_check;
  static constexpr auto workspace_size = fw_attention_workspace_size;
  static constexpr auto forward = fw_attention_forward;
  static constexpr auto backward = fw_attention_backward;
  static constexpr auto explain = fw_attention_explain;
};

struct AttentionConfig {
  int64_t B = 1, T = 8, HQ = 2, HK = 1, D = 8, DV = 8;
  int64_t window = 0;
  double scale = 0, theta = 0;
  std::vector<int64_t> cu, starts;  // empty: absent
  fw_dtype q_dtype = FW_F32, k_dtype = FW_F32, v_dtype = FW_F32, o_dtype = FW_F32;
  Layout layout = Layout::kDense, out_layout = Layout::kDense;
  // step when capacity > 0
  int64_t capacity = 0, slots = 0;
  std::vector<int64_t> lengths, indices;
  fw_dtype cache_dtype = FW_F32;
  uint64_t seed = 3;

  int64_t sequences() const { return cu.empty() ? B : static_cast<int64_t>(cu.size()) - 1; }
};

inline TestTensor ints(fw_dtype dtype, const std::vector<int64_t> &values, Layout layout = Layout::kDense) {
  if (values.empty()) return TestTensor();
  TestTensor t(dtype, {static_cast<int64_t>(values.size())}, layout);
  t.fill([&](int64_t i) { return static_cast<double>(values[static_cast<size_t>(i)]); });
  return t;
}

struct AttentionCall {
  AttentionConfig c;
  TestTensor q, k, v, cu, starts, o, k_cache, v_cache, lengths, indices, d_o, dq, dk, dv;
  fw_attention desc = {};
  fw_attention_grads grads = {};

  explicit AttentionCall(const AttentionConfig &config) : c(config) {
    q = TestTensor(c.q_dtype, {c.B, c.T, c.HQ, c.D}, c.layout);
    k = TestTensor(c.k_dtype, {c.B, c.T, c.HK, c.D}, c.layout);
    v = TestTensor(c.v_dtype, {c.B, c.T, c.HK, c.DV}, c.layout);
    o = TestTensor(c.o_dtype, {c.B, c.T, c.HQ, c.DV}, c.out_layout);
    d_o = TestTensor(c.o_dtype, {c.B, c.T, c.HQ, c.DV}, c.layout);
    dq = TestTensor(c.q_dtype, {c.B, c.T, c.HQ, c.D}, c.out_layout);
    dk = TestTensor(c.k_dtype, {c.B, c.T, c.HK, c.D}, c.out_layout);
    dv = TestTensor(c.v_dtype, {c.B, c.T, c.HK, c.DV}, c.out_layout);
    cu = ints(c.T % 2 ? FW_I32 : FW_I64, c.cu, Layout::kInterleaved);
    starts = ints(FW_I64, c.starts, Layout::kInterleaved);
    Rng rng(c.seed);
    for (TestTensor *t : {&q, &k, &v, &d_o}) t->fill_normal(rng);
    if (c.capacity > 0) {
      k_cache = TestTensor(c.cache_dtype, {c.slots, c.capacity, c.HK, c.D}, c.out_layout);
      v_cache = TestTensor(c.cache_dtype, {c.slots, c.capacity, c.HK, c.DV}, c.out_layout);
      k_cache.fill_normal(rng);
      v_cache.fill_normal(rng);
      lengths = ints(FW_I64, c.lengths, Layout::kReversed);
      indices = ints(FW_I32, c.indices, Layout::kInterleaved);
    }
    refresh();
  }
  void refresh() {
    desc.struct_size = sizeof desc;
    desc.window = c.window;
    desc.scale = c.scale;
    desc.rope_theta = c.theta;
    desc.q = q.view(), desc.k = k.view(), desc.v = v.view(), desc.o = o.view();
    desc.cu_seqlens = cu.view(), desc.start_positions = starts.view();
    desc.k_cache = k_cache.view(), desc.v_cache = v_cache.view();
    desc.cache_lengths = lengths.view(), desc.cache_indices = indices.view();
    grads.struct_size = sizeof grads;
    grads.d_o = d_o.view(), grads.dq = dq.view(), grads.dk = dk.view(), grads.dv = dv.view();
  }
  void forward(fw_context *context) {
    ASSERT_EQ(run_forward<attention_api>(context, desc), FW_OK) << fw_last_error();
  }
  void backward(fw_context *context) {
    fw_attention without_o = desc;
    without_o.o = fw_tensor{};
    ASSERT_EQ(run_backward<attention_api>(context, without_o, grads), FW_OK) << fw_last_error();
  }
  void step(fw_context *context) {
    const auto run = [&](const auto &d, const auto &, void *w, uint64_t n) { return fw_attention_step(context, &d, w, n); };
    ASSERT_EQ(run_verb<attention_api>(context, desc, nullptr, FW_STEP, run), FW_OK) << fw_last_error();
  }
};

// The truth of a call as its tensors are now; for a step before it runs.
class AttentionTruth {
 public:
  std::vector<Truth> o, dq, dk, dv;
  // step: [slot * capacity + row] -> [HK * D], [HK * DV]; empty: kept
  std::vector<std::vector<Truth>> written_k, written_v;

  explicit AttentionTruth(AttentionCall &call) : a_(call), c_(call.c) {
    o.resize(size(c_.HQ * c_.DV));
    dq.resize(size(c_.HQ * c_.D));
    dk.resize(size(c_.HK * c_.D));
    dv.resize(size(c_.HK * c_.DV));
    if (c_.capacity > 0) written_k.resize(index(c_.slots * c_.capacity)), written_v.resize(written_k.size());
    for (int64_t n = 0; n < c_.sequences(); ++n) sequence(n);
    if (c_.theta > 0) {
      for (int64_t n = 0; n < c_.sequences(); ++n) turn_gradients_back(n);
    }
  }

 private:
  using Row = std::vector<Truth>;
  static constexpr double kTiny = 0x1p-125;
  static size_t index(int64_t i) { return static_cast<size_t>(i); }
  size_t size(int64_t width) const { return index(c_.B * c_.T * width); }
  int64_t begin(int64_t n) const { return c_.cu.empty() ? n * c_.T : c_.cu[index(n)]; }
  int64_t end(int64_t n) const { return c_.cu.empty() ? (n + 1) * c_.T : c_.cu[index(n + 1)]; }
  bool is_step() const { return c_.capacity > 0; }
  int64_t first(int64_t n) const {
    return is_step() ? c_.lengths[index(n)] : c_.starts.empty() ? 0 : c_.starts[index(n)];
  }
  double scale() const { return c_.scale != 0 ? c_.scale : 1 / sqrt(static_cast<double>(c_.D)); }

  // Pairs (value, bound of its magnitude), turned by an angle of `sign` times the position.
  Row turned(Row x, int64_t position, int sign = 1) const {
    if (c_.theta == 0) return x;
    const size_t half = x.size() / 2;
    for (size_t i = 0; i < half; ++i) {
      const double angle = sign * static_cast<double>(position) *
                           pow(c_.theta, -2.0 * static_cast<double>(i) / static_cast<double>(c_.D));
      const Truth x1 = x[i], x2 = x[i + half];
      x[i] = Truth(x1.value * cos(angle) - x2.value * sin(angle), x1.magnitude + x2.magnitude);
      x[i + half] = Truth(x2.value * cos(angle) + x1.value * sin(angle), x1.magnitude + x2.magnitude);
    }
    return x;
  }
  Row read(const TestTensor &t, int64_t row, int64_t head, int64_t heads, int64_t width) const {
    Row x;
    for (int64_t d = 0; d < width; ++d) x.push_back(t.get((row * heads + head) * width + d));
    return x;
  }

  void sequence(int64_t n) {
    const int64_t slot = !is_step() ? 0 : c_.indices.empty() ? n : c_.indices[index(n)];
    if (slot < 0) return;
    for (int64_t hk = 0; hk < c_.HK; ++hk) {
      for (int64_t row = begin(n); row < end(n); ++row) {
        for (int64_t hq = hk * (c_.HQ / c_.HK); hq < (hk + 1) * (c_.HQ / c_.HK); ++hq) query(n, slot, row, hq, hk);
      }
    }
    for (int64_t row = std::max(begin(n), end(n) - c_.capacity); is_step() && row < end(n); ++row) {
      const int64_t position = first(n) + row - begin(n);
      const size_t to = index(slot * c_.capacity + position % c_.capacity);
      for (int64_t hk = 0; hk < c_.HK; ++hk) {
        const Row k = turned(read(a_.k, row, hk, c_.HK, c_.D), position), v = read(a_.v, row, hk, c_.HK, c_.DV);
        written_k[to].insert(written_k[to].end(), k.begin(), k.end());
        written_v[to].insert(written_v[to].end(), v.begin(), v.end());
      }
    }
  }

  void query(int64_t n, int64_t slot, int64_t row, int64_t hq, int64_t hk) {
    const int64_t position = first(n) + row - begin(n);
    int64_t low = is_step() ? 0 : first(n);
    if (c_.window > 0) low = std::max(low, position - c_.window + 1);
    if (is_step()) low = std::max(low, position - c_.capacity + 1);
    Row q = turned(read(a_.q, row, hq, c_.HQ, c_.D), position), d_o = read(a_.d_o, row, hq, c_.HQ, c_.DV);
    std::vector<Row> keys, values;
    std::vector<double> p;
    double most = -INFINITY, least = INFINITY, magnitude = 0;
    for (int64_t at = low; at <= position; ++at) {
      if (at < first(n)) {
        keys.push_back(read(a_.k_cache, slot * c_.capacity + at % c_.capacity, hk, c_.HK, c_.D));
        values.push_back(read(a_.v_cache, slot * c_.capacity + at % c_.capacity, hk, c_.HK, c_.DV));
      } else {
        keys.push_back(turned(read(a_.k, begin(n) + at - first(n), hk, c_.HK, c_.D), at));
        values.push_back(read(a_.v, begin(n) + at - first(n), hk, c_.HK, c_.DV));
      }
      double score = 0, m = 0;
      for (size_t d = 0; d < q.size(); ++d) {
        score += scale() * q[d].value * keys.back()[d].value;
        m += fabs(scale()) * q[d].magnitude * keys.back()[d].magnitude;
      }
      p.push_back(score);
      most = std::max(most, score), least = std::min(least, score), magnitude = std::max(magnitude, m);
    }
    double sum = 0;
    for (double &x : p) sum += x = exp(x - most);
    for (double &x : p) x /= sum;
    const double n_keys = static_cast<double>(p.size()), rows = static_cast<double>(c_.T * c_.HQ / c_.HK);
    const double e =
        (static_cast<double>(c_.D) + 12) * magnitude + 2 * (most - least) + 3 * (n_keys / 32 + 2) + n_keys + 6;
    for (size_t d = 0; d < values[0].size(); ++d) {
      Truth &to = o[index((row * c_.HQ + hq) * c_.DV) + d];
      for (size_t i = 0; i < p.size(); ++i)
        to.value += p[i] * values[i][d].value, to.magnitude += 2 * e * (p[i] + kTiny) * fabs(values[i][d].value);
    }
    if (is_step()) return;
    // gradients
    std::vector<double> dp(p.size()), a(p.size());
    double delta = 0, b = 0;
    for (size_t i = 0; i < p.size(); ++i) {
      for (size_t d = 0; d < d_o.size(); ++d)
        dp[i] += d_o[d].value * values[i][d].value, a[i] += fabs(d_o[d].value * values[i][d].value);
      delta += p[i] * dp[i], b += p[i] * a[i];
    }
    for (size_t i = 0; i < p.size(); ++i) {
      const int64_t key_row = begin(n) + low + static_cast<int64_t>(i) - first(n);
      const double ds = p[i] * (dp[i] - delta), bound = (p[i] + kTiny) * (a[i] + b);
      for (size_t d = 0; d < d_o.size(); ++d) {
        Truth &to = dv[index((key_row * c_.HK + hk) * c_.DV) + d];
        to.value += p[i] * d_o[d].value, to.magnitude += (p[i] + kTiny) * fabs(d_o[d].value) * (2 * e + rows);
      }
      for (size_t d = 0; d < q.size(); ++d) {
        Truth &to_q = dq[index((row * c_.HQ + hq) * c_.D) + d], &to_k = dk[index((key_row * c_.HK + hk) * c_.D) + d];
        const double each = fabs(scale()) * bound * (4 * e + static_cast<double>(c_.DV) + 16);
        to_q.value += scale() * ds * keys[i][d].value,
            to_q.magnitude += keys[i][d].magnitude * (each + fabs(scale()) * bound * n_keys);
        to_k.value += scale() * ds * q[d].value,
            to_k.magnitude += q[d].magnitude * (each + fabs(scale()) * bound * rows);
      }
    }
  }

  void turn_gradients_back(int64_t n) {
    for (int64_t row = begin(n); row < end(n); ++row) {
      for (std::vector<Truth> *g : {&dq, &dk}) {
        const int64_t heads = g == &dq ? c_.HQ : c_.HK;
        for (int64_t h = 0; h < heads; ++h) {
          const auto at = g->begin() + (row * heads + h) * c_.D;
          const Row back = turned(Row(at, at + c_.D), first(n) + row - begin(n), -1);
          std::copy(back.begin(), back.end(), at);
        }
      }
    }
  }

  AttentionCall &a_;
  const AttentionConfig &c_;
};

}  // namespace fwtest
