// SPDX-License-Identifier: Apache-2.0
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

#include "ops/recurrence/sm90_plan.cuh"

namespace fw::sm90 {

struct PrepArguments {
  CUtensorMap k;
  Shape shape;
  Tiles tiles;
  const void *g, *beta;
  Sm90Strides g_strides, beta_strides;
  Sm90Real g_type, beta_type;
  void *o;  // rows of no sequence are zeroed here
  Sm90Strides o_strides;
  int o_rows_left_over;
  float scale;
};

cudaError_t launch_prep(const PrepArguments &, Sm90Gate, Sm90Erase, cudaStream_t);

}  // namespace fw::sm90
