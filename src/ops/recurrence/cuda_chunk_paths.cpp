// SPDX-License-Identifier: Apache-2.0
// The chunk form on the portable tensor cores: what it accepts, its images and workspace, the order of its kernels.
#include "core/ledger.hpp"
#include "core/operands.hpp"
#include "cuda/device.hpp"
#include "ops/recurrence/cpu_dots.hpp"
#include "ops/recurrence/cuda_chunk.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_paths.hpp"

namespace fw::recurrence {

// States of linear_attn hold to fp32, so what the norm made of k counts in full; k as it is stored has no more than 11 bits.
static bool is_exact(const Problem &p) { return p.gate == FW_GATE_NONE && p.erase == FW_ERASE_NONE && p.has_l2norm; }

int32_t chunk_parts(const Problem &p) { return p.q.dtype == FW_F16 || is_exact(p) ? 2 : 1; }

ChunkImages plan_chunk_images(const Problem &p, float *data, bool is_backward) {
  const bool is_independent = p.erase == FW_ERASE_INDEPENDENT;
  ChunkImages images = {};
  images.data = data;
  images.rounds_scores = chunk_parts(p) == 1;
  images.rounds_keys = images.rounds_scores || (!is_backward && !is_exact(p));  // tf32 has as many bits as fp16
  images.keys = p.K <= 64 ? 64 : 128, images.width = p.V <= 64 ? 64 : 128;
  const auto take = [&](bool is_there, int32_t floats) {
    const int32_t at = images.record;
    if (is_there) images.record += floats;
    return is_there ? at : -1;
  };
  const int32_t keys = kChunkRows * images.keys;
  images.reads_q = take(true, keys), images.ends_k = take(true, keys);
  const int32_t erase = take(p.erase != FW_ERASE_NONE, keys);
  images.ends_b = take(is_independent, keys);
  images.total = take(true, images.keys);
  images.qk = take(true, kChunkScores);
  const int32_t solve = take(p.erase != FW_ERASE_NONE, kChunkScores);
  images.qb = take(is_independent, kChunkScores);
  images.values = take(true, kChunkRows * images.width);
  const bool has_more = is_independent && is_backward;
  images.solved_x = is_independent ? erase : -1, images.m = is_independent ? solve : -1;
  images.reads_x = is_independent ? take(has_more, keys) : erase;
  images.t = is_independent ? take(has_more, kChunkScores) : solve;
  images.xk = take(has_more, kChunkScores);
  return images;
}

bool cuda_chunk_accepts(const fw_context &context, const Problem &p, Reason &reason) {
  if (!cuda_accepts(context, p, reason)) return false;
  if (p.form != FW_FORM_CHUNK) return reason.refuse("form is %s", form_name(p.form));
  if (p.saved && p.direction != FW_BACKWARD) return reason.refuse("saved is given");
  if (p.q.dtype == FW_F32) return reason.refuse("operands are fp32, this computes bf16 and fp16");
  if (p.K > kChunkWidest || p.V > kChunkWidest) {
    return reason.refuse("K is %lld and V %lld, this computes up to 128", static_cast<long long>(p.K), static_cast<long long>(p.V));
  }
  int64_t blocks = 0;
  if (!mul_fits(chunk_slots(p), p.HV, &blocks) || blocks > INT32_MAX) return reason.refuse("more than 2^31 chunks of 16 rows times value heads");
  return true;
}

#if defined(FW_HAVE_CUDA)

namespace {

struct Workspace {
  ChunkImages images;
  float *divisors;  // [B,T,H]

  Workspace(Ledger &ledger, const Problem &p) : images(plan_chunk_images(p, nullptr, false)), divisors(nullptr) {
    images.data = ledger.take<float>(product(product(chunk_slots(p), p.HV), images.record));
    if (p.has_normalizer) divisors = ledger.take<float>(product(product(p.B, p.T), p.H));
  }
};

}  // namespace

uint64_t cuda_chunk_workspace(const fw_context &, const Problem &p) {
  Ledger ledger(nullptr);
  const Workspace counted(ledger, p);
  (void)counted;
  return ledger.bytes();
}

fw_status cuda_chunk_run(fw_context &, const Problem &p, void *memory) {
  FW_TRY(cuda_check_places(p, memory));
  Ledger ledger(memory);
  const Workspace w(ledger, p);
  if (p.N > 0) {
    if (p.has_normalizer) launch_normalizer(p, w.divisors, nullptr);
    launch_chunk_prep(p, w.images);
    launch_chunk_scan(p, w.images, w.divisors, nullptr);
  }
  launch_clear(p, p.o, 1, p.V);
  return cuda::check_launches(p.op_name, "cuda_chunk");
}

#else

uint64_t cuda_chunk_workspace(const fw_context &, const Problem &) { return UINT64_MAX; }
fw_status cuda_chunk_run(fw_context &, const Problem &p, void *) { return cuda::check_launches(p.op_name, "cuda_chunk"); }

#endif

}  // namespace fw::recurrence
