// SPDX-License-Identifier: Apache-2.0
// Draws: fixed numbers for fixed seeds, the right frequencies, temperature and top-p, and refusals.
#include <gtest/gtest.h>

#include <math.h>

#include <limits>

#include "model/sampler.hpp"
#include "model/sha256.hpp"
#include "refusals.hpp"

using fw::model::Sampler;
using fw::model::SamplerSettings;

namespace {

SamplerSettings settings(uint64_t seed, double temperature, double top_p) {
  SamplerSettings s;
  s.seed = seed;
  s.temperature = temperature;
  s.top_p = top_p;
  return s;
}

std::vector<int> counts(Sampler sampler, const std::vector<float> &logits, int n) {
  std::vector<int> out(logits.size());
  for (int i = 0; i < n; ++i) ++out[static_cast<size_t>(sampler.draw(logits))];
  return out;
}

}  // namespace

TEST(Sampler, TheFirstDrawsOfASeedNeverChange) {
  // from a second implementation with whole numbers of any size
  EXPECT_EQ(fw::model::uniform_draw(0, 0), 0x1.4e0dba5e9a32fp-1);
  EXPECT_EQ(fw::model::uniform_draw(0, 1), 0x1.6705460be8829p-1);
  EXPECT_EQ(fw::model::uniform_draw(42, 0), 0x1.5f87eae99441cp-2);
  EXPECT_EQ(fw::model::uniform_draw(UINT64_MAX, 123456789), 0x1.29002fca24ca0p-2);
  std::vector<float> logits(256);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = sinf(static_cast<float>(i));
  Sampler sampler(settings(42, 1, 1), 0);
  std::vector<int32_t> drawn;
  for (int i = 0; i < 8; ++i) drawn.push_back(sampler.draw(logits));
  Sampler later(settings(42, 1, 1), 5);
  EXPECT_EQ(later.draw(logits), drawn[5]);
  EXPECT_EQ(later.n_drawn(), 6u);
}

TEST(Sampler, FrequenciesFollowTheSoftmax) {
  const std::vector<float> logits = {logf(0.5f), logf(0.3f), logf(0.15f), logf(0.05f)};
  const double p[] = {0.5, 0.3, 0.15, 0.05};
  const int n = 40000;
  const std::vector<int> found = counts(Sampler(settings(9, 1, 1), 0), logits, n);
  // five standard deviations of a binomial
  for (size_t i = 0; i < 4; ++i) EXPECT_NEAR(found[i], n * p[i], 5 * sqrt(n * p[i] * (1 - p[i]))) << i;
}

TEST(Sampler, TemperatureSharpensAndZeroTakesTheLargest) {
  const std::vector<float> logits = {1, 2, 4, 4, 3};
  Sampler greedy(settings(1, 0, 1), 0);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(greedy.draw(logits), 2);  // the lower of the equals
  const int n = 20000;
  const std::vector<int> cold = counts(Sampler(settings(1, 0.5, 1), 0), logits, n);
  const double e = exp(2.0), sum = exp(-6.0) + exp(-4.0) + 1 + 1 + exp(-2.0);
  EXPECT_NEAR(cold[2], n / sum, 5 * sqrt(n / sum));
  EXPECT_NEAR(cold[4], n / sum / e, 5 * sqrt(n / sum / e));
}

TEST(Sampler, TopPKeepsTheSmallestSet) {
  const std::vector<float> logits = {logf(0.05f), logf(0.5f), logf(0.3f), logf(0.15f)};
  std::vector<int> found = counts(Sampler(settings(3, 1, 0.79), 0), logits, 5000);
  EXPECT_EQ(found[0] + found[3], 0);
  EXPECT_NEAR(found[1], 5000 * 0.625, 5 * sqrt(5000 * 0.625 * 0.375));
  found = counts(Sampler(settings(3, 1, 0.81), 0), logits, 5000);
  EXPECT_GT(found[3], 0);
  EXPECT_EQ(found[0], 0);
  found = counts(Sampler(settings(3, 1, 1e-9), 0), logits, 100);
  EXPECT_EQ(found[1], 100);
}

TEST(Sampler, RefusesWhatCannotBeDrawnFrom) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(refusal([&] { Sampler(settings(1, -0.5, 1), 0); }), "temperature is -0.5, allowed 0 to 100");
  EXPECT_EQ(refusal([&] { Sampler(settings(1, nan, 1), 0); }), "temperature is nan, allowed 0 to 100");
  EXPECT_EQ(refusal([&] { Sampler(settings(1, 1, 0), 0); }), "top-p is 0, allowed above 0 and at most 1");
  EXPECT_EQ(refusal([&] { Sampler(settings(1, 1, 1.5), 0); }), "top-p is 1.5, allowed above 0 and at most 1");
  Sampler sampler(settings(1, 1, 1), 0);
  const std::vector<float> bad = {0, std::numeric_limits<float>::quiet_NaN()};
  EXPECT_EQ(refusal([&] { sampler.draw(bad); }), "the model gave a logit that is not a finite number");
}

TEST(Sampler, ExpAgreesWithTheLibrary) {
  for (double x = -699; x <= 0; x += 0.0371) {
    ASSERT_NEAR(fw::model::exp_portable(x) / exp(x), 1, 1e-15) << x;
  }
  EXPECT_EQ(fw::model::exp_portable(0), 1);
  EXPECT_EQ(fw::model::exp_portable(-1000), 0);
}

TEST(Sampler, BitsOfATarget) {
  const std::vector<float> logits = {0, logf(3.0f)};
  EXPECT_NEAR(fw::model::bits_of(logits, 0), 2, 1e-6);
  EXPECT_NEAR(fw::model::bits_of(logits, 1), -log2(0.75), 1e-6);
  const std::vector<float> large = {1000, 990};
  EXPECT_NEAR(fw::model::bits_of(large, 1), 10 / log(2), 1e-3);
}

TEST(Sha256, KnownAnswers) {
  const auto digest = [](const std::string &s) {
    return fw::model::hex(fw::model::sha256({reinterpret_cast<const uint8_t *>(s.data()), s.size()}));
  };
  EXPECT_EQ(digest(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(digest("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(digest(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}
