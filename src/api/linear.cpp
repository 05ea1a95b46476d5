// SPDX-License-Identifier: Apache-2.0
#include "core/verbs.hpp"
#include "ops/linear/problem.hpp"

extern "C" {
FW_DEFINE_VERBS(linear, fw::linear::Op)
}
