// SPDX-License-Identifier: Apache-2.0
// The verbs of an operation, once for all: src/api/<op>.cpp names them in C. An operation is described by a struct
//
//   struct Op {
//     using Desc = fw_x; using Grads = fw_x_grads; using Problem = ...;
//     static constexpr const char *kName = "x";
//     static constexpr bool kHasStep = false;
//     static fw_status make_problem(const Desc &, const Grads *, fw_direction, bool with_data, Problem *);
//     static const Impl<Problem> *impls(int32_t *n);
//     static fw_status check_more(const Problem &);  // may be absent; of the verb check alone: outputs, values
//   };
//
// make_problem: the first argument is the copy of the caller's descriptor; grads are nullptr where the verb brings
// none. With with_data the data pointers and cu_seqlens are checked too; without, an output may be absent. The
// workspace must not depend on which gradients are wanted.
#pragma once
#include "core/descriptor.hpp"
#include "core/impl_list.hpp"

namespace fw {

template <class Op>
fw_status check_direction(fw_direction direction) {
  if (direction == FW_FORWARD || direction == FW_BACKWARD || (direction == FW_STEP && Op::kHasStep)) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: direction is %d, allowed 0 (forward)%s 1 (backward)%s", Op::kName, direction,
              Op::kHasStep ? "," : " or", Op::kHasStep ? " or 2 (step)" : "");
}

// Reads both structs and makes the problem. is_query: no grads come with the verb.
template <class Op>
fw_status read_problem(const fw_context *context, const typename Op::Desc *desc, const typename Op::Grads *grads,
                       fw_direction direction, bool is_query, bool with_data, typename Op::Problem *problem) {
  if (!context) return fail(FW_INVALID_ARGUMENT, "%s: context is a null pointer", Op::kName);
  FW_TRY(check_direction<Op>(direction));
  typename Op::Desc desc_copy = {};
  typename Op::Grads grads_copy = {};
  FW_TRY(read_descriptor(Op::kName, desc, &desc_copy));
  const bool with_grads = direction == FW_BACKWARD && !is_query;
  if (with_grads) {
    FW_TRY(read_descriptor(Op::kName, grads, &grads_copy, "grads"));
  } else if (grads) {
    return fail(FW_INVALID_ARGUMENT, "%s: grads is given, allowed for direction 1 (backward) only", Op::kName);
  }
  return Op::make_problem(desc_copy, with_grads ? &grads_copy : nullptr, direction, with_data, problem);
}

template <class Op>
fw_status verb_check(const fw_context *context, const typename Op::Desc *desc, const typename Op::Grads *grads,
                     fw_direction direction) {
  typename Op::Problem problem = {};
  FW_TRY(read_problem<Op>(context, desc, grads, direction, false, false, &problem));
  if constexpr (requires { Op::check_more(problem); }) FW_TRY(Op::check_more(problem));
  int32_t n;
  const Impl<typename Op::Problem> *impls = Op::impls(&n), *chosen;
  return choose(Op::kName, *context, problem, impls, n, &chosen);
}

template <class Op>
fw_status verb_workspace_size(const fw_context *context, const typename Op::Desc *desc, fw_direction direction,
                              uint64_t *bytes) {
  if (!bytes) return fail(FW_INVALID_ARGUMENT, "%s: bytes is a null pointer", Op::kName);
  typename Op::Problem problem = {};
  FW_TRY(read_problem<Op>(context, desc, nullptr, direction, true, false, &problem));
  int32_t n;
  const Impl<typename Op::Problem> *impls = Op::impls(&n), *chosen;
  FW_TRY(choose(Op::kName, *context, problem, impls, n, &chosen));
  const uint64_t needed = chosen->workspace(*context, problem);
  if (needed == UINT64_MAX) {
    return fail(FW_INVALID_ARGUMENT, "%s: the workspace of this call has more than 2^64 bytes (%s)", Op::kName,
                chosen->name);
  }
  *bytes = needed;
  return FW_OK;
}

// forward, backward and step
template <class Op>
fw_status verb_run(fw_context *context, const typename Op::Desc *desc, const typename Op::Grads *grads,
                   fw_direction direction, void *workspace, uint64_t workspace_size) {
  typename Op::Problem problem = {};
  FW_TRY(read_problem<Op>(context, desc, grads, direction, false, true, &problem));
  int32_t n;
  const Impl<typename Op::Problem> *impls = Op::impls(&n);
  return run_chosen(Op::kName, *context, problem, impls, n, workspace, workspace_size);
}

template <class Op>
fw_status verb_explain(const fw_context *context, const typename Op::Desc *desc, fw_direction direction, char *text,
                       uint64_t capacity, uint64_t *needed) {
  typename Op::Problem problem = {};
  FW_TRY(read_problem<Op>(context, desc, nullptr, direction, true, false, &problem));
  int32_t n;
  const Impl<typename Op::Problem> *impls = Op::impls(&n);
  return explain(*context, problem, impls, n, text, capacity, needed);
}

// The C functions of fw_<op>; used once in src/api/<op>.cpp inside extern "C".
#define FW_DEFINE_VERBS(op, Op)                                                                                     \
  fw_status fw_##op##_check(const fw_context *context, const fw_##op *desc, const fw_##op##_grads *grads,           \
                            fw_direction direction) {                                                               \
    return fw::verb_check<Op>(context, desc, grads, direction);                                                     \
  }                                                                                                                 \
  fw_status fw_##op##_workspace_size(const fw_context *context, const fw_##op *desc, fw_direction direction,        \
                                     uint64_t *bytes) {                                                             \
    return fw::verb_workspace_size<Op>(context, desc, direction, bytes);                                            \
  }                                                                                                                 \
  fw_status fw_##op##_forward(fw_context *context, const fw_##op *desc, void *workspace, uint64_t workspace_size) { \
    return fw::verb_run<Op>(context, desc, nullptr, FW_FORWARD, workspace, workspace_size);                         \
  }                                                                                                                 \
  fw_status fw_##op##_backward(fw_context *context, const fw_##op *desc, const fw_##op##_grads *grads,              \
                               void *workspace, uint64_t workspace_size) {                                          \
    return fw::verb_run<Op>(context, desc, grads, FW_BACKWARD, workspace, workspace_size);                          \
  }                                                                                                                 \
  fw_status fw_##op##_explain(const fw_context *context, const fw_##op *desc, fw_direction direction, char *text,   \
                              uint64_t capacity, uint64_t *needed) {                                                \
    return fw::verb_explain<Op>(context, desc, direction, text, capacity, needed);                                  \
  }
#define FW_DEFINE_STEP(op, Op)                                                                                   \
  fw_status fw_##op##_step(fw_context *context, const fw_##op *desc, void *workspace, uint64_t workspace_size) { \
    return fw::verb_run<Op>(context, desc, nullptr, FW_STEP, workspace, workspace_size);                         \
  }

}  // namespace fw
