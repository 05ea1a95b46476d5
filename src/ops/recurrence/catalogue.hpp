// SPDX-License-Identifier: Apache-2.0
// The catalogue: a named operator is one row here, and nothing else in the code knows its name.
#pragma once
#include <stdint.h>

#include "fastweight/recurrence.h"

namespace fw::recurrence {

// Operands beside q, k, v, as bits.
enum : uint32_t {
  kA = 1, kB = 2, kP = 4, kEraseGate = 8, kWriteGate = 16, kG = 32, kBeta = 64,
};

struct Row {
  const char *name;
  fw_op op;
  fw_gate gate;
  fw_erase erase;
  uint32_t required;
  uint32_t optional;
  double default_scale;  // 0: K^-1/2
  bool may_normalize;
  bool may_have_sub_steps;
  bool has_fixed_gate;
};

// nullptr for a number outside the catalogue. For FW_OP_BY_AXES use axes_row.
const Row *find_row(fw_op op);
// The row of a call by its axes: any operand that the axes can use.
Row axes_row(fw_gate gate, fw_erase erase);

}  // namespace fw::recurrence
