// SPDX-License-Identifier: Apache-2.0
// Saved states, written by the chunk forward and read by the chunk backward. *.isa.cpp files only.
#pragma once
#include "core/ledger.hpp"
#include "cpu/dot_units.hpp"
#include "ops/recurrence/cpu_chunk.hpp"
#include "ops/recurrence/cpu_state.hpp"

namespace fw::FW_LEVEL {

// The saved buffer is the caller's and may have any alignment: bytes, only ever copied.
inline unsigned char *saved_at(const Problem &p, int64_t slot, int64_t hv, int64_t k, int64_t d, const void *saved) {
  const int64_t place = (((slot * p.HV + hv) * p.K + k) * recurrence::saved_width(p) + d) * 4;
  return const_cast<unsigned char *>(static_cast<const unsigned char *>(saved)) + place;
}

inline void copy_to_saved(const Problem &p, int64_t slot, int64_t hv, const Panel &panel, const float *state,
                          void *saved) {
  const int64_t W = panel.width();
  for (int64_t k = 0; k < p.K; ++k) {
    memcpy(saved_at(p, slot, hv, k, panel.first, saved), state + k * W, static_cast<size_t>(panel.count) * 4);
    if (panel.has_sum && panel.first == 0)
      memcpy(saved_at(p, slot, hv, k, p.V, saved), state + k * W + panel.count, 4);
  }
}

// state: [K,W] of all columns, of which some are filled.
inline void copy_from_saved(const Problem &p, int64_t slot, int64_t hv, int64_t W, const Columns &columns,
                            const void *saved, float *state) {
  const int64_t used = p.V + (p.has_normalizer ? 1 : 0);
  const int64_t first = columns.first, end = first + columns.width, last = end < used ? end : used;
  for (int64_t k = 0; k < p.K; ++k) {
    if (last > first)
      memcpy(state + k * W + first, saved_at(p, slot, hv, k, first, saved), static_cast<size_t>(last - first) * 4);
    for (int64_t d = last; d < end; ++d) state[k * W + d] = 0.0f;
  }
}

}  // namespace fw::FW_LEVEL
