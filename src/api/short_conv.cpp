// SPDX-License-Identifier: Apache-2.0
#include "core/verbs.hpp"
#include "ops/short_conv/problem.hpp"

extern "C" {
FW_DEFINE_VERBS(short_conv, fw::short_conv::ShortConv)
FW_DEFINE_STEP(short_conv, fw::short_conv::ShortConv)
}
