// SPDX-License-Identifier: Apache-2.0
// Token by token on the CPU: the recurrent form of the forward, and step.
//
// Plan: one task a (sequence, value head, value panel). Rows are packed 16 at a time as for a chunk; then each row
// makes two passes over the state, 8 vectors of columns at a time: one that reads what is erased, one that decays,
// writes and reads the output; a step meanwhile brings the next head's state. A step whose state is fp32 in layout KV
// (or opaque) with padded rows works in the caller's memory; every other state is brought to the task's scratch and
// written back once, rounded to its type.
// Scratch a slot: a packed chunk and the state, K*W floats.
#include "core/ledger.hpp"
#include "cpu/dot_units.hpp"
#include "ops/recurrence/cpu_chunk.hpp"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cpu_state.hpp"

namespace fw::FW_LEVEL {
namespace {

// Multiply-adds of a step (25 us of them) below which two threads took longer than one: the state of one 256 x 256
// head 0.031 ms against 0.022 ms, those of eight 128 x 128 heads 0.030 ms against 0.033 ms.
constexpr double kStepWork = 4 * kInlineWork;

struct Scratch {
  Chunk chunk;
  float *state;  // [K,W]
  float *sum;    // [W]

  FW_NOINLINE void lay_out(Ledger &ledger, const Problem &p, int64_t width) {
    chunk.lay_out(ledger, p, width, false);
    state = ledger.take<float>(p.K * width);
    sum = ledger.take<float>(width);
  }
};

// The state that comes next, brought towards the core while another one is worked on: one cache line in each of the two
// passes over 32 columns of a row, so that a head brings as much as it touches. A step of 32 heads of 128 x 128 whose
// states are in memory takes 0.45 ms so, 0.52 without (Zen 3, one thread).
struct Ahead {
  const char *at, *end;

