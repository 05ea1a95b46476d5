// SPDX-License-Identifier: Apache-2.0
// L2, RMS and gated RMS norms on CUDA.
//
// Plan: a team a row, one warp up to kWarpLength elements and the 8 warps of a thread block above. A thread takes four neighbouring
// elements at a time, always the same ones of a row, so that a row's bits depend on its length alone. Forward: the sum of squares,
// then y. Backward: the sum of squares, then y . dy with dgate and dweight on the way, then dx; rows come from the cache the second
// and third time. A team adds dweight of its rows up in a row of its own, in shared memory where 48 KB hold the block's and in the
// workspace otherwise, and sum_blocks adds the teams' rows. Workspace: backward with a weight, teams * length floats, at most 4096
// (one warp) or 512 teams.
#include "core/ledger.hpp"
#include "cuda/activation.cuh"
#include "cuda/candidate.hpp"
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "cuda/rows.cuh"
#include "cuda/sum_blocks.hpp"
#include "ops/norm/problem.hpp"

namespace fw::norm {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int64_t kWarpLength = 1024, kRowsABlock = 32;
constexpr int64_t kSharedBytes = 48 << 10;

int64_t teams_of(const Problem &p) { return p.plan.length <= kWarpLength ? kWarps : 1; }
int64_t sum_bytes(const Problem &p) { return teams_of(p) * p.plan.length * 4; }

template <int kWarpsATeam>
struct Team {
  static constexpr int kSize = 32 * kWarpsATeam, kCount = kWarps / kWarpsATeam;
  __device__ static int lane() { return threadIdx.x % kSize; }
  __device__ static int index() { return threadIdx.x / kSize; }
  // The sum over the team, in every thread.
  __device__ static float sum(float x) {
    x = cuda::warp_sum(x);
    if constexpr (kWarpsATeam == 1) return x;
    __shared__ float parts[kWarps];
    __syncthreads();  // the parts of the sum before are read
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();  // the parts are there
    float all = 0;
    for (int w = 0; w < kWarps; ++w) all += parts[w];
    return all;
  }
};

// xhat = (x * scale) * inverse; scale is below 1 where squares pass the range of fp32.
struct Length {
  float scale, inverse;
};
template <int kWarpsATeam>
__device__ __noinline__ Length length_of(const Problem &p, const cuda::Row &row) {
  float x[4], sum = 0, scale = 1.0f, eps = static_cast<float>(p.eps);
  for (int64_t i = 4 * Team<kWarpsATeam>::lane(); i < p.plan.length; i += 4 * Team<kWarpsATeam>::kSize) {
    cuda::load_quad(row, i, p.plan.length, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum = fmaf(x[j], x[j], sum);
  }
  sum = Team<kWarpsATeam>::sum(sum);
  if (sum == INFINITY) {
    scale = 0x1p-80f;
    sum = 0;
    eps = 0;  // below a round-off of a sum this large
    for (int64_t i = 4 * Team<kWarpsATeam>::lane(); i < p.plan.length; i += 4 * Team<kWarpsATeam>::kSize) {
      cuda::load_quad(row, i, p.plan.length, x);
      for (int j = 0; j < 4; ++j) sum = fmaf(x[j] * scale, x[j] * scale, sum);
    }
    sum = Team<kWarpsATeam>::sum(sum);
  }
  return {scale, 1.0f / sqrtf(sum / static_cast<float>(p.count) + eps)};
}

template <int kWarpsATeam>
__global__ void __launch_bounds__(kThreads) forward_rows(const __grid_constant__ Problem p) {
  using T = Team<kWarpsATeam>;
  const int64_t n = p.plan.length, step = static_cast<int64_t>(gridDim.x) * T::kCount;
  const cuda::Row weight = cuda::row_at(p.weight, 0, p.weight.strides[0]);
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * T::kCount + T::index(); r < p.plan.n_rows; r += step) {
    const cuda::RowOffsets at = cuda::seek_row(p.plan, r);
    const cuda::Row x_row = cuda::row_at(p.x, at.at[kX], p.plan.inner[kX]), y_row = cuda::row_at(p.y, at.at[kY], p.plan.inner[kY]);
    const cuda::Row gate_row = cuda::row_at(p.gate, at.at[kGate], p.plan.inner[kGate]);
    const Length length = length_of<kWarpsATeam>(p, x_row);
    for (int64_t i = 4 * T::lane(); i < n; i += 4 * T::kSize) {
      float y[4], factor[4];
      cuda::load_quad(x_row, i, n, y);
#pragma unroll
      for (int j = 0; j < 4; ++j) y[j] = y[j] * length.scale * length.inverse;
      if (given(p.weight)) {
        cuda::load_quad(weight, i, n, factor);
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] *= factor[j];
      }
      if (given(p.gate)) {
        cuda::load_quad(gate_row, i, n, factor);
#pragma unroll
        for (int j = 0; j < 4; ++j) y[j] *= cuda::activate(p.gate_activation, factor[j]);
      }
      cuda::store_quad(y_row, i, n, y);
    }
  }
}

