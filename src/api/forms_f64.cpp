// SPDX-License-Identifier: Apache-2.0
// The functions of forms.h in double precision.
#include "ops/forms/calls.hpp"

using namespace fw::forms;

extern "C" {

fw_status fw_form_recurrent_f64(const fw_form_problem_f64 *problem, double *o, double *final_state) {
  return call_recurrent("form_recurrent_f64", problem, o, final_state);
}

fw_status fw_form_parallel_f64(const fw_form_problem_f64 *problem, double *o, double *final_state,
                               double *attention) {
  return call_parallel("form_parallel_f64", problem, o, final_state, attention);
}

fw_status fw_form_chunk_f64(const fw_form_problem_f64 *problem, int64_t chunk, fw_chunk_kind kind, double *o,
                            double *final_state) {
  return call_chunk("form_chunk_f64", problem, chunk, kind, o, final_state);
}

fw_status fw_form_normal_f64(const fw_form_problem_f64 *problem, double *x, double *y, double *v_write) {
  return call_normal("form_normal_f64", problem, x, y, v_write);
}

fw_status fw_form_edges_f64(const fw_form_problem_f64 *problem, double *L, double *L_k, double *B) {
  return call_edges("form_edges_f64", problem, L, L_k, B);
}

fw_status fw_form_erase_f64(const fw_form_problem_f64 *problem, fw_form_method method, double *W) {
  return call_operator("form_erase_f64", Operator::kErase, problem, method, W);
}

fw_status fw_form_write_f64(const fw_form_problem_f64 *problem, fw_form_method method, double *U) {
  return call_operator("form_write_f64", Operator::kWrite, problem, method, U);
}

fw_status fw_form_feedback_f64(const fw_form_problem_f64 *problem, fw_form_method method, double *Z) {
  return call_operator("form_feedback_f64", Operator::kFeedback, problem, method, Z);
}

fw_status fw_form_erase_hops_f64(const fw_form_problem_f64 *problem, int64_t n_hops, double *terms) {
  return call_hops("form_erase_hops_f64", Operator::kErase, problem, n_hops, terms);
}

fw_status fw_form_write_hops_f64(const fw_form_problem_f64 *problem, int64_t n_hops, double *terms) {
  return call_hops("form_write_hops_f64", Operator::kWrite, problem, n_hops, terms);
}

fw_status fw_form_feedback_hops_f64(const fw_form_problem_f64 *problem, int64_t n_hops, double *terms) {
  return call_hops("form_feedback_hops_f64", Operator::kFeedback, problem, n_hops, terms);
}

fw_status fw_form_segment_f64(const fw_form_problem_f64 *problem, int64_t begin, int64_t end, fw_form_method method,
                              double *P, double *H) {
  return call_segment("form_segment_f64", problem, begin, end, method, P, H);
}

fw_status fw_form_compose_f64(int64_t K, int64_t V, const double *P1, const double *H1, const double *P2,
                              const double *H2, double *P, double *H) {
  return call_compose("form_compose_f64", K, V, P1, H1, P2, H2, P, H);
}

fw_status fw_form_inverse_f64(fw_inverse_method method, fw_dtype arithmetic, int64_t n, int64_t block,
                              const double *L, double *X) {
  return call_inverse("form_inverse_f64", method, arithmetic, n, block, L, X);
}

fw_status fw_form_decay_quotient_f64(int64_t T, int64_t K, const double *g, int64_t s, int64_t e,
                                     double *near_factor, double *far_factor, double *phi, double *rest) {
  return call_decay_quotient("form_decay_quotient_f64", T, K, g, s, e, near_factor, far_factor, phi, rest);
}

fw_status fw_form_tempting_f64(const fw_form_problem_f64 *problem, double *o) {
  return call_tempting("form_tempting_f64", problem, o);
}

}  // extern "C"
