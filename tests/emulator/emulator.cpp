// SPDX-License-Identifier: Apache-2.0
// Plan: a launch takes a lock, makes the fibers of one cluster after the other (stacks are kept), and resumes a thread that
// can run, drawn at random, until all have ended. A thread that waits leaves the list of those that can run; whoever completes
// what it waits for puts it back. When none can run, the pending copies are made; when there are none of those, it is a
// deadlock.
#include "emulator.hpp"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <boost/context/fiber.hpp>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fw::emulator {

Thread *current = nullptr;
Index block_size, grid_size;

namespace {

constexpr size_t kStackBytes = 128 * 1024, kMostShared = 232448;

struct Fiber;

struct Meeting {
  std::vector<void *> items;
  std::vector<Fiber *> waiting;
  int arrived = 0;
};
struct Barrier {
  uint32_t arrivals = 0, pending = 0, phase = 0;
  int64_t bytes = 0;
  std::vector<std::pair<uint32_t, Fiber *>> waiting;  // parity, thread
};
using Group = std::vector<std::function<void()>>;
struct Products {
  std::deque<Group> committed;
  Group open;
};
struct Load {
  Block *block;
  uint32_t barrier, bytes;
  std::function<void()> copy;
};

struct Fiber : Thread {
  boost::context::fiber context, caller;
  void *stack = nullptr;
  bool has_ended = false;
  std::string waits_for;
  std::deque<Group> stores;  // committed, not yet made
  Group open_stores;
};

}  // namespace

struct Block {
  unsigned rank = 0;
  Index index;
  std::unique_ptr<unsigned char[]> memory;
  unsigned char *shared = nullptr;  // a multiple of 1024
  size_t shared_bytes = 0;
  std::vector<Fiber *> threads;
  std::map<std::pair<int, uint32_t>, Meeting> warp_meetings;
  std::map<int, Meeting> warpgroup_meetings, named_meetings;
  Meeting meeting;
  std::map<uint32_t, Barrier> barriers;
  std::map<int, Products> products;
};

namespace {

// Of the launch that runs; the lock of run() guards them.
std::vector<std::unique_ptr<Block>> blocks;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<void *> stacks;
std::deque<Fiber *> runnable;
std::vector<Load> loads;
Meeting cluster_meeting;
const Launched *launched = nullptr;
const std::function<void()> *body = nullptr;
int living = 0;
uint64_t random_state = 0;
bool is_random = false;

Fiber *self() { return static_cast<Fiber *>(current); }

uint64_t draw() {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return random_state;
}
bool is_now() { return !is_random || draw() % 2 == 0; }

void wake(Fiber *f) {
  f->waits_for.clear();
  runnable.push_back(f);
}

void wait(std::string what) {
  Fiber *me = self();
  me->waits_for = std::move(what);
  me->caller = std::move(me->caller).resume();
  current = me;
}

// Lets the others go first now and then, so that what a thread did just before becomes theirs to stumble over.
void yield_sometimes() {
  if (!is_random || draw() % 4 != 0) return;
  runnable.push_back(self());
  Fiber *me = self();
  me->caller = std::move(me->caller).resume();
  current = me;
}

void complete(Barrier &b) {
  if (b.pending != 0 || b.bytes != 0) return;
  b.phase ^= 1, b.pending = b.arrivals;
  std::vector<std::pair<uint32_t, Fiber *>> waiting;
  waiting.swap(b.waiting);
  for (auto &[parity, f] : waiting) {
    if (parity != b.phase) {
      wake(f);
    } else {
      b.waiting.push_back({parity, f});
    }
  }
}

Barrier &barrier_at(Block &block, uint32_t address) {
  const auto found = block.barriers.find(address);
  if (found == block.barriers.end()) stop("the barrier at shared address %u was not initialised", address);
  return found->second;
}

void land(size_t i) {
  const Load load = std::move(loads[i]);
  loads[i] = std::move(loads.back());
  loads.pop_back();
  load.copy();
  Barrier &b = barrier_at(*load.block, load.barrier);
  b.bytes -= load.bytes;
  complete(b);
}

// The last of `expected` threads acts; the others wait.
void meet(Meeting &m, int expected, size_t slots, size_t slot, void *item, Act act, const std::string &what) {
  if (m.items.empty()) m.items.assign(slots, nullptr);
  m.items[slot] = item;
  ++m.arrived;
  if (m.arrived < expected) {
    m.waiting.push_back(self());
    wait(what);
    return;
  }
  Meeting done;
  std::swap(done, m);
  if (act) act(done.items.data());
  for (Fiber *f : done.waiting) wake(f);
  yield_sometimes();
}

int living_in(const std::vector<Fiber *> &threads) {
  int n = 0;
  for (const Fiber *f : threads) n += !f->has_ended;
  return n;
}

void release(Meeting &m, int expected) {
  if (m.arrived == 0 || m.arrived < expected) return;
  Meeting done;
  std::swap(done, m);
  for (Fiber *f : done.waiting) wake(f);
}

void ended(Fiber *f) {
  f->has_ended = true;
  --living;
  if (!f->stores.empty() || !f->open_stores.empty()) stop("thread %d ends while its bulk stores read shared memory", f->linear);
  // who waits for all threads waits for those that are left
  release(f->home->meeting, living_in(f->home->threads));
  release(cluster_meeting, living);
}

boost::context::fiber enter(Fiber *f, boost::context::fiber &&caller) {
  f->caller = std::move(caller);
  current = f;
  (*body)();
  ended(f);
  return std::move(f->caller);
}

// A stack that was mapped before; the lowest page traps.
struct KeptStack {
  void *memory;
  boost::context::stack_context allocate() {
    boost::context::stack_context c;
    c.size = kStackBytes;
    c.sp = static_cast<char *>(memory) + kStackBytes;
    return c;
  }
  void deallocate(boost::context::stack_context &) {}
};
void *stack_of(size_t i) {
  while (stacks.size() <= i) {
    void *memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) stop("no memory for the stack of thread %zu", i);
    mprotect(memory, 4096, PROT_NONE);
    stacks.push_back(memory);
  }
  return stacks[i];
}

