// SPDX-License-Identifier: Apache-2.0
// What a context holds, and how work is spread: parallel_slots runs f(slot) for slot in [0, n_slots), items are then
// claimed inside by ItemQueue, so that the number of threads never decides what is computed.
#pragma once
#include <stdint.h>

#include <atomic>

#include "fastweight/types.h"

struct fw_context {
  int32_t n_threads;
  fw_parallel_for_fn parallel_for;  // the host's, or the own pool's
  void *user;                       // the host's pointer, or the own pool
  bool owns_pool;
  int32_t cpu_level;                // index into the levels of cpu/levels.hpp
  char force_impl[256];             // "" when nothing is forced
};

namespace fw {

// f: void(int64_t slot). Slots run at the same time; each runs exactly once.
template <class F>
void parallel_slots(const fw_context &context, int64_t n_slots, F &f) {
  if (n_slots <= 0) return;
  if (n_slots == 1 || context.n_threads == 1) {
    for (int64_t slot = 0; slot < n_slots; ++slot) f(slot);
    return;
  }
  context.parallel_for(
      context.user, n_slots, [](void *task, int64_t slot) { (*static_cast<F *>(task))(slot); }, &f);
}

// Items claimed one by one; lives on the stack of the call.
class ItemQueue {
 public:
  __attribute__((always_inline)) explicit ItemQueue(int64_t n_items) : n_items_(n_items) {}
  // The next item, or -1 when none is left.
  __attribute__((always_inline)) int64_t next() {
    const int64_t item = next_.fetch_add(1, std::memory_order_relaxed);
    return item < n_items_ ? item : -1;
  }

 private:
  std::atomic<int64_t> next_{0};
  int64_t n_items_;
};

// Runs f(slot, item) for every item in [0, n_items), at most n_slots at a time; a slot's items run one after the other,
// so scratch memory belongs to the slot.
template <class F>
void parallel_items(const fw_context &context, int64_t n_items, F &&f) {
  ItemQueue queue(n_items);
  auto body = [&](int64_t slot) {
    for (int64_t item = queue.next(); item >= 0; item = queue.next()) f(slot, item);
  };
  parallel_slots(context, n_items < context.n_threads ? n_items : context.n_threads, body);
}

// f(slot, begin, end): a slot's items are one range that follows from n_items and the number of threads. Memory that an item
// left in a core's cache is there when the next call comes to the same item.
template <class F>
void parallel_ranges(const fw_context &context, int64_t n_items, F &&f) {
  const int64_t n_slots = n_items < context.n_threads ? n_items : context.n_threads;
  auto body = [&](int64_t slot) {
    const int64_t rest = n_items % n_slots, size = n_items / n_slots;
    const int64_t begin = slot * size + (slot < rest ? slot : rest), end = begin + size + (slot < rest ? 1 : 0);
    f(slot, begin, end);
  };
  parallel_slots(context, n_slots, body);
}

// Multiply-adds below which waking another thread costs more than it saves (1 to 2 us on the machines at hand).
constexpr double kInlineWork = 1 << 16;

// As parallel_items, on the calling thread alone when the whole call is less than kInlineWork.
template <class F>
void parallel_work(const fw_context &context, int64_t n_items, double work, F &&f) {
  if (work >= kInlineWork) return parallel_items(context, n_items, f);
  for (int64_t item = 0; item < n_items; ++item) f(0, item);
}

}  // namespace fw
