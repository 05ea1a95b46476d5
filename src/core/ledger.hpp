// SPDX-License-Identifier: Apache-2.0
// One description of a workspace gives both its size and its pointers.
//
//   template <class L> static Buffers lay_out(L &ledger, const Problem &p);   // the same code path both times
//   Ledger(nullptr) counts, Ledger(pointer) hands out. Every piece is aligned to 64 bytes.
// Members are always inlined: level files use them, and a copy shared by the linker could need what a machine lacks.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace fw {

class Ledger {
 public:
  __attribute__((always_inline)) explicit Ledger(void *base) {
    const uintptr_t address = reinterpret_cast<uintptr_t>(base);
    base_ = reinterpret_cast<char *>((address + kAlign - 1) / kAlign * kAlign);
    is_counting_ = base == nullptr;
  }

  template <class T>
  __attribute__((always_inline)) T *take(int64_t count) {
    const uint64_t offset = used_;
    uint64_t bytes = 0;
    if (count < 0 || __builtin_mul_overflow(static_cast<uint64_t>(count), sizeof(T), &bytes) ||
        __builtin_add_overflow(bytes, kAlign - 1, &bytes) || __builtin_add_overflow(used_, bytes / kAlign * kAlign, &used_)) {
      overflow_ = true;
    }
    return is_counting_ ? nullptr : reinterpret_cast<T *>(base_ + offset);
  }

  // Bytes to ask the caller for: what was taken and the slack to align any pointer. UINT64_MAX when they do not fit in 64 bits.
  __attribute__((always_inline)) uint64_t bytes() const {
    if (overflow_ || used_ > UINT64_MAX - kAlign) return UINT64_MAX;
    return used_ == 0 ? 0 : used_ + kAlign;
  }
  __attribute__((always_inline)) bool overflow() const { return overflow_; }

 private:
  static constexpr uint64_t kAlign = 64;
  char *base_;
  uint64_t used_ = 0;
  bool is_counting_;
  bool overflow_ = false;
};

}  // namespace fw
