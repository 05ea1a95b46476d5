// SPDX-License-Identifier: Apache-2.0
// The C++ reference against the golden files of the NumPy truth, which was written apart from it: every tensor of
// every case within 1e-12 of its largest element, forward and backward. The files are read from tests/oracle/golden
// of the source tree.
#include <fstream>
#include <nlohmann/json.hpp>

#include "harness_rows.hpp"

namespace fw::test {
namespace {

constexpr double kAgree = 1e-12;

std::string golden_folder() {
  std::string path =
      __FILE__;  // <source>/tests/ops/test_golden.cpp, absolute or relative to a folder above the build
  path = path.substr(0, path.rfind("/ops/"));
  path.append("/oracle/golden/");
  for (int up = 0; up < 6; ++up) {
    if (std::ifstream(path + "SHA256SUMS").good()) return path;
    path.insert(0, "../");
  }
  return "";
}

int64_t enum_of(const nlohmann::json &settings, const char *key, std::initializer_list<const char *> names) {
  if (!settings.contains(key)) return 0;
  const std::string found = settings.at(key);
  int64_t i = 0;
  for (const char *name : names) {
    if (found == name) return i;
    ++i;
  }
  ADD_FAILURE() << "golden setting " << key << " is " << found;
  return 0;
}

Spec spec_of_case(const nlohmann::json &entry) {
  Spec s;
  const nlohmann::json &settings = entry.at("settings");
  static const char *const known[] = {"layout",     "scale",     "qk_norm",    "gate_input", "gate",      "erase",
                                      "beta_input", "layer_idx", "num_layers", "n_sub",      "normalizer"};
  for (const auto &[key, value] : settings.items()) {
    EXPECT_NE(std::find(std::begin(known), std::end(known), key), std::end(known))
        << "unknown golden setting " << key;
  }
  for (s.op = FW_OP_COUNT - 1; s.op > 0; --s.op) {
    if (entry.at("op") == recurrence::find_row(static_cast<fw_op>(s.op))->name) break;
  }
  s.gate = enum_of(settings, "gate", {"none", "scalar", "vector"});
  s.erase = enum_of(settings, "erase", {"none", "shared_after", "shared_before", "independent"});
  s.layout = enum_of(settings, "layout", {"kv", "vk"});
  s.gate_input = enum_of(settings, "gate_input", {"log_decay", "softplus", "log_sigmoid", "bounded", "rwkv7"});
  s.beta_input = enum_of(settings, "beta_input", {"plain", "sigmoid", "sigmoid_twice"});
  s.scale_milli = static_cast<int64_t>(settings.value("scale", 0.0) * 1000 + 0.5);
  s.qk_norm = settings.value("qk_norm", false);
  s.normalizer = settings.value("normalizer", false);
  s.n_sub = settings.value("n_sub", 1);
  s.layer_idx = settings.value("layer_idx", 0);
  s.num_layers = settings.value("num_layers", 0);
  if (entry.contains("cu_seqlens")) {
    s.offsets = entry.at("cu_seqlens").get<std::vector<int64_t>>();
    s.pack = static_cast<int64_t>(s.offsets.size()) - 1;
  }
  const auto q = entry.at("tensors").at("q").at("shape").get<std::vector<int64_t>>();
  const auto v = entry.at("tensors").at("v").at("shape").get<std::vector<int64_t>>();
  s.B = q[0], s.T = q[1], s.H = q[2], s.K = q[3], s.group = v[2] / q[2], s.V = v[3];
  s.final = entry.at("tensors").contains("final_state");
  return s;
}

Operands tensors_of_case(const nlohmann::json &entry, const std::vector<double> &numbers) {
  Operands all;
  for (const auto &[name, where] : entry.at("tensors").items()) {
    Values v;
    v.shape = where.at("shape").get<std::vector<int64_t>>();
    const int64_t begin = where.at("offset");
    EXPECT_LE(static_cast<size_t>(begin + v.count()), numbers.size()) << name;
    v.data.assign(numbers.begin() + begin, numbers.begin() + begin + v.count());
    all[name] = v;
  }
  return all;
}

void expect_agreement(const Outputs &found, const Operands &expected, int64_t *n_tensors) {
  for (const auto &[name, values] : found.values) {
    ASSERT_TRUE(expected.count(name)) << name << " is not in the golden file";
    const Values &golden = expected.at(name);
    ASSERT_EQ(golden.shape, values.shape) << name;
    double most = 0;
    for (double x : golden.data) most = fmax(most, fabs(x));
    for (size_t i = 0; i < golden.data.size(); ++i) {
      ASSERT_LE(fabs(values.data[i] - golden.data[i]), kAgree * most)
          << name << " at " << index_text(golden.shape, static_cast<int64_t>(i)) << ": " << values.data[i]
          << ", golden " << golden.data[i];
    }
    ++*n_tensors;
  }
}

TEST(Golden, ReferenceAgreesWithNumpy) {
  const std::string folder = golden_folder();
  ASSERT_FALSE(folder.empty()) << "tests/oracle/golden was not found from " << __FILE__;
  int64_t n_cases = 0, n_tensors = 0, n_answers = 0;
  for (int64_t op = 0; op < FW_OP_COUNT; ++op) {
    const std::string name = op == 0 ? "by_axes" : recurrence::find_row(static_cast<fw_op>(op))->name;
    std::ifstream text_file(folder + name + ".json"), data_file(folder + name + ".bin", std::ios::binary);
    ASSERT_TRUE(text_file.good() && data_file.good()) << name;
    const std::string bytes((std::istreambuf_iterator<char>(data_file)), std::istreambuf_iterator<char>());
    std::vector<double> numbers(bytes.size() / sizeof(double));
    memcpy(numbers.data(), bytes.data(), numbers.size() * sizeof(double));
    const nlohmann::json document = nlohmann::json::parse(text_file);
    for (const nlohmann::json &entry : document.at("cases")) {
      SCOPED_TRACE(name + " " + entry.at("name").get<std::string>());
      Spec spec = spec_of_case(entry);
      const Operands all = tensors_of_case(entry, numbers);
      if (all.count("g")) spec.operands |= recurrence::kG;
      expect_agreement(truth(spec, all, FW_FORWARD), all, &n_tensors);
      expect_agreement(truth(spec, all, FW_BACKWARD), all, &n_tensors);
      for (const auto &[tensor, values] : all) {  // every answer in the file must have been compared
        const bool is_seed = tensor == "d_o" || tensor == "d_final_state" || tensor == "d_final_z";
        const bool is_parameter = tensor == "dt_bias";
        n_answers +=
            tensor == "o" || tensor.rfind("final_", 0) == 0 || (tensor[0] == 'd' && !is_seed && !is_parameter);
      }
      ++n_cases;
      ASSERT_FALSE(::testing::Test::HasFatalFailure());
    }
  }
  EXPECT_GE(n_cases, 5 * (FW_OP_COUNT - 1));
  EXPECT_EQ(n_tensors, n_answers);
}

}  // namespace
}  // namespace fw::test
