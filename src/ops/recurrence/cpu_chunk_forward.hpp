// SPDX-License-Identifier: Apache-2.0
// Saved states, written by the chunk forward and read by the chunk backward. *.isa.cpp files only.
#pragma once
#include "core/ledger.hpp"
#include "ops/recurrence/cpu_chunk.hpp"
#include "ops/recurrence/cpu_state.hpp"

namespace fw::FW_LEVEL {

inline float *saved_state(const Problem &p, int64_t slot, int64_t hv, float *saved) {
  return saved + (slot * p.HV + hv) * p.K * recurrence::saved_width(p);
}

inline void copy_to_saved(const Problem &p, int64_t slot, int64_t hv, const Panel &panel, const float *state,
                          float *saved) {
  float *to = saved_state(p, slot, hv, saved);
  const int64_t W = panel.width(), width = recurrence::saved_width(p);
  for (int64_t k = 0; k < p.K; ++k) {
    memcpy(to + k * width + panel.first, state + k * W, static_cast<size_t>(panel.count) * 4);
    if (panel.has_sum && panel.first == 0) to[k * width + p.V] = state[k * W + panel.count];
  }
}

// state: [K,W] of the panel that holds all columns.
inline void copy_from_saved(const Problem &p, int64_t slot, int64_t hv, const Panel &panel, const float *saved,
                            float *state) {
  const float *from = saved_state(p, slot, hv, const_cast<float *>(saved));
  const int64_t W = panel.width(), width = recurrence::saved_width(p), used = panel.count + (panel.has_sum ? 1 : 0);
  for (int64_t k = 0; k < p.K; ++k) {
    memcpy(state + k * W, from + k * width, static_cast<size_t>(used) * 4);
    for (int64_t d = used; d < W; ++d) state[k * W + d] = 0.0f;
  }
}

}  // namespace fw::FW_LEVEL
