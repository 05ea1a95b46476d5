// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.hpp"

#include <chrono>

#include "cpu/spin.hpp"

namespace fw {
namespace {

constexpr uint64_t kOpen = 1ull << 31, kJoined = kOpen - 1, kOneCall = 1ull << 32;

// Not condition.wait(): in gcc 12 it is a symbol that systems of glibc 2.34 (RHEL 9) do not have, so that a library built
// with it does not load there.
template <class Due>
void sleep(std::condition_variable &condition, std::unique_lock<std::mutex> &lock, Due is_due) {
  while (!is_due()) condition.wait_for(lock, std::chrono::hours(24));
}

}  // namespace

ThreadPool::ThreadPool(int32_t n_threads) {
  threads_.reserve(static_cast<size_t>(n_threads > 1 ? n_threads - 1 : 0));
  try {
    for (int32_t i = 1; i < n_threads; ++i) threads_.emplace_back([this] { work(); });
  } catch (...) {
    stop();
    throw;
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    is_stopping_.store(true);
  }
  wake_.notify_all();
  for (std::thread &thread : threads_) thread.join();
  threads_.clear();
}

void ThreadPool::run_tasks() {
  for (int64_t i = next_.fetch_add(1); i < n_tasks_; i = next_.fetch_add(1)) fn_(task_, i);
}

// The next open call after number `seen`; false when the pool stops.
bool ThreadPool::await_call(uint64_t seen, uint64_t *call) {
  const auto is_due = [&] {
    *call = call_.load();
    return is_stopping_.load() || ((*call & kOpen) != 0 && *call / kOneCall != seen);
  };
  if (!spin(is_due)) {
    std::unique_lock<std::mutex> lock(mutex_);
    // counted before the last look: a caller either sees a sleeper or its call is seen
    n_asleep_.fetch_add(1);
    sleep(wake_, lock, is_due);
    n_asleep_.fetch_sub(1);
  }
  return !is_stopping_.load();
}

void ThreadPool::work() {
  uint64_t seen = 0, call = 0;
  while (await_call(seen, &call)) {
    if (!call_.compare_exchange_strong(call, call + 1)) continue;
    seen = call / kOneCall;
    run_tasks();
    const uint64_t left = call_.fetch_sub(1) - 1;
    if ((left & (kOpen | kJoined)) == 0) {
      std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_one();
    }
  }
}

void ThreadPool::await_joined() {
  const auto is_done = [&] { return (call_.load() & kJoined) == 0; };
  if (spin(is_done)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  sleep(done_, lock, is_done);
}

void ThreadPool::parallel_for(void *user, int64_t n_tasks, fw_task_fn fn, void *task) {
  ThreadPool &pool = *static_cast<ThreadPool *>(user);
  if (n_tasks <= 0) return;
  if (n_tasks == 1 || pool.threads_.empty() || pool.is_busy_.exchange(true, std::memory_order_acquire)) {
    for (int64_t i = 0; i < n_tasks; ++i) fn(task, i);
    return;
  }
  pool.fn_ = fn;
  pool.task_ = task;
  pool.n_tasks_ = n_tasks;
  pool.next_.store(0);
  pool.call_.store((pool.call_.load() / kOneCall + 1) * kOneCall | kOpen);
  if (pool.n_asleep_.load() > 0) {
    { std::lock_guard<std::mutex> lock(pool.mutex_); }  // a sleeper that has looked is waiting by now
    pool.wake_.notify_all();
  }
  pool.run_tasks();
  pool.call_.fetch_and(~kOpen);
  pool.await_joined();
  pool.is_busy_.store(false, std::memory_order_release);
}

}  // namespace fw
