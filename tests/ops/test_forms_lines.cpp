// SPDX-License-Identifier: Apache-2.0
// The numbered lines of docs/math.md that no other test writes out: each sum as it stands there, against the
// definition and the functions.
#include "ops/forms_helpers.hpp"

using namespace forms_test;

namespace {

// The normal form of a problem, its feedback, and decays by their definition: no running products, no quotients.
struct Lines {
  const Data &d;
  int64_t T, K, V;
  Array x, y, v, Z, S0;

  explicit Lines(const Data &data) : d(data), T(data.s.T), K(data.s.K), V(data.s.V) {
    Output x_out(T * K), y_out(T * K), v_out(T * V);
    const fw_form_problem_f64 problem = d.problem();
    EXPECT_EQ(fw_form_normal_f64(&problem, x_out, y_out, v_out), FW_OK);
    x = x_out.array(), y = y_out.array(), v = v_out.array(), Z = feedback(d);
    S0 = d.S0.empty() ? Array(K * V) : d.S0;
  }
  // D_{first:last} of channel i, tokens counted from 0; 1 when empty
  double decay(int64_t first, int64_t last, int64_t i) const {
    double product = 1;
    for (int64_t t = first; t <= last; ++t) product *= d.decay(t, i);
    return product;
  }
  // row r of `read` times the decays of tokens first .. last times row j of `along`
  double product(const Array &read, int64_t r, const Array &along, int64_t j, int64_t first, int64_t last) const {
    double sum = 0;
    for (int64_t i = 0; i < K; ++i) sum += read[r * K + i] * decay(first, last, i) * along[j * K + i];
    return sum;
  }
  // D_{1:t} S_0 + sum over j <= end of D_{j+1:t} (k_j v'_j^T - y_j z_j^T), t the decays' last token
  Array state(int64_t t, int64_t end) const {
    Array S(K * V);
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t n = 0; n < V; ++n) {
        S[i * V + n] = decay(0, t, i) * S0[i * V + n];
        for (int64_t j = 0; j <= end; ++j) {
          S[i * V + n] += decay(j + 1, t, i) * (d.k[j * K + i] * v[j * V + n] - y[j * K + i] * Z[j * V + n]);
        }
      }
    }
    return S;
  }
};

// (2), for every t.
TEST(Forms, StateIsTheSumOfDecayedWritesAndErasures) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 71);
    const Lines lines(d);
    const Result want = definition(d);
    for (int64_t t = 0; t < s.T; ++t)
      EXPECT_LT(max_difference(lines.state(t, t), want.states[static_cast<size_t>(t)]), kTight) << describe(s);
  }
}

// (3): L, L_k and B entry by entry, and what token i reads.
TEST(Operators, EdgesAreProductsThroughTheDecaysBetween) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 72);
    const Lines lines(d);
    const Graph e = graph(d);
    for (int64_t i = 0; i < s.T; ++i) {
      Array z(s.V);
      for (int64_t n = 0; n < s.V; ++n) {
        for (int64_t c = 0; c < s.K; ++c) z[n] += lines.S0[c * s.V + n] * e.B[i * s.K + c];
        for (int64_t j = 0; j < i; ++j)
          z[n] += e.L_k[i * s.T + j] * lines.v[j * s.V + n] - e.L[i * s.T + j] * lines.Z[j * s.V + n];
        EXPECT_NEAR(z[n], lines.Z[i * s.V + n], kTight) << describe(s);
      }
      for (int64_t c = 0; c < s.K; ++c)
        EXPECT_NEAR(e.B[i * s.K + c], lines.decay(0, i - 1, c) * lines.x[i * s.K + c], kTight) << describe(s);
      for (int64_t j = 0; j < s.T; ++j) {
        const bool is_edge = j < i;
        EXPECT_NEAR(e.L[i * s.T + j], is_edge ? lines.product(lines.x, i, lines.y, j, j + 1, i - 1) : 0, kTight)
            << describe(s);
        EXPECT_NEAR(e.L_k[i * s.T + j], is_edge ? lines.product(lines.x, i, d.k, j, j + 1, i - 1) : 0, kTight)
            << describe(s);
      }
    }
  }
}

// (4) in matrices: (I + L) Z = B S_0 + L_k V'.
TEST(Operators, FeedbackSolvesTheTriangularSystem) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 73);
    const Lines lines(d);
    const Graph e = graph(d);
    Array left = multiply(e.L, lines.Z, s.T, s.T, s.V), right = multiply(e.L_k, lines.v, s.T, s.T, s.V);
    const Array of_state = multiply(e.B, lines.S0, s.T, s.K, s.V);
    for (size_t i = 0; i < left.size(); ++i) left[i] += lines.Z[i], right[i] += of_state[i];
    EXPECT_LT(max_difference(left, right), kTight) << describe(s);
  }
}

// (7): O = Qd S_0 + QK V' - QY Z, for the whole sequence.
TEST(Forms, OutputsAreReadingsOfStateWritesAndErasures) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 74);
    const Lines lines(d);
    Array q = d.q, Qd(s.T * s.K), QK(s.T * s.T), QY(s.T * s.T);
    for (double &x : q) x /= sqrt(static_cast<double>(s.K));
    for (int64_t i = 0; i < s.T; ++i) {
      for (int64_t c = 0; c < s.K; ++c) Qd[i * s.K + c] = lines.decay(0, i, c) * q[i * s.K + c];
      for (int64_t j = 0; j <= i; ++j) {
        QK[i * s.T + j] = lines.product(q, i, d.k, j, j + 1, i);
        QY[i * s.T + j] = lines.product(q, i, lines.y, j, j + 1, i);
      }
    }
    Array o = multiply(Qd, lines.S0, s.T, s.K, s.V);
    const Array written = multiply(QK, lines.v, s.T, s.T, s.V), erased = multiply(QY, lines.Z, s.T, s.T, s.V);
    for (size_t i = 0; i < o.size(); ++i) o[i] += written[i] - erased[i];
    EXPECT_LT(max_difference(o, definition(d).o), kTight) << describe(s);
  }
}

