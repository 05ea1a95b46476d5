// SPDX-License-Identifier: Apache-2.0
// The verbs of the recurrence family: check, choose, run.
#include "core/descriptor.hpp"
#include "core/status.hpp"
#include "ops/recurrence/catalogue.hpp"
#include "ops/recurrence/checks.hpp"
#include "ops/recurrence/cpu_plan.hpp"
#include "ops/recurrence/cuda_paths.hpp"
#include "ops/recurrence/impls.hpp"

using fw::fail;
using fw::recurrence::Candidates;
using fw::recurrence::Problem;

namespace {

constexpr const char *kOp = "recurrence";

fw_status check_context(const fw_context *context) {
  return context ? FW_OK : fail(FW_INVALID_ARGUMENT, "%s: context is a null pointer", kOp);
}

fw_status choose_impl(const fw_context *context, const fw_recurrence *desc, const fw_recurrence_grads *grads,
                      fw_direction direction, bool with_data, Problem *problem, const fw::Impl<Problem> **impl) {
  FW_TRY(check_context(context));
  FW_TRY(fw::recurrence::make_problem(desc, grads, direction, with_data, problem));
  const Candidates list = fw::recurrence::candidates(direction);
  return fw::choose(problem->op_name, *context, *problem, list.impls, list.count, impl);
}

fw_status check_saved(const Problem &p) {
  if (!p.saved) return FW_OK;
  const uint64_t needed = fw::recurrence::saved_bytes(p);
  if (p.saved_size >= needed) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: saved_size is %llu, allowed at least %llu", p.op_name,
              static_cast<unsigned long long>(p.saved_size), static_cast<unsigned long long>(needed));
}

fw_status run(fw_context *context, const fw_recurrence *desc, const fw_recurrence_grads *grads, fw_direction direction,
              void *workspace, uint64_t workspace_size) {
  FW_TRY(check_context(context));
  Problem problem;
  FW_TRY(fw::recurrence::make_problem(desc, grads, direction, true, &problem));
  FW_TRY(check_saved(problem));
  const Candidates list = fw::recurrence::candidates(direction);
  return fw::run_chosen(problem.op_name, *context, problem, list.impls, list.count, workspace, workspace_size);
}

fw_status move_state(const fw_context *context, const fw_recurrence *desc, const fw_tensor *plain, fw_state_layout layout,
                     bool is_import) {
  FW_TRY(check_context(context));
  Problem p;
  FW_TRY(fw::recurrence::make_problem(desc, nullptr, FW_STEP, false, &p));
  const char *op = p.op_name;
  if (p.state_layout != FW_STATE_OPAQUE) {
    return fail(FW_INVALID_ARGUMENT, "%s: state_layout is %d, allowed OPAQUE for import and export", op, p.state_layout);
  }
  if (!plain) return fail(FW_INVALID_ARGUMENT, "%s: plain is a null pointer", op);
  if (layout != FW_STATE_KV && layout != FW_STATE_VK) {
    return fail(FW_INVALID_ARGUMENT, "%s: layout is %d, allowed KV (0) or VK (1)", op, layout);
  }
  FW_TRY(fw::check_tensor(op, "state", p.state, p.state.shape, p.state.ndim, true));
  const int64_t slots = p.state.shape[0];
  const int64_t shape[] = {slots, p.HV, layout == FW_STATE_VK ? p.V : p.K, layout == FW_STATE_VK ? p.K : p.V};
  const fw_dtype allowed[] = {FW_F32, FW_BF16, FW_F16};
  FW_TRY(fw::check_dtype(op, "plain", *plain, allowed, 3));
  FW_TRY(fw::check_tensor(op, "plain", *plain, shape, 4, true));
  if (is_import) {
    FW_TRY(fw::check_disjoint(op, "state", p.state, "plain", *plain));
  } else {
    FW_TRY(fw::check_output(op, "plain", *plain));
    FW_TRY(fw::check_disjoint(op, "plain", *plain, "state", p.state));
  }
  if (p.device == FW_DEVICE_CUDA) {
    fw::Reason reason;
    if (!fw::recurrence::cuda_accepts(*context, p, reason)) return fail(FW_UNSUPPORTED, "%s: %s", op, reason.text);
    return fw::recurrence::cuda_move_state(p, *plain, layout, is_import);
  }
  const int64_t width = fw::recurrence::opaque_elements(p) / p.K;
  for (int64_t i = 0; i < slots * p.HV * p.K; ++i) {
    const int64_t k = i % p.K, hv = i / p.K % p.HV, slot = i / p.K / p.HV;
    const int64_t row = slot * p.state.strides[0] + hv * p.state.strides[1] + k * width * p.state.strides[2];
    for (int64_t v = 0; v < width; ++v) {
      const int64_t inside = row + v * p.state.strides[2];
      if (v >= p.V) {
        if (is_import) fw::store_f32(p.state.data, p.state.dtype, inside, 0.0f);
        continue;
      }
      const int64_t outside = fw::recurrence::state_offset(*plain, layout, slot, hv, k, v);
      if (is_import) {
        fw::store_f32(p.state.data, p.state.dtype, inside, fw::load_f32(plain->data, plain->dtype, outside));
      } else {
        fw::store_f32(plain->data, plain->dtype, outside, fw::load_f32(p.state.data, p.state.dtype, inside));
      }
    }
  }
  return FW_OK;
}

}  // namespace

