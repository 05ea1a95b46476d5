// SPDX-License-Identifier: Apache-2.0
// How a CTA of the decode kernels that stream states begins: one head a CTA.
#pragma once
#include "cuda/sm90/barrier.cuh"
#include "ops/recurrence/cuda_step.cuh"

namespace fw::recurrence {

struct StepHead {
  int64_t hv, h;
  StepSequence sequence;
};

// The head of this CTA, once the kernel before has ended. full: the barrier of a copy. The threads that make it may use it
// at once, others past the next barrier of the warp or the CTA. With slot -1 zeros are written and nothing is left to do.
__device__ inline StepHead begin_head(const Problem &p, uint32_t full, bool makes_barrier) {
  if (makes_barrier) {
    sm90::barrier_init(full, 1);
    sm90::barrier_init_fence();
  }
  const uint32_t heads = static_cast<uint32_t>(p.HV), n = blockIdx.x / heads;
  const int64_t hv = blockIdx.x - n * heads;
  sm90::launch_next();
  sm90::launch_wait();
  const StepHead head = {hv, hv / p.group(), step_sequence(p, n)};
  if (head.sequence.slot < 0) zero_outputs(p, head.sequence.segment, hv);
  return head;
}

}  // namespace fw::recurrence
