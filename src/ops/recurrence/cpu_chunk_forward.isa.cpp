// SPDX-License-Identifier: Apache-2.0
// Chunk forward on the CPU.
//
// Plan: one task a (sequence, value head, value panel); inside, chunks of 16 rows in order. A chunk packs its rows,
// takes its 16 x 16 scores, multiplies the decayed reads with the state (32 x K x W), substitutes forward through the
// rows that the erase couples, and advances the state (K x W x 16). The state stays in the task's scratch, fp32.
// Scratch a slot: state K*W, products 32*W, packed rows about 12*16*K + 4*16*W floats: 150 KB at K = V = 128.
//
// Where a head is cut into panels, what they share (packed keys, scores: half of the time of a panel of 64 columns) is
// made once: while the panels go through a window of 8 chunks, the next window's chunks are prepared, spread over the
// threads. Scratch besides, a head: 16 (64*K + 1040) floats for two windows, and K*V for the states.
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

// Brings what the next chunk packs towards the core, one row of each operand a call: rows of a head lie H rows apart, where
// the hardware follows none of them. Forward of T = 2048, H = 32, K = V = 128 takes 1.1 times as long without (Zen 3, one
// thread).
struct NextRows {
  struct Operand {
    const char *row;
    int64_t stride, bytes;  // between rows; of a row
  };
  Operand operands[4];
  int64_t n, rows;

  NextRows(const Problem &p, const Rows &next, const Panel &panel, bool with_keys) {
    n = 0, rows = next.rows;
    if (rows == 0) return;
    const int64_t h = next.hv / p.group(), token = next.first_row / p.n_sub;
    add(p.v, next.batch, next.first_row, next.hv, panel.first, panel.count);
    if (!with_keys) return;
    add(p.k, next.batch, next.first_row, h, 0, p.K);
    if (p.n_sub > 1) return;  // what has a row a token alone
    add(p.q, next.batch, token, h, 0, p.K);
    if (p.gate == FW_GATE_VECTOR) add(p.g, next.batch, token, next.hv, 0, p.K);
  }
  void add(const fw_tensor &t, int64_t batch, int64_t row, int64_t head, int64_t first, int64_t count) {
    if (t.strides[3] != 1) return;
    const int64_t size = dtype_size(t.dtype);
    const char *at = static_cast<const char *>(t.data) + (head_offset(t, batch, row, head) + first) * size;
    operands[n++] = {at, t.strides[1] * size, count * size};
  }
  // inlined, or gcc 12 takes it for a function without effect and drops the call
  inline __attribute__((always_inline)) void bring(int64_t i) const {
    for (int64_t o = 0; o < n && i < rows; ++o) {
      const char *row = operands[o].row + i * operands[o].stride;
      const char *last = row + operands[o].bytes - 1;
      for (; row < last; row += 64) __builtin_prefetch(row, 0, 2);
      __builtin_prefetch(last, 0, 2);
    }
  }
};

constexpr int64_t kWindow = 8;  // chunks that panels of a head share at a time

// The rows of a sequence, chunk by chunk.
struct Sequence {
  int64_t n, batch, begin, end;

  Sequence(const Problem &p, int64_t index) {
    const Segment segment = fw::segment(p.cu_seqlens, p.T, index);
    n = index, batch = segment.batch, begin = segment.begin * p.n_sub, end = segment.end * p.n_sub;
  }
  // No rows from the sequence's end on.
  Rows at(int64_t row, int64_t hv) const {
    const int64_t rest = end - row;
    return {batch, row, rest < 0 ? 0 : rest < kChunk ? rest : kChunk, hv};
  }
  // The first chunk of its last window; 0 without rows.
  int64_t last_window() const { return end > begin ? (end - begin - 1) / kChunk / kWindow * kWindow : 0; }
};

void start_state(const Problem &p, int64_t n, int64_t hv, const Panel &panel, float *state) {
  load_state(p, p.initial_state, n, hv, panel, state);
  load_sum(p, p.initial_z, n, hv, panel, state);
}

void end_state(const Problem &p, int64_t n, int64_t hv, const Panel &panel, const float *state) {
  store_state(p, p.final_state, n, hv, panel, state);
  store_sum(p, p.final_z, n, hv, panel, state);
}

