// SPDX-License-Identifier: Apache-2.0
// Erase W, write U, feedback Z: four ways each, the paths they sum over, their identity, and segments.
#include "ops/forms_helpers.hpp"

using namespace forms_test;

namespace {

TEST(Operators, FourWaysAgree) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 21);
    const Array W = erase(d, FW_BY_RECURSION), U = write(d, FW_BY_RECURSION), Z = feedback(d, FW_BY_RECURSION);
    for (fw_form_method method : {FW_BY_INVERSE, FW_BY_SUBSTITUTION, FW_BY_PATHS}) {
      EXPECT_LT(max_difference(erase(d, method), W), kTight) << describe(s) << " method " << method;
      EXPECT_LT(max_difference(write(d, method), U), kTight) << describe(s) << " method " << method;
      EXPECT_LT(max_difference(feedback(d, method), Z), kTight) << describe(s) << " method " << method;
    }
    if (s.erase != FW_ERASE_NONE) {
      EXPECT_GT(largest(W), 0.01);
      EXPECT_GT(largest(Z), 0.01);
    }
  }
}

// z_t = S_{t-1}^T x_t, with the states of the definition.
TEST(Operators, FeedbackIsWhatTheTokenReads) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 22);
    Output x(s.T * s.K);
    const fw_form_problem_f64 problem = d.problem();
    ASSERT_EQ(fw_form_normal_f64(&problem, x, nullptr, nullptr), FW_OK);
    const Array X = x.array();
    const Result r = definition(d);
    Array want(s.T * s.V);
    for (int64_t t = 0; t < s.T; ++t) {
      const Array &S = t == 0 ? d.S0 : r.states[t - 1];
      for (int64_t i = 0; i < s.K; ++i) {
        for (int64_t j = 0; j < s.V; ++j) want[t * s.V + j] += X[t * s.K + i] * S[i * s.V + j];
      }
    }
    EXPECT_LT(max_difference(feedback(d), want), kTight) << describe(s);
  }
}

// Z - W S_0 - V' + U, which one key makes 0.
Array identity_gap(const Data &d) {
  const Shape &s = d.s;
  Output v(s.T * s.V);
  const fw_form_problem_f64 problem = d.problem();
  EXPECT_EQ(fw_form_normal_f64(&problem, nullptr, nullptr, v), FW_OK);
  Array gap = feedback(d);
  const Array WS = multiply(erase(d), d.S0, s.T, s.K, s.V), U = write(d), written = v.array();
  for (size_t i = 0; i < gap.size(); ++i) gap[i] += U[i] - written[i] - WS[i];
  return gap;
}

TEST(Operators, SharedKeyGivesFeedbackFromEraseAndWrite) {
  for (const Shape &s : all_shapes()) {
    if (s.erase == FW_ERASE_INDEPENDENT) continue;
    EXPECT_LT(largest(identity_gap(Data(s, 23))), kTight) << describe(s);
  }
}

TEST(Operators, IndependentKeysBreakTheIdentity) {
  for (const Shape &s : all_shapes()) {
    if (s.erase != FW_ERASE_INDEPENDENT) continue;
    Data d(s, 24);
    const Array gap = identity_gap(d);
    EXPECT_GT(largest(gap), 0.05) << describe(s);
    // the gap is (T L_k + T_k - I) V'
    const Graph e = graph(d);
    const auto inverse = [&](const Array &L) {
      Output X(s.T * s.T);
      EXPECT_EQ(fw_form_inverse_f64(FW_INVERSE_SUBSTITUTION, FW_F64, s.T, 0, L.data(), X), FW_OK);
      return X.array();
    };
    Array M = multiply(inverse(e.L), e.L_k, s.T, s.T, s.T);
    const Array T_k = inverse(e.L_k);
    for (int64_t i = 0; i < s.T * s.T; ++i) M[i] += T_k[i] - (i % (s.T + 1) == 0 ? 1 : 0);
    EXPECT_LT(max_difference(gap, multiply(M, d.v, s.T, s.T, s.V)), kTight) << describe(s);
    // with b = -k and a = beta k they are one key again, and the gap closes
    for (int64_t t = 0; t < s.T; ++t) {
      for (int64_t i = 0; i < s.K; ++i) {
        d.a[t * s.K + i] = 0.8 * d.k[t * s.K + i];
        d.b[t * s.K + i] = -d.k[t * s.K + i];
      }
    }
    EXPECT_LT(largest(identity_gap(d)), kTight) << describe(s);
  }
}

