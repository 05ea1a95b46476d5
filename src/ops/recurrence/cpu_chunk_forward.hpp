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

// state: [K,W] of all columns, of which some are filled.
inline void copy_from_saved(const Problem &p, int64_t slot, int64_t hv, int64_t W, const Columns &columns,
                            const float *saved, float *state) {
  const float *from = saved_state(p, slot, hv, const_cast<float *>(saved));
  const int64_t width = recurrence::saved_width(p), used = p.V + (p.has_normalizer ? 1 : 0);
  const int64_t first = columns.first, end = first + columns.width, last = end < used ? end : used;
  for (int64_t k = 0; k < p.K; ++k) {
    if (last > first) memcpy(state + k * W + first, from + k * width + first, static_cast<size_t>(last - first) * 4);
    for (int64_t d = last; d < end; ++d) state[k * W + d] = 0.0f;
  }
}

}  // namespace fw::FW_LEVEL
