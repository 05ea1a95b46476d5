// SPDX-License-Identifier: Apache-2.0
// Gate activations on CUDA, in fp64 inside.
//
// Plan: forward, a thread takes four neighbouring elements at a time. Backward, a thread block takes a block of tokens, one group
// and 128 columns: warp w the tokens w, w + 8, .., a lane four columns, whose sums for d_a_log and d_dt_bias stay in registers; the
// warps' sums are added in order through 8 KB of shared memory, and sum_blocks adds the blocks'. Workspace: backward, the sums of
// at most 2048 blocks.
#include "core/ledger.hpp"
#include "cuda/activation.cuh"
#include "cuda/candidate.hpp"
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "cuda/rows.cuh"
#include "cuda/sum_blocks.hpp"
#include "ops/gate/problem.hpp"

namespace fw::gate {
namespace {

constexpr int kWarps = 8, kThreads = 32 * kWarps, kColumns = 128;
constexpr int64_t kRowsABlock = 64;

__device__ inline float parameter(const Problem &p, const fw_tensor &t, int64_t group, int64_t i) {
  return given(t) ? static_cast<const float *>(t.data)[parameter_offset(p, t, group, i)] : 0.0f;
}
__device__ inline cuda::GateSettings settings_of(const Problem &p) { return {p.kind, p.normalizer, p.lower_bound}; }
__device__ inline cuda::Row group_row(const Problem &p, const cuda::RowOffsets &row, int32_t i, const fw_tensor &t, int64_t group) {
  return cuda::row_at(t, row.at[i] + group * p.group_stride[i], p.plan.inner[i]);
}

__global__ void __launch_bounds__(kThreads) forward_elements(const __grid_constant__ Problem p) {
  const int64_t quads = ceil_div(p.length, 4), items = p.plan.n_rows * p.n_groups * quads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t i = item % quads * 4, group = item / quads % p.n_groups;
    const cuda::RowOffsets row = cuda::seek_row(p.plan, item / quads / p.n_groups);
    float x[4];
    cuda::load_quad(group_row(p, row, 0, p.x, group), i, p.length, x);
#pragma unroll 1
    for (int j = 0; j < 4 && i + j < p.length; ++j) {
      x[j] = cuda::activate_gate(settings_of(p), x[j], parameter(p, p.a_log, group, i + j), parameter(p, p.dt_bias, group, i + j));
    }
    cuda::store_quad(group_row(p, row, 1, p.y, group), i, p.length, x);
  }
}

struct Sums {
  float *a_log;    // [block][chunk][groups] of vectors, [block][length] otherwise; nullptr: not wanted
  float *dt_bias;  // [block][group][length]; nullptr: not wanted
  int64_t blocks, rows, chunks;
};

// The rows of one warp: sums of four columns.
__device__ __noinline__ void backward_columns(const Problem &p, int64_t group, int64_t column, int64_t begin, int64_t end,
                                              float (&d_a_log)[4], float (&d_dt_bias)[4]) {
  if (column >= p.length) return;
  float a_log[4], dt_bias[4], x[4], dy[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool exists = column + j < p.length;
    a_log[j] = exists ? parameter(p, p.a_log, group, column + j) : 0.0f;
    dt_bias[j] = exists ? parameter(p, p.dt_bias, group, column + j) : 0.0f;
  }
#pragma unroll 1
  for (int64_t r = begin; r < end; r += kWarps) {
    const cuda::RowOffsets row = cuda::seek_row(p.plan, r);
    cuda::load_quad(group_row(p, row, 0, p.x, group), column, p.length, x);
    cuda::load_quad(group_row(p, row, 1, p.dy, group), column, p.length, dy);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const cuda::GateGradient d = cuda::activate_gate_gradient(settings_of(p), x[j], a_log[j], dt_bias[j], dy[j]);
      x[j] = d.dx;
      d_a_log[j] += d.da_log;
      d_dt_bias[j] += d.dx;
    }
    if (given(p.dx)) cuda::store_quad(group_row(p, row, 2, p.dx, group), column, p.length, x);
  }
}

