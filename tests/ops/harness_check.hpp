// SPDX-License-Identifier: Apache-2.0
// A Problem under test: operands, truth and limits once, then any implementation against them. A failure prints one
// line from which the case can be run again and the first wrong coordinate. Results are kept for the result file.
#pragma once
#include <stdio.h>

#include "cpu/levels.hpp"
#include "harness_rows.hpp"
#include "yardstick.hpp"

namespace fw::test {

inline bool is_full() {
  const char *value = getenv("FW_TEST_FULL");
  return value && *value && strcmp(value, "0") != 0;
}
inline const char *direction_name(fw_direction d) {
  return d == FW_FORWARD ? "forward" : d == FW_BACKWARD ? "backward" : "step";
}

// One line a (row, direction, dtype, implementation): how often it ran, and the largest share of a limit it needed.
struct Result {
  int64_t n_cases = 0, n_failed = 0;
  double worst_share = 0;
  std::string worst_tensor, worst_case;
};
inline std::map<std::string, Result> &results() {
  static std::map<std::string, Result> all;
  return all;
}
inline void write_results(const char *path) {
  FILE *file = fopen(path, "w");
  ASSERT_NE(file, nullptr) << path;
  fprintf(file, "[\n");
  size_t n = 0;
  for (const auto &[key, r] : results()) {
    fprintf(
        file,
        "{%s, \"cases\": %lld, \"failed\": %lld, \"worst_share\": %.3f, \"tensor\": \"%s\", \"case\": \"%s\"}%s\n",
        key.c_str(), static_cast<long long>(r.n_cases), static_cast<long long>(r.n_failed),
        isnan(r.worst_share) ? 1e9 : r.worst_share, r.worst_tensor.c_str(), r.worst_case.c_str(),
        ++n < results().size() ? "," : "");
  }
  fprintf(file, "]\n");
  fclose(file);
}

// Implementations of the device under test: "cuda_portable"; on the CPU "cpu_<level>_chunk" or "cpu_<level>_recurrent", the best level first.
inline std::vector<std::string> cpu_impls(const char *form) {
  std::vector<std::string> names;
  for (int32_t level = kLevelCount - 1; level >= 0; --level) {
    if (!level_is_available(level)) continue;
    std::string name = "cpu_";
    names.push_back(name.append(level_name(level)).append("_").append(form));
  }
  return names;
}
// A context that forces an implementation, kept for the whole program.
inline const Context &forced(const std::string &impl) {
  static std::map<std::string, std::unique_ptr<Context>> all;
  std::unique_ptr<Context> &context = all[impl];
  if (!context) context = std::make_unique<Context>(impl.c_str(), 2);
  return *context;
}

// An implementation and the form that leads to it.
struct Path {
  std::string impl;
  fw_form form;
};
// dtype: of the operands; paths that do not take every type are left out when it is not given.
inline std::vector<Path> paths(fw_direction direction, int64_t dtype = FW_F32) {
  std::vector<Path> all;
  if (is_on_cuda()) {
    if (direction != FW_STEP && (dtype == FW_BF16 || dtype == FW_F16)) all.push_back({"cuda_chunk", FW_FORM_CHUNK});
    if (direction != FW_STEP) all.push_back({"cuda_portable", FW_FORM_CHUNK});
    if (direction != FW_BACKWARD) all.push_back({"cuda_portable", FW_FORM_RECURRENT});
    return all;
  }
  if (direction != FW_STEP) {
    for (const std::string &impl : cpu_impls("chunk")) all.push_back({impl, FW_FORM_CHUNK});
  }
  if (direction != FW_BACKWARD) {
    for (const std::string &impl : cpu_impls("recurrent")) all.push_back({impl, FW_FORM_RECURRENT});
  }
  return all;
}

// The implementations that a form leads to, the best first.
inline std::vector<std::string> impls(fw_direction direction, fw_form form) {
  std::vector<std::string> names;
  const bool is_chunk = direction == FW_BACKWARD || (direction == FW_FORWARD && form != FW_FORM_RECURRENT);
  for (const Path &path : paths(direction)) {
    if (is_chunk == (path.form == FW_FORM_CHUNK)) names.push_back(path.impl);
  }
  return names;
}

class Checked {
 public:
  Checked(const Spec &spec, fw_direction direction, const std::vector<int64_t> &indices = {})
      : Checked(spec, direction, indices, generate(spec, direction == FW_STEP)) {}
  // With operands of the test's own making; the repro line does not reach them.
  Checked(const Spec &spec, fw_direction direction, const std::vector<int64_t> &indices, const Operands &operands)
      : spec_(spec), direction_(direction), indices_(indices), operands_(operands) {
    round_operands(spec_, operands_);
    exact_ = truth(spec_, operands_, direction_, indices_);
    if (exact_.status == FW_OK) limits_ = limits(spec_, operands_, direction_, exact_, indices_);
  }
  const Operands &operands() const { return operands_; }
  const Outputs &exact() const { return exact_; }
  const Spec &spec() const { return spec_; }

