// SPDX-License-Identifier: Apache-2.0
// The device of the emulator: the CUDA sources of the library, compiled by the host's compiler against the headers beside
// this file, run thread by thread on the host. A thread of a block is a fiber; it runs until it waits for others. The blocks
// of a cluster run together, clusters one after the other, a kernel at once when it is launched.
//   Order        FW_EMULATOR_SEED=n (1): which thread goes on, when a bulk copy lands and when a warpgroup product is made
//                (between its issue and the wait for it) are drawn from n. 0: threads in order, everything at once.
//   Errors       a deadlock (who waits for what), shared memory outside the block's, unequal arguments of a warp's or
//                warpgroup's instruction, misaligned copies, a barrier too often arrived at, a thread that ends while its
//                bulk stores read shared memory: a sentence, and the program ends.
//   Shared memory holds 0xff (NaN in every type) when a block starts.
// It says nothing about time, and nothing about the fences between the two views of shared memory.
#pragma once
#include <stdint.h>
#include <stddef.h>

#include <functional>

namespace fw::emulator {

struct Index {
  unsigned x = 0, y = 0, z = 0;
};
struct Block;

// A thread of the kernel that runs.
struct Thread {
  Index thread, block;
  int linear = 0, lane = 0, warp = 0;
  Block *home = nullptr;
};
extern Thread *current;
extern Index block_size, grid_size;

[[noreturn]] void stop(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Runs a kernel: body is called once by each thread.
struct Launched {
  const char *name;
  Index grid;
  unsigned threads;
  size_t shared_bytes;
  unsigned cluster;
};
void run(const Launched &how, const std::function<void()> &body);

// Keeps `work` for the graph and returns true where the stream (a cudaStream_t) is being captured.
bool is_captured(const void *stream, const std::function<void()> &work);

// ---- what a group of threads does together ----

// Every thread of the group calls; the last to come runs act(items), items[i] from the i-th thread of the group, and all go on.
// what: the instruction, for the sentence of an error. Threads that have ended count as having come (item: nullptr).
using Act = void (*)(void *const *items);
void warp_meet(const char *what, uint32_t mask, void *item, Act act);  // 32 items, those outside mask nullptr
void warpgroup_meet(const char *what, void *item, Act act);            // 128 items
void block_meet(const char *what);
void cluster_meet(const char *what);
void named_meet(int id, int threads);

// ---- shared memory ----

constexpr uint32_t kSharedBase = 1024;  // the shared address of a block's first dynamic byte
unsigned char *dynamic_shared();
uint32_t address_of(const void *pointer);
// `bytes` at a shared address of this block, or of block `rank` of its cluster.
unsigned char *shared_at(uint32_t address, size_t bytes, const char *what);
unsigned char *shared_at(uint32_t address, size_t bytes, const char *what, unsigned rank);
unsigned cluster_rank();

// Where the 128-byte swizzle puts a byte.
inline uint32_t swizzle(uint32_t address) { return address ^ ((address >> 3) & 0x70); }

// ---- mbarriers and what ends on them ----

void barrier_init(uint32_t barrier, uint32_t arrivals);
void barrier_arrive(uint32_t barrier, uint32_t bytes, unsigned rank);
void barrier_wait(uint32_t barrier, uint32_t parity);
// A copy into block `rank` that ends on the barrier there. It happens now or later.
void bulk_load(uint32_t barrier, uint32_t bytes, unsigned rank, std::function<void()> copy);
// A copy out of this block, in the calling thread's open group.
void bulk_store(std::function<void()> copy);
void bulk_commit();
void bulk_wait(int pending);

// ---- products of a warpgroup, made between issue and wait, in order ----

void product_issue(std::function<void()> product);  // by the last thread to come, inside an Act
void product_commit();
void product_wait(int pending);

}  // namespace fw::emulator
