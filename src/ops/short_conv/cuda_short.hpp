// SPDX-License-Identifier: Apache-2.0
// The convolution of at most kShort taps on CUDA, whose window fits in registers. Compiled by nvcc only.
#pragma once
#include "ops/short_conv/problem.hpp"

namespace fw::short_conv {

constexpr int64_t kShort = 4;

// Sums of dweight by tap and of dbias: [block][W + 1][D], a block of `rows` rows of the whole batch. partials:
// nullptr when neither is wanted.
struct Sums {
  float *partials;
  int64_t blocks, rows;
};

void launch_short_forward(const Problem &p);
// dx, d_initial_state of sequences that have rows, and the sums; dy is given.
void launch_short_backward(const Problem &p, const Sums &sums);

}  // namespace fw::short_conv
