// SPDX-License-Identifier: Apache-2.0
// Chunk backward on the CPU.
//
// Plan: the segments of 64 rows of a head are visited from the last to the first. Of each, the four chunks are packed
// and scored and the states at their starts rebuilt from the one that the forward saved; then the gradients of what
// the rows write and of the state run backward through the chunks; last, products over all columns give the gradients
// of scores, reads and ends of each chunk, and these the gradients that leave. With at least as many (sequence,
// query/key head) as threads a task is a head. With fewer a task is a segment of a head: only the middle part needs
// the segment after it, and hands the state's gradient on value panel by value panel, so the tasks run at the same
// time but for a panel. Every number comes from the same operations in the same order either way. Scratch a slot: (4
// + group) states K*W, four packed chunks, 9*16*K: 1.1 MB at K = V = 128; with segments as tasks 8 states, and the
// group's are outside the slot.
#include "ops/recurrence/cpu_chunk_backward.hpp"
#include "cpu/progress.hpp"

namespace fw::FW_LEVEL {

void chunk_forward(fw_context &context, const Problem &p, void *memory);
uint64_t chunk_forward_workspace(const fw_context &context, const Problem &p);

namespace {

using recurrence::kSegmentRows;

// What outlives a head: saved states when the caller brought none, and the heads' gate parameter gradients.
struct Shared {
  float *saved;
  float *gate_parts;  // [N,HV,1 + K]: d_a_log, d_dt_bias of one sequence
  FW_NOINLINE void lay_out(Ledger &ledger, const Problem &p) {
    saved = nullptr;
    if (!p.saved) saved = ledger.take<float>(static_cast<int64_t>(recurrence::saved_bytes(p) / 4));
    gate_parts = nullptr;
    if (given(p.a_log) || given(p.dt_bias)) gate_parts = ledger.take<float>(p.N * p.HV * (1 + p.K));
  }
};

// One segment of a (sequence, query/key head).
struct Span {
  int64_t n, h, batch, first_row, rows, slot;
  int64_t chunks() const { return (rows + kChunk - 1) / kChunk; }
  Rows chunk(int64_t index, int64_t hv) const {
    const int64_t at = index * kChunk;
    return {batch, first_row + at, rows - at < kChunk ? rows - at : kChunk, hv};
  }
};

int64_t segments_of(const Problem &p, int64_t n) {
  const Segment segment = fw::segment(p.cu_seqlens, p.T, n);
  return ((segment.end - segment.begin) * p.n_sub + kSegmentRows - 1) / kSegmentRows;
}

// The segment that has `later` others after it; without rows when the sequence is shorter.
Span span_at(const Problem &p, int64_t n, int64_t h, int64_t later) {
  const Segment segment = fw::segment(p.cu_seqlens, p.T, n);
  const int64_t begin = segment.begin * p.n_sub, end = segment.end * p.n_sub, i = segments_of(p, n) - 1 - later;
  if (i < 0) return {n, h, segment.batch, begin, 0, 0};
  const int64_t first_row = begin + i * kSegmentRows, rest = end - first_row;
  return {
      n, h, segment.batch, first_row, rest < kSegmentRows ? rest : kSegmentRows, recurrence::saved_slot(p, n) + i};
}

void prepare(const Problem &p, const Rows &where, Part &part) {
  load_gate_parameters(p, where.hv, part.chunk);
  pack_chunk(p, where, {0, p.V, p.has_normalizer}, part.chunk);
  score_chunk(p, where.rows, part.chunk);
  if (!p.has_normalizer) load_d_o(p, where, part);
}

void copy_columns(const Problem &p, const Columns &columns, int64_t W, const float *from, float *to) {
  for (int64_t k = 0; k < p.K; ++k) {
    const int64_t at = k * W + columns.first;
    memcpy(to + at, from + at, static_cast<size_t>(columns.width) * 4);
  }
}

// The states at the starts of the chunks, what the rows write and, with the normaliser, the undivided outputs.
void rebuild(const Problem &p, const Span &span, int64_t hv, const Columns &columns, const void *saved,
             HeadScratch &head) {
  const int64_t first = columns.first, width = columns.width, K = p.K, W = head.parts[0].chunk.W;
  copy_from_saved(p, span.slot, hv, W, columns, saved, head.parts[0].state);
  for (int64_t index = 0; index < span.chunks(); ++index) {
    Part &part = head.parts[index];
    Chunk &c = part.chunk;
    const int64_t rows = span.chunk(index, hv).rows;
    const float *state = part.state + first;
    if (p.erase != FW_ERASE_NONE) {
      gemm_nn<Keep::kNothing>(rows, width, K, c.reads_x, c.Kp, 1, state, W, part.d_u + first, W);
    }
    solve_rows(p, rows, part.d_u, columns, c);
    if (p.has_normalizer) {
      gemm_nn<Keep::kNothing>(rows, width, K, c.reads_q, c.Kp, 1, state, W, part.sums + first, W);
      for (int64_t i = 0; i < rows; ++i) {
        add_rows(i + 1, c.qk + i * kChunk, 1, c.u + first, W, width, part.sums + i * W + first);
      }
    }
    if (index + 1 == span.chunks()) break;
    float *next = head.parts[index + 1].state;
    copy_columns(p, columns, W, part.state, next);
    advance_state(p, rows, c, columns, next);
  }
}

// All of a segment that does not depend on the gradient of the state at its end.
void prepare_segment(const Problem &p, const Span &span, int64_t hv, const Columns &columns, const void *saved,
                     HeadScratch &head) {
  for (int64_t index = 0; index < span.chunks(); ++index) prepare(p, span.chunk(index, hv), head.parts[index]);
  rebuild(p, span, hv, columns, saved, head);
  if (!p.has_normalizer) return;
  for (int64_t index = 0; index < span.chunks(); ++index) load_d_o(p, span.chunk(index, hv), head.parts[index]);
}

// Gradients of u and w, from d_o and the state's gradient at the chunk's end.
void reverse_columns(const Problem &p, int64_t rows, const Columns &columns, const float *d_state, Part &part) {
  const bool erases = p.erase != FW_ERASE_NONE, is_independent = p.erase == FW_ERASE_INDEPENDENT;
  const Chunk &c = part.chunk;
  const int64_t K = p.K, Kp = c.Kp, W = c.W, first = columns.first, width = columns.width;
  gemm_nn<Keep::kNothing>(rows, width, K, c.ends_k, Kp, 1, d_state + first, W, part.d_u + first, W);
  if (is_independent) {
    gemm_nn<Keep::kNothing>(rows, width, K, c.ends_b, Kp, 1, d_state + first, W, part.d_z + first, W);
  }
  for (int64_t i = rows - 1; i >= 0; --i) {
    const int64_t diagonal = i * kChunk + i, below = diagonal + kChunk, later = rows - 1 - i, at = i * W + first;
    const float *d_o = part.d_o + at;
    float *d_u = part.d_u + at, *d_z = part.d_z + at;
    if (is_independent) {
      add_rows(later + 1, c.qb + diagonal, kChunk, d_o, W, width, d_z);
      add_rows(later, c.xb + below, kChunk, d_z + W, W, width, d_z);
    }
    add_rows(later + 1, c.qk + diagonal, kChunk, d_o, W, width, d_u);
    if (erases) add_rows(later, c.xk + below, kChunk, d_z + W, W, width, d_u);
    if (erases && !is_independent) scale_row(d_u, -1.0f, width, d_z);
  }
}

// The state's gradient from the chunk's end to its start.
void retreat_state(const Problem &p, int64_t rows, const Columns &columns, const Part &part, float *d_state) {
  const Chunk &c = part.chunk;
  const int64_t W = c.W, first = columns.first, width = columns.width;
  const float *d_o = part.d_o + first, *d_z = part.d_z + first;
  d_state += first;
  if (p.gate == FW_GATE_NONE) {
    gemm_nn<Keep::kAll>(p.K, width, rows, c.reads_q, 1, c.Kp, d_o, W, d_state, W);
  } else {
    gemm_nn<Keep::kScaled>(p.K, width, rows, c.reads_q, 1, c.Kp, d_o, W, d_state, W, c.total);
  }
  if (p.erase != FW_ERASE_NONE) gemm_nn<Keep::kAll>(p.K, width, rows, c.reads_x, 1, c.Kp, d_z, W, d_state, W);
}

// Products over all columns: gradients of scores, reads, ends and of the decay of the whole chunk.
void reverse_rows(const Problem &p, int64_t rows, const Part &part, const float *d_state, ReverseChunk &r) {
  const bool erases = p.erase != FW_ERASE_NONE, is_independent = p.erase == FW_ERASE_INDEPENDENT;
  const Chunk &c = part.chunk;
  const int64_t K = p.K, Kp = c.Kp, W = c.W;
  const float *state = part.state;
  gemm_nt(rows, rows, W, part.d_o, W, c.u, W, r.d_qk, kChunk, false);
  gemm_nt(rows, K, W, part.d_o, W, state, W, r.d_reads_q, Kp, false);
  gemm_nt(rows, K, W, c.u, W, d_state, W, r.d_k, Kp, false);
  if (erases) {
    gemm_nt(rows, rows, W, part.d_z, W, c.u, W, r.d_xk, kChunk, false);
    gemm_nt(rows, K, W, part.d_z, W, state, W, r.d_reads_x, Kp, false);
  }
  if (is_independent) {
    gemm_nt(rows, rows, W, part.d_o, W, c.w, W, r.d_qb, kChunk, false);
    gemm_nt(rows, rows, W, part.d_z, W, c.w, W, r.d_xb, kChunk, false);
    gemm_nt(rows, K, W, c.w, W, d_state, W, r.d_b, Kp, false);
  }
  for (int64_t i = 0; i < rows; ++i) {  // gemm_nt leaves the padding of K alone
    for (int64_t d = K; d < Kp; ++d)
      r.d_reads_q[i * Kp + d] = r.d_reads_x[i * Kp + d] = r.d_k[i * Kp + d] = r.d_b[i * Kp + d] = 0;
  }
  if (p.gate != FW_GATE_NONE) {
    for (int64_t d = 0; d < Kp; ++d) r.d_total[d] = d < K ? dot(W, state + d * W, d_state + d * W) : 0.0f;
  }
}

// From the gradients of what a chunk wrote and read to those that leave.
void finish(const Problem &p, const Span &span, int64_t index, int64_t hv, const float *d_state, SlotScratch &slot,
            HeadScratch &head) {
  Part &part = head.parts[index];
  const Rows where = span.chunk(index, hv);
  reverse_rows(p, where.rows, part, d_state, slot.reverse);
  reverse_scores(p, where.rows, part.chunk, slot.reverse);
  store_value_head(p, where, index * kChunk, part, slot, head);
  if ((hv + 1) % p.group() == 0) store_key_head(p, where, index * kChunk, slot, head);
}

// The gate parameters' gradients of the chunks, from the last to the first.
void add_gate_sums(const Problem &p, const Span &span, int64_t hv, const HeadScratch &head, float *gate_parts) {
  if (!gate_parts) return;
  float *to = gate_parts + (span.n * p.HV + hv) * (1 + p.K);
  const int64_t width = p.gate == FW_GATE_VECTOR ? p.K : 1;
  for (int64_t index = span.chunks() - 1; index >= 0; --index) {
    const Part &part = head.parts[index];
    for (int64_t d = 0; d < width; ++d) {
      to[0] += part.gate_sums[d];
      to[1 + d] += part.gate_sums[part.chunk.Kp + d];
    }
  }
}

Panel all_columns(const Problem &p) { return {0, p.V, p.has_normalizer}; }

void load_end(const Problem &p, int64_t n, int64_t h, HeadScratch &head) {
  const Panel panel = all_columns(p);
  for (int64_t r = 0; r < p.group(); ++r) {
    float *d_state = head.d_state + r * p.K * panel.width();
    load_state(p, p.d_final_state, n, h * p.group() + r, panel, d_state);
    if (r == 0) load_sum(p, p.d_final_z, n, h * p.group(), panel, d_state);
  }
}

void store_start(const Problem &p, int64_t n, int64_t h, HeadScratch &head) {
  const Panel panel = all_columns(p);
  const int64_t G = p.group(), W = panel.width(), size = p.K * W;
  for (int64_t r = 0; r < G; ++r) store_state(p, p.d_initial_state, n, h * G + r, panel, head.d_state + r * size);
  if (!panel.has_sum || !given(p.d_initial_z)) return;
  for (int64_t r = 1; r < G; ++r) {
    for (int64_t k = 0; k < p.K; ++k) head.d_state[k * W + p.V] += head.d_state[r * size + k * W + p.V];
  }
  store_sum(p, p.d_initial_z, n, h * G, panel, head.d_state);
}

// One task: a head from its last segment to its first.
void run_head(const Problem &p, int64_t n, int64_t h, const Shared &shared, const void *saved, SlotScratch &slot,
              HeadScratch &head) {
  const int64_t G = p.group(), W = head.parts[0].chunk.W, n_segments = segments_of(p, n);
  const Columns all = {0, W};
  load_end(p, n, h, head);
  for (int64_t later = 0; later < n_segments; ++later) {
    const Span span = span_at(p, n, h, later);
    for (int64_t r = 0; r < G; ++r) {
      const int64_t hv = h * G + r;
      float *d_state = head.d_state + r * p.K * W;
      prepare_segment(p, span, hv, all, saved, head);
      for (int64_t index = span.chunks() - 1; index >= 0; --index) {
        Part &part = head.parts[index];
        const Rows where = span.chunk(index, hv);
        reverse_columns(p, where.rows, all, d_state, part);
        finish(p, span, index, hv, d_state, slot, head);
        retreat_state(p, where.rows, all, part, d_state);
      }
      add_gate_sums(p, span, hv, head, shared.gate_parts);
    }
  }
  store_start(p, n, h, head);
}

// Whether threads share heads; below 32 x 64 numbers of state waiting for each other costs more than it saves.
bool shares_heads(const fw_context &context, const Problem &p) {
  return p.N * p.H < context.n_threads && p.K * p.V >= 2048;
}

// What the segments of a shared head hand on: the gradient of the state at the start of each, panel by panel.
struct Handover {
  int64_t n_panels, panel_width, W, size;
  float *d_state;       // [N,HV,K,W]
  Progress *panels;     // [N,HV,n_panels] segments done
  Progress *gate_sums;  // [N,HV] segments added

