// SPDX-License-Identifier: Apache-2.0
#include "cli/command.hpp"

#include <errno.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include <filesystem>
#include <vector>

#include "model/mapped_file.hpp"

namespace fw::cli {
namespace {

using model::Error;
using model::quote;
using model::text;

volatile sig_atomic_t g_stop = 0;

void on_signal(int number) {
  g_stop = 1;
  signal(number, SIG_DFL);
}

bool is_model(const std::filesystem::path &folder) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(folder / "config.json", ignored);
}

std::filesystem::path folder_of_program() {
  char path[PATH_MAX];
  const ssize_t n = readlink("/proc/self/exe", path, sizeof path);
  return n > 0 ? std::filesystem::path(std::string(path, static_cast<size_t>(n))).parent_path()
               : std::filesystem::path();
}

}  // namespace

std::string find_model(const std::string &given) {
  if (!given.empty()) return given;
  if (const char *folder = getenv("FW_MODEL"); folder && *folder) return folder;
  std::vector<std::filesystem::path> places = {"models/byte-hybrid"};
  const std::filesystem::path program = folder_of_program();
  if (!program.empty()) {
    // an installed tree, then the build folders of a source tree
    places.push_back(program / "../share/fastweight/models/byte-hybrid");
    for (const char *up : {"", "..", "../..", "../../..", "../../../.."}) {
      places.push_back(program / up / "models/byte-hybrid");
    }
  }
  for (const std::filesystem::path &place : places) {
    if (is_model(place)) return place.lexically_normal().string();
  }
  throw Error("no model: there is no models/byte-hybrid here or near the program; give --model DIR or set FW_MODEL");
}

Context make_context(int32_t threads) {
  fw_context_options options = {};
  options.struct_size = sizeof options;
  options.n_threads = threads;
  fw_context *context = nullptr;
  model::check(fw_context_create(&options, &context));
  return Context(context);
}

void install_signal_handlers() {
  struct sigaction action = {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

bool interrupted() { return g_stop != 0; }

void write_out(std::string_view bytes) {
  const bool done = fwrite(bytes.data(), 1, bytes.size(), stdout) == bytes.size() && fflush(stdout) == 0;
  if (done) return;
  if (errno == EPIPE) throw ClosedOutput();
  throw Error(text("cannot write to standard output: %s", strerror(errno)));
}

void print(const char *format, ...) {
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  std::string line(static_cast<size_t>(vsnprintf(nullptr, 0, format, args)), '\0');
  vsnprintf(line.data(), line.size() + 1, format, again);
  va_end(again);
  va_end(args);
  write_out(line);
}

bool stdout_is_terminal() { return isatty(STDOUT_FILENO) == 1; }
bool stderr_is_terminal() { return isatty(STDERR_FILENO) == 1; }
bool stdin_is_terminal() { return isatty(STDIN_FILENO) == 1; }

double seconds_now() {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

std::string size_text(uint64_t bytes) {
  const double b = static_cast<double>(bytes);
  if (bytes < 1000) return text("%d B", static_cast<int>(bytes));
  if (b < 1e6) return text("%.1f kB", b / 1e3);
  if (b < 1e9) return text("%.1f MB", b / 1e6);
  return text("%.1f GB", b / 1e9);
}

std::string file_or_stdin(const std::string &path, uint64_t limit) {
  if (path != "-") return model::read_whole_file(path, limit);
  std::string out;
  char block[1 << 16];
  while (!interrupted()) {
    const ssize_t n = read(STDIN_FILENO, block, sizeof block);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw Error(text("cannot read standard input: %s", strerror(errno)));
    if (n == 0) break;
    out.append(block, static_cast<size_t>(n));
    if (out.size() > limit) {
      throw Error(text("standard input has more than %llu bytes, the most allowed here",
                       static_cast<unsigned long long>(limit)));
    }
  }
  return out;
}

}  // namespace fw::cli