using HopsFn = fw_status (*)(const fw_form_problem_f64 *, int64_t, double *);
std::vector<Array> run_hops(HopsFn fn, const Data &d, int64_t n_hops, int64_t columns) {
  const int64_t size = d.s.T * columns;
  Output out(n_hops * size);
  const fw_form_problem_f64 problem = d.problem();
  EXPECT_EQ(fn(&problem, n_hops, out), FW_OK) << fw_last_error();
  const Array all = out.array();
  std::vector<Array> terms;
  for (int64_t m = 0; m < n_hops; ++m) terms.emplace_back(all.begin() + m * size, all.begin() + (m + 1) * size);
  return terms;
}

// Adds to sums[m] row `to` the weight of every path from any token to `to` with m edges, times the source's row.
void add_paths(const Array &L, const Array &source, int64_t T, int64_t columns, int64_t at, int64_t to, int64_t m,
               double weight, std::vector<Array> &sums) {
  for (int64_t c = 0; c < columns; ++c) sums[m][to * columns + c] += weight * source[at * columns + c];
  for (int64_t j = 0; j < at; ++j) add_paths(L, source, T, columns, j, to, m + 1, -weight * L[at * T + j], sums);
}

// Every increasing sequence of tokens is walked: 2^(T-1) of them end at the last token.
TEST(Operators, HopTermsAreSumsOverPaths) {
  for (fw_erase kind : {FW_ERASE_SHARED_AFTER, FW_ERASE_SHARED_BEFORE, FW_ERASE_INDEPENDENT}) {
    const Shape s{FW_GATE_VECTOR, kind, 7, 4, 3};
    const Data d(s, 25);
    const Graph e = graph(d);
    std::vector<Array> W(s.T, Array(s.T * s.K)), U(s.T, Array(s.T * s.V)), Z = U;
    const Array source = feedback_source_of(d);
    Output v(s.T * s.V);
    const fw_form_problem_f64 problem = d.problem();
    ASSERT_EQ(fw_form_normal_f64(&problem, nullptr, nullptr, v), FW_OK);
    for (int64_t t = 0; t < s.T; ++t) {
      add_paths(e.L, e.B, s.T, s.K, t, t, 0, 1, W);
      add_paths(e.L_k, v.array(), s.T, s.V, t, t, 0, 1, U);
      add_paths(e.L, source, s.T, s.V, t, t, 0, 1, Z);
    }
    const auto got_W = run_hops(fw_form_erase_hops_f64, d, s.T, s.K),
               got_U = run_hops(fw_form_write_hops_f64, d, s.T, s.V),
               got_Z = run_hops(fw_form_feedback_hops_f64, d, s.T, s.V);
    for (int64_t m = 0; m < s.T; ++m) {
      EXPECT_LT(max_difference(got_W[m], W[m]), kTight) << "erase, hops " << m;
      EXPECT_LT(max_difference(got_U[m], U[m]), kTight) << "write, hops " << m;
      EXPECT_LT(max_difference(got_Z[m], Z[m]), kTight) << "feedback, hops " << m;
    }
  }
}

TEST(Operators, HopsEndAtTMinusOne) {
  const Shape s{FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER, 6, 4, 3};
  const Data d(s, 26);
  const auto terms = run_hops(fw_form_erase_hops_f64, d, s.T + 3, s.K);
  Array sum(s.T * s.K);
  for (const Array &term : terms) {
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += term[i];
  }
  EXPECT_LT(max_difference(sum, erase(d)), kTight);
  EXPECT_GT(largest(terms[s.T - 1]), 0);
  for (int64_t m = s.T; m < s.T + 3; ++m) EXPECT_EQ(largest(terms[m]), 0);
  EXPECT_EQ(terms[0], graph(d).B);
}

