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

constexpr int kThreads = 256, kTogether = 4;  // quads of a thread whose loads are under way together

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

// Four elements; not inlined: compiled once.
__device__ __noinline__ float4 map_quad(const Problem &p, float4 x, float4 dy) {
  const fw_feature_map_kind kind = p.kind;
  if (p.direction == FW_FORWARD) return make_float4(map(kind, x.x), map(kind, x.y), map(kind, x.z), map(kind, x.w));
  return make_float4(map_gradient(kind, x.x, dy.x), map_gradient(kind, x.y, dy.y), map_gradient(kind, x.z, dy.z),
                     map_gradient(kind, x.w, dy.w));
}

__global__ void __launch_bounds__(kThreads) map_rows(const __grid_constant__ Problem p) {
  const RowPlan &plan = p.plan;
  const int64_t quads = ceil_div(plan.length, 4), items = plan.n_rows * quads, step = static_cast<int64_t>(gridDim.x) * kThreads;
  const bool is_forward = p.direction == FW_FORWARD;
  const fw_tensor &to = is_forward ? p.y : p.dx;
  const int i_out = is_forward ? 1 : 2;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; first < items; first += step * kTogether) {
    float x[kTogether][4], dy[kTogether][4] = {};
    cuda::Row out[kTogether];
    int64_t at[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      const int64_t item = first + u * step;
      if (item >= items) break;
      const int64_t row = plan.n_rows == 1 ? 0 : item / quads;
      at[u] = (item - row * quads) * 4;
      const cuda::RowOffsets offsets = cuda::seek_row(plan, row);
      out[u] = cuda::row_at(to, offsets.at[i_out], plan.inner[i_out]);
      cuda::load_quad(cuda::row_at(p.x, offsets.at[0], plan.inner[0]), at[u], plan.length, x[u]);
      if (!is_forward) cuda::load_quad(cuda::row_at(p.dy, offsets.at[1], plan.inner[1]), at[u], plan.length, dy[u]);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (first + u * step >= items) break;
      const float4 y = map_quad(p, make_float4(x[u][0], x[u][1], x[u][2], x[u][3]), make_float4(dy[u][0], dy[u][1], dy[u][2], dy[u][3]));
      const float all[4] = {y.x, y.y, y.z, y.w};
      cuda::store_quad(out[u], at[u], plan.length, all);
    }
  }
}

}  // namespace

uint64_t CudaPath::workspace(const fw_context &, const Problem &) { return 0; }

fw_status CudaPath::run(fw_context &, const Problem &p, void *) {
  const Operand operands[] = {{"x", &p.x}, {"y", &p.y}, {"dy", &p.dy}, {"dx", &p.dx}};
  FW_TRY(cuda::check_places(FeatureMap::kName, operands, 4, nullptr));
  const int64_t quads = p.plan.n_rows * ceil_div(p.plan.length, 4);
  if (quads > 0 && (p.direction == FW_FORWARD || given(p.dx))) {
    cuda::launch({cuda::grid_of(quads, kThreads * kTogether), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, map_rows, p);
  }
  return cuda::check_launches(FeatureMap::kName, "cuda");
}

}  // namespace fw::feature_map
