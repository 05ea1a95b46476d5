// SPDX-License-Identifier: Apache-2.0
// A checked call of fw_norm.
#pragma once
#include "core/impl_list.hpp"
#include "core/row_plan.hpp"
#include "fastweight/neighbours.h"

namespace fw::norm {

struct Problem {
  fw_device device;
  void *stream;  // CUDA: a cudaStream_t
  fw_direction direction;
  fw_activation gate_activation;
  bool is_f64;
  double eps;
  double count;  // what the sum of squares is divided by: 1 (L2) or the row's length (RMS)
  fw_tensor x, weight, gate, y, dy, dx, dweight, dgate;
  RowPlan plan;  // tensors in the order of the enumerators below
};
enum { kX = 0, kGate = 1, kY = 2 /* forward */, kDy = 2 /* backward */, kDx = 3, kDgate = 4 };

struct Norm {
  using Desc = fw_norm;
  using Grads = fw_norm_grads;
  using Problem = norm::Problem;
  static constexpr const char *kName = "norm";
  static constexpr bool kHasStep = false;
  static fw_status make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data,
                                Problem *p);
  static fw_status check_more(const Problem &p);
  static const Impl<Problem> *impls(int32_t *n);
};

uint64_t reference_workspace(const fw_context &context, const Problem &p);
void reference_run(fw_context &context, const Problem &p, void *workspace);

// The kernels of cuda.cu.
struct CudaPath {
  static uint64_t workspace(const fw_context &context, const Problem &p);
  static fw_status run(fw_context &context, const Problem &p, void *memory);
};

}  // namespace fw::norm
