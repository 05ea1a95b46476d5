// SPDX-License-Identifier: Apache-2.0
// What every test of an operation needs: tensors whose surroundings are poisoned and checked, workspaces of exactly
// the size asked for at an odd address, contexts by thread count and implementation, and comparison with a bound per
// element.
#pragma once
#include <gtest/gtest.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/tensor.hpp"
#include "cpu/levels.hpp"
#include "cuda/device.hpp"
#include "fastweight/fastweight.h"
#include "neighbours/on_device.hpp"

namespace fwtest {

// random numbers, the same everywhere (splitmix64)
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform(double low = 0, double high = 1) {
    return low + (high - low) * static_cast<double>(next() >> 11) * 0x1p-53;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  double normal() { return sqrt(-2 * log(uniform(1e-300, 1))) * cos(6.283185307179586 * uniform()); }

 private:
  uint64_t state_;
};

// tensors
enum class Layout {
  kDense,
  kPadded,       // rows of the last dimension apart, by 3 elements more than they need
  kSwapped,      // the last two dimensions swapped in memory (channel-first)
  kReversed,     // every stride negative
  kInterleaved,  // every second element
  kBroadcast,    // stride 0 in dimension 0: inputs only
};
inline const char *layout_name(Layout layout) {
  const char *names[] = {"dense", "padded", "swapped", "reversed", "interleaved", "broadcast"};
  return names[static_cast<int>(layout)];
}

// A view inside memory that is 0xff (NaN in every float dtype) wherever the view is not, with 64 elements on both
// sides.
class TestTensor {
 public:
  TestTensor() = default;  // absent
  TestTensor(fw_dtype dtype, std::vector<int64_t> shape, Layout layout = Layout::kDense) {
    const int32_t ndim = static_cast<int32_t>(shape.size());
    t_ = fw_dense(nullptr, dtype, ndim, shape.data());
    lay_out(layout);
    int64_t low = 0, high = 0;
    bool is_empty = false;
    for (int32_t i = 0; i < ndim; ++i) {
      is_empty = is_empty || t_.shape[i] == 0;
      const int64_t reach = (t_.shape[i] - 1) * t_.strides[i];
      (reach < 0 ? low : high) += reach;
    }
    if (is_empty) low = high = 0;
    first_ = kGuard - low;
    bytes_.assign(static_cast<size_t>((high - low + 1 + 2 * kGuard) * element_size()), 0xff);
  }

  // The struct for a descriptor; absent when this is.
  fw_tensor view() {
    fw_tensor t = t_;
    if (t.dtype != FW_NONE) t.data = bytes_.data() + first_ * element_size();
    return t;
  }
  bool is_given() const { return t_.dtype != FW_NONE; }
  fw_dtype dtype() const { return t_.dtype; }
  int64_t size() const { return is_given() ? fw::numel(t_) : 0; }
  const int64_t *shape() const { return t_.shape; }

  // By the logical row-major index.
  double get(int64_t flat) const { return fw::load_f64(bytes_.data(), t_.dtype, first_ + offset(flat)); }
  void set(int64_t flat, double x) {
    if (t_.dtype == FW_I32 || t_.dtype == FW_I64) {
      const int64_t whole = static_cast<int64_t>(x);
      const int32_t narrow = static_cast<int32_t>(whole);
      memcpy(bytes_.data() + (first_ + offset(flat)) * element_size(),
             t_.dtype == FW_I32 ? static_cast<const void *>(&narrow) : &whole, static_cast<size_t>(element_size()));
    } else {
      fw::store_f64(bytes_.data(), t_.dtype, first_ + offset(flat), x);
    }
  }
  double at(std::initializer_list<int64_t> index) const { return get(flat(index)); }
  void set_at(std::initializer_list<int64_t> index, double x) { set(flat(index), x); }
  std::vector<double> values() const {
    std::vector<double> all(static_cast<size_t>(size()));
    for (int64_t i = 0; i < size(); ++i) all[static_cast<size_t>(i)] = get(i);
    return all;
  }
  // The raw bits of every element, in logical order.
  std::vector<uint8_t> bits() const {
    std::vector<uint8_t> all;
    for (int64_t i = 0; i < size(); ++i) {
      const uint8_t *p = bytes_.data() + (first_ + offset(i)) * element_size();
      all.insert(all.end(), p, p + element_size());
    }
    return all;
  }
  TestTensor &fill(const std::function<double(int64_t)> &f) {
    for (int64_t i = 0; i < size(); ++i) set(i, f(i));
    return *this;
  }
  TestTensor &fill_normal(Rng &rng, double scale = 1, double mean = 0) {
    return fill([&](int64_t) { return mean + scale * rng.normal(); });
  }
  TestTensor &fill_uniform(Rng &rng, double low, double high) {
    return fill([&](int64_t) { return rng.uniform(low, high); });
  }

