// SPDX-License-Identifier: Apache-2.0
// Drives the core over sequences and heads: forward and step, and backward by the reverse recurrence.
// An item is one query/key head: its sequences and value heads follow one after the other, so that every sum over a
// group or over sequences has one order. Backward keeps the state every ~sqrt(T) tokens and recomputes inside.
#pragma once
#include <initializer_list>

#include "core/context.hpp"
#include "core/ledger.hpp"
#include "ops/recurrence/reference_core.hpp"
#include "ops/recurrence/reference_rows.hpp"

namespace fw::recurrence {

template <class Real, class Rounding>
class ReferenceRun {
 public:
  ReferenceRun(const Problem &p, const Rounding &round)
      : p_(p), core_{p.K, p.V, p.erase, round}, scale_(static_cast<Real>(p.scale)),
        piece_(root_above(p.T)), n_pieces_((p.T + piece_ - 1) / piece_) {}

  // Bytes of workspace; UINT64_MAX when they do not fit.
  uint64_t workspace(const fw_context &context) const {
    const uint64_t one = slot_bytes(), slots = static_cast<uint64_t>(n_slots(context));
    uint64_t all;
    return one == UINT64_MAX || __builtin_mul_overflow(one, slots, &all) ? UINT64_MAX : all;
  }

  void run(const fw_context &context, void *workspace) const {
    const uint64_t one = slot_bytes();
    parallel_items(context, p_.H, [&](int64_t slot, int64_t h) {
      Ledger ledger(static_cast<char *>(workspace) + static_cast<uint64_t>(slot) * one);
      Buffers buffers = lay_out(ledger);
      if (p_.direction == FW_BACKWARD) {
        backward_head(h, buffers);
      } else {
        forward_head(h, buffers);
      }
    });
  }

 private:
  struct Buffers {
    RowOperands<Real> row;
    CoreScratch<Real> scratch;
    SubStepGrads<Real> grads;     // of one sub-step
    Real *S, *z, *num;            // [K,V], [K], [V]
    Real *dS, *dz, *d_num;        // [K,V], [K], [V]
    Real *kept;                   // [n_pieces,K,V]: the state before each piece
    Real *states;                 // [piece * n_sub + 1, K,V]: before each sub-step of a piece, and after the last
    Real *all_z;                  // [T,K]: the normaliser after each token
    Real *dq, *dk, *dx, *dy;      // [T,K], [R,K]: sums over the group; dx, dy: base and erase_gate, or a and b
    Real *d_initial_z;            // [K]
    Real *da_log, *d_dt_bias;     // [group], [group,K]
  };

  static int64_t root_above(int64_t n) {
    int64_t root = 1;
    while (root * root < n) ++root;
    return root;
  }
  int64_t n_slots(const fw_context &context) const { return p_.H < context.n_threads ? p_.H : context.n_threads; }
  bool is_independent() const { return p_.erase == FW_ERASE_INDEPENDENT; }

  uint64_t slot_bytes() const {
    Ledger ledger(nullptr);
    lay_out(ledger);
    return ledger.overflow() ? UINT64_MAX : (ledger.bytes() + 63) / 64 * 64;
  }

  Buffers lay_out(Ledger &ledger) const {
    const int64_t K = p_.K, V = p_.V;
    Buffers b = {};
    RowOperands<Real> &row = b.row;
    CoreScratch<Real> &scratch = b.scratch;
    SubStepGrads<Real> &grads = b.grads;
    for (Real **vector : {&row.q, &row.k, &row.x, &row.b, &row.base, &row.erase_gate, &row.decay, &b.z}) {
      *vector = ledger.take<Real>(K);
    }
    for (Real **vector : {&row.v, &row.v_raw, &row.write_gate, &scratch.r, &scratch.u, &scratch.dr, &b.num}) {
      *vector = ledger.take<Real>(V);
    }
    b.S = ledger.take<Real>(K * V);
    if (p_.direction != FW_BACKWARD) return b;
    for (Real **vector : {&grads.dx, &grads.dx_unrounded, &grads.dg, &b.dz, &b.d_initial_z}) {
      *vector = ledger.take<Real>(K);
    }
    for (Real **vector : {&grads.dv, &b.d_num}) *vector = ledger.take<Real>(V);
    for (Real **matrix : {&scratch.decayed, &b.dS}) *matrix = ledger.take<Real>(K * V);
    b.da_log = ledger.take<Real>(p_.group());
    b.d_dt_bias = ledger.take<Real>(p_.group() * K);
    b.kept = take_rows(ledger, n_pieces_, K * V);
    b.states = take_rows(ledger, piece_ * p_.n_sub + 1, K * V);
    if (p_.has_normalizer) b.all_z = take_rows(ledger, p_.T, K);
    b.dq = take_rows(ledger, p_.T, K);
    for (Real **rows : {&b.dk, &b.dx, &b.dy}) *rows = take_rows(ledger, p_.R, K);
    return b;
  }
  static Real *take_rows(Ledger &ledger, int64_t rows, int64_t size) {
    int64_t count;
    return ledger.take<Real>(mul_fits(rows, size, &count) ? count : -1);
  }

