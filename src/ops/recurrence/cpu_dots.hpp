// SPDX-License-Identifier: Apache-2.0
// The chunk forward on bf16 dot units (cpu/dot_units.hpp), as candidates of the list: one a kind of units.
#pragma once
#include "core/impl_list.hpp"
#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

const char *form_name(fw_form form);  // "chunk", "recurrent", "parallel"

// kind: DotUnitKind; name: the candidate's.
bool dots_accept(const fw_context &context, const Problem &p, int32_t kind, const char *name, Reason &reason);
uint64_t dots_workspace(const fw_context &context, const Problem &p, int32_t kind);
void dots_run(fw_context &context, const Problem &p, void *workspace, int32_t kind);

}  // namespace fw::recurrence
