// SPDX-License-Identifier: Apache-2.0
// One chunk of up to 16 rows of one value head: operands packed to fp32, gates, the triangular scores, and the
// decayed rows that meet the state. Shared by chunk forward, chunk backward and the token-by-token path. *.isa.cpp
// files only. Only the loops over pairs of rows are compiled once a <gate, erase>; what runs once a row or a chunk
// branches on them.
//
// Rows i of a chunk that starts from S, with D_{j:i} the product of the decays of rows j..i (docs/math.md):
//   reads  x: D_{1:i} x_i (read after the decay) or D_{1:i-1} x_i (before, independent);  q: D_{1:i} q_i
//   ends   k: D_{j+1:C} k_j;  b: D_{j+1:C} b_j
//   scores qk_ij = q_i^T D_{j+1:i} k_j (j <= i), xk_ij = x_i^T D_{j+1:i or i-1} k_j (j < i); qb, xb the same with b_j
// Decays are multiplied up row by row and never divided: every factor is a product of exp(g), so g = -inf, g = 0 and
// g > 0 need no case of their own, and row i depends on no later row in any bit.
#pragma once
#include "core/ledger.hpp"
#include "cpu/gemm.hpp"
#include "cpu/rows.hpp"
#include "ops/recurrence/cpu_plan.hpp"
#include "ops/recurrence/problem.hpp"

namespace fw::FW_LEVEL {

using recurrence::kChunk;
using recurrence::Problem;

inline bool is_shared(fw_erase erase) { return erase == FW_ERASE_SHARED_AFTER || erase == FW_ERASE_SHARED_BEFORE; }

// The columns of v that a task computes. With the normaliser one more column, at index `count`, whose v is 1.
struct Panel {
  int64_t first, count;
  bool has_sum;
  int64_t width() const { return pad_lanes(count + (has_sum ? 1 : 0)); }
};

// A head's columns cut into panels of whole vectors, so that few heads still fill the threads.
struct PanelCut {
  int64_t count, step, columns;
  bool has_sum;
  PanelCut(const fw_context &context, const Problem &p)
      : count(recurrence::panel_count(context, p)),
        step(recurrence::pad_to((p.V + count - 1) / count, kLanes)),
        columns(p.V),
        has_sum(p.has_normalizer) {}
  // The last panels may be empty, count 0, since a step is a whole number of vectors.
  Panel at(int64_t i) const {
    const int64_t rest = columns - i * step;
    return {i * step, rest < 0 ? 0 : (rest < step ? rest : step), has_sum};
  }
  int64_t widest() const { return at(0).width(); }
};

struct Chunk {               // scratch of one task; C = kChunk, Kp = K padded to lanes, W = panel width
  float *x, *q;              // [C,Kp] each, x directly followed by q
  float *k, *b;              // [C,Kp]
  float *u, *w;              // [C,W]: v', later u; w of the independent erase
  float *row_decay;          // [C,Kp] exp(g), or [C] for a scalar gate
  float *runs;               // [C,Kp] D_{1:i}, or [C]
  float *decay;              // [C,C] D_{j+1:i} of a scalar gate
  float *reads_x, *reads_q;  // [C,Kp], directly after one another
  float *ends_k, *ends_b;    // [C,Kp]
  float *qk, *qb, *xk, *xb;  // [C,C]
  float *total;              // [Kp] D_{1:C}, one entry a state row
  float *beta;               // [C]
  // backward only: the factors of x and v'
  float *key, *erase_gate;          // [C,Kp]: p or k (normalised), erase_gate
  float *v, *write_gate;            // [C,W]
  float *g;                         // [C,Kp] or [C]: log decay, backward with an activation
  float *logits;                    // [C,Kp] or [C]
  float *norm_q, *norm_k, *norm_p;  // [C]: 1 / length, with the L2 norm
  float *parameters;                // [2,Kp]: a_log and dt_bias of this head
  int64_t Kp, W;

  void lay_out(Ledger &ledger, const Problem &p, int64_t width, bool is_backward);
};

// Where a chunk lies: `rows` rows of k from `first_row` (rows count sub-steps) of batch entry `batch`.
struct Rows {
  int64_t batch, first_row, rows, hv;
};

inline int64_t head_offset(const fw_tensor &t, int64_t batch, int64_t row, int64_t head) {
  return batch * t.strides[0] + row * t.strides[1] + head * t.strides[2];
}

// x *= y, x *= scalar, padded lengths.
inline void multiply_row(float *x, const float *y, int64_t padded) {
  for (int64_t i = 0; i < padded; i += kLanes) store(x + i, load(x + i) * load(y + i));
}
inline void scale_row(const float *x, float factor, int64_t padded, float *y) {
  for (int64_t i = 0; i < padded; i += kLanes) store(y + i, load(x + i) * splat(factor));
}

// n numbers of a row of one head, then zeros.
void load_head_row(const fw_tensor &t, int64_t batch, int64_t row, int64_t head, int64_t n, int64_t padded,
                   float *to);

// a_log and dt_bias of one value head, spread to the width of its gate. Called once a head.
void load_gate_parameters(const Problem &p, int64_t hv, Chunk &c);

// Loads a row of q, k or p with the norm that the call asks for.
void load_key_row(const Problem &p, const fw_tensor &t, int64_t batch, int64_t row, int64_t head, int64_t padded,
                  float *to, float *inverse_length);

// Fills x, q, k, b, row_decay, beta (and the backward's factors) with the rows of the chunk.
void pack_keys(const Problem &p, const Rows &r, Chunk &c);

// Fills u (and the backward's factors) with the panel's columns of the rows of a chunk whose keys are packed.
void pack_values(const Problem &p, const Rows &r, const Panel &panel, Chunk &c);

// Both.
void pack_chunk(const Problem &p, const Rows &r, const Panel &panel, Chunk &c);

// The scores and the decayed rows of a packed chunk.
void score_chunk(const Problem &p, int64_t rows, Chunk &c);

// Some of the W columns of a chunk and its state, whole vectors. Columns do not meet in what takes them.
struct Columns {
  int64_t first, width;
};

// to[:] += sum_{j < n} factor[j * stride] * rows[j * pitch + :], j upward; width a multiple of kLanes.
void add_rows(int64_t n, const float *factor, int64_t stride, const float *rows, int64_t pitch, int64_t width,
              float *to);

// Solves for what each row writes: u (shared: v' - x S - ..., in place over v') and w (independent).
// from_x: [C,W] reads_x S.
void solve_rows(const Problem &p, int64_t rows, const float *from_x, const Columns &columns, Chunk &c);

// S = D_{1:C} S + ends_k^T u + ends_b^T w.
void advance_state(const Problem &p, int64_t rows, const Chunk &c, const Columns &columns, float *state);

}  // namespace fw::FW_LEVEL
