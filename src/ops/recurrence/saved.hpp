// SPDX-License-Identifier: Apache-2.0
// The buffer of states that a forward saves for the backward, the same for every path:
// [slot][HV][K][saved_width] fp32, a slot each kSegmentRows rows of a sequence.
#pragma once
#include <stdint.h>

#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

constexpr int64_t kSegmentRows = 64;  // rows between two saved states: 1 KB a token and head at K = V = 128
constexpr int64_t kStatePad = 16;     // columns are padded alike on every path

FW_HOST_DEVICE static inline int64_t pad_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

FW_HOST_DEVICE static inline int64_t saved_width(const Problem &p) {
  return pad_to(p.V + (p.has_normalizer ? 1 : 0), kStatePad);
}
// First slot of sequence n, which starts at row first_row of its batch entry, with a slot each `rows` rows: with packing an upper
// bound that needs no sum over the sequences before. And how many slots there are.
FW_HOST_DEVICE static inline int64_t slot_at(const Problem &p, int64_t n, int64_t first_row, int64_t rows) {
  if (!given(p.cu_seqlens)) return n * ((p.R + rows - 1) / rows);
  return first_row / rows + n;
}
static inline int64_t slots_of(const Problem &p, int64_t rows) {
  if (!given(p.cu_seqlens)) return p.N * ((p.R + rows - 1) / rows);
  return p.R / rows + p.N;
}
FW_HOST_DEVICE static inline int64_t saved_slot_at(const Problem &p, int64_t n, int64_t first_row) {
  return slot_at(p, n, first_row, kSegmentRows);
}
static inline int64_t saved_slots(const Problem &p) { return slots_of(p, kSegmentRows); }
// UINT64_MAX when it does not fit.
uint64_t saved_bytes(const Problem &p);

}  // namespace fw::recurrence
