// SPDX-License-Identifier: Apache-2.0
// Reading JSON that somebody else wrote: UTF-8 is checked, a name may not occur twice in an object, nesting is
// bounded, and every failure is one sentence that begins with the name of the file.
#pragma once
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace fw::model {

nlohmann::json parse_json(std::string_view text, const std::string &file);  // throws Error

// "number", "string", ... of a value, for sentences; with a short rendering where that helps.
std::string describe(const nlohmann::json &value);

}  // namespace fw::model
