// SPDX-License-Identifier: Apache-2.0
#include "ops/recurrence/impls.hpp"

#include <numeric>

#include "ops/recurrence/cpu_dots.hpp"
#include "ops/recurrence/cpu_plan.hpp"
#include "ops/recurrence/cpu_table.hpp"
#include "ops/recurrence/cuda_paths.hpp"
#include "ops/recurrence/reference.hpp"
#include "ops/recurrence/sm90_paths.hpp"

namespace fw::recurrence {

const char *form_name(fw_form form) {
  return form == FW_FORM_CHUNK ? "chunk" : form == FW_FORM_RECURRENT ? "recurrent" : "parallel";
}

namespace {


// The best level of the machine unless a lower one is forced by its implementation's name.
template <int32_t kLevel>
bool accepts_level(const fw_context &context, const Problem &p, Reason &reason) {
  if (p.device != FW_DEVICE_CPU) return reason.refuse("device is cuda");
  if (p.is_f64) return reason.refuse("operands are fp64, computed by the reference only");
  if (!level_is_available(kLevel)) return reason.refuse("this machine or build lacks %s", level_name(kLevel));
  (void)context;
  return true;
}

template <int32_t kLevel>
bool accepts_chunk(const fw_context &context, const Problem &p, Reason &reason) {
  if (!accepts_level<kLevel>(context, p, reason)) return false;
  if (p.form != FW_FORM_CHUNK) return reason.refuse("form is %s", form_name(p.form));
  return true;
}
template <int32_t kLevel>
bool accepts_backward(const fw_context &context, const Problem &p, Reason &reason) {
  if (!accepts_level<kLevel>(context, p, reason)) return false;
  if (p.form == FW_FORM_PARALLEL) return reason.refuse("form is parallel, which is forward only");
  return true;
}
template <int32_t kLevel>
bool accepts_recurrent(const fw_context &context, const Problem &p, Reason &reason) {
  if (!accepts_level<kLevel>(context, p, reason)) return false;
  if (p.direction == FW_FORWARD && p.form != FW_FORM_RECURRENT) return reason.refuse("form is %s", form_name(p.form));
  if (p.saved) return reason.refuse("saved is given, written by the chunk form only");
  return true;
}

template <int32_t kLevel>
const CpuTable &table() { return FW_LEVEL_TABLE(kLevel, kRecurrenceTable); }

#define FW_CPU_IMPL(level, name, accepts, verb)                                                     \
  {name, accepts<level>,                                                                            \
   [](const fw_context &context, const Problem &p) { return table<level>().verb##_workspace(context, p); }, \
   [](fw_context &context, const Problem &p, void *workspace) { table<level>().verb(context, p, workspace); }}

#define FW_DOTS_IMPL(kind, name)                                                                               \
  {name, [](const fw_context &context, const Problem &p, Reason &reason) { return dots_accept(context, p, kind, name, reason); }, \
   [](const fw_context &context, const Problem &p) { return dots_workspace(context, p, kind); },                \
   [](fw_context &context, const Problem &p, void *workspace) { dots_run(context, p, workspace, kind); }}

bool accepts_parallel(const fw_context &context, const Problem &p, Reason &reason) {
  if (p.device != FW_DEVICE_CPU) return reason.refuse("device is cuda");
  if (p.form != FW_FORM_PARALLEL) return reason.refuse("form is %s", form_name(p.form));
  if (p.saved) return reason.refuse("saved is given, written by the chunk form only");
  return reference_parallel_accepts(context, p, reason);
}

bool accepts_reference(const fw_context &, const Problem &p, Reason &reason) {
  if (p.device != FW_DEVICE_CPU) return reason.refuse("device is cuda");
  if (p.form == FW_FORM_PARALLEL) return reason.refuse("form is parallel");
  if (p.saved) return reason.refuse("saved is given, written by the chunk form only");
  if (p.direction == FW_STEP && p.state_layout == FW_STATE_OPAQUE) return reason.refuse("the state layout is opaque");
  return true;
}

constexpr Impl<Problem> kForward[] = {
    {"sm90_chunk", sm90_accepts, sm90_workspace, nullptr, sm90_run},
    {"cuda_chunk", cuda_chunk_accepts, cuda_chunk_workspace, nullptr, cuda_chunk_run},
    {"cuda_portable", cuda_portable_accepts, cuda_workspace, nullptr, cuda_run},
    FW_DOTS_IMPL(kAmx, "cpu_amx_chunk"),
    FW_DOTS_IMPL(kAvx512Bf16, "cpu_avx512_bf16_chunk"),
    FW_DOTS_IMPL(kNeonBf16, "cpu_neon_bf16_chunk"),
    FW_DOTS_IMPL(kAmxModel, "cpu_amx_model_chunk"),
    FW_DOTS_IMPL(kPairsModel, "cpu_bf16_model_chunk"),
    FW_CPU_IMPL(kAvx512, "cpu_avx512_chunk", accepts_chunk, chunk_forward),
    FW_CPU_IMPL(kAvx2, "cpu_avx2_chunk", accepts_chunk, chunk_forward),
    FW_CPU_IMPL(kBaseline, "cpu_baseline_chunk", accepts_chunk, chunk_forward),
    FW_CPU_IMPL(kAvx512, "cpu_avx512_recurrent", accepts_recurrent, recurrent),
    FW_CPU_IMPL(kAvx2, "cpu_avx2_recurrent", accepts_recurrent, recurrent),
    FW_CPU_IMPL(kBaseline, "cpu_baseline_recurrent", accepts_recurrent, recurrent),
    {"reference_parallel", accepts_parallel, reference_parallel_workspace, run_reference_parallel},
    {"reference_recurrent", accepts_reference, reference_recurrent_workspace, run_reference_recurrent},
};
constexpr Impl<Problem> kBackward[] = {
    {"sm90_chunk", sm90_accepts, sm90_workspace, nullptr, sm90_run},
    {"cuda_chunk", cuda_chunk_backward_accepts, cuda_chunk_backward_workspace, nullptr, cuda_chunk_backward_run},
    {"cuda_portable", cuda_portable_accepts, cuda_workspace, nullptr, cuda_run},
    FW_CPU_IMPL(kAvx512, "cpu_avx512_chunk", accepts_backward, chunk_backward),
    FW_CPU_IMPL(kAvx2, "cpu_avx2_chunk", accepts_backward, chunk_backward),
    FW_CPU_IMPL(kBaseline, "cpu_baseline_chunk", accepts_backward, chunk_backward),
    {"reference_recurrent", accepts_reference, reference_recurrent_workspace, run_reference_recurrent},
};
constexpr Impl<Problem> kStep[] = {
    {"sm90_step_chunk", sm90_step_chunk_accepts, cuda_step_workspace, nullptr, sm90_step_chunk_run},
    {"sm90_step", sm90_step_accepts, cuda_step_workspace, nullptr, sm90_step_run},
    {"cuda_step", cuda_step_accepts, cuda_step_workspace, nullptr, cuda_step_run},
    {"cuda_portable", cuda_portable_accepts, cuda_workspace, nullptr, cuda_run},
    FW_CPU_IMPL(kAvx512, "cpu_avx512_recurrent", accepts_recurrent, recurrent),
    FW_CPU_IMPL(kAvx2, "cpu_avx2_recurrent", accepts_recurrent, recurrent),
    FW_CPU_IMPL(kBaseline, "cpu_baseline_recurrent", accepts_recurrent, recurrent),
    {"reference_recurrent", accepts_reference, reference_recurrent_workspace, run_reference_recurrent},
};

}  // namespace

Candidates candidates(fw_direction direction) {
  switch (direction) {
    case FW_FORWARD: return {kForward, sizeof kForward / sizeof kForward[0]};
    case FW_BACKWARD: return {kBackward, sizeof kBackward / sizeof kBackward[0]};
    default: return {kStep, sizeof kStep / sizeof kStep[0]};
  }
}

int64_t chunk_length(const Impl<Problem> &impl, const Problem &p) {
  if (p.form == FW_FORM_RECURRENT) return 1;
  if (strcmp(impl.name, "cuda_portable") == 0) return kSegmentRows / std::gcd(kSegmentRows, p.n_sub);  // the backward's
  if (strcmp(impl.name, "sm90_chunk") == 0) return sm90_chunk_length();
  const size_t length = strlen(impl.name);
  const bool is_chunk = length > 6 && strcmp(impl.name + length - 6, "_chunk") == 0;
  return is_chunk ? kChunk / std::gcd(kChunk, p.n_sub) : 1;
}

uint64_t saved_bytes(const Problem &p) {
  int64_t count = saved_slots(p);
  const int64_t factors[] = {p.HV, p.K, saved_width(p), 4};
  for (int64_t factor : factors) {
    if (!mul_fits(count, factor, &count)) return UINT64_MAX;
  }
  return static_cast<uint64_t>(count);
}

}  // namespace fw::recurrence
