// SPDX-License-Identifier: Apache-2.0
// Contexts: options and their refusals, the pool, a host's parallel_for, several contexts and several calling threads.
#include <gtest/gtest.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "core/context.hpp"
#include "cpu/level_impl.hpp"
#include "cpu/thread_pool.hpp"
#include "fastweight/fastweight.h"

namespace {
bool refuses_memory = false;
}

// What the library allocates with std::nothrow fails on request.
void *operator new(size_t size, const std::nothrow_t &) noexcept {
  if (refuses_memory) return nullptr;
  try {
    return ::operator new(size);
  } catch (const std::bad_alloc &) {
    return nullptr;
  }
}

namespace {

struct Context {
  fw_context *p = nullptr;
  explicit Context(const fw_context_options &options) { EXPECT_EQ(fw_context_create(&options, &p), FW_OK) << fw_last_error(); }
  ~Context() { fw_context_destroy(p); }
};

fw_context_options threads(int32_t n) {
  fw_context_options options = {};
  options.struct_size = sizeof options;
  options.n_threads = n;
  return options;
}

// o of a gated delta rule whose inputs depend on the seed only.
std::vector<float> run(fw_context *context, int seed) {
  const int64_t T = 50, H = 3, K = 20, V = 33;
  std::vector<float> q(T * H * K), k(q.size()), v(T * H * V), g(T * H), beta(T * H), o(v.size());
  uint32_t state = static_cast<uint32_t>(seed) * 2654435761u + 1;
  const auto next = [&] {
    state = state * 1664525u + 1013904223u;
    return static_cast<float>(state >> 8) / 16777216.0f - 0.5f;
  };
  for (float &x : q) x = next();
  for (float &x : k) x = 0.3f * next();
  for (float &x : v) x = next();
  for (float &x : g) x = next() - 0.5f;
  for (float &x : beta) x = next() + 0.5f;
  const int64_t key[] = {1, T, H, K}, value[] = {1, T, H, V}, gate[] = {1, T, H};
  fw_recurrence d = {};
  d.struct_size = sizeof d;
  d.op = FW_OP_GATED_DELTA_RULE;
  d.q = fw_dense(q.data(), FW_F32, 4, key);
  d.k = fw_dense(k.data(), FW_F32, 4, key);
  d.v = fw_dense(v.data(), FW_F32, 4, value);
  d.g = fw_dense(g.data(), FW_F32, 3, gate);
  d.beta = fw_dense(beta.data(), FW_F32, 3, gate);
  d.o = fw_dense(o.data(), FW_F32, 4, value);
  uint64_t bytes = 0;
  EXPECT_EQ(fw_recurrence_workspace_size(context, &d, FW_FORWARD, &bytes), FW_OK) << fw_last_error();
  std::vector<char> workspace(bytes);
  EXPECT_EQ(fw_recurrence_forward(context, &d, workspace.data(), bytes), FW_OK) << fw_last_error();
  return o;
}

}  // namespace

TEST(Context, RefusesBadOptions) {
  fw_context *context = nullptr;
  fw_context_options options = threads(-1);
  EXPECT_EQ(fw_context_create(&options, &context), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "context_create: n_threads is -1, allowed 1 to 1024");
  EXPECT_EQ(context, nullptr);
  options = threads(1);
  options.struct_size = 3;
  EXPECT_EQ(fw_context_create(&options, &context), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "context_create: options.struct_size is 3, expected 32 (allowed 8 to 16384)");
  options.struct_size = sizeof options - 4;
  EXPECT_EQ(fw_context_create(&options, &context), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "context_create: options.struct_size is 28, expected 32 (allowed multiples of 8)");
  options = threads(1);
  const std::string long_name(300, 'x');
  options.force_impl = long_name.c_str();
  EXPECT_EQ(fw_context_create(&options, &context), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "context_create: force_impl has 300 characters, allowed 255");
  options.force_impl = "cpu_avx2_chunk,reference,cpu_avx2";
  ASSERT_EQ(fw_context_create(&options, &context), FW_OK) << fw_last_error();
  fw_context_destroy(context);
  context = nullptr;
  options.force_impl = "reference,cpu_avx2_chunks";
  EXPECT_EQ(fw_context_create(&options, &context), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(),
               "context_create: force_impl names \"cpu_avx2_chunks\", allowed names that the explain functions list");
  setenv("FW_IMPL", "recurrent", 1);
  EXPECT_EQ(fw_context_create(nullptr, &context), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "context_create: FW_IMPL names \"recurrent\", allowed names that the explain functions list");
  unsetenv("FW_IMPL");
  EXPECT_EQ(fw_context_create(nullptr, nullptr), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "context_create: context is a null pointer");
  setenv("FW_NUM_THREADS", "many", 1);
  EXPECT_EQ(fw_context_create(nullptr, &context), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "context_create: FW_NUM_THREADS is \"many\", allowed 1 to 1024");
  setenv("FW_NUM_THREADS", "3", 1);
  ASSERT_EQ(fw_context_create(nullptr, &context), FW_OK);
  EXPECT_EQ(fw_context_n_threads(context), 3);
  fw_context_destroy(context);
  unsetenv("FW_NUM_THREADS");
  fw_context_destroy(nullptr);
}

