// SPDX-License-Identifier: Apache-2.0
// A call of an operation beside the recurrence where its context computes: on the CPU as it stands, and with FW_TEST_DEVICE=cuda
// on copies of every tensor's memory, guard bands included, which come back after it. So every check of the host's memory is one
// of the device's.
#pragma once
#include <string.h>

#include <functional>
#include <set>
#include <vector>

#include "core/context.hpp"
#include "fastweight/fastweight.h"
#include "harness_device.hpp"

namespace fwtest {

// Memory of a tensor, found by any address inside it.
class KnownBytes : public std::vector<uint8_t> {
 public:
  KnownBytes() { all().insert(this); }
  KnownBytes(const KnownBytes &other) : std::vector<uint8_t>(other) { all().insert(this); }
  KnownBytes(KnownBytes &&other) : std::vector<uint8_t>(std::move(other)) { all().insert(this); }
  KnownBytes &operator=(const KnownBytes &) = default;
  KnownBytes &operator=(KnownBytes &&) = default;
  ~KnownBytes() { all().erase(this); }
  static KnownBytes *around(const void *address) {
    const uint8_t *at = static_cast<const uint8_t *>(address);
    for (KnownBytes *bytes : all()) {
      if (at >= bytes->data() && at < bytes->data() + bytes->size()) return bytes;
    }
    return nullptr;
  }

 private:
  static std::set<KnownBytes *> &all() {
    static std::set<KnownBytes *> known;
    return known;
  }
};

// A context that forces an implementation of the CPU computes there, whatever device is under test.
inline bool runs_on_cuda(const fw_context *context) {
  return fw::test::is_on_cuda() && (!context->force_impl[0] || strcmp(context->force_impl, "cuda") == 0);
}
inline fw_device device_of(const fw_context *context) { return runs_on_cuda(context) ? FW_DEVICE_CUDA : FW_DEVICE_CPU; }

// The tensors of a descriptor, which lie side by side: up to its `stream`, of gradients up to the end.
template <class Struct>
std::vector<fw_tensor *> tensors_of(Struct &s) {
  fw_tensor *first = nullptr, *end = reinterpret_cast<fw_tensor *>(&s + 1);
  if constexpr (requires { s.stream; }) end = reinterpret_cast<fw_tensor *>(&s.stream);
  if constexpr (requires { s.x; }) {
    first = &s.x;
  } else if constexpr (requires { s.q; }) {
    first = &s.q;
  } else if constexpr (requires { s.dy; }) {
    first = &s.dy;
  } else {
    first = &s.d_o;
  }
  std::vector<fw_tensor *> all;
  for (fw_tensor *t = first; t < end; ++t) all.push_back(t);
  return all;
}

// f(desc, grads, workspace) with everything where the context computes. around: bytes of the workspace's memory before and after
// it that are copied too.
template <class Desc, class Grads>
fw_status call_on_device(const fw_context *context, const Desc &desc, const Grads &grads, void *workspace, uint64_t size, uint64_t around,
                         const std::function<fw_status(const Desc &, const Grads &, void *)> &f) {
  if (!runs_on_cuda(context)) return f(desc, grads, workspace);
#if defined(FW_HAVE_CUDA)
  fw::test::DeviceMirror mirror;
  std::set<KnownBytes *> added;
  Desc d = desc;
  Grads g = grads;
  d.device = FW_DEVICE_CUDA;
  d.stream = mirror.stream();
  const auto move = [&](fw_tensor *t) {
    KnownBytes *bytes = t->dtype != FW_NONE && t->data ? KnownBytes::around(t->data) : nullptr;
    if (!bytes) return;
    if (added.insert(bytes).second) mirror.add(bytes->data(), bytes->size());
    t->data = mirror.find(t->data);
  };
  for (fw_tensor *t : tensors_of(d)) move(t);
  for (fw_tensor *t : tensors_of(g)) move(t);
  char *memory = nullptr;
  if (workspace) memory = static_cast<char *>(mirror.add(static_cast<char *>(workspace) - around, size + 2 * around)) + around;
  mirror.settle();
  const fw_status status = f(d, g, memory);
  mirror.fetch();
  return status;
#else
  (void)size, (void)around;
  throw std::runtime_error("FW_TEST_DEVICE is cuda, this build has none");
#endif
}

}  // namespace fwtest
