// SPDX-License-Identifier: Apache-2.0
// The candidates of the linear layer, best first.
#include "cpu/levels.hpp"
#include "ops/linear/problem.hpp"

namespace fw::linear {
namespace {

bool is_on_cpu(const Problem &p, Reason &reason) {
  return p.device == FW_DEVICE_CPU || reason.refuse("device is CUDA");
}

template <int32_t kLevel>
bool cpu_accepts(const fw_context &context, const Problem &p, Reason &reason) {
  if (!is_on_cpu(p, reason)) return false;
  if (!level_is_available(kLevel) || kLevel > context.cpu_level) {
    return reason.refuse("this machine does not run %s, its level is %s", level_name(kLevel), level_name(context.cpu_level));
  }
  if (p.is_f64) return reason.refuse("operands are fp64");
  return true;
}

template <int32_t kLevel>
void cpu_run_level(fw_context &context, const Problem &p, void *workspace) {
  cpu_run(context, p, kLevel, workspace);
}

bool reference_accepts(const fw_context &, const Problem &p, Reason &reason) { return is_on_cpu(p, reason); }
uint64_t no_workspace(const fw_context &, const Problem &) { return 0; }

const Impl<Problem> kImpls[] = {
    {"cpu_avx512", cpu_accepts<kAvx512>, cpu_workspace, cpu_run_level<kAvx512>},
    {"cpu_avx2", cpu_accepts<kAvx2>, cpu_workspace, cpu_run_level<kAvx2>},
    {"cpu_baseline", cpu_accepts<kBaseline>, cpu_workspace, cpu_run_level<kBaseline>},
    {"reference", reference_accepts, no_workspace, reference_run},
};

}  // namespace

const Impl<Problem> *Op::impls(int32_t *n) {
  *n = static_cast<int32_t>(sizeof kImpls / sizeof kImpls[0]);
  return kImpls;
}

}  // namespace fw::linear
