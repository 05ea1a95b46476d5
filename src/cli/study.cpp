// SPDX-License-Identifier: Apache-2.0
#include "cli/study.hpp"

namespace fw::cli {

void add_study_command(CLI::App &app) {
  CLI::App *study = app.add_subcommand("study", "Small numerical studies of the mathematics (docs/math.md)");
  study->require_subcommand(1);
  study->footer(
      "Each study prints a table; --json prints the data that docs/data/ keeps.\n"
      "  fastweight study inverse            which way of inverting I + L keeps its digits, and where it loses them\n"
      "  fastweight study paths              how large the terms of the Neumann series are, hop by hop\n"
      "  fastweight study decay --gate -1    where the quotient of decays overflows");
  add_study_inverse(*study);
  add_study_paths(*study);
  add_study_decay(*study);
}

}  // namespace fw::cli
