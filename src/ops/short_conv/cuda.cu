// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution on CUDA.
//
// Plan: a thread takes four neighbouring channels of kTileRows rows; with W <= kShort the taps and the last W - 1 inputs stay in
// registers, otherwise every output loads its W of both. The bias comes first, then the taps, oldest first: every output's sum has
// that one order, in forward, step and backward. Backward in three passes:
//   1  dz = dy act'(z), z as in the forward, to the workspace in fp32
//   2  dx, d_initial_state: the same convolution of dz with reversed taps; d_final_state added where the state holds the row
//   3  dweight, dbias: a thread block takes a block of rows, 128 channels and four taps, warp w the rows w, w + 8, ..; sums stay in
//      registers, the warps' are added in order through shared memory, the blocks' by sum_blocks
// A step is a thread a (sequence, channel), which computes the rows and then moves the state on in place.
// Workspace: backward, B * T * D floats and (W + 1) * D a block of rows, at most 512 blocks.
#include "core/ledger.hpp"
#include "cuda/activation.cuh"
#include "cuda/candidate.hpp"
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "cuda/rows.cuh"
#include "cuda/sum_blocks.hpp"
#include "ops/short_conv/problem.hpp"

namespace fw::short_conv {
namespace {

constexpr int kThreads = 128, kShort = 4;
constexpr int64_t kTileRows = 16, kRowsABlock = 64;
constexpr int kWarps = 8, kColumns = 128;  // of the third pass

// A sequence as the device sees it; n < 0: none.
struct Rows {
  int64_t n, batch, begin, end, slot;
};
__device__ inline Rows rows_of(const Problem &p, int64_t n) {
  const cuda::DeviceSegment s = cuda::device_segment(p.cu_seqlens, p.T, n);
  int64_t slot = n;
  if (p.direction == FW_STEP) {
    if (given(p.state_indices)) slot = load_int(p.state_indices, n);
    if (slot >= p.state.shape[0]) slot = -1;
  }
  return {n, s.batch, s.begin, s.end, slot};
}
__device__ inline Rows rows_around(const Problem &p, int64_t batch, int64_t row) {
  const int64_t n = cuda::sequence_of_row(p.cu_seqlens, p.N, p.T, batch, row);
  return n < 0 ? Rows{-1, batch, row, p.T, -1} : rows_of(p, n);
}

__device__ inline cuda::Row channels(const fw_tensor &t, int64_t batch, int64_t row) {
  return cuda::row_at(t, batch * t.strides[0] + row * t.strides[1], t.strides[2]);
}
__device__ inline float state_at(const fw_tensor &t, int64_t slot, int64_t d, int64_t i) {
  return given(t) ? cuda::load_element(t.data, t.dtype, slot * t.strides[0] + d * t.strides[1] + i * t.strides[2]) : 0.0f;
}
__device__ inline float weight_at(const Problem &p, int64_t d, int64_t tap) {
  return cuda::load_element(p.weight.data, p.weight.dtype, d * p.weight.strides[0] + tap * p.weight.strides[1]);
}
__device__ inline float bias_at(const Problem &p, int64_t d) {
  return given(p.bias) ? cuda::load_element(p.bias.data, p.bias.dtype, d * p.bias.strides[0]) : 0.0f;
}

// Inputs of four channels at a position of the sequence, at least -(W - 1).
__device__ __noinline__ float4 load_input(const Problem &p, const Rows &s, int64_t position, int64_t d) {
  float x[4];
  if (position >= 0) {
    cuda::load_quad(channels(p.x, s.batch, s.begin + position), d, p.D, x);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) x[j] = d + j < p.D ? state_at(p.initial_state, s.slot, d + j, p.W - 1 + position) : 0.0f;
  }
  return make_float4(x[0], x[1], x[2], x[3]);
}
__device__ inline void load_input(const Problem &p, const Rows &s, int64_t position, int64_t d, float (&x)[4]) {
  const float4 quad = load_input(p, s, position, d);
  x[0] = quad.x, x[1] = quad.y, x[2] = quad.z, x[3] = quad.w;
}

// The taps of four channels; kIsShort: in registers.
template <bool kIsShort>
struct Taps {
  float weight[kIsShort ? kShort : 1][4], bias[4];
  __device__ Taps(const Problem &p, int64_t d) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bias[j] = d + j < p.D ? bias_at(p, d + j) : 0.0f;
      if constexpr (kIsShort) {
#pragma unroll
        for (int tap = 0; tap < kShort; ++tap) weight[tap][j] = d + j < p.D && tap < p.W ? weight_at(p, d + j, tap) : 0.0f;
      }
    }
  }
};

// z of four channels before the activation, for positions one after the other.
template <bool kIsShort>
struct Window {
  float x[kIsShort ? kShort : 1][4];  // x[tap]: what that tap meets; the newest is x[W - 1]
  int64_t next = -1;                  // position that the window is ready for
  const Problem &p;
  const Taps<kIsShort> &taps;
  int64_t d;

