// SPDX-License-Identifier: Apache-2.0
// `fastweight study decay`: the four factors of a chunk whose every token has the same gate, in fp32, and the token
// from which the far factor is infinite.
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/study_keys.hpp"

namespace fw::cli {
namespace {

struct Options {
  double gate = -1;
  int64_t tokens = 128;
  bool json = false;
};

void print(const Options &options) {
  const int64_t n = options.tokens;
  std::vector<float> g(static_cast<size_t>(n), static_cast<float>(options.gate)), near_factor(g.size()),
      far_factor(g.size()), rest(g.size());
  float phi = 0;
  study::require(
      fw_form_decay_quotient_f32(n, 1, g.data(), 0, n, near_factor.data(), far_factor.data(), &phi, rest.data()));
  int64_t first = -1;
  for (int64_t t = n - 1; t >= 0; --t) first = isinf(far_factor[t]) ? t : first;
  if (options.json) {
    const auto list = [](const std::vector<float> &x) {
      nlohmann::json out = nlohmann::json::array();
      for (float v : x)
        out.push_back(isfinite(v) ? nlohmann::json(std::stod(study::error_text(v))) : nlohmann::json(nullptr));
      return out.dump();
    };
    std::cout << "{\n  \"study\": \"decay\",\n  \"gate\": " << options.gate << ",\n  \"tokens\": " << n
              << ",\n  \"first_overflow\": " << (first < 0 ? "null" : std::to_string(first))
              << ",\n  \"near\": " << list(near_factor) << ",\n  \"far\": " << list(far_factor)
              << ",\n  \"rest\": " << list(rest) << "\n}\n";
    return;
  }
  std::cout << "Factors in fp32 when every token has g = " << options.gate
            << " and one anchor, the start, serves all " << n
            << " tokens.\n\n   token    near <= 1     far >= 1   near * far    phi * far         rest\n";
  const int64_t step = n > 32 ? n / 32 : 1;
  for (int64_t t = 0; t < n; ++t) {
    if (t % step != 0 && t != first && t != n - 1) continue;
    std::cout << std::setw(8) << t;
    for (float x : {near_factor[t], far_factor[t], near_factor[t] * far_factor[t], phi * far_factor[t], rest[t]}) {
      std::cout << std::setw(13) << (isfinite(x) ? study::error_text(x) : (isnan(x) ? "nan" : "inf"));
    }
    std::cout << (t == first ? "   <- far overflows\n" : "\n");
  }
  std::cout << "\nOn paper near * far is 1 and phi * far is rest. phi = " << phi << ".\n";
}

}  // namespace

void add_study_decay(CLI::App &study) {
  auto options = std::make_shared<Options>();
  CLI::App *command = study.add_subcommand("decay", "Where the quotient of decays overflows");
  command->footer(
      "A decay between two tokens of a chunk is a product of a factor of the later token (near) and one of the "
      "earlier\n"
      "(far) on paper. In fp32 far overflows once the chunk has forgotten more than 88.7 nats.\n\n"
      "Examples:\n"
      "  fastweight study decay\n"
      "  fastweight study decay --gate -0.5 --tokens 256");
  command->add_option("--gate", options->gate, "Natural logarithm of every token's decay (-1)")
      ->check(CLI::Range(-1000.0, 0.0));
  command->add_option("--tokens", options->tokens, "Tokens of the chunk (128)")->check(CLI::Range(1, 65536));
  command->add_flag("--json", options->json, "Print data instead of a table");
  command->callback([options] { print(*options); });
}

}  // namespace fw::cli