  SubStep<Real> sub_step(const RowOperands<Real> &row, int64_t j) const {
    return {p_.gate != FW_GATE_NONE && j == 0 ? row.decay : nullptr, row.k,
            p_.erase == FW_ERASE_NONE ? nullptr : row.x, row.b, row.v};
  }

  // Sub-steps of token t; states (when given) receives the state before each.
  void advance(int64_t batch, int64_t t, int64_t hv, Buffers &b, Real *states) const {
    load_decay(p_, batch, t, hv, b.row);
    for (int64_t j = 0; j < p_.n_sub; ++j) {
      if (states) copy_state(b.S, states + j * p_.K * p_.V);
      load_sub_step(p_, batch, t * p_.n_sub + j, hv, b.row);
      core_.forward(sub_step(b.row, j), b.S, b.scratch);
      if (p_.has_normalizer) {
        for (int64_t i = 0; i < p_.K; ++i) b.z[i] += b.row.k[i];
      }
    }
  }
  void copy_state(const Real *from, Real *to) const {
    for (int64_t i = 0; i < p_.K * p_.V; ++i) to[i] = from[i];
  }

  // num = scale S^T q; returns the divisor (1 without the normaliser).
  Real query(const Real *S, const Real *z, const Real *q, Real *num) const {
    core_.read(S, q, num);
    for (int64_t i = 0; i < p_.V; ++i) num[i] *= scale_;
    if (!p_.has_normalizer) return 1;
    Real dot = 0;
    for (int64_t i = 0; i < p_.K; ++i) dot += q[i] * z[i];
    return scale_ * dot + Real(1e-10);
  }

  void forward_head(int64_t h, Buffers &b) const {
    const bool is_step = p_.direction == FW_STEP;
    const fw_tensor &state_in = is_step ? p_.state : p_.initial_state;
    const fw_tensor &state_out = is_step ? p_.state : p_.final_state;
    const fw_tensor &z_in = is_step ? p_.state_z : p_.initial_z, &z_out = is_step ? p_.state_z : p_.final_z;
    const Segment unowned = unowned_rows(p_);
    for (int64_t i = 0; i < p_.group(); ++i) {
      const int64_t hv = h * p_.group() + i;
      zero_rows(p_.o, unowned.batch, unowned.begin, unowned.end, hv);
      for (int64_t n = 0; n < p_.N; ++n) {
        const Segment rows = segment(p_.cu_seqlens, p_.T, n);
        const int64_t slot = is_step && given(p_.state_indices) ? load_int(p_.state_indices, n) : n;
        if (slot < 0) {
          zero_rows(p_.o, rows.batch, rows.begin, rows.end, hv);
          continue;
        }
        load_state(state_in, p_.state_layout, slot, hv, p_.K, p_.V, b.S);
        if (p_.has_normalizer) load_z(z_in, slot, h, p_.K, b.z);
        for (int64_t t = rows.begin; t < rows.end; ++t) {
          advance(rows.batch, t, hv, b, nullptr);
          load_query(p_, rows.batch, t, h, b.row);
          const Real divisor = query(b.S, b.z, b.row.q, b.num);
          if (p_.has_normalizer) {
            for (int64_t v = 0; v < p_.V; ++v) b.num[v] /= divisor;
          }
          store_row_of(p_.o, rows.batch, t, hv, p_.V, b.num);
        }
        store_state(state_out, p_.state_layout, slot, hv, p_.K, p_.V, b.S);
        // z belongs to the group; in a step it is written after its last reader
        if (p_.has_normalizer && i == p_.group() - 1) store_z(z_out, slot, h, p_.K, b.z);
      }
    }
  }