struct BackwardRow {
  cuda::Row x, gate, weight, dy, dx, dgate;
};

// Elements i to i + 3: xhat, and the gradient of xhat * weight.
__device__ inline void scaled_gradient(const Problem &p, const BackwardRow &row, const Length &length, int64_t i, float (&xhat)[4],
                                       float (&gate)[4], float (&d_scaled)[4]) {
  const int64_t n = p.plan.length;
  cuda::load_quad(row.x, i, n, xhat);
  cuda::load_quad(row.dy, i, n, d_scaled);
#pragma unroll
  for (int j = 0; j < 4; ++j) xhat[j] = xhat[j] * length.scale * length.inverse;
  if (!given(p.gate)) return;
  cuda::load_quad(row.gate, i, n, gate);
#pragma unroll
  for (int j = 0; j < 4; ++j) d_scaled[j] *= cuda::activate(p.gate_activation, gate[j]);
}

template <int kWarpsATeam>
__device__ __noinline__ void backward_row(const Problem &p, const BackwardRow &row, float *sums) {
  using T = Team<kWarpsATeam>;
  const int64_t n = p.plan.length;
  const Length length = length_of<kWarpsATeam>(p, row.x);
  float xhat[4], gate[4], d_scaled[4], weight[4] = {1.0f, 1.0f, 1.0f, 1.0f}, along = 0;
  for (int64_t i = 4 * T::lane(); i < n; i += 4 * T::kSize) {
    scaled_gradient(p, row, length, i, xhat, gate, d_scaled);
    if (given(p.weight)) cuda::load_quad(row.weight, i, n, weight);
    if (given(p.dgate)) {
      float out[4];
      cuda::load_quad(row.dy, i, n, out);
#pragma unroll
      for (int j = 0; j < 4; ++j) out[j] *= xhat[j] * weight[j] * cuda::activation_slope(p.gate_activation, gate[j]);
      cuda::store_quad(row.dgate, i, n, out);
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (sums && i + j < n) sums[i + j] = fmaf(d_scaled[j], xhat[j], sums[i + j]);
      along = fmaf(xhat[j], d_scaled[j] * weight[j], along);
    }
  }
  if (!given(p.dx)) return;
  along = T::sum(along) / static_cast<float>(p.count);
  for (int64_t i = 4 * T::lane(); i < n; i += 4 * T::kSize) {
    scaled_gradient(p, row, length, i, xhat, gate, d_scaled);
    if (given(p.weight)) cuda::load_quad(row.weight, i, n, weight);
#pragma unroll
    for (int j = 0; j < 4; ++j) xhat[j] = length.inverse * length.scale * fmaf(-along, xhat[j], d_scaled[j] * weight[j]);
    cuda::store_quad(row.dx, i, n, xhat);
  }
}

