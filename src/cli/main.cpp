// SPDX-License-Identifier: Apache-2.0
// The program `fastweight`: parses, runs one command, turns what it throws into one sentence and an exit code:
// 0 done, 1 bad input or a failed check, 2 wrong usage, 130 interrupted.
#include <stdio.h>

#include <exception>
#include <new>

#include "cli/command.hpp"
#include "cli/commands.hpp"
#if defined(FW_HAVE_STUDY)
#include "cli/study.hpp"
#endif

namespace fw::cli {
namespace {

int run(int argc, char **argv) {
  CLI::App app(
      "Fastweight: linear attention whose memory is erased, written and read, and a small language model that\n"
      "writes with it. Every command explains itself: fastweight COMMAND --help");
  app.name("fastweight");
  app.set_version_flag("--version", std::string("fastweight ") + fw_version());
  app.require_subcommand(0, 1);
  app.get_formatter()->column_width(28);
  add_commands(app);
#if defined(FW_HAVE_STUDY)
  add_study_command(app);
#endif

  const auto command_name = [&] {
    const std::vector<CLI::App *> chosen = app.get_subcommands();
    return "fastweight" + (chosen.empty() ? std::string() : " " + chosen[0]->get_name());
  };
  try {
    app.parse(argc, argv);
    if (app.get_subcommands().empty()) {
      fputs(app.help().c_str(), stderr);
      return kUsage;
    }
    return kOk;
  } catch (const CLI::RuntimeError &error) {
    return error.get_exit_code();
  } catch (const CLI::ParseError &error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    fprintf(stderr, "%s: %s (see %s --help)\n", command_name().c_str(), error.what(), command_name().c_str());
    return kUsage;
  } catch (const ClosedOutput &) {
    return kOk;
  } catch (const Interrupted &) {
    return kInterrupted;
  } catch (const std::bad_alloc &) {
    fprintf(stderr, "%s: out of memory\n", command_name().c_str());
    return kFailed;
  } catch (const std::exception &error) {
    fprintf(stderr, "%s: %s\n", command_name().c_str(), error.what());
    return kFailed;
  }
}

}  // namespace
}  // namespace fw::cli

int main(int argc, char **argv) {
  fw::cli::install_signal_handlers();
  return fw::cli::run(argc, argv);
}
