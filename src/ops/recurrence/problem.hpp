// SPDX-License-Identifier: Apache-2.0
// A checked call of the family: every size known, every operand's meaning settled, every default filled in.
// Made by checks.cpp from the public descriptor; read by all implementations, which check nothing again.
#pragma once
#include <math.h>
#include <stdint.h>

#include "core/tensor.hpp"
#include "fastweight/recurrence.h"

namespace fw::recurrence {

struct Problem {
  const char *op_name;  // "kda"
  fw_op op;
  fw_gate gate;
  fw_erase erase;
  fw_form form;
  fw_direction direction;
  fw_device device;
  void *stream;          // CUDA: a cudaStream_t
  bool is_f64;           // all operands fp64: reference only
  int64_t B, T, N, H, HV, K, V;
  int64_t n_sub;         // k, v, beta have T * n_sub rows; 1 but for gated_delta_product
  int64_t R;             // T * n_sub
  float scale_f32;
  double scale;
  bool has_normalizer;   // linear_attn: one more column of v that is 1, its output the divisor
  bool has_l2norm;
  fw_state_layout state_layout;
  fw_gate_input gate_input;
  fw_beta_input beta_input;
  double gate_normalizer, gate_lower_bound;
  bool has_fixed_gate;   // retention, lightning: g is fixed_gate(problem, hv), the tensor g absent
  double lightning_slope;// lightning: (8 / HV) (1 - layer_idx / num_layers)
  double g_min;          // 0: none
  bool is_batch_invariant;

  // As the caller gave them. shape and strides are those of the comment in recurrence.h.
  fw_tensor q, k, v, a, b, p, erase_gate, write_gate, g, beta, a_log, dt_bias;
  fw_tensor initial_state, initial_z, cu_seqlens;
  fw_tensor o, final_state, final_z;
  void *saved;
  uint64_t saved_size;
  fw_tensor state, state_z, state_indices;

  // Backward only.
  fw_tensor d_o, d_final_state, d_final_z;
  fw_tensor dq, dk, dv, da, db, dp, d_erase_gate, d_write_gate, dg, dbeta, d_a_log, d_dt_bias;
  fw_tensor d_initial_state, d_initial_z;

  FW_HOST_DEVICE __attribute__((always_inline)) int64_t group() const { return HV / H; }
};

// Natural-log decay of retention and lightning, the same for every token.
FW_HOST_DEVICE static inline double fixed_gate(fw_op op, double lightning_slope, int64_t hv) {
  if (op == FW_OP_RETENTION) return log1p(-exp2(-5.0 - static_cast<double>(hv)));
  return -lightning_slope * static_cast<double>(hv);
}
FW_HOST_DEVICE static inline double fixed_gate(const Problem &p, int64_t hv) { return fixed_gate(p.op, p.lightning_slope, hv); }

// Elements of one (slot, value head) of the opaque layout: [K][V padded to 16].
int64_t opaque_elements(const Problem &p);

// Element offset of state [n, hv, k, v] in a tensor of the given layout (KV or VK).
FW_HOST_DEVICE static inline int64_t state_offset(const fw_tensor &t, fw_state_layout layout, int64_t n, int64_t hv, int64_t k, int64_t v) {
  const int64_t i = layout == FW_STATE_VK ? v : k, j = layout == FW_STATE_VK ? k : v;
  return n * t.strides[0] + hv * t.strides[1] + i * t.strides[2] + j * t.strides[3];
}

}  // namespace fw::recurrence
