// SPDX-License-Identifier: Apache-2.0
#include "core/verbs.hpp"
#include "ops/gate/problem.hpp"

extern "C" {
FW_DEFINE_VERBS(gate_activation, fw::gate::GateActivation)
}
