// SPDX-License-Identifier: Apache-2.0
// The chunk backward's scratch, and what goes between it and the caller's tensors: the incoming d_o, the gradients
// that leave.
// *.isa.cpp files only.
#pragma once
#include "ops/recurrence/cpu_chunk_forward.hpp"
#include "ops/recurrence/cpu_reverse.hpp"

namespace fw::FW_LEVEL {

constexpr int64_t kChunks = recurrence::kSegmentRows / kChunk;

struct Part {              // one chunk of a segment, of one value head; W: padded V, with the normaliser's column
  Chunk chunk;             // u and w: what its rows write
  float *state;            // [K,W] at its start
  float *d_state;          // [K,W] gradient of the state at its end; with shared heads only
  float *d_o, *d_u, *d_z;  // [C,W]; d_z: minus the gradient of v' (shared) or that of w (independent)
  float *sums;             // [C,W] undivided outputs, with the normaliser
  float *gate_sums;        // [2,Kp] d_a_log, d_dt_bias of the chunk
  void lay_out(Ledger &ledger, const Problem &p, bool is_shared_head);
};

struct HeadScratch {  // of one (sequence, query/key head)
  Part parts[kChunks];
  float *d_state;      // [group,K,W]
  float *gathered[4];  // [kSegmentRows,Kp]: q, k, p or a, erase_gate or b, summed over the group
  void lay_out(Ledger &ledger, const Problem &p, bool is_shared_head);
};

struct SlotScratch {  // of one thread at a time
  ReverseChunk reverse;
  float *row;  // [kMaxWidth]
  void lay_out(Ledger &ledger, const Problem &p);
};

// d_o of the chunk's rows, times scale; through the normaliser when there is one (part.sums).
void load_d_o(const Problem &p, const Rows &where, Part &part);

// Stores what belongs to one value head (v, write_gate, beta, g) and gathers what belongs to the query/key head.
// at: the chunk's first row in the segment.
void store_value_head(const Problem &p, const Rows &where, int64_t at, Part &part, SlotScratch &slot,
                      HeadScratch &head);

// Stores what was gathered for the rows of a chunk.
void store_key_head(const Problem &p, const Rows &where, int64_t at, SlotScratch &slot, HeadScratch &head);

// parts: [N,HV,1 + K], d_a_log and d_dt_bias of each sequence; summed in the order of the sequences.
void store_gate_parameters(const Problem &p, const float *parts);

// Rows of no sequence become 0 in every gradient.
void clear_tails(const Problem &p);

}  // namespace fw::FW_LEVEL
