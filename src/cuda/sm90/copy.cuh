// SPDX-License-Identifier: Apache-2.0
// Bulk copies between global and shared memory on sm_90a. Loads complete on an mbarrier, stores in bulk groups of the
// issuing thread. One thread issues each call. Addresses in shared memory are 32-bit; tiles loaded by a tensor map with
// the 128-byte swizzle start at multiples of 1024.
#pragma once
#include <cuda.h>
#include <stdint.h>

namespace fw::sm90 {

// A box of a four-dimensional tensor, innermost coordinate first. Elements outside the tensor arrive as zeros and count
// as bytes.
__device__ __forceinline__ void load_box(uint32_t shared, const CUtensorMap *map, uint32_t barrier, int c0, int c1,
                                         int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::
          "r"(shared),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// The same into the CTAs of `mask`: data and bytes go to the same place of each.
__device__ __forceinline__ void load_box_to(uint32_t shared, const CUtensorMap *map, uint32_t barrier, uint16_t mask,
                                            int c0, int c1, int c2, int c3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%4, %5, %6, %7}], [%2], %3;" ::"r"(shared),
      "l"(map), "r"(barrier), "h"(mask), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
      : "memory");
}

// `bytes` (a multiple of 16) of contiguous memory.
__device__ __forceinline__ void load_bytes(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
      "l"(global), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void load_bytes_to(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier,
                                              uint16_t mask) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::
          "r"(shared),
      "l"(global), "r"(bytes), "r"(barrier), "h"(mask)
      : "memory");
}

__device__ __forceinline__ void store_box(const CUtensorMap *map, uint32_t shared, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

__device__ __forceinline__ void store_bytes(void *global, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// The shared memory of all but the last `kPending` committed groups may be written again.
template <int kPending>
__device__ __forceinline__ void store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// All but the last `kPending` committed groups are complete and visible.
template <int kPending>
__device__ __forceinline__ void store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kPending) : "memory");
}

// `bytes` (a multiple of 16) of contiguous memory to the second-level cache.
__device__ __forceinline__ void prefetch_bytes(const void *global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(global), "r"(bytes) : "memory");
}

// Four bytes, of which the thread knows that they are there after copy_words_wait.
__device__ __forceinline__ void copy_word(uint32_t shared, const void *global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
}
__device__ __forceinline__ void copy_words_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The line of 128 bytes that an address lies in.
__device__ __forceinline__ void prefetch_line(const void *global) { asm volatile("prefetch.global.L2 [%0];" ::"l"(global)); }

__device__ __forceinline__ void prefetch_map(const CUtensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

}  // namespace fw::sm90