  void backward_head(int64_t h, Buffers &b) const {
    const int64_t K = p_.K;
    for (int64_t i = 0; i < p_.group(); ++i) b.da_log[i] = 0;
    for (int64_t i = 0; i < p_.group() * K; ++i) b.d_dt_bias[i] = 0;
    for (int64_t n = 0; n < p_.N; ++n) {
      const Segment rows = segment(p_.cu_seqlens, p_.T, n);
      for (int64_t i = 0; i < (rows.end - rows.begin) * K; ++i) b.dq[i] = 0;
      for (int64_t i = 0; i < (rows.end - rows.begin) * p_.n_sub * K; ++i) b.dk[i] = b.dx[i] = b.dy[i] = 0;
      for (int64_t i = 0; i < K; ++i) b.d_initial_z[i] = 0;
      for (int64_t i = 0; i < p_.group(); ++i) backward_sequence(n, rows, h, i, b);
      store_head_rows(rows, h, b);
      store_z(p_.d_initial_z, n, h, K, b.d_initial_z);
    }
    for (int64_t i = 0; i < p_.group(); ++i) {
      const int64_t hv = h * p_.group() + i;
      if (given(p_.d_a_log)) store_vector(p_.d_a_log, hv * p_.d_a_log.strides[0], 0, 1, b.da_log + i);
      if (given(p_.d_dt_bias)) {
        const bool is_vector = p_.gate == FW_GATE_VECTOR;
        store_vector(p_.d_dt_bias, hv * p_.d_dt_bias.strides[0], is_vector ? p_.d_dt_bias.strides[1] : 0,
                     is_vector ? K : 1, b.d_dt_bias + i * K);
      }
    }
    zero_unowned(h);
  }

  void zero_unowned(int64_t h) const {
    const Segment rows = unowned_rows(p_);
    const int64_t n_sub = p_.n_sub;
    zero_rows(p_.dq, rows.batch, rows.begin, rows.end, h);
    for (const fw_tensor *t : {&p_.dk, &p_.da, &p_.db, &p_.dp, &p_.d_erase_gate}) {
      zero_rows(*t, rows.batch, rows.begin * n_sub, rows.end * n_sub, h);
    }
    for (int64_t hv = h * p_.group(); hv < (h + 1) * p_.group(); ++hv) {
      for (const fw_tensor *t : {&p_.dv, &p_.dbeta, &p_.d_write_gate}) {
        zero_rows(*t, rows.batch, rows.begin * n_sub, rows.end * n_sub, hv);
      }
      zero_rows(p_.dg, rows.batch, rows.begin, rows.end, hv);
    }
  }

  // One value head of one sequence: a forward that keeps the state before each piece, then the pieces in reverse.
  void backward_sequence(int64_t n, const Segment &rows, int64_t h, int64_t i, Buffers &b) const {
    const int64_t KV = p_.K * p_.V, hv = h * p_.group() + i, length = rows.end - rows.begin;
    load_state(p_.initial_state, p_.state_layout, n, hv, p_.K, p_.V, b.S);
    if (p_.has_normalizer) load_z(p_.initial_z, n, h, p_.K, b.z);
    for (int64_t t = 0; t < length; ++t) {
      if (t % piece_ == 0) copy_state(b.S, b.kept + t / piece_ * KV);
      advance(rows.batch, rows.begin + t, hv, b, nullptr);
      for (int64_t k = 0; p_.has_normalizer && k < p_.K; ++k) b.all_z[t * p_.K + k] = b.z[k];
    }
    load_state(p_.d_final_state, p_.state_layout, n, hv, p_.K, p_.V, b.dS);
    // the group shares z: its incoming gradient enters with the first value head
    load_z(i == 0 ? p_.d_final_z : fw_tensor{}, n, h, p_.K, b.dz);
    for (int64_t piece = (length + piece_ - 1) / piece_ - 1; piece >= 0; --piece) {
      const int64_t begin = piece * piece_, end = begin + piece_ < length ? begin + piece_ : length;
      copy_state(b.kept + piece * KV, b.S);
      for (int64_t t = begin; t < end; ++t) {
        advance(rows.batch, rows.begin + t, hv, b, b.states + (t - begin) * p_.n_sub * KV);
      }
      copy_state(b.S, b.states + (end - begin) * p_.n_sub * KV);
      for (int64_t t = end - 1; t >= begin; --t) {
        backward_token(rows, t, hv, b.states + (t - begin) * p_.n_sub * KV, b);
      }
    }
    store_state(p_.d_initial_state, p_.state_layout, n, hv, p_.K, p_.V, b.dS);
    for (int64_t k = 0; k < p_.K; ++k) b.d_initial_z[k] += b.dz[k];
  }

