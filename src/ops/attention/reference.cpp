// SPDX-License-Identifier: Apache-2.0
// Attention in fp64, a row and a head at a time, any dtype and strides. The truth for the vector path.
//
// Plan: the call's keys are turned once; each row takes its scores, their softmax and the weighted sum of the
// values. The backward takes each row's probabilities again and spreads the row's gradients over the keys that it
// saw. Scratch in doubles: turned keys [R,HK,D]; scores and their gradients [span] each; q and dq rows; backward
// dk [R,HK,D] and dv [R,HK,DV].
#include <math.h>

#include <initializer_list>

#include "core/ledger.hpp"
#include "core/operands.hpp"
#include "ops/attention/problem.hpp"

namespace fw::attention {
namespace {

struct Buffers {
  double *k;        // [R,HK,D] turned
  double *p, *dp;   // [span]
  double *q, *dq;   // [D]
  double *dk, *dv;  // [R,HK,D], [R,HK,DV]
};

Buffers lay_out(Ledger &ledger, const Problem &p) {
  Buffers b = {};
  if (p.rows() == 0) return b;
  const int64_t most = p.direction == FW_STEP ? p.capacity : p.T;
  const int64_t span = p.reach < most ? p.reach : most;
  const int64_t key_heads = product(p.rows(), p.HK);
  b.k = ledger.take<double>(product(key_heads, p.D));
  b.p = ledger.take<double>(span);
  b.q = ledger.take<double>(p.D);
  if (p.direction != FW_BACKWARD) return b;
  b.dp = ledger.take<double>(span);
  b.dq = ledger.take<double>(p.D);
  b.dk = ledger.take<double>(product(key_heads, p.D));
  b.dv = ledger.take<double>(product(key_heads, p.DV));
  return b;
}

double at(const fw_tensor &t, int64_t row, int64_t i) { return load_f64(t.data, t.dtype, row + i * t.strides[3]); }
void put(const fw_tensor &t, int64_t row, int64_t i, double x) {
  store_f64(t.data, t.dtype, row + i * t.strides[3], x);
}

// Turns a head in halves to `position`; back = true undoes it, which is also the gradient's way.
void turn(const Problem &p, double *x, int64_t position, bool back) {
  if (p.theta == 0) return;
  const int64_t half = p.D / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double angle =
        static_cast<double>(position) * pow(p.theta, -2.0 * static_cast<double>(i) / static_cast<double>(p.D));
    const double c = cos(angle), s = back ? -sin(angle) : sin(angle);
    const double x1 = x[i], x2 = x[i + half];
    x[i] = x1 * c - x2 * s;
    x[i + half] = x2 * c + x1 * s;
  }
}

// One row of one head: its keys, wherever they are.
struct Row {
  const Problem &p;
  const Buffers &b;
  Sequence s;
  int64_t t, hq, hk;   // row in the sequence, its head, the head of its keys
  int64_t low, count;  // positions [low, low + count)

