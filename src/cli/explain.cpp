// SPDX-License-Identifier: Apache-2.0
// fastweight explain: which implementation would run, and why the others would not.
#include <algorithm>

#include "cli/command.hpp"
#include "cli/json_text.hpp"
#include "cli/operator_case.hpp"
#include "model/device.hpp"

namespace fw::cli {
namespace {

std::string explanation(fw_context *context, const fw_recurrence &desc, fw_direction direction) {
  uint64_t needed = 0;
  model::check(fw_recurrence_explain(context, &desc, direction, nullptr, 0, &needed));
  std::string out(needed, '\0');
  model::check(fw_recurrence_explain(context, &desc, direction, out.data(), needed, &needed));
  out.resize(out.empty() ? 0 : out.size() - 1);  // the closing zero
  return out;
}

}  // namespace

int run_explain(const ExplainOptions &o) {
  const fw_dtype dtype = dtype_named(o.dtype);
  const fw_direction direction = direction_named(o.direction);
  const fw_device device = model::device_kind_named(o.device);
  const Context context = make_context(o.threads);
  const fw_op first = o.op.empty() ? 1 : op_named(o.op), last = o.op.empty() ? FW_OP_COUNT - 1 : first;
  const CaseSize &z = o.size;
  if (!o.is_json) {
    print("%s, %s, %s, B %lld, T %lld, H %lld, HV %lld, K %lld, V %lld, level %s, threads %d\n",
          direction_name(direction), o.device.c_str(), dtype_name(dtype), static_cast<long long>(z.B), static_cast<long long>(z.T),
          static_cast<long long>(z.H), static_cast<long long>(z.HV), static_cast<long long>(z.K),
          static_cast<long long>(z.V), fw_context_cpu_level(context.get()), fw_context_n_threads(context.get()));
  }
  Json all;
  for (fw_op op = first; op <= last; ++op) {
    const OperatorCase shapes(op, dtype, z, false);
    fw_recurrence desc = direction == FW_STEP ? shapes.step() : shapes.forward();
    desc.device = device;
    const std::string why = explanation(context.get(), desc, direction);
    const bool is_accepted = why.find('*') != std::string::npos;
    int64_t chunk = 1;
    if (direction != FW_STEP && is_accepted) model::check(fw_recurrence_chunk_length(context.get(), &desc, &chunk));
    if (o.is_json) {
      all.add(fw_op_name(op), Json().add("chunk_length", chunk).add("candidates", why));
      continue;
    }
    print("\n%s", fw_op_name(op));
    if (!is_accepted) print(" (none accepts)\n");
    else print(direction == FW_STEP ? "\n" : " (chunks of %lld tokens)\n", static_cast<long long>(chunk));
    for (size_t at = 0; at < why.size();) {
      const size_t end = std::min(why.find('\n', at), why.size());
      print("  %s\n", why.substr(at, end - at).c_str());
      at = end + 1;
    }
  }
  if (o.is_json) write_out(all.text());
  return kOk;
}

}  // namespace fw::cli
