// SPDX-License-Identifier: Apache-2.0
// Feature maps on CUDA, forward and backward. Plan: a thread takes four neighbouring elements of a row at a time. No scratch.
#include "cuda/activation.cuh"
#include "cuda/candidate.hpp"
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "cuda/rows.cuh"
#include "ops/feature_map/problem.hpp"

namespace fw::feature_map {
namespace {

constexpr int kThreads = 256;

__device__ inline float map(fw_feature_map_kind kind, float x) {
  switch (kind) {
    case FW_FEATURE_ELU_PLUS_ONE: return x > 0 ? x + 1.0f : expf(x);
    case FW_FEATURE_SILU: return cuda::silu(x);
    case FW_FEATURE_RELU: return x <= 0 ? 0.0f : x;  // NaN stays
    default: return x;
  }
}
__device__ inline float map_gradient(fw_feature_map_kind kind, float x, float dy) {
  switch (kind) {
    case FW_FEATURE_ELU_PLUS_ONE: return x > 0 ? dy : dy * expf(x);
    case FW_FEATURE_SILU: return dy * cuda::silu_slope(x);
    case FW_FEATURE_RELU: return x <= 0 ? 0.0f : dy;
    default: return dy;
  }
}

__global__ void __launch_bounds__(kThreads) map_rows(const __grid_constant__ Problem p) {
  const RowPlan &plan = p.plan;
  const int64_t quads = ceil_div(plan.length, 4), step = static_cast<int64_t>(gridDim.x) * kThreads;
  const bool is_forward = p.direction == FW_FORWARD;
  const fw_tensor &to = is_forward ? p.y : p.dx;
  const int i_out = is_forward ? 1 : 2;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < plan.n_rows * quads; item += step) {
    const int64_t row = item / quads, i = (item - row * quads) * 4;
    const cuda::RowOffsets offsets = cuda::seek_row(plan, row);
    float x[4], dy[4], out[4];
    cuda::load_quad(cuda::row_at(p.x, offsets.at[0], plan.inner[0]), i, plan.length, x);
    if (!is_forward) cuda::load_quad(cuda::row_at(p.dy, offsets.at[1], plan.inner[1]), i, plan.length, dy);
#pragma unroll
    for (int j = 0; j < 4; ++j) out[j] = is_forward ? map(p.kind, x[j]) : map_gradient(p.kind, x[j], dy[j]);
    cuda::store_quad(cuda::row_at(to, offsets.at[i_out], plan.inner[i_out]), i, plan.length, out);
  }
}

}  // namespace

uint64_t CudaPath::workspace(const fw_context &, const Problem &) { return 0; }

fw_status CudaPath::run(fw_context &, const Problem &p, void *) {
  const Operand operands[] = {{"x", &p.x}, {"y", &p.y}, {"dy", &p.dy}, {"dx", &p.dx}};
  FW_TRY(cuda::check_places(FeatureMap::kName, operands, 4, nullptr));
  const int64_t quads = p.plan.n_rows * ceil_div(p.plan.length, 4);
  if (quads > 0 && (p.direction == FW_FORWARD || given(p.dx))) {
    cuda::launch({cuda::grid_of(quads, kThreads), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, map_rows, p);
  }
  return cuda::check_launches(FeatureMap::kName, "cuda");
}

}  // namespace fw::feature_map
