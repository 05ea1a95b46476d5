// SPDX-License-Identifier: Apache-2.0
// Numbers that the CPU paths share, and how work is cut: one owner for each.
#pragma once
#include <stdint.h>

#include "core/context.hpp"
#include "ops/recurrence/saved.hpp"

namespace fw::recurrence {

constexpr int64_t kChunk = 16;        // rows of a chunk; larger chunks lose on a CPU (512 FLOP more a row and token)
constexpr int64_t kMaxWidth = 512 + 16;  // padded K, or padded V with the normaliser's column

static inline int64_t saved_slot(const Problem &p, int64_t n) {
  return saved_slot_at(p, n, given(p.cu_seqlens) ? load_int(p.cu_seqlens, n) * p.n_sub : 0);
}

// Value panels: one a head when the heads fill the threads, else enough of them, never narrower than 32 columns.
// Columns do not meet in the forward, so the cut changes no bit.
static inline int64_t panel_count(const fw_context &context, const Problem &p) {
  const int64_t heads = p.N * p.HV;
  if (heads == 0 || heads >= context.n_threads) return 1;
  const int64_t most = (p.V + 31) / 32, wanted = (context.n_threads + heads - 1) / heads;
  return wanted < most ? wanted : most;
}

}  // namespace fw::recurrence
