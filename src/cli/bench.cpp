// SPDX-License-Identifier: Apache-2.0
// fastweight bench: tokens a second of the model, and the time of every operator and of the operations beside
// the family, each printed after its own check.
#include <math.h>
#include <stdio.h>

#include <vector>

#include "cli/bench.hpp"
#include "cli/neighbour_case.hpp"
#include "cli/operator_case.hpp"
#include "model/session.hpp"

namespace fw::cli {
namespace {

using model::text;

Json bench_model(fw_context *context, const BenchOptions &o) {
  const std::shared_ptr<const model::Model> model = model::Model::load(find_model(o.model), model::device_named(o.device));
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
  Json out;
  out.add("folder", model->folder()).add("device", model->device().name).add("parameters", model->n_parameters());
  out.add("prefill_tokens_per_second", static_cast<double>(tokens.size()) / prefill);
  out.add("decode_tokens_per_second", kSteps / decode).add("workspace_bytes", session.workspace_bytes());
  if (!o.is_json) {
    print("model %s, %lld parameters, on %s\n", model->folder().c_str(), static_cast<long long>(model->n_parameters()),
          model->device().name);
    print("  prefill %9.1f tokens/s (%zu tokens)\n  decode  %9.1f tokens/s (after %zu tokens)\n",
          static_cast<double>(tokens.size()) / prefill, tokens.size(), kSteps / decode, tokens.size());
  }
  return out;
}

// A row of the table; is_right becomes false when the call does not agree with fp64.
Json bench_operator(fw_context *context, fw_op op, fw_direction direction, const BenchOptions &o,
                    const Ceilings &ceilings, bool &is_right) {
  const fw_dtype dtype = dtype_named(o.dtype);
  CaseSize size = o.size;
  if (direction == FW_STEP) size.T = 1;
  OperatorCase one(op, dtype, size, true);
  const double error = direction == FW_STEP       ? one.error_of_step(context)
                       : direction == FW_BACKWARD ? one.error_of_backward(context)
                                                  : one.error_of_forward(context);
  one.run(context, direction);
  const std::string impl = fw_last_impl();
  const bool agrees = error <= allowed_error(dtype, direction);
  Json row;
  row.add("op", fw_op_name(op))
      .add("direction", direction_name(direction))
      .add("impl", impl)
      .add("dtype", dtype_name(dtype));
  row.add("B", size.B).add("T", size.T).add("H", size.H).add("HV", size.HV).add("K", size.K).add("V", size.V);
  row.add("threads", fw_context_n_threads(context)).add("error", error);
  std::string time = "not timed: the result is wrong";
  is_right = is_right && agrees;
  if (agrees) {
    const double seconds = median_seconds(o.seconds, [&] { one.run(context, direction); });
    row.add("ms", 1e3 * seconds);
    time = text("%10.4f %9.3f ", 1e3 * seconds, 1e6 * seconds / static_cast<double>(size.B * size.T * size.HV)) +
           add_floor(row, one.work(direction), seconds, ceilings);
  } else {
    row.add_null("ms");
  }
  if (!o.is_json)
    print("%-20s %-8s %-22s %8.1e %s\n", fw_op_name(op), direction_name(direction), impl.c_str(), error,
          time.c_str());
  return row;
}

// As op_named, with a sentence that lists the operations beside the family too.
fw_op row_named(const std::string &name) {
  try {
    return op_named(name);
  } catch (const model::Error &error) {
    throw model::Error(std::string(error.what()) + ", " + neighbour_names());
  }
}

}  // namespace

int run_bench(const BenchOptions &o) {
  if (model::device_kind_named(o.device) == FW_DEVICE_CUDA && !o.is_model_only) {
    throw model::Error("--device cuda times the model only: give --model-only too");
  }
  const Context context = make_context(o.threads);
  Json out;
  out.add("version", fw_version()).add("cpu_level", fw_context_cpu_level(context.get()));
  out.add("threads", fw_context_n_threads(context.get()));
  bool is_neighbour = false, is_right = true;
  for (const NeighbourKind &kind : neighbour_kinds()) is_neighbour = is_neighbour || o.op == kind.op;
  const bool is_all = o.op.empty();
  const fw_op first = is_all || is_neighbour ? 1 : row_named(o.op), last = is_all ? FW_OP_COUNT - 1 : first;
  dtype_named(o.dtype);
  if (!o.is_json)
    print("level %s, %d threads\n", fw_context_cpu_level(context.get()), fw_context_n_threads(context.get()));
  if (is_all && !o.is_operators_only && !o.is_neighbours_only) out.add("model", bench_model(context.get(), o));
  if (!o.is_model_only && !o.is_json) {
    print("%s, B %lld, T %lld (step: 1), H %lld, HV %lld, K %lld, V %lld\n", o.dtype.c_str(),
          static_cast<long long>(o.size.B), static_cast<long long>(o.size.T), static_cast<long long>(o.size.H),
          static_cast<long long>(o.size.HV), static_cast<long long>(o.size.K), static_cast<long long>(o.size.V));
  }
  std::vector<Json> rows;
  if (!o.is_model_only && !o.is_neighbours_only && !is_neighbour) {
    if (!o.is_json) {
      print("%-20s %-8s %-22s %8s %10s %9s %8s %8s %s\n", "operator", "verb", "implementation", "error", "ms",
            "us/tok/hd", "GB/s", "GFLOP/s", "share of floor");
    }
    const Ceilings ceilings = measured_ceilings(context.get());
    for (fw_op op = first; op <= last; ++op) {
      for (const fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP}) {
        rows.push_back(bench_operator(context.get(), op, direction, o, ceilings, is_right));
      }
    }
  }
  out.add("rows", rows);
  if (is_neighbour || (is_all && !o.is_model_only && !o.is_operators_only))
    bench_neighbours(context.get(), o, o.op, out, is_right);
  if (o.is_json) write_out(out.text());
  return is_right ? kOk : kFailed;
}

}  // namespace fw::cli
