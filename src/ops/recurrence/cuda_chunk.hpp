// SPDX-License-Identifier: Apache-2.0
// The chunk form of every row on tensor cores in tf32: chunks of 16 rows. What does not depend on the state is made by one kernel
// for all chunks at once and kept as images, fp32; the scan over the chunks of a sequence is products with images alone.
// Compiled with or without nvcc.
#pragma once
#include "ops/recurrence/saved.hpp"

namespace fw::recurrence {

constexpr int32_t kChunkRows = 16, kChunkScores = kChunkRows * kChunkRows;
constexpr int64_t kChunkWidest = 128;  // K and V

// Slots as in saved.hpp, one each 16 rows.
static inline int64_t chunk_slots(const Problem &p) { return slots_of(p, kChunkRows); }

// Where the images of a (slot, value head) lie: one record, offsets in floats; -1: not there. Rows past the end of a sequence are 0,
// as are channels past K and columns past V. What the scan reads comes first, in the order of its Record. Shared erase: t = (I + xk)^-1. Independent: t = (I - xb)^-1.
struct ChunkImages {
  float *data;            // [slot][HV][record]
  int32_t record;         // a multiple of 4
  bool rounds_keys, rounds_scores;  // images of keys, of scores hold tf32; total and values are as they are
  int32_t keys, width;    // K and V padded to 64 or 128
  int32_t reads_q, ends_k;// [16][keys]: run_i q_i; D_{i+1:16} k_i
  int32_t reads_x;        // [16][keys]: run_i x_i (before the decay: run_{i-1} x_i). Independent: of the backward only
  int32_t solved_x;       // [16][keys]: independent: t reads_x
  int32_t ends_b;         // [16][keys]: independent
  int32_t total;          // [keys]: the decay over the chunk's rows, 1 without a gate
  int32_t qk, qb;         // [16][16]: row i of q with row j <= i of k; of b (independent)
  int32_t t;              // [16][16]: shared; independent: of the backward only
  int32_t m, xk;          // [16][16]: independent: t xk; xk, of the backward only
  int32_t values;         // [16][width]: v', beta and write_gate in
};
ChunkImages plan_chunk_images(const Problem &p, float *data, bool is_backward);

// Chunks that kernels of the backward work on together: without a pack begin .. end - 1 of every sequence, else of all slots. The buffers
// of states and rows hold theirs alone, a slot each.
struct ChunkRange {
  int64_t begin, end;
};
static inline int64_t range_slots(const Problem &p, const ChunkRange &range) { return (given(p.cu_seqlens) ? 1 : p.N) * (range.end - range.begin); }

static inline ChunkRange whole_range(const Problem &p) { return {0, given(p.cu_seqlens) ? chunk_slots(p) : (p.R + kChunkRows - 1) / kChunkRows}; }

// What a forward keeps for the backward.
struct ChunkStates {
  float *states;     // [slot of the range][HV][width][keys]: S^T at the start of the chunk; nullptr: `starts` alone is written
  float *u, *z;      // [slot of the range][HV][16][width]: what a row writes along k, along b (independent; else absent)
  float *starts;     // [range but the first][N, 1 with a pack][HV][width][keys]: S^T where a range begins
  int64_t length;    // chunks of a range but the last
  ChunkRange range;  // which begins from `starts`
};

// 1 or 2: tf32 parts of the operands of products inside a chunk, and of all products of a backward.
int32_t chunk_parts(const Problem &p);

void launch_chunk_prep(const Problem &p, const ChunkImages &images);
// kept: states and what rows write instead of o; final states are written where they are given. divisors: of the normaliser, or nullptr.
void launch_chunk_scan(const Problem &p, const ChunkImages &images, const float *divisors, const ChunkStates *kept);

struct ChunkGradients {
  float *d_o;       // [slot of the range][HV][16][width]: through the normaliser's division; zeros where a row is not read
  float *states;    // [slot of the range][HV][width][keys]: of S^T at the end of the chunk
  float *d_u, *d_z; // [slot of the range][HV][16][width]: of u and z; without independent erase keys d_z is absent, -d_u
  float *carried;   // [N][HV][width][keys]: of S^T where the range begins
};

// gradients.d_o of a range.
void launch_chunk_outputs(const Problem &p, int32_t width, const float *divisors, const ChunkRange &range, const ChunkGradients &out);
// The range's chunks, last to first: from d_o and d_final_state, or what a range after it carried, to `out` and d_initial_state.
void launch_chunk_reverse(const Problem &p, const ChunkImages &images, const ChunkRange &range, const ChunkGradients &out);

struct RowGradients;
// The gradients of kept.range's rows, dv and d_write_gate, all chunks at once.
void launch_chunk_gradients(const Problem &p, const ChunkImages &images, const ChunkStates &kept, const ChunkGradients &gradients,
                            const RowGradients &out);
int32_t chunk_gradients_shared_bytes(const Problem &p);

}  // namespace fw::recurrence
