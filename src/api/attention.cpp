// SPDX-License-Identifier: Apache-2.0
#include "core/verbs.hpp"
#include "ops/attention/problem.hpp"

extern "C" {
FW_DEFINE_VERBS(attention, fw::attention::Op)
FW_DEFINE_STEP(attention, fw::attention::Op)
}