  template <int kColumns>
  inline __attribute__((always_inline)) void bring() {
    constexpr int kLines = kColumns >= 64 ? kColumns / 32 : 1;
#pragma GCC unroll 8
    for (int n = 0; n < kLines; ++n) __builtin_prefetch(at + n * 64, 0, 2);
    at = at + kLines * 64 < end ? at + kLines * 64 : at;
  }
};

// One row against kVecs vectors of columns. state: row k at state + k * stride.
template <fw_gate kGate, fw_erase kErase, int kVecs>
inline __attribute__((always_inline)) void row_columns(int64_t K, const float *row_decay, const float *x,
                                                       const float *k, const float *b, const float *q, const float *u,
                                                       int64_t stride, float *state, float *sum, Ahead *next) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  constexpr bool kAfter = kErase == FW_ERASE_SHARED_AFTER;
  Vec read[kVecs], write[kVecs], out[kVecs];
  Ahead ahead = *next;
#pragma GCC unroll 8
  for (int n = 0; n < kVecs; ++n) {
    read[n] = Vec{};
    out[n] = Vec{};
    write[n] = load(u + n * kLanes);
  }
  if constexpr (kErases) {
    for (int64_t i = 0; i < K; ++i) {
      // read after the decay: the decay multiplies the state first, as the second pass does
      ahead.bring<kVecs * kLanes>();
      const Vec factor = splat(x[i]);
      const Vec decay = splat(kGate == FW_GATE_NONE ? 1.0f : row_decay[kGate == FW_GATE_VECTOR ? i : 0]);
#pragma GCC unroll 8
      for (int n = 0; n < kVecs; ++n) {
        Vec s = load(state + i * stride + n * kLanes);
        if constexpr (kAfter && kGate != FW_GATE_NONE) s *= decay;
        read[n] = fma(factor, s, read[n]);
      }
    }
    if constexpr (!kIndependent) {
#pragma GCC unroll 8
      for (int n = 0; n < kVecs; ++n) write[n] -= read[n];
    }
  }
  for (int64_t i = 0; i < K; ++i) {
    const Vec decay = splat(kGate == FW_GATE_NONE ? 1.0f : row_decay[kGate == FW_GATE_VECTOR ? i : 0]);
    const Vec key = splat(k[i]), query = splat(q[i]);
    ahead.bring<kVecs * kLanes>();
#pragma GCC unroll 8
    for (int n = 0; n < kVecs; ++n) {
      float *at = state + i * stride + n * kLanes;
      Vec s = load(at);
      if constexpr (kGate != FW_GATE_NONE) s *= decay;
      if constexpr (kIndependent) s = fma(splat(b[i]), read[n], s);
      s = fma(key, write[n], s);
      store(at, s);
      out[n] = fma(query, s, out[n]);
    }
  }
#pragma GCC unroll 8
  for (int n = 0; n < kVecs; ++n) store(sum + n * kLanes, out[n]);
  *next = ahead;
}

#if defined(__AVX512F__)
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif

// One row against all columns of a panel.
using RowFn = void (*)(int64_t K, int64_t i, const Chunk &c, int64_t stride, float *state, float *sum, Ahead *next);

template <fw_gate kGate, fw_erase kErase>
void run_row(int64_t K, int64_t i, const Chunk &c, int64_t stride, float *state, float *sum, Ahead *next) {
  const int64_t at = i * c.Kp;
  const float *row_decay = c.row_decay + (kGate == FW_GATE_VECTOR ? at : i), *u = c.u + i * c.W;
  int64_t d = 0;
  for (; d + kWide * kLanes <= c.W; d += kWide * kLanes) {
    row_columns<kGate, kErase, kWide>(K, row_decay, c.x + at, c.k + at, c.b + at, c.q + at, u + d, stride, state + d,
                                      sum + d, next);
  }
  for (; d < c.W; d += kLanes) {
    row_columns<kGate, kErase, 1>(K, row_decay, c.x + at, c.k + at, c.b + at, c.q + at, u + d, stride, state + d,
                                  sum + d, next);
  }
}

struct FindRowFn {
  template <fw_gate kGate, fw_erase kErase>
  static RowFn run() {
    return run_row<kGate, kErase>;
  }
};

// The state of a task: where it is, and how it gets home.
struct Place {
  float *state;
  int64_t stride;
  bool is_in_place;
};

int64_t opaque_width(const Problem &p) { return recurrence::opaque_elements(p) / p.K; }

// The opaque state as a KV tensor with padded rows.
fw_tensor plain_view(const Problem &p) {
  if (p.state_layout != FW_STATE_OPAQUE) return p.state;
  fw_tensor t = p.state;
  const int64_t width = opaque_width(p);
  t.ndim = 4;
  t.shape[2] = p.K, t.shape[3] = p.V;
  t.strides[3] = p.state.strides[2];
  t.strides[2] = width * p.state.strides[2];
  return t;
}

Place find_state(const Problem &p, const fw_tensor &plain, int64_t slot, int64_t hv, const Panel &panel,
                 float *scratch) {
  const bool is_plain =
      p.state_layout != FW_STATE_VK && plain.dtype == FW_F32 && plain.strides[3] == 1 && !panel.has_sum;
  // the last vector of a row must not reach into foreign memory: whole vectors only, or the opaque layout's padding
  const bool is_padded = panel.count % kLanes == 0 || p.state_layout == FW_STATE_OPAQUE;
  if (is_plain && is_padded && plain.strides[2] >= panel.width()) {
    float *state = static_cast<float *>(plain.data) + slot * plain.strides[0] + hv * plain.strides[1] + panel.first;
    return {state, plain.strides[2], true};
  }
  return {scratch, panel.width(), false};
}

// The state of a task that works on it in the caller's memory, else nothing.
Ahead state_of(const Problem &p, const fw_tensor &plain, int64_t n, int64_t hv, const Panel &panel) {
  const int64_t slot = given(p.state_indices) ? load_int(p.state_indices, n) : n;
  if (slot < 0) return {};
  const Place place = find_state(p, plain, slot, hv, panel, nullptr);
  if (!place.is_in_place || place.stride != panel.width()) return {};
  const char *at = reinterpret_cast<const char *>(place.state);
  return {at, at + p.K * place.stride * 4};
}

void recurrent_head(Problem p, int64_t n, int64_t hv, const Panel &panel, RowFn run_row, Ahead ahead, Scratch &s) {
  const Segment segment = fw::segment(p.cu_seqlens, p.T, n);
  const int64_t begin = segment.begin * p.n_sub, end = segment.end * p.n_sub;
  const bool is_step = p.direction == FW_STEP;
  Chunk &c = s.chunk;
  c.W = panel.width();
  const int64_t slot = is_step && given(p.state_indices) ? load_int(p.state_indices, n) : n;
  if (slot < 0) {
    for (int64_t token = segment.begin; token < segment.end; ++token) {
      for (int64_t d = 0; d < c.W; ++d) s.sum[d] = 0.0f;
      store_row(p.o.data, p.o.dtype, head_offset(p.o, segment.batch, token, hv) + panel.first * p.o.strides[3],
                p.o.strides[3], panel.count, s.sum);
    }
    return;
  }
  const fw_tensor in = is_step ? plain_view(p) : p.initial_state, out = is_step ? in : p.final_state;
  Place place = {s.state, c.W, false};
  if (is_step) place = find_state(p, in, slot, hv, panel, s.state);
  if (p.state_layout == FW_STATE_OPAQUE) p.state_layout = FW_STATE_KV;
  if (!place.is_in_place) {
    load_state(p, in, slot, hv, panel, s.state);
    load_sum(p, is_step ? p.state_z : p.initial_z, slot, hv, panel, s.state);
  }
  if (ahead.at == nullptr) ahead.at = ahead.end = reinterpret_cast<const char *>(place.state);  // nothing: it is here
  load_gate_parameters(p, hv, c);
  for (int64_t row = begin; row < end; row += kChunk) {
    const int64_t rows = end - row < kChunk ? end - row : kChunk;
    pack_chunk(p, {segment.batch, row, rows, hv}, panel, c);
    for (int64_t i = 0; i < rows; ++i) {
      run_row(p.K, i, c, place.stride, place.state, s.sum, &ahead);
      if ((row + i) % p.n_sub != p.n_sub - 1) continue;
      store_output(p, segment.batch, (row + i) / p.n_sub, hv, panel, s.sum);
    }
  }
  if (place.is_in_place || (is_step && begin == end)) return;
  store_state(p, out, slot, hv, panel, s.state);
}

// z is the state of a whole group and its first value head writes it, so every head must have read it before.
void store_step_sum(const Problem &p, int64_t n, Scratch &s) {
  const int64_t slot = given(p.state_indices) ? load_int(p.state_indices, n) : n;
  if (slot < 0) return;
  const Segment segment = fw::segment(p.cu_seqlens, p.T, n);
  for (int64_t h = 0; h < p.H; ++h) {
    for (int64_t token = segment.begin; token < segment.end; ++token) {
      load_key_row(p, p.k, segment.batch, token, h, s.chunk.Kp, s.chunk.k, s.chunk.norm_k);
      const int64_t offset = slot * p.state_z.strides[0] + h * p.state_z.strides[1];
      for (int64_t k = 0; k < p.K; ++k) {
        const int64_t at = offset + k * p.state_z.strides[2];
        store_f32(p.state_z.data, p.state_z.dtype, at, load_f32(p.state_z.data, p.state_z.dtype, at) + s.chunk.k[k]);
      }
    }
  }
}

}  // namespace

