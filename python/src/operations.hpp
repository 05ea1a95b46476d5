// SPDX-License-Identifier: Apache-2.0
// The descriptors of the C interface as tables: which fields they have, where, and what a call returns. One generic piece
// of code (verb.hpp) fills any of them from Python values.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "fastweight/fastweight.h"

namespace fastweight::python {

enum class Kind : uint8_t { kTensor, kWritten, kEnum, kInt32, kInt64, kDouble };

struct Field {
  const char *name;
  size_t offset;
  Kind kind;
  const char *const *words = nullptr;  // kEnum: word i is the value i; "" is no word; ends with nullptr
  bool zero_is_default = false;        // numbers: 0 has the meaning "not given", so a caller may not say it
  bool last_word_for_steps = false;  // kEnum
};

// A tensor that the call returns: dtype and sizes from the descriptor as filled so far. False: the inputs have not the
// dimensions that the shape is read from; the call itself then says what is wrong.
struct Output {
  const char *name;
  size_t offset;
  bool is_final;  // returned as None unless asked for
  bool (*shape)(const void *desc, fw_tensor *view);
  const char *pattern = "";  // a field that often has the same type and shape
};

// A tensor of the descriptor of gradients: coming in for an output, going out for a field.
struct Gradient {
  const char *of;
  size_t offset;
};

struct Operation {
  const char *name;
  size_t size;
  size_t device_offset;
  size_t stream_offset;  // 0: none
  size_t options_offset;  // 0: none
  std::vector<Field> fields;
  std::vector<Output> outputs;
  size_t grads_size;
  std::vector<Gradient> incoming, outgoing;
  size_t saved_offset, saved_size_offset;  // what forward leaves for backward; used where saved_size is given
  fw_status (*saved_size)(const fw_context *, const void *, uint64_t *);
  bool (*saved_has_holes)(const void *);  // whether forward leaves some of it unwritten
  fw_status (*check)(const fw_context *, const void *, fw_direction);
  fw_status (*workspace_size)(const fw_context *, const void *, fw_direction, uint64_t *);
  fw_status (*run)(fw_context *, const void *, fw_direction, void *, uint64_t);
  fw_status (*backward)(fw_context *, const void *, const void *, void *, uint64_t);
  fw_status (*explain)(const fw_context *, const void *, fw_direction, char *, uint64_t, uint64_t *);

  const Field *find(const char *field) const;  // nullptr: none of that name
};

constexpr size_t kMaxDescriptor = sizeof(fw_recurrence), kMaxGrads = sizeof(fw_recurrence_grads);
constexpr int kMaxOutputs = 3;

const Operation *find_operation(const char *name);

}  // namespace fastweight::python
