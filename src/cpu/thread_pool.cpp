// SPDX-License-Identifier: Apache-2.0
#include "cpu/thread_pool.hpp"

namespace fw {
namespace {

// A decode step makes hundreds of short calls a token; a worker that sleeps between them costs 5 to 50 us to wake.
constexpr int kSpins = 2000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int32_t n_threads) {
  threads_.reserve(static_cast<size_t>(n_threads > 1 ? n_threads - 1 : 0));
  try {
    for (int32_t i = 1; i < n_threads; ++i) threads_.emplace_back([this] { work(0); });
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
    generation_.fetch_add(1);
  }
  wake_.notify_all();
  for (std::thread &thread : threads_) thread.join();
  threads_.clear();
}

void ThreadPool::run_tasks() {
  for (int64_t i = next_.fetch_add(1); i < n_tasks_; i = next_.fetch_add(1)) fn_(task_, i);
}

void ThreadPool::work(uint64_t seen) {
  for (;;) {
    for (int spin = 0; spin < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spin) relax();
    if (generation_.load(std::memory_order_acquire) == seen) {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_acquire) != seen; });
    }
    seen = generation_.load(std::memory_order_acquire);
    if (is_stopping_.load()) return;
    run_tasks();
    // the caller may reuse fn_, task_ and n_tasks_ only after every worker has arrived here
    if (n_running_.fetch_sub(1) == 1) {
      std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_one();
    }
  }
}

void ThreadPool::parallel_for(void *user, int64_t n_tasks, fw_task_fn fn, void *task) {
  ThreadPool &pool = *static_cast<ThreadPool *>(user);
  if (n_tasks <= 0) return;
  if (n_tasks == 1 || pool.threads_.empty() || pool.is_busy_.exchange(true, std::memory_order_acquire)) {
    for (int64_t i = 0; i < n_tasks; ++i) fn(task, i);
    return;
  }
  {
    std::lock_guard<std::mutex> lock(pool.mutex_);
    pool.fn_ = fn;
    pool.task_ = task;
    pool.n_tasks_ = n_tasks;
    pool.next_.store(0);
    pool.n_running_.store(static_cast<int32_t>(pool.threads_.size()));
    pool.generation_.fetch_add(1, std::memory_order_release);
  }
  pool.wake_.notify_all();
  pool.run_tasks();
  for (int spin = 0; spin < kSpins && pool.n_running_.load(std::memory_order_acquire) != 0; ++spin) relax();
  if (pool.n_running_.load(std::memory_order_acquire) != 0) {
    std::unique_lock<std::mutex> lock(pool.mutex_);
    pool.done_.wait(lock, [&] { return pool.n_running_.load(std::memory_order_acquire) == 0; });
  }
  pool.is_busy_.store(false, std::memory_order_release);
}

}  // namespace fw
