// SPDX-License-Identifier: Apache-2.0
// Candidates of the short convolution, best first, and how its work is cut: blocks of rows of the whole batch (their
// size follows from B and T) times panels of channels; states sequence by sequence. Workspace: scratch a thread and,
// backward, the sums of dweight and dbias a block.
#include <string.h>

#include "core/ledger.hpp"
#include "core/operands.hpp"
#include "cpu/level_impl.hpp"
#include "cuda/candidate.hpp"
#include "ops/short_conv/kernels.hpp"

namespace fw::short_conv {
namespace {

struct Buffers {
  Scratch *slots;  // [threads]
  float *sums;     // [blocks, W + 1, pitch]
  int64_t pitch;   // channels, in whole panels
};

int64_t n_panels(const Problem &p) { return ceil_div(p.D, kPanel); }
int64_t n_rows(const Problem &p) { return numel(p.x) == 0 ? 0 : p.B * p.T; }
Panel panel_of(const Problem &p, int64_t i) {
  const int64_t begin = i * kPanel;
  return {begin, p.D - begin < kPanel ? p.D - begin : kPanel};
}

float *take_rows(Ledger &ledger, int64_t rows) { return ledger.take<float>(product(rows, kPanel)); }

Buffers lay_out(Ledger &ledger, const fw_context &context, const Problem &p) {
  Buffers b = {};
  b.slots = ledger.take<Scratch>(context.n_threads);
  const bool is_backward = p.direction == FW_BACKWARD;
  const int64_t tile = tile_rows(p), past = p.W - 1;
  for (int32_t i = 0; i < context.n_threads; ++i) {
    Scratch s = {};
    s.x = take_rows(ledger, tile + 2 * past);
    s.weight = take_rows(ledger, p.W);
    s.bias = take_rows(ledger, 1);
    s.line = ledger.take<float>(tile + 2 * past);
    if (is_backward) {
      s.dz = take_rows(ledger, tile + past);
      s.reversed = take_rows(ledger, p.W);
      s.z = take_rows(ledger, 4);
    }
    if (b.slots) b.slots[i] = s;
  }
  if (!is_backward) return b;
  b.pitch = product(n_panels(p), kPanel);
  b.sums = ledger.take<float>(product(row_blocks(n_rows(p)).n, product(p.W + 1, b.pitch)));
  return b;
}

// f(sequence, from, to) for the pieces of sequences in rows [begin, end) of the whole batch; zero(batch, from, to)
// for rows of no sequence, counted inside the batch entry.
template <class F, class Zero>
void for_each_piece(const Problem &p, int64_t begin, int64_t end, F f, Zero zero) {
  while (begin < end) {
    const int64_t batch = begin / p.T, row = begin % p.T;
    const int64_t stop = p.T - row < end - begin ? p.T : row + end - begin;  // inside this batch entry
    int64_t at = row;
    for (int64_t n = sequence_of_row(p, batch, row); at < stop && n < p.N; ++n) {
      const Sequence s = sequence(p, n);
      if (s.batch != batch) break;
      const int64_t to = s.end < stop ? s.end : stop;
      if (at < to) f(s, at - s.begin, to - s.begin);
      at = to > at ? to : at;
    }
    if (at < stop) zero(batch, at, stop);
    begin += stop - row;
  }
}

struct Block {
  int64_t begin, end;
};
Block block_of(const Problem &p, int64_t i) {
  const int64_t rows = row_blocks(n_rows(p)).rows, begin = i * rows, all = n_rows(p);
  return {begin, all - begin < rows ? all : begin + rows};
}

void run_forward(fw_context &context, const Problem &p, const Buffers &buffers, const Kernels &kernels) {
  const int64_t panels = n_panels(p);
  parallel_items(context, row_blocks(n_rows(p)).n * panels, [&](int64_t slot, int64_t item) {
    const Block block = block_of(p, item / panels);
    const Panel panel = panel_of(p, item % panels);
    const Scratch &scratch = buffers.slots[slot];
    kernels.load_weights(p, panel, scratch);
    for_each_piece(
        p, block.begin, block.end,
        [&](const Sequence &s, int64_t from, int64_t to) { kernels.forward(p, s, panel, from, to, scratch); },
        [&](int64_t batch, int64_t from, int64_t to) { zero_rows(p.y, batch, from, to, panel.begin, panel.n); });
  });
  if (!given(p.final_state)) return;
  parallel_items(context, p.N * panels, [&](int64_t slot, int64_t item) {
    kernels.write_state(p, sequence(p, item / panels), panel_of(p, item % panels), p.final_state, item / panels,
                        buffers.slots[slot]);
  });
}

void run_step(fw_context &context, const Problem &p, const Buffers &buffers, const Kernels &kernels) {
  const int64_t panels = n_panels(p);
  const double work = static_cast<double>(p.B * p.T) * static_cast<double>(p.D * p.W);
  parallel_work(context, p.N * panels, work, [&](int64_t slot, int64_t item) {
    const Sequence s = sequence(p, item / panels);
    const Panel panel = panel_of(p, item % panels);
    if (s.slot < 0) return zero_rows(p.y, s.batch, s.begin, s.end, panel.begin, panel.n);
    kernels.load_weights(p, panel, buffers.slots[slot]);
    if (s.length() == 1) return kernels.step_row(p, s, panel, buffers.slots[slot]);
    kernels.forward(p, s, panel, 0, s.length(), buffers.slots[slot]);
    kernels.write_state(p, s, panel, p.state, s.slot, buffers.slots[slot]);
  });
  if (!given(p.cu_seqlens)) return;
  zero_rows(p.y, 0, p.N > 0 ? sequence(p, p.N - 1).end : 0, p.T, 0, p.D);
}

void run_backward(fw_context &context, const Problem &p, const Buffers &buffers, const Kernels &kernels) {
  const int64_t panels = n_panels(p), n_blocks = row_blocks(n_rows(p)).n, block_pitch = (p.W + 1) * buffers.pitch;
  const bool has_sums = given(p.dweight) || given(p.dbias);
  if (has_sums || given(p.dx)) {
    parallel_items(context, n_blocks * panels, [&](int64_t slot, int64_t item) {
      const Block block = block_of(p, item / panels);
      const Panel panel = panel_of(p, item % panels);
      const Scratch &scratch = buffers.slots[slot];
      float *sums = has_sums ? buffers.sums + item / panels * block_pitch + panel.begin : nullptr;
      for (int64_t row = 0; sums && row <= p.W; ++row) memset(sums + row * buffers.pitch, 0, kPanel * sizeof(float));
      kernels.load_weights(p, panel, scratch);
      for_each_piece(
          p, block.begin, block.end,
          [&](const Sequence &s, int64_t from, int64_t to) {
            kernels.backward(p, s, panel, from, to, sums, buffers.pitch, scratch);
          },
          [&](int64_t batch, int64_t from, int64_t to) {
            if (given(p.dx)) zero_rows(p.dx, batch, from, to, panel.begin, panel.n);
          });
    });
  }
  if (has_sums) {
    parallel_items(context, (p.W + 1) * panels, [&](int64_t slot, int64_t item) {
      const int64_t tap = item / panels;
      const Panel panel = panel_of(p, item % panels);
      const fw_tensor &t = tap == p.W ? p.dbias : p.dweight;
      if (!given(t)) return;
      const int64_t offset = panel.begin * t.strides[0] + (tap == p.W ? 0 : tap * t.strides[1]);
      kernels.sum_blocks(buffers.sums + tap * buffers.pitch + panel.begin, block_pitch, n_blocks, t, offset,
                         t.strides[0], panel.n, buffers.slots[slot].z);
    });
  }
  if (!given(p.d_initial_state) || p.W == 1) return;
  parallel_items(context, p.N * panels, [&](int64_t slot, int64_t item) {
    const Panel panel = panel_of(p, item % panels);
    kernels.load_weights(p, panel, buffers.slots[slot]);
    kernels.backward(p, sequence(p, item / panels), panel, 1 - p.W, 0, nullptr, 0, buffers.slots[slot]);
  });
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
    const Kernels &kernels = FW_LEVEL_TABLE(kLevel, kShortConv);
    if (p.direction == FW_FORWARD) run_forward(context, p, buffers, kernels);
    if (p.direction == FW_BACKWARD) run_backward(context, p, buffers, kernels);
    if (p.direction == FW_STEP) run_step(context, p, buffers, kernels);
  }
  static uint64_t reference_workspace(const fw_context &context, const Problem &p) {
    return short_conv::reference_workspace(context, p);
  }
  static void reference_run(fw_context &context, const Problem &p, void *workspace) {
    short_conv::reference_run(context, p, workspace);
  }
};

constexpr auto kCandidates = list_of(cuda::Candidate<Problem, CudaPath>::kImpl, LevelImpls<Problem, Ops>::kList);

}  // namespace

const Impl<Problem> *ShortConv::impls(int32_t *n) {
  *n = kCandidates.count();
  return kCandidates.impls;
}

}  // namespace fw::short_conv
