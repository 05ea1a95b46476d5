// SPDX-License-Identifier: Apache-2.0
// The pool that a context owns when the host brings no parallel_for. Knows no operator.
#pragma once
#include <stdint.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "fastweight/types.h"

namespace fw {

class ThreadPool {
 public:
  // n_threads counts the calling thread: n_threads - 1 are started. Throws std::system_error when one does not start.
  explicit ThreadPool(int32_t n_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool &) = delete;
  ThreadPool &operator=(const ThreadPool &) = delete;

  // fw_parallel_for_fn; user is the pool. When the pool is busy with another thread's call, or is called from inside a
  // task, the work runs on the calling thread.
  static void parallel_for(void *user, int64_t n_tasks, fw_task_fn fn, void *task);

 private:
  void work(uint64_t seen);
  void run_tasks();
  void stop();

  std::atomic<bool> is_busy_{false};  // for the length of a call
  std::mutex mutex_;                  // guards everything below but the atomics
  std::condition_variable wake_, done_;
  fw_task_fn fn_ = nullptr;
  void *task_ = nullptr;
  int64_t n_tasks_ = 0;
  std::atomic<int64_t> next_{0};
  std::atomic<uint64_t> generation_{0};
  std::atomic<int32_t> n_running_{0};
  std::atomic<bool> is_stopping_{false};
  std::vector<std::thread> threads_;
};

}  // namespace fw
