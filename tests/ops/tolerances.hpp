// SPDX-License-Identifier: Apache-2.0
// The error rule as data: how many times the yardstick's error a result may have, and what is added. Frozen; a change
// here never comes with a change of a kernel.
//
// Derivation. The yardstick (yardstick.hpp) makes the roundings that no computation with operands of the storage type
// can avoid. A chunk computation orders its sums otherwise and rounds intermediate products once or twice more; an
// emulation of such a kernel that keeps three more bits in its triangular solve stayed, over all rows, regimes and
// 93000 random draws, within 1.3 (outputs), 1.3 (states) and 1.8 (gradients; 2.7 for dg) times the yardstick's RMS
// error. So a third is left to an honest kernel. None is left to a faulty one: test_yardstick.cpp plants, one at a time,
// a state and a state gradient held in bf16, an inverse by Neumann doubling in fp16, dg as a difference of sums over
// bf16 or fp16 gradients, cumulative gates held in bf16 or fp16, a half type where fp32 was given, and one wrong
// element; each goes past the limits below on regimes of the test data, with 256 tokens at least 2.9 times for the
// three in the middle. With 128 tokens dg by cancellation (simple_gla, bf16, one draw) came to 1.003 of its limit:
// short cases may let it pass.
#pragma once
#include <math.h>
#include <stdint.h>

#include <string>

#include "fastweight/types.h"

namespace fw::test {

constexpr double kOutputFactor = 2.0;    // o
constexpr double kStateFactor = 2.5;     // final_state, final_z, state, state_z
constexpr double kGradientFactor = 3.0;  // everything that backward returns
// The maximum of n errors scatters more than their RMS.
constexpr double kMaximumFactor = 1.5;
// With fp32 operands the yardstick has rounding errors of sums only; the cumulative gate of a chunk, which a token
// loop never forms, dominates and costs up to 4 times as much.
constexpr double kFp32Factor = 6.0;
// Error estimates from few elements scatter: 1 + 4 / sqrt(n).
inline double scatter(int64_t n) { return 1.0 + 4.0 / sqrt(static_cast<double>(n > 0 ? n : 1)); }
// Below this an error estimate says too little; the largest relative error of the yardstick's whole run stands in.
constexpr int64_t kSmallTensor = 64;

// Half a unit in the last place of 1: the largest relative error of one rounding to nearest.
inline double round_off(fw_dtype dtype) {
  switch (dtype) {
    case FW_BF16: return 0x1p-8;
    case FW_F16: return 0x1p-11;
    case FW_F32: return 0x1p-24;
    default: return 0x1p-53;
  }
}
// Sums and products in fp32 that the yardstick happens to make exactly: so many round-offs of the tensor are added,
// and for dg so many of the sums that it is the difference of.
constexpr double kAddedRoundOffs = 4.0;

inline double factor_of(const std::string &name) {
  if (name == "o") return kOutputFactor;
  if (name == "final_state" || name == "final_z" || name == "state" || name == "state_z") return kStateFactor;
  return kGradientFactor;
}

}  // namespace fw::test
