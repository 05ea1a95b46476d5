// SPDX-License-Identifier: Apache-2.0
#include "ops/recurrence/cpu_dots.hpp"

#include "ops/recurrence/cpu_table.hpp"

namespace fw::recurrence {
namespace {

// Where a chunk has more rows than the state has keys, it can erase the whole state that it read in bf16, and what is
// left is that rounding: K = 3 went to 5.6 times the limit of the state, K = 8 to 0.52, 16 to 128 to 0.49.
constexpr int64_t kLeastKeys = 32;

// The level that packs, scores and solves: the one that units belong to, or the machine's best beside a model.
const CpuTable &table(const fw_context &context, int32_t kind) {
  if (kind == kAmxModel || kind == kPairsModel) return FW_LEVEL_TABLE(context.cpu_level, kRecurrenceTable);
  if (kind == kNeonBf16) return FW_LEVEL_TABLE(kBaseline, kRecurrenceTable);
  return FW_LEVEL_TABLE(kAvx512, kRecurrenceTable);
}

}  // namespace

bool dots_accept(const fw_context &context, const Problem &p, int32_t kind, const char *name, Reason &reason) {
  const char *units = dot_units_name(kind);
  if (p.device != FW_DEVICE_CPU) return reason.refuse("device is cuda");
  if (!dot_units_are_built(kind)) return reason.refuse("%s is not built into this library", units);
  if (p.form != FW_FORM_CHUNK) return reason.refuse("form is %s", form_name(p.form));
  if (p.q.dtype != FW_BF16) return reason.refuse("q is %s, bf16 dot units take bf16", dtype_name(p.q.dtype));
  if (p.K < kLeastKeys || p.K % 16 != 0) {
    return reason.refuse("K is %lld, taken multiples of 16 from %lld on", static_cast<long long>(p.K),
                         static_cast<long long>(kLeastKeys));
  }
  if (p.gate == FW_GATE_NONE && p.erase == FW_ERASE_NONE && (p.has_l2norm || p.has_normalizer)) {
    return reason.refuse("keys are normalised inside or outputs divided, which linear_attn computes in fp32");
  }
  if (p.saved) return reason.refuse("saved is given, written by the fp32 chunk form only");
  const bool is_named = name_in_list(context.force_impl, name), is_model = kind == kAmxModel || kind == kPairsModel;
  if (!is_named && is_model) return reason.refuse("a model of the units: runs when it is forced by its name");
  if (!is_named && !dot_units_pay(kind)) {
    return reason.refuse("this CPU's family is not one where %s was measured to pay", units);
  }
  // after the rest: AMX is asked for by a system call that changes the process
  if (!dot_units_are_available(kind)) return reason.refuse("this machine does not execute %s", units);
  return is_named || is_forced(context, name, reason);
}

uint64_t dots_workspace(const fw_context &context, const Problem &p, int32_t kind) {
  return table(context, kind).chunk_dots_workspace(context, p, dot_units(kind));
}

void dots_run(fw_context &context, const Problem &p, void *workspace, int32_t kind) {
  table(context, kind).chunk_dots(context, p, workspace, dot_units(kind));
}

}  // namespace fw::recurrence
