// SPDX-License-Identifier: Apache-2.0
// Status and the thread-local error text. Every refusal sentence reads: operation: argument, found, allowed.
#pragma once
#include "fastweight/types.h"

namespace fw {

// Formats the thread-local error text (printf rules) and returns `status`.
fw_status fail(fw_status status, const char *format, ...) __attribute__((format(printf, 2, 3)));

const char *last_error();
void set_last_impl(const char *name);  // `name` must live as long as the process
const char *last_impl();

// Text assembled for explain: appends like printf, remembers the whole length, never overruns.
class TextSink {
 public:
  TextSink(char *text, uint64_t capacity);
  void add(const char *format, ...) __attribute__((format(printf, 2, 3)));
  uint64_t needed() const { return length_ + 1; }

 private:
  char *text_;
  uint64_t capacity_;
  uint64_t length_ = 0;
};

#define FW_TRY(expression)                              \
  do {                                                  \
    const fw_status try_status_ = (expression);         \
    if (try_status_ != FW_OK) return try_status_;       \
  } while (0)

}  // namespace fw
