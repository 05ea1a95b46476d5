// SPDX-License-Identifier: Apache-2.0
// Slips of published derivations, written out as printed: each is shown to differ from the recurrence, and the
// corrected line to agree. docs/math.md, "Slips in print", says where each stands.
#include "ops/forms_helpers.hpp"

using namespace forms_test;

namespace {

// What the chunk formulas of print are made of, for one chunk that is the whole sequence and one shared key read
// after the decay.
struct Chunk {
  Data d;
  int64_t T, K, V;
  Array gamma;   // [T,K] product of the decays up to and with each token
  Array W, U;    // as printed: U - W S is the pseudo-value
  Array pseudo;  // [T,V]

  explicit Chunk(fw_gate gate, uint64_t seed)
      : d(Shape{gate, FW_ERASE_SHARED_AFTER, 8, 5, 3}, seed), T(8), K(5), V(3) {
    gamma = Array(T * K, 1.0);
    for (int64_t t = 0; t < T; ++t) {
      for (int64_t i = 0; i < K; ++i) gamma[t * K + i] = d.decay(t, i) * (t > 0 ? gamma[(t - 1) * K + i] : 1.0);
    }
    W = erase(d), U = write(d), pseudo = U;
    const Array WS = multiply(W, d.S0, T, K, V);
    for (size_t i = 0; i < pseudo.size(); ++i) pseudo[i] -= WS[i];
  }
  double query(int64_t t, int64_t i) const { return d.q[t * K + i] / sqrt(static_cast<double>(K)); }

