// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution on CUDA.
//
// Plan: up to four taps go through cuda_short.cu. More: a thread takes four neighbouring channels of kTileRows rows, and every output
// loads its W inputs and taps. The bias comes first, then the taps, oldest first: every output's sum has that one order, in forward,
// step and backward. Backward in three passes:
//   1  dz = dy act'(z), z as in the forward, to the workspace in fp32
//   2  dx, d_initial_state: the same convolution of dz with reversed taps; d_final_state added where the state holds the row
//   3  dweight, dbias: a thread block takes a block of rows, 128 channels and four taps, warp w the rows w, w + 8, ..; sums stay in
//      registers, the warps' are added in order through shared memory, the blocks' by sum_blocks
// A step is a thread a (sequence, channel), which computes the rows and then moves the state on in place.
// Workspace: backward, (W + 1) * D floats a block of rows, at most 2048 blocks; with more than four taps B * T * D more.
#include "core/ledger.hpp"
#include "cuda/candidate.hpp"
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "cuda/sum_blocks.hpp"
#include "ops/short_conv/cuda_rows.cuh"
#include "ops/short_conv/cuda_short.hpp"

namespace fw::short_conv {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kTileRows = 16, kRowsABlock = 64;
constexpr int kWarps = 8, kColumns = 128;  // of the third pass

// z of four channels before the activation.
__device__ __noinline__ float4 output_before_activation(const Problem &p, const Rows &s, int64_t position, int64_t d) {
  float z[4], x[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) z[j] = d + j < p.D ? bias_at(p, d + j) : 0.0f;
#pragma unroll 1
  for (int64_t tap = 0; tap < p.W; ++tap) {
    load_input(p, s, position - (p.W - 1) + tap, d, x);
#pragma unroll
    for (int j = 0; j < 4; ++j) z[j] = d + j < p.D ? fmaf(weight_at(p, d + j, tap), x[j], z[j]) : 0.0f;
  }
  return make_float4(z[0], z[1], z[2], z[3]);
}

// Forward: y. Backward (dz given): dz of every row, 0 for rows of no sequence.
__global__ void __launch_bounds__(kThreads) convolve_rows(const __grid_constant__ Problem p, float *dz) {
  const int64_t quads = ceil_div(p.D, 4), tiles = ceil_div(p.T, kTileRows), items = p.B * tiles * quads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t d = item % quads * 4, batch = item / quads / tiles, first = item / quads % tiles * kTileRows;
    const int64_t last = p.T - first < kTileRows ? p.T : first + kTileRows;
    Rows s = {-1, batch, 0, 0, -1};
#pragma unroll 1
    for (int64_t row = first; row < last; ++row) {
      if (row == first || s.n < 0 || row >= s.end) s = rows_around(p, batch, row);
      float z[4] = {}, dy[4] = {};
      if (s.n >= 0) {
        const float4 quad = output_before_activation(p, s, row - s.begin, d);
        z[0] = quad.x, z[1] = quad.y, z[2] = quad.z, z[3] = quad.w;
      }
      if (!dz) {
#pragma unroll
        for (int j = 0; j < 4; ++j) z[j] = p.has_silu && s.n >= 0 ? cuda::silu(z[j]) : z[j];
        cuda::store_quad(channels(p.y, batch, row), d, p.D, z);
        continue;
      }
      if (s.n >= 0) cuda::load_quad(channels(p.dy, batch, row), d, p.D, dy);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float slope = p.has_silu ? cuda::silu_slope(z[j]) : 1.0f;
        if (d + j < p.D) dz[(batch * p.T + row) * p.D + d + j] = s.n >= 0 ? dy[j] * slope : 0.0f;
      }
    }
  }
}

