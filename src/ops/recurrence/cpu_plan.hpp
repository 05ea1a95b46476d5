// SPDX-License-Identifier: Apache-2.0
// Numbers that the CPU paths share, and how work is cut: one owner for each.
#pragma once
#include <stdint.h>

#include "core/context.hpp"
#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

constexpr int64_t kChunk = 16;        // rows of a chunk; larger chunks lose on a CPU (512 FLOP more a row and token)
constexpr int64_t kSegmentRows = 64;  // rows between two saved states: 1 KB a token and head at K = V = 128
constexpr int64_t kMaxWidth = 512 + 16;  // padded K, or padded V with the normaliser's column
constexpr int64_t kStatePad = 16;        // saved states are padded alike on every level

static inline int64_t pad_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Saved states: [slot][HV][K][saved_width] fp32, a slot each kSegmentRows rows of a sequence.
static inline int64_t saved_width(const Problem &p) { return pad_to(p.V + (p.has_normalizer ? 1 : 0), kStatePad); }
// First slot of sequence n: with packing an upper bound that needs no sum over the sequences before.
static inline int64_t saved_slot(const Problem &p, int64_t n) {
  if (!given(p.cu_seqlens)) return n * ((p.R + kSegmentRows - 1) / kSegmentRows);
  return load_int(p.cu_seqlens, n) * p.n_sub / kSegmentRows + n;
}
static inline int64_t saved_slots(const Problem &p) {
  if (!given(p.cu_seqlens)) return p.N * ((p.R + kSegmentRows - 1) / kSegmentRows);
  return p.R / kSegmentRows + p.N;
}
// UINT64_MAX when it does not fit.
uint64_t saved_bytes(const Problem &p);

// Value panels: one a head when the heads fill the threads, else enough of them, never narrower than 32 columns.
// Columns do not meet in the forward, so the cut changes no bit.
static inline int64_t panel_count(const fw_context &context, const Problem &p) {
  const int64_t heads = p.N * p.HV;
  if (heads == 0 || heads >= context.n_threads) return 1;
  const int64_t most = (p.V + 31) / 32, wanted = (context.n_threads + heads - 1) / heads;
  return wanted < most ? wanted : most;
}

}  // namespace fw::recurrence
