// SPDX-License-Identifier: Apache-2.0
// The forms against the definition and against each other, for every <gate, erase>.
#include "ops/forms_helpers.hpp"

using namespace forms_test;

namespace {

TEST(Forms, RecurrentIsTheDefinition) {
  for (const Shape &s : all_shapes()) {
    const Data d(s);
    const Result want = definition(d), got = recurrent(d);
    EXPECT_LT(max_difference(got.o, want.o), kTight) << describe(s);
    EXPECT_LT(max_difference(got.state, want.state), kTight) << describe(s);
    EXPECT_GT(largest(want.o), 0.05) << describe(s);
  }
}

TEST(Forms, NormalFormIsTheRecurrence) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 2);
    Output x(s.T * s.K), y(s.T * s.K), v(s.T * s.V);
    const fw_form_problem_f64 problem = d.problem();
    ASSERT_EQ(fw_form_normal_f64(&problem, x, y, v), FW_OK);
    const Array X = x.array(), Y = y.array(), W = v.array();
    Array S = d.S0;
    for (int64_t t = 0; t < s.T; ++t) {
      Array M(s.K * s.K);  // D_t - y_t x_t^T
      for (int64_t i = 0; i < s.K; ++i) {
        for (int64_t j = 0; j < s.K; ++j) {
          M[i * s.K + j] = (i == j ? d.decay(t, i) : 0) - Y[t * s.K + i] * X[t * s.K + j];
        }
      }
      S = multiply(M, S, s.K, s.K, s.V);
      for (int64_t i = 0; i < s.K; ++i) {
        for (int64_t j = 0; j < s.V; ++j) S[i * s.V + j] += d.k[t * s.K + i] * W[t * s.V + j];
      }
    }
    EXPECT_LT(max_difference(S, definition(d).state), kTight) << describe(s);
  }
}

TEST(Forms, ParallelEqualsRecurrent) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 3);
    const Result want = definition(d);
    Output o(s.T * s.V), state(s.K * s.V), attention(s.T * s.T);
    const fw_form_problem_f64 problem = d.problem();
    ASSERT_EQ(fw_form_parallel_f64(&problem, o, state, attention), FW_OK);
    EXPECT_LT(max_difference(o.array(), want.o), kTight) << describe(s);
    EXPECT_LT(max_difference(state.array(), want.state), kTight) << describe(s);
  }
}

TEST(Forms, AttentionMatrixTimesValuesIsTheOutput) {
  for (Shape s : all_shapes()) {
    s.has_state = false;
    const Data d(s, 4);
    Output o(s.T * s.V), attention(s.T * s.T), v(s.T * s.V);
    const fw_form_problem_f64 problem = d.problem();
    ASSERT_EQ(fw_form_parallel_f64(&problem, o, nullptr, attention), FW_OK);
    ASSERT_EQ(fw_form_normal_f64(&problem, nullptr, nullptr, v), FW_OK);
    const Array A = attention.array();
    for (int64_t i = 0; i < s.T; ++i) {
      for (int64_t j = i + 1; j < s.T; ++j) EXPECT_EQ(A[i * s.T + j], 0.0);
    }
    EXPECT_LT(max_difference(multiply(A, v.array(), s.T, s.T, s.V), definition(d).o), kTight) << describe(s);
  }
}

// One key: A (I + L) = Q K^T masked and decayed, which is the attention matrix of the same problem without an erase.
TEST(Forms, SharedAttentionIsScoresTimesInverse) {
  for (const Shape &s : all_shapes()) {
    if (s.erase != FW_ERASE_SHARED_AFTER && s.erase != FW_ERASE_SHARED_BEFORE) continue;
    const Data d(s, 5);
    Output o(s.T * s.V), with_erase(s.T * s.T), scores(s.T * s.T);
    fw_form_problem_f64 problem = d.problem();
    ASSERT_EQ(fw_form_parallel_f64(&problem, o, nullptr, with_erase), FW_OK);
    problem.erase = FW_ERASE_NONE;
    problem.p = problem.beta = problem.erase_gate = problem.write_gate = nullptr;
    ASSERT_EQ(fw_form_parallel_f64(&problem, o, nullptr, scores), FW_OK);
    Array one_plus_L = graph(d).L;
    for (int64_t i = 0; i < s.T; ++i) one_plus_L[i * s.T + i] = 1;
    EXPECT_LT(max_difference(multiply(with_erase.array(), one_plus_L, s.T, s.T, s.T), scores.array()), kTight)
        << describe(s);
    EXPECT_GT(max_difference(with_erase.array(), scores.array()), 1e-3) << describe(s);
  }
}