  void poison() { std::fill(bytes_.begin(), bytes_.end(), 0xff); }
  // Whether everything outside the view is still 0xff.
  bool surroundings_intact() const {
    std::vector<bool> is_inside(bytes_.size(), false);
    for (int64_t i = 0; i < size(); ++i) {
      const int64_t begin = (first_ + offset(i)) * element_size();
      for (int64_t b = begin; b < begin + element_size(); ++b) is_inside[static_cast<size_t>(b)] = true;
    }
    for (size_t b = 0; b < bytes_.size(); ++b) {
      if (!is_inside[b] && bytes_[b] != 0xff) return false;
    }
    return true;
  }
  const std::vector<uint8_t> &memory() const { return bytes_; }
  bool is_same_memory(const std::vector<uint8_t> &before) const {
    return bytes_.size() == before.size() &&
           (before.empty() || memcmp(bytes_.data(), before.data(), before.size()) == 0);
  }
  std::string index_text(int64_t flat) const {
    std::string text = "]";
    for (int32_t i = t_.ndim - 1; i >= 0; --i) {
      text = std::to_string(flat % t_.shape[i]) + (text.size() > 1 ? "," : "") + text;
      flat /= t_.shape[i];
    }
    return "[" + text;
  }

 private:
  static constexpr int64_t kGuard = 64;
  int64_t element_size() const { return fw::dtype_size(t_.dtype); }
  int64_t flat(std::initializer_list<int64_t> index) const {
    int64_t at = 0;
    int32_t i = 0;
    for (int64_t x : index) at = at * t_.shape[i++] + x;
    return at;
  }
  int64_t offset(int64_t flat) const {
    int64_t at = 0;
    for (int32_t i = t_.ndim - 1; i >= 0; --i) {
      at += flat % t_.shape[i] * t_.strides[i];
      flat /= t_.shape[i];
    }
    return at;
  }
  void lay_out(Layout layout) {
    int32_t order[FW_MAX_DIMS];  // from the innermost
    for (int32_t i = 0; i < t_.ndim; ++i) order[i] = t_.ndim - 1 - i;
    if (layout == Layout::kSwapped && t_.ndim >= 2) std::swap(order[0], order[1]);
    int64_t stride = layout == Layout::kInterleaved ? 2 : 1;
    for (int32_t i = 0; i < t_.ndim; ++i) {
      const int64_t extent = t_.shape[order[i]] > 0 ? t_.shape[order[i]] : 1;
      t_.strides[order[i]] = layout == Layout::kReversed ? -stride : stride;
      stride *= extent;
      if (layout == Layout::kPadded && i == 0) stride += 3;
    }
    if (layout == Layout::kBroadcast && t_.ndim > 0) t_.strides[0] = 0;
  }

  fw_tensor t_ = {};
  KnownBytes bytes_;
  int64_t first_ = 0;
};

// `bytes` at an odd address, NaN before the call, bands on both sides.
class TestWorkspace {
 public:
  explicit TestWorkspace(uint64_t bytes) : size_(bytes), memory_(bytes + 1 + 2 * kGuard, 0xff) {}
  void *data() { return memory_.data() + kGuard + 1; }
  uint64_t size() const { return size_; }
  bool guard_intact() const {
    const auto is_intact = [](uint8_t b) { return b == 0xff; };
    return std::all_of(memory_.begin(), memory_.begin() + kGuard + 1, is_intact) &&
           std::all_of(memory_.end() - kGuard, memory_.end(), is_intact);
  }
  static constexpr int64_t kGuard = 255;  // odd: on a device, where copies are aligned, the workspace is at an odd address too

 private:
  uint64_t size_;
  std::vector<uint8_t> memory_;
};

// contexts
// Runs the slots last to first, on the calling thread.
inline void backwards_for(void *, int64_t n_tasks, fw_task_fn fn, void *task) {
  for (int64_t i = n_tasks - 1; i >= 0; --i) fn(task, i);
}
class TestContext {
 public:
  explicit TestContext(const char *force_impl = "", int32_t n_threads = 1,
                       fw_parallel_for_fn parallel_for = nullptr) {
    fw_context_options options = {};
    options.struct_size = sizeof options;
    options.n_threads = n_threads;
    options.force_impl = force_impl;
    options.parallel_for = parallel_for;
    EXPECT_EQ(fw_context_create(&options, &context_), FW_OK) << fw_last_error();
  }
  ~TestContext() { fw_context_destroy(context_); }
  TestContext(const TestContext &) = delete;
  TestContext &operator=(const TestContext &) = delete;
  operator fw_context *() { return context_; }

