// SPDX-License-Identifier: Apache-2.0
// fastweight verify: recomputes what must hold on this machine, for the operators and for the model.
#include <math.h>
#include <stdio.h>

#include "cli/command.hpp"
#include "cli/json_text.hpp"
#include "cli/operator_case.hpp"
#include "model/golden.hpp"
#include "model/sampler.hpp"

namespace fw::cli {
namespace {

using model::Session;
using model::text;

// fp32 logits of two orders of the same sums, or of another program's fp32
constexpr double kLogitTolerance = 1e-4;

// Largest error over the root mean square, against fp64 on the same rounded operands. fp32: sums of some thousand
// terms; half types: the output is rounded once (2^-9, 2^-12 of a value up to about 5 times the root mean square),
// and operands of matrix products may be rounded inside.
double operator_tolerance(fw_dtype dtype) { return dtype == FW_F32 ? 2e-5 : dtype == FW_BF16 ? 6e-2 : 8e-3; }

// A gradient is made of two products of rounded operands where an output is made of one, and the largest of up to ten
// tensors counts.
double gradient_tolerance(fw_dtype dtype) { return 4 * operator_tolerance(dtype); }

class Report {
 public:
  explicit Report(bool is_json) : is_json_(is_json) {}

  void value(const std::string &name, const std::string &value) {
    if (is_json_) {
      values_.add(name, value);
    } else {
      print("%-34s %s\n", name.c_str(), value.c_str());
    }
  }
  void outcome(const std::string &name, const char *status, const std::string &detail) {
    ++(status == kNotRun ? n_not_run_ : status == kHolds ? n_ok_ : n_failed_);
    if (is_json_) {
      checks_.push_back(Json().add("check", name).add("status", status).add("detail", detail));
    } else {
      print("%-34s %-7s %s\n", name.c_str(), status, detail.c_str());
    }
  }
  void at_most(const std::string &name, double found, double allowed) {
    outcome(name, found <= allowed ? kHolds : kFails, text("%.2e, allowed %.0e", found, allowed));
  }
  void holds(const std::string &name, bool does, const std::string &detail) {
    outcome(name, does ? kHolds : kFails, detail);
  }
  void not_run(const std::string &name, const std::string &why) { outcome(name, kNotRun, why); }

  int finish() {
    if (is_json_) {
      Json out;
      out.add("values", values_)
          .add("checks", checks_)
          .add("ok", n_ok_)
          .add("failed", n_failed_)
          .add("not_run", n_not_run_);
      write_out(out.text());
    } else {
      print("%d ok, %d failed, %d not run\n", n_ok_, n_failed_, n_not_run_);
    }
    return n_failed_ == 0 ? kOk : kFailed;
  }

