// SPDX-License-Identifier: Apache-2.0
// Limits in which the operators become something known, and the decay quotient with the form that it tempts one to
// write.
#include "ops/forms_helpers.hpp"

using namespace forms_test;

namespace {

// Rows t of an identity: keys that are all orthogonal to each other (K >= T).
Array axis_rows(int64_t T, int64_t K) {
  Array a(T * K);
  for (int64_t t = 0; t < T; ++t) a[t * K + t] = 1;
  return a;
}

// Two orthogonal keys share no edge, whatever the scalar gate does; when all are orthogonal there are no paths left
// and every token writes its own value: W = B, U = V', Z = B S_0.
TEST(Operators, OrthogonalKeysCutTheEdge) {
  Shape s{FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER, 6, 8, 3};
  Data d(s, 51);
  d.k = axis_rows(s.T, s.K);
  const Graph e = graph(d);
  EXPECT_EQ(largest(e.L), 0);
  EXPECT_EQ(erase(d), e.B);
  Output v(s.T * s.V);
  const fw_form_problem_f64 problem = d.problem();
  ASSERT_EQ(fw_form_normal_f64(&problem, nullptr, nullptr, v), FW_OK);
  EXPECT_EQ(write(d), v.array());
  EXPECT_LT(max_difference(feedback(d), multiply(e.B, d.S0, s.T, s.K, s.V)), kTight);
  // one shared direction between tokens 1 and 4 brings back that edge and no other
  d.k[4 * s.K + 1] = 0.5;
  const Graph with_edge = graph(d);
  for (int64_t i = 0; i < s.T; ++i) {
    for (int64_t j = 0; j < s.T; ++j) EXPECT_EQ(with_edge.L[i * s.T + j] != 0, i == 4 && j == 1);
  }
}

// beta = 0 makes x = 0 (the key erases nothing): without decay and initial state the output is causal linear
// attention.
TEST(Operators, NoEraseNoDecayIsLinearAttention) {
  for (fw_erase kind : {FW_ERASE_NONE, FW_ERASE_SHARED_AFTER, FW_ERASE_INDEPENDENT}) {
    Shape s{FW_GATE_NONE, kind, 9, 5, 4};
    s.has_state = false;
    s.has_beta = false;
    Data d(s, 52);
    if (kind == FW_ERASE_SHARED_AFTER) d.erase_gate = Array(s.T * s.K, 0.0);
    if (kind == FW_ERASE_INDEPENDENT) d.b = Array(s.T * s.K, 0.0);  // y = 0
    Array want(s.T * s.V);
    for (int64_t i = 0; i < s.T; ++i) {
      for (int64_t j = 0; j <= i; ++j) {
        double score = 0;
        for (int64_t c = 0; c < s.K; ++c)
          score += d.q[i * s.K + c] * d.k[j * s.K + c] / sqrt(static_cast<double>(s.K));
        for (int64_t c = 0; c < s.V; ++c) want[i * s.V + c] += score * d.v[j * s.V + c];
      }
    }
    EXPECT_LT(max_difference(recurrent(d).o, want), kTight);
    Output o(s.T * s.V);
    const fw_form_problem_f64 problem = d.problem();
    ASSERT_EQ(fw_form_chunk_f64(&problem, 4, FW_CHUNK_FACTORS, o, nullptr), FW_OK);
    EXPECT_LT(max_difference(o.array(), want), kTight);
  }
}

// Memory in directions orthogonal to every erase key x_t: w_t is a combination of the x, so W S_0 = 0 and no token
// reads it back. It is not safe for that: k_t may write over it.
TEST(Operators, MemoryBesideTheEraseKeysIsNotRead) {
  Shape s{FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER, 6, 7, 3, true};
  Data d(s, 53);
  for (int64_t t = 0; t < s.T; ++t)
    d.p[t * s.K + 0] = d.p[t * s.K + 1] = 0;                  // x has no part along axes 0 and 1; k has
  for (int64_t i = 2 * s.V; i < s.K * s.V; ++i) d.S0[i] = 0;  // memory lies there only
  EXPECT_LT(largest(multiply(erase(d), d.S0, s.T, s.K, s.V)), kTight);
  Data empty = d;
  empty.S0.assign(s.K * s.V, 0);
  EXPECT_LT(max_difference(feedback(d), feedback(empty)), kTight);
  // what is left of it at the end: the decayed memory, plus what the k_t wrote along axes 0 and 1
  double decay = 1;
  for (double g : d.g) decay *= exp(g);
  const Array end = recurrent(d).state;
  double written_over = 0;
  for (int64_t i = 0; i < 2 * s.V; ++i) written_over += fabs(end[i] - decay * d.S0[i]);
  EXPECT_GT(written_over, 0.1);
  // with k kept off those axes too, only the decay touches it
  for (int64_t t = 0; t < s.T; ++t) d.k[t * s.K + 0] = d.k[t * s.K + 1] = 0;
  const Array kept = recurrent(d).state;
  for (int64_t i = 0; i < 2 * s.V; ++i) EXPECT_NEAR(kept[i], decay * d.S0[i], kTight);
}

// A vector gate bends directions: x_t orthogonal to the memory is no longer enough, B_t = D_{1:t-1} x_t has to be.
// Here the memory is orthogonal to x_1 and x_2, and token 2 reads it all the same.
TEST(Operators, VectorDecayTurnsTheEraseKey) {
  Shape s{FW_GATE_VECTOR, FW_ERASE_SHARED_BEFORE, 2, 2, 1};
  Data d(s, 54);
  d.k = {1, 1, 1, 1};
  d.beta = {1, 1};
  d.S0 = {1, -1};
  d.g = {0, log(0.5), 0, 0};
  EXPECT_NEAR(multiply(graph(d).B, d.S0, 2, 2, 1)[0], 0, kTight);
  EXPECT_NEAR(multiply(graph(d).B, d.S0, 2, 2, 1)[1], 0.5, kTight);
}

// A scalar gate is a diagonal similarity: L = diag(gamma) L_0 diag(1/gamma) with gamma_i = exp(g_1 + ... + g_i) and
// L_0 the edges without a gate, so one inverse serves both.
TEST(Operators, ScalarGateIsADiagonalSimilarity) {
  const Shape s{FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER, 9, 5, 3};
  Data d(s, 55);
  const Array L = graph(d).L;
  Array gamma(s.T);
  double G = 0;
  for (int64_t t = 0; t < s.T; ++t) gamma[t] = exp(G += d.g[t]);
  d.s.gate = FW_GATE_NONE;
  d.g.clear();
  const Array L0 = graph(d).L;
  const auto inverse = [&](const Array &a) {
    Output X(s.T * s.T);
    EXPECT_EQ(fw_form_inverse_f64(FW_INVERSE_SUBSTITUTION, FW_F64, s.T, 0, a.data(), X), FW_OK);
    return X.array();
  };
  Array T = inverse(L0);
  for (int64_t i = 0; i < s.T; ++i) {
    for (int64_t j = 0; j < s.T; ++j) T[i * s.T + j] *= gamma[i] / gamma[j];
  }
  EXPECT_LT(max_difference(inverse(L), T), kTight);
}

// the quotient

TEST(Forms, DecayQuotientOnPaper) {
  const int64_t T = 12, K = 3, s = 2, e = 11, n = e - s;
  Random r(56);
  const Array g = r.array(T * K, -2, 0);
  Output near_factor(n * K), far_factor(n * K), phi(K), rest(n * K);
  ASSERT_EQ(fw_form_decay_quotient_f64(T, K, g.data(), s, e, near_factor, far_factor, phi, rest), FW_OK);
  const Array N = near_factor.array(), F = far_factor.array(), P = phi.array(), R = rest.array();
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t c = 0; c < K; ++c) {
      EXPECT_LE(N[i * K + c], 1);
      EXPECT_GE(F[i * K + c], 1);
      EXPECT_NEAR(R[i * K + c] / (P[c] * F[i * K + c]), 1, kTight);
      for (int64_t j = 0; j <= i; ++j) {  // D_{j+1:i} as a quotient
        double G = 0;
        for (int64_t t = j + 1; t <= i; ++t) G += g[(s + t) * K + c];
        EXPECT_NEAR(N[i * K + c] * F[j * K + c] / exp(G), 1, kTight);
      }
    }
  }
  EXPECT_EQ(Array(R.end() - K, R.end()), Array(K, 1.0));
}

