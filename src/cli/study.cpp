// SPDX-License-Identifier: Apache-2.0
#include "cli/study.hpp"

namespace fw::cli {

void add_study_command(CLI::App &app) {
  CLI::App *study = app.add_subcommand("study", "Studies of the mathematics: inverses, paths, decays");
  study->require_subcommand(1);
  study->footer(
      "Which way of inverting I + L keeps its digits, why a series loses them, and where a quotient of decays overflows;\n"
      "docs/math.md derives what they show. Each study prints a table; with --json it prints the data that docs/data keeps\n"
      "and tools/plot_study.py draws. The same options give the same numbers on every machine.\n\n"
      "Examples:\n"
      "  fastweight study inverse\n"
      "  fastweight study inverse --sizes 4,8,16 --cosines 0.9\n"
      "  fastweight study paths --size 16\n"
      "  fastweight study decay --gate -0.5 --tokens 256");
  add_study_inverse(*study);
  add_study_paths(*study);
  add_study_decay(*study);
}

}  // namespace fw::cli