// A thread block takes rows_a_block rows. partials: [block][team][length], or nullptr without dweight.
template <int kWarpsATeam>
__global__ void __launch_bounds__(kThreads) backward_rows(const __grid_constant__ Problem p, int64_t rows_a_block, float *partials,
                                                          bool is_in_shared) {
  using T = Team<kWarpsATeam>;
  const int64_t n = p.plan.length, begin = blockIdx.x * rows_a_block;
  const int64_t end = p.plan.n_rows - begin < rows_a_block ? p.plan.n_rows : begin + rows_a_block;
  float *partial = partials ? partials + (static_cast<int64_t>(blockIdx.x) * T::kCount + T::index()) * n : nullptr;
  float *sums = partial && is_in_shared ? cuda::dynamic_shared<float>() + T::index() * n : partial;
  for (int64_t i = 4 * T::lane(); sums && i < n; i += 4 * T::kSize) {
    for (int64_t j = i; j < i + 4 && j < n; ++j) sums[j] = 0.0f;
  }
  for (int64_t r = begin + T::index(); r < end; r += T::kCount) {
    const cuda::RowOffsets at = cuda::seek_row(p.plan, r);
    const auto row_of = [&](const fw_tensor &t, int i) { return cuda::row_at(t, at.at[i], p.plan.inner[i]); };
    const BackwardRow row = {row_of(p.x, kX),   row_of(p.gate, kGate), cuda::row_at(p.weight, 0, p.weight.strides[0]),
                             row_of(p.dy, kDy), row_of(p.dx, kDx),     row_of(p.dgate, kDgate)};
    backward_row<kWarpsATeam>(p, row, sums);
  }
  if (sums == partial) return;
  for (int64_t i = 4 * T::lane(); i < n; i += 4 * T::kSize) {
    for (int64_t j = i; j < i + 4 && j < n; ++j) partial[j] = sums[j];
  }
}

template <int kWarpsATeam>
void launch_forward(const Problem &p) {
  const uint32_t grid = cuda::grid_of(p.plan.n_rows, kWarps / kWarpsATeam);
  cuda::launch({grid, kThreads, 0, static_cast<cudaStream_t>(p.stream)}, forward_rows<kWarpsATeam>, p);
}
template <int kWarpsATeam>
void launch_backward(const Problem &p, const cuda::SumBlocks &blocks, float *partials) {
  const bool is_in_shared = partials && sum_bytes(p) <= kSharedBytes;
  const int shared = is_in_shared ? static_cast<int>(sum_bytes(p)) : 0;
  cuda::launch({static_cast<uint32_t>(blocks.n), kThreads, shared, static_cast<cudaStream_t>(p.stream)}, backward_rows<kWarpsATeam>, p, blocks.rows, partials, is_in_shared);
}

float *lay_out(Ledger &ledger, const Problem &p, const cuda::SumBlocks &blocks) {
  if (p.direction != FW_BACKWARD || !given(p.weight)) return nullptr;
  return ledger.take<float>(product(blocks.n * teams_of(p), p.plan.length));
}

void run_backward(const Problem &p, void *memory) {
  const cuda::SumBlocks blocks = cuda::sum_blocks_of(p.plan.n_rows, kRowsABlock);
  Ledger ledger(memory);
  float *partials = lay_out(ledger, p, blocks);
  if (!given(p.dweight)) partials = nullptr;
  if (blocks.n > 0 && (partials || given(p.dx) || given(p.dgate))) {
    if (p.plan.length <= kWarpLength) {
      launch_backward<1>(p, blocks, partials);
    } else {
      launch_backward<kWarps>(p, blocks, partials);
    }
  }
  if (!given(p.dweight)) return;
  const int64_t n = p.dweight.shape[0];
  cuda::launch_sum_blocks(p.stream, partials, blocks.n * teams_of(p), n, {p.dweight, n, n, 0, p.dweight.strides[0]});
}

}  // namespace

uint64_t CudaPath::workspace(const fw_context &, const Problem &p) {
  Ledger ledger(nullptr);
  lay_out(ledger, p, cuda::sum_blocks_of(p.plan.n_rows, kRowsABlock));
  return ledger.bytes();
}

fw_status CudaPath::run(fw_context &, const Problem &p, void *memory) {
  const Operand operands[] = {{"x", &p.x},   {"weight", &p.weight}, {"gate", &p.gate},       {"y", &p.y},
                              {"dy", &p.dy}, {"dx", &p.dx},         {"dweight", &p.dweight}, {"dgate", &p.dgate}};
  FW_TRY(cuda::check_places(Norm::kName, operands, 8, memory));
  if (p.direction == FW_BACKWARD) {
    run_backward(p, memory);
  } else if (p.plan.n_rows > 0 && p.plan.length <= kWarpLength) {
    launch_forward<1>(p);
  } else if (p.plan.n_rows > 0) {
    launch_forward<kWarps>(p);
  }
  return cuda::check_launches(Norm::kName, "cuda");
}

}  // namespace fw::norm
