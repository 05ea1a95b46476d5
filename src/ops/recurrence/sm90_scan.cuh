// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "ops/recurrence/sm90_plan.cuh"

namespace fw::sm90 {

struct ScanArguments {
  CUtensorMap q, k, v, o;
  Shape shape;
  Tiles tiles;
  const float *initial_state;
  float *final_state;
  int64_t state_key, state_value;  // element strides inside one state
  void *o_rows;
  Sm90Strides o_strides;
  float scale;
};

// chains: 1 is a CTA pair per head, each with half of the values; 2 is one CTA per head.
cudaError_t launch_scan(const ScanArguments &, Sm90Gate, Sm90Erase, int chains, cudaStream_t);

}  // namespace fw::sm90