__global__ void __launch_bounds__(kThreads) backward_blocks(const __grid_constant__ Problem p, const __grid_constant__ Sums to) {
  __shared__ float sums[2][kWarps][kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t items = to.blocks * p.n_groups * to.chunks;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t chunk = item % to.chunks, group = item / to.chunks % p.n_groups, block = item / to.chunks / p.n_groups;
    const int64_t begin = block * to.rows, end = p.plan.n_rows - begin < to.rows ? p.plan.n_rows : begin + to.rows;
    float d_a_log[4] = {}, d_dt_bias[4] = {};
    backward_columns(p, group, chunk * kColumns + lane * 4, begin + warp, end, d_a_log, d_dt_bias);
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[0][warp][lane * 4 + j] = d_a_log[j], sums[1][warp][lane * 4 + j] = d_dt_bias[j];
    __syncthreads();  // the warps' sums are there
    const int which = threadIdx.x / kColumns, c = threadIdx.x % kColumns;
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += sums[which][w][c];
    __syncthreads();  // they are read
    const int64_t column = chunk * kColumns + c;
    if (which == 0) {
      sums[0][0][c] = sum;
      if (to.a_log && !p.has_vectors && column < p.length) to.a_log[block * p.length + column] = sum;
    } else if (to.dt_bias && column < p.length) {
      to.dt_bias[(block * p.n_groups + group) * p.length + column] = sum;
    }
    __syncthreads();  // the columns' sums are there
    if (threadIdx.x == 0 && to.a_log && p.has_vectors) {
      float all = 0;
      for (int i = 0; i < kColumns; ++i) all += sums[0][0][i];
      to.a_log[(block * to.chunks + chunk) * p.n_groups + group] = all;
    }
    __syncthreads();  // they are read
  }
}

Sums lay_out(Ledger &ledger, const Problem &p) {
  const cuda::SumBlocks blocks = cuda::sum_blocks_of(p.plan.n_rows, kRowsABlock);
  Sums sums = {nullptr, nullptr, blocks.n, blocks.rows, ceil_div(p.length, kColumns)};
  if (p.direction != FW_BACKWARD) return sums;
  const int64_t a_width = p.has_vectors ? product(p.n_groups, sums.chunks) : p.length;
  if (given(p.a_log)) sums.a_log = ledger.take<float>(product(blocks.n, a_width));
  if (given(p.dt_bias)) sums.dt_bias = ledger.take<float>(product(blocks.n, product(p.n_groups, p.length)));
  return sums;
}

void run_backward(const Problem &p, Sums sums) {
  if (!given(p.d_a_log)) sums.a_log = nullptr;
  if (!given(p.d_dt_bias)) sums.dt_bias = nullptr;
  const int64_t items = sums.blocks * p.n_groups * sums.chunks;
  if (items > 0) cuda::launch({cuda::grid_of(items, 1), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, backward_blocks, p, sums);
  if (given(p.d_a_log)) {
    const int64_t width = p.a_width(), parts = p.has_vectors ? sums.chunks : 1;
    cuda::launch_sum_blocks(p.stream, sums.a_log, sums.blocks * parts, width, {p.d_a_log, width, width, 0, p.d_a_log.strides[0]});
  }
  if (given(p.d_dt_bias)) {
    const fw_tensor &t = p.d_dt_bias;
    const int64_t width = p.n_groups * p.length;
    cuda::launch_sum_blocks(p.stream, sums.dt_bias, sums.blocks, width, {t, width, p.length, t.strides[0], t.strides[t.ndim - 1]});
  }
}

}  // namespace

uint64_t CudaPath::workspace(const fw_context &, const Problem &p) {
  Ledger ledger(nullptr);
  lay_out(ledger, p);
  return ledger.bytes();
}

fw_status CudaPath::run(fw_context &, const Problem &p, void *memory) {
  const Operand operands[] = {{"x", &p.x},   {"a_log", &p.a_log}, {"dt_bias", &p.dt_bias}, {"y", &p.y},
                              {"dy", &p.dy}, {"dx", &p.dx},       {"d_a_log", &p.d_a_log}, {"d_dt_bias", &p.d_dt_bias}};
  FW_TRY(cuda::check_places(GateActivation::kName, operands, 8, memory));
  const int64_t items = p.plan.n_rows * p.n_groups * ceil_div(p.length, 4);
  if (p.direction == FW_BACKWARD) {
    Ledger ledger(memory);
    run_backward(p, lay_out(ledger, p));
  } else if (items > 0) {
    cuda::launch({cuda::grid_of(items, kThreads), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, forward_elements, p);
  }
  return cuda::check_launches(GateActivation::kName, "cuda");
}

}  // namespace fw::gate
