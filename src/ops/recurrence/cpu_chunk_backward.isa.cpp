// SPDX-License-Identifier: Apache-2.0
// Chunk backward on the CPU.
//
// Plan: one task a (sequence, query/key head); it owns every gradient of that head and of the value heads of its
// group, so nothing is summed across tasks. Segments of 64 rows are visited from the last to the first: the states at
// the start of its four chunks are recomputed from the state saved by the forward, then each chunk is reversed with
// the gradient of the state at its end, which it replaces by the one at its start. Gradients of q, k, p, a, b,
// erase_gate are gathered in fp32 over the group and stored once a segment. Scratch a slot: (4 + group) states K*W,
// 4*32*W writes, 6*64*K gathered rows: 700 KB at K = V = 128.
#include "cpu/activation.hpp"
#include "ops/recurrence/cpu_chunk_forward.hpp"
#include "ops/recurrence/cpu_reverse.hpp"

namespace fw::FW_LEVEL {

void chunk_forward(fw_context &context, const Problem &p, void *memory);
uint64_t chunk_forward_workspace(const fw_context &context, const Problem &p);

namespace {

using recurrence::kSegmentRows;
constexpr int64_t kChunks = kSegmentRows / kChunk;

struct Scratch {
  Chunk chunk;
  ReverseChunk reverse;
  float *states[kChunks];  // [K,W] at the start of each chunk of a segment
  float *writes[kChunks];  // [2C,W]: u then w
  float *d_state;          // [group,K,W]
  float *d_o, *d_u, *d_z;  // [C,W]; d_z: minus the gradient of v' (shared) or that of w (independent)
  float *sums;             // [C,W], with the normaliser
  float *gathered[4];      // [kSegmentRows,Kp]: q, k, p or a, erase_gate or b
  float *gate_sums;        // [2,Kp]: d_a_log, d_dt_bias of a head
  float *row;              // [max(Kp,W)]