void save_state(const Problem &p, const Sequence &sequence, const Rows &where, const Panel &panel, const float *state) {
  const int64_t row = where.first_row - sequence.begin;
  if (!p.saved || row % recurrence::kSegmentRows != 0) return;
  copy_to_saved(p, recurrence::saved_slot(p, sequence.n) + row / recurrence::kSegmentRows, where.hv, panel, state, p.saved);
}

// A packed and scored chunk through a panel's state.
void run_chunk(const Problem &p, const Rows &where, const NextRows &next, const Panel &panel, Scratch &s) {
  Chunk &c = s.chunk;
  const int64_t W = c.W, rows = where.rows;
  const bool has_output = given(p.o);  // the backward asks for the saved states alone
  read_state(p, rows, has_output, s);
  solve_rows(p, rows, s.from_x, {0, W}, c);
  for (int64_t i = 0; i < rows; ++i) {
    next.bring(i);
    const int64_t row = where.first_row + i;
    if (!has_output || row % p.n_sub != p.n_sub - 1) continue;
    float *sum = s.from_q + i * W;
    add_rows(i + 1, c.qk + i * kChunk, 1, c.u, W, W, sum);
    if (p.erase == FW_ERASE_INDEPENDENT) add_rows(i + 1, c.qb + i * kChunk, 1, c.w, W, W, sum);
    store_output(p, where.batch, row / p.n_sub, where.hv, panel, sum);
  }
  write_state(p, rows, s);
}

void set_width(const Panel &panel, Scratch &s) {
  s.chunk.W = panel.width();
  s.from_q = s.from_x + kChunk * s.chunk.W;  // of this panel's width, so that both are one matrix
}

void forward_head(const Problem &p, int64_t n, int64_t hv, const Panel &panel, Scratch &s) {
  const Sequence sequence(p, n);
  set_width(panel, s);
  load_gate_parameters(p, hv, s.chunk);
  start_state(p, n, hv, panel, s.state);
  for (int64_t row = sequence.begin; row < sequence.end; row += kChunk) {
    const Rows where = sequence.at(row, hv);
    save_state(p, sequence, where, panel, s.state);
    pack_chunk(p, where, panel, s.chunk);
    score_chunk(p, where.rows, s.chunk);
    run_chunk(p, where, NextRows(p, sequence.at(row + kChunk, hv), panel, true), panel, s);
  }
  end_state(p, n, hv, panel, s.state);
}

// Heads that are cut into panels and long enough that sharing pays. What the panels share of a chunk lies at `chunks`:
// reads_x, reads_q, ends_k, ends_b, qk, qb, xk, xb, beta, total.
struct Shared {
  PanelCut cut;
  int64_t n_heads, state_size, chunk_size;
  bool is_used;
  float *states;  // [N,HV,panels,K,W]
  float *chunks;  // [N,HV,2 kWindow,chunk_size]: a window in use and the one that comes

  Shared(const fw_context &context, const Problem &p, Ledger &ledger) : cut(context, p) {
    n_heads = p.N * p.HV, state_size = p.K * cut.widest();
    chunk_size = 4 * kChunk * pad_lanes(p.K) + 4 * kChunk * kChunk + kChunk + recurrence::pad_to(p.K, 16);
    is_used = cut.count > 1 && p.R > 2 * kChunk;
    states = ledger.take<float>(is_used ? n_heads * cut.count * state_size : 0);
    chunks = ledger.take<float>(is_used ? n_heads * 2 * kWindow * chunk_size : 0);
  }
  float *state(int64_t head, int64_t panel) const { return states + (head * cut.count + panel) * state_size; }
  // c's rows, scores and beta are those of the sequence's chunk from here on.
  void lend(int64_t head, int64_t index, Chunk &c) const {
    const int64_t rows = kChunk * c.Kp, scores = kChunk * kChunk;
    float *at = chunks + (head * 2 * kWindow + index % (2 * kWindow)) * chunk_size;
    c.reads_x = at, c.reads_q = at + rows, c.ends_k = at + 2 * rows, c.ends_b = at + 3 * rows;
    at += 4 * rows;
    c.qk = at, c.qb = at + scores, c.xk = at + 2 * scores, c.xb = at + 3 * scores;
    c.beta = at + 4 * scores, c.total = c.beta + kChunk;
  }
};

