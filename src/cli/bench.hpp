// SPDX-License-Identifier: Apache-2.0
// What the parts of `bench` share: the median time of a call, and the error with which a time is printed.
#pragma once
#include <algorithm>
#include <string>
#include <vector>

#include "cli/ceilings.hpp"
#include "cli/command.hpp"
#include "cli/json_text.hpp"

namespace fw::cli {

// Median time of a call over about `budget` seconds, after one call that is not counted.
template <class Call>
double median_seconds(double budget, Call call) {
  std::vector<double> times;
  call();
  const double start = seconds_now();
  do {
    if (interrupted()) throw Interrupted();
    const double before = seconds_now();
    call();
    times.push_back(seconds_now() - before);
  } while (seconds_now() - start < budget || times.size() < 3);
  std::nth_element(times.begin(), times.begin() + static_cast<ptrdiff_t>(times.size() / 2), times.end());
  return times[times.size() / 2];
}

// Largest error over the root mean square. fp32 as in verify for many tokens; half types by their rounding; gradients
// 4 times as in verify.
inline double allowed_error(fw_dtype dtype, fw_direction direction) {
  const double allowed = dtype == FW_F32 ? 1e-4 : dtype == FW_BF16 ? 6e-2 : 8e-3;
  return direction == FW_BACKWARD ? 4 * allowed : allowed;
}

// Bounds of this machine: multiply-adds by so many threads, measured once; copies are measured at the size of each call.
struct Ceilings {
  int32_t n_threads;
  double flops;
};
Ceilings measured_ceilings(fw_context *context);

// The floor of a call beside its time, added to its row; what the text says of it.
std::string add_floor(Json &row, const Work &work, double seconds, const Ceilings &ceilings);

// The operations beside the family, all or those of one name; adds "ceilings" and "neighbours" to `out`. is_right
// becomes false when a call does not agree with fp64.
void bench_neighbours(fw_context *context, const BenchOptions &options, const std::string &op, Json &out,
                      bool &is_right);

}  // namespace fw::cli