  void backward_token(const Segment &rows, int64_t t, int64_t hv, const Real *states, Buffers &b) const {
    const int64_t K = p_.K, V = p_.V, token = rows.begin + t, h = hv / p_.group();
    backward_query(rows, t, h, hv, states + p_.n_sub * K * V, b);
    load_decay(p_, rows.batch, token, hv, b.row);
    for (int64_t j = p_.n_sub - 1; j >= 0; --j) {
      const int64_t at = (t * p_.n_sub + j) * K;
      load_sub_step(p_, rows.batch, token * p_.n_sub + j, hv, b.row);
      b.grads.dk = b.dk + at;
      b.grads.db = b.dy + at;
      core_.reverse(sub_step(b.row, j), states + j * K * V, b.dS, b.grads, b.scratch);
      if (p_.has_normalizer) {
        for (int64_t k = 0; k < K; ++k) b.dk[at + k] += b.dz[k];
      }
      store_operand_grads(rows.batch, token * p_.n_sub + j, hv, at, b);
    }
    if (p_.gate != FW_GATE_NONE && !p_.has_fixed_gate) store_gate_grads(rows.batch, token, hv, b);
  }

  // o = num / divisor: d_o into dS, dz and dq.
  void backward_query(const Segment &rows, int64_t t, int64_t h, int64_t hv, const Real *S, Buffers &b) const {
    if (!given(p_.d_o)) return;
    const int64_t K = p_.K, V = p_.V;
    load_query(p_, rows.batch, rows.begin + t, h, b.row);
    load_row_of(p_.d_o, rows.batch, rows.begin + t, hv, V, b.d_num);
    Real *dq = b.dq + t * K;
    if (p_.has_normalizer) {
      const Real divisor = query(S, b.all_z + t * K, b.row.q, b.num);
      Real dot = 0;
      for (int64_t v = 0; v < V; ++v) {
        b.d_num[v] /= divisor;
        dot += b.d_num[v] * b.num[v];
      }
      const Real d_divisor = -dot / divisor;
      for (int64_t k = 0; k < K; ++k) {
        dq[k] += scale_ * d_divisor * b.all_z[t * K + k];
        b.dz[k] += scale_ * d_divisor * b.row.q[k];
      }
    }
    core_.read_value(S, b.d_num, true, b.grads.dx, false);
    for (int64_t k = 0; k < K; ++k) dq[k] += scale_ * b.grads.dx[k];
    core_.add_outer(scale_, b.row.q, b.d_num, b.dS);
  }

