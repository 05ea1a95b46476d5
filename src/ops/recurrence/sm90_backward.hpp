// SPDX-License-Identifier: Apache-2.0
// The family's backward on sm_90a: what a call needs, whether it is accepted, its workspace, its launch.
#pragma once
#include "ops/recurrence/sm90_forward.hpp"

namespace fw {

struct Sm90Backward {
  Sm90Forward call;  // o and final_state are not used
  const void *d_o;   // bf16, or null: zero
  Sm90Strides d_o_strides;
  const float *d_final_state;  // as final_state, or null: zero
  // Null where not wanted.
  void *dq, *dk, *dv;  // bf16
  void *dg, *dbeta;    // of the types of g and beta
  Sm90Strides dq_strides, dk_strides, dv_strides, dg_strides, dbeta_strides;
  float *d_a_log, *d_dt_bias;  // as a_log and dt_bias
  int64_t d_a_log_head, d_dt_bias_head, d_dt_bias_key;
  float *d_initial_state;
};

// Null when this path takes the call, else why it does not.
const char *sm90_backward_refusal(const Sm90Backward &);

// Bytes of workspace, a multiple of 256; from the call's shapes alone.
size_t sm90_backward_workspace(const Sm90Forward &);

// Enqueues the backward on `stream` (a cudaStream_t). `workspace` starts at a multiple of 1024. Returns a cudaError_t.
int sm90_backward_launch(const Sm90Backward &, void *workspace, void *stream);

}  // namespace fw
