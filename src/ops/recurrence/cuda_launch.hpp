// SPDX-License-Identifier: Apache-2.0
// What the files of the CUDA backend call in each other. Functions order kernels on the problem's stream and return nothing:
// cuda_paths.cpp asks for the errors of all launches together. Compiled with or without nvcc.
#pragma once
#include "core/ledger.hpp"
#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

// Whether every row of the last dimension is dense and starts at a multiple of 4 elements; the stride of a dimension of one counts for
// nothing.
bool has_whole_quads(const fw_tensor &t);

// Forward and step of every row. divisors: [B,T,H] of the normaliser or nullptr; saved: see saved.hpp, or nullptr.
void launch_recurrent(const Problem &p, const float *divisors, float *saved);

// Step of a call that cuda_step_accepts.
void launch_step(const Problem &p);
// Step of a call that sm90_step_accepts.
void launch_stream_step(const Problem &p);
// Step of a call that sm90_step_chunk_accepts; a cudaError_t.
int launch_chunk_step(const Problem &p);

// The normaliser of linear_attn: divisors [B,T,H] of every token, the final sum of keys, and, when sums is given, the sum of
// keys after every token [B,T,H,K].
void launch_normalizer(const Problem &p, float *divisors, float *sums);

// Rows of [B,R,...] outputs that belong to no sequence become 0. last: the head size, or 0 for a tensor without one.
void launch_clear(const Problem &p, const fw_tensor &t, int64_t rows_a_token, int64_t last);

// Gradients of the rows in fp32, before what a row's operands were made of is undone: [panel][B*R][HV][K or 1].
struct RowGradients {
  int32_t panels;                // whose sums over columns are apart
  float *d_q, *d_k, *d_x, *d_b;  // [panel][B*R][HV][K]
  float *d_g;                    // [panel][B*R][HV][K], or [..][1] for a scalar gate
  float *d_beta;                 // [panel][B*R][HV]: what v' gives
  float *states;                 // [block][chunks of a segment][K * width]: scratch of the reverse kernel
  float *gate_sums;              // [row block][HV][1 + K]: d_a_log and d_dt_bias of the rows of a block
};

RowGradients take_row_gradients(Ledger &ledger, const Problem &p, int32_t panels);  // without `states`

// The call whose states a backward needs: a forward without outputs.
Problem states_only(const Problem &p);

// The reverse of the recurrence: writes dv, d_write_gate, d_initial_state, and the row gradients.
void launch_reverse(const Problem &p, const float *divisors, const float *saved, const RowGradients &rows);
int32_t reverse_shared_bytes(const Problem &p);  // shared memory of a thread block
int64_t reverse_blocks(const Problem &p);       // thread blocks, each with its own scratch
int64_t reverse_state_floats(const Problem &p); // scratch of one

// From row gradients to dq, dk, da, db, dp, d_erase_gate, dg, dbeta, d_a_log, d_dt_bias.
void launch_finish(const Problem &p, const RowGradients &rows);
int64_t finish_blocks(const Problem &p);

// linear_attn with a normaliser: the divisor's part of d_q and d_k, added to the row gradients; d_initial_z.
void launch_normalizer_backward(const Problem &p, const float *divisors, const float *sums, const RowGradients &rows);

}  // namespace fw::recurrence
