// SPDX-License-Identifier: Apache-2.0
// The reverse of score_chunk: from the gradients of the scores, of the decayed reads and ends and of the whole decay
// to those of q, x, k, b and of the log decay. *.isa.cpp files only.
//
// dg is gathered as the flow that crosses each decay (what is decayed times its gradient), a sum of products with no
// difference of large terms; at a decay of 0 every such product is 0.
#pragma once
#include "ops/recurrence/cpu_chunk.hpp"

namespace fw::FW_LEVEL {

struct ReverseChunk {  // all rows [C,Kp], scores [C,C]
  float *d_qk, *d_qb, *d_xk, *d_xb;
  float *d_reads_x, *d_reads_q;
  float *d_k, *d_b;  // in: gradients of ends_k, ends_b; out: of k and b
  float *d_q, *d_x;  // out
  float *d_g;        // out: [C,Kp], or [C] for a scalar gate
  float *d_total;    // [Kp] in

  void lay_out(Ledger &ledger, const Problem &p);
};

// From what r holds of the scores, reads and ends to d_q, d_x, d_k, d_b and d_g.
void reverse_scores(const Problem &p, int64_t rows, const Chunk &c, const ReverseChunk &r);

}  // namespace fw::FW_LEVEL
