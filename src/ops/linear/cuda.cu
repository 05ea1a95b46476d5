// SPDX-License-Identifier: Apache-2.0
// The linear layer on CUDA: one matrix product for y, dx, dweight and dbias, right for every type and stride.
//
// Plan: a thread block of 256 takes 64 rows x 64 columns of the result, a thread 4 x 4 of them; both sides come to shared memory
// as fp32, 16 of the depth at a time (8.5 KB). Sums go upward in the depth, 128 products at a time and then those sums, so that an
// element depends on its row and its column alone. No scratch.
#include "cuda/candidate.hpp"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "ops/linear/problem.hpp"

namespace fw::linear {
namespace {

constexpr int kThreads = 256, kTile = 64, kDepth = 16, kFold = 128, kPitch = kTile + 4;

// Element (i, k) of one side: i counts rows or columns of the result, k the depth. Absent: 1 everywhere.
struct Side {
  const void *data;
  fw_dtype dtype;
  int64_t n, stride, depth_stride;
};
struct Product {
  Side left, right;
  int64_t depth;
  fw_tensor bias;  // by column; may be absent
  void *to;
  fw_dtype dtype;
  int64_t row_stride, column_stride;
};

// [kDepth][kTile] of a side from i0, k0; 0 outside. Neighbouring threads read what lies closer together.
__device__ __noinline__ void load_side(const Side &s, int64_t i0, int64_t k0, int64_t depth, float (*to)[kPitch]) {
  const int64_t across = s.stride < 0 ? -s.stride : s.stride, along = s.depth_stride < 0 ? -s.depth_stride : s.depth_stride;
#pragma unroll 1
  for (int e = threadIdx.x; e < kTile * kDepth; e += kThreads) {
    const int i = along <= across ? e / kDepth : e % kTile, k = along <= across ? e % kDepth : e / kTile;
    float x = 0;
    if (i0 + i < s.n && k0 + k < depth) {
      x = s.dtype == FW_NONE ? 1.0f : cuda::load_element(s.data, s.dtype, (i0 + i) * s.stride + (k0 + k) * s.depth_stride);
    }
    to[k][i] = x;
  }
}

__global__ void __launch_bounds__(kThreads) multiply(const __grid_constant__ Product p) {
  __shared__ float left[kDepth][kPitch], right[kDepth][kPitch];
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
  const int64_t column_tiles = ceil_div(p.right.n, kTile), tiles = ceil_div(p.left.n, kTile) * column_tiles;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t r0 = tile / column_tiles * kTile, c0 = tile % column_tiles * kTile;
    float sum[4][4] = {}, part[4][4] = {};
#pragma unroll 1
    for (int64_t k0 = 0; k0 < p.depth; k0 += kDepth) {
      load_side(p.left, r0, k0, p.depth, left);
      load_side(p.right, c0, k0, p.depth, right);
      __syncthreads();  // both sides are there
#pragma unroll
      for (int k = 0; k < kDepth; ++k) {
        const float4 a = *reinterpret_cast<const float4 *>(&left[k][row]), b = *reinterpret_cast<const float4 *>(&right[k][column]);
        const float as[4] = {a.x, a.y, a.z, a.w}, bs[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
#pragma unroll
          for (int c = 0; c < 4; ++c) part[r][c] = fmaf(as[r], bs[c], part[r][c]);
        }
      }
      __syncthreads();  // they are read
      if ((k0 + kDepth) % kFold != 0 && k0 + kDepth < p.depth) continue;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sum[r][c] += part[r][c], part[r][c] = 0;
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int64_t to_column = c0 + column + c;
      if (to_column >= p.right.n) break;
      const float bias = given(p.bias) ? cuda::load_element(p.bias.data, p.bias.dtype, to_column * p.bias.strides[0]) : 0.0f;
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int64_t to_row = r0 + row + r;
        if (to_row >= p.left.n) continue;
        cuda::store_element(p.to, p.dtype, to_row * p.row_stride + to_column * p.column_stride, sum[r][c] + bias);
      }
    }
  }
}

Side rows_of(const fw_tensor &t) { return {t.data, t.dtype, t.shape[0], t.strides[0], t.strides[1]}; }
Side columns_of(const fw_tensor &t) { return {t.data, t.dtype, t.shape[1], t.strides[1], t.strides[0]}; }

void launch(const Problem &p, const Side &left, const Side &right, int64_t depth, const fw_tensor &bias, const fw_tensor &to) {
  const int64_t tiles = left.n == 0 || right.n == 0 ? 0 : ceil_div(left.n, kTile) * ceil_div(right.n, kTile);
  if (!given(to) || tiles == 0) return;
  const Product product = {left, right, depth, bias, to.data, to.dtype, to.strides[0], to.ndim == 2 ? to.strides[1] : 0};
  cuda::launch({cuda::grid_of(tiles, 1), kThreads, 0, static_cast<cudaStream_t>(p.stream)}, multiply, product);
}

}  // namespace

uint64_t CudaPath::workspace(const fw_context &, const Problem &) { return 0; }

fw_status CudaPath::run(fw_context &, const Problem &p, void *) {
  const Operand operands[] = {{"x", &p.x},   {"weight", &p.weight}, {"bias", &p.bias},       {"y", &p.y},
                              {"dy", &p.dy}, {"dx", &p.dx},         {"dweight", &p.dweight}, {"dbias", &p.dbias}};
  const bool is_forward = p.direction == FW_FORWARD;
  for (const Operand &operand : operands) {  // a backward reads no bias
    if (operand.tensor != &p.bias || is_forward) FW_TRY(cuda::check_places(Op::kName, &operand, 1, nullptr));
  }
  if (is_forward) {
    launch(p, rows_of(p.x), rows_of(p.weight), p.in, p.bias, p.y);
  } else {
    launch(p, rows_of(p.dy), columns_of(p.weight), p.out, {}, p.dx);
    launch(p, columns_of(p.dy), columns_of(p.x), p.M, {}, p.dweight);
    launch(p, columns_of(p.dy), {nullptr, FW_NONE, 1, 0, 0}, p.M, {}, p.dbias);
  }
  return cuda::check_launches(Op::kName, "cuda");
}

}  // namespace fw::linear
