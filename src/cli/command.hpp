// SPDX-License-Identifier: Apache-2.0
// What the commands of the program share: one function a command that adds it to the parser, exit codes, the model to
// use, interruption, and output that may be a closed pipe.
#pragma once
#include <stdint.h>

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "model/error.hpp"
#include "model/model.hpp"
#include "model/session.hpp"

namespace fw::cli {

enum ExitCode { kOk = 0, kFailed = 1, kUsage = 2, kInterrupted = 130 };

void add_generate_command(CLI::App &app);
void add_score_command(CLI::App &app);
void add_verify_command(CLI::App &app);
void add_bench_command(CLI::App &app);
void add_explain_command(CLI::App &app);
void add_info_command(CLI::App &app);

// A subcommand with a text of what it does and, below the options, examples.
CLI::App *add_command(CLI::App &app, const std::string &name, const std::string &does, const std::string &examples);

// Runs `body` when the command was chosen; its result becomes the exit code of the program.
template <class Body>
void on_chosen(CLI::App *command, Body body) {
  command->callback([body] {
    const int code = body();
    if (code != kOk) throw CLI::RuntimeError(code);
  });
}

struct CommonOptions {
  std::string model;
  int32_t threads = 0;
  bool is_json = false;
};
void add_model_option(CLI::App *command, CommonOptions &options);
void add_threads_option(CLI::App *command, CommonOptions &options);
void add_json_option(CLI::App *command, CommonOptions &options);

// The folder that --model, FW_MODEL or the usual places give. Throws Error when there is none.
std::string find_model(const std::string &given);

struct ContextDeleter {
  void operator()(fw_context *context) const { fw_context_destroy(context); }
};
using Context = std::unique_ptr<fw_context, ContextDeleter>;
Context make_context(int32_t threads);

// Ctrl-C and SIGTERM ask to stop; a second one ends the program at once. SIGPIPE is ignored.
void install_signal_handlers();
bool interrupted();

// Standard output was closed by its reader: nothing is left to do, which is no failure.
struct ClosedOutput {};
void write_out(std::string_view bytes);  // and flushes; throws ClosedOutput, or Error for a full disk
void print(const char *format, ...) __attribute__((format(printf, 1, 2)));
void print_json(const nlohmann::ordered_json &value);

bool stdout_is_terminal();
bool stderr_is_terminal();
bool stdin_is_terminal();

double seconds_now();                        // monotonic
std::string size_text(uint64_t bytes);       // "1.3 MB"
std::string file_or_stdin(const std::string &path, uint64_t limit);  // "-": standard input

}  // namespace fw::cli
