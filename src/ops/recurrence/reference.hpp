// SPDX-License-Identifier: Apache-2.0
// The truth: the recurrence token by token and its reverse, for every row and every call by axes, forward, backward
// and step; fp64 descriptors are computed in fp64, all others in fp32. And the whole-sequence masked matrix form, in
// fp64. Frozen: never edited in a change that edits a kernel.
#pragma once
#include <stdint.h>

#include "core/impl_list.hpp"
#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

uint64_t reference_recurrent_workspace(const fw_context &context, const Problem &p);
void run_reference_recurrent(fw_context &context, const Problem &p, void *workspace);

// Forward only, at most kMaxParallelRows rows (T * n_sub).
constexpr int64_t kMaxParallelRows = 4096;
bool reference_parallel_accepts(const fw_context &context, const Problem &p, Reason &reason);
uint64_t reference_parallel_workspace(const fw_context &context, const Problem &p);
void run_reference_parallel(fw_context &context, const Problem &p, void *workspace);

}  // namespace fw::recurrence