  // o_i = (gamma_i * q_i)^T S_0 + sum over j <= i of weight(i, j) pseudo_j
  template <class Weight>
  Array output(Weight weight) const {
    Array o(T * V);
    for (int64_t i = 0; i < T; ++i) {
      for (int64_t n = 0; n < V; ++n) {
        for (int64_t c = 0; c < K; ++c) o[i * V + n] += gamma[i * K + c] * query(i, c) * d.S0[c * V + n];
        for (int64_t j = 0; j <= i; ++j) o[i * V + n] += weight(i, j) * pseudo[j * V + n];
      }
    }
    return o;
  }
};

// Gated delta rule, output of a chunk: the mask in Q K^T . M is printed as the causal mask of ones; it has to carry
// gamma_i / gamma_j.
TEST(Forms, GatedOutputNeedsTheDecayMask) {
  const Chunk c(FW_GATE_SCALAR, 61);
  const auto score = [&](int64_t i, int64_t j) {
    double sum = 0;
    for (int64_t k = 0; k < c.K; ++k) sum += c.query(i, k) * c.d.k[j * c.K + k];
    return sum;
  };
  const Array want = definition(c.d).o;
  EXPECT_GT(max_difference(c.output(score), want), 0.05);
  const Array right =
      c.output([&](int64_t i, int64_t j) { return score(i, j) * c.gamma[i * c.K] / c.gamma[j * c.K]; });
  EXPECT_LT(max_difference(right, want), kTight);
}

// Delta rule, output of token r: the sum is printed with q of the token summed over, (k_i . q_i), where q_r belongs.
TEST(Forms, ScoresUseTheQueryOfTheirRow) {
  const Chunk c(FW_GATE_NONE, 62);
  const auto score = [&](int64_t row, int64_t j) {
    double sum = 0;
    for (int64_t k = 0; k < c.K; ++k) sum += c.query(row, k) * c.d.k[j * c.K + k];
    return sum;
  };
  const Array want = definition(c.d).o;
  EXPECT_GT(max_difference(c.output([&](int64_t, int64_t j) { return score(j, j); }), want), 0.05);
  EXPECT_LT(max_difference(c.output([&](int64_t i, int64_t j) { return score(i, j); }), want), kTight);
}

// "O = Q S_end^T" as the first line of the outputs of a chunk: true for its last row alone.
TEST(Forms, OutputsDoNotReadTheEndState) {
  const Chunk c(FW_GATE_NONE, 63);
  const Result want = definition(c.d);
  Array q = c.d.q;
  for (double &x : q) x /= sqrt(static_cast<double>(c.K));
  const Array printed = multiply(q, want.state, c.T, c.K, c.V);
  EXPECT_LT(max_difference(Array(printed.end() - c.V, printed.end()), Array(want.o.end() - c.V, want.o.end())),
            kTight);
  EXPECT_GT(max_difference(printed, want.o), 0.05);
}

// S_end = Diag(gamma_C) S + sum of Diag(decay) k_j pseudo_j^T, with the decay of a write taken over tokens first ..
// C.
Array end_state(const Chunk &c, int64_t first_after_write) {
  Array S = c.d.S0;
  for (int64_t i = 0; i < c.K; ++i) {
    for (int64_t n = 0; n < c.V; ++n) {
      S[i * c.V + n] *= c.gamma[(c.T - 1) * c.K + i];
      for (int64_t j = 0; j < c.T; ++j) {
        double decay = 1;
        for (int64_t t = j + first_after_write; t < c.T; ++t) decay *= c.d.decay(t, i);
        S[i * c.V + n] += decay * c.d.k[j * c.K + i] * c.pseudo[j * c.V + n];
      }
    }
  }
  return S;
}

// gamma^{i->r} defined as the product over i .. r: then a write would be decayed by its own token's gate. It is i+1
// .. r.
TEST(Forms, DecayOfAWriteStartsAtTheNextToken) {
  const Chunk c(FW_GATE_VECTOR, 64);
  const Array want = definition(c.d).state;
  EXPECT_GT(max_difference(end_state(c, 0), want), 0.05);
  EXPECT_LT(max_difference(end_state(c, 1), want), kTight);
}

// Gradient of <dS, S_end> with respect to pseudo-value j: printed as k_j^T (Diag(gamma_C) dS). It is (decayed k_j)^T
// dS, the decay from j + 1 on. S_end is linear in the pseudo-values, so a difference of two states is the derivative.
TEST(Forms, GradientOfAWriteDecaysFromItsToken) {
  Chunk c(FW_GATE_VECTOR, 65);
  Random r(66);
  const Array dS = r.array(c.K * c.V, -1, 1), base = end_state(c, 1);
  double printed_gap = 0;
  for (int64_t j = 0; j < c.T; ++j) {
    c.pseudo[j * c.V] += 1;
    const Array moved = end_state(c, 1);
    c.pseudo[j * c.V] -= 1;
    double slope = 0, right = 0, printed = 0;
    for (int64_t i = 0; i < c.K; ++i) {
      for (int64_t n = 0; n < c.V; ++n) slope += dS[i * c.V + n] * (moved[i * c.V + n] - base[i * c.V + n]);
      const double end = c.gamma[(c.T - 1) * c.K + i];
      right += c.d.k[j * c.K + i] * end / c.gamma[j * c.K + i] * dS[i * c.V];
      printed += c.d.k[j * c.K + i] * end * dS[i * c.V];
    }
    EXPECT_NEAR(slope, right, kTight);
    printed_gap = fmax(printed_gap, fabs(printed - slope));
  }
  EXPECT_GT(printed_gap, 0.1);
}

// Comba reads S_{t-1} before the decay. A reference that decays first computes another operator.
TEST(Forms, ReadingBeforeAndAfterTheDecayDiffer) {
  Shape s{FW_GATE_SCALAR, FW_ERASE_SHARED_BEFORE, 9, 5, 3, true};
  Data d(s, 67);
  const Array before = recurrent(d).o;
  d.s.erase = FW_ERASE_SHARED_AFTER;
  EXPECT_GT(max_difference(recurrent(d).o, before), 0.02);
  // reading after with the key divided by the gate is reading before
  for (int64_t t = 0; t < s.T; ++t) {
    for (int64_t i = 0; i < s.K; ++i) d.p[t * s.K + i] /= exp(d.g[t]);
  }
  EXPECT_LT(max_difference(recurrent(d).o, before), kTight);
}

// Independent keys: a reads and b is written along. Swapped, the operator is another one.
TEST(Forms, EraseKeysAreNotInterchangeable) {
  const Shape s{FW_GATE_NONE, FW_ERASE_INDEPENDENT, 9, 5, 3};
  Data d(s, 68);
  const Array want = recurrent(d).o;
  std::swap(d.a, d.b);
  EXPECT_GT(max_difference(recurrent(d).o, want), 0.02);
}

// I + a b^T with b = -lambda a is a contraction only while lambda |a|^2 <= 2: opposite directions are not enough. And
// they are more than eigenvalues ask for: a . b in [-2, 0] keeps every eigenvalue within [-1, 1], yet two such steps
// can grow.
TEST(Forms, OppositeKeysMustBeShort) {
  const auto growth = [](const Array &a, const Array &b, int64_t T) {
    Shape s{FW_GATE_NONE, FW_ERASE_INDEPENDENT, T, 2, 1};
    Data d(s, 69);
    for (int64_t t = 0; t < T; ++t) {
      const int64_t from = (t % static_cast<int64_t>(a.size() / 2)) * 2;
      for (int64_t i = 0; i < 2; ++i) d.a[t * 2 + i] = a[from + i], d.b[t * 2 + i] = b[from + i];
    }
    Output P(4), H(2);
    const fw_form_problem_f64 problem = d.problem();
    EXPECT_EQ(fw_form_segment_f64(&problem, 0, T, FW_BY_RECURSION, P, H), FW_OK);
    return largest(P.array());
  };
  EXPECT_LE(growth({1, 0}, {-2, 0}, 20), 1);
  EXPECT_GT(growth({1, 0}, {-2.5, 0}, 20), 1000);
  // a . b = -1: each step has eigenvalues 0 and 1, the product of two has 9
  EXPECT_GT(growth({1, -1, 1, 1}, {-2, -1, -2, 1}, 20), 1000);
}

// (I - tril(beta K K^T))^-1 in place of (I + tril(..))^-1.
TEST(Inverse, MinusSignIsAnotherMatrix) {
  const Chunk c(FW_GATE_NONE, 70);
  Array L = graph(c.d).L;
  for (double &x : L) x = -x;
  Output X(c.T * c.T);
  ASSERT_EQ(fw_form_inverse_f64(FW_INVERSE_SUBSTITUTION, FW_F64, c.T, 0, L.data(), X), FW_OK);
  Array v(c.T * c.V);
  for (int64_t t = 0; t < c.T; ++t) {
    for (int64_t n = 0; n < c.V; ++n) v[t * c.V + n] = c.d.value(t, n);
  }
  EXPECT_GT(max_difference(multiply(X.array(), v, c.T, c.T, c.V), c.U), 0.05);
}

}  // namespace
