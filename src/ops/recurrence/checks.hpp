// SPDX-License-Identifier: Apache-2.0
// From the public descriptor to a Problem, or to the sentence that refuses it. The only place that refuses arguments.
#pragma once
#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

// with_data: pointers are needed and, on the CPU, cu_seqlens and state_indices are read. grads: FW_BACKWARD only, may be null for queries.
fw_status make_problem(const fw_recurrence *desc, const fw_recurrence_grads *grads, fw_direction direction, bool with_data,
                       Problem *problem);

// The part of `check` that reads operand data, asked for by FW_CHECK_VALUES; of memory that the host can read.
fw_status check_values(const Problem &p);
// The numbers of state_indices, likewise.
fw_status check_slots(const Problem &p);

}  // namespace fw::recurrence
