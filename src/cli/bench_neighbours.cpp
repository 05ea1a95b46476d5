// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "cli/bench.hpp"
#include "cli/case_tensor.hpp"
#include "cli/neighbour_case.hpp"
#include "cli/operator_case.hpp"

namespace fw::cli {
namespace {

constexpr uint64_t kLargeCopy = uint64_t{256} << 20;  // past the caches

Json bench_neighbour(fw_context *context, const NeighbourKind &kind, fw_direction direction, const BenchOptions &o,
                     const Ceilings &ceilings, bool &is_right) {
  const fw_dtype dtype = dtype_named(o.dtype);
  CaseSize size = o.size;
  if (direction == FW_STEP) size.T = 1;
  const std::unique_ptr<NeighbourCase> one = kind.make(kind, direction, dtype, size, o.size.T);
  const double error = one->error(context);
  const std::string impl = fw_last_impl();
  Json row;
  row.add("op", kind.op).add("variant", kind.variant).add("direction", direction_name(direction)).add("impl", impl);
  row.add("dtype", dtype_name(dtype)).add("B", size.B).add("T", size.T).add("H", size.H).add("HV", size.HV);
  row.add("K", size.K).add("V", size.V).add("threads", ceilings.n_threads).add("error", error);
  const std::string name = std::string(kind.op) + ", " + kind.variant;
  if (!(error <= allowed_error(dtype, direction))) {
    is_right = false;
    row.add_null("ms");
    if (!o.is_json)
      print("%-28s %-8s %-13s %8.1e not timed: the result is wrong\n", name.c_str(), direction_name(direction),
            impl.c_str(), error);
    return row;
  }
  CaseSize none = size;
  none.T = 0;
  const std::unique_ptr<NeighbourCase> empty = kind.make(kind, direction, dtype, none, o.size.T);
  const double seconds = median_seconds(o.seconds, [&] { one->run(context); });
  const double nothing = median_seconds(o.seconds / 10, [&] { empty->run(context); });
  row.add("ms", 1e3 * seconds).add("empty_ms", 1e3 * nothing);
  const std::string floor = add_floor(row, one->work(), seconds, ceilings);
  if (!o.is_json) {
    print("%-28s %-8s %-13s %8.1e %10.4f %8.1f %s\n", name.c_str(), direction_name(direction), impl.c_str(), error,
          1e3 * seconds, seconds / nothing, floor.c_str());
  }
  return row;
}

}  // namespace

Ceilings measured_ceilings(fw_context *context) {
  const int32_t n_threads = fw_context_n_threads(context);
  return {n_threads, multiply_add_flops(fw_context_cpu_level(context), n_threads)};
}

std::string add_floor(Json &row, const Work &work, double seconds, const Ceilings &ceilings) {
  const double copy = copy_seconds(static_cast<uint64_t>(work.bytes), ceilings.n_threads);
  const double floor = std::max(copy, work.flops / ceilings.flops);
  const char *of = copy < floor ? "multiply-adds" : "copy";
  row.add("gb_per_s", 1e-9 * work.bytes / seconds).add("gflop_per_s", 1e-9 * work.flops / seconds);
  row.add("floor_ms", 1e3 * floor).add("floor_of", of).add("share", floor / seconds);
  const std::string flops = work.flops > 0 ? model::text("%8.2f", 1e-9 * work.flops / seconds) : model::text("%8s", "-");
  return model::text("%8.2f %s %6.1f %% of %s", 1e-9 * work.bytes / seconds, flops.c_str(), 100 * floor / seconds, of);
}

void bench_neighbours(fw_context *context, const BenchOptions &o, const std::string &op, Json &out, bool &is_right) {
  const Ceilings ceilings = measured_ceilings(context);
  const double copy = static_cast<double>(kLargeCopy) / copy_seconds(kLargeCopy, ceilings.n_threads);
  out.add("ceilings",
          Json().add("copy_gb_per_s", 1e-9 * copy).add("multiply_add_gflop_per_s", 1e-9 * ceilings.flops));
  if (!o.is_json) {
    print("ceilings: copy of %s %.1f GB/s, multiply-adds %.1f GFLOP/s\n", size_text(kLargeCopy).c_str(), 1e-9 * copy,
          1e-9 * ceilings.flops);
    print("%-28s %-8s %-13s %8s %10s %8s %8s %8s %s\n", "operation", "verb", "implementation", "error", "ms",
          "x empty", "GB/s", "GFLOP/s", "share of floor");
  }
  std::vector<Json> rows;
  for (const NeighbourKind &kind : neighbour_kinds()) {
    if (!op.empty() && op != kind.op) continue;
    for (const fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP})
      rows.push_back(bench_neighbour(context, kind, direction, o, ceilings, is_right));
  }
  out.add("neighbours", rows);
}

}  // namespace fw::cli
