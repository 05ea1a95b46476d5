// SPDX-License-Identifier: Apache-2.0
// The emulator's file for src/cuda/sm90/barrier.cuh.
#pragma once
#include <cuda_runtime.h>

#include "cuda/sm90/layout.cuh"

namespace fw::sm90 {

inline uint32_t shared_address(const void *pointer) { return emulator::address_of(pointer); }

inline void barrier_init(uint32_t barrier, uint32_t arrivals) { emulator::barrier_init(barrier, arrivals); }
inline void barrier_init_fence() {}
inline void barrier_arrive(uint32_t barrier) { emulator::barrier_arrive(barrier, 0, emulator::cluster_rank()); }
inline void barrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  emulator::barrier_arrive(barrier, bytes, emulator::cluster_rank());
}
inline void barrier_arrive_at(uint32_t barrier, uint32_t rank) { emulator::barrier_arrive(barrier, 0, rank); }
inline void barrier_arrive_at_if(uint32_t barrier, uint32_t rank, int condition) {
  if (condition) emulator::barrier_arrive(barrier, 0, rank);
}
inline void barrier_arrive_if(uint32_t barrier, int condition) {
  if (condition) barrier_arrive(barrier);
}
inline void barrier_wait(uint32_t barrier, uint32_t parity) { emulator::barrier_wait(barrier, parity); }

inline void named_barrier(int id, int threads) { emulator::named_meet(id, threads); }
inline void cluster_barrier() { emulator::cluster_meet("cluster_barrier"); }
inline uint32_t cluster_rank() { return emulator::cluster_rank(); }
inline void fence_async_shared() {}

template <int kRegisters>
void registers_grow() {
  emulator::warpgroup_meet("registers_grow", nullptr, nullptr);
}
template <int kRegisters>
void registers_shrink() {
  emulator::warpgroup_meet("registers_shrink", nullptr, nullptr);
}

inline void launch_wait() {}
inline void launch_next() {}

}  // namespace fw::sm90
