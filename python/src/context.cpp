// SPDX-License-Identifier: Apache-2.0
#include "context.hpp"

#include <pthread.h>
#include <stdlib.h>

#include <atomic>

#include "arrays.hpp"

namespace fastweight::python {
namespace {

std::atomic<unsigned> fork_count{0};

// The default context and what it was made for; read and changed with the GIL held.
struct Default {
  std::shared_ptr<Context> context;
  int asked = 0;     // set_num_threads; 0: not called
  int made_for = -1;
};

Default &the_default() {
  static Default *only = new Default;  // outlives the interpreter: threads may still run while it ends
  return *only;
}

}  // namespace

Context::Context(int threads, const std::string &force_impl) : wanted_(threads), force_impl_(force_impl) {
  if (threads < 0) {
    throw nanobind::value_error(("Context: threads is " + std::to_string(threads) + ", allowed 1 and more, or 0 for the default").c_str());
  }
  make();
}

Context::~Context() {
  if (fork_count_ == fork_count.load()) fw_context_destroy(context_);
}

void Context::make() {
  fw_context_options options = {};
  options.struct_size = sizeof options;
  options.n_threads = wanted_;
  options.force_impl = force_impl_.empty() ? nullptr : force_impl_.c_str();
  fork_count_ = fork_count.load();
  context_ = nullptr;
  check_status(fw_context_create(&options, &context_));
}

fw_context *Context::get() {
  if (fork_count_ == fork_count.load(std::memory_order_relaxed)) return context_;
  std::lock_guard<std::mutex> lock(mutex_);
  if (fork_count_ != fork_count.load()) make();
  return context_;
}

std::shared_ptr<Context> default_context() {
  Default &known = the_default();
  static const bool has_environment = getenv("FW_NUM_THREADS") != nullptr;
  const int wanted = known.asked != 0 ? known.asked : has_environment ? 0 : torch_num_threads();
  if (known.context == nullptr || known.made_for != wanted) {
    known.context = std::make_shared<Context>(wanted, "");
    known.made_for = wanted;
  }
  return known.context;
}

void set_default_num_threads(int threads) {
  if (threads < 0) {
    throw nanobind::value_error(("set_num_threads: threads is " + std::to_string(threads) + ", allowed 1 and more, or 0 for the default").c_str());
  }
  the_default().asked = threads;
}

void watch_forks() {
  pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1); });
}

}  // namespace fastweight::python
