// SPDX-License-Identifier: Apache-2.0
// States in the library's own layout, which only a step reads: made from plain ones, and back.
#pragma once
#include <nanobind/nanobind.h>

#include <string>

#include "arrays.hpp"

namespace fastweight::python {

// state [slots,HV,K,V] ("kv") or [slots,HV,V,K] ("vk") -> a new [slots,HV,E] in `dtype` (None: the state's).
nb::object state_import(const nb::object &state, const std::string &state_layout, const nb::object &dtype);
// The other way.
nb::object state_export(const nb::object &state, int64_t K, int64_t V, const std::string &state_layout, const nb::object &dtype);

}  // namespace fastweight::python
