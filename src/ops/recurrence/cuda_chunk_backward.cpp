// SPDX-License-Identifier: Apache-2.0
// The backward of the chunk form on the portable tensor cores: its workspace and the order of its kernels.
#include "core/operands.hpp"
#include "cuda/device.hpp"
#include "ops/recurrence/cuda_chunk.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_paths.hpp"

namespace fw::recurrence {

bool cuda_chunk_backward_accepts(const fw_context &context, const Problem &p, Reason &reason) {
  if (!cuda_chunk_accepts(context, p, reason)) return false;
#if defined(FW_HAVE_CUDA)
  if (chunk_gradients_shared_bytes(p) > cuda::shared_memory_limit()) {
    return reason.refuse("a thread block needs %d bytes of shared memory here, the device allows %d", chunk_gradients_shared_bytes(p),
                         cuda::shared_memory_limit());
  }
#endif
  return true;
}

#if defined(FW_HAVE_CUDA)

namespace {

struct Workspace {
  ChunkImages images;
  ChunkStates kept;
  ChunkGradients gradients;
  ChunkRange range;
  RowGradients rows;
  float *divisors;  // [B,T,H]
  float *sums;      // [B,T,H,K]

  Workspace(Ledger &ledger, const Problem &p) : images(plan_chunk_images(p, nullptr, true)), kept{}, gradients{}, range{}, divisors(nullptr), sums(nullptr) {
    if (p.has_normalizer) {
      const int64_t tokens = product(product(p.B, p.T), p.H);
      divisors = ledger.take<float>(tokens);
      sums = ledger.take<float>(product(tokens, p.K));
    }
    const int64_t slots = chunk_slots(p), heads = product(slots, p.HV), values = product(heads, kChunkRows * images.width);
    range = {0, given(p.cu_seqlens) ? slots : (p.R + kChunkRows - 1) / kChunkRows};
    images.data = ledger.take<float>(product(heads, images.record));
    kept.u = ledger.take<float>(values), gradients.d_u = ledger.take<float>(values);
    if (p.erase == FW_ERASE_INDEPENDENT) kept.z = ledger.take<float>(values), gradients.d_z = ledger.take<float>(values);
    const int64_t states = product(product(range_slots(p, range), p.HV), images.width * images.keys);
    kept.states = ledger.take<float>(states), gradients.states = ledger.take<float>(states);
    rows = take_row_gradients(ledger, p, 1);
  }
};

}  // namespace

uint64_t cuda_chunk_backward_workspace(const fw_context &, const Problem &p) {
  Ledger ledger(nullptr);
  const Workspace counted(ledger, p);
  (void)counted;
  return ledger.bytes();
}

fw_status cuda_chunk_backward_run(fw_context &, const Problem &p, void *memory) {
  FW_TRY(cuda_check_places(p, memory));
  Ledger ledger(memory);
  const Workspace w(ledger, p);
  if (p.N > 0) {
    const Problem forward = states_only(p);
    if (p.has_normalizer) launch_normalizer(forward, w.divisors, w.sums);
    launch_chunk_prep(p, w.images);
    launch_chunk_scan(forward, w.images, nullptr, &w.kept);
    launch_chunk_reverse(p, w.images, w.divisors, w.range, w.gradients);
    launch_chunk_gradients(p, w.images, w.divisors, w.range, w.kept, w.gradients, w.rows);
    if (p.has_normalizer) launch_normalizer_backward(p, w.divisors, w.sums, w.rows);
  }
  launch_finish(p, w.rows);
  launch_clear(p, p.dv, p.n_sub, p.V);
  launch_clear(p, p.d_write_gate, 1, p.V);
  return cuda::check_launches(p.op_name, "cuda_chunk");
}

#else

uint64_t cuda_chunk_backward_workspace(const fw_context &, const Problem &) { return UINT64_MAX; }
fw_status cuda_chunk_backward_run(fw_context &, const Problem &p, void *) { return cuda::check_launches(p.op_name, "cuda_chunk"); }

#endif

}  // namespace fw::recurrence
