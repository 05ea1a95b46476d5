// SPDX-License-Identifier: Apache-2.0
// `fastweight study inverse`: the error of the inverse of I + L, five ways, in fp32, bf16 and fp16 arithmetic, over
// the similarity of the keys.
#include <algorithm>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/study_keys.hpp"

namespace fw::cli {
namespace {

struct Way {
  const char *name;
  fw_inverse_method method;  // 0: the exact inverse, rounded once: the least that storing it costs
};
constexpr Way kWays[] = {{"substitution", FW_INVERSE_SUBSTITUTION}, {"neumann", FW_INVERSE_NEUMANN},
                         {"doubling", FW_INVERSE_DOUBLING},         {"block_merge", FW_INVERSE_BLOCK_MERGE},
                         {"block_rows", FW_INVERSE_BLOCK_ROWS},     {"exact_stored", 0}};

struct Arithmetic {
  const char *name;
  fw_dtype dtype;
};
constexpr Arithmetic kArithmetics[] = {{"fp32", FW_F32}, {"bf16", FW_BF16}, {"fp16", FW_F16}};

struct Options {
  std::vector<int64_t> sizes = {16, 64};
  std::vector<double> cosines = {0, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99};
  int64_t draws = 4;
  uint64_t seed = 1;
  bool json = false;
};

struct Error {
  double largest = 0, square = 0, truth_square = 0;
  void add(double x, double truth) {
    const double gap = fabs(x - truth);
    if (!(gap <= largest)) largest = isfinite(gap) ? gap : INFINITY;
    square += gap * gap;
    truth_square += truth * truth;
  }
  double relative_rms() const { return sqrt(square / truth_square); }
};

// x as an operand of the arithmetic: the inverse of [1 0; -x 1] read through one product with 1
float rounded(fw_dtype dtype, double x) {
  const float L[4] = {0, 0, static_cast<float>(-x), 0};
  float X[4];
  study::require(fw_form_inverse_f32(FW_INVERSE_SUBSTITUTION, dtype, 2, 0, L, X));
  return X[2];
}

Error measure(const Options &options, int64_t n, double cosine, fw_dtype dtype, fw_inverse_method method) {
  Error error;
  for (int64_t i = 0; i < options.draws; ++i) {
    const study::Draw d = study::draw(n, cosine, options.seed + static_cast<uint64_t>(i));
    std::vector<double> L(static_cast<size_t>(n * n)), truth(L.size());
    std::vector<float> narrow(L.size()), X(L.size());
    study::require(fw_form_edges_f64(&d.problem, L.data(), nullptr, nullptr));
    for (size_t c = 0; c < L.size(); ++c)
      L[c] = narrow[c] = static_cast<float>(L[c]);  // one matrix for all arithmetics
    study::require(fw_form_inverse_f64(FW_INVERSE_SUBSTITUTION, FW_F64, n, 0, L.data(), truth.data()));
    if (method != 0) study::require(fw_form_inverse_f32(method, dtype, n, 0, narrow.data(), X.data()));
    for (size_t c = 0; c < X.size(); ++c) error.add(method != 0 ? X[c] : rounded(dtype, truth[c]), truth[c]);
  }
  return error;
}

nlohmann::ordered_json number(double x) {
  return isfinite(x) ? nlohmann::ordered_json(std::stod(study::error_text(x))) : nlohmann::ordered_json(nullptr);
}

void print_json(const Options &options) {
  nlohmann::ordered_json out;
  out["study"] = "inverse";
  out["what"] =
      "max_error: largest |X - X*| of all draws; rms_error: root mean square of X - X* over that of X*; null: "
      "overflow";
  out["key_size"] = study::kKeySize;
  out["beta"] = {study::kBetaLow, study::kBetaHigh};
  out["draws"] = options.draws;
  out["seed"] = options.seed;
  for (const Arithmetic &arithmetic : kArithmetics) {
    for (int64_t n : options.sizes) {
      for (double cosine : options.cosines) {
        for (const Way &way : kWays) {
          const Error error = measure(options, n, cosine, arithmetic.dtype, way.method);
          out["rows"].push_back({{"arithmetic", arithmetic.name},
                                 {"size", n},
                                 {"cosine", cosine},
                                 {"way", way.name},
                                 {"max_error", number(error.largest)},
                                 {"rms_error", number(error.relative_rms())}});
        }
      }
    }
  }
  std::cout << "{\n";
  for (auto it = out.begin(); it != out.end(); ++it) {
    if (it.key() == "rows") continue;
    std::cout << "  \"" << it.key() << "\": " << it.value().dump() << ",\n";
  }
  std::cout << "  \"rows\": [\n";
  for (size_t i = 0; i < out["rows"].size(); ++i) {
    std::cout << "    " << out["rows"][i].dump() << (i + 1 < out["rows"].size() ? ",\n" : "\n");
  }
  std::cout << "  ]\n}\n";
}

void print_table(const Options &options) {
  std::cout << "Largest error of an entry of (I + L)^-1 over " << options.draws
            << " draws, against fp64. L_ij = beta_i k_i.k_j, keys of " << study::kKeySize
            << "\nnumbers and length 1, beta in [" << study::kBetaLow << ", " << study::kBetaHigh
            << "], no decay: no true entry is larger than 1. Operands of products are rounded\nto the arithmetic, "
               "sums are fp32. "
               "exact_stored: the exact inverse rounded once, the least that storing it costs.\n";
  for (const Arithmetic &arithmetic : kArithmetics) {
    for (int64_t n : options.sizes) {
      std::cout << "\n" << arithmetic.name << ", " << n << " x " << n << "\n  cosine";
      for (const Way &way : kWays) std::cout << std::setw(14) << way.name;
      std::cout << "\n";
      for (double cosine : options.cosines) {
        std::cout << "  " << std::setw(6) << cosine;
        for (const Way &way : kWays) {
          std::cout << std::setw(14)
                    << study::error_text(measure(options, n, cosine, arithmetic.dtype, way.method).largest);
        }
        std::cout << "\n";
      }
    }
  }
}

}  // namespace

void add_study_inverse(CLI::App &study) {
  auto options = std::make_shared<Options>();
  CLI::App *command =
      study.add_subcommand("inverse", "Error of (I + L)^-1, five ways, over the similarity of the keys");
  command->footer(
      "The inverse of I + L is the one step of a chunk of the delta rule that is not a product. Every way is exact "
      "on paper;\n"
      "here operands are rounded to fp32, bf16 or fp16 and sums are fp32, as on matrix units. Look at the rows of "
      "similar\n"
      "keys (cosine near 1): the two Neumann series lose all digits, substitution and the block ways do not.\n\n"
      "Examples:\n"
      "  fastweight study inverse\n"
      "  fastweight study inverse --sizes 4,8,16 --cosines 0.9");
  command->add_option("--sizes", options->sizes, "Rows of L (16 64)")->check(CLI::Range(1, 256))->delimiter(',');
  command->add_option("--cosines", options->cosines, "Cosine of two keys (0 ... 0.99)")
      ->check(CLI::Range(0.0, 1.0))
      ->delimiter(',');
  command->add_option("--draws", options->draws, "Matrices a point (4)")->check(CLI::Range(1, 1000));
  command->add_option("--seed", options->seed, "First seed (1)");
  command->add_flag("--json", options->json, "Print data instead of a table");
  command->callback([options] { options->json ? print_json(*options) : print_table(*options); });
}

}  // namespace fw::cli
