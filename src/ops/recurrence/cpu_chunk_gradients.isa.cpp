// SPDX-License-Identifier: Apache-2.0
// The chunk backward's tensors: the incoming d_o in, the gradients out.
//
// Plan: row by row. A value head's own gradients are rounded and stored at once; what its group shares is added to
// fp32 rows of the segment, in the order of the group, and stored after the last. Scratch: cpu_chunk_backward.hpp.
#include "ops/recurrence/cpu_chunk_backward.hpp"

#include "cpu/activation.hpp"

namespace fw::FW_LEVEL {

void Part::lay_out(Ledger &ledger, const Problem &p, bool is_shared_head) {
  const int64_t W = pad_lanes(p.V + (p.has_normalizer ? 1 : 0));
  chunk.lay_out(ledger, p, W, true);
  state = ledger.take<float>(p.K * W);
  d_state = ledger.take<float>(is_shared_head ? p.K * W : 0);
  d_o = ledger.take<float>(kChunk * W);
  d_u = ledger.take<float>(kChunk * W);
  d_z = ledger.take<float>(kChunk * W);
  sums = ledger.take<float>(p.has_normalizer ? kChunk * W : 0);
  gate_sums = ledger.take<float>(2 * pad_lanes(p.K));
}

void HeadScratch::lay_out(Ledger &ledger, const Problem &p, bool is_shared_head) {
  const int64_t Kp = pad_lanes(p.K), W = pad_lanes(p.V + (p.has_normalizer ? 1 : 0));
  for (Part &part : parts) part.lay_out(ledger, p, is_shared_head);
  d_state = ledger.take<float>(is_shared_head ? 0 : p.group() * p.K * W);
  for (float *&rows : gathered) rows = ledger.take<float>(recurrence::kSegmentRows * Kp);
}

void SlotScratch::lay_out(Ledger &ledger, const Problem &p) {
  reverse.lay_out(ledger, p);
  row = ledger.take<float>(recurrence::kMaxWidth);
}

void load_d_o(const Problem &p, const Rows &where, Part &part) {
  const int64_t W = part.chunk.W;
  for (int64_t i = 0; i < where.rows; ++i) {
    float *row = part.d_o + i * W;
    const int64_t at = where.first_row + i;
    if (!given(p.d_o) || at % p.n_sub != p.n_sub - 1) {
      memset(row, 0, static_cast<size_t>(W) * 4);
      continue;
    }
    load_head_row(p.d_o, where.batch, at / p.n_sub, where.hv, p.V, W, row);
    if (p.has_normalizer) {
      // o = n / d with n = scale * sum and d = scale * sum[V] + 1e-10: dn = do / d, dd = -sum_v do_v o_v / d
      const float *sum = part.sums + i * W;
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

namespace {

void add_row(const float *x, int64_t padded, float *to) {
  for (int64_t d = 0; d < padded; d += kLanes) store(to + d, load(to + d) + load(x + d));
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

}  // namespace

void store_value_head(const Problem &p, const Rows &where, int64_t first, Part &part, SlotScratch &slot,
                      HeadScratch &head) {
  const Chunk &c = part.chunk;
  const ReverseChunk &r = slot.reverse;
  const int64_t Kp = c.Kp, W = c.W, Vp = pad_lanes(p.V) < W ? pad_lanes(p.V) : W;
  memset(part.gate_sums, 0, static_cast<size_t>(2 * Kp) * 4);
  if (where.hv % p.group() == 0) {
    for (float *rows : head.gathered) memset(rows + first * Kp, 0, static_cast<size_t>(kChunk * Kp) * 4);
  }
  for (int64_t i = 0; i < where.rows; ++i) {
    const int64_t at = where.first_row + i, token = at / p.n_sub, to = (first + i) * Kp;
    float *d_x = r.d_x + i * Kp, *d_u = part.d_u + i * W;
    add_row(r.d_q + i * Kp, Kp, head.gathered[0] + to);
    add_row(r.d_k + i * Kp, Kp, head.gathered[1] + to);
    if (p.erase == FW_ERASE_INDEPENDENT) {
      add_row(d_x, Kp, head.gathered[2] + to);
      add_row(r.d_b + i * Kp, Kp, head.gathered[3] + to);
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
          store(head.gathered[3] + to + d, fma(load(d_x + d), load(key + d), load(head.gathered[3] + to + d)));
        }
        multiply_row(d_x, erase_gate, Kp);
      }
      add_row(d_x, Kp, head.gathered[given(p.p) ? 2 : 1] + to);
      if (write_gate) {
        if (given(p.d_write_gate)) {
          for (int64_t d = 0; d < Vp; d += kLanes) store(slot.row + d, load(d_u + d) * load(v + d));
          store_row(p.d_write_gate.data, p.d_write_gate.dtype,
                    head_offset(p.d_write_gate, where.batch, token, where.hv), p.d_write_gate.strides[3], p.V,
                    slot.row);
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
                      static_cast<float>(p.gate_lower_bound), d_g, given(p.a_log) ? part.gate_sums : nullptr,
                      given(p.dt_bias) ? part.gate_sums + Kp : nullptr);
      }
      if (!given(p.dg)) continue;
      const int64_t offset = head_offset(p.dg, where.batch, token, where.hv);
      store_row(p.dg.data, p.dg.dtype, offset, p.gate == FW_GATE_VECTOR ? p.dg.strides[3] : 1, n, d_g);
    }
  }
}

void store_key_head(const Problem &p, const Rows &where, int64_t first, SlotScratch &slot, HeadScratch &head) {
  const int64_t Kp = pad_lanes(p.K), batch = where.batch, h = where.hv / p.group();
  float *d_q = head.gathered[0] + first * Kp, *d_k = head.gathered[1] + first * Kp;
  float *third = head.gathered[2] + first * Kp, *fourth = head.gathered[3] + first * Kp;
  for (int64_t i = 0; i < where.rows; ++i) {
    const int64_t row = where.first_row + i, token = row / p.n_sub;
    if (row % p.n_sub == p.n_sub - 1) {
      store_key_row(p, p.dq, p.q, p.has_l2norm, batch, token, h, d_q + i * Kp, slot.row);
    }
    store_key_row(p, p.dk, p.k, p.has_l2norm, batch, row, h, d_k + i * Kp, slot.row);
    if (p.erase == FW_ERASE_INDEPENDENT) {
      store_key_row(p, p.da, p.a, false, batch, row, h, third + i * Kp, slot.row);
      store_key_row(p, p.db, p.b, false, batch, row, h, fourth + i * Kp, slot.row);
    } else if (p.erase != FW_ERASE_NONE) {
      store_key_row(p, p.dp, p.p, p.has_l2norm, batch, row, h, third + i * Kp, slot.row);
      store_key_row(p, p.d_erase_gate, p.erase_gate, false, batch, row, h, fourth + i * Kp, slot.row);
    }
  }
}

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

}  // namespace fw::FW_LEVEL