// g = -1 a token in fp32: far_factor is infinite from the 89th token on (e^88.72 = 3.4e38), where near_factor is
// still a number; their product is wrong long before the products of decays notice anything, and phi * far_factor
// becomes 0 * inf.
TEST(Forms, FarFactorOverflowsInFp32) {
  const int64_t T = 128;
  std::vector<float> g(T, -1.0f), N(T), F(T), P(1), R(T);
  ASSERT_EQ(fw_form_decay_quotient_f32(T, 1, g.data(), 0, T, N.data(), F.data(), P.data(), R.data()), FW_OK);
  EXPECT_TRUE(std::isfinite(F[87]));
  EXPECT_TRUE(std::isinf(F[88]));
  EXPECT_GT(N[88], 0);
  EXPECT_EQ(P[0], 0);
  EXPECT_TRUE(std::isnan(P[0] * F[T - 1]));
  EXPECT_EQ(R[T - 1], 1);
  EXPECT_NEAR(R[T - 2], exp(-1), 1e-6);
  // one strong gate does it within two tokens, g = -inf at once
  const float strong[] = {-100.0f, -1.0f}, reset[] = {-INFINITY, -1.0f};
  ASSERT_EQ(fw_form_decay_quotient_f32(2, 1, strong, 0, 2, N.data(), F.data(), P.data(), R.data()), FW_OK);
  EXPECT_TRUE(std::isinf(F[1]));
  ASSERT_EQ(fw_form_decay_quotient_f32(2, 1, reset, 0, 2, N.data(), F.data(), P.data(), R.data()), FW_OK);
  EXPECT_TRUE(std::isnan(N[1] * F[0]));
  EXPECT_NEAR(R[0], exp(-1), 1e-6);
}

