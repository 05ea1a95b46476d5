// SPDX-License-Identifier: Apache-2.0
// From logits to a byte. Draw number n of a seed is a fixed function of (seed, n), and the arithmetic uses only
// operations that IEEE 754 rounds in one way, so equal logits give equal bytes on every machine.
#pragma once
#include <stdint.h>

#include <span>
#include <vector>

namespace fw::model {

struct SamplerSettings {
  uint64_t seed = 1;
  double temperature = 0.8;  // 0: the largest logit, the lowest byte among equals
  double top_p = 0.95;       // the smallest set of most likely bytes whose probability reaches this; 1: all
};

class Sampler {
 public:
  Sampler(const SamplerSettings &settings, uint64_t n_drawn);  // throws Error for values outside their range

  // Throws Error when a logit is NaN or infinite.
  int32_t draw(std::span<const float> logits);

  const SamplerSettings &settings() const { return settings_; }
  uint64_t n_drawn() const { return n_drawn_; }

 private:
  SamplerSettings settings_;
  uint64_t n_drawn_;
  std::vector<int32_t> order_;
  std::vector<double> weight_;
};

// Draw number n of a seed, uniform in [0, 1).
double uniform_draw(uint64_t seed, uint64_t n);

// exp for x <= 0 within 4e-16 of relative error, 0 below -700.
double exp_portable(double x);

// Negative base-2 logarithm of the probability of `target`, in fp64.
double bits_of(std::span<const float> logits, int32_t target);

}  // namespace fw::model
