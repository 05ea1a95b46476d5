// SPDX-License-Identifier: Apache-2.0
// What a call refuses with.
#pragma once
#include <string>

#include "model/error.hpp"

// The sentence of the Error that `call` throws, "" when it throws none.
template <class Call>
std::string refusal(Call call) {
  try {
    call();
  } catch (const fw::model::Error &error) {
    return error.what();
  }
  return "";
}

// One sentence: no line break, no control byte, of a length that fits a terminal's few lines.
inline bool is_one_sentence(const std::string &text) {
  if (text.empty() || text.size() > 400) return false;
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || static_cast<unsigned char>(c) > 0x7e) return false;
  }
  return true;
}
