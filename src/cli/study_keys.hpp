// SPDX-License-Identifier: Apache-2.0
// Keys of a given similarity for the studies.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "cli/study.hpp"
#include "fastweight/forms.h"

namespace fw::cli::study {

// splitmix64
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  double uniform(double low, double high) {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return low + (high - low) * (static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53);
  }
  std::vector<double> unit_vector(int64_t K) {
    std::vector<double> x(static_cast<size_t>(K));
    double square = 0;
    for (double &c : x) {
      c = uniform(-1, 1);
      square += c * c;
    }
    for (double &c : x) c /= sqrt(square);
    return x;
  }

 private:
  uint64_t state_;
};

constexpr int64_t kKeySize = 128;
constexpr double kBetaLow = 0.9, kBetaHigh = 1.0;

// n keys [n,K] of length 1: k_t = sqrt(c) m + sqrt(1 - c) r_t, one common direction m and random r_t orthogonal to
// it, so that two keys have cosine c plus (1 - c) r_s . r_t, whose mean is 0.
inline std::vector<double> similar_keys(int64_t n, double cosine, Random &random) {
  const std::vector<double> common = random.unit_vector(kKeySize);
  std::vector<double> keys;
  for (int64_t t = 0; t < n; ++t) {
    std::vector<double> own = random.unit_vector(kKeySize);
    double along = 0, square = 0;
    for (int64_t i = 0; i < kKeySize; ++i) along += own[i] * common[i];
    for (int64_t i = 0; i < kKeySize; ++i) {
      own[i] -= along * common[i];
      square += own[i] * own[i];
    }
    for (int64_t i = 0; i < kKeySize; ++i) {
      keys.push_back(sqrt(cosine) * common[i] + sqrt(1 - cosine) * own[i] / sqrt(square));
    }
  }
  return keys;
}

// The delta rule on such keys, no gate: L_ij = beta_i k_i . k_j.
struct Draw {
  std::vector<double> k, beta, v;
  fw_form_problem_f64 problem;
};
inline Draw draw(int64_t n, double cosine, uint64_t seed) {
  Random random(seed);
  Draw d;
  d.k = similar_keys(n, cosine, random);
  for (int64_t t = 0; t < n; ++t) d.beta.push_back(random.uniform(kBetaLow, kBetaHigh));
  d.v.assign(static_cast<size_t>(n), 1.0);
  d.problem = {};
  d.problem.struct_size = sizeof d.problem;
  d.problem.gate = FW_GATE_NONE;
  d.problem.erase = FW_ERASE_SHARED_AFTER;
  d.problem.T = n, d.problem.K = kKeySize, d.problem.V = 1;
  d.problem.k = d.k.data(), d.problem.v = d.v.data(), d.problem.beta = d.beta.data();
  return d;
}

inline void require(fw_status status) {
  if (status != FW_OK) throw std::runtime_error(fw_last_error());
}

// "1.2e-03", or "overflow" for what is not finite
inline std::string error_text(double x) {
  if (!isfinite(x)) return "overflow";
  char text[32];
  snprintf(text, sizeof text, "%.1e", x);
  return text;
}

}  // namespace fw::cli::study
