// SPDX-License-Identifier: Apache-2.0
// Truth (fp64, token by token) and yardstick (the same step in fp32 with bf16 operands, rounded off the grid) of the
// family with a shared or no erase key, for one head of one sequence. Plain loops on the CPU.
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

// One head of one sequence: rows of q, k, v (and of a vector gate) are contiguous in these vectors.
struct HeadProblem {
  int T;
  int gate;  // 0 none, 1 scalar, 2 vector
  bool erase;
  float scale;
  std::vector<float> q, k, v, g, beta, initial;  // initial [K][V] or empty
};

struct HeadResult {
  std::vector<double> o, state;  // [T][V], [K][V]
};

inline HeadResult truth(const HeadProblem &in) {
  HeadResult out = {std::vector<double>(in.T * kSize), std::vector<double>(kSize * kSize, 0.0)};
  auto &s = out.state;
  for (size_t i = 0; i < in.initial.size(); ++i) s[i] = in.initial[i];
  double read[kSize], decay[kSize];
  for (int t = 0; t < in.T; ++t) {
    const float *q = &in.q[t * kSize], *k = &in.k[t * kSize], *v = &in.v[t * kSize];
    for (int i = 0; i < kSize; ++i) {
      decay[i] = in.gate == 0 ? 1.0 : std::exp(static_cast<double>(in.gate == 1 ? in.g[t] : in.g[t * kSize + i]));
    }
    for (int j = 0; j < kSize; ++j) read[j] = 0.0;
    for (int i = 0; i < kSize; ++i) {
      for (int j = 0; j < kSize; ++j) {
        s[i * kSize + j] *= decay[i];
        read[j] += s[i * kSize + j] * k[i];
      }
    }
    for (int j = 0; j < kSize; ++j) read[j] = in.erase ? in.beta[t] * (v[j] - read[j]) : v[j];
    double *o = &out.o[t * kSize];
    for (int j = 0; j < kSize; ++j) o[j] = 0.0;
    for (int i = 0; i < kSize; ++i) {
      for (int j = 0; j < kSize; ++j) {
        s[i * kSize + j] += k[i] * read[j];
        o[j] += s[i * kSize + j] * q[i];
      }
    }
    for (int j = 0; j < kSize; ++j) o[j] *= in.scale;
  }
  return out;
}

inline HeadResult yardstick(const HeadProblem &in, float c) {
  HeadResult out = {std::vector<double>(in.T * kSize), std::vector<double>(kSize * kSize)};
  std::vector<float> s(kSize * kSize, 0.0f);
  for (size_t i = 0; i < in.initial.size(); ++i) s[i] = in.initial[i];
  const auto off_grid = [c](float x) { return round_bf16(x * c) / c; };
  float read[kSize], o[kSize];
  for (int t = 0; t < in.T; ++t) {
    const float *q = &in.q[t * kSize], *k = &in.k[t * kSize], *v = &in.v[t * kSize];
    for (int j = 0; j < kSize; ++j) read[j] = o[j] = 0.0f;
    for (int i = 0; i < kSize; ++i) {
      const float decay = in.gate == 0 ? 1.0f : std::exp(in.gate == 1 ? in.g[t] : in.g[t * kSize + i]);
      const float e = in.erase ? off_grid(in.beta[t] * k[i]) : 0.0f;
      for (int j = 0; j < kSize; ++j) {
        s[i * kSize + j] *= decay;
        read[j] += round_bf16(s[i * kSize + j]) * e;
      }
    }
    for (int j = 0; j < kSize; ++j) read[j] = round_bf16(in.erase ? in.beta[t] * v[j] - read[j] : v[j]);
    for (int i = 0; i < kSize; ++i) {
      const float key = off_grid(k[i]), query = off_grid(q[i]);
      for (int j = 0; j < kSize; ++j) {
        s[i * kSize + j] += key * read[j];
        o[j] += round_bf16(s[i * kSize + j]) * query;
      }
    }
    for (int j = 0; j < kSize; ++j) out.o[t * kSize + j] = round_bf16(in.scale * o[j]);
  }
  for (int i = 0; i < kSize * kSize; ++i) out.state[i] = s[i];
  return out;
}

}  // namespace sm90_test