Scratch scratch_of(Ledger ledger, const Problem &p, int64_t slot, int64_t width, const DotUnits *units) {
  Scratch scratch;
  for (int64_t i = 0; i <= slot; ++i) scratch.lay_out(ledger, p, width, units);
  return scratch;
}

// Packs and scores a chunk for all panels of its head.
void prepare_chunk(const Problem &p, const Shared &shared, int64_t head, int64_t index, Scratch &s) {
  const Sequence sequence(p, head / p.HV);
  const Rows where = sequence.at(sequence.begin + index * kChunk, head % p.HV);
  if (where.rows == 0) return;
  shared.lend(head, index, s.chunk);
  load_gate_parameters(p, where.hv, s.chunk);
  pack_keys(p, where, s.chunk);
  score_chunk(p, where.rows, s.chunk);
}

// A panel through the chunks of a window.
void run_panel(const Problem &p, const Shared &shared, int64_t head, int64_t index_of_panel, int64_t first, Scratch &s) {
  const int64_t n = head / p.HV, hv = head % p.HV;
  const Panel panel = shared.cut.at(index_of_panel);
  const Sequence sequence(p, n);
  if (panel.count == 0) return;
  s.state = shared.state(head, index_of_panel);
  set_width(panel, s);
  if (first == 0) start_state(p, n, hv, panel, s.state);
  for (int64_t index = first; index < first + kWindow; ++index) {
    const int64_t row = sequence.begin + index * kChunk;
    const Rows where = sequence.at(row, hv);
    if (where.rows == 0) break;
    shared.lend(head, index, s.chunk);
    save_state(p, sequence, where, panel, s.state);
    pack_values(p, where, panel, s.chunk);
    run_chunk(p, where, NextRows(p, sequence.at(row + kChunk, hv), panel, false), panel, s);
  }
  if (first == sequence.last_window()) end_state(p, n, hv, panel, s.state);
}

// Each round takes the panels through one window and prepares the next one.
void run_shared(fw_context &context, const Problem &p, const Shared &shared, const Ledger &of_slots, const DotUnits *units) {
  const int64_t n_panels = shared.n_heads * shared.cut.count, n_chunks = shared.n_heads * kWindow;
  int64_t last = 0;  // of the longest sequence
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t own = Sequence(p, n).last_window();
    if (own > last) last = own;
  }
  for (int64_t next = 0; next <= last + kWindow; next += kWindow) {
    const int64_t first = next - kWindow, n_now = first < 0 ? 0 : n_panels, n_ahead = next > last ? 0 : n_chunks;
    parallel_items(context, n_now + n_ahead, [&](int64_t slot, int64_t item) {
      Scratch s = scratch_of(of_slots, p, slot, shared.cut.widest(), units);
      if (item < n_now) {
        run_panel(p, shared, item / shared.cut.count, item % shared.cut.count, first, s);
      } else {
        const int64_t chunk = item - n_now;
        prepare_chunk(p, shared, chunk / kWindow, next + chunk % kWindow, s);
      }
    });
  }
}

uint64_t workspace_bytes(const fw_context &context, const Problem &p, const DotUnits *units) {
  Ledger ledger(nullptr);
  Scratch scratch;
  const Shared shared(context, p, ledger);
  for (int32_t slot = 0; slot < context.n_threads; ++slot) scratch.lay_out(ledger, p, shared.cut.widest(), units);
  return ledger.bytes();
}

void run_forward(fw_context &context, const Problem &p, void *memory, const DotUnits *units) {
  Ledger of_slots(memory);
  const Shared shared(context, p, of_slots);
  if (shared.is_used) {
    run_shared(context, p, shared, of_slots, units);
  } else {
    parallel_items(context, shared.n_heads * shared.cut.count, [&](int64_t slot, int64_t item) {
      const Panel panel = shared.cut.at(item % shared.cut.count);
      const int64_t head = item / shared.cut.count;
      if (panel.count == 0) return;
      Scratch s = scratch_of(of_slots, p, slot, shared.cut.widest(), units);
      forward_head(p, head / p.HV, head % p.HV, panel, s);
    });
  }
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
