// SPDX-License-Identifier: Apache-2.0
// One task waits for another of the same call. Knows no operator.
#pragma once
#include <stdint.h>

#include <atomic>

namespace fw {

// How many of a row of dependent pieces are done. Memory that one piece wrote before `finish` is seen after `await`.
// Whoever awaits a piece must have claimed its own later than somebody claimed that one. 64 bytes: a cache line each.
class alignas(64) Progress {
 public:
  void reset();
  void finish(int64_t n_done);
  void await(int64_t n_done);

 private:
  std::atomic<int64_t> n_done_;
};

}  // namespace fw
