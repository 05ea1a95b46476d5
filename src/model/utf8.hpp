// SPDX-License-Identifier: Apache-2.0
// Well-formed UTF-8: shortest form, no surrogates, at most U+10FFFF.
#pragma once
#include <string>
#include <string_view>

namespace fw::model {

// Index of the first byte that is not part of well-formed UTF-8, or npos.
size_t find_invalid_utf8(std::string_view text);

// Malformed bytes become U+FFFD, one for each.
std::string replace_invalid_utf8(std::string_view text);

}  // namespace fw::model