[[noreturn]] void deadlock() {
  fprintf(stderr, "emulator: %s: no thread can go on\n", launched->name);
  std::map<std::string, std::vector<int>> by_reason;
  for (const auto &f : fibers) {
    if (!f->has_ended) by_reason["block " + std::to_string(f->home->rank) + ": " + f->waits_for].push_back(f->linear);
  }
  for (const auto &[reason, threads] : by_reason) {
    fprintf(stderr, "  %s: %zu threads, %d to %d\n", reason.c_str(), threads.size(), threads.front(), threads.back());
  }
  abort();
}

void run_cluster(const Launched &how, unsigned first_block) {
  blocks.clear(), fibers.clear(), runnable.clear(), loads.clear();
  cluster_meeting = {};
  living = 0;
  for (unsigned rank = 0; rank < how.cluster; ++rank) {
    auto block = std::make_unique<Block>();
    const unsigned linear = first_block + rank;
    block->rank = rank;
    block->index = {linear % how.grid.x, linear / how.grid.x % how.grid.y, linear / how.grid.x / how.grid.y};
    block->shared_bytes = how.shared_bytes;
    block->memory.reset(new unsigned char[how.shared_bytes + 1024]);
    memset(block->memory.get(), 0xff, how.shared_bytes + 1024);
    block->shared = reinterpret_cast<unsigned char *>((reinterpret_cast<uintptr_t>(block->memory.get()) + 1023) / 1024 * 1024);
    for (unsigned t = 0; t < how.threads; ++t) {
      auto f = std::make_unique<Fiber>();
      f->thread = {t, 0, 0}, f->block = block->index;
      f->linear = static_cast<int>(t), f->lane = f->linear % 32, f->warp = f->linear / 32;
      f->home = block.get();
      f->stack = stack_of(fibers.size());
      Fiber *me = f.get();
      f->context = boost::context::fiber(std::allocator_arg, KeptStack{f->stack},
                                         [me](boost::context::fiber &&caller) { return enter(me, std::move(caller)); });
      block->threads.push_back(me);
      runnable.push_back(me);
      ++living;
      fibers.push_back(std::move(f));
    }
    blocks.push_back(std::move(block));
  }
  while (living > 0) {
    if (!loads.empty() && (runnable.empty() || (is_random && draw() % 64 == 0))) {
      land(is_random ? draw() % loads.size() : 0);
      continue;
    }
    if (runnable.empty()) deadlock();
    if (is_random) std::swap(runnable[draw() % runnable.size()], runnable.front());
    Fiber *next = runnable.front();
    runnable.pop_front();
    current = next;
    next->context = std::move(next->context).resume();
  }
  while (!loads.empty()) land(0);
  for (const auto &block : blocks) {
    for (const auto &[group, products] : block->products) {
      if (!products.committed.empty() || !products.open.empty()) stop("warpgroup %d ends without a wait for its products", group);
    }
  }
  current = nullptr;
}

}  // namespace