// (Q D) S_0 + (Q Kd^T . M) V' - (Q Yd^T . M) Z, Kd and Yd decayed to the end of the sequence.
Array tempting_form(const Data &d) {
  const Shape &s = d.s;
  Output y(s.T * s.K), v(s.T * s.V);
  const fw_form_problem_f64 problem = d.problem();
  EXPECT_EQ(fw_form_normal_f64(&problem, nullptr, y, v), FW_OK);
  const Array Y = y.array(), written = v.array(), Z = feedback(d);
  Array o(s.T * s.V);
  for (int64_t i = 0; i < s.T; ++i) {
    for (int64_t c = 0; c < s.K; ++c) {
      const double q = d.q[i * s.K + c] / sqrt(static_cast<double>(s.K));
      double start = 1;
      for (int64_t t = 0; t <= i; ++t) start *= d.decay(t, c);
      for (int64_t n = 0; n < s.V; ++n) o[i * s.V + n] += q * start * d.S0[c * s.V + n];
      for (int64_t j = 0; j <= i; ++j) {
        double end = 1;
        for (int64_t t = j + 1; t < s.T; ++t) end *= d.decay(t, c);
        for (int64_t n = 0; n < s.V; ++n) {
          o[i * s.V + n] += q * end * d.k[j * s.K + c] * written[j * s.V + n];
          if (s.erase != FW_ERASE_NONE) o[i * s.V + n] -= q * end * Y[j * s.K + c] * Z[j * s.V + n];
        }
      }
    }
  }
  return o;
}

// One decayed K and Y for all rows: exact for the last token, wrong for the others by as much as the output itself;
// without a gate nothing decays and it is right everywhere.
TEST(Forms, TemptingFormIsRightForTheLastTokenAlone) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 57);
    const Result want = definition(d);
    Output o(s.T * s.V);
    const fw_form_problem_f64 problem = d.problem();
    ASSERT_EQ(fw_form_tempting_f64(&problem, o), FW_OK);
    const Array got = o.array();
    const Array printed = tempting_form(d);
    EXPECT_LT(max_difference(got, printed), kTight) << describe(s);
    const auto last = [&](const Array &x) { return Array(x.end() - s.V, x.end()); };
    EXPECT_LT(max_difference(last(got), last(want.o)), kTight) << describe(s);
    if (s.gate == FW_GATE_NONE) {
      EXPECT_LT(max_difference(got, want.o), kTight) << describe(s);
      continue;
    }
    for (int64_t t = 0; t + 1 < s.T; ++t) {
      const Array row(got.begin() + t * s.V, got.begin() + (t + 1) * s.V);
      const Array true_row(want.o.begin() + t * s.V, want.o.begin() + (t + 1) * s.V);
      EXPECT_GT(max_difference(row, true_row), 1e-3) << describe(s) << " token " << t;
    }
  }
}

}  // namespace
