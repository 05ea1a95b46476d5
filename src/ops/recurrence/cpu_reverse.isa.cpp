// SPDX-License-Identifier: Apache-2.0
// The reverse of score_chunk, compiled once a <gate, erase>.
//
// Plan: with no gate or a scalar one, products of the 16 x 16 gradients of the scores with keys and reads; with a
// vector gate one walk over pairs of rows j < i for each vector of channels, which decays key j on the way. Scratch:
// cpu_reverse.hpp.
#include "ops/recurrence/cpu_reverse.hpp"

#include "ops/recurrence/axes.hpp"

namespace fw::FW_LEVEL {

void ReverseChunk::lay_out(Ledger &ledger, const Problem &p) {
  const int64_t rows = kChunk * pad_lanes(p.K);
  d_qk = ledger.take<float>(kChunk * kChunk);
  d_qb = ledger.take<float>(kChunk * kChunk);
  d_xk = ledger.take<float>(kChunk * kChunk);
  d_xb = ledger.take<float>(kChunk * kChunk);
  d_reads_x = ledger.take<float>(rows);
  d_reads_q = ledger.take<float>(rows);
  d_k = ledger.take<float>(rows);
  d_b = ledger.take<float>(rows);
  d_q = ledger.take<float>(rows);
  d_x = ledger.take<float>(rows);
  d_g = ledger.take<float>(rows);
  d_total = ledger.take<float>(pad_lanes(p.K));
}

namespace {

// Zeroes what lies outside the triangle: j > i, and j = i too when is_strict.
void clear_upper(int64_t rows, bool is_strict, float *scores) {
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = i + (is_strict ? 0 : 1); j < rows; ++j) scores[i * kChunk + j] = 0.0f;
  }
}

// The flow across each scalar decay.
template <fw_erase kErase>
FW_NOINLINE void reverse_gate_scalar(int64_t rows, const Chunk &c, const ReverseChunk &r) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  constexpr bool kAfter = kErase == FW_ERASE_SHARED_AFTER;
  const int64_t Kp = c.Kp;
  float written[kChunk];  // what flows out of row j's write past the rows already visited
  for (int64_t j = 0; j < rows; ++j) {
    written[j] = dot(Kp, c.ends_k + j * Kp, r.d_k + j * Kp);
    if constexpr (kIndependent) written[j] += dot(Kp, c.ends_b + j * Kp, r.d_b + j * Kp);
  }
  float started = dot(Kp, c.total, r.d_total);  // the same for the state at the start
  for (int64_t i = rows - 1; i >= 0; --i) {
    const int64_t at = i * kChunk;
    started += dot(Kp, c.reads_q + i * Kp, r.d_reads_q + i * Kp);
    const float read_x = kErases ? dot(Kp, c.reads_x + i * Kp, r.d_reads_x + i * Kp) : 0.0f;
    if constexpr (kAfter) started += read_x;
    float sum = started;
    for (int64_t j = 0; j < i; ++j) {
      written[j] += r.d_qk[at + j] * c.qk[at + j];
      if constexpr (kAfter) written[j] += r.d_xk[at + j] * c.xk[at + j];
      if constexpr (kIndependent) written[j] += r.d_qb[at + j] * c.qb[at + j];
      sum += written[j];
    }
    r.d_g[i] = sum;
    if constexpr (kErases && !kAfter) {
      started += read_x;
      for (int64_t j = 0; j < i; ++j) {
        written[j] += r.d_xk[at + j] * c.xk[at + j];
        if constexpr (kIndependent) written[j] += r.d_xb[at + j] * c.xb[at + j];
      }
    }
  }
}

// d_reads += scores keys;  d_keys += scores^T reads, with scores [rows,rows].
FW_NOINLINE void add_score_products(int64_t rows, int64_t Kp, const float *scores, const float *keys,
                                    const float *reads, float *d_reads, float *d_keys) {
  gemm_nn<Keep::kAll>(rows, Kp, rows, scores, kChunk, 1, keys, Kp, d_reads, Kp);
  gemm_nn<Keep::kAll>(rows, Kp, rows, scores, 1, kChunk, reads, Kp, d_keys, Kp);
}

template <fw_gate kGate, fw_erase kErase>
FW_NOINLINE void reverse_scalar(int64_t rows, const Chunk &c, const ReverseChunk &r) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  constexpr bool kAfter = kErase == FW_ERASE_SHARED_AFTER, kScalar = kGate == FW_GATE_SCALAR;
  const int64_t Kp = c.Kp;
  if constexpr (kScalar) reverse_gate_scalar<kErase>(rows, c, r);
  clear_upper(rows, false, r.d_qk);
  if constexpr (kErases) clear_upper(rows, true, r.d_xk);
  if constexpr (kIndependent) {
    clear_upper(rows, false, r.d_qb);
    clear_upper(rows, true, r.d_xb);
  }
  for (int64_t i = 0; i < rows; ++i) {
    const float run = kScalar ? c.runs[i] : 1.0f, run_before = kScalar && i > 0 ? c.runs[i - 1] : 1.0f;
    const float end = kScalar ? c.decay[(rows - 1) * kChunk + i] : 1.0f;
    scale_row(r.d_reads_q + i * Kp, run, Kp, r.d_q + i * Kp);
    if constexpr (kErases) scale_row(r.d_reads_x + i * Kp, kAfter ? run : run_before, Kp, r.d_x + i * Kp);
    scale_row(r.d_k + i * Kp, end, Kp, r.d_k + i * Kp);
    if constexpr (kIndependent) scale_row(r.d_b + i * Kp, end, Kp, r.d_b + i * Kp);
    for (int64_t j = 0; kScalar && j <= i; ++j) {
      const int64_t at = i * kChunk + j;
      const float after = c.decay[at], x_decay = kAfter ? after : (j < i ? c.decay[at - kChunk] : 0.0f);
      r.d_qk[at] *= after;
      if constexpr (kErases) r.d_xk[at] *= j < i ? x_decay : 0.0f;
      if constexpr (kIndependent) {
        r.d_qb[at] *= after;
        r.d_xb[at] *= j < i ? x_decay : 0.0f;
      }
    }
  }
  add_score_products(rows, Kp, r.d_qk, c.k, c.q, r.d_q, r.d_k);
  if constexpr (kErases) add_score_products(rows, Kp, r.d_xk, c.k, c.x, r.d_x, r.d_k);
  if constexpr (kIndependent) {
    add_score_products(rows, Kp, r.d_qb, c.b, c.q, r.d_q, r.d_b);
    add_score_products(rows, Kp, r.d_xb, c.b, c.x, r.d_x, r.d_b);
  }
}

