// SPDX-License-Identifier: Apache-2.0
// fastweight generate: reads a prompt in pieces, then writes byte after byte.
#include <stdio.h>

#include <algorithm>
#include <optional>

#include "cli/command.hpp"
#include "cli/json_text.hpp"
#include "model/state_file.hpp"
#include "model/utf8.hpp"

namespace fw::cli {
namespace {

using model::Error;
using model::quote;
using model::Session;
using model::text;

constexpr uint64_t kMaxPrompt = 64 << 20;
constexpr const char *kOwnPrompt = "It was ";

struct Timing {
  int64_t tokens = 0;
  double seconds = 0;
  double rate() const { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0; }
  Json json() const { return Json().add("tokens", tokens).add("seconds", seconds).add("tokens_per_second", rate()); }
};

std::span<const uint8_t> bytes_of(const std::string &s) {
  return {reinterpret_cast<const uint8_t *>(s.data()), s.size()};
}

// The prompt, or nothing when generation goes on without one. is_own: nobody gave one, so the text needs it to be
// read.
std::optional<std::string> read_prompt(const GenerateOptions &o, bool &is_own) {
  std::string prompt, source;
  if (o.prompt) {
    prompt = *o.prompt;
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
      if (!o.is_quiet)
        fprintf(stderr, "note: no prompt was given, so this one is used: %s\n", quote(kOwnPrompt).c_str());
      prompt = kOwnPrompt;
      is_own = true;
    }
  }
  if (interrupted()) throw Interrupted();
  if (prompt.empty())
    throw Error(source + " is empty: a prompt needs at least one byte (--unprompted starts from nothing)");
  if (prompt.find_first_not_of('\0') == std::string::npos) {
    throw Error(source + " holds only zero bytes: each starts a document, so there is nothing to continue");
  }
  const size_t bad = model::find_invalid_utf8(prompt);
  if (bad != std::string::npos && !o.is_quiet) {
    fprintf(stderr, "note: %s is not UTF-8 at byte %zu; the model reads bytes, so it is used as it is\n",
            source.c_str(), bad);
  }
  return prompt;
}

// A slice is some pieces, so that the bits are those of one call; between slices there is time for Ctrl-C and
// progress.
Timing prefill(Session &session, const std::string &tokens, const GenerateOptions &o) {
  Timing timing;
  const size_t slice = static_cast<size_t>(session.piece_tokens()) * 4;
  const double start = seconds_now();
  double shown = start;
  for (size_t at = 0; at < tokens.size(); at += slice) {
    if (interrupted()) throw Interrupted();
    session.prefill(bytes_of(tokens.substr(at, slice)));
    const double now = seconds_now();
    if (!o.is_quiet && stderr_is_terminal() && now - shown > 0.5) {
      const size_t done = std::min(at + slice, tokens.size());
      fprintf(stderr, "\rreading the prompt: %zu of %zu bytes, %.0f/s ", done, tokens.size(),
              static_cast<double>(done) / (now - start));
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

Json memory_json(const model::Config &config, int64_t tokens) {
  const model::StateBytes bytes = model::state_bytes(config);
  Json out;
  out.add("state_bytes", bytes.recurrent + bytes.convolution + bytes.attention)
      .add("recurrent_bytes", bytes.recurrent);
  out.add("convolution_bytes", bytes.convolution).add("attention_bytes", bytes.attention);
  out.add("full_attention_bytes", bytes.full_attention_token * static_cast<uint64_t>(tokens));
  out.add("full_attention_bytes_per_token", bytes.full_attention_token);
  return out;
}

void print_json_result(const Outcome &r, const Session &session, const model::Sampler &sampler,
                       int64_t prompt_bytes) {
  const bool is_utf8 = model::find_invalid_utf8(r.written) == std::string::npos;
  const model::SamplerSettings &settings = sampler.settings();
  Json out;
  out.add("model", session.model().folder()).add("device", session.model().device().name);
  out.add("seed", settings.seed).add("temperature", settings.temperature);
  out.add("top_p", settings.top_p).add("prompt_bytes", prompt_bytes).add("text", r.written).add("is_utf8", is_utf8);
  if (!is_utf8) out.add("hex", model::hex(bytes_of(r.written)));
  out.add("stop", r.stop).add("prefill", r.prefill.json()).add("decode", r.decode.json());
  out.add("memory", memory_json(session.model().config(), session.position()));
  write_out(out.text());
}

void print_statistics(const Outcome &r, const Session &session) {
  const model::StateBytes bytes = model::state_bytes(session.model().config());
  const uint64_t tokens = static_cast<uint64_t>(session.position());
  fprintf(stderr, "prefill  %6lld tokens  %8.3f s  %8.1f tokens/s\n", static_cast<long long>(r.prefill.tokens),
          r.prefill.seconds, r.prefill.rate());
  fprintf(stderr, "decode   %6lld tokens  %8.3f s  %8.1f tokens/s\n", static_cast<long long>(r.decode.tokens),
          r.decode.seconds, r.decode.rate());
  fprintf(stderr,
          "memory   recurrent state %s at any length, %s with convolutions and attention windows;\n"
          "         full attention in every layer: %s for these %llu tokens, %s more for each token\n",
          size_text(bytes.recurrent).c_str(),
          size_text(bytes.recurrent + bytes.convolution + bytes.attention).c_str(),
          size_text(bytes.full_attention_token * tokens).c_str(), static_cast<unsigned long long>(tokens),
          size_text(bytes.full_attention_token).c_str());
}

// Draws, writes, reads what it drew; the last byte drawn stays pending.
void decode(Session &session, model::Sampler &sampler, int32_t &pending, const GenerateOptions &o, Outcome &result) {
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

}  // namespace

int run_generate(const GenerateOptions &o) {
  const std::string folder = find_model(o.model);
  const std::shared_ptr<const model::Model> model = model::Model::load(folder, model::device_named(o.device));
  bool is_own = false;
  const std::optional<std::string> prompt = read_prompt(o, is_own);
  const Context context = make_context(o.threads);
  Session session(model, context.get());

  model::GenerationState state;
  if (!o.load.empty()) state = model::load_state_file(o.load, session);
  state.settings.seed = o.seed.value_or(state.settings.seed);
  state.settings.temperature = o.temperature.value_or(state.settings.temperature);
  state.settings.top_p = o.top_p.value_or(state.settings.top_p);
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
    if ((o.has_echo || is_own) && prompt && !o.is_json) write_out(shown(*prompt));
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

}  // namespace fw::cli
