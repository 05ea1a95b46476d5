// SPDX-License-Identifier: Apache-2.0
// L2, RMS and gated RMS norms on CUDA.
//
// Plan: a team a row, one warp up to kWarpLength elements and the 8 warps of a thread block above. A thread takes four neighbouring
// elements at a time, always the same ones of a row, so that a row's bits depend on its length alone. Rows of up to 4096 elements
// stay in registers, several short ones at a time so that enough loads are under way; longer ones are read again from the cache.
// Forward: the sum of squares, then y. Backward: the sum of squares, then y . dy with dgate and dweight on the way, then dx. A team
// adds dweight of its rows up in a row of its own, in shared memory where 48 KB hold the block's and in the workspace otherwise, and
// sum_blocks adds the teams' rows. Workspace: backward with a weight, teams * length floats, at most 16384 (one warp) or 2048 teams.
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
constexpr int64_t kWarpLength = 512, kHeldLength = 4096, kRowsABlock = 32;
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
__device__ __noinline__ Length long_length_of(const Problem &p, const cuda::Row &row) {
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
__global__ void __launch_bounds__(kThreads) forward_long_rows(const __grid_constant__ Problem p) {
  using T = Team<kWarpsATeam>;
  const int64_t n = p.plan.length, step = static_cast<int64_t>(gridDim.x) * T::kCount;
  const cuda::Row weight = cuda::row_at(p.weight, 0, p.weight.strides[0]);
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * T::kCount + T::index(); r < p.plan.n_rows; r += step) {
    const cuda::RowOffsets at = cuda::seek_row(p.plan, r);
    const cuda::Row x_row = cuda::row_at(p.x, at.at[kX], p.plan.inner[kX]), y_row = cuda::row_at(p.y, at.at[kY], p.plan.inner[kY]);
    const cuda::Row gate_row = cuda::row_at(p.gate, at.at[kGate], p.plan.inner[kGate]);
    const Length length = long_length_of<kWarpsATeam>(p, x_row);
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

// ---- rows in registers: kHeld quads a thread --------------------------------------------------------------------------

template <int kWarpsATeam, int kHeld>
struct HeldRow {
  using T = Team<kWarpsATeam>;
  float x[kHeld][4];
  __device__ static int64_t place(int h) { return 4 * (T::lane() + h * T::kSize); }
  __device__ void load(const cuda::Row &row, int64_t n) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) cuda::load_quad(row, place(h), n, x[h]);
  }
  __device__ void store(const cuda::Row &row, int64_t n) const {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) cuda::store_quad(row, place(h), n, x[h]);
  }
  // f(x, h, j) for every element
  template <class F>
  __device__ void each(F f) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
#pragma unroll
      for (int j = 0; j < 4; ++j) f(x[h][j], h, j);
    }
  }
  // The row becomes f of its quads.
  template <class F>
  __device__ void replace(F f) {
#pragma unroll
    for (int h = 0; h < kHeld; ++h) {
      const float4 y = f(make_float4(x[h][0], x[h][1], x[h][2], x[h][3]));
      x[h][0] = y.x, x[h][1] = y.y, x[h][2] = y.z, x[h][3] = y.w;
    }
  }
  __device__ void activate(const Problem &p) {
    replace([&](float4 quad) { return cuda::activate_quad(p.gate_activation, quad); });
  }
  // The row becomes xhat; what it was multiplied by.
  __device__ Length normalize(const Problem &p) {
    float sum = 0, scale = 1.0f, eps = static_cast<float>(p.eps);
    each([&](float v, int, int) { sum = fmaf(v, v, sum); });
    sum = T::sum(sum);
    if (sum == INFINITY) {
      scale = 0x1p-80f;
      sum = 0;
      eps = 0;  // below a round-off of a sum this large
      each([&](float v, int, int) { sum = fmaf(v * scale, v * scale, sum); });
      sum = T::sum(sum);
    }
    const float inverse = 1.0f / sqrtf(sum / static_cast<float>(p.count) + eps);
    each([&](float &v, int, int) { v = v * scale * inverse; });
    return {scale, inverse};
  }
};

template <int kWarpsATeam, int kHeld, int kTogether>
__global__ void __launch_bounds__(kThreads) forward_held_rows(const __grid_constant__ Problem p) {
  using T = Team<kWarpsATeam>;
  const int64_t n = p.plan.length, step = static_cast<int64_t>(gridDim.x) * T::kCount;
  HeldRow<kWarpsATeam, kHeld> weight;
  if (given(p.weight)) weight.load(cuda::row_at(p.weight, 0, p.weight.strides[0]), n);
  for (int64_t r = static_cast<int64_t>(blockIdx.x) * T::kCount + T::index(); r < p.plan.n_rows; r += step * kTogether) {
    HeldRow<kWarpsATeam, kHeld> row[kTogether], gate[kTogether];
    cuda::Row to[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (r + u * step >= p.plan.n_rows) break;
      const cuda::RowOffsets at = cuda::seek_row(p.plan, r + u * step);
      row[u].load(cuda::row_at(p.x, at.at[kX], p.plan.inner[kX]), n);
      if (given(p.gate)) gate[u].load(cuda::row_at(p.gate, at.at[kGate], p.plan.inner[kGate]), n);
      to[u] = cuda::row_at(p.y, at.at[kY], p.plan.inner[kY]);
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (r + u * step >= p.plan.n_rows) break;
      row[u].normalize(p);
      if (given(p.weight)) row[u].each([&](float &v, int h, int j) { v *= weight.x[h][j]; });
      if (given(p.gate)) {
        gate[u].activate(p);
        row[u].each([&](float &v, int h, int j) { v *= gate[u].x[h][j]; });
      }
      row[u].store(to[u], n);
    }
  }
}

