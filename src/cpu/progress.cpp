// SPDX-License-Identifier: Apache-2.0
#include "cpu/progress.hpp"

#include "cpu/spin.hpp"

namespace fw {

void Progress::reset() { n_done_.store(0); }

void Progress::finish(int64_t n_done) {
  n_done_.store(n_done);
  n_done_.notify_all();
}

void Progress::await(int64_t n_done) {
  if (spin([&] { return n_done_.load() >= n_done; })) return;
  for (int64_t seen = n_done_.load(); seen < n_done; seen = n_done_.load()) n_done_.wait(seen);
}

}  // namespace fw
