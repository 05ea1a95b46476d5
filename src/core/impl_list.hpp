// SPDX-License-Identifier: Apache-2.0
// An operation's candidates, best first. Each accepts or refuses with a reason; the first that accepts runs.
#pragma once
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "core/context.hpp"
#include "core/status.hpp"

namespace fw {

struct Reason {
  char text[256] = "";
  bool is_read = true;  // without a reader nothing is written: text takes longer than the question
  bool refuse(const char *format, ...) __attribute__((format(printf, 2, 3))) {
    if (!is_read) return false;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return false;
  }
};

template <class Problem>
struct Impl {
  const char *name;
  bool (*accepts)(const fw_context &, const Problem &, Reason &);
  uint64_t (*workspace)(const fw_context &, const Problem &);  // bytes; UINT64_MAX when they do not fit in 64 bits
  void (*run)(fw_context &, const Problem &, void *workspace);  // cannot fail; nullptr when the next one is given
  fw_status (*run_on_device)(fw_context &, const Problem &, void *workspace) = nullptr;  // orders work on a stream, which can
};

// Candidates as an operation's list: `first`, then `rest`.
template <class Problem, size_t kCount>
struct ImplList {
  Impl<Problem> impls[kCount];
  static constexpr int32_t count() { return kCount; }
};
template <class Problem, size_t kCount>
constexpr ImplList<Problem, kCount + 1> list_of(const Impl<Problem> &first, const Impl<Problem> (&rest)[kCount]) {
  ImplList<Problem, kCount + 1> all = {{first}};
  for (size_t i = 0; i < kCount; ++i) all.impls[i + 1] = rest[i];
  return all;
}

// Whether `name` is one of the comma-separated names.
inline bool name_in_list(const char *names, const char *name) {
  const size_t length = strlen(name);
  for (const char *p = names; p && *p; p = strchr(p, ',') ? strchr(p, ',') + 1 : nullptr) {
    if (strncmp(p, name, length) == 0 && (p[length] == 0 || p[length] == ',')) return true;
  }
  return false;
}

// For an implementation whose tests have not all been seen to pass on a device: it runs for those who name it.
inline bool is_forced(const fw_context &context, const char *name, Reason &reason) {
  return name_in_list(context.force_impl, name) || reason.refuse("on trial: runs when it is forced by its name");
}

template <class Problem>
const Impl<Problem> *forced(const fw_context &context, const Impl<Problem> *impls, int32_t n_impls) {
  for (int32_t i = 0; i < n_impls; ++i) {
    if (name_in_list(context.force_impl, impls[i].name)) return &impls[i];
  }
  return nullptr;
}

// op: the operation's name for the sentence.
template <class Problem>
fw_status choose(const char *op, const fw_context &context, const Problem &problem, const Impl<Problem> *impls,
                 int32_t n_impls, const Impl<Problem> **chosen) {
  Reason reason;
  if (const Impl<Problem> *only = forced(context, impls, n_impls)) {
    if (!only->accepts(context, problem, reason)) {
      return fail(FW_UNSUPPORTED, "%s: implementation %s is forced and refuses: %s", op, only->name, reason.text);
    }
    *chosen = only;
    return FW_OK;
  }
  reason.is_read = false;
  for (int32_t i = 0; i < n_impls; ++i) {
    if (impls[i].accepts(context, problem, reason)) {
      *chosen = &impls[i];
      return FW_OK;
    }
  }
  reason.is_read = true;
  char all[1600] = "";
  size_t length = 0;
  for (int32_t i = 0; i < n_impls; ++i) {
    (void)impls[i].accepts(context, problem, reason);
    if (length < sizeof all) {
      const int n = snprintf(all + length, sizeof all - length, "%s%s: %s", length ? "; " : "", impls[i].name, reason.text);
      length += n > 0 ? static_cast<size_t>(n) : 0;
    }
  }
  return fail(FW_UNSUPPORTED, "%s: no implementation accepts this call (%s)", op, all);
}

template <class Problem>
fw_status explain(const fw_context &context, const Problem &problem, const Impl<Problem> *impls, int32_t n_impls,
                  char *text, uint64_t capacity, uint64_t *needed) {
  TextSink sink(text, capacity);
  const Impl<Problem> *only = forced(context, impls, n_impls);
  bool is_chosen = false;
  for (int32_t i = 0; i < n_impls; ++i) {
    Reason reason;
    if (!impls[i].accepts(context, problem, reason)) {
      sink.add("%s: refused: %s\n", impls[i].name, reason.text);
    } else if (only && only != &impls[i]) {
      sink.add("%s: refused: %s is forced\n", impls[i].name, only->name);
    } else {
      sink.add("%s%s: accepted\n", is_chosen ? "" : "*", impls[i].name);
      is_chosen = true;
    }
  }
  if (needed) *needed = sink.needed();
  return FW_OK;
}

// Runs the chosen implementation and remembers its name for fw_last_impl.
template <class Problem>
fw_status run_chosen(const char *op, fw_context &context, const Problem &problem, const Impl<Problem> *impls,
                     int32_t n_impls, void *workspace, uint64_t workspace_size) {
  const Impl<Problem> *chosen = nullptr;
  FW_TRY(choose(op, context, problem, impls, n_impls, &chosen));
  const uint64_t bytes = chosen->workspace(context, problem);
  if (bytes > workspace_size || (bytes > 0 && workspace == nullptr)) {
    return fail(FW_WORKSPACE_TOO_SMALL, "%s: workspace has %llu bytes, needed %llu (%s)", op,
                static_cast<unsigned long long>(workspace ? workspace_size : 0),
                static_cast<unsigned long long>(bytes), chosen->name);
  }
  if (chosen->run_on_device) {
    FW_TRY(chosen->run_on_device(context, problem, workspace));
  } else {
    chosen->run(context, problem, workspace);
  }
  set_last_impl(chosen->name);
  return FW_OK;
}

}  // namespace fw
