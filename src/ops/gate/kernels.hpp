// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction-set level, and the memory that they share.
#pragma once
#include "cpu/levels.hpp"
#include "ops/gate/problem.hpp"

namespace fw::gate {

// Scratch rows of a slot, `pitch` floats each.
enum { kX, kDy, kOut, kALog, kDtBias, kDaTile, kDbTile, kDa, kDb, kScratchRows };

struct Buffers {
  int64_t pitch;         // of a scratch row and of a row of bias_partials
  float *scratch;        // [slots, kScratchRows, pitch]
  float *a_partials;     // [blocks, a_width]; nullptr without a_log
  float *bias_partials;  // [blocks, n_groups, pitch]; nullptr without dt_bias
};

struct Kernels {
  // Rows [begin, end) of one group; scratch is the slot's. Backward also writes block `block` of the partials.
  void (*rows)(const Problem &p, const Buffers &buffers, float *scratch, int64_t group, int64_t begin, int64_t end,
               int64_t block);
  // Sums the partials of all blocks, first to last, into d_a_log (all) and d_dt_bias (one group).
  void (*sum_a_log)(const Problem &p, const Buffers &buffers, int64_t n_blocks);
  void (*sum_dt_bias)(const Problem &p, const Buffers &buffers, float *scratch, int64_t group, int64_t n_blocks);
};

}  // namespace fw::gate

FW_DECLARE_LEVEL_TABLES(::fw::gate::Kernels, kGate)