TEST(Context, NoMemoryForTheContext) {
  const fw_context_options options = threads(1);
  fw_context *context = reinterpret_cast<fw_context *>(1);
  refuses_memory = true;
  const fw_status status = fw_context_create(&options, &context);
  refuses_memory = false;
  EXPECT_EQ(status, FW_OUT_OF_MEMORY);
  EXPECT_STREQ(fw_last_error(), "context_create: no memory for the context");
  EXPECT_EQ(context, nullptr);
}

#if defined(__has_feature)
#define FW_TEST_HAS_FEATURE(x) __has_feature(x)
#else
#define FW_TEST_HAS_FEATURE(x) 0
#endif

// In a child whose address space has room for a few stacks only. The threads that did start have ended: a context of
// one thread can be made there still.
TEST(Context, ThreadsThatDoNotStart) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || FW_TEST_HAS_FEATURE(address_sanitizer) || \
    FW_TEST_HAS_FEATURE(thread_sanitizer)
  GTEST_SKIP() << "not run: a sanitizer's shadow memory does not fit a limited address space";
#else
  const auto child = [] {
    long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    const int n_read = file ? fscanf(file, "%ld", &pages) : 0;
    if (file) fclose(file);
    const rlim_t room = static_cast<rlim_t>(pages) * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + (rlim_t{64} << 20);
    const struct rlimit limit = {room, room};
    if (n_read != 1 || setrlimit(RLIMIT_AS, &limit) != 0) _exit(2);
    fw_context_options options = threads(1024);
    fw_context *context = nullptr;
    const fw_status status = fw_context_create(&options, &context);
    fprintf(stderr, "status %d, context %d: %s\n", status, context != nullptr, fw_last_error());
    options.n_threads = 1;
    _exit(fw_context_create(&options, &context) == FW_OK ? 0 : 1);
  };
  EXPECT_EXIT(child(), testing::ExitedWithCode(0), "status 3, context 0: context_create: could not start 1023 threads: .+");
#endif
}

TEST(Context, LevelsThatRefuseSayWhy) {
  Context context(threads(1));
  context.p->cpu_level = fw::kBaseline;
  for (int32_t level = -1; level <= fw::kLevelCount; ++level) {
    fw::Reason reason;
    const bool is_accepted = fw::accepts_level(*context.p, FW_DEVICE_CPU, false, level, reason);
    EXPECT_EQ(is_accepted, level == fw::kBaseline);
    const std::string name = fw::level_name(level);
    if (!fw::level_is_built(level)) {
      EXPECT_EQ(reason.text, name + " is not built into this library");
    } else if (level > fw::kBaseline) {
      EXPECT_EQ(reason.text, "this machine does not execute " + name);
    }
  }
  fw::Reason reason;
  EXPECT_FALSE(fw::level_is_built(fw::kLevelCount));
  EXPECT_FALSE(fw::accepts_level(*context.p, FW_DEVICE_CUDA, false, fw::kBaseline, reason));
  EXPECT_STREQ(reason.text, "device is 1, this runs on 0 (CPU)");
  EXPECT_FALSE(fw::accepts_level(*context.p, FW_DEVICE_CPU, true, fw::kBaseline, reason));
  EXPECT_STREQ(reason.text, "operands are fp64, this computes fp32, bf16 and fp16");
}

