// SPDX-License-Identifier: Apache-2.0
// The CPU functions that exist once an instruction-set level, chosen by context.cpu_level or by a forced name.
#pragma once
#include "core/context.hpp"
#include "cpu/dot_units.hpp"
#include "cpu/levels.hpp"
#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

struct CpuTable {
  uint64_t (*chunk_forward_workspace)(const fw_context &, const Problem &);
  void (*chunk_forward)(fw_context &, const Problem &, void *workspace);
  uint64_t (*chunk_dots_workspace)(const fw_context &, const Problem &, const DotUnits &);
  void (*chunk_dots)(fw_context &, const Problem &, void *workspace, const DotUnits &);  // the forward
  uint64_t (*chunk_backward_workspace)(const fw_context &, const Problem &);
  void (*chunk_backward)(fw_context &, const Problem &, void *workspace);
  uint64_t (*recurrent_workspace)(const fw_context &, const Problem &);  // forward and step
  void (*recurrent)(fw_context &, const Problem &, void *workspace);
};

}  // namespace fw::recurrence

FW_DECLARE_LEVEL_TABLES(::fw::recurrence::CpuTable, kRecurrenceTable)