  Row(const Problem &problem, const Buffers &buffers, const Sequence &sequence, int64_t row, int64_t head)
      : p(problem), b(buffers), s(sequence), t(row), hq(head), hk(head / problem.group()) {
    const int64_t position = s.first + t;
    low = position >= p.reach ? position - p.reach + 1 : 0;
    if (low < s.oldest) low = s.oldest;
    count = position - low + 1;
  }
  bool is_cached(int64_t i) const { return low + i < s.first; }
  int64_t key_row(int64_t i) const { return s.batch * p.T + s.begin + low + i - s.first; }
  double key(int64_t i, int64_t d) const {
    if (is_cached(i)) return at(p.k_cache, row_offset(p.k_cache, s.slot, (low + i) % p.capacity, hk), d);
    return b.k[(key_row(i) * p.HK + hk) * p.D + d];
  }
  double value(int64_t i, int64_t d) const {
    if (is_cached(i)) return at(p.v_cache, row_offset(p.v_cache, s.slot, (low + i) % p.capacity, hk), d);
    return at(p.v, row_offset(p.v, s.batch, s.begin + low + i - s.first, hk), d);
  }
  // b.q: the turned row of q times scale; b.p: the probabilities.
  void probabilities() const {
    const int64_t from = row_offset(p.q, s.batch, s.begin + t, hq);
    for (int64_t d = 0; d < p.D; ++d) b.q[d] = at(p.q, from, d) * p.scale;
    turn(p, b.q, s.first + t, false);
    double most = -INFINITY, sum = 0;
    for (int64_t i = 0; i < count; ++i) {
      double score = 0;
      for (int64_t d = 0; d < p.D; ++d) score += b.q[d] * key(i, d);
      b.p[i] = score;
      if (score > most) most = score;
    }
    for (int64_t i = 0; i < count; ++i) sum += b.p[i] = exp(b.p[i] - most);
    for (int64_t i = 0; i < count; ++i) b.p[i] /= sum;
  }
};

void turn_keys(const Problem &p, const Buffers &b, const Sequence &s) {
  for (int64_t t = 0; t < s.length; ++t) {
    for (int64_t h = 0; h < p.HK; ++h) {
      double *k = b.k + ((s.batch * p.T + s.begin + t) * p.HK + h) * p.D;
      for (int64_t d = 0; d < p.D; ++d) k[d] = at(p.k, row_offset(p.k, s.batch, s.begin + t, h), d);
      turn(p, k, s.first + t, false);
    }
  }
}

void forward_row(const Row &row) {
  const Problem &p = row.p;
  const int64_t to = row_offset(p.o, row.s.batch, row.s.begin + row.t, row.hq);
  row.probabilities();
  for (int64_t d = 0; d < p.DV; ++d) {
    double sum = 0;
    for (int64_t i = 0; i < row.count; ++i) sum += row.b.p[i] * row.value(i, d);
    put(p.o, to, d, sum);
  }
}

void backward_row(const Row &row) {
  const Problem &p = row.p;
  const Buffers &b = row.b;
  const int64_t from = row_offset(p.d_o, row.s.batch, row.s.begin + row.t, row.hq);
  row.probabilities();
  double mean = 0;
  for (int64_t i = 0; i < row.count; ++i) {
    b.dp[i] = 0;
    for (int64_t d = 0; d < p.DV; ++d) b.dp[i] += at(p.d_o, from, d) * row.value(i, d);
    mean += b.p[i] * b.dp[i];
  }
  for (int64_t d = 0; d < p.D; ++d) b.dq[d] = 0;
  for (int64_t i = 0; i < row.count; ++i) {
    const double ds = b.p[i] * (b.dp[i] - mean);
    double *dk = b.dk + (row.key_row(i) * p.HK + row.hk) * p.D, *dv = b.dv + (row.key_row(i) * p.HK + row.hk) * p.DV;
    for (int64_t d = 0; d < p.D; ++d) b.dq[d] += ds * row.key(i, d);
    for (int64_t d = 0; d < p.D; ++d) dk[d] += ds * b.q[d];
    for (int64_t d = 0; d < p.DV; ++d) dv[d] += b.p[i] * at(p.d_o, from, d);
  }
  turn(p, b.dq, row.s.first + row.t, true);
  const int64_t to = row_offset(p.dq, row.s.batch, row.s.begin + row.t, row.hq);
  for (int64_t d = 0; given(p.dq) && d < p.D; ++d) put(p.dq, to, d, b.dq[d] * p.scale);
}

// dk and dv of one sequence, which backward_row has summed.
void store_key_gradients(const Problem &p, const Buffers &b, const Sequence &s) {
  for (int64_t t = 0; t < s.length; ++t) {
    for (int64_t h = 0; h < p.HK; ++h) {
      const int64_t row = (s.batch * p.T + s.begin + t) * p.HK + h;
      turn(p, b.dk + row * p.D, s.first + t, true);
      for (int64_t d = 0; given(p.dk) && d < p.D; ++d)
        put(p.dk, row_offset(p.dk, s.batch, s.begin + t, h), d, b.dk[row * p.D + d]);
      for (int64_t d = 0; given(p.dv) && d < p.DV; ++d)
        put(p.dv, row_offset(p.dv, s.batch, s.begin + t, h), d, b.dv[row * p.DV + d]);
    }
  }
}

void store_cache(const Problem &p, const Buffers &b, const Sequence &s) {
  for (int64_t t = s.length > p.capacity ? s.length - p.capacity : 0; t < s.length; ++t) {
    const int64_t slot = (s.first + t) % p.capacity;
    for (int64_t h = 0; h < p.HK; ++h) {
      const double *k = b.k + ((s.batch * p.T + s.begin + t) * p.HK + h) * p.D;
      for (int64_t d = 0; d < p.D; ++d) put(p.k_cache, row_offset(p.k_cache, s.slot, slot, h), d, k[d]);
      for (int64_t d = 0; d < p.DV; ++d) {
        put(p.v_cache, row_offset(p.v_cache, s.slot, slot, h), d,
            at(p.v, row_offset(p.v, s.batch, s.begin + t, h), d));
      }
    }
  }
}

void zero_rows(const fw_tensor &t, int64_t batch, int64_t begin, int64_t end) {
  for (int64_t row = begin; given(t) && row < end; ++row) {
    for (int64_t h = 0; h < t.shape[2]; ++h) {
      for (int64_t d = 0; d < t.shape[3]; ++d) put(t, row_offset(t, batch, row, h), d, 0);
    }
  }
}

}  // namespace

uint64_t reference_workspace(const fw_context &, const Problem &p) {
  Ledger ledger(nullptr);
  lay_out(ledger, p);
  return ledger.bytes();
}

void reference_run(fw_context &, const Problem &p, void *workspace) {
  if (p.rows() == 0) return;
  Ledger ledger(workspace);
  const Buffers b = lay_out(ledger, p);
  if (p.direction == FW_BACKWARD) {
    for (int64_t i = 0; i < p.rows() * p.HK * p.D; ++i) b.dk[i] = 0;
    for (int64_t i = 0; i < p.rows() * p.HK * p.DV; ++i) b.dv[i] = 0;
  }
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence(p, n);
    if (s.slot < 0) {
      zero_rows(p.o, s.batch, s.begin, s.begin + s.length);
      continue;
    }
    turn_keys(p, b, s);
    for (int64_t hq = 0; hq < p.HQ; ++hq) {
      for (int64_t t = 0; t < s.length; ++t) {
        const Row row(p, b, s, t, hq);
        if (p.direction == FW_BACKWARD)
          backward_row(row);
        else
          forward_row(row);
      }
    }
    if (p.direction == FW_BACKWARD) store_key_gradients(p, b, s);
    if (p.direction == FW_STEP) store_cache(p, b, s);
  }
  for (const fw_tensor *t : {&p.o, &p.dq, &p.dk, &p.dv}) zero_rows(*t, 0, first_row_of_none(p), p.T);
}

}  // namespace fw::attention
