// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <CLI/CLI.hpp>

namespace fw::cli {

// Adds generate, score, verify, bench, explain and info. A command that was chosen runs while the parser is in
// `parse`; an exit code other than 0 leaves it as CLI::RuntimeError.
void add_commands(CLI::App &app);

}  // namespace fw::cli
