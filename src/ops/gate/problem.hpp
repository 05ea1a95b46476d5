// SPDX-License-Identifier: Apache-2.0
// A checked call of fw_gate_activation. A token's logits are n_groups rows of `length`: [HV] is one row of HV, [HV,K]
// is HV rows of K.
#pragma once
#include "core/impl_list.hpp"
#include "core/row_plan.hpp"
#include "fastweight/neighbours.h"

namespace fw::gate {

struct Problem {
  fw_device device;
  void *stream;  // CUDA: a cudaStream_t
  fw_direction direction;
  fw_gate_kind kind;
  bool is_f64;
  bool has_vectors;  // x is [B,T,HV,K]
  double normalizer, lower_bound;
  int64_t n_groups, length;
  fw_tensor x, a_log, dt_bias, y, dy, dx, d_a_log, d_dt_bias;
  RowPlan plan;             // over tokens, of the first group: x, y (forward) or x, dy, dx (backward)
  int64_t group_stride[3];  // from one group to the next, in the same tensors

  FW_HOST_DEVICE int64_t a_width() const { return has_vectors ? n_groups : length; }
};

struct GateActivation {
  using Desc = fw_gate_activation;
  using Grads = fw_gate_activation_grads;
  using Problem = gate::Problem;
  static constexpr const char *kName = "gate_activation";
  static constexpr bool kHasStep = false;
  static fw_status make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data,
                                Problem *p);
  static fw_status check_more(const Problem &p);
  static const Impl<Problem> *impls(int32_t *n);
};

// Element offset of parameter (group, i) of a_log or dt_bias, or of their gradients.
FW_HOST_DEVICE inline int64_t parameter_offset(const Problem &p, const fw_tensor &t, int64_t group, int64_t i) {
  if (!p.has_vectors) return i * t.strides[0];
  return group * t.strides[0] + (t.ndim == 2 ? i * t.strides[1] : 0);
}

void reference_run(fw_context &context, const Problem &p, void *workspace);

// The kernels of cuda.cu.
struct CudaPath {
  static uint64_t workspace(const fw_context &context, const Problem &p);
  static fw_status run(fw_context &context, const Problem &p, void *memory);
};

}  // namespace fw::gate
