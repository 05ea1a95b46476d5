// SPDX-License-Identifier: Apache-2.0
// A checked call of the linear layer, y = x weight^T + bias: what all implementations read and none checks again.
#pragma once
#include <stdint.h>

#include "core/impl_list.hpp"
#include "core/operands.hpp"
#include "core/tensor.hpp"
#include "fastweight/neighbours.h"

namespace fw::linear {

struct Problem {
  fw_direction direction;
  fw_device device;
  void *stream;  // CUDA: a cudaStream_t
  bool is_f64;  // all operands fp64: reference only
  int64_t M, in, out;
  fw_tensor x, weight, bias, y;  // [M,in], [out,in], [out] or absent, [M,out]
  fw_tensor dy;                  // backward: [M,out]
  fw_tensor dx, dweight, dbias;  // backward: each may be absent
};

// The operation for core/verbs.hpp.
struct Op {
  using Desc = fw_linear;
  using Grads = fw_linear_grads;
  using Problem = linear::Problem;
  static constexpr const char *kName = "linear";
  static constexpr bool kHasStep = false;
  static fw_status make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data,
                                Problem *problem);
  static fw_status check_more(const Problem &p) { return check_present(kName, "y", p.y, p.direction); }
  static const Impl<Problem> *impls(int32_t *n);
};

// fp64, one element after the other.
void reference_run(fw_context &context, const Problem &p, void *workspace);

// The vector path of one level; run by cpu.cpp.
uint64_t cpu_workspace(const fw_context &context, const Problem &p);
void cpu_run(fw_context &context, const Problem &p, int32_t level, void *workspace);

// The kernels of cuda.cu.
struct CudaPath {
  static uint64_t workspace(const fw_context &context, const Problem &p);
  static fw_status run(fw_context &context, const Problem &p, void *memory);
};

}  // namespace fw::linear
