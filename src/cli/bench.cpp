// SPDX-License-Identifier: Apache-2.0
// fastweight bench: tokens a second of the model, and the time of every operator, each printed after its own check.
#include <math.h>
#include <stdio.h>

#include <algorithm>

#include "cli/command.hpp"
#include "cli/operator_case.hpp"

namespace fw::cli {
namespace {

using model::text;
using nlohmann::ordered_json;

struct Options : CommonOptions {
  std::string op, dtype = "f32";
  CaseSize size;
  double seconds = 0.3;
  bool is_model_only = false, is_operators_only = false;
};

// Median time of a call over about `budget` seconds, after one call that is not counted.
template <class Call>
double median_seconds(double budget, Call call) {
  std::vector<double> times;
  call();
  const double start = seconds_now();
  do {
    if (interrupted()) throw CLI::RuntimeError(kInterrupted);
    const double before = seconds_now();
    call();
    times.push_back(seconds_now() - before);
  } while (seconds_now() - start < budget || times.size() < 3);
  std::nth_element(times.begin(), times.begin() + static_cast<ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

ordered_json bench_model(fw_context *context, const Options &o) {
  const std::shared_ptr<const model::Model> model = model::Model::load(find_model(o.model));
  model::Session session(model, context);
  const std::string line = "It was the best of times, it was the worst of times. ";
  std::vector<uint8_t> tokens(1, 0);
  const size_t prompt = static_cast<size_t>(session.piece_tokens()) * 4;
  while (tokens.size() < prompt) tokens.push_back(static_cast<uint8_t>(line[tokens.size() % line.size()]));
  const double prefill = median_seconds(3 * o.seconds, [&] { session.prefill(tokens); });
  constexpr int kSteps = 64;
  const double decode = median_seconds(3 * o.seconds, [&] {
    for (int i = 0; i < kSteps; ++i) session.step(static_cast<uint8_t>(line[static_cast<size_t>(i) % line.size()]));
  });
  ordered_json out = {{"folder", model->folder()},
                      {"parameters", model->n_parameters()},
                      {"prefill_tokens_per_second", static_cast<double>(tokens.size()) / prefill},
                      {"decode_tokens_per_second", kSteps / decode},
                      {"workspace_bytes", session.workspace_bytes()}};
  if (!o.is_json) {
    print("model %s, %lld parameters\n", model->folder().c_str(), static_cast<long long>(model->n_parameters()));
    print("  prefill %9.1f tokens/s (%zu tokens)\n  decode  %9.1f tokens/s (after %zu tokens)\n",
          static_cast<double>(tokens.size()) / prefill, tokens.size(), kSteps / decode, tokens.size());
  }
  return out;
}

ordered_json bench_operator(fw_context *context, fw_op op, fw_direction direction, const Options &o) {
  const fw_dtype dtype = dtype_named(o.dtype);
  CaseSize size = o.size;
  if (direction == FW_STEP) size.T = 1;
  OperatorCase one(op, dtype, size, true);
  const double error = direction == FW_STEP ? one.error_of_step(context) : one.error_of_forward(context);
  const std::string impl = fw_last_impl();
  // fp32 as in verify; half types by their rounding
  const bool is_right = error <= (dtype == FW_F32 ? 1e-4 : dtype == FW_BF16 ? 6e-2 : 8e-3);
  ordered_json row = {{"op", fw_op_name(op)}, {"direction", direction_name(direction)}, {"impl", impl},
                      {"dtype", dtype_name(dtype)}, {"B", size.B}, {"T", size.T}, {"H", size.H}, {"HV", size.HV},
                      {"K", size.K}, {"V", size.V}, {"threads", fw_context_n_threads(context)}, {"error", error}, {"ms", nullptr}};
  std::string time = "not timed: the result is wrong";
  if (is_right) {
    const double seconds = median_seconds(o.seconds, [&] { one.run(context, direction); });
    row["ms"] = 1e3 * seconds;
    time = text("%10.4f %9.3f", 1e3 * seconds, 1e6 * seconds / static_cast<double>(size.B * size.T * size.HV));
  }
  if (!o.is_json) print("%-20s %-8s %-22s %8.1e %s\n", fw_op_name(op), direction_name(direction), impl.c_str(), error, time.c_str());
  return row;
}

int run_bench(const Options &o) {
  const Context context = make_context(o.threads);
  ordered_json out = {{"version", fw_version()}, {"cpu_level", fw_context_cpu_level(context.get())},
                      {"threads", fw_context_n_threads(context.get())}};
  const fw_op first = o.op.empty() ? 1 : op_named(o.op), last = o.op.empty() ? FW_OP_COUNT - 1 : first;
  dtype_named(o.dtype);
  if (!o.is_json) print("level %s, %d threads\n", fw_context_cpu_level(context.get()), fw_context_n_threads(context.get()));
  if (!o.is_operators_only && o.op.empty()) out["model"] = bench_model(context.get(), o);
  bool is_right = true;
  if (!o.is_model_only) {
    if (!o.is_json) {
      print("%s, B %lld, T %lld (step: 1), H %lld, HV %lld, K %lld, V %lld\n", o.dtype.c_str(), static_cast<long long>(o.size.B),
            static_cast<long long>(o.size.T), static_cast<long long>(o.size.H), static_cast<long long>(o.size.HV),
            static_cast<long long>(o.size.K), static_cast<long long>(o.size.V));
      print("%-20s %-8s %-22s %8s %10s %9s\n", "operator", "verb", "implementation", "error", "ms", "us/tok/hd");
    }
    for (fw_op op = first; op <= last; ++op) {
      for (const fw_direction direction : {FW_FORWARD, FW_STEP}) {
        out["rows"].push_back(bench_operator(context.get(), op, direction, o));
        is_right = is_right && !out["rows"].back()["ms"].is_null();
      }
    }
  }
  if (o.is_json) print_json(out);
  return is_right ? kOk : kFailed;
}

}  // namespace

void add_bench_command(CLI::App &app) {
  CLI::App *command = add_command(
      app, "bench",
      "How fast this machine is: tokens a second of the model by prefill and by decode, then the median time of every\n"
      "operator's forward and step. A time is printed only after the same call agreed with fp64 on the same operands;\n"
      "error is the largest difference over the root mean square.",
      "  fastweight bench\n"
      "  fastweight bench --model-only --threads 1\n"
      "  fastweight bench gated_delta_rule --dtype bf16 --length 2048 --heads 8 --value-heads 8 --key-dim 128 --value-dim 128");
  const auto o = std::make_shared<Options>();
  command->add_option("operator", o->op, "Only this row of the catalogue")->type_name("NAME");
  CLI::Option *model_only = command->add_flag("--model-only", o->is_model_only, "No operators");
  command->add_flag("--operators", o->is_operators_only, "No model")->excludes(model_only);
  command->add_option("--dtype", o->dtype, "f32, bf16 or f16")->type_name("TYPE")->capture_default_str();
  add_size_options(command, o->size);
  command->add_option("--seconds", o->seconds, "Time spent on each operator")->check(CLI::Range(0.001, 600.0))
      ->type_name("S")->capture_default_str();
  add_model_option(command, *o);
  add_threads_option(command, *o);
  add_json_option(command, *o);
  on_chosen(command, [o] { return run_bench(*o); });
}

}  // namespace fw::cli
