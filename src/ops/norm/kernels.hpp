// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction-set level, and the memory that they share.
#pragma once
#include "cpu/levels.hpp"
#include "ops/norm/problem.hpp"

namespace fw::norm {

// Scratch rows of a slot, `pitch` floats each. Forward uses the first three.
enum { kRowX, kRowWeight, kRowGate, kRowDy, kRowOut, kRowTile, kRowSum, kScratchRows };

struct Buffers {
  int64_t pitch;    // of a scratch row and of a row of partials
  float *scratch;   // [slots, kScratchRows, pitch]
  float *partials;  // [blocks, pitch] of dweight; nullptr without weight
};

struct Kernels {
  // Rows [begin, end); scratch is the slot's. Backward also writes its block's row of partials.
  void (*rows)(const Problem &p, int64_t pitch, float *scratch, int64_t begin, int64_t end, float *partial);
  // Elements [begin, end) of dweight: the partials of all blocks, first to last. sum: end - begin floats.
  void (*sum_dweight)(const Problem &p, const Buffers &buffers, int64_t n_blocks, int64_t begin, int64_t end,
                      float *sum);
};

}  // namespace fw::norm

FW_DECLARE_LEVEL_TABLES(::fw::norm::Kernels, kNorm)