TEST(Context, ForcedImplementationThatRefusesIsAnError) {
  fw_context_options options = threads(1);
  options.force_impl = "reference_parallel";
  Context context(options);
  fw_recurrence d = {};
  d.struct_size = sizeof d;
  d.op = FW_OP_LINEAR_ATTN;
  const int64_t shape[] = {1, 4, 1, 2};
  d.q = d.k = d.v = d.o = fw_dense(nullptr, FW_F32, 4, shape);
  EXPECT_EQ(fw_recurrence_check(context.p, &d, nullptr, FW_FORWARD), FW_UNSUPPORTED);
  EXPECT_STREQ(fw_last_error(), "linear_attn: implementation reference_parallel is forced and refuses: form is chunk");
}

TEST(Context, PoolRunsEveryTaskOnce) {
  for (int32_t n_threads : {1, 2, 5}) {
    fw::ThreadPool pool(n_threads);
    for (int64_t n_tasks : {0, 1, 2, 3, 64}) {
      for (int repeat = 0; repeat < 50; ++repeat) {
        std::vector<std::atomic<int>> counts(static_cast<size_t>(n_tasks));
        fw::ThreadPool::parallel_for(
            &pool, n_tasks,
            [](void *task, int64_t i) { (*static_cast<std::vector<std::atomic<int>> *>(task))[static_cast<size_t>(i)]++; },
            &counts);
        for (const std::atomic<int> &count : counts) ASSERT_EQ(count.load(), 1);
      }
    }
  }
}

// Calls so far apart that the workers sleep, and tasks so long that the caller sleeps until they end.
TEST(Context, PoolSleepsAndWakes) {
  for (int32_t n_threads : {2, 5}) {
    fw::ThreadPool pool(n_threads);
    for (int repeat = 0; repeat < 8; ++repeat) {
      std::this_thread::sleep_for(std::chrono::milliseconds(repeat % 2 * 2));
      std::vector<std::atomic<int>> counts(static_cast<size_t>(n_threads));
      fw::ThreadPool::parallel_for(
          &pool, n_threads,
          [](void *task, int64_t i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(i));
            (*static_cast<std::vector<std::atomic<int>> *>(task))[static_cast<size_t>(i)]++;
          },
          &counts);
      for (const std::atomic<int> &count : counts) ASSERT_EQ(count.load(), 1);
    }
  }
}

TEST(Context, PoolCalledFromInsideATaskRunsThere) {
  fw::ThreadPool pool(3);
  struct Nested {
    fw::ThreadPool *pool;
    std::atomic<int> count{0};
  } nested{&pool};
  fw::ThreadPool::parallel_for(
      &pool, 4,
      [](void *outer, int64_t) {
        Nested &n = *static_cast<Nested *>(outer);
        fw::ThreadPool::parallel_for(
            n.pool, 5, [](void *inner, int64_t) { static_cast<Nested *>(inner)->count++; }, outer);
      },
      &nested);
  EXPECT_EQ(nested.count.load(), 20);
}

TEST(Context, ThreadsHostAndCallersChangeNoBit) {
  Context one(threads(1));
  std::vector<std::vector<float>> expected;
  for (int seed = 0; seed < 4; ++seed) expected.push_back(run(one.p, seed));

  Context four(threads(4));
  for (int seed = 0; seed < 4; ++seed) EXPECT_EQ(run(four.p, seed), expected[static_cast<size_t>(seed)]);

  std::atomic<int> host_calls{0};
  fw_context_options options = threads(3);
  options.user = &host_calls;
  options.parallel_for = [](void *user, int64_t n_tasks, fw_task_fn fn, void *task) {
    ++*static_cast<std::atomic<int> *>(user);
    std::vector<std::thread> workers;
    for (int64_t i = 0; i < n_tasks; ++i) workers.emplace_back([=] { fn(task, i); });
    for (std::thread &worker : workers) worker.join();
  };
  Context host(options);
  EXPECT_EQ(run(host.p, 1), expected[1]);
  EXPECT_GT(host_calls.load(), 0);

  // one context from four threads at once, and an error text that belongs to its thread
  std::vector<std::vector<float>> found(4);
  std::vector<std::thread> callers;
  for (int seed = 0; seed < 4; ++seed) {
    callers.emplace_back([&, seed] {
      for (int repeat = 0; repeat < 5; ++repeat) found[static_cast<size_t>(seed)] = run(four.p, seed);
      EXPECT_STREQ(fw_last_error(), "");
    });
  }
  for (std::thread &caller : callers) caller.join();
  for (int seed = 0; seed < 4; ++seed) EXPECT_EQ(found[static_cast<size_t>(seed)], expected[static_cast<size_t>(seed)]);
}
