// SPDX-License-Identifier: Apache-2.0
// The whole-sequence masked matrix form, one row of the matrices at a time. For every erase the state is
//   S_i = D_i S_{i-1} - y_i z_i^T + k_i v'_i^T,   z_i = x_i^T S_{i-1},
// with y = k, x = D e or e (shared) and y = -b, x = a (independent), so z solves the triangular system
// (I + L) z = B S_0 + L_k V' by forward substitution, and o_i follows from rows of the q k and q y products.
// Plan: an item is a value head; near[j] = D_{j+1:i} k_j and D_{j+1:i} y_j are carried from row to row: every
// factor is a product of decays, no difference of logarithms is taken. Sums are fp64 for every storage type, since
// the system of a whole sequence loses more in fp32 than the token loop does. Scratch a slot: 2 R K + 2 R V + K V
// doubles.
#include <initializer_list>

#include "core/context.hpp"
#include "core/ledger.hpp"
#include "ops/recurrence/reference.hpp"
#include "ops/recurrence/reference_rows.hpp"

namespace fw::recurrence {
namespace {

class ParallelRun {
 public:
  explicit ParallelRun(const Problem &p) : p_(p), scale_(p.scale) {}

  uint64_t workspace(const fw_context &context) const {
    const int64_t slots = p_.HV < context.n_threads ? p_.HV : context.n_threads;
    return slot_bytes() * static_cast<uint64_t>(slots);
  }

  void run(const fw_context &context, void *workspace) const {
    const uint64_t one = slot_bytes();
    parallel_items(context, p_.HV, [&](int64_t slot, int64_t hv) {
      Ledger ledger(static_cast<char *>(workspace) + static_cast<uint64_t>(slot) * one);
      Buffers b = lay_out(ledger);
      const Segment unowned = unowned_rows(p_);
      zero_rows(p_.o, unowned.batch, unowned.begin, unowned.end, hv);
      for (int64_t n = 0; n < p_.N; ++n) sequence(n, hv, b);
    });
  }

 private:
  struct Buffers {
    RowOperands<double> row;
    double *far_state;           // [K,V]: D_{1:i} S_0
    double *near_k, *near_y;     // [R,K]
    double *values, *feedback;   // [R,V]: v' and z
    double *x_row, *out;         // [R], [V]
    double *z;                   // [K], the normaliser
  };

  uint64_t slot_bytes() const {
    Ledger ledger(nullptr);
    lay_out(ledger);
    return (ledger.bytes() + 63) / 64 * 64;
  }
  Buffers lay_out(Ledger &ledger) const {
    const int64_t K = p_.K, V = p_.V, R = p_.R;
    Buffers b = {};
    RowOperands<double> &row = b.row;
    for (double **vector : {&row.q, &row.k, &row.x, &row.b, &row.base, &row.erase_gate, &row.decay, &b.z}) {
      *vector = ledger.take<double>(K);
    }
    for (double **vector : {&row.v, &row.v_raw, &row.write_gate, &b.out}) *vector = ledger.take<double>(V);
    b.far_state = ledger.take<double>(K * V);
    b.near_k = ledger.take<double>(R * K);
    b.near_y = ledger.take<double>(R * K);
    b.values = ledger.take<double>(R * V);
    b.feedback = ledger.take<double>(R * V);
    b.x_row = ledger.take<double>(R);
    return b;
  }

  // near and far factors pass the decay of one row.
  void decay_all(int64_t n_rows, Buffers &b) const {
    for (int64_t k = 0; k < p_.K; ++k) {
      for (int64_t v = 0; v < p_.V; ++v) b.far_state[k * p_.V + v] *= b.row.decay[k];
      for (int64_t j = 0; j < n_rows; ++j) {
        b.near_k[j * p_.K + k] *= b.row.decay[k];
        b.near_y[j * p_.K + k] *= b.row.decay[k];
      }
    }
  }