template <int kWarpsATeam, int kHeld>
__device__ inline void backward_held_row(const Problem &p, const BackwardRow &from, float *sums) {
  using T = Team<kWarpsATeam>;
  const int64_t n = p.plan.length;
  HeldRow<kWarpsATeam, kHeld> x, dy, gate, weight;
  x.load(from.x, n);
  dy.load(from.dy, n);
  if (given(p.gate)) gate.load(from.gate, n);
  if (given(p.weight)) weight.load(from.weight, n);
  const Length length = x.normalize(p);
  if (given(p.dgate)) {
    HeldRow<kWarpsATeam, kHeld> dgate = gate;
    dgate.replace([&](float4 quad) { return cuda::slope_quad(p.gate_activation, quad); });
    dgate.each([&](float &v, int h, int j) { v *= dy.x[h][j] * (given(p.weight) ? x.x[h][j] * weight.x[h][j] : x.x[h][j]); });
    dgate.store(from.dgate, n);
  }
  if (given(p.gate)) {
    gate.activate(p);
    dy.each([&](float &v, int h, int j) { v *= gate.x[h][j]; });
  }
  if (sums) {
    dy.each([&](float v, int h, int j) {
      const int64_t i = x.place(h) + j;
      if (i < n) sums[i] = fmaf(v, x.x[h][j], sums[i]);
    });
  }
  if (!given(p.dx)) return;
  if (given(p.weight)) dy.each([&](float &v, int h, int j) { v *= weight.x[h][j]; });
  float along = 0;
  dy.each([&](float v, int h, int j) { along = fmaf(x.x[h][j], v, along); });
  along = T::sum(along) / static_cast<float>(p.count);
  x.each([&](float &v, int h, int j) { v = length.inverse * length.scale * fmaf(-along, v, dy.x[h][j]); });
  x.store(from.dx, n);
}

template <int kWarpsATeam>
__device__ __noinline__ void backward_long_row(const Problem &p, const BackwardRow &row, float *sums) {
  using T = Team<kWarpsATeam>;
  const int64_t n = p.plan.length;
  const Length length = long_length_of<kWarpsATeam>(p, row.x);
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
template <int kWarpsATeam, int kHeld>
__global__ void __launch_bounds__(kThreads, 2) backward_rows(const __grid_constant__ Problem p, int64_t rows_a_block, float *partials,
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
    if constexpr (kHeld > 0) {
      backward_held_row<kWarpsATeam, kHeld>(p, row, sums);
    } else {
      backward_long_row<kWarpsATeam>(p, row, sums);
    }
  }
  if (sums == partial) return;
  for (int64_t i = 4 * T::lane(); i < n; i += 4 * T::kSize) {
    for (int64_t j = i; j < i + 4 && j < n; ++j) partial[j] = sums[j];
  }
}

void launch_forward(const Problem &p) {
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  const int64_t n = p.plan.length, rows = p.plan.n_rows;
  if (n <= 128) {
    cuda::launch({cuda::grid_of(rows, 4 * kWarps), kThreads, 0, stream}, forward_held_rows<1, 1, 4>, p);
  } else if (n <= kWarpLength) {
    cuda::launch({cuda::grid_of(rows, kWarps), kThreads, 0, stream}, forward_held_rows<1, 4, 1>, p);
  } else if (n <= kHeldLength) {
    cuda::launch({cuda::grid_of(rows, 1), kThreads, 0, stream}, forward_held_rows<kWarps, 4, 1>, p);
  } else {
    cuda::launch({cuda::grid_of(rows, 1), kThreads, 0, stream}, forward_long_rows<kWarps>, p);
  }
}
template <int kWarpsATeam, int kHeld>
void launch_backward(const Problem &p, const cuda::SumBlocks &blocks, float *partials) {
  const bool is_in_shared = partials && sum_bytes(p) <= kSharedBytes;
  const int shared = is_in_shared ? static_cast<int>(sum_bytes(p)) : 0;
  cuda::launch({static_cast<uint32_t>(blocks.n), kThreads, shared, static_cast<cudaStream_t>(p.stream)}, backward_rows<kWarpsATeam, kHeld>, p, blocks.rows, partials, is_in_shared);
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
    if (p.plan.length <= 128) {
      launch_backward<1, 1>(p, blocks, partials);
    } else if (p.plan.length <= kWarpLength) {
      launch_backward<1, 4>(p, blocks, partials);
    } else if (p.plan.length <= kHeldLength) {
      launch_backward<kWarps, 4>(p, blocks, partials);
    } else {
      launch_backward<kWarps, 0>(p, blocks, partials);
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
  } else if (p.plan.n_rows > 0) {
    launch_forward(p);
  }
  return cuda::check_launches(Norm::kName, "cuda");
}

}  // namespace fw::norm