// The gradient of the input at a position, from -(W - 1) on, of one channel.
__device__ __noinline__ float input_gradient(const Problem &p, const float *dz, const Rows &s, int64_t position, int64_t d) {
  const int64_t past = p.W - 1, length = s.end - s.begin;
  const int64_t low = position > 0 ? position : 0, high = position + past < length ? position + past + 1 : length;
  float sum = 0;
  for (int64_t i = low; dz && i < high; ++i) {
    sum = fmaf(weight_at(p, d, position + past - i), dz[(s.batch * p.T + s.begin + i) * p.D + d], sum);
  }
  if (position >= length - past) sum += state_at(p.d_final_state, s.n, d, position - (length - past));
  return sum;
}

__global__ void __launch_bounds__(kThreads) gradient_rows(const __grid_constant__ Problem p, const float *dz) {
  const int64_t items = p.B * p.T * p.D, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t d = item % p.D, batch = item / p.D / p.T, row = item / p.D % p.T;
    const Rows s = rows_around(p, batch, row);
    const float dx = s.n < 0 ? 0.0f : input_gradient(p, dz, s, row - s.begin, d);
    const int64_t to = batch * p.dx.strides[0] + row * p.dx.strides[1] + d * p.dx.strides[2];
    cuda::store_element(p.dx.data, p.dx.dtype, to, dx);
  }
}

// The state's rows of every sequence into t: forward the last inputs, backward the gradient of the first.
__global__ void __launch_bounds__(kThreads) write_states(const __grid_constant__ Problem p, const __grid_constant__ fw_tensor t,
                                                         const float *dz, bool empty_ones_only) {
  const int64_t past = p.W - 1, items = p.N * p.D * past, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t i = item % past, d = item / past % p.D, n = item / past / p.D;
    const Rows s = rows_of(p, n);
    if (empty_ones_only && s.begin < s.end) continue;
    float x;
    if (p.direction == FW_BACKWARD) {
      x = input_gradient(p, dz, s, i - past, d);
    } else {
      const int64_t position = s.end - s.begin - past + i;
      const int64_t at = s.batch * p.x.strides[0] + (s.begin + position) * p.x.strides[1] + d * p.x.strides[2];
      x = position < 0 ? state_at(p.initial_state, n, d, past + position) : cuda::load_element(p.x.data, p.x.dtype, at);
    }
    cuda::store_element(t.data, t.dtype, n * t.strides[0] + d * t.strides[1] + i * t.strides[2], x);
  }
}

__global__ void __launch_bounds__(kThreads) step_sequences(const __grid_constant__ Problem p) {
  const int64_t past = p.W - 1, items = p.N * p.D, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t d = item % p.D, n = item / p.D;
    const Rows s = rows_of(p, n);
    const int64_t x_base = s.batch * p.x.strides[0] + s.begin * p.x.strides[1] + d * p.x.strides[2], length = s.end - s.begin;
    const auto input = [&](int64_t position) {
      if (position < 0) return state_at(p.state, s.slot, d, past + position);
      return cuda::load_element(p.x.data, p.x.dtype, x_base + position * p.x.strides[1]);
    };
#pragma unroll 1
    for (int64_t row = 0; row < length; ++row) {
      float z = 0;
      if (s.slot >= 0) {
        z = bias_at(p, d);
        for (int64_t tap = 0; tap < p.W; ++tap) z = fmaf(weight_at(p, d, tap), input(row - past + tap), z);
        if (p.has_silu) z = cuda::silu(z);
      }
      const int64_t to = s.batch * p.y.strides[0] + (s.begin + row) * p.y.strides[1] + d * p.y.strides[2];
      cuda::store_element(p.y.data, p.y.dtype, to, z);
    }
    // upward: what is read lies above what was written
    for (int64_t i = 0; s.slot >= 0 && length > 0 && i < past; ++i) {
      const float x = input(length - past + i);
      cuda::store_element(p.state.data, p.state.dtype, s.slot * p.state.strides[0] + d * p.state.strides[1] + i * p.state.strides[2], x);
    }
  }
}