 private:
  fw_context *context_ = nullptr;
};

// Implementations of the device under test, and whether this machine runs them ("" or the reason why not).
inline std::vector<std::string> impl_names() {
  if (fw::test::is_on_cuda()) return {"cuda"};
  return {"reference", "cpu_baseline", "cpu_avx2", "cpu_avx512"};
}
inline std::string why_not_run(const std::string &impl) {
  for (int32_t level = 0; level < fw::kLevelCount; ++level) {
    if (impl == std::string("cpu_") + fw::level_name(level) && !fw::level_is_available(level)) {
      return "not run: this machine does not execute " + std::string(fw::level_name(level));
    }
  }
  return "";
}
inline std::vector<std::string> impls_that_run() {
  std::vector<std::string> names;
  for (const std::string &name : impl_names()) {
    if (why_not_run(name).empty()) names.push_back(name);
  }
  return names;
}

// What a call with device CUDA is told where there is none; "" where there is one.
inline std::string cuda_refusal(const std::string &op) {
  fw::Reason reason;
  if (fw::cuda::is_available(8, 0, reason)) return "";
  std::string all = op + ": no implementation accepts this call (cuda: " + reason.text;
  for (const char *name : {"cpu_avx512", "cpu_avx2", "cpu_baseline", "reference"}) {
    all += std::string("; ") + name + ": device is 1, this runs on 0 (CPU)";
  }
  return all + ")";
}

// calls
// The verbs of an operation as a type: FWTEST_API(norm) declares norm_api.
#define FWTEST_API(op)                                                                \
  struct op##_api {                                                                   \
    using Desc = fw_##op;                                                             \
    using Grads = fw_##op##_grads;                                                    \
    [[maybe_unused]] static constexpr auto check = fw_##op##_check;                   \
    [[maybe_unused]] static constexpr auto workspace_size = fw_##op##_workspace_size; \
    [[maybe_unused]] static constexpr auto forward = fw_##op##_forward;               \
    [[maybe_unused]] static constexpr auto backward = fw_##op##_backward;             \
    [[maybe_unused]] static constexpr auto explain = fw_##op##_explain;               \
  }

// One call of a verb with a workspace of exactly the size asked for: f(desc, grads, workspace, size).
template <class Desc, class Grads, class Call>
fw_status with_workspace(fw_context *context, const Desc &desc, const Grads &grads, uint64_t bytes, Call f) {
  TestWorkspace workspace(bytes);
  const fw_status status = call_on_device<Desc, Grads>(
      context, desc, grads, bytes ? workspace.data() : nullptr, bytes, TestWorkspace::kGuard,
      [&](const Desc &d, const Grads &g, void *memory) { return f(d, g, memory, bytes); });
  EXPECT_TRUE(workspace.guard_intact()) << "the call wrote past its workspace of " << bytes << " bytes";
  return status;
}
// The same for any verb of an operation: run(context, desc, workspace, size), of a backward with grads.
template <class Api, class Run>
fw_status run_verb(fw_context *context, typename Api::Desc desc, const typename Api::Grads *grads, fw_direction direction, Run run) {
  uint64_t bytes = 0;
  desc.device = device_of(context);
  const fw_status status = Api::workspace_size(context, &desc, direction, &bytes);
  if (status != FW_OK) return status;
  EXPECT_EQ(Api::check(context, &desc, grads, direction), FW_OK) << fw_last_error();
  const typename Api::Grads none = {};
  return with_workspace(context, desc, grads ? *grads : none, bytes, run);
}
template <class Api>
fw_status run_forward(fw_context *context, const typename Api::Desc &desc) {
  return run_verb<Api>(context, desc, nullptr, FW_FORWARD, [&](const auto &d, const auto &, void *w, uint64_t n) {
    return Api::forward(context, &d, w, n);
  });
}
template <class Api>
fw_status run_backward(fw_context *context, const typename Api::Desc &desc, const typename Api::Grads &grads) {
  return run_verb<Api>(context, desc, &grads, FW_BACKWARD, [&](const auto &d, const auto &g, void *w, uint64_t n) {
    return Api::backward(context, &d, &g, w, n);
  });
}

// A test for every implementation; says "not run" where the machine lacks the level.
class ImplTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    const std::string why = why_not_run(GetParam());
    if (!why.empty()) GTEST_SKIP() << why;
  }
  const char *impl() const { return GetParam().c_str(); }
};
#define FWTEST_EVERY_IMPL(Suite)                                                     \
  INSTANTIATE_TEST_SUITE_P(Impl, Suite, ::testing::ValuesIn(::fwtest::impl_names()), \
                           [](const auto &info) { return info.param; })

