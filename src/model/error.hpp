// SPDX-License-Identifier: Apache-2.0
// How the model library says no: one exception type whose text is one sentence that names the file or argument, what
// was found and what is allowed. Text that comes from a file is quoted and cut before it enters a sentence.
#pragma once
#include <stdarg.h>
#include <stdio.h>

#include <stdexcept>
#include <string>
#include <string_view>

#include "fastweight/fastweight.h"

namespace fw::model {

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

__attribute__((format(printf, 1, 2))) inline std::string text(const char *format, ...) {
  char buffer[1024];
  va_list args;
  va_start(args, format);
  vsnprintf(buffer, sizeof buffer, format, args);
  va_end(args);
  return buffer;
}

#define FW_MODEL_FAIL(...) throw ::fw::model::Error(::fw::model::text(__VA_ARGS__))

// A refusal of the C interface is passed on as it is: its text already names operation, argument, found and allowed.
inline void check(fw_status status) {
  if (status != FW_OK) throw Error(fw_last_error());
}

// "..." with at most 64 bytes of the text, anything but printable ASCII as \xNN.
inline std::string quote(std::string_view raw) {
  std::string out = "\"";
  for (size_t i = 0; i < raw.size() && i < 64; ++i) {
    const unsigned char c = static_cast<unsigned char>(raw[i]);
    if (c >= 0x20 && c < 0x7f && c != '"' && c != '\\') {
      out += raw[i];
    } else {
      out += text("\\x%02x", c);
    }
  }
  return out + (raw.size() > 64 ? "...\"" : "\"");
}

}  // namespace fw::model
