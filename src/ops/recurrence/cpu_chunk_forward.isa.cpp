// SPDX-License-Identifier: Apache-2.0
// Chunk forward on the CPU.
//
// Plan: one task a (sequence, value head, value panel); inside, chunks of 16 rows in order. A chunk packs its rows,
// takes its 16 x 16 scores, multiplies the decayed reads with the state (32 x K x W), substitutes forward through the
// rows that the erase couples, and advances the state (K x W x 16). The state stays in the task's scratch, fp32.
// Scratch a slot: state K*W, products 32*W, packed rows about 12*16*K + 4*16*W floats: 150 KB at K = V = 128.
#include "ops/recurrence/cpu_chunk_forward.hpp"

namespace fw::FW_LEVEL {
namespace {

struct Scratch {
  Chunk chunk;
  float *state;   // [K,W]
  float *from_x;  // [C,W] reads_x S, directly followed by
  float *from_q;  // [C,W] reads_q S, then the row of sums

  FW_NOINLINE void lay_out(Ledger &ledger, const Problem &p, int64_t width) {
    chunk.lay_out(ledger, p, width, false);
    state = ledger.take<float>(p.K * width);
    from_x = ledger.take<float>(2 * kChunk * width);
    from_q = from_x ? from_x + kChunk * width : nullptr;
  }
};

void forward_head(const Problem &p, int64_t n, int64_t hv, const Panel &panel, Scratch &s) {
  const Segment segment = fw::segment(p.cu_seqlens, p.T, n);
  const int64_t begin = segment.begin * p.n_sub, end = segment.end * p.n_sub;
  Chunk &c = s.chunk;
  const int64_t W = c.W = panel.width();
  load_gate_parameters(p, hv, c);
  load_state(p, p.initial_state, n, hv, panel, s.state);
  load_sum(p, p.initial_z, n, hv, panel, s.state);
  void *saved = p.saved;
  const bool has_output = given(p.o);  // the backward asks for the saved states alone
  for (int64_t row = begin; row < end; row += kChunk) {
    if (saved && (row - begin) % recurrence::kSegmentRows == 0) {
      const int64_t slot = recurrence::saved_slot(p, n) + (row - begin) / recurrence::kSegmentRows;
      copy_to_saved(p, slot, hv, panel, s.state, saved);
    }
    const int64_t rows = end - row < kChunk ? end - row : kChunk;
    const Rows where = {segment.batch, row, rows, hv};
    pack_chunk(p, where, panel, c);
    score_chunk(p, rows, c);
    if (p.erase != FW_ERASE_NONE) {
      gemm_nn<Keep::kNothing>(rows, W, p.K, c.reads_x, c.Kp, 1, s.state, W, s.from_x, W);
    }
    if (has_output) gemm_nn<Keep::kNothing>(rows, W, p.K, c.reads_q, c.Kp, 1, s.state, W, s.from_q, W);
    solve_rows(p, rows, s.from_x, {0, W}, c);
    for (int64_t i = 0; has_output && i < rows; ++i) {
      if ((row + i) % p.n_sub != p.n_sub - 1) continue;
      float *sum = s.from_q + i * W;
      add_rows(i + 1, c.qk + i * kChunk, 1, c.u, W, W, sum);
      if (p.erase == FW_ERASE_INDEPENDENT) add_rows(i + 1, c.qb + i * kChunk, 1, c.w, W, W, sum);
      store_output(p, segment.batch, (row + i) / p.n_sub, hv, panel, sum);
    }
    advance_state(p, rows, c, {0, W}, s.state);
  }
  store_state(p, p.final_state, n, hv, panel, s.state);
  store_sum(p, p.final_z, n, hv, panel, s.state);
}

}  // namespace

uint64_t chunk_forward_workspace(const fw_context &context, const Problem &p) {
  Ledger ledger(nullptr);
  Scratch scratch;
  for (int32_t slot = 0; slot < context.n_threads; ++slot) scratch.lay_out(ledger, p, PanelCut(context, p).widest());
  return ledger.bytes();
}

void chunk_forward(fw_context &context, const Problem &p, void *memory) {
  const PanelCut cut(context, p);
  parallel_items(context, p.N * p.HV * cut.count, [&](int64_t slot, int64_t item) {
    const Panel panel = cut.at(item % cut.count);
    const int64_t head = item / cut.count;
    if (panel.count == 0) return;
    Ledger ledger(memory);
    Scratch scratch;
    for (int64_t i = 0; i <= slot; ++i) scratch.lay_out(ledger, p, cut.widest());
    forward_head(p, head / p.HV, head % p.HV, panel, scratch);
  });
  clear_tail(p, p.o, 1, p.HV, p.V);
}

}  // namespace fw::FW_LEVEL
