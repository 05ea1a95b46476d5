// SPDX-License-Identifier: Apache-2.0
// Chunk forward on the CPU.
//
// Plan: one task a (sequence, value head, value panel); inside, chunks of 16 rows in order. A chunk packs its rows,
// takes its 16 x 16 scores, multiplies the decayed reads with the state (32 x K x W), substitutes forward through the
// rows that the erase couples, and advances the state (K x W x 16). The state stays in the task's scratch, fp32.
// Scratch a slot: state K*W, products 32*W, packed rows about 12*16*K + 4*16*W floats: 150 KB at K = V = 128.
//
// With bf16 dot units both products with the state go through them: the decayed rows, the state as it is read, and what
// is written are rounded to bf16, as the error rule allows; scores, solve, decays and the state stay fp32. Scratch
// besides: K*W/2 + 24*K + 8*W words.
#include "ops/recurrence/cpu_chunk_forward.hpp"

namespace fw::FW_LEVEL {
namespace {

struct Scratch {
  Chunk chunk;
  float *state;   // [K,W]
  float *from_x;  // [C,W] reads_x S, directly followed by
  float *from_q;  // [C,W] reads_q S, then the row of sums
  const DotUnits *units;
  // with units; pairs of bf16
  uint32_t *reads;    // [2C,K/2] of reads_x, then of reads_q
  uint32_t *held;     // [K/2,W] of the state
  uint32_t *ends;     // [C/2,K] of ends_k or ends_b
  uint32_t *written;  // [C/2,W] of u or w

  FW_NOINLINE void lay_out(Ledger &ledger, const Problem &p, int64_t width, const DotUnits *dot_units) {
    units = dot_units;
    reads = held = ends = written = nullptr;
    if (units) {
      reads = ledger.take<uint32_t>(kChunk * p.K);
      held = ledger.take<uint32_t>(p.K / 2 * width);
      ends = ledger.take<uint32_t>(kChunk / 2 * p.K);
      written = ledger.take<uint32_t>(kChunk / 2 * width);
    }
    chunk.lay_out(ledger, p, width, false);
    state = ledger.take<float>(p.K * width);
    from_x = ledger.take<float>(2 * kChunk * width);
    from_q = from_x ? from_x + kChunk * width : nullptr;
  }
};

// from_x and from_q of a chunk.
void read_state(const Problem &p, int64_t rows, bool has_output, Scratch &s) {
  const Chunk &c = s.chunk;
  const int64_t K = p.K, W = c.W;
  const bool erases = p.erase != FW_ERASE_NONE;
  if (!s.units) {
    if (erases) gemm_nn<Keep::kNothing>(rows, W, K, c.reads_x, c.Kp, 1, s.state, W, s.from_x, W);
    if (has_output) gemm_nn<Keep::kNothing>(rows, W, K, c.reads_q, c.Kp, 1, s.state, W, s.from_q, W);
    return;
  }
  const int64_t depth = K / 2;
  s.units->pack_columns(K, K, W, s.state, W, s.held);
  uint32_t *x = s.reads, *q = s.reads + kChunk * depth;
  if (erases) s.units->pack_rows(rows * K, c.reads_x, x);
  if (has_output) s.units->pack_rows(rows * K, c.reads_q, q);
  if (erases && has_output && rows == kChunk) {
    s.units->multiply(false, nullptr, 2 * kChunk, W, depth, x, depth, 1, s.held, W, s.from_x, W);
    return;
  }
  if (erases) s.units->multiply(false, nullptr, rows, W, depth, x, depth, 1, s.held, W, s.from_x, W);
  if (has_output) s.units->multiply(false, nullptr, rows, W, depth, q, depth, 1, s.held, W, s.from_q, W);
}

// state = (scaled by total first, if given) + ends^T written, through dot units.
void write_state(int64_t K, int64_t rows, int64_t W, const float *ends, const float *written, const float *total,
                 Scratch &s) {
  s.units->pack_columns(rows, kChunk, K, ends, K, s.ends);
  s.units->pack_columns(rows, kChunk, W, written, W, s.written);
  s.units->multiply(true, total, K, W, kChunk / 2, s.ends, 1, K, s.written, W, s.state, W);
}

void write_state(const Problem &p, int64_t rows, Scratch &s) {
  const Chunk &c = s.chunk;
  if (!s.units) return advance_state(p, rows, c, {0, c.W}, s.state);
  write_state(p.K, rows, c.W, c.ends_k, c.u, p.gate == FW_GATE_NONE ? nullptr : c.total, s);
  if (p.erase == FW_ERASE_INDEPENDENT) write_state(p.K, rows, c.W, c.ends_b, c.w, nullptr, s);
}

void forward_head(const Problem &p, int64_t n, int64_t hv, const Panel &panel, Scratch &s) {
  const Segment segment = fw::segment(p.cu_seqlens, p.T, n);
  const int64_t begin = segment.begin * p.n_sub, end = segment.end * p.n_sub;
  Chunk &c = s.chunk;
  const int64_t W = c.W = panel.width();
  s.from_q = s.from_x + kChunk * W;  // of this panel's width, so that both are one matrix
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
    read_state(p, rows, has_output, s);
    solve_rows(p, rows, s.from_x, {0, W}, c);
    for (int64_t i = 0; has_output && i < rows; ++i) {
      if ((row + i) % p.n_sub != p.n_sub - 1) continue;
      float *sum = s.from_q + i * W;
      add_rows(i + 1, c.qk + i * kChunk, 1, c.u, W, W, sum);
      if (p.erase == FW_ERASE_INDEPENDENT) add_rows(i + 1, c.qb + i * kChunk, 1, c.w, W, W, sum);
      store_output(p, segment.batch, (row + i) / p.n_sub, hv, panel, sum);
    }
    write_state(p, rows, s);
  }
  store_state(p, p.final_state, n, hv, panel, s.state);
  store_sum(p, p.final_z, n, hv, panel, s.state);
}

uint64_t workspace_bytes(const fw_context &context, const Problem &p, const DotUnits *units) {
  Ledger ledger(nullptr);
  Scratch scratch;
  for (int32_t slot = 0; slot < context.n_threads; ++slot) {
    scratch.lay_out(ledger, p, PanelCut(context, p).widest(), units);
  }
  return ledger.bytes();
}

void run_forward(fw_context &context, const Problem &p, void *memory, const DotUnits *units) {
  const PanelCut cut(context, p);
  parallel_items(context, p.N * p.HV * cut.count, [&](int64_t slot, int64_t item) {
    const Panel panel = cut.at(item % cut.count);
    const int64_t head = item / cut.count;
    if (panel.count == 0) return;
    Ledger ledger(memory);
    Scratch scratch;
    for (int64_t i = 0; i <= slot; ++i) scratch.lay_out(ledger, p, cut.widest(), units);
    forward_head(p, head / p.HV, head % p.HV, panel, scratch);
  });
  clear_tail(p, p.o, 1, p.HV, p.V);
}

}  // namespace

uint64_t chunk_forward_workspace(const fw_context &context, const Problem &p) {
  return workspace_bytes(context, p, nullptr);
}
void chunk_forward(fw_context &context, const Problem &p, void *memory) { run_forward(context, p, memory, nullptr); }

uint64_t chunk_dots_workspace(const fw_context &context, const Problem &p, const DotUnits &units) {
  return workspace_bytes(context, p, &units);
}
void chunk_dots(fw_context &context, const Problem &p, void *memory, const DotUnits &units) {
  run_forward(context, p, memory, &units);
}

}  // namespace fw::FW_LEVEL