void expect_chunk_equals_recurrent(fw_chunk_kind kind) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 6);
    const Result want = definition(d);
    for (int64_t length : {int64_t{1}, int64_t{2}, int64_t{3}, int64_t{5}, s.T, s.T + 3}) {
      Output o(s.T * s.V), state(s.K * s.V);
      const fw_form_problem_f64 problem = d.problem();
      ASSERT_EQ(fw_form_chunk_f64(&problem, length, kind, o, state), FW_OK);
      EXPECT_LT(max_difference(o.array(), want.o), kTight) << describe(s) << " chunk " << length;
      EXPECT_LT(max_difference(state.array(), want.state), kTight) << describe(s) << " chunk " << length;
    }
  }
}

TEST(Forms, ChunkSolveEqualsRecurrent) { expect_chunk_equals_recurrent(FW_CHUNK_SOLVE); }
TEST(Forms, ChunkFactorsEqualRecurrent) { expect_chunk_equals_recurrent(FW_CHUNK_FACTORS); }

// Two sub-steps a token (one decay before the first, one read after the last) are the gated delta rule on 2T tokens
// with g = 0 at every second one.
TEST(Forms, DeltaProductIsTheInterleavedDeltaRule) {
  Shape s{FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER, 12, 5, 3};
  Data d(s, 7);
  for (int64_t t = 1; t < s.T; t += 2) d.g[t] = 0;
  Array S = d.S0, o;
  for (int64_t token = 0; token < s.T / 2; ++token) {
    for (double &x : S) x *= exp(d.g[2 * token]);
    for (int64_t row = 2 * token; row < 2 * token + 2; ++row) {
      for (int64_t j = 0; j < s.V; ++j) {
        double error = d.v[row * s.V + j];
        for (int64_t i = 0; i < s.K; ++i) error -= S[i * s.V + j] * d.k[row * s.K + i];
        for (int64_t i = 0; i < s.K; ++i) S[i * s.V + j] += d.beta[row] * d.k[row * s.K + i] * error;
      }
    }
    const Array q(d.q.begin() + (2 * token + 1) * s.K, d.q.begin() + (2 * token + 2) * s.K);
    for (double x : multiply(q, S, 1, s.K, s.V)) o.push_back(x / sqrt(static_cast<double>(s.K)));
  }
  const Result got = recurrent(d);
  Array last_of_token;
  for (int64_t t = 1; t < s.T; t += 2) {
    last_of_token.insert(last_of_token.end(), got.o.begin() + t * s.V, got.o.begin() + (t + 1) * s.V);
  }
  EXPECT_LT(max_difference(last_of_token, o), kTight);
  EXPECT_LT(max_difference(got.state, S), kTight);
}

TEST(Forms, EveryDecayIsLegal) {
  for (const Shape &s : all_shapes()) {
    if (s.gate == FW_GATE_NONE) continue;
    Data d(s, 8);
    const double extremes[] = {0, -1e-8, -1000, -kInf};
    for (size_t i = 0; i < d.g.size(); i += 2) d.g[i] = extremes[i / 2 % 4];
    const Result want = definition(d);
    Output o(s.T * s.V), state(s.K * s.V);
    const fw_form_problem_f64 problem = d.problem();
    for (double x : want.o) ASSERT_TRUE(isfinite(x));
    EXPECT_LT(max_difference(recurrent(d).o, want.o), kTight) << describe(s);
    ASSERT_EQ(fw_form_parallel_f64(&problem, o, state, nullptr), FW_OK);
    EXPECT_LT(max_difference(o.array(), want.o), kTight) << describe(s);
    for (fw_chunk_kind kind : {FW_CHUNK_SOLVE, FW_CHUNK_FACTORS}) {
      ASSERT_EQ(fw_form_chunk_f64(&problem, 4, kind, o, state), FW_OK);
      EXPECT_LT(max_difference(o.array(), want.o), kTight) << describe(s);
      EXPECT_LT(max_difference(state.array(), want.state), kTight) << describe(s);
    }
  }
}