void stop(const char *format, ...) {
  fprintf(stderr, "emulator: %s: ", launched ? launched->name : "no kernel");
  if (current) {
    fprintf(stderr, "block (%u, %u), thread %d: ", current->block.x, current->block.y, current->linear);
  }
  va_list arguments;
  va_start(arguments, format);
  vfprintf(stderr, format, arguments);
  va_end(arguments);
  fprintf(stderr, "\n");
  abort();
}

void run(const Launched &how, const std::function<void()> &kernel_body) {
  static std::mutex lock;
  const std::lock_guard<std::mutex> held(lock);
  const char *seed = getenv("FW_EMULATOR_SEED");
  const uint64_t number = seed && *seed ? strtoull(seed, nullptr, 10) : 1;
  is_random = number != 0, random_state = number * 0x9e3779b97f4a7c15u + 1;
  launched = &how, body = &kernel_body;
  if (how.shared_bytes > kMostShared) stop("%zu bytes of shared memory, allowed %zu", how.shared_bytes, kMostShared);
  const uint64_t n_blocks = uint64_t{how.grid.x} * how.grid.y * how.grid.z;
  if (n_blocks == 0 || how.threads == 0 || how.threads > 1024) stop("a grid of %llu blocks of %u threads", static_cast<unsigned long long>(n_blocks), how.threads);
  if (how.grid.x % how.cluster != 0) stop("%u blocks along x in clusters of %u", how.grid.x, how.cluster);
  grid_size = how.grid, block_size = {how.threads, 1, 1};
  for (uint64_t first = 0; first < n_blocks; first += how.cluster) run_cluster(how, static_cast<unsigned>(first));
  launched = nullptr;
}

void warp_meet(const char *what, uint32_t mask, void *item, Act act) {
  Fiber *me = self();
  if (!(mask >> me->lane & 1)) stop("%s: lane %d is not in its own mask %08x", what, me->lane, mask);
  int expected = 0;
  for (int lane = 0; lane < 32; ++lane) {
    const size_t at = static_cast<size_t>(me->warp) * 32 + lane;
    expected += (mask >> lane & 1) && at < me->home->threads.size() && !me->home->threads[at]->has_ended;
  }
  meet(me->home->warp_meetings[{me->warp, mask}], expected, 32, me->lane, item, act, what);
}

void warpgroup_meet(const char *what, void *item, Act act) {
  Fiber *me = self();
  meet(me->home->warpgroup_meetings[me->warp / 4], 128, 128, me->linear % 128, item, act, what);
}

void block_meet(const char *what) {
  Fiber *me = self();
  meet(me->home->meeting, living_in(me->home->threads), 1, 0, nullptr, nullptr, what);
}

void cluster_meet(const char *what) { meet(cluster_meeting, living, 1, 0, nullptr, nullptr, what); }

void named_meet(int id, int threads) {
  if (id < 0 || id > 15 || threads % 32 != 0) stop("named barrier %d of %d threads", id, threads);
  meet(self()->home->named_meetings[id], threads, 1, 0, nullptr, nullptr, "named barrier " + std::to_string(id));
}

unsigned char *dynamic_shared() { return self()->home->shared; }

