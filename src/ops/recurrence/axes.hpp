// SPDX-License-Identifier: Apache-2.0
// From the axes of a call to the instance compiled for them: Body::run<gate, erase>(args). Of both backends. Static: level files use
// it, and a copy that the linker shares could be one with instructions that the machine lacks.
#pragma once
#include "ops/recurrence/problem.hpp"

namespace fw::recurrence {

template <class Body, fw_gate kGate, class... Args>
static inline auto dispatch_erase(const Problem &p, Args &...args) {
  switch (p.erase) {
    case FW_ERASE_NONE: return Body::template run<kGate, FW_ERASE_NONE>(args...);
    case FW_ERASE_SHARED_AFTER: return Body::template run<kGate, FW_ERASE_SHARED_AFTER>(args...);
    case FW_ERASE_SHARED_BEFORE: return Body::template run<kGate, FW_ERASE_SHARED_BEFORE>(args...);
    default: return Body::template run<kGate, FW_ERASE_INDEPENDENT>(args...);
  }
}

template <class Body, class... Args>
static inline auto dispatch_axes(const Problem &p, Args &&...args) {
  switch (p.gate) {
    case FW_GATE_NONE: return dispatch_erase<Body, FW_GATE_NONE>(p, args...);
    case FW_GATE_SCALAR: return dispatch_erase<Body, FW_GATE_SCALAR>(p, args...);
    default: return dispatch_erase<Body, FW_GATE_VECTOR>(p, args...);
  }
}

}  // namespace fw::recurrence
