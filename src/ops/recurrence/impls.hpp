// SPDX-License-Identifier: Apache-2.0
// The candidates of the family, best first. Reading impls.cpp answers "which kernel runs?".
#pragma once
#include "core/impl_list.hpp"
#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

struct Candidates {
  const Impl<Problem> *impls;
  int32_t count;
};
Candidates candidates(fw_direction direction);

// Tokens a chunk of the chosen implementation; 1 when it goes token by token.
int64_t chunk_length(const Impl<Problem> &impl, const Problem &p);

}  // namespace fw::recurrence
