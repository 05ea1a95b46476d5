// SPDX-License-Identifier: Apache-2.0
// The commands as the parser sees them: options, ranges, and the texts of --help.
#include "cli/commands.hpp"

#include "cli/command.hpp"

namespace fw::cli {
namespace {

// A command with one line for the list of commands and, in its own help, what it does and examples.
CLI::App *add_command(CLI::App &app, const std::string &name, const std::string &summary, const std::string &does,
                      const std::string &examples) {
  CLI::App *command = app.add_subcommand(name, summary);
  command->footer("\n" + does + "\n\nExamples:\n" + examples);
  return command;
}

// The parser alone would take -1 for 2^64 - 1.
CLI::Validator digits_only() {
  return CLI::Validator(
      [](std::string &value) {
        const bool is_whole = !value.empty() && value.find_first_not_of("0123456789") == std::string::npos;
        return is_whole ? std::string() : "is " + value + ", allowed whole numbers from 0";
      },
      "", "whole");
}

template <class Options>
void on_chosen(CLI::App *command, std::shared_ptr<Options> options, int (*run)(const Options &)) {
  command->callback([options, run] {
    const int code = run(*options);
    if (code != kOk) throw CLI::RuntimeError(code);
  });
}

void add_common_options(CLI::App *command, CommonOptions &o, bool has_model) {
  if (has_model) {
    command
        ->add_option("--model", o.model,
                     "Folder with config.json and model.safetensors\n"
                     "(default: FW_MODEL, else models/byte-hybrid here or near the program)")
        ->type_name("DIR");
  }
  command->add_option("--threads", o.threads, "0: FW_NUM_THREADS, else all cores; results do not depend on it")
      ->check(CLI::Range(0, 1024))
      ->type_name("N")
      ->capture_default_str();
  command->add_flag("--json", o.is_json, "Print one JSON object instead of text");
}

void add_device_option(CLI::App *command, CommonOptions &o) {
  command->add_option("--device", o.device, "cpu or cuda")->type_name("NAME")->capture_default_str();
}

void add_size_options(CLI::App *command, CaseSize &size) {
  const CLI::Range many(int64_t{1}, int64_t{1} << 31), heads(int64_t{1}, int64_t{65536}),
      widths(int64_t{1}, int64_t{512});
  command->add_option("--batch", size.B, "Sequences")->check(heads)->type_name("B")->capture_default_str();
  command->add_option("--length", size.T, "Tokens a sequence")->check(many)->type_name("T")->capture_default_str();
  command->add_option("--heads", size.H, "Query and key heads")->check(heads)->type_name("H")->capture_default_str();
  command->add_option("--value-heads", size.HV, "Value heads, a multiple of --heads")
      ->check(heads)
      ->type_name("HV")
      ->capture_default_str();
  command->add_option("--key-dim", size.K, "Key size of a head")
      ->check(widths)
      ->type_name("K")
      ->capture_default_str();
  command->add_option("--value-dim", size.V, "Value size of a head")
      ->check(widths)
      ->type_name("V")
      ->capture_default_str();
}

void add_generate(CLI::App &app) {
  CLI::App *command = add_command(
      app, "generate", "Write text with the model",
      "Reads the prompt in pieces, then streams one byte after another to standard output. Speed and memory go to "
      "standard\n"
      "error. Generation ends after --tokens bytes, or earlier where the model ends the document. The same prompt, "
      "seed and\n"
      "settings give the same bytes, whatever the number of threads. Ctrl-C ends it in order (exit code 130).",
      "  fastweight generate \"It was a dark night\"\n"
      "  fastweight generate --file letter.txt --tokens 1000 --seed 7 --temperature 0.7\n"
      "  echo \"Once upon a time\" | fastweight generate --echo --quiet\n"
      "  fastweight generate \"Part one.\" --tokens 200 --save-state story.state\n"
      "  fastweight generate --load-state story.state --tokens 200     # the same bytes as --tokens 400 at once");
  const auto o = std::make_shared<GenerateOptions>();
  CLI::Option *prompt = command
                            ->add_option("prompt", o->prompt,
                                         "Text to continue. Without it --file or a pipe is read; without those\n"
                                         "the program has a prompt of its own")
                            ->type_name("TEXT");
  CLI::Option *file =
      command->add_option("--file", o->file, "Read the prompt from a file of at most 64 MB; - is standard input")
          ->type_name("FILE")
          ->excludes(prompt);
  command->add_flag("--unprompted", o->is_unprompted, "Start a document from nothing")
      ->excludes(prompt)
      ->excludes(file);
  command->add_option("--tokens", o->tokens, "Bytes to write at most; 0 only reads the prompt")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--seed", o->seed, "Which of the possible texts (default 1)")
      ->check(digits_only())
      ->type_name("N");
  command
      ->add_option("--temperature", o->temperature,
                   "0 takes the likeliest byte, above 1 surprises more (default 0.8)")
      ->check(CLI::Range(0.0, 100.0))
      ->type_name("X");
  command
      ->add_option("--top-p", o->top_p,
                   "Draw from the likeliest bytes that together have this\nprobability (default 0.95)")
      ->check(CLI::Range(1e-9, 1.0))
      ->type_name("P");
  command->add_flag("--echo", o->has_echo, "Write the prompt first");
  command->add_flag("--quiet", o->is_quiet, "Nothing on standard error but failures");
  command->add_option("--save-state", o->save, "Afterwards put the generation aside in this file")->type_name("FILE");
  command
      ->add_option("--load-state", o->load,
                   "Continue from this file, with its seed and settings unless given\n"
                   "here; a prompt is read on top")
      ->type_name("FILE");
  add_device_option(command, *o);
  add_common_options(command, *o, true);
  on_chosen(command, o, run_generate);
}

void add_score(CLI::App &app) {
  CLI::App *command = add_command(app, "score", "Bits per byte that the model needs for a file",
                                  "The mean, over the bytes of the file, of -log2 of the probability that the model "
                                  "gave to the byte that came. A zero\n"
                                  "byte ends a document: it counts as a byte, and everything is forgotten at it, as "
                                  "in training. Any bytes are allowed\n"
                                  "and memory stays constant, so the file may have any size.",
                                  "  fastweight score book.txt\n"
                                  "  fastweight score valid.bin --limit 1000000 --json\n"
                                  "  xz -dc valid.bin.xz | fastweight score -");
  const auto o = std::make_shared<ScoreOptions>();
  command->add_option("file", o->file, "File to score, - for standard input")->required()->type_name("FILE");
  command->add_option("--limit", o->limit, "Only the first N bytes; 0 for all")
      ->check(digits_only())
      ->type_name("N")
      ->capture_default_str();
  add_device_option(command, *o);
  add_common_options(command, *o, true);
  on_chosen(command, o, run_score);
}

void add_verify(CLI::App &app) {
  CLI::App *command = add_command(
      app, "verify", "Recompute what must hold on this machine",
      "Every operator, forward, backward and step, against fp64 token by token; the model's logits by prefill "
      "against\n"
      "token by token; the same bits again, and after a split with the state saved and restored; the logits of\n"
      "golden_logits.safetensors, when the model folder has them, to 1e-4. Also prints the SHA-256 of the model's "
      "files.\n"
      "On a CUDA device: the model there, and against the CPU: logits to 1e-4, three texts of the likeliest bytes.\n"
      "Exit code 1 when a check fails.",
      "  fastweight verify\n"
      "  fastweight verify --operators --json\n"
      "  fastweight verify --device cuda\n"
      "  fastweight verify --model my/model --threads 1");
  const auto o = std::make_shared<VerifyOptions>();
  command->add_flag("--operators", o->is_operators_only, "Only the operators; no model is needed");
  add_device_option(command, *o);
  add_common_options(command, *o, true);
  on_chosen(command, o, run_verify);
}

void add_bench(CLI::App &app) {
  CLI::App *command = add_command(app, "bench", "Speed of the model and of every operation here",
                                  "Tokens a second of the model by prefill and by decode, then the median time of "
                                  "every operator's forward, backward and step, and of the operations beside the "
                                  "family (convolution,\n"
                                  "norms, gates, feature maps, attention, linear layer) with their share of a floor: a "
                                  "memcpy of as many\n"
                                  "bytes, or as many multiply-adds, measured in the same run. \"x empty\" is the time "
                                  "over that of a call without tokens.\n"
                                  "A time is printed only after the same call agreed with fp64 on the same operands; "
                                  "error is the largest difference\n"
                                  "over the root mean square. On a CUDA device: the model only.",
                                  "  fastweight bench\n"
                                  "  fastweight bench --model-only --threads 1\n"
                                  "  fastweight bench --model-only --device cuda\n"
                                  "  fastweight bench attention --dtype bf16 --length 2048\n"
                                  "  fastweight bench gated_delta_rule --dtype bf16 --length 2048 --heads 8 "
                                  "--value-heads 8 --key-dim 128 --value-dim 128");
  const auto o = std::make_shared<BenchOptions>();
  command->add_option("operator", o->op, "Only this row of the catalogue or operation beside it, and no model")
      ->type_name("NAME");
  CLI::Option *model_only = command->add_flag("--model-only", o->is_model_only, "Only the model");
  CLI::Option *operators = command->add_flag("--operators", o->is_operators_only, "Only the rows of the catalogue");
  command->add_flag("--neighbours", o->is_neighbours_only, "Only the operations beside the family")
      ->excludes(model_only)
      ->excludes(operators);
  operators->excludes(model_only);
  command->add_option("--dtype", o->dtype, "f32, bf16 or f16")->type_name("TYPE")->capture_default_str();
  add_size_options(command, o->size);
  command->add_option("--seconds", o->seconds, "Time spent on each operator")
      ->check(CLI::Range(0.001, 600.0))
      ->type_name("S")
      ->capture_default_str();
  add_device_option(command, *o);
  add_common_options(command, *o, true);
  on_chosen(command, o, run_bench);
}

void add_explain(CLI::App &app) {
  CLI::App *command =
      add_command(app, "explain", "Which implementation of an operator runs, and why",
                  "Every candidate for a shape, a type and a direction on this machine, in the order of preference, "
                  "with its reason to\n"
                  "refuse; the one that runs has a star. The environment variable FW_IMPL=NAME forces one.",
                  "  fastweight explain\n"
                  "  fastweight explain kda --dtype bf16 --key-dim 96 --value-dim 200\n"
                  "  fastweight explain kda --device cuda --dtype bf16 --direction backward\n"
                  "  FW_IMPL=reference_recurrent fastweight explain gated_delta_rule --direction step");
  const auto o = std::make_shared<ExplainOptions>();
  command->add_option("operator", o->op, "A row of the catalogue; all of them without it")->type_name("NAME");
  command->add_option("--dtype", o->dtype, "f32, bf16 or f16")->type_name("TYPE")->capture_default_str();
  command->add_option("--direction", o->direction, "forward, backward or step")
      ->type_name("NAME")
      ->capture_default_str();
  add_device_option(command, *o);
  add_size_options(command, o->size);
  add_common_options(command, *o, false);
  on_chosen(command, o, run_explain);
}

void add_info(CLI::App &app) {
  CLI::App *command = add_command(app, "info", "Version, machine, operators and model",
                                  "Version of the library, instruction set level, threads, CUDA devices, operators, and the "
                                  "model with its size and the memory\n"
                                  "of its state.",
                                  "  fastweight info\n"
                                  "  fastweight info --json --model models/byte-hybrid");
  const auto o = std::make_shared<CommonOptions>();
  add_common_options(command, *o, true);
  on_chosen(command, o, run_info);
}

}  // namespace

void add_commands(CLI::App &app) {
  add_generate(app);
  add_score(app);
  add_verify(app);
  add_bench(app);
  add_explain(app);
  add_info(app);
}

}  // namespace fw::cli
