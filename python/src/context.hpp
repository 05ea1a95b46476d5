// SPDX-License-Identifier: Apache-2.0
// fastweight.Context: threads that run the work, and the process's default one.
#pragma once
#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <string>

#include "fastweight/fastweight.h"

namespace fastweight::python {

// After a fork the child has none of the pool's threads: the first use there makes the fw_context anew (the parent's
// is left alone, its threads do not exist here).
class Context {
 public:
  Context(int threads, const std::string &force_impl);
  ~Context();
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;

  fw_context *get();
  int threads() { return fw_context_n_threads(get()); }
  std::string cpu_level() { return fw_context_cpu_level(get()); }
  std::string force_impl() const { return force_impl_; }

 private:
  void make();

  int wanted_;
  std::string force_impl_;
  std::mutex mutex_;
  unsigned fork_count_;
  fw_context *context_ = nullptr;
};

// Made on first use. Threads: what set_num_threads said, else FW_NUM_THREADS, else torch.get_num_threads() while torch is
// loaded (asked at every call; another number makes another context), else the cores of the process.
std::shared_ptr<Context> default_context();
void set_default_num_threads(int threads);  // 0: back to the rule above
void watch_forks();                         // once, when the module is loaded

}  // namespace fastweight::python
