// SPDX-License-Identifier: Apache-2.0
// Waiting for another thread: a short time awake, before the caller sleeps.
#pragma once
#include <chrono>

namespace fw {

// Threads that wait for each other stay awake that long: waking one that sleeps costs 5 to 50 us.
constexpr std::chrono::microseconds kSpinTime(30);

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Whether is_done() became true within kSpinTime.
template <class F>
bool spin(F &&is_done) {
  const auto end = std::chrono::steady_clock::now() + kSpinTime;
  do {
    for (int i = 0; i < 16; ++i) {  // looks between two at the clock, which costs 25 ns
      if (is_done()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return is_done();
}

}  // namespace fw
