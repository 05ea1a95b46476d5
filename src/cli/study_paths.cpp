// SPDX-License-Identifier: Apache-2.0
// `fastweight study paths`: how large the terms (-L)^m V' of the write operator are, by hop count m, and their sum U.
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/study_keys.hpp"

namespace fw::cli {
namespace {

struct Options {
  int64_t size = 64;
  std::vector<double> cosines = {0, 0.5, 0.9, 0.99};
  uint64_t seed = 1;
  bool json = false;
};

// Largest entry of each hop's term, values all 1; then of the sum.
std::vector<double> largest_terms(const Options &options, double cosine) {
  const int64_t n = options.size;
  const study::Draw d = study::draw(n, cosine, options.seed);
  std::vector<double> terms(static_cast<size_t>(n * n)), U(static_cast<size_t>(n)), largest;
  study::require(fw_form_write_hops_f64(&d.problem, n, terms.data()));
  study::require(fw_form_write_f64(&d.problem, FW_BY_SUBSTITUTION, U.data()));
  terms.insert(terms.end(), U.begin(), U.end());
  for (int64_t m = 0; m <= n; ++m) {
    double most = 0;
    for (int64_t t = 0; t < n; ++t) most = fmax(most, fabs(terms[m * n + t]));
    largest.push_back(most);
  }
  return largest;
}

void print(const Options &options) {
  std::vector<std::vector<double>> columns;
  for (double cosine : options.cosines) columns.push_back(largest_terms(options, cosine));
  const auto rounded = [](double x) { return std::stod(study::error_text(x)); };
  if (options.json) {
    std::cout << "{\n  \"study\": \"paths\",\n  \"size\": " << options.size << ",\n  \"seed\": " << options.seed
              << ",\n  \"rows\": [\n";
    for (size_t c = 0; c < columns.size(); ++c) {
      nlohmann::ordered_json row = {{"cosine", options.cosines[c]}, {"sum", rounded(columns[c].back())}};
      for (int64_t m = 0; m < options.size; ++m) row["terms"].push_back(rounded(columns[c][m]));
      std::cout << "    " << row.dump() << (c + 1 < columns.size() ? ",\n" : "\n");
    }
    std::cout << "  ]\n}\n";
    return;
  }
  std::cout << "Largest entry of the term of each hop count, U = sum over m of (-L)^m V', " << options.size
            << " tokens, values 1, beta in [" << study::kBetaLow << ", " << study::kBetaHigh
            << "], no decay.\n\n  hops";
  for (double cosine : options.cosines) std::cout << "  cosine " << std::setw(5) << cosine;
  std::cout << "\n";
  for (int64_t m = 0; m <= options.size; ++m) {
    std::cout << std::setw(6) << (m == options.size ? "sum" : std::to_string(m));
    for (const auto &column : columns) std::cout << std::setw(14) << study::error_text(column[m]);
    std::cout << "\n";
  }
}

}  // namespace

void add_study_paths(CLI::App &study) {
  auto options = std::make_shared<Options>();
  CLI::App *command = study.add_subcommand("paths", "Size of the Neumann terms, hop by hop");
  command->footer(
      "The write operator U = (I + L)^-1 V' is a sum over paths in the graph of tokens, one term a number of edges. "
      "The\n"
      "sum stays near 1; look at how large its terms become when keys are similar.\n\n"
      "Examples:\n"
      "  fastweight study paths\n"
      "  fastweight study paths --size 16 --cosines 0.5,0.9");
  command->add_option("--size", options->size, "Tokens (64)")->check(CLI::Range(1, 256));
  command->add_option("--cosines", options->cosines, "Cosine of two keys (0 0.5 0.9 0.99)")
      ->check(CLI::Range(0.0, 1.0))
      ->delimiter(',');
  command->add_option("--seed", options->seed, "Seed (1)");
  command->add_flag("--json", options->json, "Print data instead of a table");
  command->callback([options] { print(*options); });
}

}  // namespace fw::cli
