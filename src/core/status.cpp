// SPDX-License-Identifier: Apache-2.0
#include "core/status.hpp"

#include <stdarg.h>
#include <stdio.h>

namespace fw {
namespace {
thread_local char t_error[2048] = "";
thread_local const char *t_impl = "";
}  // namespace

fw_status fail(fw_status status, const char *format, ...) {
  va_list args;
  va_start(args, format);
  vsnprintf(t_error, sizeof t_error, format, args);
  va_end(args);
  return status;
}

const char *last_error() { return t_error; }
void set_last_impl(const char *name) { t_impl = name; }
const char *last_impl() { return t_impl; }

TextSink::TextSink(char *text, uint64_t capacity) : text_(text), capacity_(text ? capacity : 0) {
  if (capacity_ > 0) text_[0] = 0;
}

void TextSink::add(const char *format, ...) {
  char piece[1200];
  va_list args;
  va_start(args, format);
  const int n = vsnprintf(piece, sizeof piece, format, args);
  va_end(args);
  const uint64_t count = n < 0 ? 0 : (static_cast<uint64_t>(n) < sizeof piece ? static_cast<uint64_t>(n) : sizeof piece - 1);
  for (uint64_t i = 0; i < count; ++i, ++length_) {
    if (length_ + 1 < capacity_) {
      text_[length_] = piece[i];
      text_[length_ + 1] = 0;
    }
  }
}

}  // namespace fw
