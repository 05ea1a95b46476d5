// SPDX-License-Identifier: Apache-2.0
// The normaliser of linear_attn on CUDA, and the rows of outputs that belong to no sequence.
//
// Plan: one warp a (sequence, query/key head), 4 warps a block; a lane keeps every 32nd number of z = sum of k (at most 16
// registers) and walks the tokens, one warp sum each. Backward walks them from the last to the first with the gradient of z in
// the same registers. No shared memory.
#include "cuda/launch.cuh"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_rows.cuh"

namespace fw::recurrence {
namespace {

constexpr int kOwned = 16;  // numbers of a row of K <= 512 that a lane owns
constexpr int kHeadsABlock = 4;
constexpr int64_t kClearBlocks = 256;

__device__ inline bool find_head(const Problem &p, int64_t *n, int64_t *h) {
  const int64_t item = blockIdx.x * static_cast<int64_t>(kHeadsABlock) + threadIdx.x / 32;
  *n = item / p.H, *h = item % p.H;
  return item < p.N * p.H;
}

__device__ inline void load_owned(const fw_tensor &t, int64_t offset, int64_t stride, int64_t K, float factor, float (&to)[kOwned]) {
#pragma unroll
  for (int j = 0; j < kOwned; ++j) {
    const int64_t d = j * 32 + threadIdx.x % 32;
    to[j] = d < K && given(t) ? load_at(t, offset + d * stride) * factor : 0.0f;
  }
}
__device__ inline void load_owned_key(const Problem &p, const fw_tensor &t, int64_t batch, int64_t token, int64_t h, float (&to)[kOwned]) {
  const int64_t offset = head_offset(t, batch, token, h);
  const float factor = p.has_l2norm ? inverse_length(t, offset, p.K, threadIdx.x % 32) : 1.0f;
  load_owned(t, offset, t.strides[3], p.K, factor, to);
}
__device__ inline void store_owned(const fw_tensor &t, int64_t offset, int64_t stride, int64_t K, const float (&from)[kOwned]) {
#pragma unroll
  for (int j = 0; j < kOwned; ++j) {
    const int64_t d = j * 32 + threadIdx.x % 32;
    if (d < K && given(t)) store_at(t, offset + d * stride, from[j]);
  }
}

__global__ void __launch_bounds__(32 * kHeadsABlock) normalizer(const __grid_constant__ Problem p, float *divisors, float *sums) {
  int64_t n, h;
  if (!find_head(p, &n, &h)) return;
  const cuda::DeviceSegment segment = cuda::device_segment(p.cu_seqlens, p.T, n);
  const bool is_step = p.direction == FW_STEP;
  const fw_tensor &in = is_step ? p.state_z : p.initial_z, &out = is_step ? p.state_z : p.final_z;
  int64_t slot = n;
  if (is_step && given(p.state_indices)) {
    slot = load_int(p.state_indices, n);
    if (slot < 0 || slot >= p.state_z.shape[0]) return;
  }
  float z[kOwned];
  load_owned(in, slot * in.strides[0] + h * in.strides[1], in.strides[2], p.K, 1.0f, z);
  for (int64_t token = segment.begin; token < segment.end; ++token) {
    float q[kOwned], k[kOwned], dot = 0;
    load_owned_key(p, p.q, segment.batch, token, h, q);
    load_owned_key(p, p.k, segment.batch, token, h, k);
    const int64_t at = (segment.batch * p.T + token) * p.H + h;
#pragma unroll
    for (int j = 0; j < kOwned; ++j) {
      z[j] += k[j];
      dot = fmaf(q[j], z[j], dot);
      const int64_t d = j * 32 + threadIdx.x % 32;
      if (sums && d < p.K) sums[at * p.K + d] = z[j];
    }
    dot = cuda::warp_sum(dot);
    if (threadIdx.x % 32 == 0) divisors[at] = p.scale_f32 * dot + 1e-10f;
  }
  store_owned(out, slot * out.strides[0] + h * out.strides[1], out.strides[2], p.K, z);
}

// o_v = num_v / divisor, so the divisor's gradient is -sum_v do_v o_v / divisor = -(q . d_q of num) / divisor, summed over the
// value heads of the group; the divisor is scale * q . z + 1e-10.
__global__ void __launch_bounds__(32 * kHeadsABlock) normalizer_backward(const __grid_constant__ Problem p, int32_t panels,
                                                                         const float *divisors, const float *sums, float *d_q,
                                                                         float *d_k) {
  int64_t n, h;
  if (!find_head(p, &n, &h)) return;
  const cuda::DeviceSegment segment = cuda::device_segment(p.cu_seqlens, p.T, n);
  float dz[kOwned];
  load_owned(p.d_final_z, n * p.d_final_z.strides[0] + h * p.d_final_z.strides[1], p.d_final_z.strides[2], p.K, 1.0f, dz);
  for (int64_t token = segment.end - 1; token >= segment.begin; --token) {
    const int64_t at = (segment.batch * p.T + token) * p.H + h;
    float q[kOwned], dot = 0;
    load_owned_key(p, p.q, segment.batch, token, h, q);
    const int64_t row = (segment.batch * p.T + token) * p.HV, size = p.B * p.R * p.HV;
#pragma unroll
    for (int j = 0; j < kOwned; ++j) {
      const int64_t d = j * 32 + threadIdx.x % 32;
      float sum = 0;
      for (int64_t i = 0; d < p.K && i < p.group() * panels; ++i) {
        sum += d_q[(i % panels * size + row + h * p.group() + i / panels) * p.K + d];
      }
      dot = fmaf(q[j], sum, dot);
    }
    const float d_dot = -cuda::warp_sum(dot) / divisors[at] * p.scale_f32;
    const int64_t first = (row + h * p.group()) * p.K;  // added to the group's first head in the first panel
#pragma unroll
    for (int j = 0; j < kOwned; ++j) {
      const int64_t d = j * 32 + threadIdx.x % 32;
      dz[j] = fmaf(d_dot, q[j], dz[j]);
      if (d >= p.K) continue;
      d_q[first + d] = fmaf(d_dot, sums[at * p.K + d], d_q[first + d]);
      d_k[first + d] += dz[j];
    }
  }
  const fw_tensor &out = p.d_initial_z;
  store_owned(out, n * out.strides[0] + h * out.strides[1], out.strides[2], p.K, dz);
}

// Rows before the first sequence and past the last one.
__global__ void __launch_bounds__(kThreads) clear_rows(const __grid_constant__ Problem p, const __grid_constant__ fw_tensor t,
                                                       int64_t rows_a_token, int64_t last) {
  const int64_t begin = cuda::clamped_offset(p.cu_seqlens, 0, p.T) * rows_a_token;
  const int64_t end = cuda::clamped_offset(p.cu_seqlens, p.N, p.T) * rows_a_token, rows = p.T * rows_a_token;
  const int64_t heads = t.shape[2], width = last > 0 ? last : 1, size = heads * width;
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    if (row >= begin && row < end) continue;
    for (int64_t i = threadIdx.x; i < size; i += kThreads) {
      store_at(t, head_offset(t, 0, row, i / width) + (last > 0 ? i % width * t.strides[3] : 0), 0.0f);
    }
  }
}

uint32_t head_blocks(const Problem &p) { return static_cast<uint32_t>((p.N * p.H + kHeadsABlock - 1) / kHeadsABlock); }

}  // namespace

void launch_normalizer(const Problem &p, float *divisors, float *sums) {
  cuda::launch({head_blocks(p), 32 * kHeadsABlock, 0, static_cast<cudaStream_t>(p.stream)}, normalizer, p, divisors, sums);
}

void launch_normalizer_backward(const Problem &p, const float *divisors, const float *sums, const RowGradients &rows) {
  cuda::launch({head_blocks(p), 32 * kHeadsABlock, 0, static_cast<cudaStream_t>(p.stream)}, normalizer_backward, p, rows.panels, divisors, sums, rows.d_q, rows.d_k);
}

void launch_clear(const Problem &p, const fw_tensor &t, int64_t rows_a_token, int64_t last) {
  if (!given(t) || !given(p.cu_seqlens) || p.T == 0) return;
  const int64_t rows = p.T * rows_a_token, blocks = rows < kClearBlocks ? rows : kClearBlocks;
  cuda::launch({static_cast<uint32_t>(blocks), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, clear_rows, p, t, rows_a_token, last);
}

}  // namespace fw::recurrence