  FW_NOINLINE void lay_out(Ledger &ledger, const Problem &p) {
    const int64_t Kp = pad_lanes(p.K), W = pad_lanes(p.V + (p.has_normalizer ? 1 : 0));
    chunk.lay_out(ledger, p, W, true);
    reverse.lay_out(ledger, p);
    for (float *&state : states) state = ledger.take<float>(p.K * W);
    for (float *&write : writes) write = ledger.take<float>(2 * kChunk * W);
    d_state = ledger.take<float>(p.group() * p.K * W);
    d_o = ledger.take<float>(kChunk * W);
    d_u = ledger.take<float>(kChunk * W);
    d_z = ledger.take<float>(kChunk * W);
    sums = ledger.take<float>(kChunk * W);
    for (float *&rows : gathered) rows = ledger.take<float>(kSegmentRows * Kp);
    gate_sums = ledger.take<float>(2 * Kp);
    row = ledger.take<float>(recurrence::kMaxWidth);
  }
};

// What outlives a slot: saved states when the caller brought none, and the heads' gate parameter gradients.
struct Shared {
  float *saved;
  float *gate_parts;  // [N,HV,1 + gate width]: d_a_log, d_dt_bias of one sequence
  FW_NOINLINE void lay_out(Ledger &ledger, const Problem &p) {
    saved = nullptr;
    if (!p.saved) saved = ledger.take<float>(static_cast<int64_t>(recurrence::saved_bytes(p) / 4));
    gate_parts = nullptr;
    if (given(p.a_log) || given(p.dt_bias)) gate_parts = ledger.take<float>(p.N * p.HV * (1 + p.K));
  }
};

// d_o of the chunk's rows, times scale; through the normaliser when there is one (sums: the undivided outputs).
void load_d_o(const Problem &p, const Rows &where, const Panel &panel, const float *sums, int64_t W, float *d_o) {
  for (int64_t i = 0; i < where.rows; ++i) {
    float *row = d_o + i * W;
    const int64_t at = where.first_row + i;
    if (!given(p.d_o) || at % p.n_sub != p.n_sub - 1) {
      memset(row, 0, static_cast<size_t>(W) * 4);
      continue;
    }
    load_head_row(p.d_o, where.batch, at / p.n_sub, where.hv, p.V, W, row);
    if (panel.has_sum) {
      // o = n / d with n = scale * sum and d = scale * sum[V] + 1e-10: dn = do / d, dd = -sum_v do_v o_v / d
      const float *sum = sums + i * W;
      const float divisor = p.scale_f32 * sum[p.V] + 1e-10f;
      float d_divisor = 0;
      for (int64_t v = 0; v < p.V; ++v) {
        row[v] /= divisor;
        d_divisor -= row[v] * (p.scale_f32 * sum[v]) / divisor;
      }
      row[p.V] = d_divisor;
    }
    scale_row(row, p.scale_f32, W, row);
  }
}

// Gradients of u, w (through the triangle) and of the state, from d_o and the state's gradient at the chunk's end.
void reverse_products(const Problem &p, int64_t rows, const float *state, float *d_state, Scratch &s) {
  const bool erases = p.erase != FW_ERASE_NONE, is_independent = p.erase == FW_ERASE_INDEPENDENT;
  const Chunk &c = s.chunk;
  ReverseChunk &r = s.reverse;
  const int64_t K = p.K, Kp = c.Kp, W = c.W;
  gemm_nn<Keep::kNothing>(rows, W, K, c.ends_k, Kp, 1, d_state, W, s.d_u, W);
  if (is_independent) gemm_nn<Keep::kNothing>(rows, W, K, c.ends_b, Kp, 1, d_state, W, s.d_z, W);
  for (int64_t i = rows - 1; i >= 0; --i) {
    const int64_t diagonal = i * kChunk + i, below = diagonal + kChunk, later = rows - 1 - i;
    float *d_u = s.d_u + i * W, *d_z = s.d_z + i * W;
    if (is_independent) {
      add_rows(later + 1, c.qb + diagonal, kChunk, s.d_o + i * W, W, d_z);
      add_rows(later, c.xb + below, kChunk, d_z + W, W, d_z);
    }
    add_rows(later + 1, c.qk + diagonal, kChunk, s.d_o + i * W, W, d_u);
    if (erases) add_rows(later, c.xk + below, kChunk, d_z + W, W, d_u);
    if (erases && !is_independent) scale_row(d_u, -1.0f, W, d_z);
  }
  gemm_nt(rows, rows, W, s.d_o, W, c.u, W, r.d_qk, kChunk, false);
  gemm_nt(rows, K, W, s.d_o, W, state, W, r.d_reads_q, Kp, false);
  gemm_nt(rows, K, W, c.u, W, d_state, W, r.d_k, Kp, false);
  if (erases) {
    gemm_nt(rows, rows, W, s.d_z, W, c.u, W, r.d_xk, kChunk, false);
    gemm_nt(rows, K, W, s.d_z, W, state, W, r.d_reads_x, Kp, false);
  }
  if (is_independent) {
    gemm_nt(rows, rows, W, s.d_o, W, c.w, W, r.d_qb, kChunk, false);
    gemm_nt(rows, rows, W, s.d_z, W, c.w, W, r.d_xb, kChunk, false);
    gemm_nt(rows, K, W, c.w, W, d_state, W, r.d_b, Kp, false);
  }
  for (int64_t i = 0; i < rows; ++i) {  // gemm_nt leaves the padding of K alone
    for (int64_t d = K; d < Kp; ++d)
      r.d_reads_q[i * Kp + d] = r.d_reads_x[i * Kp + d] = r.d_k[i * Kp + d] = r.d_b[i * Kp + d] = 0;
  }
  if (p.gate != FW_GATE_NONE) {
    for (int64_t d = 0; d < Kp; ++d) r.d_total[d] = d < K ? dot(W, state + d * W, d_state + d * W) : 0.0f;
  }
  if (p.gate == FW_GATE_NONE) {
    gemm_nn<Keep::kAll>(K, W, rows, c.reads_q, 1, Kp, s.d_o, W, d_state, W);
  } else {
    gemm_nn<Keep::kScaled>(K, W, rows, c.reads_q, 1, Kp, s.d_o, W, d_state, W, c.total);
  }
  if (erases) gemm_nn<Keep::kAll>(K, W, rows, c.reads_x, 1, Kp, s.d_z, W, d_state, W);
}

void add_row(const float *x, int64_t padded, float *to) {
  for (int64_t d = 0; d < padded; d += kLanes) store(to + d, load(to + d) + load(x + d));
}

// Stores what belongs to one value head (v, write_gate, beta, g) and gathers what belongs to the query/key head.
void store_value_head(const Problem &p, const Rows &where, int64_t in_segment, Scratch &s) {
  const Chunk &c = s.chunk;
  const ReverseChunk &r = s.reverse;
  const int64_t Kp = c.Kp, W = c.W, Vp = pad_lanes(p.V) < W ? pad_lanes(p.V) : W;
  for (int64_t i = 0; i < where.rows; ++i) {
    const int64_t at = where.first_row + i, token = at / p.n_sub, to = (in_segment + i) * Kp;
    float *d_x = r.d_x + i * Kp, *d_u = s.d_u + i * W;
    add_row(r.d_q + i * Kp, Kp, s.gathered[0] + to);
    add_row(r.d_k + i * Kp, Kp, s.gathered[1] + to);
    if (p.erase == FW_ERASE_INDEPENDENT) {
      add_row(d_x, Kp, s.gathered[2] + to);
      add_row(r.d_b + i * Kp, Kp, s.gathered[3] + to);
    }
    if (is_shared(p.erase)) {
      // x = beta * erase_gate * key and v' = beta * write_gate * v, absent factors 1
      const float *key = c.key + i * Kp, *v = c.v + i * W;
      const float *erase_gate = given(p.erase_gate) ? c.erase_gate + i * Kp : nullptr;
      const float *write_gate = given(p.write_gate) ? c.write_gate + i * W : nullptr;
      const float beta = given(p.beta) ? c.beta[i] : 1.0f;
      if (given(p.dbeta)) {
        Vec sum = {};
        for (int64_t d = 0; d < Kp; d += kLanes) {
          sum = fma(load(d_x + d), erase_gate ? load(key + d) * load(erase_gate + d) : load(key + d), sum);
        }
        float of_v = 0;
        for (int64_t d = 0; d < p.V; ++d) of_v = fma(d_u[d], write_gate ? v[d] * write_gate[d] : v[d], of_v);
        float d_beta = sum_lanes(sum) + of_v;
        if (p.beta_input != FW_BETA_INPUT_PLAIN) {
          d_beta *= beta * (1.0f - (p.beta_input == FW_BETA_INPUT_SIGMOID_TWICE ? 0.5f * beta : beta));
        }
        store_f32(p.dbeta.data, p.dbeta.dtype, head_offset(p.dbeta, where.batch, at, where.hv), d_beta);
      }
      scale_row(d_x, beta, Kp, d_x);
      scale_row(d_u, beta, W, d_u);
      if (erase_gate) {
        for (int64_t d = 0; d < Kp; d += kLanes) {
          store(s.gathered[3] + to + d, fma(load(d_x + d), load(key + d), load(s.gathered[3] + to + d)));
        }
        multiply_row(d_x, erase_gate, Kp);
      }
      add_row(d_x, Kp, s.gathered[given(p.p) ? 2 : 1] + to);
      if (write_gate) {
        if (given(p.d_write_gate)) {
          for (int64_t d = 0; d < Vp; d += kLanes) store(s.row + d, load(d_u + d) * load(v + d));
          store_row(p.d_write_gate.data, p.d_write_gate.dtype,
                    head_offset(p.d_write_gate, where.batch, token, where.hv), p.d_write_gate.strides[3], p.V, s.row);
        }
        multiply_row(d_u, write_gate, W);
      }
    }
    if (given(p.dv))
      store_row(p.dv.data, p.dv.dtype, head_offset(p.dv, where.batch, at, where.hv), p.dv.strides[3], p.V, d_u);
    if (p.gate != FW_GATE_NONE) {
      if (at % p.n_sub != 0 || p.has_fixed_gate) continue;
      const int64_t n = p.gate == FW_GATE_VECTOR ? p.K : 1, stride = p.gate == FW_GATE_VECTOR ? Kp : 1;
      float *d_g = r.d_g + i * stride;
      float one_logit[kLanes] = {c.logits[i * stride]}, one_d_g[kLanes] = {d_g[0]};  // a scalar gate as a padded row
      if (p.gate == FW_GATE_SCALAR) d_g = one_d_g;
      if (p.gate_input != FW_GATE_INPUT_LOG_DECAY) {
        const float *logits = p.gate == FW_GATE_SCALAR ? one_logit : c.logits + i * stride;
        gate_grad_row(p.gate_input, logits, d_g, n, given(p.a_log) ? c.parameters : nullptr,
                      given(p.dt_bias) ? c.parameters + Kp : nullptr, static_cast<float>(p.gate_normalizer),
                      static_cast<float>(p.gate_lower_bound), d_g, given(p.a_log) ? s.gate_sums : nullptr,
                      given(p.dt_bias) ? s.gate_sums + Kp : nullptr);
      }
      if (!given(p.dg)) continue;
      const int64_t offset = head_offset(p.dg, where.batch, token, where.hv);
      store_row(p.dg.data, p.dg.dtype, offset, p.gate == FW_GATE_VECTOR ? p.dg.strides[3] : 1, n, d_g);
    }
  }
}

// One gathered gradient row to its tensor, through the L2 norm of its input when there is one.
void store_key_row(const Problem &p, const fw_tensor &d_t, const fw_tensor &t, bool is_normed, int64_t batch,
                   int64_t row, int64_t h, float *d_row, float *scratch) {
  if (!given(d_t)) return;
  const int64_t Kp = pad_lanes(p.K);
  if (is_normed) {
    load_head_row(t, batch, row, h, p.K, Kp, scratch);
    const float inverse_length = l2norm_row(scratch, Kp, 1e-6f, scratch);
    l2norm_grad_row(scratch, inverse_length, d_row, Kp, d_row);
  }
  store_row(d_t.data, d_t.dtype, head_offset(d_t, batch, row, h), d_t.strides[3], p.K, d_row);
}

void store_key_head(const Problem &p, int64_t batch, int64_t first_row, int64_t rows, int64_t h, Scratch &s) {
  const int64_t Kp = s.chunk.Kp;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = first_row + i, token = row / p.n_sub;
    if (row % p.n_sub == p.n_sub - 1) {
      store_key_row(p, p.dq, p.q, p.has_l2norm, batch, token, h, s.gathered[0] + i * Kp, s.row);
    }
    store_key_row(p, p.dk, p.k, p.has_l2norm, batch, row, h, s.gathered[1] + i * Kp, s.row);
    if (p.erase == FW_ERASE_INDEPENDENT) {
      store_key_row(p, p.da, p.a, false, batch, row, h, s.gathered[2] + i * Kp, s.row);
      store_key_row(p, p.db, p.b, false, batch, row, h, s.gathered[3] + i * Kp, s.row);
    } else if (p.erase != FW_ERASE_NONE) {
      store_key_row(p, p.dp, p.p, p.has_l2norm, batch, row, h, s.gathered[2] + i * Kp, s.row);
      store_key_row(p, p.d_erase_gate, p.erase_gate, false, batch, row, h, s.gathered[3] + i * Kp, s.row);
    }
  }
}

struct Backward {
  const Problem &p;
  const float *saved;
  Scratch &s;
  Panel panel;

