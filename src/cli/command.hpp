// SPDX-License-Identifier: Apache-2.0
// What the commands of the program share: their options, exit codes, the model to use, interruption, and output that
// may be a closed pipe. The parser (CLI11) is seen by main.cpp and commands.cpp alone: it takes longer to compile
// than they do.
#pragma once
#include <stdint.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "fastweight/fastweight.h"
#include "model/error.hpp"

namespace fw::cli {

enum ExitCode { kOk = 0, kFailed = 1, kUsage = 2, kInterrupted = 130 };

struct CommonOptions {
  std::string model, device = "cpu";
  int32_t threads = 0;
  bool is_json = false;
};

struct GenerateOptions : CommonOptions {
  std::optional<std::string> prompt;
  std::string file, save, load;
  bool is_unprompted = false, has_echo = false, is_quiet = false;
  std::optional<uint64_t> seed;
  std::optional<double> temperature, top_p;
  int64_t tokens = 400;
};

struct ScoreOptions : CommonOptions {
  std::string file;
  uint64_t limit = 0;
};

struct VerifyOptions : CommonOptions {
  bool is_operators_only = false;
};

struct CaseSize {
  int64_t B = 1, T = 1024, H = 4, HV = 4, K = 64, V = 64;
};

struct BenchOptions : CommonOptions {
  std::string op, dtype = "f32";
  CaseSize size;
  double seconds = 0.3;
  bool is_model_only = false, is_operators_only = false, is_neighbours_only = false;
};

struct ExplainOptions : CommonOptions {
  std::string op, dtype = "f32", direction = "forward";
  CaseSize size;
};

// Each does its command and returns the exit code; what it throws is main's to tell.
int run_generate(const GenerateOptions &options);
int run_score(const ScoreOptions &options);
int run_verify(const VerifyOptions &options);
int run_bench(const BenchOptions &options);
int run_explain(const ExplainOptions &options);
int run_info(const CommonOptions &options);

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

struct Interrupted {};   // thrown where nothing is worth keeping
struct ClosedOutput {};  // standard output was closed by its reader: nothing is left to do, which is no failure

void write_out(std::string_view bytes);  // and flushes; throws ClosedOutput, or Error for a full disk
void print(const char *format, ...) __attribute__((format(printf, 1, 2)));

bool stdout_is_terminal();
bool stderr_is_terminal();
bool stdin_is_terminal();

double seconds_now();                                                // monotonic
std::string size_text(uint64_t bytes);                               // "1.3 MB"
std::string file_or_stdin(const std::string &path, uint64_t limit);  // "-": standard input

}  // namespace fw::cli
