// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction-set level, and the scratch memory that they share.
#pragma once
#include "cpu/levels.hpp"
#include "ops/short_conv/problem.hpp"

namespace fw::short_conv {

// Channels are taken kPanel at a time, rows tile_rows at a time. Every scratch row is kPanel floats.
constexpr int64_t kPanel = 64;
inline int64_t tile_rows(const Problem &p) { return p.W - 1 > 64 ? p.W - 1 : 64; }

struct Panel {
  int64_t begin, n;  // channels [begin, begin + n)
};

// Scratch of a slot, in rows.
struct Scratch {
  float *x;         // tile_rows + 2 (W-1): inputs; forward: outputs over them
  float *dz;        // tile_rows + W-1 (backward): gradient before the activation; dx over it
  float *weight;    // W, by tap
  float *reversed;  // W (backward), the taps the other way round
  float *bias;      // 1
  float *z;         // 4 (backward): outputs before the activation
  float *line;      // tile_rows + 2 (W-1) floats: one channel's rows
};

struct Kernels {
  // Fills weight, reversed and bias of the panel.
  void (*load_weights)(const Problem &p, Panel panel, const Scratch &scratch);
  // y at positions [from, to) of the sequence.
  void (*forward)(const Problem &p, const Sequence &s, Panel panel, int64_t from, int64_t to, const Scratch &scratch);
  // The last W-1 positions into slot `slot` of `state`, which may be where they are read from.
  void (*write_state)(const Problem &p, const Sequence &s, Panel panel, const fw_tensor &state, int64_t slot,
                      const Scratch &scratch);
  // Both for a step of one position into p.state.
  void (*step_row)(const Problem &p, const Sequence &s, Panel panel, const Scratch &scratch);
  // Gradients of positions [from, to), from >= -(W-1): dx where >= 0, d_initial_state below. sums: NULL, or W + 1
  // rows, `pitch` floats apart, that get dweight by tap and dbias of these positions added.
  void (*backward)(const Problem &p, const Sequence &s, Panel panel, int64_t from, int64_t to, float *sums,
                   int64_t pitch, const Scratch &scratch);
  // sum of n_blocks partials, `block_pitch` floats apart, first to last, into n elements of a parameter's gradient.
  void (*sum_blocks)(const float *partials, int64_t block_pitch, int64_t n_blocks, const fw_tensor &t, int64_t offset,
                     int64_t stride, int64_t n, float *scratch);
};

}  // namespace fw::short_conv

FW_DECLARE_LEVEL_TABLES(::fw::short_conv::Kernels, kShortConv)