// segments

struct Map {
  Array P, H;
};
Map segment(const Data &d, int64_t begin, int64_t end, fw_form_method method) {
  Output P(d.s.K * d.s.K), H(d.s.K * d.s.V);
  const fw_form_problem_f64 problem = d.problem();
  EXPECT_EQ(fw_form_segment_f64(&problem, begin, end, method, P, H), FW_OK) << fw_last_error();
  return {P.array(), H.array()};
}
Array apply(const Map &map, const Array &S, const Shape &s) {
  Array result = multiply(map.P, S, s.K, s.K, s.V);
  for (size_t i = 0; i < result.size(); ++i) result[i] += map.H[i];
  return result;
}

TEST(Operators, AnySegmentIsAnAffineMap) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 27);
    const Result r = definition(d);
    for (fw_form_method method : {FW_BY_RECURSION, FW_BY_INVERSE, FW_BY_SUBSTITUTION, FW_BY_PATHS}) {
      for (int64_t begin = 0; begin <= s.T; begin += 3) {
        for (int64_t end = begin; end <= s.T; end += 2) {
          const Array &start = begin == 0 ? d.S0 : r.states[begin - 1];
          const Array &stop = end == 0 ? d.S0 : r.states[end - 1];
          EXPECT_LT(max_difference(apply(segment(d, begin, end, method), start, s), stop), kTight)
              << describe(s) << " tokens " << begin << " to " << end << " method " << method;
        }
      }
    }
  }
}

TEST(Operators, SegmentsCompose) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 28);
    const Map first = segment(d, 1, 4, FW_BY_SUBSTITUTION), second = segment(d, 4, s.T, FW_BY_SUBSTITUTION);
    Output P(s.K * s.K), H(s.K * s.V);
    ASSERT_EQ(fw_form_compose_f64(s.K, s.V, first.P.data(), first.H.data(), second.P.data(), second.H.data(), P, H),
              FW_OK);
    const Map whole = segment(d, 1, s.T, FW_BY_SUBSTITUTION);
    EXPECT_LT(max_difference(P.array(), whole.P), kTight) << describe(s);
    EXPECT_LT(max_difference(H.array(), whole.H), kTight) << describe(s);
  }
}

// P = D - Yd^T W: the state's part of the segment is a diagonal minus a product of rank at most T.
TEST(Operators, TransitionIsDiagonalMinusLowRank) {
  const Shape s{FW_GATE_VECTOR, FW_ERASE_INDEPENDENT, 2, 6, 3};
  const Data d(s, 29);
  const Map map = segment(d, 0, s.T, FW_BY_RECURSION);
  const Array W = erase(d);
  Array P(s.K * s.K);
  for (int64_t i = 0; i < s.K; ++i) P[i * s.K + i] = d.decay(0, i) * d.decay(1, i);
  for (int64_t i = 0; i < s.K; ++i) {
    for (int64_t j = 0; j < s.K; ++j) {
      P[i * s.K + j] += d.decay(1, i) * d.b[i] * W[j] + d.b[s.K + i] * W[s.K + j];  // y = -b
    }
  }
  EXPECT_LT(max_difference(map.P, P), kTight);
}

// A zero key with g = 0 changes nothing.
TEST(Operators, TokenWithoutKeyIsTheIdentityMap) {
  const Shape s{FW_GATE_VECTOR, FW_ERASE_SHARED_AFTER, 5, 4, 3};
  Data d(s, 30);
  for (int64_t i = 0; i < s.K; ++i) d.k[2 * s.K + i] = 0, d.g[2 * s.K + i] = 0;
  const Map map = segment(d, 2, 3, FW_BY_SUBSTITUTION);
  EXPECT_EQ(largest(map.H), 0);
  for (int64_t i = 0; i < s.K; ++i) {
    for (int64_t j = 0; j < s.K; ++j) EXPECT_EQ(map.P[i * s.K + j], i == j ? 1.0 : 0.0);
  }
}

}  // namespace
