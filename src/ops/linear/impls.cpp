// SPDX-License-Identifier: Apache-2.0
// The candidates of the linear layer, best first.
#include "cpu/level_impl.hpp"
#include "cuda/candidate.hpp"
#include "ops/linear/problem.hpp"

namespace fw::linear {
namespace {

struct Paths {
  template <int32_t kLevel>
  static uint64_t workspace(const fw_context &context, const Problem &p) {
    return cpu_workspace(context, p);
  }
  template <int32_t kLevel>
  static void run(fw_context &context, const Problem &p, void *workspace) {
    cpu_run(context, p, kLevel, workspace);
  }
  static uint64_t reference_workspace(const fw_context &, const Problem &) { return 0; }
  static constexpr auto reference_run = linear::reference_run;
};

constexpr auto kCandidates = list_of(cuda::Candidate<Problem, CudaPath>::kImpl, LevelImpls<Problem, Paths>::kList);

}  // namespace

const Impl<Problem> *Op::impls(int32_t *n) {
  *n = kCandidates.count();
  return kCandidates.impls;
}

}  // namespace fw::linear
