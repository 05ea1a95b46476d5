// SPDX-License-Identifier: Apache-2.0
// The functions of forms.h in single precision.
#include "ops/forms/calls.hpp"

using namespace fw::forms;

extern "C" {

fw_status fw_form_recurrent_f32(const fw_form_problem_f32 *problem, float *o, float *final_state) {
  return call_recurrent("form_recurrent_f32", problem, o, final_state);
}

fw_status fw_form_parallel_f32(const fw_form_problem_f32 *problem, float *o, float *final_state, float *attention) {
  return call_parallel("form_parallel_f32", problem, o, final_state, attention);
}

fw_status fw_form_chunk_f32(const fw_form_problem_f32 *problem, int64_t chunk, fw_chunk_kind kind, float *o,
                            float *final_state) {
  return call_chunk("form_chunk_f32", problem, chunk, kind, o, final_state);
}

fw_status fw_form_normal_f32(const fw_form_problem_f32 *problem, float *x, float *y, float *v_write) {
  return call_normal("form_normal_f32", problem, x, y, v_write);
}

fw_status fw_form_edges_f32(const fw_form_problem_f32 *problem, float *L, float *L_k, float *B) {
  return call_edges("form_edges_f32", problem, L, L_k, B);
}

fw_status fw_form_erase_f32(const fw_form_problem_f32 *problem, fw_form_method method, float *W) {
  return call_operator("form_erase_f32", Operator::kErase, problem, method, W);
}

fw_status fw_form_write_f32(const fw_form_problem_f32 *problem, fw_form_method method, float *U) {
  return call_operator("form_write_f32", Operator::kWrite, problem, method, U);
}

fw_status fw_form_feedback_f32(const fw_form_problem_f32 *problem, fw_form_method method, float *Z) {
  return call_operator("form_feedback_f32", Operator::kFeedback, problem, method, Z);
}

fw_status fw_form_erase_hops_f32(const fw_form_problem_f32 *problem, int64_t n_hops, float *terms) {
  return call_hops("form_erase_hops_f32", Operator::kErase, problem, n_hops, terms);
}

fw_status fw_form_write_hops_f32(const fw_form_problem_f32 *problem, int64_t n_hops, float *terms) {
  return call_hops("form_write_hops_f32", Operator::kWrite, problem, n_hops, terms);
}

fw_status fw_form_feedback_hops_f32(const fw_form_problem_f32 *problem, int64_t n_hops, float *terms) {
  return call_hops("form_feedback_hops_f32", Operator::kFeedback, problem, n_hops, terms);
}

fw_status fw_form_segment_f32(const fw_form_problem_f32 *problem, int64_t begin, int64_t end, fw_form_method method,
                              float *P, float *H) {
  return call_segment("form_segment_f32", problem, begin, end, method, P, H);
}

fw_status fw_form_compose_f32(int64_t K, int64_t V, const float *P1, const float *H1, const float *P2,
                              const float *H2, float *P, float *H) {
  return call_compose("form_compose_f32", K, V, P1, H1, P2, H2, P, H);
}

fw_status fw_form_inverse_f32(fw_inverse_method method, fw_dtype arithmetic, int64_t n, int64_t block,
                              const float *L, float *X) {
  return call_inverse("form_inverse_f32", method, arithmetic, n, block, L, X);
}

fw_status fw_form_decay_quotient_f32(int64_t T, int64_t K, const float *g, int64_t s, int64_t e, float *near_factor,
                                     float *far_factor, float *phi, float *rest) {
  return call_decay_quotient("form_decay_quotient_f32", T, K, g, s, e, near_factor, far_factor, phi, rest);
}

fw_status fw_form_tempting_f32(const fw_form_problem_f32 *problem, float *o) {
  return call_tempting("form_tempting_f32", problem, o);
}

}  // extern "C"
