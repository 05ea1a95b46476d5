// SPDX-License-Identifier: Apache-2.0
// What this machine can do at most, measured: how fast memory is copied, and how many multiply-adds a second.
#pragma once
#include <stdint.h>

namespace fw::cli {

// What a call cannot do without: each operand read once, each result written once, and the products of its sums. 0
// products: elementwise, its time is memory's.
struct Work {
  double bytes, flops;
};

// Seconds of a memcpy that moves so many bytes in all, half of them read and half written, by so many threads. Copies
// that fit a cache stay in it, as the operands of a call that is timed again and again do.
double copy_seconds(uint64_t bytes, int32_t n_threads);

// fp32 multiply-adds on registers alone, by so many threads, as floating-point operations a second (two each).
// `level` is what fw_context_cpu_level says.
double multiply_add_flops(const char *level, int32_t n_threads);

}  // namespace fw::cli