  // The states at the start of each chunk of a segment, and the rows that each chunk writes.
  void recompute(const Segment &segment, int64_t n, int64_t hv, int64_t first_row, int64_t rows) {
    Chunk &c = s.chunk;
    const int64_t W = c.W, begin = segment.begin * p.n_sub;
    copy_from_saved(p, recurrence::saved_slot(p, n) + (first_row - begin) / kSegmentRows, hv, panel, saved,
                    s.states[0]);
    for (int64_t i = 0, at = 0; at < rows; ++i, at += kChunk) {
      const int64_t count = rows - at < kChunk ? rows - at : kChunk;
      prepare({segment.batch, first_row + at, count, hv});
      if (p.erase != FW_ERASE_NONE) {
        gemm_nn<Keep::kNothing>(count, W, p.K, c.reads_x, c.Kp, 1, s.states[i], W, s.d_u, W);
      }
      solve_rows(p, count, s.d_u, c);
      memcpy(s.writes[i], c.u, static_cast<size_t>(kChunk * W) * 4);
      if (p.erase == FW_ERASE_INDEPENDENT) {
        memcpy(s.writes[i] + kChunk * W, c.w, static_cast<size_t>(kChunk * W) * 4);
      }
      if (at + kChunk < rows) {
        memcpy(s.states[i + 1], s.states[i], static_cast<size_t>(p.K * W) * 4);
        advance_state(p, count, c, s.states[i + 1]);
      }
    }
  }

