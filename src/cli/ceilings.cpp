// SPDX-License-Identifier: Apache-2.0
#include "cli/ceilings.hpp"

#include <string.h>

#include <algorithm>
#include <barrier>
#include <string_view>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "cli/command.hpp"
#include "model/buffer.hpp"

namespace fw::cli {
namespace {

constexpr double kSeconds = 0.004;  // of one measurement
constexpr int kMeasurements = 5;    // the best counts

// Seconds of body(thread, repeats) on all threads at once, for one repeat.
template <class Body>
double best_seconds(int32_t n_threads, Body body) {
  const auto seconds_of = [&](int64_t repeats) {
    std::barrier start(n_threads), end(n_threads);
    double began = 0, ended = 0;
    const auto work = [&](int32_t i) {
      start.arrive_and_wait();
      if (i == 0) began = seconds_now();
      body(i, repeats);
      end.arrive_and_wait();
      if (i == 0) ended = seconds_now();
    };
    std::vector<std::thread> threads;
    for (int32_t i = 1; i < n_threads; ++i) threads.emplace_back(work, i);
    work(0);
    for (std::thread &thread : threads) thread.join();
    return (ended - began) / static_cast<double>(repeats);
  };
  int64_t repeats = 1;
  double best = seconds_of(repeats);
  while (best * static_cast<double>(repeats) < kSeconds && repeats < (int64_t{1} << 40)) {
    best = seconds_of(repeats *= 4);
  }
  for (int i = 1; i < kMeasurements; ++i) best = std::min(best, seconds_of(repeats));
  return best;
}

constexpr int kChains = 12;  // enough independent ones for the latency of the units
constexpr int64_t kRounds = 1024;

#define FW_CLI_EACH(Do) Do(0) Do(1) Do(2) Do(3) Do(4) Do(5) Do(6) Do(7) Do(8) Do(9) Do(10) Do(11)
#define FW_CLI_START(i) chains[i] = Vector{} + static_cast<float>(i);
#define FW_CLI_ADD(i) sum += chains[i];
// `rounds` times a multiply-add in each chain, on vectors of `lanes` floats, in registers.
#define FW_CLI_CHAINS(name, target, lanes, multiply_add)                                \
  target float name(int64_t rounds) {                                                   \
    typedef float Vector __attribute__((vector_size(4 * lanes)));                       \
    Vector chains[kChains], sum = {}, factor = Vector{} + 0.5f, term = Vector{} + 1.0f; \
    FW_CLI_EACH(FW_CLI_START)                                                           \
    for (int64_t round = 0; round < rounds; ++round) {                                  \
      FW_CLI_EACH(multiply_add)                                                         \
    }                                                                                   \
    FW_CLI_EACH(FW_CLI_ADD)                                                             \
    return sum[0];                                                                      \
  }

#if defined(__x86_64__)
#define FW_CLI_512(i) chains[i] = (Vector)_mm512_fmadd_ps((__m512)chains[i], (__m512)factor, (__m512)term);
#define FW_CLI_256(i) chains[i] = (Vector)_mm256_fmadd_ps((__m256)chains[i], (__m256)factor, (__m256)term);
FW_CLI_CHAINS(chains_of_avx512, __attribute__((target("avx512f"))), 16, FW_CLI_512)
FW_CLI_CHAINS(chains_of_avx2, __attribute__((target("avx2,fma"))), 8, FW_CLI_256)
#endif
#if defined(__aarch64__)
#define FW_CLI_128(i) chains[i] = (Vector)vfmaq_f32((float32x4_t)term, (float32x4_t)chains[i], (float32x4_t)factor);
#else
#define FW_CLI_128(i) chains[i] = chains[i] * factor + term;
#endif
FW_CLI_CHAINS(chains_of_baseline, , 4, FW_CLI_128)

struct Chains {
  const char *level;
  int64_t lanes;
  float (*run)(int64_t rounds);
};
constexpr Chains kLevels[] = {
#if defined(__x86_64__)
    {"avx512", 16, chains_of_avx512},
    {"avx2", 8, chains_of_avx2},
#endif
    {"baseline", 4, chains_of_baseline},
};

}  // namespace

double copy_seconds(uint64_t bytes, int32_t n_threads) {
  const uint64_t half = bytes / 2 / static_cast<uint64_t>(n_threads);
  if (half == 0) return 0;
  std::vector<model::Buffer> from, to;
  for (int32_t i = 0; i < n_threads; ++i) {
    from.emplace_back(half);
    to.emplace_back(half);
    memset(from.back().data(), 1, half);  // pages of its own, not the one zero page
  }
  return best_seconds(n_threads, [&](int32_t thread, int64_t repeats) {
    for (int64_t i = 0; i < repeats; ++i) {
      memcpy(to[static_cast<size_t>(thread)].data(), from[static_cast<size_t>(thread)].data(), half);
      __asm__ volatile("" : : "r"(to[static_cast<size_t>(thread)].data()) : "memory");
    }
  });
}

double multiply_add_flops(const char *level, int32_t n_threads) {
  const Chains *chains = kLevels;
  while (chains->run != chains_of_baseline && std::string_view(chains->level) != level) ++chains;
  std::vector<float> results(static_cast<size_t>(n_threads));
  const double seconds = best_seconds(n_threads, [&](int32_t thread, int64_t repeats) {
    results[static_cast<size_t>(thread)] = chains->run(repeats * kRounds);
  });
  return 2.0 * static_cast<double>(chains->lanes * kChains * kRounds * n_threads) / seconds;
}

}  // namespace fw::cli
