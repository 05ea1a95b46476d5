// SPDX-License-Identifier: Apache-2.0
// The pool that a context owns when the host brings no parallel_for. Knows no operator.
//
// A call is open while it has tasks that nobody has claimed. Workers that are awake join it; the caller works too,
// closes it and waits only for those who joined, so a worker that sleeps or whose core is taken by another program
// delays nobody.
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

  // fw_parallel_for_fn; user is the pool. When the pool is busy with another thread's call, or is called from inside
  // a task, the work runs on the calling thread.
  static void parallel_for(void *user, int64_t n_tasks, fw_task_fn fn, void *task);

 private:
  void work();
  bool await_call(uint64_t seen, uint64_t *call);
  void run_tasks();
  void await_joined();
  void stop();

  std::atomic<bool> is_busy_{false};  // for the length of a call
  // number of the call << 32 | kOpen | workers inside it
  std::atomic<uint64_t> call_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int32_t> n_asleep_{0};
  std::atomic<bool> is_stopping_{false};
  // written while no worker is inside a call
  fw_task_fn fn_ = nullptr;
  void *task_ = nullptr;
  int64_t n_tasks_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;
};

}  // namespace fw
