// SPDX-License-Identifier: Apache-2.0
// Plan: reference_run.hpp in fp64 or fp32; an item is a query/key head; the workspace holds, for each slot, one state
// forward and ~2 sqrt(T) states and four [T,K] sums backward.
#include "ops/recurrence/reference.hpp"

#include "ops/recurrence/reference_run.hpp"

namespace fw::recurrence {

uint64_t reference_recurrent_workspace(const fw_context &context, const Problem &p) {
  return p.is_f64 ? ReferenceRun<double, Exact>(p, Exact()).workspace(context)
                  : ReferenceRun<float, Exact>(p, Exact()).workspace(context);
}

void run_reference_recurrent(fw_context &context, const Problem &p, void *workspace) {
  if (p.is_f64) {
    ReferenceRun<double, Exact>(p, Exact()).run(context, workspace);
  } else {
    ReferenceRun<float, Exact>(p, Exact()).run(context, workspace);
  }
}

}  // namespace fw::recurrence
