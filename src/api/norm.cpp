// SPDX-License-Identifier: Apache-2.0
#include "core/verbs.hpp"
#include "ops/norm/problem.hpp"

extern "C" {
FW_DEFINE_VERBS(norm, fw::norm::Norm)
}
