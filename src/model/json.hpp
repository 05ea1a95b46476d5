// SPDX-License-Identifier: Apache-2.0
// Reading JSON that somebody else wrote: UTF-8 is checked, a name may not occur twice in an object, nesting is bounded,
// and every failure is one sentence that begins with the name of the file.
#pragma once
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

namespace fw::model {

nlohmann::json parse_json(std::string_view text, const std::string &file);  // throws Error

// Index of the first byte that is not part of well-formed UTF-8 (shortest form, no surrogates), or npos.
size_t find_invalid_utf8(std::string_view text);

// Malformed bytes become U+FFFD, one for each.
std::string replace_invalid_utf8(std::string_view text);

// "number", "string", ... of a value, for sentences; with a short rendering where that helps.
std::string describe(const nlohmann::json &value);

}  // namespace fw::model
