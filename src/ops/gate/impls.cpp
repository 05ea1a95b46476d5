// SPDX-License-Identifier: Apache-2.0
// Candidates of the gate activations, best first. Workspace: scratch rows a thread and, backward, the partial sums a
// block.
#include "core/ledger.hpp"
#include "core/operands.hpp"
#include "cpu/level_impl.hpp"
#include "cuda/candidate.hpp"
#include "ops/gate/kernels.hpp"

namespace fw::gate {
namespace {

Buffers lay_out(Ledger &ledger, const fw_context &context, const Problem &p) {
  Buffers b = {};
  b.pitch = scratch_pitch(p.length);
  b.scratch = ledger.take<float>(product(context.n_threads, product(kScratchRows, b.pitch)));
  if (p.direction == FW_FORWARD) return b;
  const int64_t n_blocks = row_blocks(p.plan.n_rows).n;
  if (given(p.a_log)) b.a_partials = ledger.take<float>(product(n_blocks, p.a_width()));
  if (given(p.dt_bias)) b.bias_partials = ledger.take<float>(product(n_blocks, product(p.n_groups, b.pitch)));
  return b;
}

struct Ops {
  template <int32_t kLevel>
  static uint64_t workspace(const fw_context &context, const Problem &p) {
    Ledger ledger(nullptr);
    lay_out(ledger, context, p);
    return ledger.bytes();
  }
  template <int32_t kLevel>
  static void run(fw_context &context, const Problem &p, void *workspace) {
    Ledger ledger(workspace);
    const Buffers buffers = lay_out(ledger, context, p);
    const Kernels &kernels = FW_LEVEL_TABLE(kLevel, kGate);
    const RowBlocks blocks = row_blocks(p.plan.n_rows);
    const int64_t slot_floats = kScratchRows * buffers.pitch;
    parallel_items(context, blocks.n * p.n_groups, [&](int64_t slot, int64_t item) {
      const int64_t block = item / p.n_groups, begin = block * blocks.rows;
      const int64_t end = p.plan.n_rows - begin < blocks.rows ? p.plan.n_rows : begin + blocks.rows;
      kernels.rows(p, buffers, buffers.scratch + slot * slot_floats, item % p.n_groups, begin, end, block);
    });
    if (given(p.d_a_log)) kernels.sum_a_log(p, buffers, blocks.n);
    if (given(p.d_dt_bias)) {
      parallel_items(context, p.n_groups, [&](int64_t slot, int64_t group) {
        kernels.sum_dt_bias(p, buffers, buffers.scratch + slot * slot_floats, group, blocks.n);
      });
    }
  }
  static uint64_t reference_workspace(const fw_context &, const Problem &) { return 0; }
  static void reference_run(fw_context &context, const Problem &p, void *workspace) {
    gate::reference_run(context, p, workspace);
  }
};

constexpr auto kCandidates = list_of(cuda::Candidate<Problem, CudaPath>::kImpl, LevelImpls<Problem, Ops>::kList);

}  // namespace

const Impl<Problem> *GateActivation::impls(int32_t *n) {
  *n = kCandidates.count();
  return kCandidates.impls;
}

}  // namespace fw::gate