  void prepare(const Rows &where) {
    pack_chunk(p, where, panel, s.chunk);
    score_chunk(p, where.rows, s.chunk);
  }

  void reverse_chunk(const Rows &where, int64_t index, int64_t in_segment, float *d_state) {
    Chunk &c = s.chunk;
    const int64_t W = c.W;
    memcpy(c.u, s.writes[index], static_cast<size_t>(kChunk * W) * 4);
    if (p.erase == FW_ERASE_INDEPENDENT) {
      memcpy(c.w, s.writes[index] + kChunk * W, static_cast<size_t>(kChunk * W) * 4);
    }
    if (panel.has_sum) {
      gemm_nn<Keep::kNothing>(where.rows, W, p.K, c.reads_q, c.Kp, 1, s.states[index], W, s.sums, W);
      for (int64_t i = 0; i < where.rows; ++i) add_rows(i + 1, c.qk + i * kChunk, 1, c.u, W, s.sums + i * W);
    }
    load_d_o(p, where, panel, s.sums, W, s.d_o);
    reverse_products(p, where.rows, s.states[index], d_state, s);
    reverse_scores(p, where.rows, c, s.reverse);
    store_value_head(p, where, in_segment, s);
  }

  void run_group(int64_t n, int64_t h, float *gate_parts) {
    const Segment segment = fw::segment(p.cu_seqlens, p.T, n);
    const int64_t begin = segment.begin * p.n_sub, end = segment.end * p.n_sub, G = p.group();
    const int64_t W = s.chunk.W, state_size = p.K * W;
    for (int64_t r = 0; r < G; ++r) {
      float *d_state = s.d_state + r * state_size;
      load_state(p, p.d_final_state, n, h * G + r, panel, d_state);
      if (r == 0) load_sum(p, p.d_final_z, n, h * G, panel, d_state);
    }
    if (gate_parts) memset(gate_parts + (n * p.HV + h * G) * (1 + p.K), 0, static_cast<size_t>(G * (1 + p.K)) * 4);
    const int64_t n_segments = (end - begin + kSegmentRows - 1) / kSegmentRows;
    for (int64_t i = n_segments - 1; i >= 0; --i) {
      const int64_t first_row = begin + i * kSegmentRows;
      const int64_t rows = end - first_row < kSegmentRows ? end - first_row : kSegmentRows;
      for (float *gathered : s.gathered) memset(gathered, 0, static_cast<size_t>(kSegmentRows * s.chunk.Kp) * 4);
      for (int64_t r = 0; r < G; ++r) {
        const int64_t hv = h * G + r, last = (rows - 1) / kChunk;
        load_gate_parameters(p, hv, s.chunk);
        memset(s.gate_sums, 0, static_cast<size_t>(2 * s.chunk.Kp) * 4);
        recompute(segment, n, hv, first_row, rows);
        for (int64_t index = last; index >= 0; --index) {
          const int64_t at = index * kChunk, count = rows - at < kChunk ? rows - at : kChunk;
          const Rows where = {segment.batch, first_row + at, count, hv};
          if (index != last) prepare(where);  // the last chunk is still packed
          reverse_chunk(where, index, at, s.d_state + r * state_size);
        }
        if (gate_parts) add_gate_parts(gate_parts + (n * p.HV + hv) * (1 + p.K));
      }
      store_key_head(p, segment.batch, first_row, rows, h, s);
    }
    for (int64_t r = 0; r < G; ++r)
      store_state(p, p.d_initial_state, n, h * G + r, panel, s.d_state + r * state_size);
    if (panel.has_sum && given(p.d_initial_z)) {
      for (int64_t r = 1; r < G; ++r) {
        for (int64_t k = 0; k < p.K; ++k) s.d_state[k * W + p.V] += s.d_state[r * state_size + k * W + p.V];
      }
      store_sum(p, p.d_initial_z, n, h * G, panel, s.d_state);
    }
  }