// Rows of y that belong to no sequence, after a step.
__global__ void __launch_bounds__(kThreads) clear_rows(const __grid_constant__ Problem p) {
  const int64_t items = p.T * p.D, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t d = item % p.D, row = item / p.D;
    if (cuda::sequence_of_row(p.cu_seqlens, p.N, p.T, 0, row) >= 0) continue;
    cuda::store_element(p.y.data, p.y.dtype, row * p.y.strides[1] + d * p.y.strides[2], 0.0f);
  }
}

__global__ void __launch_bounds__(32 * kWarps) sum_weights(const __grid_constant__ Problem p, const float *dz, const __grid_constant__ Sums to) {
  __shared__ float sums[kWarps][kColumns];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t chunks = ceil_div(p.D, kColumns), groups = ceil_div(p.W + 1, 4), items = to.blocks * chunks * groups;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const int64_t d = item % chunks * kColumns + lane * 4, tap0 = item / chunks % groups * 4, block = item / chunks / groups;
    const int64_t begin = block * to.rows, end = p.B * p.T - begin < to.rows ? p.B * p.T : begin + to.rows;
    float sum[4][4] = {};
    Rows s = {-1, -1, 0, 0, -1};
#pragma unroll 1
    for (int64_t r = begin + warp; r < end && d < p.D; r += kWarps) {
      const int64_t batch = r / p.T, row = r % p.T;
      if (s.n < 0 || s.batch != batch || row >= s.end) s = rows_around(p, batch, row);
      if (s.n < 0) continue;
      float g[4], x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) g[j] = d + j < p.D ? dz[r * p.D + d + j] : 0.0f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (tap0 + i > p.W) continue;
        if (tap0 + i < p.W) load_input(p, s, row - s.begin - (p.W - 1) + tap0 + i, d, x);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[i][j] = tap0 + i < p.W ? fmaf(g[j], x[j], sum[i][j]) : sum[i][j] + g[j];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[warp][lane * 4 + j] = sum[i][j];
      __syncthreads();  // the warps' sums of this tap are there
      const int64_t column = item % chunks * kColumns + threadIdx.x;
      if (threadIdx.x < kColumns && column < p.D && tap0 + i <= p.W) {
        float all = 0;
        for (int w = 0; w < kWarps; ++w) all += sums[w][threadIdx.x];
        to.partials[(block * (p.W + 1) + tap0 + i) * p.D + column] = all;
      }
      __syncthreads();  // they are read
    }
  }
}

int64_t n_rows(const Problem &p) { return numel(p.x) == 0 ? 0 : p.B * p.T; }

struct Buffers {
  float *dz;
  Sums sums;
};
Buffers lay_out(Ledger &ledger, const Problem &p) {
  const cuda::SumBlocks blocks = cuda::sum_blocks_of(n_rows(p), kRowsABlock);
  Buffers b = {nullptr, {nullptr, blocks.n, blocks.rows}};
  if (p.direction != FW_BACKWARD) return b;
  if (p.W > kShort) b.dz = ledger.take<float>(product(n_rows(p), p.D));
  b.sums.partials = ledger.take<float>(product(blocks.n, product(p.W + 1, p.D)));
  return b;
}