  Handover(const fw_context &context, const Problem &p, Ledger &ledger) {
    W = all_columns(p).width();
    size = p.K * W;
    const int64_t n_heads = p.N * p.H, wanted = n_heads > 0 ? (context.n_threads + n_heads - 1) / n_heads : 1;
    const int64_t most = (W + 31) / 32, count = wanted < most ? wanted : most;
    panel_width = recurrence::pad_to((W + count - 1) / count, recurrence::kStatePad);
    n_panels = (W + panel_width - 1) / panel_width;
    d_state = ledger.take<float>(p.N * p.HV * size);
    panels = ledger.take<Progress>(p.N * p.HV * n_panels);
    gate_sums = ledger.take<Progress>(p.N * p.HV);
  }
  void reset(const Problem &p) {
    for (int64_t i = 0; i < p.N * p.HV * n_panels; ++i) panels[i].reset();
    for (int64_t i = 0; i < p.N * p.HV; ++i) gate_sums[i].reset();
  }
  Columns panel(int64_t i) const {
    const int64_t first = i * panel_width, rest = W - first;
    return {first, rest < panel_width ? rest : panel_width};
  }
};

// One task: a segment of a head that has `later` others after it.
void run_segment(const Problem &p, int64_t n, int64_t h, int64_t later, const Shared &shared, const void *saved,
                 const Handover &handover, SlotScratch &slot, HeadScratch &head) {
  const int64_t G = p.group(), n_segments = segments_of(p, n), W = handover.W;
  head.d_state = handover.d_state + (n * p.HV + h * G) * handover.size;
  if (later == 0) load_end(p, n, h, head);
  for (int64_t r = 0; r < G && later < n_segments; ++r) {
    const Span span = span_at(p, n, h, later);
    const int64_t hv = h * G + r, last = span.chunks() - 1;
    float *d_state = head.d_state + r * handover.size;
    prepare_segment(p, span, hv, {0, W}, saved, head);
    for (int64_t i = 0; i < handover.n_panels; ++i) {
      const Columns columns = handover.panel(i);
      Progress &progress = handover.panels[(n * p.HV + hv) * handover.n_panels + i];
      progress.await(later);
      for (int64_t index = last; index >= 0; --index) {
        Part &part = head.parts[index];
        const int64_t rows = span.chunk(index, hv).rows;
        copy_columns(p, columns, W, d_state, part.d_state);
        reverse_columns(p, rows, columns, d_state, part);
        retreat_state(p, rows, columns, part, d_state);
      }
      progress.finish(later + 1);
    }
    for (int64_t index = last; index >= 0; --index) {
      finish(p, span, index, hv, head.parts[index].d_state, slot, head);
    }
    if (!shared.gate_parts) continue;
    Progress &progress = handover.gate_sums[n * p.HV + hv];
    progress.await(later);
    add_gate_sums(p, span, hv, head, shared.gate_parts);
    progress.finish(later + 1);
  }
  if (later == n_segments - 1 || (later == 0 && n_segments == 0)) store_start(p, n, h, head);
}

uint64_t scratch_bytes(const fw_context &context, const Problem &p) {
  Ledger ledger(nullptr);
  const bool is_shared = shares_heads(context, p);
  if (is_shared) Handover(context, p, ledger);
  HeadScratch head;
  SlotScratch slot;
  for (int32_t i = 0; i < context.n_threads; ++i) {
    head.lay_out(ledger, p, is_shared);
    slot.lay_out(ledger, p);
  }
  return ledger.bytes();
}

// The forward that fills the saved states and nothing else.
Problem states_only(const Problem &p, void *saved) {
  Problem forward = p;
  forward.direction = FW_FORWARD;
  forward.o = forward.final_state = forward.final_z = fw_tensor{};
  forward.saved = saved;
  return forward;
}

}  // namespace

uint64_t chunk_backward_workspace(const fw_context &context, const Problem &p) {
  if (recurrence::saved_bytes(p) == UINT64_MAX) return UINT64_MAX;
  Ledger ledger(nullptr);
  Shared shared;
  shared.lay_out(ledger, p);
  const uint64_t forward = p.saved ? 0 : chunk_forward_workspace(context, states_only(p, nullptr));
  const uint64_t own = scratch_bytes(context, p), most = forward > own ? forward : own;
  if (ledger.overflow() || most == UINT64_MAX) return UINT64_MAX;
  return ledger.bytes() + most + 64;
}

void chunk_backward(fw_context &context, const Problem &p, void *memory) {
  Ledger ledger(memory);
  Shared shared;
  shared.lay_out(ledger, p);
  const void *saved = p.saved;
  char *scratch = ledger.take<char>(0);
  if (!saved) {
    chunk_forward(context, states_only(p, shared.saved), scratch);
    saved = shared.saved;
  }
  if (shared.gate_parts) memset(shared.gate_parts, 0, static_cast<size_t>(p.N * p.HV * (1 + p.K)) * 4);
  const bool is_shared = shares_heads(context, p);
  Ledger rest(scratch);
  const auto run = [&](int64_t n_items, auto &&f) {
    parallel_items(context, n_items, [&](int64_t slot, int64_t item) {
      Ledger own = rest;
      HeadScratch head;
      SlotScratch slot_scratch;
      for (int64_t i = 0; i <= slot; ++i) {
        head.lay_out(own, p, is_shared);
        slot_scratch.lay_out(own, p);
      }
      f(item, slot_scratch, head);
    });
  };
  const int64_t n_heads = p.N * p.H;
  if (is_shared) {
    Handover handover(context, p, rest);
    handover.reset(p);
    int64_t n_segments = 1;
    for (int64_t n = 0; n < p.N; ++n) n_segments = segments_of(p, n) > n_segments ? segments_of(p, n) : n_segments;
    // a segment waits for the one after it, which has a lower number and so was claimed before
    run(n_segments * n_heads, [&](int64_t item, SlotScratch &slot, HeadScratch &head) {
      const int64_t of_head = item % n_heads;
      run_segment(p, of_head / p.H, of_head % p.H, item / n_heads, shared, saved, handover, slot, head);
    });
  } else {
    run(n_heads, [&](int64_t item, SlotScratch &slot, HeadScratch &head) {
      run_head(p, item / p.H, item % p.H, shared, saved, slot, head);
    });
  }
  if (shared.gate_parts) store_gate_parameters(p, shared.gate_parts);
  clear_tails(p);
}

}  // namespace fw::FW_LEVEL
