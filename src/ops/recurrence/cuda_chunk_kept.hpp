// SPDX-License-Identifier: Apache-2.0
// How much of the states the chunk form's backward keeps at a time. The emulator of the tests has its own file of this name.
#pragma once
#include <stdint.h>

namespace fw::recurrence {

// Bytes; the second where sequences times value heads are fewer than kFewHeads, so that the scans do not fill the device and one more,
// for the states where ranges begin, would take long.
constexpr int64_t kMostKept = int64_t{3} << 29, kMostKeptOfFew = int64_t{3} << 30, kFewHeads = 64;

}  // namespace fw::recurrence