  void add_gate_parts(float *part) const {
    const int64_t width = p.gate == FW_GATE_VECTOR ? p.K : 1;
    for (int64_t d = 0; d < width; ++d) {
      part[0] += s.gate_sums[d];
      part[1 + d] += s.gate_sums[s.chunk.Kp + d];
    }
  }
};

// Sums the sequences' parts, in their order.
void store_gate_parameters(const Problem &p, const float *parts) {
  const int64_t width = p.gate == FW_GATE_VECTOR ? p.K : 1;
  for (int64_t hv = 0; hv < p.HV; ++hv) {
    for (int64_t d = 0; d < 1 + width; ++d) {
      float sum = 0;
      for (int64_t n = 0; n < p.N; ++n) sum += parts[(n * p.HV + hv) * (1 + p.K) + d];
      if (d == 0) {
        if (given(p.d_a_log)) store_f32(p.d_a_log.data, p.d_a_log.dtype, hv * p.d_a_log.strides[0], sum);
      } else if (given(p.d_dt_bias)) {
        const int64_t column = p.gate == FW_GATE_VECTOR ? (d - 1) * p.d_dt_bias.strides[1] : 0;
        store_f32(p.d_dt_bias.data, p.d_dt_bias.dtype, hv * p.d_dt_bias.strides[0] + column, sum);
      }
    }
  }
}

void clear_tails(const Problem &p) {
  clear_tail(p, p.dq, 1, p.H, p.K);
  clear_tail(p, p.dk, p.n_sub, p.H, p.K);
  clear_tail(p, p.dv, p.n_sub, p.HV, p.V);
  clear_tail(p, p.da, 1, p.H, p.K);
  clear_tail(p, p.db, 1, p.H, p.K);
  clear_tail(p, p.dp, 1, p.H, p.K);
  clear_tail(p, p.d_erase_gate, 1, p.H, p.K);
  clear_tail(p, p.d_write_gate, 1, p.HV, p.V);
  clear_tail(p, p.dg, 1, p.HV, p.gate == FW_GATE_VECTOR ? p.K : 0);
  clear_tail(p, p.dbeta, p.n_sub, p.HV, 0);
}

// The forward that fills the saved states and nothing else.
Problem states_only(const Problem &p, float *saved) {
  Problem forward = p;
  forward.direction = FW_FORWARD;
  forward.o = forward.final_state = forward.final_z = fw_tensor{};
  forward.saved = saved;
  return forward;
}

}  // namespace