  // The finished erase key and value to what they are made of. `at`: offset of the row in the sums of the group.
  void store_operand_grads(int64_t batch, int64_t row, int64_t hv, int64_t at, Buffers &b) const {
    const int64_t K = p_.K, V = p_.V;
    const RowOperands<Real> &r = b.row;
    if (is_independent()) {
      for (int64_t k = 0; k < K; ++k) b.dx[at + k] += b.grads.dx[k];
    }
    if (p_.erase == FW_ERASE_NONE || is_independent()) {
      store_row_of(p_.dv, batch, row, hv, V, b.grads.dv);
      return;
    }
    const Real *for_beta = Rounding::kIsExact ? b.grads.dx : b.grads.dx_unrounded;
    Real dbeta = 0;
    for (int64_t k = 0; k < K; ++k) {
      b.dx[at + k] += b.grads.dx[k] * r.beta * r.erase_gate[k];
      b.dy[at + k] += b.grads.dx[k] * r.beta * r.base[k];
      dbeta += for_beta[k] * r.erase_gate[k] * r.base[k];
    }
    for (int64_t v = 0; v < V; ++v) {
      dbeta += b.grads.dv[v] * r.write_gate[v] * r.v_raw[v];
      b.num[v] = b.grads.dv[v] * r.beta * r.v_raw[v];
      b.grads.dv[v] *= r.beta * r.write_gate[v];
    }
    store_row_of(p_.dv, batch, row, hv, V, b.grads.dv);
    store_row_of(p_.d_write_gate, batch, row, hv, V, b.num);
    dbeta = chain(r.dbeta_dx, dbeta);
    if (given(p_.dbeta)) store_vector(p_.dbeta, row_offset(p_.dbeta, batch, row, hv), 0, 1, &dbeta);
  }

  // b.grads.dg: [K], to be summed for a scalar gate.
  void store_gate_grads(int64_t batch, int64_t t, int64_t hv, Buffers &b) const {
    const bool is_vector = p_.gate == FW_GATE_VECTOR;
    const int64_t n = is_vector ? p_.K : 1, i = hv % p_.group();
    for (int64_t k = 1; !is_vector && k < p_.K; ++k) b.grads.dg[0] += b.grads.dg[k];
    for (int64_t k = 0; k < n; ++k) {
      const GateValue<Real> gate = gate_value<Real>(p_, batch, t, hv, k);
      b.da_log[i] += chain(gate.da_log, b.grads.dg[k]);
      b.grads.dg[k] = chain(gate.dx, b.grads.dg[k]);
      b.d_dt_bias[i * p_.K + k] += b.grads.dg[k];
    }
    if (!given(p_.dg)) return;
    store_vector(p_.dg, row_offset(p_.dg, batch, t, hv), is_vector ? p_.dg.strides[3] : 0, n, b.grads.dg);
  }

  // dq, dk and what goes with k, once the whole group has been summed.
  void store_head_rows(const Segment &rows, int64_t h, Buffers &b) const {
    const int64_t K = p_.K, batch = rows.batch;
    const bool has_base = given(p_.p);
    for (int64_t t = 0; t < rows.end - rows.begin; ++t) {
      load_raw(p_.q, batch, rows.begin + t, h, b.row.q, b.dq + t * K);
      store_row_of(p_.dq, batch, rows.begin + t, h, K, b.dq + t * K);
    }
    for (int64_t r = 0; r < (rows.end - rows.begin) * p_.n_sub; ++r) {
      const int64_t row = rows.begin * p_.n_sub + r;
      Real *dk = b.dk + r * K, *dx = b.dx + r * K, *dy = b.dy + r * K;
      if (is_independent()) {
        store_row_of(p_.da, batch, row, h, K, dx);
        store_row_of(p_.db, batch, row, h, K, dy);
      } else {
        store_row_of(p_.d_erase_gate, batch, row, h, K, dy);
        for (int64_t k = 0; !has_base && k < K; ++k) dk[k] += dx[k];
        if (has_base) load_raw(p_.p, batch, row, h, b.row.base, dx);
        store_row_of(p_.dp, batch, row, h, K, dx);
      }
      load_raw(p_.k, batch, row, h, b.row.k, dk);
      store_row_of(p_.dk, batch, row, h, K, dk);
    }
  }
  // Takes the gradient of a normalised row to that of the given row.
  void load_raw(const fw_tensor &t, int64_t batch, int64_t row, int64_t h, Real *x, Real *d) const {
    if (!p_.has_l2norm) return;
    load_row_of(t, batch, row, h, p_.K, x);
    const Real factor = l2_normalise(x, p_.K);
    l2_reverse(x, factor, p_.K, d);
  }

  const Problem &p_;
  Core<Real, Rounding> core_;
  Real scale_;
  int64_t piece_, n_pieces_;
};

}  // namespace fw::recurrence
