// SPDX-License-Identifier: Apache-2.0
// Candidates of the norms, best first. Workspace: scratch rows a thread and, backward with a weight, a partial row a
// block.
#include "core/ledger.hpp"
#include "core/operands.hpp"
#include "cpu/level_impl.hpp"
#include "cuda/candidate.hpp"
#include "ops/norm/kernels.hpp"

namespace fw::norm {
namespace {

constexpr int64_t kColumnsTogether = 1024;  // of dweight, in the pass over blocks

Buffers lay_out(Ledger &ledger, const fw_context &context, const Problem &p) {
  Buffers b = {};
  b.pitch = scratch_pitch(p.plan.length);
  b.scratch = ledger.take<float>(product(context.n_threads, product(kScratchRows, b.pitch)));
  if (p.direction == FW_BACKWARD && given(p.weight)) {
    b.partials = ledger.take<float>(product(row_blocks(p.plan.n_rows).n, b.pitch));
  }
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
    const Kernels &kernels = FW_LEVEL_TABLE(kLevel, kNorm);
    const RowBlocks blocks = row_blocks(p.plan.n_rows);
    const bool has_dweight = given(p.dweight);
    parallel_items(context, blocks.n, [&](int64_t slot, int64_t block) {
      const int64_t begin = block * blocks.rows;
      const int64_t end = p.plan.n_rows - begin < blocks.rows ? p.plan.n_rows : begin + blocks.rows;
      kernels.rows(p, buffers.pitch, buffers.scratch + slot * kScratchRows * buffers.pitch, begin, end,
                   has_dweight ? buffers.partials + block * buffers.pitch : nullptr);
    });
    if (!has_dweight) return;
    const int64_t length = p.dweight.shape[0];
    if (blocks.n == 0) {  // no row: no scratch either
      for (int64_t i = 0; i < length; ++i) store_f32(p.dweight.data, p.dweight.dtype, i * p.dweight.strides[0], 0.0f);
      return;
    }
    parallel_items(context, ceil_div(length, kColumnsTogether), [&](int64_t slot, int64_t item) {
      const int64_t begin = item * kColumnsTogether;
      const int64_t end = length - begin < kColumnsTogether ? length : begin + kColumnsTogether;
      kernels.sum_dweight(p, buffers, blocks.n, begin, end, buffers.scratch + slot * kScratchRows * buffers.pitch);
    });
  }
  static uint64_t reference_workspace(const fw_context &context, const Problem &p) {
    return norm::reference_workspace(context, p);
  }
  static void reference_run(fw_context &context, const Problem &p, void *workspace) {
    norm::reference_run(context, p, workspace);
  }
};

constexpr auto kCandidates = list_of(cuda::Candidate<Problem, CudaPath>::kImpl, LevelImpls<Problem, Ops>::kList);

}  // namespace

const Impl<Problem> *Norm::impls(int32_t *n) {
  *n = kCandidates.count();
  return kCandidates.impls;
}

}  // namespace fw::norm