uint64_t chunk_backward_workspace(const fw_context &context, const Problem &p) {
  if (recurrence::saved_bytes(p) == UINT64_MAX) return UINT64_MAX;
  Ledger ledger(nullptr), slots(nullptr);
  Shared shared;
  shared.lay_out(ledger, p);
  Scratch scratch;
  for (int32_t slot = 0; slot < context.n_threads; ++slot) scratch.lay_out(slots, p);
  const uint64_t forward = p.saved ? 0 : chunk_forward_workspace(context, states_only(p, nullptr));
  const uint64_t most = forward > slots.bytes() ? forward : slots.bytes();
  if (ledger.overflow() || slots.overflow() || forward == UINT64_MAX) return UINT64_MAX;
  return ledger.bytes() + most + 64;
}

void chunk_backward(fw_context &context, const Problem &p, void *memory) {
  Ledger ledger(memory);
  Shared shared;
  shared.lay_out(ledger, p);
  const float *saved = static_cast<const float *>(p.saved);
  char *slots = ledger.take<char>(0);
  if (!saved) {
    chunk_forward(context, states_only(p, shared.saved), slots);
    saved = shared.saved;
  }
  parallel_items(context, p.N * p.H, [&](int64_t slot, int64_t item) {
    Ledger own(slots);
    Scratch scratch;
    for (int64_t i = 0; i <= slot; ++i) scratch.lay_out(own, p);
    Backward backward{p, saved, scratch, {0, p.V, p.has_normalizer}};
    backward.run_group(item / p.H, item % p.H, shared.gate_parts);
  });
  if (shared.gate_parts) store_gate_parameters(p, shared.gate_parts);
  clear_tails(p);
}

}  // namespace fw::FW_LEVEL
