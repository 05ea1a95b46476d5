// SPDX-License-Identifier: Apache-2.0
// `fastweight study`: small numerical studies of the mathematics, on the public functions of fastweight/forms.h
// alone. Each prints a table, or with --json what docs/data/ keeps and tools/plot_study.py draws. The same options
// give the same bytes everywhere: random numbers are integers scaled, and no result depends on the library's
// mathematical functions but exp in `decay`.
#pragma once
#include <CLI/CLI.hpp>

namespace fw::cli {

void add_study_command(CLI::App &app);

// One a study, called by add_study_command.
void add_study_inverse(CLI::App &study);
void add_study_paths(CLI::App &study);
void add_study_decay(CLI::App &study);

}  // namespace fw::cli
