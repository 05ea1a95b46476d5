// SPDX-License-Identifier: Apache-2.0
// Truth (fp64, token by token) and yardstick (the same step in fp32 with bf16 operands, rounded off the grid) of the
// family, for one head of one sequence. Plain loops on the CPU.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace sm90_test {

inline float round_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7f800000u) != 0x7f800000u) bits += 0x7fffu + ((bits >> 16) & 1);
  bits &= 0xffff0000u;
  std::memcpy(&x, &bits, 4);
  return x;
}

constexpr int kSize = 128;

// One head of one sequence: rows of q, k, v (and of a vector gate) are contiguous in these vectors. What is absent is empty.
struct HeadProblem {
  int T;
  int gate;   // 0 none, 1 scalar, 2 vector
  int erase;  // 0 none, 1 a key shared with the write, 2 independent keys
  bool reads_before, has_l2norm;
  float scale;
  std::vector<float> q, k, v, g, beta, p, erase_gate, write_gate, a, b, initial;  // initial [K][V]
};

struct HeadResult {
  std::vector<double> o, state;  // [T][V], [K][V]
};

// The step with sums and state of type Real; operand: how what a decay or the inverse multiplies is rounded;
// stored: a state that is read, a pseudo-value, an output.
template <class Real, class Operand, class Stored>
HeadResult step_through(const HeadProblem &in, Operand operand, Stored stored) {
  HeadResult out = {std::vector<double>(in.T * kSize), std::vector<double>(kSize * kSize)};
  std::vector<Real> s(kSize * kSize, Real(0));
  for (size_t i = 0; i < in.initial.size(); ++i) s[i] = in.initial[i];
  const auto row_of = [&](const std::vector<float> &all, int t, bool normed, Real *to) {
    Real sum = 0;
    for (int i = 0; i < kSize; ++i) to[i] = all[t * kSize + i], sum += to[i] * to[i];
    const Real by = normed ? 1 / std::sqrt(sum + Real(1e-6)) : Real(1);
    for (int i = 0; i < kSize; ++i) to[i] *= by;
  };
  Real q[kSize], k[kSize], e[kSize], b[kSize], read[kSize], written[kSize], o[kSize], decay[kSize];
  for (int t = 0; t < in.T; ++t) {
    row_of(in.q, t, in.has_l2norm, q);
    row_of(in.k, t, in.has_l2norm, k);
    const Real beta = in.beta.empty() ? Real(1) : Real(in.beta[t]);
    if (in.erase == 1) {
      row_of(in.p.empty() ? in.k : in.p, t, in.has_l2norm, e);
      for (int i = 0; i < kSize; ++i) e[i] *= beta * (in.erase_gate.empty() ? Real(1) : Real(in.erase_gate[t * kSize + i]));
    } else if (in.erase == 2) {
      row_of(in.a, t, false, e);
      row_of(in.b, t, false, b);
    }
    for (int i = 0; i < kSize; ++i) {
      decay[i] = in.gate == 0 ? Real(1) : std::exp(Real(in.gate == 1 ? in.g[t] : in.g[t * kSize + i]));
      q[i] = operand(q[i]), k[i] = operand(k[i]), e[i] = in.erase ? operand(e[i]) : Real(0), b[i] = in.erase == 2 ? operand(b[i]) : Real(0);
    }
    const bool before = in.reads_before || in.erase == 2;
    for (int j = 0; j < kSize; ++j) read[j] = o[j] = 0;
    for (int i = 0; i < kSize; ++i) {
      for (int j = 0; j < kSize; ++j) {
        const Real was = s[i * kSize + j];
        s[i * kSize + j] = decay[i] * was;
        if (in.erase) read[j] += stored(before ? was : s[i * kSize + j]) * e[i];
      }
    }
    for (int j = 0; j < kSize; ++j) {
      const Real v = Real(in.v[t * kSize + j]) * (in.write_gate.empty() ? Real(1) : Real(in.write_gate[t * kSize + j]));
      written[j] = in.erase == 1 ? stored(beta * v - read[j]) : v;
      if (in.erase == 2) read[j] = stored(read[j]);
    }
    for (int i = 0; i < kSize; ++i) {
      for (int j = 0; j < kSize; ++j) {
        s[i * kSize + j] += k[i] * written[j] + (in.erase == 2 ? b[i] * read[j] : Real(0));
        o[j] += stored(s[i * kSize + j]) * q[i];
      }
    }
    for (int j = 0; j < kSize; ++j) out.o[t * kSize + j] = stored(Real(in.scale) * o[j]);
  }
  for (int i = 0; i < kSize * kSize; ++i) out.state[i] = s[i];
  return out;
}

inline HeadResult truth(const HeadProblem &in) {
  const auto same = [](double x) { return x; };
  return step_through<double>(in, same, same);
}

inline HeadResult yardstick(const HeadProblem &in, float c) {
  return step_through<float>(in, [c](float x) { return round_bf16(x * c) / c; }, round_bf16);
}

}  // namespace sm90_test
