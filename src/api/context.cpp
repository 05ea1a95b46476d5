// SPDX-License-Identifier: Apache-2.0
#include "core/context.hpp"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include <exception>
#include <new>
#include <thread>

#include "api/impl_names.hpp"
#include "core/descriptor.hpp"
#include "core/status.hpp"
#include "cpu/levels.hpp"
#include "cpu/thread_pool.hpp"
#include "cuda/device.hpp"

namespace {

int32_t cores_of_process() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0) return CPU_COUNT(&set);
#endif
  const unsigned n = std::thread::hardware_concurrency();
  return n > 0 ? static_cast<int32_t>(n) : 1;
}

constexpr int32_t kMaxThreads = 1024;

}  // namespace

extern "C" {

fw_status fw_context_create(const fw_context_options *options, fw_context **context) {
  const char *op = "context_create";
  if (!context) return fw::fail(FW_INVALID_ARGUMENT, "%s: context is a null pointer", op);
  *context = nullptr;
  fw_context_options chosen = {};
  if (options) FW_TRY(fw::read_descriptor(op, options, &chosen, "options"));
  int32_t n_threads = chosen.n_threads;
  if (n_threads == 0) {
    if (const char *text = getenv("FW_NUM_THREADS"); text && *text) {
      char *end = nullptr;
      const long value = strtol(text, &end, 10);
      if (*end != 0 || value < 1 || value > kMaxThreads) {
        return fw::fail(FW_INVALID_ARGUMENT, "%s: FW_NUM_THREADS is \"%s\", allowed 1 to %d", op, text, kMaxThreads);
      }
      n_threads = static_cast<int32_t>(value);
    } else {
      n_threads = cores_of_process();
      if (n_threads > kMaxThreads) n_threads = kMaxThreads;
    }
  }
  if (n_threads < 1 || n_threads > kMaxThreads) {
    return fw::fail(FW_INVALID_ARGUMENT, "%s: n_threads is %d, allowed 1 to %d", op, n_threads, kMaxThreads);
  }
  const char *force = chosen.force_impl ? chosen.force_impl : getenv("FW_IMPL");
  if (force && strlen(force) >= sizeof fw_context::force_impl) {
    return fw::fail(FW_INVALID_ARGUMENT, "%s: force_impl has %zu characters, allowed %zu", op, strlen(force),
                    sizeof fw_context::force_impl - 1);
  }
  for (const char *name = force; name && *name;) {
    const size_t length = strcspn(name, ",");
    if (length > 0 && !fw::is_impl_name(name, length)) {
      return fw::fail(FW_INVALID_ARGUMENT, "%s: %s names \"%.*s\", allowed names that the explain functions list", op,
                      chosen.force_impl ? "force_impl" : "FW_IMPL", static_cast<int>(length), name);
    }
    name += length + (name[length] == ',' ? 1 : 0);
  }
  fw_context *made = new (std::nothrow) fw_context{};
  if (!made) return fw::fail(FW_OUT_OF_MEMORY, "%s: no memory for the context", op);
  made->n_threads = n_threads;
  made->cpu_level = fw::best_level();
  if (force) memcpy(made->force_impl, force, strlen(force) + 1);
  if (chosen.parallel_for) {
    made->parallel_for = chosen.parallel_for;
    made->user = chosen.user;
  } else {
    try {
      made->user = new fw::ThreadPool(n_threads);
    } catch (const std::exception &error) {
      delete made;
      return fw::fail(FW_OUT_OF_MEMORY, "%s: could not start %d threads: %s", op, n_threads - 1, error.what());
    }
    made->parallel_for = fw::ThreadPool::parallel_for;
    made->owns_pool = true;
  }
  *context = made;
  return FW_OK;
}

void fw_context_destroy(fw_context *context) {
  if (!context) return;
  if (context->owns_pool) delete static_cast<fw::ThreadPool *>(context->user);
  delete context;
}

int32_t fw_context_n_threads(const fw_context *context) { return context ? context->n_threads : 0; }

const char *fw_context_cpu_level(const fw_context *context) {
  return fw::level_name(context ? context->cpu_level : fw::kBaseline);
}

fw_status fw_cuda_devices(char *text, uint64_t capacity, uint64_t *needed) {
  fw::TextSink sink(text, capacity);
  fw::cuda::describe_devices(sink);
  if (needed) *needed = sink.needed();
  return FW_OK;
}

}  // extern "C"
