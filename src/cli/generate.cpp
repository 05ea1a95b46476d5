// SPDX-License-Identifier: Apache-2.0
// fastweight generate: reads a prompt in pieces, then writes byte after byte.
#include <stdio.h>

#include <algorithm>
#include <optional>

#include "cli/command.hpp"
#include "model/json.hpp"
#include "model/state_file.hpp"

namespace fw::cli {
namespace {

using model::Error;
using model::quote;
using model::Session;
using model::text;
using nlohmann::ordered_json;

constexpr uint64_t kMaxPrompt = 64 << 20;
constexpr const char *kOwnPrompt = "It was ";

struct Options : CommonOptions {
  CLI::Option *has_prompt = nullptr, *has_seed = nullptr, *has_temperature = nullptr, *has_top_p = nullptr;
  std::string prompt, file, save, load;
  bool is_unprompted = false, has_echo = false, is_quiet = false;
  model::SamplerSettings sampler;
  int64_t tokens = 400;
};

struct Timing {
  int64_t tokens = 0;
  double seconds = 0;
  double rate() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
  ordered_json json() const {
    return {{"tokens", tokens}, {"seconds", seconds}, {"tokens_per_second", rate()}};
  }
};

std::span<const uint8_t> bytes_of(const std::string &s) { return {reinterpret_cast<const uint8_t *>(s.data()), s.size()}; }

// The prompt, or nothing when generation goes on without one.
std::optional<std::string> read_prompt(const Options &o) {
  std::string prompt, source;
  if (o.has_prompt->count() > 0) {
    prompt = o.prompt;
    source = "the prompt";
  } else if (!o.file.empty()) {
    prompt = file_or_stdin(o.file, kMaxPrompt);
    source = o.file == "-" ? "standard input" : quote(o.file);
  } else if (o.is_unprompted || !o.load.empty()) {
    return std::nullopt;
  } else {
    if (!stdin_is_terminal()) prompt = file_or_stdin("-", kMaxPrompt);
    source = "standard input";
    if (prompt.empty()) {
      if (!o.is_quiet) fprintf(stderr, "note: no prompt was given, so this one is used: %s\n", quote(kOwnPrompt).c_str());
      prompt = kOwnPrompt;
    }
  }
  if (interrupted()) throw CLI::RuntimeError(kInterrupted);
  if (prompt.empty()) throw Error(source + " is empty: a prompt needs at least one byte (--unprompted starts from nothing)");
  if (prompt.find_first_not_of('\0') == std::string::npos) {
    throw Error(source + " holds only zero bytes: each starts a document, so there is nothing to continue");
  }
  const size_t bad = model::find_invalid_utf8(prompt);
  if (bad != std::string::npos && !o.is_quiet) {
    fprintf(stderr, "note: %s is not UTF-8 at byte %zu; the model reads bytes, so it is used as it is\n", source.c_str(), bad);
  }
  return prompt;
}

// A slice is some pieces, so that the bits are those of one call; between slices there is time for Ctrl-C and progress.
Timing prefill(Session &session, const std::string &tokens, const Options &o) {
  Timing timing;
  const size_t slice = static_cast<size_t>(session.piece_tokens()) * 4;
  const double start = seconds_now();
  double shown = start;
  for (size_t at = 0; at < tokens.size(); at += slice) {
    if (interrupted()) throw CLI::RuntimeError(kInterrupted);
    session.prefill(bytes_of(tokens.substr(at, slice)));
    const double now = seconds_now();
    if (!o.is_quiet && stderr_is_terminal() && now - shown > 0.5) {
      const size_t done = std::min(at + slice, tokens.size());
      fprintf(stderr, "\rreading the prompt: %zu of %zu bytes, %.0f/s ", done, tokens.size(), static_cast<double>(done) / (now - start));
      shown = now;
    }
  }
  if (shown != start) fputs("\r\033[K", stderr);
  timing.tokens = static_cast<int64_t>(tokens.size());
  timing.seconds = seconds_now() - start;
  return timing;
}

// A terminal would obey control bytes; anywhere else bytes are passed on untouched.
std::string shown(std::string_view bytes) {
  std::string out(bytes);
  if (!stdout_is_terminal()) return out;
  for (char &c : out) {
    if ((static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7f) c = '?';
  }
  return out;
}

struct Outcome {
  Timing prefill, decode;
  std::string written;
  const char *stop = "length";
};

ordered_json memory_json(const model::Config &config, int64_t tokens) {
  const model::StateBytes bytes = model::state_bytes(config);
  return {{"state_bytes", bytes.recurrent + bytes.convolution + bytes.attention},
          {"recurrent_bytes", bytes.recurrent},
          {"convolution_bytes", bytes.convolution},
          {"attention_bytes", bytes.attention},
          {"full_attention_bytes", bytes.full_attention_token * static_cast<uint64_t>(tokens)},
          {"full_attention_bytes_per_token", bytes.full_attention_token}};
}

void print_json_result(const Outcome &r, const Session &session, const model::Sampler &sampler, int64_t prompt_bytes) {
  const bool is_utf8 = model::find_invalid_utf8(r.written) == std::string::npos;
  ordered_json out = {{"model", session.model().folder()},
                      {"seed", sampler.settings().seed},
                      {"temperature", sampler.settings().temperature},
                      {"top_p", sampler.settings().top_p},
                      {"prompt_bytes", prompt_bytes},
                      {"text", model::replace_invalid_utf8(r.written)},
                      {"is_utf8", is_utf8}};
  if (!is_utf8) out["hex"] = model::hex(bytes_of(r.written));
  out["stop"] = r.stop;
  out["prefill"] = r.prefill.json();
  out["decode"] = r.decode.json();
  out["memory"] = memory_json(session.model().config(), session.position());
  print_json(out);
}

void print_statistics(const Outcome &r, const Session &session) {
  const model::StateBytes bytes = model::state_bytes(session.model().config());
  const uint64_t tokens = static_cast<uint64_t>(session.position());
  fprintf(stderr, "prefill  %6lld tokens  %8.3f s  %8.1f tokens/s\n", static_cast<long long>(r.prefill.tokens),
          r.prefill.seconds, r.prefill.rate());
  fprintf(stderr, "decode   %6lld tokens  %8.3f s  %8.1f tokens/s\n", static_cast<long long>(r.decode.tokens),
          r.decode.seconds, r.decode.rate());
  fprintf(stderr, "memory   recurrent state %s at any length, %s with convolutions and attention windows;\n"
                  "         full attention in every layer: %s for these %llu tokens, %s more for each token\n",
          size_text(bytes.recurrent).c_str(), size_text(bytes.recurrent + bytes.convolution + bytes.attention).c_str(),
          size_text(bytes.full_attention_token * tokens).c_str(), static_cast<unsigned long long>(tokens),
          size_text(bytes.full_attention_token).c_str());
}

// Draws, writes, reads what it drew; the last byte drawn stays pending.
void decode(Session &session, model::Sampler &sampler, int32_t &pending, const Options &o, Outcome &result) {
  const double start = seconds_now();
  const bool is_streaming = !o.is_json;
  for (int64_t i = 0; i < o.tokens; ++i) {
    if (interrupted()) {
      result.stop = "interrupted";
      break;
    }
    if (pending >= 0) session.step(static_cast<uint8_t>(pending));
    pending = sampler.draw(session.logits());
    ++result.decode.tokens;
    if (pending == 0) {
      result.stop = "end_of_document";
      break;
    }
    const char byte = static_cast<char>(pending);
    result.written += byte;
    if (is_streaming) write_out(shown({&byte, 1}));
  }
  result.decode.seconds = seconds_now() - start;
}

int run_generate(const Options &o) {
  const std::string folder = find_model(o.model);
  const std::shared_ptr<const model::Model> model = model::Model::load(folder);
  const std::optional<std::string> prompt = read_prompt(o);
  const Context context = make_context(o.threads);
  Session session(model, context.get());

  model::GenerationState state;
  state.settings = o.sampler;
  if (!o.load.empty()) {
    state = model::load_state_file(o.load, session);
    if (o.has_seed->count() > 0) state.settings.seed = o.sampler.seed;
    if (o.has_temperature->count() > 0) state.settings.temperature = o.sampler.temperature;
    if (o.has_top_p->count() > 0) state.settings.top_p = o.sampler.top_p;
  }
  model::Sampler sampler(state.settings, state.n_drawn);
  int32_t pending = state.pending;
  Outcome result;
  const bool is_ended = pending == 0 && !prompt;
  std::string tokens = prompt.value_or("");
  if (o.load.empty()) {
    tokens.insert(0, 1, '\0');  // what a document starts with
  } else if (prompt && pending >= 0) {
    session.step(static_cast<uint8_t>(pending));
    pending = -1;
  }
  if (!tokens.empty()) result.prefill = prefill(session, tokens, o);
  try {
    if (o.has_echo && prompt && !o.is_json) write_out(shown(*prompt));
    if (is_ended) {
      result.stop = "end_of_document";
      if (!o.is_quiet) fputs("note: the saved document had ended; give a prompt to start another\n", stderr);
    } else {
      decode(session, sampler, pending, o, result);
    }
    if (!o.is_json && !result.written.empty() && stdout_is_terminal()) write_out("\n");
  } catch (const ClosedOutput &) {
    result.stop = "closed_output";
  }
  if (!o.save.empty()) {
    model::save_state_file(o.save, session, {sampler.settings(), sampler.n_drawn(), pending});
  }
  if (o.is_json) {
    print_json_result(result, session, sampler, static_cast<int64_t>(prompt ? prompt->size() : 0));
  } else if (!o.is_quiet) {
    print_statistics(result, session);
  }
  return interrupted() ? kInterrupted : kOk;
}

}  // namespace

void add_generate_command(CLI::App &app) {
  CLI::App *command = add_command(
      app, "generate",
      "Write text with the model: read the prompt in pieces, then stream one byte after another to standard output.\n"
      "Speed and memory go to standard error. Generation ends after --tokens bytes or where the model ends the document.\n"
      "The same seed, settings and prompt give the same bytes, whatever the number of threads.",
      "  fastweight generate \"It was a dark night\"\n"
      "  fastweight generate --file letter.txt --tokens 1000 --seed 7 --temperature 0.7\n"
      "  echo \"Once upon a time\" | fastweight generate --echo --quiet\n"
      "  fastweight generate \"Part one.\" --tokens 200 --save-state story.state\n"
      "  fastweight generate --load-state story.state --tokens 200     # the same bytes as --tokens 400 at once");
  const auto o = std::make_shared<Options>();
  o->has_prompt = command->add_option("prompt", o->prompt, "Text to continue; without it --file or a pipe is read, else the program has one of its own")
                      ->type_name("TEXT");
  CLI::Option *file = command->add_option("--file", o->file, "Read the prompt from a file, - for standard input (at most 64 MB)")
                          ->type_name("FILE");
  CLI::Option *unprompted = command->add_flag("--unprompted", o->is_unprompted, "Start a document from nothing");
  file->excludes(o->has_prompt);
  unprompted->excludes(o->has_prompt)->excludes(file);
  command->add_option("--tokens", o->tokens, "Bytes to write at most; 0 only reads the prompt")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40))->type_name("N")->capture_default_str();
  o->has_seed = command->add_option("--seed", o->sampler.seed, "Which of the possible texts")->type_name("N")->capture_default_str();
  o->has_temperature = command->add_option("--temperature", o->sampler.temperature, "0 takes the likeliest byte, above 1 surprises more")
                           ->check(CLI::Range(0.0, 100.0))->type_name("X")->capture_default_str();
  o->has_top_p = command->add_option("--top-p", o->sampler.top_p, "Draw from the likeliest bytes that together have this probability")
                     ->check(CLI::Range(1e-9, 1.0))->type_name("P")->capture_default_str();
  command->add_flag("--echo", o->has_echo, "Write the prompt first");
  command->add_flag("--quiet", o->is_quiet, "Nothing on standard error but failures");
  command->add_option("--save-state", o->save, "Afterwards put the generation aside in this file")->type_name("FILE");
  command->add_option("--load-state", o->load,
                      "Continue from this file, with its seed and settings unless given here; a prompt is read on top")
      ->type_name("FILE");
  add_model_option(command, *o);
  add_threads_option(command, *o);
  add_json_option(command, *o);
  on_chosen(command, [o] { return run_generate(*o); });
}

}  // namespace fw::cli