uint32_t address_of(const void *pointer) {
  const Block &block = *self()->home;
  const ptrdiff_t at = static_cast<const unsigned char *>(pointer) - block.shared;
  if (at < 0 || static_cast<size_t>(at) > block.shared_bytes) stop("a shared address of memory that is not dynamic shared memory");
  return kSharedBase + static_cast<uint32_t>(at);
}

unsigned char *shared_at(uint32_t address, size_t bytes, const char *what, unsigned rank) {
  if (rank >= blocks.size()) stop("%s: block %u of a cluster of %zu", what, rank, blocks.size());
  const Block &block = *blocks[rank];
  if (address < kSharedBase || address - kSharedBase + bytes > block.shared_bytes) {
    stop("%s: shared bytes %d to %d of %zu", what, static_cast<int>(address) - static_cast<int>(kSharedBase),
         static_cast<int>(address + bytes) - static_cast<int>(kSharedBase), block.shared_bytes);
  }
  return block.shared + (address - kSharedBase);
}
unsigned char *shared_at(uint32_t address, size_t bytes, const char *what) {
  return shared_at(address, bytes, what, self()->home->rank);
}
unsigned cluster_rank() { return self()->home->rank; }

void barrier_init(uint32_t barrier, uint32_t arrivals) {
  if (barrier % 8 != 0 || arrivals == 0) stop("a barrier at %u of %u arrivals", barrier, arrivals);
  shared_at(barrier, 8, "barrier_init");
  Barrier &b = self()->home->barriers[barrier];
  b = {};
  b.arrivals = b.pending = arrivals;
}

void barrier_arrive(uint32_t barrier, uint32_t bytes, unsigned rank) {
  if (rank >= blocks.size()) stop("arrival in block %u of a cluster of %zu", rank, blocks.size());
  Barrier &b = barrier_at(*blocks[rank], barrier);
  if (b.pending == 0) stop("the barrier at shared address %u has all its %u arrivals of this phase", barrier, b.arrivals);
  b.bytes += bytes;
  --b.pending;
  complete(b);
  yield_sometimes();
}

void barrier_wait(uint32_t barrier, uint32_t parity) {
  Barrier &b = barrier_at(*self()->home, barrier);
  if (parity > 1) stop("parity %u", parity);
  if (b.phase != parity) return yield_sometimes();
  b.waiting.push_back({parity, self()});
  wait("barrier at shared address " + std::to_string(barrier) + ", parity " + std::to_string(parity));
}

void bulk_load(uint32_t barrier, uint32_t bytes, unsigned rank, std::function<void()> copy) {
  if (bytes % 16 != 0) stop("a bulk load of %u bytes", bytes);
  loads.push_back({blocks[rank].get(), barrier, bytes, std::move(copy)});
  if (!is_random) land(loads.size() - 1);
}

void bulk_store(std::function<void()> copy) { self()->open_stores.push_back(std::move(copy)); }

void bulk_commit() {
  Fiber *me = self();
  me->stores.push_back(std::move(me->open_stores));
  me->open_stores.clear();
  if (is_now()) bulk_wait(0);
}

void bulk_wait(int pending) {
  Fiber *me = self();
  while (me->stores.size() > static_cast<size_t>(pending)) {
    for (const auto &copy : me->stores.front()) copy();
    me->stores.pop_front();
  }
}

namespace {
void make_products(Products &p, size_t pending) {
  while (p.committed.size() > pending) {
    for (const auto &product : p.committed.front()) product();
    p.committed.pop_front();
  }
}
Products &own_products() { return self()->home->products[self()->warp / 4]; }
}  // namespace

void product_issue(std::function<void()> product) {
  Products &p = own_products();
  p.open.push_back(std::move(product));
  if (!is_now()) return;
  make_products(p, 0);
  for (const auto &made : p.open) made();
  p.open.clear();
}

void product_commit() {
  warpgroup_meet("product_commit", nullptr, [](void *const *) {
    Products &p = own_products();
    p.committed.push_back(std::move(p.open));
    p.open.clear();
  });
}

void product_wait(int pending) {
  int number = pending;
  warpgroup_meet("product_wait", &number, [](void *const *items) {
    make_products(own_products(), static_cast<size_t>(*static_cast<const int *>(items[0])));
  });
}

}  // namespace fw::emulator
