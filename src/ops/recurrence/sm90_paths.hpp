// SPDX-License-Identifier: Apache-2.0
// The sm_90a path as the list of candidates sees it.
#pragma once
#include "core/impl_list.hpp"
#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

bool sm90_accepts(const fw_context &context, const Problem &p, Reason &reason);
uint64_t sm90_workspace(const fw_context &context, const Problem &p);
fw_status sm90_run(fw_context &context, const Problem &p, void *workspace);
int64_t sm90_chunk_length();

}  // namespace fw::recurrence
