// SPDX-License-Identifier: Apache-2.0
// The emulator's file for src/cuda/async_copy.cuh: a copy happens at some moment between its commit and the wait for it.
#pragma once
#include <cuda_runtime.h>
#include <string.h>

namespace fw::cuda {

inline void copy_quad(void *shared, const void *global) {
  if (reinterpret_cast<uintptr_t>(global) % 16 != 0) emulator::stop("copy_quad: no multiple of 16 bytes");
  unsigned char *to = emulator::shared_at(emulator::address_of(shared), 16, "copy_quad");
  if (emulator::address_of(shared) % 16 != 0) emulator::stop("copy_quad: to no multiple of 16 bytes");
  emulator::bulk_store([=] { memcpy(to, global, 16); });
}
inline void copy_commit() { emulator::bulk_commit(); }
template <int kPending>
void copy_wait() {
  emulator::bulk_wait(kPending);
}

}  // namespace fw::cuda
