// SPDX-License-Identifier: Apache-2.0
// The caller's struct, read once: whatever the library knows of it afterwards is the copy. A struct_size below ours
// is an older caller's (missing fields are 0), above ours a newer caller's (the bytes unknown here must be 0).
#pragma once
#include <stdint.h>
#include <string.h>

#include "core/status.hpp"
#include "core/tensor.hpp"

namespace fw {

// No struct of the interface is larger; a struct_size past it is not believed, so that it is not read.
constexpr uint32_t kMaxStructSize = 16384;
// struct_size and one more field: the least that any version of any struct had.
constexpr uint32_t kMinStructSize = 8;

// what: "desc", "grads" or "options", for the sentence. T starts with uint32_t struct_size and is zero-filled by T{}.
template <class T>
fw_status read_descriptor(const char *op, const T *desc, T *copy, const char *what = "desc") {
  if (!desc) return fail(FW_INVALID_ARGUMENT, "%s: %s is a null pointer", op, what);
  uint32_t size;
  memcpy(&size, desc, sizeof size);
  if (size < kMinStructSize || size > kMaxStructSize) {
    return fail(FW_INVALID_ARGUMENT, "%s: %s.struct_size is %u, expected %zu (allowed %u to %u)", op, what, size,
                sizeof(T), kMinStructSize, kMaxStructSize);
  }
  // such a size cuts a stride or a pointer in two, and what is left of it is another number
  if (size % alignof(T) != 0) {
    return fail(FW_INVALID_ARGUMENT, "%s: %s.struct_size is %u, expected %zu (allowed multiples of %zu)", op, what, size,
                sizeof(T), alignof(T));
  }
  const unsigned char *bytes = reinterpret_cast<const unsigned char *>(desc);
  for (uint32_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] != 0) {
      return fail(FW_INVALID_ARGUMENT,
                  "%s: %s.struct_size is %u, and byte %u, past the %zu that this version knows, is %u, allowed 0", op,
                  what, size, i, sizeof(T), bytes[i]);
    }
  }
  *copy = T{};
  memcpy(copy, desc, size < sizeof(T) ? size : sizeof(T));
  copy->struct_size = sizeof(T);
  return FW_OK;
}

inline fw_status check_device(const char *op, fw_device device) {
  if (device == FW_DEVICE_CPU || device == FW_DEVICE_CUDA) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: device is %d, allowed 0 (CPU) or 1 (CUDA)", op, device);
}

inline fw_status check_reserved(const char *op, const char *what, uint32_t reserved) {
  if (reserved == 0) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: %s is %u, allowed 0", op, what, reserved);
}

// A tensor that this call must not have; why: "is for step only", "kind 2 takes none".
inline fw_status check_absent(const char *op, const char *name, const fw_tensor &t, const char *why) {
  if (!given(t)) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: %s is given, but %s", op, name, why);
}

// A sequence whose slot an earlier sequence has (*earlier), or -1. Indices below `slots`, negative ones skip. All
// pairs, or passes with a bitmap over ranges of slots: whichever reads less.
inline int64_t find_repeated_slot(const fw_tensor &indices, int64_t n_sequences, int64_t slots, int64_t *earlier) {
  constexpr int64_t kRange = 32768;  // slots of one pass, a bitmap of 4 kB
  const int32_t *data = static_cast<const int32_t *>(indices.data);
  const int64_t stride = indices.strides[0];
  const bool by_pairs = slots / kRange + 1 > n_sequences / 2;
  int64_t repeated = -1;
  for (int64_t base = 0; !by_pairs && base < slots && repeated < 0; base += kRange) {
    uint64_t seen[kRange / 64] = {};
    for (int64_t n = 0; n < n_sequences && repeated < 0; ++n) {
      const int64_t at = data[n * stride] - base;
      if (at < 0 || at >= kRange) continue;
      const uint64_t bit = uint64_t{1} << (at % 64);
      if (seen[at / 64] & bit) repeated = n;
      seen[at / 64] |= bit;
    }
  }
  for (int64_t n = by_pairs ? 0 : repeated; n >= 0 && n < (by_pairs ? n_sequences : repeated + 1); ++n) {
    for (int64_t m = 0; m < n && data[n * stride] >= 0; ++m) {
      if (data[m * stride] != data[n * stride]) continue;
      *earlier = m;
      return n;
    }
  }
  return -1;
}

// The slots of a pool, one a sequence: int32 [N], negative skips, below `slots`, no slot twice. with_data: the pointer is there;
// the numbers are read when the call is the CPU's.
inline fw_status check_state_indices(const char *op, const fw_tensor &indices, int64_t n_sequences, int64_t slots,
                                     bool with_data, const char *pool = "state", const char *name = "state_indices",
                                     fw_device device = FW_DEVICE_CPU) {
  if (!given(indices)) {
    if (slots >= n_sequences) return FW_OK;
    return fail(FW_INVALID_ARGUMENT, "%s: %s has %lld slots, expected at least N = %lld without %s", op, pool,
                static_cast<long long>(slots), static_cast<long long>(n_sequences), name);
  }
  const fw_dtype allowed[] = {FW_I32};
  FW_TRY(check_dtype(op, name, indices, allowed, 1));
  FW_TRY(check_tensor(op, name, indices, &n_sequences, 1, with_data));
  if (!with_data || device != FW_DEVICE_CPU) return FW_OK;
  const int32_t *data = static_cast<const int32_t *>(indices.data);
  const int64_t stride = indices.strides[0];
  for (int64_t i = 0; i < n_sequences; ++i) {
    const int32_t slot = data[i * stride];
    if (slot >= slots) {
      return fail(FW_INVALID_ARGUMENT, "%s: %s[%lld] is %d, allowed below %lld", op, name, static_cast<long long>(i),
                  slot, static_cast<long long>(slots));
    }
  }
  int64_t earlier;
  const int64_t repeated = find_repeated_slot(indices, n_sequences, slots, &earlier);
  if (repeated < 0) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: %s[%lld] is %d, a slot that an earlier sequence has", op, name,
              static_cast<long long>(repeated), data[repeated * stride]);
}

}  // namespace fw