  __device__ Window(const Problem &problem, const Taps<kIsShort> &t, int64_t channel) : p(problem), taps(t), d(channel) {}
  __device__ void sum(const Rows &s, int64_t position, float (&z)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) z[j] = taps.bias[j];
    if constexpr (kIsShort) {
      if (position != next) {
#pragma unroll
        for (int tap = 0; tap < kShort; ++tap) {
          if (tap + 1 < p.W) load_input(p, s, position - (p.W - 1) + tap, d, x[tap + 1 < kShort ? tap + 1 : tap]);
        }
      }
#pragma unroll
      for (int tap = 0; tap < kShort; ++tap) {
        if (tap + 1 < p.W) {
#pragma unroll
          for (int j = 0; j < 4; ++j) x[tap][j] = x[tap + 1 < kShort ? tap + 1 : tap][j];
        } else if (tap < p.W) {
          load_input(p, s, position, d, x[tap]);
        }
      }
      next = position + 1;
#pragma unroll
      for (int tap = 0; tap < kShort; ++tap) {
        if (tap < p.W) {
#pragma unroll
          for (int j = 0; j < 4; ++j) z[j] = fmaf(taps.weight[tap][j], x[tap][j], z[j]);
        }
      }
    } else {
#pragma unroll 1
      for (int64_t tap = 0; tap < p.W; ++tap) {
        load_input(p, s, position - (p.W - 1) + tap, d, x[0]);
#pragma unroll
        for (int j = 0; j < 4; ++j) z[j] = d + j < p.D ? fmaf(weight_at(p, d + j, tap), x[0][j], z[j]) : 0.0f;
      }
    }
  }
};

// Forward: y. Backward (dz given): dz of every row, 0 for rows of no sequence.
template <bool kIsShort>
__global__ void __launch_bounds__(kThreads) convolve_rows(const __grid_constant__ Problem p, float *dz) {
  const int64_t quads = ceil_div(p.D, 4), tiles = ceil_div(p.T, kTileRows), items = p.B * tiles * quads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t d = item % quads * 4, batch = item / quads / tiles, first = item / quads % tiles * kTileRows;
    const int64_t last = p.T - first < kTileRows ? p.T : first + kTileRows;
    const Taps<kIsShort> taps(p, d);
    Window<kIsShort> window(p, taps, d);
    Rows s = {-1, batch, 0, 0, -1};
#pragma unroll 1
    for (int64_t row = first; row < last; ++row) {
      if (row == first || s.n < 0 || row >= s.end) {
        s = rows_around(p, batch, row);
        window.next = -1;
      }
      float z[4] = {}, dy[4];
      if (s.n >= 0) window.sum(s, row - s.begin, z);
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

// State row i of channel d of a sequence into slot `slot` of t: forward the last inputs, backward the gradient of the first.
__global__ void __launch_bounds__(kThreads) write_states(const __grid_constant__ Problem p, const __grid_constant__ fw_tensor t,
                                                         const float *dz) {
  const int64_t past = p.W - 1, items = p.N * p.D * past, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t i = item % past, d = item / past % p.D, n = item / past / p.D;
    const Rows s = rows_of(p, n);
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

struct Sums {
  float *partials;  // [block][W + 1][D]: dweight by tap, dbias
  int64_t blocks, rows;
};

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
  b.dz = ledger.take<float>(product(n_rows(p), p.D));
  b.sums.partials = ledger.take<float>(product(blocks.n, product(p.W + 1, p.D)));
  return b;
}

void launch_convolution(const Problem &p, float *dz) {
  const int64_t items = n_rows(p) == 0 ? 0 : p.B * ceil_div(p.T, kTileRows) * ceil_div(p.D, 4);
  if (items == 0) return;
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  const uint32_t grid = cuda::grid_of(items, kThreads);
  if (p.W <= kShort) {
    cuda::launch({grid, kThreads, 0, stream}, convolve_rows<true>, p, dz);
  } else {
    cuda::launch({grid, kThreads, 0, stream}, convolve_rows<false>, p, dz);
  }
}

void launch_states(const Problem &p, const fw_tensor &t, const float *dz) {
  if (!given(t) || numel(t) == 0) return;
  cuda::launch({cuda::grid_of(numel(t), kThreads), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, write_states, p, t, dz);
}

void run_step(const Problem &p) {
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  const bool is_packed = given(p.cu_seqlens) && n_rows(p) > 0;
  if (p.N > 0 && p.D > 0 && p.T > 0) cuda::launch({cuda::grid_of(p.N * p.D, kThreads), kThreads, 0, stream}, step_sequences, p);
  if (is_packed) cuda::launch({cuda::grid_of(p.T * p.D, kThreads), kThreads, 0, stream}, clear_rows, p);
}

void run_backward(const Problem &p, const Buffers &b) {
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  const float *dz = given(p.dy) ? b.dz : nullptr;  // nullptr: zeros
  if (dz) launch_convolution(p, b.dz);
  if (given(p.dx) && n_rows(p) > 0) cuda::launch({cuda::grid_of(numel(p.x), kThreads), kThreads, 0, stream}, gradient_rows, p, dz);
  launch_states(p, p.d_initial_state, dz);
  if (!given(p.dweight) && !given(p.dbias)) return;
  const int64_t blocks = dz ? b.sums.blocks : 0;
  if (blocks > 0) {
    const int64_t items = blocks * ceil_div(p.D, kColumns) * ceil_div(p.W + 1, 4);
    cuda::launch({cuda::grid_of(items, 1), 32 * kWarps, 0, stream}, sum_weights, p, dz, b.sums);
  }
  const fw_tensor &w = p.dweight;
  const int64_t pitch = (p.W + 1) * p.D;
  if (given(w)) cuda::launch_sum_blocks(p.stream, b.sums.partials, blocks, pitch, {w, numel(w), p.D, w.strides[1], w.strides[0]});
  if (given(p.dbias)) {
    const float *from = blocks > 0 ? b.sums.partials + p.W * p.D : nullptr;
    cuda::launch_sum_blocks(p.stream, from, blocks, pitch, {p.dbias, p.D, p.D, 0, p.dbias.strides[0]});
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
    launch_convolution(p, nullptr);
    launch_states(p, p.final_state, nullptr);
  }
  return cuda::check_launches(ShortConv::kName, "cuda");
}

}  // namespace fw::short_conv