// One pair of rows j < i and one block of channels: key j as row i met it, and what row i sends back to it.
template <bool kErases, bool kAfter>
inline __attribute__((always_inline)) void reverse_pair(Vec key, Vec row_decay, Vec q, Vec x, float d_qk, float d_xk,
                                                        float *d_key, Vec *d_q, Vec *d_x, Vec *d_g) {
  const Vec decayed = key * row_decay;
  Vec back = fma(splat(d_qk), q, load(d_key));
  *d_q = fma(splat(d_qk), decayed, *d_q);
  if constexpr (kErases && kAfter) {
    back = fma(splat(d_xk), x, back);
    *d_x = fma(splat(d_xk), decayed, *d_x);
  }
  *d_g = fma(decayed, back, *d_g);
  back = back * row_decay;
  if constexpr (kErases && !kAfter) {
    back = fma(splat(d_xk), x, back);
    *d_x = fma(splat(d_xk), key, *d_x);
  }
  store(d_key, back);
}

template <fw_erase kErase>
FW_NOINLINE void reverse_vector(int64_t rows, const Chunk &c, const ReverseChunk &r) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  constexpr bool kAfter = kErase == FW_ERASE_SHARED_AFTER;
  const int64_t Kp = c.Kp;
  for (int64_t d = 0; d < Kp; d += kLanes) {
    Vec d_run = load(r.d_total + d);
    for (int64_t i = rows - 1; i >= 0; --i) {
      const int64_t at = i * Kp + d, score = i * kChunk;
      const Vec row_decay = load(c.row_decay + at), run = load(c.runs + at);
      const Vec q = load(c.q + at), d_read_q = load(r.d_reads_q + at);
      Vec x = {}, d_read_x = {}, d_x = {};
      if constexpr (kErases) {
        x = load(c.x + at);
        d_read_x = load(r.d_reads_x + at);
      }
      d_run = fma(q, d_read_q, d_run);
      Vec d_q = run * d_read_q;
      if constexpr (kAfter) {
        d_run = fma(x, d_read_x, d_run);
        d_x = run * d_read_x;
      }
      const Vec diagonal = splat(r.d_qk[score + i]);
      d_q = fma(diagonal, load(c.k + at), d_q);
      store(r.d_k + at, fma(diagonal, q, load(r.d_k + at)));
      if constexpr (kIndependent) {
        const Vec diagonal_b = splat(r.d_qb[score + i]);
        d_q = fma(diagonal_b, load(c.b + at), d_q);
        store(r.d_b + at, fma(diagonal_b, q, load(r.d_b + at)));
      }
      Vec d_g = run * d_run, between = splat(1.0f);  // between: D_{j+1:i-1}
      for (int64_t j = i - 1; j >= 0; --j) {
        const int64_t from = j * Kp + d;
        reverse_pair<kErases, kAfter>(load(c.k + from) * between, row_decay, q, x, r.d_qk[score + j],
                                      r.d_xk[score + j], r.d_k + from, &d_q, &d_x, &d_g);
        if constexpr (kIndependent) {
          reverse_pair<true, false>(load(c.b + from) * between, row_decay, q, x, r.d_qb[score + j], r.d_xb[score + j],
                                    r.d_b + from, &d_q, &d_x, &d_g);
        }
        between = between * load(c.row_decay + from);
      }
      d_run = d_run * row_decay;
      if constexpr (kErases && !kAfter) {
        d_run = fma(x, d_read_x, d_run);
        d_x = fma(i > 0 ? load(c.runs + at - Kp) : splat(1.0f), d_read_x, d_x);
      }
      store(r.d_q + at, d_q);
      if constexpr (kErases) store(r.d_x + at, d_x);
      store(r.d_g + at, d_g);
    }
  }
}

struct Reverse {
  template <fw_gate kGate, fw_erase kErase>
  static void run(int64_t rows, const Chunk &c, const ReverseChunk &r) {
    if constexpr (kGate == FW_GATE_VECTOR) {
      reverse_vector<kErase>(rows, c, r);
    } else {
      reverse_scalar<kGate, kErase>(rows, c, r);
    }
  }
};

}  // namespace

void reverse_scores(const Problem &p, int64_t rows, const Chunk &c, const ReverseChunk &r) {
  recurrence::dispatch_axes<Reverse>(p, rows, c, r);
}

}  // namespace fw::FW_LEVEL