// call(context) writes the outputs: the same bits on 1, 2 and 3 threads, with slots run backwards, and once more.
inline void expect_same_bits_on_any_threads(const char *impl, const std::vector<TestTensor *> &outputs,
                                            const std::function<void(fw_context *)> &call) {
  std::vector<std::vector<uint8_t>> first;
  const auto run = [&](int32_t n_threads, fw_parallel_for_fn parallel_for) {
    TestContext context(impl, n_threads, parallel_for);
    for (TestTensor *t : outputs) t->poison();
    call(context);
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (first.size() <= i) first.push_back(outputs[i]->bits());
      EXPECT_TRUE(first[i] == outputs[i]->bits()) << "output " << i << " differs on " << n_threads << " threads";
    }
  };
  run(1, nullptr);
  run(1, nullptr);
  run(2, nullptr);
  run(3, nullptr);
  run(4, backwards_for);
}

// The whole sentence, not a part of it.
#define EXPECT_REFUSED(call, status, sentence) \
  do {                                         \
    EXPECT_EQ((call), (status));               \
    EXPECT_STREQ(fw_last_error(), (sentence)); \
  } while (0)

// Watches tensors over a call: inputs keep every byte, outputs keep what surrounds them.
class Watch {
 public:
  void input(const char *name, const TestTensor &t) { inputs_.push_back({name, &t, t.memory()}); }
  void output(const char *name, TestTensor &t) {
    t.poison();
    outputs_.push_back({name, &t, {}});
  }
  void expect_intact() const {
    for (const Item &i : inputs_)
      EXPECT_TRUE(i.tensor->is_same_memory(i.before)) << "input " << i.name << " was written";
    for (const Item &o : outputs_)
      EXPECT_TRUE(o.tensor->surroundings_intact()) << "memory around " << o.name << " was written";
  }

 private:
  struct Item {
    std::string name;
    const TestTensor *tensor;
    std::vector<uint8_t> before;
  };
  std::vector<Item> inputs_, outputs_;
};

// comparison
// Half a unit in the last place relative to the number, and the half of the smallest subnormal.
inline double unit_roundoff(fw_dtype dtype) {
  return dtype == FW_BF16 ? 0x1p-8 : dtype == FW_F16 ? 0x1p-11 : dtype == FW_F64 ? 0x1p-53 : 0x1p-24;
}
inline double tiny_roundoff(fw_dtype dtype) {
  return dtype == FW_BF16 ? 0x1p-134 : dtype == FW_F16 ? 0x1p-25 : dtype == FW_F64 ? 0.0 : 0x1p-150;
}

// A true value and the sum of the magnitudes of the terms it is made of: what a computation's round-offs are relative
// to.
struct Truth {
  double value = 0, magnitude = 0;
  Truth() = default;
  Truth(double v) : value(v), magnitude(fabs(v)) {}
  Truth(double v, double m) : value(v), magnitude(m) {}
  void add(double term) {
    value += term;
    magnitude += fabs(term);
  }
};

// |got - want| <= n_roundoffs * 2^-24 * magnitude + one rounding to the storage type (fp64: the same with 2^-53).
inline void expect_close(const char *name, const TestTensor &got, const std::vector<Truth> &want,
                         double n_roundoffs) {
  ASSERT_EQ(static_cast<int64_t>(want.size()), got.size()) << name;
  const fw_dtype dtype = got.dtype();
  const double step = dtype == FW_F64 ? 0x1p-53 : 0x1p-24;
  int64_t n_bad = 0, first = -1;
  double worst = 0;
  for (int64_t i = 0; i < got.size(); ++i) {
    const Truth &w = want[static_cast<size_t>(i)];
    const double error = fabs(got.get(i) - w.value);
    const double allowed = n_roundoffs * (step * w.magnitude + tiny_roundoff(dtype == FW_F64 ? FW_F64 : FW_F32)) +
                           unit_roundoff(dtype) * fabs(w.value) * (1 + 0x1p-8) + tiny_roundoff(dtype);
    const bool is_equal = got.get(i) == w.value || (isnan(got.get(i)) && isnan(w.value));
    if (!is_equal && !(error <= allowed)) {
      if (first < 0) first = i;
      ++n_bad;
    }
    if (!is_equal && allowed > 0) worst = std::max(worst, error / allowed);
  }
  EXPECT_EQ(n_bad, 0) << name << ": " << n_bad << " of " << got.size() << " wrong, the first at "
                      << got.index_text(first < 0 ? 0 : first) << ": " << (first < 0 ? 0 : got.get(first))
                      << ", expected " << (first < 0 ? 0 : want[static_cast<size_t>(first)].value) << "; worst error "
                      << worst << " times the allowed";
}

inline void expect_same_bits(const char *name, const TestTensor &a, const TestTensor &b) {
  EXPECT_TRUE(a.bits() == b.bits()) << name << ": the bits differ";
}

}  // namespace fwtest
