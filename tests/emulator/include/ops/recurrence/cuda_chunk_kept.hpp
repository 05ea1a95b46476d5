// SPDX-License-Identifier: Apache-2.0
// The emulator's file for src/ops/recurrence/cuda_chunk_kept.hpp: one or two chunks of a small call.
#pragma once
#include <stdint.h>

namespace fw::recurrence {

constexpr int64_t kMostKept = 400000, kMostKeptOfFew = kMostKept, kFewHeads = 64;

}  // namespace fw::recurrence
