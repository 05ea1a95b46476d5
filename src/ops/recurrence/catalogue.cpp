// SPDX-License-Identifier: Apache-2.0
#include "ops/recurrence/catalogue.hpp"

namespace fw::recurrence {
namespace {

// clang-format off
constexpr Row kRows[] = {
    // name                 op                         gate            erase                   required                     optional  scale norm   subs   fixed
    {"linear_attn",         FW_OP_LINEAR_ATTN,         FW_GATE_NONE,   FW_ERASE_NONE,          0,                           0,        0,    true,  false, false},
    {"simple_gla",          FW_OP_SIMPLE_GLA,          FW_GATE_SCALAR, FW_ERASE_NONE,          kG,                          0,        0,    false, false, false},
    {"retention",           FW_OP_RETENTION,           FW_GATE_SCALAR, FW_ERASE_NONE,          0,                           0,        0,    false, false, true},
    {"lightning",           FW_OP_LIGHTNING,           FW_GATE_SCALAR, FW_ERASE_NONE,          0,                           0,        0,    false, false, true},
    {"gla",                 FW_OP_GLA,                 FW_GATE_VECTOR, FW_ERASE_NONE,          kG,                          0,        0,    false, false, false},
    {"delta_rule",          FW_OP_DELTA_RULE,          FW_GATE_NONE,   FW_ERASE_SHARED_AFTER,  kBeta,                       0,        0,    false, false, false},
    {"gated_delta_rule",    FW_OP_GATED_DELTA_RULE,    FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER,  kG | kBeta,                  0,        0,    false, false, false},
    {"comba",               FW_OP_COMBA,               FW_GATE_SCALAR, FW_ERASE_SHARED_BEFORE, kG | kBeta | kP,             0,        0,    false, false, false},
    {"kda",                 FW_OP_KDA,                 FW_GATE_VECTOR, FW_ERASE_SHARED_AFTER,  kG | kBeta,                  0,        0,    false, false, false},
    {"gdn2",                FW_OP_GDN2,                FW_GATE_VECTOR, FW_ERASE_SHARED_AFTER,  kG | kEraseGate | kWriteGate,0,        0,    false, false, false},
    {"gated_delta_product", FW_OP_GATED_DELTA_PRODUCT, FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER,  kBeta,                       kG,       0,    false, true,  false},
    {"iplr",                FW_OP_IPLR,                FW_GATE_NONE,   FW_ERASE_INDEPENDENT,   kA | kB,                     0,        0,    false, false, false},
    {"dplr",                FW_OP_DPLR,                FW_GATE_VECTOR, FW_ERASE_INDEPENDENT,   kA | kB | kG,                0,        0,    false, false, false},
    {"rwkv7",               FW_OP_RWKV7,               FW_GATE_VECTOR, FW_ERASE_INDEPENDENT,   kA | kB | kG,                0,        1.0,  false, false, false},
};
// clang-format on

}  // namespace

const Row *find_row(fw_op op) {
  for (const Row &row : kRows) {
    if (row.op == op) return &row;
  }
  return nullptr;
}

Row axes_row(fw_gate gate, fw_erase erase) {
  Row row = {"by_axes", FW_OP_BY_AXES, gate, erase, 0, 0, 0, false, false, false};
  if (gate != FW_GATE_NONE) row.required |= kG;
  if (erase == FW_ERASE_INDEPENDENT) row.required |= kA | kB;
  if (erase == FW_ERASE_SHARED_AFTER || erase == FW_ERASE_SHARED_BEFORE) {
    row.optional |= kBeta | kP | kEraseGate | kWriteGate;
  }
  return row;
}

}  // namespace fw::recurrence
