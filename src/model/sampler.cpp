// SPDX-License-Identifier: Apache-2.0
#include "model/sampler.hpp"

#include <math.h>

#include <algorithm>
#include <numeric>

#include "model/error.hpp"

namespace fw::model {
namespace {

// splitmix64's finalizer
uint64_t mix(uint64_t x) {
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace

double uniform_draw(uint64_t seed, uint64_t n) {
  const uint64_t bits = mix(mix(seed + 0x9e3779b97f4a7c15u) + 0x9e3779b97f4a7c15u * (n + 1));
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

double exp_portable(double x) {
  if (!(x > -700)) return 0;
  const double k = floor(x * 1.4426950408889634 + 0.5);
  // ln 2 in two parts: k times the first is exact
  const double r = (x - k * 0.693147180369123816490) - k * 1.90821492927058770002e-10;
  double sum = 1;
  for (int i = 14; i >= 1; --i) sum = 1 + sum * r / i;
  return ldexp(sum, static_cast<int>(k));
}

double bits_of(std::span<const float> logits, int32_t target) {
  const double top = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += exp(logit - top);
  return (log(sum) + top - logits[static_cast<size_t>(target)]) * 1.4426950408889634;
}

Sampler::Sampler(const SamplerSettings &settings, uint64_t n_drawn) : settings_(settings), n_drawn_(n_drawn) {
  if (!(settings.temperature >= 0 && settings.temperature <= 100)) {
    FW_MODEL_FAIL("temperature is %g, allowed 0 to 100", settings.temperature);
  }
  if (!(settings.top_p > 0 && settings.top_p <= 1)) {
    FW_MODEL_FAIL("top-p is %g, allowed above 0 and at most 1", settings.top_p);
  }
}

int32_t Sampler::draw(std::span<const float> logits) {
  for (const float logit : logits) {
    if (!isfinite(logit)) throw Error("the model gave a logit that is not a finite number");
  }
  const double u = uniform_draw(settings_.seed, n_drawn_++);
  const auto top = std::max_element(logits.begin(), logits.end());
  if (settings_.temperature == 0) return static_cast<int32_t>(top - logits.begin());

  order_.resize(logits.size());
  weight_.resize(logits.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    const float la = logits[static_cast<size_t>(a)], lb = logits[static_cast<size_t>(b)];
    return la != lb ? la > lb : a < b;
  });
  double total = 0;
  for (size_t i = 0; i < order_.size(); ++i) {
    const double logit = logits[static_cast<size_t>(order_[i])];
    weight_[i] = exp_portable((logit - *top) / settings_.temperature);
    total += weight_[i];
  }
  size_t kept = 0;
  double reached = 0;
  while (kept < order_.size() && (kept == 0 || reached < settings_.top_p * total)) reached += weight_[kept++];
  double rest = u * reached;
  for (size_t i = 0; i + 1 < kept; ++i) {
    rest -= weight_[i];
    if (rest < 0) return order_[i];
  }
  return order_[kept - 1];
}

}  // namespace fw::model
