// SPDX-License-Identifier: Apache-2.0
// fastweight explain: which implementation would run, and why the others would not.
#include <algorithm>

#include "cli/command.hpp"
#include "cli/operator_case.hpp"

namespace fw::cli {
namespace {

struct Options : CommonOptions {
  std::string op, dtype = "f32", direction = "forward";
  CaseSize size;
};

std::string explanation(fw_context *context, const fw_recurrence &desc, fw_direction direction) {
  uint64_t needed = 0;
  model::check(fw_recurrence_explain(context, &desc, direction, nullptr, 0, &needed));
  std::string out(needed, '\0');
  model::check(fw_recurrence_explain(context, &desc, direction, out.data(), needed, &needed));
  out.resize(out.empty() ? 0 : out.size() - 1);  // the closing zero
  return out;
}

int run_explain(const Options &o) {
  const fw_dtype dtype = dtype_named(o.dtype);
  const fw_direction direction = direction_named(o.direction);
  const Context context = make_context(o.threads);
  const fw_op first = o.op.empty() ? 1 : op_named(o.op), last = o.op.empty() ? FW_OP_COUNT - 1 : first;
  const CaseSize &z = o.size;
  if (!o.is_json) {
    print("%s, %s, B %lld, T %lld, H %lld, HV %lld, K %lld, V %lld, level %s, threads %d\n", direction_name(direction),
          dtype_name(dtype), static_cast<long long>(z.B), static_cast<long long>(z.T), static_cast<long long>(z.H),
          static_cast<long long>(z.HV), static_cast<long long>(z.K), static_cast<long long>(z.V),
          fw_context_cpu_level(context.get()), fw_context_n_threads(context.get()));
  }
  nlohmann::ordered_json all = nlohmann::ordered_json::object();
  for (fw_op op = first; op <= last; ++op) {
    const OperatorCase shapes(op, dtype, z, false);
    const fw_recurrence desc = direction == FW_STEP ? shapes.step() : shapes.forward();
    int64_t chunk = 1;
    if (direction != FW_STEP) model::check(fw_recurrence_chunk_length(context.get(), &desc, &chunk));
    const std::string why = explanation(context.get(), desc, direction);
    if (o.is_json) {
      all[fw_op_name(op)] = {{"chunk_length", chunk}, {"candidates", why}};
      continue;
    }
    print("\n%s (chunks of %lld tokens)\n", fw_op_name(op), static_cast<long long>(chunk));
    for (size_t at = 0; at < why.size();) {
      const size_t end = std::min(why.find('\n', at), why.size());
      print("  %s\n", why.substr(at, end - at).c_str());
      at = end + 1;
    }
  }
  if (o.is_json) print_json(all);
  return kOk;
}

}  // namespace

void add_explain_command(CLI::App &app) {
  CLI::App *command = add_command(
      app, "explain",
      "Which implementation of an operator runs for a shape, a type and a direction on this machine. Every candidate is\n"
      "listed in the order of preference with its reason to refuse; the one that runs has a star. FW_IMPL=NAME forces one.",
      "  fastweight explain\n"
      "  fastweight explain kda --dtype bf16 --key-dim 96 --value-dim 200\n"
      "  FW_IMPL=reference fastweight explain gated_delta_rule --direction step");
  const auto o = std::make_shared<Options>();
  command->add_option("operator", o->op, "A row of the catalogue; all of them without it")->type_name("NAME");
  command->add_option("--dtype", o->dtype, "f32, bf16 or f16")->type_name("TYPE")->capture_default_str();
  command->add_option("--direction", o->direction, "forward, backward or step")->type_name("NAME")->capture_default_str();
  add_size_options(command, o->size);
  add_threads_option(command, *o);
  add_json_option(command, *o);
  on_chosen(command, [o] { return run_explain(*o); });
}

}  // namespace fw::cli
