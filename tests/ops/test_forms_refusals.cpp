// SPDX-License-Identifier: Apache-2.0
// Every refusal of forms.h: status, sentence, and outputs left as they were.
#include <new>

#include "ops/forms/calls.hpp"
#include "ops/forms_helpers.hpp"

using namespace forms_test;

namespace {

struct Forms : testing::Test {
  Data shared{Shape{FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER, 4, 3, 2}, 81};
  Data independent{Shape{FW_GATE_VECTOR, FW_ERASE_INDEPENDENT, 4, 3, 2}, 82};
  Data plain{Shape{FW_GATE_NONE, FW_ERASE_NONE, 4, 3, 2}, 83};
  double out[64];

  Forms() {
    for (double &x : out) x = 7;
  }
  void refuse(fw_status status, const char *sentence, fw_status expected = FW_INVALID_ARGUMENT) {
    EXPECT_EQ(status, expected) << sentence;
    EXPECT_STREQ(fw_last_error(), sentence);
    for (double x : out) EXPECT_EQ(x, 7);
  }
  template <class Change>
  fw_status recurrent_with(const Data &d, Change change) {
    fw_form_problem_f64 p = d.problem();
    change(p);
    return fw_form_recurrent_f64(&p, out, nullptr);
  }
};
using P = fw_form_problem_f64;

TEST_F(Forms, RefusesBadProblems) {
  refuse(fw_form_recurrent_f64(nullptr, out, nullptr), "form_recurrent_f64: problem is a null pointer");
  refuse(recurrent_with(shared, [](P &p) { p.struct_size = 12; }),
         ("form_recurrent_f64: problem.struct_size is 12, expected " + std::to_string(sizeof(P))).c_str());
  refuse(recurrent_with(shared, [](P &p) { p.reserved = 1; }),
         "form_recurrent_f64: problem.reserved is 1, expected 0");
  refuse(recurrent_with(shared, [](P &p) { p.gate = 3; }), "form_recurrent_f64: gate is 3, allowed 0 to 2");
  refuse(recurrent_with(shared, [](P &p) { p.erase = -1; }), "form_recurrent_f64: erase is -1, allowed 0 to 3");
  refuse(recurrent_with(shared, [](P &p) { p.T = -1; }), "form_recurrent_f64: T is -1, allowed 0 to 1073741824");
  refuse(recurrent_with(shared, [](P &p) { p.K = 0; }), "form_recurrent_f64: K is 0, allowed 1 to 512");
  refuse(recurrent_with(shared, [](P &p) { p.V = 513; }), "form_recurrent_f64: V is 513, allowed 1 to 512");
  refuse(recurrent_with(shared, [](P &p) { p.scale = kNan; }),
         "form_recurrent_f64: scale is nan, allowed any finite number");
}

TEST_F(Forms, RefusesMissingAndSuperfluousOperands) {
  refuse(recurrent_with(shared, [](P &p) { p.q = nullptr; }), "form_recurrent_f64: q is a null pointer");
  refuse(recurrent_with(shared, [](P &p) { p.k = nullptr; }), "form_recurrent_f64: k is a null pointer");
  refuse(recurrent_with(shared, [](P &p) { p.v = nullptr; }), "form_recurrent_f64: v is a null pointer");
  refuse(recurrent_with(shared, [](P &p) { p.g = nullptr; }), "form_recurrent_f64: g is a null pointer");
  refuse(recurrent_with(plain, [](P &p) { p.g = p.k; }), "form_recurrent_f64: g is given, but gate is none");
  refuse(recurrent_with(independent, [](P &p) { p.a = nullptr; }), "form_recurrent_f64: a is a null pointer");
  refuse(recurrent_with(independent, [](P &p) { p.b = nullptr; }), "form_recurrent_f64: b is a null pointer");
  refuse(recurrent_with(shared, [](P &p) { p.a = p.k; }),
         "form_recurrent_f64: a is given, but the keys are not independent");
  refuse(recurrent_with(shared, [](P &p) { p.b = p.k; }),
         "form_recurrent_f64: b is given, but the keys are not independent");
  refuse(recurrent_with(plain, [](P &p) { p.p = p.k; }), "form_recurrent_f64: p is given, but the key is not shared");
  refuse(recurrent_with(plain, [](P &p) { p.beta = p.k; }),
         "form_recurrent_f64: beta is given, but the key is not shared");
  refuse(recurrent_with(independent, [](P &p) { p.erase_gate = p.k; }),
         "form_recurrent_f64: erase_gate is given, but the key is not shared");
  refuse(recurrent_with(independent, [](P &p) { p.write_gate = p.k; }),
         "form_recurrent_f64: write_gate is given, but the key is not shared");
}

TEST_F(Forms, RefusesBadArguments) {
  P p = shared.problem(), longer = p;
  longer.T = 16385;
  refuse(fw_form_recurrent_f64(&p, nullptr, out), "form_recurrent_f64: o is a null pointer");
  refuse(fw_form_parallel_f64(&p, nullptr, out, nullptr), "form_parallel_f64: o is a null pointer");
  refuse(fw_form_parallel_f64(&longer, out, nullptr, nullptr), "form_parallel_f64: T is 16385, allowed 0 to 16384");
  refuse(fw_form_chunk_f64(&p, 0, FW_CHUNK_SOLVE, out, nullptr), "form_chunk_f64: chunk is 0, allowed 1 to 16384");
  refuse(fw_form_chunk_f64(&p, 2, 3, out, nullptr), "form_chunk_f64: kind is 3, allowed 1 to 2");
  refuse(fw_form_chunk_f64(&p, 2, FW_CHUNK_SOLVE, nullptr, out), "form_chunk_f64: o is a null pointer");
  refuse(fw_form_edges_f64(&longer, out, nullptr, nullptr), "form_edges_f64: T is 16385, allowed 0 to 16384");
  refuse(fw_form_erase_f64(&p, 0, out), "form_erase_f64: method is 0, allowed 1 to 4");
  refuse(fw_form_write_f64(&p, 5, out), "form_write_f64: method is 5, allowed 1 to 4");
  refuse(fw_form_erase_f64(&p, FW_BY_PATHS, nullptr), "form_erase_f64: W is a null pointer");
  refuse(fw_form_write_f64(&p, FW_BY_PATHS, nullptr), "form_write_f64: U is a null pointer");
  refuse(fw_form_feedback_f64(&p, FW_BY_PATHS, nullptr), "form_feedback_f64: Z is a null pointer");
  refuse(fw_form_feedback_f64(&longer, FW_BY_INVERSE, out), "form_feedback_f64: T is 16385, allowed 0 to 16384");
  refuse(fw_form_erase_hops_f64(&p, -1, out), "form_erase_hops_f64: n_hops is -1, allowed 0 to 16384");
  refuse(fw_form_write_hops_f64(&p, 2, nullptr), "form_write_hops_f64: terms is a null pointer");
  refuse(fw_form_feedback_hops_f64(&p, 16385, out), "form_feedback_hops_f64: n_hops is 16385, allowed 0 to 16384");
  refuse(fw_form_segment_f64(&p, 0, 5, FW_BY_RECURSION, out, out), "form_segment_f64: end is 5, allowed 0 to 4");
  refuse(fw_form_segment_f64(&p, 3, 2, FW_BY_RECURSION, out, out), "form_segment_f64: begin is 3, allowed 0 to 2");
  refuse(fw_form_segment_f64(&p, 0, 2, 9, out, out), "form_segment_f64: method is 9, allowed 1 to 4");
  refuse(fw_form_segment_f64(&p, 0, 2, FW_BY_RECURSION, nullptr, out), "form_segment_f64: P is a null pointer");
  refuse(fw_form_segment_f64(&p, 0, 2, FW_BY_RECURSION, out, nullptr), "form_segment_f64: H is a null pointer");
  refuse(fw_form_compose_f64(0, 2, out, out, out, out, out, out), "form_compose_f64: K is 0, allowed 1 to 512");
  refuse(fw_form_compose_f64(3, 0, out, out, out, out, out, out), "form_compose_f64: V is 0, allowed 1 to 512");
  refuse(fw_form_compose_f64(3, 2, out, out, out, nullptr, out, out), "form_compose_f64: H2 is a null pointer");
  refuse(fw_form_tempting_f64(&p, nullptr), "form_tempting_f64: o is a null pointer");
}

TEST_F(Forms, RefusesBadInversesAndQuotients) {
  const double *L = shared.k.data();
  const float L32[4] = {};
  float X32[4];
  refuse(fw_form_inverse_f64(7, FW_F64, 2, 0, L, out), "form_inverse_f64: method is 7, allowed 1 to 6");
  refuse(fw_form_inverse_f64(1, FW_F32, 2, 0, L, out), "form_inverse_f64: arithmetic is fp32, allowed fp64");
  refuse(fw_form_inverse_f32(1, FW_F64, 2, 0, L32, X32),
         "form_inverse_f32: arithmetic is fp64, allowed fp32, bf16, fp16");
  refuse(fw_form_inverse_f64(1, FW_F64, 1025, 0, L, out), "form_inverse_f64: n is 1025, allowed 0 to 1024");
  refuse(fw_form_inverse_f64(4, FW_F64, 2, 3, L, out), "form_inverse_f64: block is 3, allowed 0 to 2");
  refuse(fw_form_inverse_f64(1, FW_F64, 2, 0, nullptr, out), "form_inverse_f64: L is a null pointer");
  refuse(fw_form_inverse_f64(1, FW_F64, 2, 0, L, nullptr), "form_inverse_f64: X is a null pointer");
  refuse(fw_form_decay_quotient_f64(-1, 1, L, 0, 0, out, 0, 0, 0),
         "form_decay_quotient_f64: T is -1, allowed 0 to 1073741824");
  refuse(fw_form_decay_quotient_f64(4, 0, L, 0, 0, out, 0, 0, 0),
         "form_decay_quotient_f64: K is 0, allowed 1 to 512");
  refuse(fw_form_decay_quotient_f64(4, 1, L, 0, 5, out, 0, 0, 0), "form_decay_quotient_f64: e is 5, allowed 0 to 4");
  refuse(fw_form_decay_quotient_f64(4, 1, L, 3, 2, out, 0, 0, 0), "form_decay_quotient_f64: s is 3, allowed 0 to 2");
  refuse(fw_form_decay_quotient_f64(4, 1, nullptr, 0, 2, out, 0, 0, 0),
         "form_decay_quotient_f64: g is a null pointer");
}

TEST_F(Forms, SaysWhenMemoryIsShort) {
  refuse(fw::forms::guarded("form_chunk_f64", []() -> fw_status { throw std::bad_alloc(); }),
         "form_chunk_f64: no memory for the temporaries", FW_OUT_OF_MEMORY);
}

// What an operator does not read need not be there.
TEST_F(Forms, QueriesAreNeededForOutputsOnly) {
  P p = shared.problem();
  p.q = nullptr;
  Output W(shared.s.T * shared.s.K);
  EXPECT_EQ(fw_form_erase_f64(&p, FW_BY_SUBSTITUTION, W), FW_OK);
  EXPECT_EQ(W.array(), erase(shared));
}

}  // namespace