  // The same on an implementation of this machine, in its form.
  Outputs run(const Path &path, bool with_saved = false) {
    spec_.form = path.form;
    return run(forced(path.impl), path.impl, with_saved);
  }
  // Runs and compares; `impl` is the implementation that must have run.
  Outputs run(const Context &context, const std::string &impl, bool with_saved = false) const {
    Call call(spec_, operands_, direction_, indices_);
    std::unique_ptr<Memory> saved;
    if (with_saved) saved = fill_saved(context, call);
    Outputs out = call.run(context);
    if (saved) {
      EXPECT_TRUE(saved->guards_are_unchanged()) << repro(impl);
    }
    if (out.status != FW_OK) {
      ADD_FAILURE() << repro(impl) << "\n  " << out.error;
      note(impl, true, 0, "");
      return out;
    }
    EXPECT_EQ(out.impl, impl) << repro(impl);
    compare(out, impl);
    return out;
  }

  // The largest share of a limit over all tensors; above 1 or NaN: wrong.
  double share(const Outputs &out, std::string *tensor = nullptr) const {
    double worst = 0;
    for (const auto &[name, expected] : exact_.values) {
      if (!out.values.count(name)) continue;
      const double one = share_of(difference(out.values.at(name), expected), limits_.at(name));
      if (one <= worst || isnan(worst)) continue;
      worst = one;
      if (tensor) *tensor = name;
    }
    return worst;
  }

  std::string repro(const std::string &impl) const {
    std::string line = "FW_TEST_CASE=\"";
    line.append(text(spec_))
        .append("\" FW_TEST_DIRECTION=")
        .append(std::to_string(direction_))
        .append(" FW_TEST_IMPL=");
    return line.append(impl).append(" ops_recurrence_grid --gtest_filter=Repro.*");
  }

 private:
  // The forward of the same problem fills the buffer that backward reads.
  std::unique_ptr<Memory> fill_saved(const Context &context, Call &call) const {
    uint64_t bytes = 0;
    EXPECT_EQ(fw_recurrence_saved_size(context.get(), &call.desc, &bytes), FW_OK) << fw_last_error();
    auto saved = std::make_unique<Memory>(bytes);
    Call forward(spec_, operands_, FW_FORWARD);
    forward.desc.saved = call.desc.saved = saved->data();
    forward.desc.saved_size = call.desc.saved_size = bytes;
    const Outputs out = forward.run(context);
    EXPECT_EQ(out.status, FW_OK) << out.error << ": " << text(spec_);
    return saved;
  }

  void compare(const Outputs &out, const std::string &impl) const {
    std::string worst_tensor;
    const double worst = share(out, &worst_tensor);
    note(impl, !(worst <= 1), worst, worst_tensor);
    for (const auto &[name, expected] : exact_.values) {
      if (!out.values.count(name)) {
        ADD_FAILURE() << name << " is missing: " << repro(impl);
        continue;
      }
      const Values &found = out.values.at(name);
      const Allowed &allowed = limits_.at(name);
      const Values error = difference(found, expected);
      // an infinite limit would let everything pass: the data of the case does not fit its types
      EXPECT_TRUE(isfinite(allowed.rms) && isfinite(allowed.max)) << name << " has no finite limit: " << repro(impl);
      if (share_of(error, allowed) <= 1) continue;
      const int64_t at = first_wrong(error, allowed);
      ADD_FAILURE() << name << ": RMS error " << rms(error) << ", allowed " << allowed.rms << "; maximum "
                    << peak_or_nan(error) << ", allowed " << allowed.max << "; at " << index_text(expected.shape, at)
                    << " of " << shape_of(expected) << ": " << found.data[static_cast<size_t>(at)] << ", expected "
                    << expected.data[static_cast<size_t>(at)] << "\n  " << repro(impl);
    }
  }
  // The larger of the shares of both limits; NaN when an element is NaN.
  static double share_of(const Values &error, const Allowed &allowed) {
    const double of_rms = rms(error) / fmax(allowed.rms, 1e-300),
                 of_max = peak_or_nan(error) / fmax(allowed.max, 1e-300);
    return !(of_rms >= of_max) ? of_max : of_rms;
  }
  static std::string shape_of(const Values &v) {
    char buffer[160];
    return shape_text(v.shape.data(), static_cast<int32_t>(v.shape.size()), buffer, sizeof buffer);
  }
  static double peak_or_nan(const Values &v) {
    for (double x : v.data) {
      if (isnan(x)) return NAN;
    }
    return peak(v);
  }
  // The first element past the maximum, else (only the RMS is too large) the largest error.
  static int64_t first_wrong(const Values &error, const Allowed &allowed) {
    int64_t largest = 0;
    for (int64_t i = 0; i < error.count(); ++i) {
      const double x = fabs(error.data[static_cast<size_t>(i)]);
      if (!(x <= allowed.max)) return i;
      if (x > fabs(error.data[static_cast<size_t>(largest)])) largest = i;
    }
    return largest;
  }
  void note(const std::string &impl, bool has_failed, double share, const std::string &tensor) const {
    static const char *const dtypes[] = {"none", "fp32", "bf16", "fp16", "fp64"};
    std::string key = "\"op\": \"";
    key.append(row_name(spec_))
        .append("\", \"direction\": \"")
        .append(direction_name(direction_))
        .append("\", \"dtype\": \"");
    key.append(dtypes[spec_.dtype]).append("\", \"impl\": \"").append(impl).append("\"");
    Result &r = results()[key];
    ++r.n_cases;
    r.n_failed += has_failed ? 1 : 0;
    if (!(share <= r.worst_share)) r.worst_share = share, r.worst_tensor = tensor, r.worst_case = text(spec_);
  }

  Spec spec_;
  fw_direction direction_;
  std::vector<int64_t> indices_;
  Operands operands_;
  Outputs exact_;
  std::map<std::string, Allowed> limits_;
};

}  // namespace fw::test