void launch_convolution(const Problem &p, float *dz) {
  const int64_t items = p.B * ceil_div(p.T, kTileRows) * ceil_div(p.D, 4);
  cuda::launch({cuda::grid_of(items, kThreads), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, convolve_rows, p, dz);
}

void launch_states(const Problem &p, const fw_tensor &t, const float *dz, bool empty_ones_only) {
  if (!given(t) || numel(t) == 0) return;
  cuda::launch({cuda::grid_of(numel(t), kThreads), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, write_states, p, t, dz, empty_ones_only);
}

void run_forward(const Problem &p) {
  if (n_rows(p) > 0 && p.W <= kShort) launch_short_forward(p);
  if (n_rows(p) > 0 && p.W > kShort) launch_convolution(p, nullptr);
  launch_states(p, p.final_state, nullptr, false);
}

void run_step(const Problem &p) {
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  const bool is_packed = given(p.cu_seqlens) && n_rows(p) > 0;
  if (p.N > 0 && p.D > 0 && p.T > 0) cuda::launch({cuda::grid_of(p.N * p.D, kThreads), kThreads, 0, stream}, step_sequences, p);
  if (is_packed) cuda::launch({cuda::grid_of(p.T * p.D, kThreads), kThreads, 0, stream}, clear_rows, p);
}

// dz: nullptr for zeros.
void launch_gradients(const Problem &p, const float *dz, const Sums &sums) {
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  if (given(p.dx) && n_rows(p) > 0) cuda::launch({cuda::grid_of(numel(p.x), kThreads), kThreads, 0, stream}, gradient_rows, p, dz);
  launch_states(p, p.d_initial_state, dz, false);
  if (!sums.partials || sums.blocks == 0) return;
  const int64_t items = sums.blocks * ceil_div(p.D, kColumns) * ceil_div(p.W + 1, 4);
  cuda::launch({cuda::grid_of(items, 1), 32 * kWarps, 0, stream}, sum_weights, p, dz, sums);
}

void run_backward(const Problem &p, const Buffers &b) {
  Sums sums = b.sums;
  if (!given(p.dweight) && !given(p.dbias)) sums.partials = nullptr;
  if (!given(p.dy)) sums.blocks = 0;
  if (!given(p.dy) || n_rows(p) == 0) {
    launch_gradients(p, nullptr, sums);
  } else if (p.W <= kShort) {
    launch_short_backward(p, sums);
    launch_states(p, p.d_initial_state, nullptr, true);
  } else {
    launch_convolution(p, b.dz);
    launch_gradients(p, b.dz, sums);
  }
  const fw_tensor &w = p.dweight;
  const int64_t pitch = (p.W + 1) * p.D;
  if (given(w)) cuda::launch_sum_blocks(p.stream, sums.partials, sums.blocks, pitch, {w, numel(w), p.D, w.strides[1], w.strides[0]});
  if (given(p.dbias)) {
    const float *from = sums.blocks > 0 ? sums.partials + p.W * p.D : nullptr;
    cuda::launch_sum_blocks(p.stream, from, sums.blocks, pitch, {p.dbias, p.D, p.D, 0, p.dbias.strides[0]});
  }
}

}  // namespace

uint64_t CudaPath::workspace(const fw_context &, const Problem &p) {
  Ledger ledger(nullptr);
  lay_out(ledger, p);
  return ledger.bytes();
}

fw_status CudaPath::run(fw_context &, const Problem &p, void *memory) {
  const Operand operands[] = {{"x", &p.x},
                              {"weight", &p.weight},
                              {"bias", &p.bias},
                              {"initial_state", &p.initial_state},
                              {"cu_seqlens", &p.cu_seqlens},
                              {"y", &p.y},
                              {"final_state", &p.final_state},
                              {"state", &p.state},
                              {"state_indices", &p.state_indices},
                              {"dy", &p.dy},
                              {"d_final_state", &p.d_final_state},
                              {"dx", &p.dx},
                              {"dweight", &p.dweight},
                              {"dbias", &p.dbias},
                              {"d_initial_state", &p.d_initial_state}};
  FW_TRY(cuda::check_places(ShortConv::kName, operands, 15, memory));
  Ledger ledger(memory);
  const Buffers buffers = lay_out(ledger, p);
  if (p.direction == FW_BACKWARD) {
    run_backward(p, buffers);
  } else if (p.direction == FW_STEP) {
    run_step(p);
  } else {
    run_forward(p);
  }
  return cuda::check_launches(ShortConv::kName, "cuda");
}

}  // namespace fw::short_conv