extern "C" {

fw_status fw_recurrence_check(const fw_context *context, const fw_recurrence *desc, const fw_recurrence_grads *grads,
                              fw_direction direction) {
  Problem problem;
  const fw::Impl<Problem> *impl;
  const bool reads_values = desc && desc->struct_size > offsetof(fw_recurrence, options) + 4 &&
                            (desc->options & FW_CHECK_VALUES);
  FW_TRY(choose_impl(context, desc, grads, direction, reads_values, &problem, &impl));
  if (direction != FW_BACKWARD && !fw::given(problem.o)) return fail(FW_INVALID_ARGUMENT, "%s: o is missing", problem.op_name);
  if (!reads_values) return FW_OK;
  return problem.device == FW_DEVICE_CUDA ? fw::recurrence::cuda_check_values(problem) : fw::recurrence::check_values(problem);
}

fw_status fw_recurrence_workspace_size(const fw_context *context, const fw_recurrence *desc, fw_direction direction,
                                       uint64_t *bytes) {
  if (!bytes) return fail(FW_INVALID_ARGUMENT, "%s: bytes is a null pointer", kOp);
  Problem problem;
  const fw::Impl<Problem> *impl;
  FW_TRY(choose_impl(context, desc, nullptr, direction, false, &problem, &impl));
  const uint64_t needed = impl->workspace(*context, problem);
  if (needed == UINT64_MAX) return fail(FW_INVALID_ARGUMENT, "%s: the workspace does not fit in 64 bits", problem.op_name);
  *bytes = needed;
  return FW_OK;
}

fw_status fw_recurrence_saved_size(const fw_context *context, const fw_recurrence *desc, uint64_t *bytes) {
  if (!bytes) return fail(FW_INVALID_ARGUMENT, "%s: bytes is a null pointer", kOp);
  FW_TRY(check_context(context));
  Problem problem;
  FW_TRY(fw::recurrence::make_problem(desc, nullptr, FW_FORWARD, false, &problem));
  const uint64_t needed = fw::recurrence::saved_bytes(problem);
  if (needed == UINT64_MAX) return fail(FW_INVALID_ARGUMENT, "%s: saved does not fit in 64 bits", problem.op_name);
  *bytes = needed;
  return FW_OK;
}

fw_status fw_recurrence_chunk_length(const fw_context *context, const fw_recurrence *desc, int64_t *tokens) {
  if (!tokens) return fail(FW_INVALID_ARGUMENT, "%s: tokens is a null pointer", kOp);
  Problem problem;
  const fw::Impl<Problem> *impl;
  FW_TRY(choose_impl(context, desc, nullptr, FW_FORWARD, false, &problem, &impl));
  *tokens = fw::recurrence::chunk_length(*impl, problem);
  return FW_OK;
}

fw_status fw_recurrence_forward(fw_context *context, const fw_recurrence *desc, void *workspace, uint64_t workspace_size) {
  return run(context, desc, nullptr, FW_FORWARD, workspace, workspace_size);
}

fw_status fw_recurrence_backward(fw_context *context, const fw_recurrence *desc, const fw_recurrence_grads *grads,
                                 void *workspace, uint64_t workspace_size) {
  return run(context, desc, grads, FW_BACKWARD, workspace, workspace_size);
}

fw_status fw_recurrence_step(fw_context *context, const fw_recurrence *desc, void *workspace, uint64_t workspace_size) {
  return run(context, desc, nullptr, FW_STEP, workspace, workspace_size);
}

fw_status fw_recurrence_explain(const fw_context *context, const fw_recurrence *desc, fw_direction direction, char *text,
                                uint64_t capacity, uint64_t *needed) {
  FW_TRY(check_context(context));
  Problem problem;
  FW_TRY(fw::recurrence::make_problem(desc, nullptr, direction, false, &problem));
  const Candidates list = fw::recurrence::candidates(direction);
  return fw::explain(*context, problem, list.impls, list.count, text, capacity, needed);
}

fw_status fw_recurrence_opaque_size(const fw_context *context, const fw_recurrence *desc, int64_t *elements) {
  if (!elements) return fail(FW_INVALID_ARGUMENT, "%s: elements is a null pointer", kOp);
  FW_TRY(check_context(context));
  fw_recurrence copy;
  FW_TRY(fw::read_descriptor(kOp, desc, &copy));
  copy.state_layout = FW_STATE_KV;  // the question comes before the state exists
  copy.state = copy.state_z = copy.state_indices = fw_tensor{};
  copy.initial_state = copy.initial_z = copy.final_state = copy.final_z = fw_tensor{};
  Problem problem;
  FW_TRY(fw::recurrence::make_problem(&copy, nullptr, FW_FORWARD, false, &problem));
  *elements = fw::recurrence::opaque_elements(problem);
  return FW_OK;
}

fw_status fw_recurrence_state_import(const fw_context *context, const fw_recurrence *desc, const fw_tensor *plain,
                                     fw_state_layout layout) {
  return move_state(context, desc, plain, layout, true);
}

fw_status fw_recurrence_state_export(const fw_context *context, const fw_recurrence *desc, const fw_tensor *plain,
                                     fw_state_layout layout) {
  return move_state(context, desc, plain, layout, false);
}

const char *fw_op_name(fw_op op) {
  if (op == FW_OP_BY_AXES) return "by_axes";
  const fw::recurrence::Row *row = fw::recurrence::find_row(op);
  return row ? row->name : nullptr;
}

fw_status fw_op_axes(fw_op op, fw_gate *gate, fw_erase *erase) {
  const fw::recurrence::Row *row = fw::recurrence::find_row(op);
  if (!row) return fail(FW_INVALID_ARGUMENT, "op_axes: op is %d, allowed 1 to %d", op, FW_OP_COUNT - 1);
  if (!gate || !erase) return fail(FW_INVALID_ARGUMENT, "op_axes: gate or erase is a null pointer");
  *gate = row->gate;
  *erase = row->erase;
  return FW_OK;
}

}  // extern "C"