  // out = x^T (far state + sum over j < n_rows of near_k_j v'_j^T - near_y_j z_j^T)
  void read(const double *x, int64_t n_rows, const Buffers &b, double *out) const {
    const int64_t K = p_.K, V = p_.V;
    for (int64_t v = 0; v < V; ++v) out[v] = 0;
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t v = 0; v < V; ++v) out[v] += x[k] * b.far_state[k * V + v];
    }
    add_products(x, n_rows, b.near_k, b.values, 1, b.x_row, out);
    if (p_.erase != FW_ERASE_NONE) add_products(x, n_rows, b.near_y, b.feedback, -1, b.x_row, out);
  }
  // One row of the matrix x near^T, then its product with the values.
  void add_products(const double *x, int64_t n_rows, const double *near, const double *values, double sign,
                    double *row, double *out) const {
    for (int64_t j = 0; j < n_rows; ++j) {
      row[j] = 0;
      for (int64_t k = 0; k < p_.K; ++k) row[j] += x[k] * near[j * p_.K + k];
    }
    for (int64_t j = 0; j < n_rows; ++j) {
      for (int64_t v = 0; v < p_.V; ++v) out[v] += sign * row[j] * values[j * p_.V + v];
    }
  }

  void sequence(int64_t n, int64_t hv, Buffers &b) const {
    const int64_t K = p_.K, V = p_.V, h = hv / p_.group();
    const Segment rows = segment(p_.cu_seqlens, p_.T, n);
    load_state(p_.initial_state, p_.state_layout, n, hv, K, V, b.far_state);
    if (p_.has_normalizer) load_z(p_.initial_z, n, h, K, b.z);
    int64_t done = 0;  // rows of the system so far
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      load_decay(p_, rows.batch, t, hv, b.row);
      for (int64_t j = 0; j < p_.n_sub; ++j, ++done) {
        load_sub_step(p_, rows.batch, t * p_.n_sub + j, hv, b.row);
        const bool decays = p_.gate != FW_GATE_NONE && j == 0;
        if (decays && p_.erase == FW_ERASE_SHARED_AFTER) decay_all(done, b);
        if (p_.erase != FW_ERASE_NONE) read(b.row.x, done, b, b.feedback + done * V);
        if (decays && p_.erase != FW_ERASE_SHARED_AFTER) decay_all(done, b);
        for (int64_t k = 0; k < K; ++k) {
          b.near_k[done * K + k] = b.row.k[k];
          b.near_y[done * K + k] = p_.erase == FW_ERASE_INDEPENDENT ? -b.row.b[k] : b.row.k[k];
          if (p_.has_normalizer) b.z[k] += b.row.k[k];
        }
        for (int64_t v = 0; v < V; ++v) b.values[done * V + v] = b.row.v[v];
      }
      load_query(p_, rows.batch, t, h, b.row);
      read(b.row.q, done, b, b.out);
      double divisor = 0;
      for (int64_t k = 0; p_.has_normalizer && k < K; ++k) divisor += b.row.q[k] * b.z[k];
      for (int64_t v = 0; v < V; ++v) {
        b.out[v] *= scale_;
        if (p_.has_normalizer) b.out[v] /= scale_ * divisor + 1e-10;
      }
      store_row_of(p_.o, rows.batch, t, hv, V, b.out);
    }
    // D_{1:R} S0 + Kd^T V' - Yd^T Z
    for (int64_t j = 0; j < done; ++j) {
      for (int64_t k = 0; k < K; ++k) {
        for (int64_t v = 0; v < V; ++v) {
          b.far_state[k * V + v] += b.near_k[j * K + k] * b.values[j * V + v];
          if (p_.erase != FW_ERASE_NONE) b.far_state[k * V + v] -= b.near_y[j * K + k] * b.feedback[j * V + v];
        }
      }
    }
    store_state(p_.final_state, p_.state_layout, n, hv, K, V, b.far_state);
    if (p_.has_normalizer && hv % p_.group() == 0) store_z(p_.final_z, n, h, K, b.z);
  }

  const Problem &p_;
  double scale_;
};

}  // namespace

bool reference_parallel_accepts(const fw_context &, const Problem &p, Reason &reason) {
  if (p.R > kMaxParallelRows) {
    return reason.refuse("T * n_sub is %lld, allowed at most %lld", static_cast<long long>(p.R),
                         static_cast<long long>(kMaxParallelRows));
  }
  return true;
}

uint64_t reference_parallel_workspace(const fw_context &context, const Problem &p) {
  return ParallelRun(p).workspace(context);
}

void run_reference_parallel(fw_context &context, const Problem &p, void *workspace) {
  ParallelRun(p).run(context, workspace);
}

}  // namespace fw::recurrence
