// SPDX-License-Identifier: Apache-2.0
// Who waits for whom on sm_90a: mbarriers in shared memory (also of the other CTA of a cluster), named barriers, fences
// between the ordinary and the asynchronous view of shared memory, register hand-over between warpgroups, and the two
// instructions by which a dependent launch overlaps its predecessor. Addresses are 32-bit shared addresses.
#pragma once
#include <stdint.h>

#include "cuda/sm90/layout.cuh"

namespace fw::sm90 {

__device__ __forceinline__ uint32_t shared_address(const void *pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarrier ----

// One thread, before any use; barrier_init_fence and a CTA (or cluster) barrier follow.
__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and the phase also waits for this many bytes of asynchronous copies.
__device__ __forceinline__ void barrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Arrives on the barrier at the same place in CTA `rank` of the cluster (own rank included). It orders this thread's
// finished reads before the other CTA's bulk copies; ordinary writes are not published to the other CTA (a release at
// cluster scope cost 850 clocks a chunk).
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}

// The same where `condition` is not 0, without a branch.
__device__ __forceinline__ void barrier_arrive_at_if(uint32_t barrier, uint32_t rank, int condition) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      ".reg .pred go;\n"
      "setp.ne.b32 go, %2, 0;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "@go mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}\n" ::"r"(barrier),
      "r"(rank), "r"(condition)
      : "memory");
}

__device__ __forceinline__ void barrier_arrive_if(uint32_t barrier, int condition) {
  asm volatile(
      "{\n"
      ".reg .pred go;\n"
      "setp.ne.b32 go, %1, 0;\n"
      "@go mbarrier.arrive.shared::cta.b64 _, [%0];\n"
      "}\n" ::"r"(barrier),
      "r"(condition)
      : "memory");
}

// Returns once the phase of this parity has completed; what the CTA's threads and bulk copies wrote before is visible.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- groups of threads ----

// `threads` threads (a multiple of 32) meet at hardware barrier `id` (1 to 15; 0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Ordinary shared-memory writes of this thread become visible to wgmma and bulk copies that follow a barrier.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- registers ----

template <int kRegisters>
__device__ __forceinline__ void registers_grow() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void registers_shrink() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- dependent launch ----

// Waits until the kernel before this one in the stream has finished and its writes are visible.
__device__ __forceinline__ void launch_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel of the stream start its CTAs once all CTAs of this one have said so or ended.
__device__ __forceinline__ void launch_next() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

}  // namespace fw::sm90
