// SPDX-License-Identifier: Apache-2.0
// Candidates of the feature maps, best first.
#include "core/ledger.hpp"
#include "core/operands.hpp"
#include "cpu/level_impl.hpp"
#include "cuda/candidate.hpp"
#include "ops/feature_map/kernels.hpp"

namespace fw::feature_map {
namespace {

float *lay_out(Ledger &ledger, const fw_context &context) {
  return ledger.take<float>(product(context.n_threads, 3 * kPieceLength));
}

struct Ops {
  template <int32_t kLevel>
  static uint64_t workspace(const fw_context &context, const Problem &) {
    Ledger ledger(nullptr);
    lay_out(ledger, context);
    return ledger.bytes();
  }
  template <int32_t kLevel>
  static void run(fw_context &context, const Problem &p, void *workspace) {
    if (p.plan.n_rows == 0 || (p.direction == FW_BACKWARD && !given(p.dx))) return;
    Ledger ledger(workspace);
    float *scratch = lay_out(ledger, context);
    const int64_t n_pieces = p.plan.n_rows * ceil_div(p.plan.length, kPieceLength);
    const int64_t longest = p.plan.length < kPieceLength ? p.plan.length : kPieceLength;
    const int64_t together = ceil_div(16 * kPieceLength, longest);
    const Kernels &kernels = FW_LEVEL_TABLE(kLevel, kFeatureMap);
    parallel_items(context, ceil_div(n_pieces, together), [&](int64_t slot, int64_t item) {
      const int64_t first = item * together, left = n_pieces - first;
      kernels.pieces(p, first, left < together ? left : together, scratch + slot * 3 * kPieceLength);
    });
  }
  static uint64_t reference_workspace(const fw_context &, const Problem &) { return 0; }
  static void reference_run(fw_context &context, const Problem &p, void *workspace) {
    feature_map::reference_run(context, p, workspace);
  }
};

constexpr auto kCandidates = list_of(cuda::Candidate<Problem, CudaPath>::kImpl, LevelImpls<Problem, Ops>::kList);

}  // namespace

const Impl<Problem> *FeatureMap::impls(int32_t *n) {
  *n = kCandidates.count();
  return kCandidates.impls;
}

}  // namespace fw::feature_map