 private:
  static constexpr const char *kHolds = "ok", *kFails = "FAILED", *kNotRun = "not run";
  bool is_json_;
  Json values_;
  std::vector<Json> checks_;
  int n_ok_ = 0, n_failed_ = 0, n_not_run_ = 0;
};

void verify_operators(fw_context *context, Report &report) {
  CaseSize size;
  size.T = 150;  // two whole chunks and a part of one
  size.H = 2;
  size.HV = 4;
  size.K = 48;
  size.V = 40;
  for (const fw_dtype dtype : {FW_F32, FW_BF16, FW_F16}) {
    double forward = 0, backward = 0, step = 0;
    std::string worst_forward, worst_backward, worst_step;
    for (fw_op op = 1; op < FW_OP_COUNT; ++op) {
      if (interrupted()) throw Interrupted();
      OperatorCase one(op, dtype, size, true);
      const double f = one.error_of_forward(context), b = one.error_of_backward(context);
      const double s = one.error_of_step(context);
      if (!(f <= forward)) forward = f, worst_forward = fw_op_name(op);
      if (!(b <= backward)) backward = b, worst_backward = fw_op_name(op);
      if (!(s <= step)) step = s, worst_step = fw_op_name(op);
    }
    const double allowed = operator_tolerance(dtype);
    report.at_most(text("operators %s forward (%s)", dtype_name(dtype), worst_forward.c_str()), forward, allowed);
    report.at_most(text("operators %s backward (%s)", dtype_name(dtype), worst_backward.c_str()), backward,
                   gradient_tolerance(dtype));
    report.at_most(text("operators %s step (%s)", dtype_name(dtype), worst_step.c_str()), step, allowed);
  }
}

// A zero byte, some English and another document, longer than two pieces.
std::vector<uint8_t> sample_tokens(int64_t piece) {
  const std::string line =
      "The quick brown fox jumps over the lazy dog; it was the best of times, it was the worst. ";
  std::string out(1, '\0');
  while (out.size() < static_cast<size_t>(2 * piece + 77)) out += line;
  out += '\0';
  out += "Another document begins here.";
  return {out.begin(), out.end()};
}

constexpr const char *kPrompts[] = {"It was a quiet morning, and Elizabeth walked alone", "The function returns a list of ",
                                    "In the beginning"};
constexpr int kPromptBytes = 200;

std::string greedy_text(Session &session, const std::string &prompt) {
  model::Sampler sampler({1, 0, 1}, 0);
  std::string out;
  session.reset();
  session.prefill(std::vector<uint8_t>(prompt.begin(), prompt.end()));
  while (out.size() < kPromptBytes) {
    out += static_cast<char>(sampler.draw(session.logits()));
    session.step(static_cast<uint8_t>(out.back()));
  }
  return out;
}

// A model on another device against the same on the CPU, prefill and steps.
void verify_against_cpu(fw_context *context, Session &session, std::span<const uint8_t> tokens, Report &report) {
  Session cpu(model::Model::load(session.model().folder()), context);
  const std::string name = session.model().device().name;
  report.at_most("prefill on " + name + " = on cpu",
                 model::largest_difference(model::logits_of_prefill(session, tokens), model::logits_of_prefill(cpu, tokens)),
                 kLogitTolerance);
  report.at_most("steps on " + name + " = on cpu",
                 model::largest_difference(model::logits_of_steps(session, tokens), model::logits_of_steps(cpu, tokens)),
                 kLogitTolerance);
  for (const char *prompt : kPrompts) {
    const std::string start(1, '\0');
    const bool is_same = greedy_text(session, start + prompt) == greedy_text(cpu, start + prompt);
    report.holds(text("greedy text, \"%.12s...\"", prompt), is_same, text("%d bytes as on cpu", kPromptBytes));
  }
}

void verify_model(fw_context *context, const std::string &folder, const model::Device &device, Report &report) {
  const std::shared_ptr<const model::Model> model = model::Model::load(folder, device);
  report.value("config.json sha256", model::hex(model->config_digest()));
  report.value("model.safetensors sha256", model::hex(model->weights_digest()));
  Session session(model, context), other(model, context);
  const std::vector<uint8_t> tokens = sample_tokens(session.piece_tokens());
  const std::vector<float> whole = model::logits_of_prefill(session, tokens);
  const std::vector<float> steps = model::logits_of_steps(session, tokens);
  report.at_most("prefill = token by token", model::largest_difference(whole, steps), kLogitTolerance);
  report.holds("prefill repeats its bits", model::logits_of_prefill(other, tokens) == whole,
               text("%zu tokens", tokens.size()));

  std::vector<float> split;
  const auto collect = [&](std::span<const float> rows) { split.insert(split.end(), rows.begin(), rows.end()); };
  const std::span<const uint8_t> all = tokens;
  const size_t piece = static_cast<size_t>(session.piece_tokens());
  session.reset();
  session.prefill(all.first(piece), collect);
  const std::vector<uint8_t> saved = session.save();
  other.reset();
  other.prefill(std::vector<uint8_t>{0, 'x'});
  other.restore(saved);
  other.prefill(all.subspan(piece), collect);
  report.holds("split and saved = in one, to the bit", split == whole, text("%zu bytes of state", saved.size()));
  if (device.kind != FW_DEVICE_CPU) verify_against_cpu(context, session, tokens, report);

  const std::optional<model::Golden> golden = model::load_golden(*model);
  if (!golden) {
    report.not_run("golden logits", "the folder has no golden_logits.safetensors");
    return;
  }
  report.at_most("golden logits, prefill",
                 model::largest_difference(model::logits_of_prefill(session, golden->tokens), golden->logits),
                 kLogitTolerance);
  report.at_most("golden logits, token by token",
                 model::largest_difference(model::logits_of_steps(session, golden->tokens), golden->logits),
                 kLogitTolerance);
}

}  // namespace

int run_verify(const VerifyOptions &o) {
  const model::Device &device = model::device_named(o.device);
  const bool is_on_cpu = device.kind == FW_DEVICE_CPU;
  if (o.is_operators_only && !is_on_cpu) throw model::Error("--device cuda verifies the model only: leave --operators out");
  const Context context = make_context(o.threads);
  Report report(o.is_json);
  report.value("fastweight", text("%s, level %s, %d threads", fw_version(), fw_context_cpu_level(context.get()),
                                  fw_context_n_threads(context.get())));
  const std::string folder = o.is_operators_only ? std::string() : find_model(o.model);
  if (is_on_cpu) verify_operators(context.get(), report);
  if (!folder.empty()) verify_model(context.get(), folder, device, report);
  return report.finish();
}

}  // namespace fw::cli