uint64_t recurrent_workspace(const fw_context &context, const Problem &p) {
  Ledger ledger(nullptr);
  Scratch scratch;
  for (int32_t slot = 0; slot < context.n_threads; ++slot) scratch.lay_out(ledger, p, PanelCut(context, p).widest());
  return ledger.bytes();
}

void recurrent(fw_context &context, const Problem &p, void *memory) {
  const PanelCut cut(context, p);
  const RowFn run_row = recurrence::dispatch_axes<FindRowFn>(p);
  const auto scratch_of = [&](int64_t slot) {
    Ledger ledger(memory);
    Scratch scratch;
    for (int64_t i = 0; i <= slot; ++i) scratch.lay_out(ledger, p, cut.widest());
    return scratch;
  };
  const auto run_item = [&](int64_t slot, int64_t item, Ahead ahead) {
    const Panel panel = cut.at(item % cut.count);
    const int64_t head = item / cut.count;
    if (panel.count == 0) return;
    Scratch scratch = scratch_of(slot);
    recurrent_head(p, head / p.HV, head % p.HV, panel, run_row, ahead, scratch);
    if (p.direction == FW_FORWARD) store_sum(p, p.final_z, head / p.HV, head % p.HV, panel, scratch.state);
  };
  const int64_t n_items = p.N * p.HV * cut.count;
  // two or three passes of multiply-adds over each head's state a row
  const double work = 3.0 * static_cast<double>(p.B * p.R) * static_cast<double>(p.HV * p.K * p.V);
  if (p.direction == FW_FORWARD) {
    parallel_work(context, n_items, work, [&](int64_t slot, int64_t item) { run_item(slot, item, {}); });
  } else {
    const fw_tensor plain = plain_view(p);
    const auto run_range = [&](int64_t slot, int64_t begin, int64_t end) {
      for (int64_t item = begin; item < end; ++item) {
        const int64_t next = item + 1, head = next / cut.count;
        run_item(slot, item, next < end ? state_of(p, plain, head / p.HV, head % p.HV, cut.at(next % cut.count)) : Ahead{});
      }
    };
    // each core keeps the states of its heads
    if (work >= kStepWork) parallel_ranges(context, n_items, run_range);
    else run_range(0, 0, n_items);
  }
  if (p.direction == FW_STEP && p.has_normalizer) {
    parallel_items(context, p.N, [&](int64_t slot, int64_t n) {
      Scratch scratch = scratch_of(slot);
      store_step_sum(p, n, scratch);
    });
  }
  clear_tail(p, p.o, 1, p.HV, p.V);
}

uint64_t chunk_forward_workspace(const fw_context &context, const Problem &p);
void chunk_forward(fw_context &context, const Problem &p, void *memory);
uint64_t chunk_dots_workspace(const fw_context &context, const Problem &p, const DotUnits &units);
void chunk_dots(fw_context &context, const Problem &p, void *memory, const DotUnits &units);
uint64_t chunk_backward_workspace(const fw_context &context, const Problem &p);
void chunk_backward(fw_context &context, const Problem &p, void *memory);

}  // namespace fw::FW_LEVEL

#include "ops/recurrence/cpu_table.hpp"

namespace fw::FW_LEVEL {
extern const recurrence::CpuTable kRecurrenceTable;
const recurrence::CpuTable kRecurrenceTable = {chunk_forward_workspace, chunk_forward,
                                               chunk_dots_workspace,    chunk_dots,
                                               chunk_backward_workspace, chunk_backward,
                                               recurrent_workspace,     recurrent};
}  // namespace fw::FW_LEVEL
