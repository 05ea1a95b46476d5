// SPDX-License-Identifier: Apache-2.0
// Copies from global to shared memory that a thread does not wait for, compute capability 8.0 and later. The emulator of the tests has
// its own file of this name.
#pragma once
#include <stdint.h>

namespace fw::cuda {

// 16 bytes, both addresses multiples of 16.
__device__ __forceinline__ void copy_quad(void *shared, const void *global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))),
               "l"(global)
               : "memory");
}
// Ends a group of the calling thread's copies, and waits until at most kPending of its groups are under way. Other threads see the
// copies past a barrier behind the wait.
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace fw::cuda