// (8): S_end = D_{1:C} S + Kd^T V' - Yd^T Z.
TEST(Forms, EndStateIsOneDecayAndTwoProducts) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 75);
    const Lines lines(d);
    const auto transposed_and_decayed = [&](const Array &rows) {
      Array out(s.K * s.T);
      for (int64_t i = 0; i < s.K; ++i) {
        for (int64_t j = 0; j < s.T; ++j) out[i * s.T + j] = lines.decay(j + 1, s.T - 1, i) * rows[j * s.K + i];
      }
      return out;
    };
    Array S = multiply(transposed_and_decayed(d.k), lines.v, s.K, s.T, s.V);
    const Array erased = multiply(transposed_and_decayed(lines.y), lines.Z, s.K, s.T, s.V);
    for (int64_t i = 0; i < s.K; ++i) {
      for (int64_t n = 0; n < s.V; ++n)
        S[i * s.V + n] += lines.decay(0, s.T - 1, i) * lines.S0[i * s.V + n] - erased[i * s.V + n];
    }
    EXPECT_LT(max_difference(S, definition(d).state), kTight) << describe(s);
  }
}

// Slip: the state after token r as a sum over all tokens of the chunk. The later ones have written nothing yet.
TEST(Forms, StateSumsToItsOwnToken) {
  const Data d(Shape{FW_GATE_VECTOR, FW_ERASE_SHARED_AFTER, 8, 5, 3}, 76);
  const Lines lines(d);
  const Result want = definition(d);
  for (int64_t r = 0; r + 1 < d.s.T; ++r) {
    EXPECT_LT(max_difference(lines.state(r, r), want.states[static_cast<size_t>(r)]), kTight);
    EXPECT_GT(max_difference(lines.state(r, d.s.T - 1), want.states[static_cast<size_t>(r)]), 0.05);
  }
}

// Slip: the delta rule as a gradient step of |v - k^T S|^2 / 2 with S of V x K. That product has sizes only when V =
// K; then its step is another one. The loss is |v - S k|^2 / 2.
TEST(Forms, LossReadsTheMemoryByItsKey) {
  const Data d(Shape{FW_GATE_NONE, FW_ERASE_SHARED_AFTER, 1, 4, 4}, 77);
  const int64_t n = 4;
  Array S(n * n);  // V x K
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) S[j * n + i] = d.S0[i * n + j];
  }
  const auto loss = [&](const Array &M, bool is_printed) {
    double sum = 0;
    for (int64_t j = 0; j < n; ++j) {
      double read = 0;
      for (int64_t i = 0; i < n; ++i) read += (is_printed ? M[i * n + j] : M[j * n + i]) * d.k[i];
      sum += 0.5 * (d.v[j] - read) * (d.v[j] - read);
    }
    return sum;
  };
  for (bool is_printed : {false, true}) {
    Array next(n * n);
    for (int64_t at = 0; at < n * n; ++at) {
      Array up = S, down = S;  // a quadratic's central difference is exact but for rounding: 1e-16 / 1e-2
      up[at] += 0.01, down[at] -= 0.01;
      next[at % n * n + at / n] = S[at] - d.beta[0] * (loss(up, is_printed) - loss(down, is_printed)) / 0.02;
    }
    const double gap = max_difference(next, definition(d).state);
    if (is_printed) {
      EXPECT_GT(gap, 0.05);
    } else {
      EXPECT_LT(gap, kTight);
    }
  }
}

// Slip: a reference that takes a scale and reads o = S^T q. The scale multiplies what is read, the state not.
TEST(Forms, ScaleMultipliesWhatIsRead) {
  const Data d(Shape{FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER, 8, 5, 3}, 78);
  const auto outputs = [&](double scale) {
    fw_form_problem_f64 problem = d.problem();
    problem.scale = scale;
    Output o(d.s.T * d.s.V), state(d.s.K * d.s.V);
    EXPECT_EQ(fw_form_recurrent_f64(&problem, o, state), FW_OK);
    EXPECT_LT(max_difference(state.array(), definition(d).state), kTight);
    return o.array();
  };
  Array printed(d.s.T * d.s.V), right;
  const Result r = definition(d);
  for (int64_t t = 0; t < d.s.T; ++t) {
    for (int64_t n = 0; n < d.s.V; ++n) {
      for (int64_t i = 0; i < d.s.K; ++i)
        printed[t * d.s.V + n] += r.states[static_cast<size_t>(t)][i * d.s.V + n] * d.q[t * d.s.K + i];
    }
  }
  right = printed;
  for (double &x : right) x *= 0.4;
  EXPECT_LT(max_difference(outputs(0.4), right), kTight);
  EXPECT_GT(max_difference(outputs(0.4), printed), 0.05);
  EXPECT_LT(max_difference(outputs(1), printed), kTight);
}

}  // namespace
