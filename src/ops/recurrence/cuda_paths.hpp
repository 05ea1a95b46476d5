// SPDX-License-Identifier: Apache-2.0
// The portable CUDA path as the list of candidates sees it.
#pragma once
#include "core/impl_list.hpp"
#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

// What every path of CUDA asks for, and cuda_portable beside that.
bool cuda_accepts(const fw_context &context, const Problem &p, Reason &reason);
bool cuda_portable_accepts(const fw_context &context, const Problem &p, Reason &reason);
uint64_t cuda_workspace(const fw_context &context, const Problem &p);
fw_status cuda_run(fw_context &context, const Problem &p, void *workspace);

// Chunks of 16 rows on the tensor cores of compute capability 8.0 and later.
bool cuda_chunk_accepts(const fw_context &context, const Problem &p, Reason &reason);
uint64_t cuda_chunk_workspace(const fw_context &context, const Problem &p);
fw_status cuda_chunk_run(fw_context &context, const Problem &p, void *workspace);
bool cuda_chunk_backward_accepts(const fw_context &context, const Problem &p, Reason &reason);
uint64_t cuda_chunk_backward_workspace(const fw_context &context, const Problem &p);
fw_status cuda_chunk_backward_run(fw_context &context, const Problem &p, void *workspace);

// Whether the current device reaches every tensor of a call, saved and the workspace, and the alignment of the last two.
fw_status cuda_check_places(const Problem &p, const void *workspace);

// Decode: warps that own panels, and states that stream through shared memory.
bool cuda_step_accepts(const fw_context &context, const Problem &p, Reason &reason);
uint64_t cuda_step_workspace(const fw_context &context, const Problem &p);
fw_status cuda_step_run(fw_context &context, const Problem &p, void *workspace);
bool sm90_step_chunk_accepts(const fw_context &context, const Problem &p, Reason &reason);
fw_status sm90_step_chunk_run(fw_context &context, const Problem &p, void *workspace);
bool sm90_step_accepts(const fw_context &context, const Problem &p, Reason &reason);
fw_status sm90_step_run(fw_context &context, const Problem &p, void *workspace);

// What FW_CHECK_VALUES asks for: copies cu_seqlens, state_indices and, with g_min, g to the host and waits for the stream.
fw_status cuda_check_values(const Problem &p);

// The copy of fw_recurrence_state_import and _export.
fw_status cuda_move_state(const Problem &p, const fw_tensor &plain, fw_state_layout layout, bool is_import);

}  // namespace fw::recurrence
