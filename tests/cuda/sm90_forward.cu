// SPDX-License-Identifier: Apache-2.0
// Program: the sm_90a forward against fp64 truth and yardstick on small problems, then its times on large ones.
//   sm90_forward check      all problems; exit status 1 when a bound is missed
//   sm90_forward quick      one small problem, one run (for compute-sanitizer)
//   sm90_forward time [op]  medians of graph replays with the second-level cache cleared
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

#include "fastweight/recurrence.h"
#include "ops/recurrence/sm90_forward.hpp"
#include "tests/cuda/sm90_truth.hpp"
#include "tests/cuda/times.cuh"

using namespace fw;
using namespace sm90_test;

namespace {

enum Data { kPlain, kStrong, kSimilar, kHold, kOneSign, kZeroGate, kInfiniteRows, kWeak, kBigGate };
const char *const kDataNames[] = {"plain", "strong", "similar", "hold", "one_sign", "zero_gate", "inf_rows", "weak", "big_gate"};

struct Case {
  const char *name;
  Sm90Gate gate;
  Sm90Erase erase;
  int B, T, H, HV;
  Data data;
  bool initial;
  Sm90Layout layout;
  std::vector<int> offsets;  // cu_seqlens or empty
  bool gate_bf16;
  bool has_l2norm = false, reads_before = false;
};

template <class T>
T *upload(const std::vector<T> &host) {
  T *device;
  MUST(cudaMalloc(&device, std::max<size_t>(host.size(), 1) * sizeof(T)));
  MUST(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  return device;
}

std::vector<__nv_bfloat16> as_bf16(const std::vector<float> &x) {
  std::vector<__nv_bfloat16> y(x.size());
  for (size_t i = 0; i < x.size(); ++i) y[i] = __float2bfloat16(x[i]);
  return y;
}

struct Inputs {
  std::vector<float> q, k, v, g, beta, p, erase_gate, write_gate, a, b, initial;
};

Inputs draw(const Case &c, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform;
  const int tokens = c.B * c.T;
  const int N = c.offsets.empty() ? c.B : static_cast<int>(c.offsets.size()) - 1;
  Inputs in;
  in.q.resize(tokens * c.H * kSize);
  in.k.resize(in.q.size());
  in.v.resize(tokens * c.HV * kSize);
  for (auto &x : in.q) x = normal(random);
  for (auto &x : in.v) x = normal(random);
  std::vector<float> common(c.H * kSize);
  for (auto &x : common) x = normal(random);
  for (int row = 0; row < tokens * c.H; ++row) {
    float *k = &in.k[row * kSize];
    double sum = 0;
    for (int i = 0; i < kSize; ++i) {
      k[i] = normal(random);
      if (c.data == kSimilar) k[i] = 3.0f * common[row % c.H * kSize + i] + k[i];
      if (c.data == kOneSign) k[i] = std::fabs(k[i]);
      sum += k[i] * k[i];
    }
    const float length = c.has_l2norm && c.erase != Sm90Erase::kIndependent ? 0.5f + 3.0f * uniform(random) : 1.0f;
    for (int i = 0; i < kSize; ++i) k[i] = round_bf16(length * k[i] / static_cast<float>(std::sqrt(sum)));
  }
  if (c.data == kOneSign) {
    for (auto &x : in.q) x = std::fabs(x);
    for (auto &x : in.v) x = std::fabs(x);
  }
  for (auto &x : in.q) x = round_bf16(x);
  for (auto &x : in.v) x = round_bf16(x);
  in.beta.resize(tokens * c.HV);
  for (auto &x : in.beta) {
    x = 1.0f / (1.0f + std::exp(-normal(random)));
    if (c.data == kSimilar) x = 0.9f + 0.1f * uniform(random);
    if (c.data == kHold) x = 0.02f;
    if (c.data == kOneSign) x = 0.05f + 0.9f * uniform(random);
    if (c.gate_bf16) x = round_bf16(x);
  }
  const auto near = [&](const std::vector<float> &from, float by, float noise) {
    std::vector<float> to(from.size());
    for (size_t i = 0; i < to.size(); ++i) to[i] = round_bf16(by * from[i] + noise * normal(random));
    return to;
  };
  if (c.erase == Sm90Erase::kIndependent) {
    in.a = near(in.k, -1.0f, 0.0f);
    in.b = near(in.k, 1.0f, 0.002f);
    for (size_t i = 0; i < in.b.size(); ++i) in.b[i] = round_bf16(in.b[i] * in.beta[i / kSize / c.H * c.HV]);
    in.k = near(in.k, c.data == kSimilar ? 1.0f : 0.5f, c.data == kOneSign ? 0.0f : 0.05f);
  } else if (c.erase == Sm90Erase::kSeparate && c.gate != Sm90Gate::kVector) {
    in.p = near(in.k, 1.0f, c.data == kOneSign ? 0.0f : 0.03f);
  } else if (c.erase == Sm90Erase::kSeparate) {
    in.erase_gate = near(in.k, 0.0f, 1.0f), in.write_gate = near(in.v, 0.0f, 1.0f);
    for (auto *gate : {&in.erase_gate, &in.write_gate}) {
      for (auto &x : *gate) x = round_bf16(c.data == kHold ? 0.02f : c.data == kSimilar ? 0.95f : 1.0f / (1.0f + std::exp(-x)));
    }
  }
  if (c.gate != Sm90Gate::kNone) in.g.resize(in.beta.size() * (c.gate == Sm90Gate::kVector ? kSize : 1));
  for (auto &x : in.g) {
    x = -std::log1p(std::exp(-normal(random)));
    if (c.data == kStrong) x = std::max(4.0f * x, -5.0f);
    if (c.data == kWeak) x *= 0.01f;
    if (c.data == kSimilar || c.data == kOneSign) x = -0.05f * uniform(random);
    if (c.data == kHold) x = -1e-3f;
    if (c.data == kZeroGate) x = uniform(random) < 0.5f ? 0.0f : -1e-8f;
    if (c.data == kInfiniteRows) {
      const float u = uniform(random);
      x = u < 0.05f ? -INFINITY : u < 0.1f ? -1000.0f : x * 0.1f;
    }
    if (c.data == kBigGate) x = -10.0f * std::fabs(normal(random));
    if (c.gate_bf16) x = round_bf16(x);
  }
  if (c.initial) in.initial.resize(static_cast<size_t>(N) * c.HV * kSize * kSize);
  for (auto &x : in.initial) x = normal(random) * (c.data == kHold ? 30.0f : 1.0f);
  if (c.data == kOneSign) {
    for (auto &x : in.initial) x = std::fabs(x);
  }
  return in;
}

struct Outputs {
  std::vector<__nv_bfloat16> o;
  std::vector<float> state;
};

Outputs run(const Case &c, const Inputs &in) {
  const int N = c.offsets.empty() ? c.B : static_cast<int>(c.offsets.size()) - 1;
  const size_t out = static_cast<size_t>(c.B) * c.T * c.HV * kSize, state = static_cast<size_t>(N) * c.HV * kSize * kSize;
  Sm90Forward f = {};
  f.gate = c.gate, f.erase = c.erase;
  f.B = c.B, f.T = c.T, f.H = c.H, f.HV = c.HV, f.K = f.V = kSize, f.N = N;
  const int64_t h = c.H * kSize, hv = c.HV * kSize;
  // "fused": q, k and v are parts of each token's row in one buffer, as a projection leaves them.
  const bool fused = std::string(c.name).find("fused") != std::string::npos;
  std::vector<float> rows;
  for (int64_t t = 0; fused && t < int64_t{c.B} * c.T; ++t) {
    rows.insert(rows.end(), &in.q[t * h], &in.q[t * h] + h);
    rows.insert(rows.end(), &in.k[t * h], &in.k[t * h] + h);
    rows.insert(rows.end(), &in.v[t * hv], &in.v[t * hv] + hv);
  }
  auto *q = upload(as_bf16(fused ? rows : in.q));
  auto *k = upload(as_bf16(in.k));
  auto *v = upload(as_bf16(in.v));
  f.q = q, f.k = fused ? q + h : k, f.v = fused ? q + 2 * h : v;
  const int64_t row = 2 * h + hv;
  f.q_strides = f.k_strides = fused ? Sm90Strides{c.T * row, row, kSize} : Sm90Strides{c.T * h, h, kSize};
  f.o_strides = {c.T * hv, hv, kSize};
  f.v_strides = fused ? f.q_strides : f.o_strides;
  f.g_type = f.beta_type = c.gate_bf16 ? Sm90Real::kBfloat16 : Sm90Real::kFloat32;
  void *g = c.gate_bf16 ? static_cast<void *>(upload(as_bf16(in.g))) : static_cast<void *>(upload(in.g));
  void *beta = c.gate_bf16 ? static_cast<void *>(upload(as_bf16(in.beta))) : static_cast<void *>(upload(in.beta));
  f.g = c.gate == Sm90Gate::kNone ? nullptr : g, f.beta = beta;
  f.has_l2norm = c.has_l2norm, f.reads_before = c.reads_before;
  f.beta_strides = {static_cast<int64_t>(c.T) * c.HV, c.HV, 1};
  f.g_strides = c.gate == Sm90Gate::kVector ? f.o_strides : f.beta_strides;
  std::vector<void *> more;
  const auto other = [&](const std::vector<float> &rows, const void *&data, Sm90Strides &strides) {
    if (rows.empty()) return;
    more.push_back(upload(as_bf16(rows)));
    data = more.back(), strides = rows.size() == in.v.size() && &rows == &in.write_gate ? f.o_strides : Sm90Strides{c.T * h, h, kSize};
  };
  other(in.p, f.p, f.p_strides), other(in.a, f.a, f.a_strides), other(in.b, f.b, f.b_strides);
  other(in.erase_gate, f.erase_gate, f.erase_gate_strides), other(in.write_gate, f.write_gate, f.write_gate_strides);
  std::vector<float> first = in.initial;
  if (c.initial && c.layout == Sm90Layout::kValueKey) {
    for (size_t i = 0; i < first.size(); ++i) {
      const size_t at = i % (kSize * kSize);
      first[i] = in.initial[i - at + at % kSize * kSize + at / kSize];
    }
  }
  float *initial = upload(first);
  f.initial_state = c.initial ? initial : nullptr;
  f.layout = c.layout;
  int *offsets = upload(c.offsets);
  f.cu_seqlens = c.offsets.empty() ? nullptr : offsets;
  f.scale = 1.0f / std::sqrt(static_cast<float>(kSize));
  const char *refusal = sm90_forward_refusal(f);
  if (refusal) {
    std::printf("%s refused: %s\n", c.name, refusal);
    std::exit(2);
  }
  Outputs host = {std::vector<__nv_bfloat16>(out), std::vector<float>(state)};
  __nv_bfloat16 *o;
  float *final_state;
  void *workspace;
  const size_t bytes = sm90_forward_workspace(f);
  MUST(cudaMalloc(&o, out * 2));
  MUST(cudaMalloc(&final_state, state * 4));
  MUST(cudaMalloc(&workspace, bytes));
  MUST(cudaMemset(o, 0xff, out * 2));
  MUST(cudaMemset(final_state, 0xff, state * 4));
  MUST(cudaMemset(workspace, 0xff, bytes));
  f.o = o, f.final_state = final_state;
  MUST(sm90_forward_launch(f, workspace, nullptr));
  MUST(cudaDeviceSynchronize());
  MUST(cudaMemcpy(host.o.data(), o, out * 2, cudaMemcpyDeviceToHost));
  MUST(cudaMemcpy(host.state.data(), final_state, state * 4, cudaMemcpyDeviceToHost));
  if (c.layout == Sm90Layout::kValueKey) {
    const std::vector<float> given = host.state;
    for (size_t i = 0; i < given.size(); ++i) {
      const size_t at = i % (kSize * kSize);
      host.state[i] = given[i - at + at % kSize * kSize + at / kSize];
    }
  }
  for (void *p : more) MUST(cudaFree(p));
  for (void *p : {(void *)q, (void *)k, (void *)v, g, beta, (void *)initial, (void *)offsets, (void *)o, (void *)final_state, workspace}) {
    MUST(cudaFree(p));
  }
  return host;
}

struct Error {
  double rms = 0, max = 0, peak = 0;
  long count = 0;
  void add(double got, double want) {
    const double d = std::isfinite(got) ? std::fabs(got - want) : INFINITY;
    rms += d * d, max = std::max(max, d), peak = std::max(peak, std::fabs(want)), ++count;
  }
  double root() const { return std::sqrt(rms / std::max(count, 1l)); }
};

bool check(const Case &c, unsigned seed) {
  const Inputs in = draw(c, seed);
  const Outputs got = run(c, in), again = run(c, in);
  const bool same = std::memcmp(got.o.data(), again.o.data(), got.o.size() * 2) == 0 &&
                    std::memcmp(got.state.data(), again.state.data(), got.state.size() * 4) == 0;
  const std::vector<int> offsets = c.offsets;
  const int N = offsets.empty() ? c.B : static_cast<int>(offsets.size()) - 1;
  // [got, yardstick 1.3, yardstick 1.7] by [o, state]
  std::vector<std::array<std::array<Error, 2>, 3>> parts(N * c.HV);
  std::vector<std::thread> threads;
  const auto work = [&](int task) {
    const int n = task / c.HV, hv = task % c.HV, h = hv / (c.HV / c.H);
    const int batch = offsets.empty() ? n : 0, start = offsets.empty() ? 0 : offsets[n];
    const int length = offsets.empty() ? c.T : offsets[n + 1] - start;
    const int erase = c.erase == Sm90Erase::kNone ? 0 : c.erase == Sm90Erase::kIndependent ? 2 : 1;
    HeadProblem p = {length, static_cast<int>(c.gate), erase, c.reads_before, c.has_l2norm, 1.0f / std::sqrt(128.0f)};
    for (int t = 0; t < length; ++t) {
      const size_t row = static_cast<size_t>(batch) * c.T + start + t;
      const auto add = [](std::vector<float> &to, const std::vector<float> &from, size_t at) {
        if (!from.empty()) to.insert(to.end(), from.begin() + at * kSize, from.begin() + (at + 1) * kSize);
      };
      add(p.q, in.q, row * c.H + h), add(p.k, in.k, row * c.H + h), add(p.v, in.v, row * c.HV + hv);
      add(p.p, in.p, row * c.H + h), add(p.a, in.a, row * c.H + h), add(p.b, in.b, row * c.H + h);
      add(p.erase_gate, in.erase_gate, row * c.H + h), add(p.write_gate, in.write_gate, row * c.HV + hv);
      p.beta.push_back(in.beta[row * c.HV + hv]);
      const int width = c.gate == Sm90Gate::kVector ? kSize : 1;
      if (c.gate != Sm90Gate::kNone) {
        p.g.insert(p.g.end(), &in.g[(row * c.HV + hv) * width], &in.g[(row * c.HV + hv) * width] + width);
      }
    }
    const size_t state = static_cast<size_t>(task) * kSize * kSize;
    if (c.initial) p.initial.assign(&in.initial[state], &in.initial[state] + kSize * kSize);
    const HeadResult want = truth(p), a = yardstick(p, 1.3f), b = yardstick(p, 1.7f);
    auto &e = parts[task];
    for (int i = 0; i < length * kSize; ++i) {
      const size_t row = static_cast<size_t>(batch) * c.T + start + i / kSize;
      e[0][0].add(__bfloat162float(got.o[(row * c.HV + hv) * kSize + i % kSize]), want.o[i]);
      e[1][0].add(a.o[i], want.o[i]);
      e[2][0].add(b.o[i], want.o[i]);
    }
    for (int i = 0; i < kSize * kSize; ++i) {
      e[0][1].add(got.state[state + i], want.state[i]);
      e[1][1].add(a.state[i], want.state[i]);
      e[2][1].add(b.state[i], want.state[i]);
    }
  };
  const int workers = std::max(1u, std::thread::hardware_concurrency());
  for (int w = 0; w < workers; ++w) {
    threads.emplace_back([&, w] {
      for (int task = w; task < N * c.HV; task += workers) work(task);
    });
  }
  for (auto &t : threads) t.join();
  std::array<std::array<Error, 2>, 3> all = {};
  for (const auto &e : parts) {
    for (int i = 0; i < 3; ++i) {
      for (int j = 0; j < 2; ++j) {
        auto &to = all[i][j];
        to.rms += e[i][j].rms, to.count += e[i][j].count;
        to.max = std::max(to.max, e[i][j].max), to.peak = std::max(to.peak, e[i][j].peak);
      }
    }
  }
  bool inside = true;
  double ratio[2][2];
  for (int j = 0; j < 2; ++j) {
    const double bound = j == 0 ? 2.0 : 2.5;
    const double rms = std::max(all[1][j].root(), all[2][j].root()), max = std::max(all[1][j].max, all[2][j].max);
    const double n = 1 + 4 / std::sqrt(static_cast<double>(std::max(all[0][j].count, 1l)));
    const double four = 4 * std::ldexp(all[0][j].peak, -24);
    ratio[j][0] = all[0][j].root() / std::max(rms, 1e-30), ratio[j][1] = all[0][j].max / std::max(max, 1e-30);
    inside = inside && all[0][j].root() <= bound * n * rms + four &&
             all[0][j].max <= 1.5 * bound * n * max + four + (j == 0 ? std::ldexp(all[0][j].peak, -8) : 0.0);
  }
  // Rows of no sequence are 0.
  bool zeros = true;
  if (!offsets.empty()) {
    for (int row = 0; row < c.T; ++row) {
      if (row >= offsets.front() && row < offsets.back()) continue;
      for (int i = 0; i < c.HV * kSize; ++i) zeros = zeros && __bfloat162float(got.o[row * c.HV * kSize + i]) == 0.0f;
    }
  }
  // Other values from token `from` on change nothing before it.
  bool causal = true;
  if (offsets.empty()) {
    const int from = c.T * 2 / 3 + 1;
    Case other = c;
    const Inputs foreign = draw(other, seed + 1000);
    Inputs mixed = in;
    const auto mix = [&](std::vector<float> &to, const std::vector<float> &source) {
      const size_t width = to.size() / (c.B * c.T);
      for (size_t i = 0; i < to.size(); ++i) {
        if (static_cast<int>(i / std::max<size_t>(width, 1) % c.T) >= from) to[i] = source[i];
      }
    };
    mix(mixed.q, foreign.q), mix(mixed.k, foreign.k), mix(mixed.v, foreign.v), mix(mixed.beta, foreign.beta);
    if (c.gate != Sm90Gate::kNone) mix(mixed.g, foreign.g);
    mix(mixed.p, foreign.p), mix(mixed.a, foreign.a), mix(mixed.b, foreign.b);
    mix(mixed.erase_gate, foreign.erase_gate), mix(mixed.write_gate, foreign.write_gate);
    const Outputs changed = run(c, mixed);
    for (int b = 0; b < c.B; ++b) {
      const size_t at = static_cast<size_t>(b) * c.T * c.HV * kSize;
      causal = causal && std::memcmp(&got.o[at], &changed.o[at], static_cast<size_t>(from) * c.HV * kSize * 2) == 0;
    }
  }
  const bool good = inside && same && zeros && causal;
  std::printf("%-34s %-9s o %5.2f/%5.2f state %5.2f/%5.2f rel %.1e %.1e %s%s%s%s%s\n", c.name, kDataNames[c.data], ratio[0][0],
              ratio[0][1], ratio[1][0], ratio[1][1], all[0][0].root() / std::max(all[0][0].peak, 1e-30),
              all[0][1].root() / std::max(all[0][1].peak, 1e-30), good ? "good" : "BAD", inside ? "" : " bound",
              same ? "" : " bits-differ", zeros ? "" : " rows-not-0", causal ? "" : " not-causal");
  return good;
}

}  // namespace

#include "tests/cuda/sm90_times.inl"

int main(int argc, char **argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string verb = argc > 1 ? argv[1] : "check";
  const auto K = Sm90Layout::kKeyValue, V = Sm90Layout::kValueKey;
  const auto none = Sm90Gate::kNone, scalar = Sm90Gate::kScalar;
  const auto erase = Sm90Erase::kShared, plain = Sm90Erase::kNone;
  if (verb == "time") return time_all(argc > 2 ? argv[2] : "");
  std::vector<Case> cases = {
      {"gdn 1x64", scalar, erase, 1, 64, 1, 1, kPlain, false, K, {}, false},
      {"gdn 1x1", scalar, erase, 1, 1, 1, 1, kPlain, true, K, {}, false},
      {"gdn 2x17 fused", scalar, erase, 2, 17, 2, 4, kPlain, true, K, {}, false},
      {"gdn 2x129 fused", scalar, erase, 2, 129, 1, 3, kPlain, true, V, {}, true},
      {"gdn 1x300x2", scalar, erase, 1, 300, 2, 2, kPlain, true, K, {}, false},
      {"gdn pack 1x700 H2 HV4", scalar, erase, 1, 700, 2, 4, kPlain, true, V, {3, 3, 67, 131, 200, 690}, false},
  };
  if (verb == "quick") {
    add_more(cases);
    for (const Case &c : cases) {
      if (std::string(c.name).find("pack 1x700") != std::string::npos) run(c, draw(c, 1));
    }
    std::printf("quick ran\n");
    return 0;
  }
  for (const Data data : {kStrong, kSimilar, kHold, kOneSign, kZeroGate, kInfiniteRows, kWeak, kBigGate}) {
    cases.push_back({"gdn 2x515 H2 HV4", scalar, erase, 2, 515, 2, 4, data, true, V, {}, data == kStrong});
  }
  for (const Data data : {kPlain, kStrong, kSimilar, kHold, kOneSign}) {
    cases.push_back({"gdn 1x2100 H2 segments", scalar, erase, 1, 2100, 2, 2, data, true, data == kHold ? K : V, {}, false});
  }
  cases.push_back({"gdn pack 1x3000 H1 segments", scalar, erase, 1, 3000, 1, 2, kPlain, true, K, {0, 100, 1700, 1700, 2900}, false});
  cases.push_back({"gdn 1x333 H64 HV128", scalar, erase, 1, 333, 64, 128, kPlain, true, K, {}, false});
  for (int i = 0; i < 3; ++i) {
    cases.push_back({"gdn 1x257 H2 HV6", scalar, erase, 1, 257, 2, 6, kOneSign, true, K, {}, false});
    cases.push_back({"delta_rule 1x257 H2 HV6", none, erase, 1, 257, 2, 6, kOneSign, true, K, {}, false});
  }
  cases.push_back({"delta_rule 1x2100 H2 segments", none, erase, 1, 2100, 2, 2, kOneSign, true, K, {}, false});
  for (const Data data : {kPlain, kSimilar, kHold, kOneSign}) {
    cases.push_back({"delta_rule 1x512x2", none, erase, 1, 512, 2, 2, data, true, K, {}, false});
  }
  for (const Data data : {kPlain, kStrong, kHold, kOneSign, kInfiniteRows}) {
    cases.push_back({"simple_gla 1x500x2", scalar, plain, 1, 500, 2, 2, data, true, V, {}, false});
  }
  cases.push_back({"linear_attn 1x129x2", none, plain, 1, 129, 2, 2, kPlain, true, K, {}, false});
  add_more(cases);
  int bad = 0;
  for (size_t i = 0; i < cases.size(); ++i) bad += !check(cases[i], 17 + static_cast<unsigned>(i));
  std::printf("%zu problems, %d bad\n", cases.size(), bad);
  return bad != 0;
}
