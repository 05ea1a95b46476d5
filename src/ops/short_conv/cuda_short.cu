// SPDX-License-Identifier: Apache-2.0
// The convolution of at most four taps on CUDA.
//
// Plan: a thread takes four neighbouring channels and walks rows four at a time, whose loads are under way together; the taps and
// the three rows before the four stay in registers, newest last, so that tap W - 1 is number 3 whatever W is. Forward: kTileRows
// rows a thread. Backward: the rows of a block of the sums; dz runs three rows ahead of dx, so that a row's dx finds the dz of the
// rows after it, and the sums of dweight and dbias stay in registers. Sums have the order of cuda.cu.
#include "core/operands.hpp"
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "ops/short_conv/cuda_rows.cuh"
#include "ops/short_conv/cuda_short.hpp"

namespace fw::short_conv {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kTileRows = 32;

using Quad = float[4];

struct Taps {
  float weight[4][4], bias[4];  // weight[k]: of the row 3 - k before the output
  __device__ Taps(const Problem &p, int64_t d) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bias[j] = d + j < p.D ? bias_at(p, d + j) : 0.0f;
#pragma unroll
      for (int k = 0; k < 4; ++k) weight[k][j] = d + j < p.D && k >= 4 - p.W ? weight_at(p, d + j, k - (4 - p.W)) : 0.0f;
    }
  }
};

// z of the row in[3] of four rows.
__device__ inline void sum_taps(const Problem &p, const Taps &taps, const Quad *in, Quad &z) {
#pragma unroll
  for (int j = 0; j < 4; ++j) z[j] = taps.bias[j];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if (k < 4 - p.W) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) z[j] = fmaf(taps.weight[k][j], in[k][j], z[j]);
  }
}

// The three rows before `row` that taps read; the others become 0.
__device__ inline void load_past(const Problem &p, const Rows &s, int64_t row, int64_t d, Quad *in) {
#pragma unroll
  for (int k = 0; k < 3; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) in[k][j] = 0.0f;
    if (3 - k < p.W) load_input(p, s, row - s.begin - 3 + k, d, in[k]);
  }
}
__device__ inline void shift(Quad *rows) {
#pragma unroll
  for (int k = 0; k < 3; ++k) {
#pragma unroll
    for (int j = 0; j < 4; ++j) rows[k][j] = rows[k + 4][j];
  }
}

__global__ void __launch_bounds__(kThreads, 5) forward_rows(const __grid_constant__ Problem p) {
  const int64_t quads = ceil_div(p.D, 4), tiles = ceil_div(p.T, kTileRows), items = p.B * tiles * quads;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t tile = item / quads, d = (item - tile * quads) * 4, batch = tile / tiles, first = (tile - batch * tiles) * kTileRows;
    const int64_t last = p.T - first < kTileRows ? p.T : first + kTileRows;
    const Taps taps(p, d);
    Rows s = {-1, batch, 0, 0, -1};
    bool is_ready = false;  // whether in[0] to in[2] are the rows before `row`
    Quad in[7];
    for (int64_t row = first; row < last;) {
      if (s.n < 0 || row >= s.end) {
        s = rows_around(p, batch, row);
        is_ready = false;
      }
      if (s.n < 0) {
        const Quad zero = {};
        cuda::store_quad(channels(p.y, batch, row++), d, p.D, zero);
        continue;
      }
      if (!is_ready) load_past(p, s, row, d, in);
      const int64_t stop = s.end < last ? s.end : last;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (row + r < stop) cuda::load_quad(channels(p.x, batch, row + r), d, p.D, in[3 + r]);
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        if (row + r >= stop) break;
        Quad z;
        sum_taps(p, taps, in + r, z);
        if (p.has_silu) {
          const float4 y = cuda::activate_quad(FW_ACTIVATION_SILU, make_float4(z[0], z[1], z[2], z[3]));
          z[0] = y.x, z[1] = y.y, z[2] = y.z, z[3] = y.w;
        }
        cuda::store_quad(channels(p.y, batch, row + r), d, p.D, z);
      }
      shift(in);
      is_ready = row + 4 <= stop;
      row = is_ready ? row + 4 : stop;
    }
  }
}

// Four channels of the backward, along the rows of one sequence.
struct Backward {
  const Problem &p;
  const Taps &taps;
  const int64_t d;
  Rows s;
  int64_t begin, stop;  // rows that are this thread's
  Quad in[7], dz[7];    // the three rows before the four, and the four
  Quad sums[5] = {};    // dweight, as Taps; dbias

  __device__ Backward(const Problem &problem, const Taps &t, int64_t channel) : p(problem), taps(t), d(channel) {}

