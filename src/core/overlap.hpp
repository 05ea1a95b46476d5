// SPDX-License-Identifier: Apache-2.0
// Whether two elements of a strided view share an address. No allocation.
#pragma once
#include <stdint.h>

#include "fastweight/types.h"

namespace fw {

// kUnknown: it takes more than kOverlapCases cases to tell.
enum class Overlap { kNone, kSome, kUnknown };
constexpr int64_t kOverlapCases = 65536;

// Shape and strides checked: offsets and the number of elements are below 2^58.
Overlap overlap_of(const fw_tensor &t);

}  // namespace fw