// The fp32 functions agree with fp64 to fp32's rounding, and do round: they are not fp64 inside.
TEST(Forms, Fp32TracksFp64) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 9);
    const auto narrow = [](const Array &x) { return std::vector<float>(x.begin(), x.end()); };
    const auto q = narrow(d.q), k = narrow(d.k), v = narrow(d.v), p = narrow(d.p), beta = narrow(d.beta),
               erase_gate = narrow(d.erase_gate), write_gate = narrow(d.write_gate), a = narrow(d.a), b = narrow(d.b),
               g = narrow(d.g), S0 = narrow(d.S0);
    const auto pointer = [](const std::vector<float> &x) { return x.empty() ? nullptr : x.data(); };
    fw_form_problem_f32 f = {};
    f.struct_size = sizeof f;
    f.gate = s.gate, f.erase = s.erase, f.T = s.T, f.K = s.K, f.V = s.V;
    f.q = pointer(q), f.k = pointer(k), f.v = pointer(v), f.p = pointer(p), f.beta = pointer(beta);
    f.erase_gate = pointer(erase_gate), f.write_gate = pointer(write_gate), f.a = pointer(a), f.b = pointer(b);
    f.g = pointer(g), f.initial_state = pointer(S0);
    const Result want = definition(d);
    std::vector<float> o(s.T * s.V, NAN), state(s.K * s.V, NAN), Z(s.T * s.V, NAN), W(s.T * s.K, NAN);
    const auto check = [&](const std::vector<float> &got, const Array &truth, const char *what) {
      const double gap = max_difference(Array(got.begin(), got.end()), truth);
      EXPECT_LT(gap, kLoose) << what << ": " << describe(s);
      EXPECT_GT(gap, 1e-10) << what << ": " << describe(s);
    };
    ASSERT_EQ(fw_form_recurrent_f32(&f, o.data(), state.data()), FW_OK);
    check(o, want.o, "recurrent");
    check(state, want.state, "recurrent state");
    ASSERT_EQ(fw_form_parallel_f32(&f, o.data(), nullptr, nullptr), FW_OK);
    check(o, want.o, "parallel");
    ASSERT_EQ(fw_form_chunk_f32(&f, 4, FW_CHUNK_FACTORS, o.data(), state.data()), FW_OK);
    check(o, want.o, "chunk");
    check(state, want.state, "chunk state");
    if (s.erase == FW_ERASE_NONE) continue;
    ASSERT_EQ(fw_form_feedback_f32(&f, FW_BY_INVERSE, Z.data()), FW_OK);
    check(Z, feedback(d), "feedback");
    ASSERT_EQ(fw_form_erase_f32(&f, FW_BY_PATHS, W.data()), FW_OK);
    check(W, erase(d), "erase");
  }
}

TEST(Forms, EmptySequenceReturnsTheInitialState) {
  for (Shape s : all_shapes()) {
    s.T = 0;
    const Data d(s, 10);
    Output o(0), state(s.K * s.V), P(s.K * s.K), H(s.K * s.V);
    const fw_form_problem_f64 problem = d.problem();
    ASSERT_EQ(fw_form_recurrent_f64(&problem, o, state), FW_OK) << fw_last_error();
    EXPECT_EQ(state.array(), d.S0);
    ASSERT_EQ(fw_form_parallel_f64(&problem, o, state, nullptr), FW_OK);
    EXPECT_EQ(state.array(), d.S0);
    ASSERT_EQ(fw_form_chunk_f64(&problem, 3, FW_CHUNK_SOLVE, o, state), FW_OK);
    EXPECT_EQ(state.array(), d.S0);
    ASSERT_EQ(fw_form_segment_f64(&problem, 0, 0, FW_BY_SUBSTITUTION, P, H), FW_OK);
    EXPECT_EQ(largest(H.array()), 0);
  }
}

TEST(Forms, InputsStayUntouched) {
  for (const Shape &s : all_shapes()) {
    const Data d(s, 11), copy = d;
    Output o(s.T * s.V), state(s.K * s.V), A(s.T * s.T);
    const fw_form_problem_f64 problem = d.problem();
    ASSERT_EQ(fw_form_parallel_f64(&problem, o, state, A), FW_OK);
    ASSERT_EQ(fw_form_chunk_f64(&problem, 4, FW_CHUNK_FACTORS, o, state), FW_OK);
    ASSERT_EQ(fw_form_recurrent_f64(&problem, o, state), FW_OK);
    feedback(d), erase(d), write(d);
    for (const auto member : {&Data::q, &Data::k, &Data::v, &Data::p, &Data::beta, &Data::erase_gate,
                              &Data::write_gate, &Data::a, &Data::b, &Data::g, &Data::S0}) {
      EXPECT_EQ(d.*member, copy.*member);
    }
  }
}

}  // namespace
