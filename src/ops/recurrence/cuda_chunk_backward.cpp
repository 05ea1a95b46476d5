// SPDX-License-Identifier: Apache-2.0
// The backward of the chunk form on the portable tensor cores: its workspace and the order of its kernels.
#include "core/operands.hpp"
#include "cuda/device.hpp"
#include "ops/recurrence/cuda_chunk.hpp"
#include "ops/recurrence/cuda_chunk_kept.hpp"
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
  RowGradients rows;
  float *divisors;  // [B,T,H]
  float *sums;      // [B,T,H,K]
  ChunkRange whole;

  Workspace(Ledger &ledger, const Problem &p) : images(plan_chunk_images(p, nullptr, true)), kept{}, gradients{}, divisors(nullptr), sums(nullptr), whole(whole_range(p)) {
    if (p.has_normalizer) {
      const int64_t tokens = product(product(p.B, p.T), p.H);
      divisors = ledger.take<float>(tokens);
      sums = ledger.take<float>(product(tokens, p.K));
    }
    images.data = ledger.take<float>(product(product(chunk_slots(p), p.HV), images.record));
    const bool is_independent = p.erase == FW_ERASE_INDEPENDENT;
    const int64_t state = images.width * images.keys, values = kChunkRows * images.width, sequences = given(p.cu_seqlens) ? 1 : p.N;
    const int64_t each = 4 * product(product(sequences, p.HV), 2 * state + (is_independent ? 5 : 3) * values);  // bytes of a chunk of every head
    const int64_t fits = (product(p.N, p.HV) < kFewHeads ? kMostKeptOfFew : kMostKept) / (each > 0 ? each : 1), chunks = whole.end;
    const int64_t ranges = fits >= chunks ? 1 : fits > 0 ? (chunks + fits - 1) / fits : chunks;
    kept.length = ranges > 0 ? (chunks + ranges - 1) / ranges : 0;
    const int64_t heads = product(product(sequences, kept.length), p.HV);
    kept.states = ledger.take<float>(product(heads, state)), gradients.states = ledger.take<float>(product(heads, state));
    kept.u = ledger.take<float>(product(heads, values)), gradients.d_u = ledger.take<float>(product(heads, values));
    gradients.d_o = ledger.take<float>(product(heads, values));
    if (is_independent) kept.z = ledger.take<float>(product(heads, values)), gradients.d_z = ledger.take<float>(product(heads, values));
    if (kept.length < chunks) {
      kept.starts = ledger.take<float>(product(product((chunks - 1) / kept.length, product(sequences, p.HV)), state));
      gradients.carried = ledger.take<float>(product(product(p.N, p.HV), state));
    }
    rows = take_row_gradients(ledger, p, 1);
  }
};

void run_chunks(const Problem &p, const Workspace &w) {
  const Problem forward = states_only(p);
  launch_chunk_prep(p, w.images);
  if (w.kept.starts) {
    ChunkStates starts = w.kept;
    starts.states = nullptr, starts.range = w.whole;
    launch_chunk_scan(forward, w.images, nullptr, &starts);
  }
  const int64_t last = w.whole.end > 0 ? (w.whole.end - 1) / w.kept.length : 0;
  for (int64_t i = last; i >= 0; --i) {
    ChunkStates kept = w.kept;
    kept.range = {i * kept.length, i < last ? (i + 1) * kept.length : w.whole.end};
    launch_chunk_scan(forward, w.images, nullptr, &kept);
    launch_chunk_outputs(p, w.images.width, w.divisors, kept.range, w.gradients);
    launch_chunk_reverse(p, w.images, kept.range, w.gradients);
    launch_chunk_gradients(p, w.images, kept, w.gradients, w.rows);
  }
}

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
    if (p.has_normalizer) launch_normalizer(states_only(p), w.divisors, w.sums);
    run_chunks(p, w);
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