  // x and dz of rows first to first + 3; dz is 0 outside [begin, end of the sequence).
  __device__ __forceinline__ void advance(int64_t first) {
    Quad dy[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t row = first + r;
#pragma unroll
      for (int j = 0; j < 4; ++j) in[3 + r][j] = dy[r][j] = 0.0f;
      if (row >= begin && row < s.end) {
        cuda::load_quad(channels(p.x, s.batch, row), d, p.D, in[3 + r]);
        cuda::load_quad(channels(p.dy, s.batch, row), d, p.D, dy[r]);
      } else if (row < begin && p.W > 1) {
        load_input(p, s, row - s.begin, d, in[3 + r]);
      }
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t row = first + r;
      float4 slope = make_float4(1, 1, 1, 1);
      if (p.has_silu && row >= begin && row < s.end) {
        Quad z;
        sum_taps(p, taps, in + r, z);
        slope = cuda::slope_quad(FW_ACTIVATION_SILU, make_float4(z[0], z[1], z[2], z[3]));
      }
      dz[3 + r][0] = dy[r][0] * slope.x, dz[3 + r][1] = dy[r][1] * slope.y;
      dz[3 + r][2] = dy[r][2] * slope.z, dz[3 + r][3] = dy[r][3] * slope.w;
      if (row < begin || row >= stop) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        sums[4][j] += dz[3 + r][j];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (k >= 4 - p.W) sums[k][j] = fmaf(dz[3 + r][j], in[r + k][j], sums[k][j]);
        }
      }
    }
  }
  __device__ float final_gradient(int64_t position, int64_t channel) const {
    const int64_t first = s.end - s.begin - (p.W - 1);
    return position >= first ? state_at(p.d_final_state, s.n, channel, position - first) : 0.0f;
  }
  // d_initial_state, from the dz of the first three rows in dz[0] to dz[2].
  __device__ __forceinline__ void store_initial() const {
    const fw_tensor &t = p.d_initial_state;
#pragma unroll
    for (int m = 1; m < 4; ++m) {  // rows before the first
      if (m >= p.W) break;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float sum = 0;
#pragma unroll
        for (int i = m; i < 4; ++i) sum = i < p.W ? fmaf(taps.weight[3 - i][j], dz[i - m][j], sum) : sum;
        if (d + j >= p.D) break;
        sum += final_gradient(-m, d + j);
        cuda::store_element(t.data, t.dtype, s.n * t.strides[0] + (d + j) * t.strides[1] + (p.W - 1 - m) * t.strides[2], sum);
      }
    }
  }
  __device__ __forceinline__ void run() {
#pragma unroll
    for (int k = 0; k < 3; ++k) {  // rows begin - 4 to begin - 2; a tap of a row from begin on reads back to begin - 3
#pragma unroll
      for (int j = 0; j < 4; ++j) in[k][j] = dz[k][j] = 0.0f;
      if (k > 0 && 4 - k < p.W) load_input(p, s, begin - s.begin - 4 + k, d, in[k]);
    }
    // The warm-up is a turn of the loop that stores nothing: dz of the first three rows.
#pragma unroll 1
    for (int64_t row = begin - 4; row < stop; row += 4) {
      advance(row + 3);
      if (row >= begin && given(p.dx)) {
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          if (row + r >= stop) break;
          Quad dx = {};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (i >= p.W) break;
#pragma unroll
            for (int j = 0; j < 4; ++j) dx[j] = fmaf(taps.weight[3 - i][j], dz[r + i][j], dx[j]);
          }
          if (given(p.d_final_state) && row + r > s.end - p.W) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              if (d + j < p.D) dx[j] += final_gradient(row + r - s.begin, d + j);
            }
          }
          cuda::store_quad(channels(p.dx, s.batch, row + r), d, p.D, dx);
        }
      }
      shift(in);
      shift(dz);
      if (row < begin && begin == s.begin && given(p.d_initial_state)) store_initial();
    }
  }
};

__global__ void __launch_bounds__(kThreads, 3) backward_rows(const __grid_constant__ Problem p, const __grid_constant__ Sums to) {
  const int64_t quads = ceil_div(p.D, 4), items = to.blocks * quads, step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t block = item / quads, d = (item - block * quads) * 4, all = p.B * p.T;
    const int64_t first = block * to.rows, last = all - first < to.rows ? all : first + to.rows;
    const Taps taps(p, d);
    Backward backward(p, taps, d);
    for (int64_t r = first; r < last;) {
      const int64_t batch = r / p.T, row = r - batch * p.T;
      backward.s = rows_around(p, batch, row);
      if (backward.s.n < 0) {
        const Quad zero = {};
        if (given(p.dx)) cuda::store_quad(channels(p.dx, batch, row), d, p.D, zero);
        ++r;
        continue;
      }
      backward.begin = row;
      backward.stop = backward.s.end - row < last - r ? backward.s.end : row + last - r;
      if (backward.stop <= row) backward.stop = row + 1;  // offsets that are not sorted
      backward.run();
      r += backward.stop - row;
    }
    if (!to.partials) continue;
#pragma unroll
    for (int k = 0; k < 5; ++k) {
      if (k < 4 - p.W) continue;
      float *sums = to.partials + (block * (p.W + 1) + k - (4 - p.W)) * p.D;
      for (int j = 0; j < 4 && d + j < p.D; ++j) sums[d + j] = backward.sums[k][j];
    }
  }
}

}  // namespace

void launch_short_forward(const Problem &p) {
  const int64_t items = p.B * ceil_div(p.T, kTileRows) * ceil_div(p.D, 4);
  cuda::launch({cuda::grid_of(items, kThreads), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, forward_rows, p);
}

void launch_short_backward(const Problem &p, const Sums &sums) {
  const int64_t items = sums.blocks * ceil_div(p.D, 4);
  cuda::launch({cuda::grid_of(items, kThreads), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, backward_rows, p, sums);
}

}  // namespace fw::short_conv
