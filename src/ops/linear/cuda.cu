// SPDX-License-Identifier: Apache-2.0
// The linear layer on CUDA: one matrix product for y, dx, dweight and dbias, right for every type and stride.
//
// Plan: a thread block of 256 takes 64 rows x 64 columns of the result, a thread 4 x 4 of them; both sides come to shared memory
// as fp32, 16 of the depth at a time (8.5 KB), four elements a thread and side, the next ones on their way while these are
// multiplied. Up to 4 rows, as when a model decodes: a block of 64 takes 8 columns, a thread 128 of
// the depth of one of them, all loads of that together,
// and the rows come to shared memory (18 KB). Either way sums go upward in the depth, 128 products at a time and
// then those sums, so that an element depends on its row and its column alone. No scratch.
#include "cuda/candidate.hpp"
#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "cuda/rows.cuh"
#include "ops/linear/problem.hpp"

namespace fw::linear {
namespace {

constexpr int kThreads = 256, kTile = 64, kDepth = 16, kFold = 128, kPitch = kTile + 4;
constexpr int kFew = 4, kFolds = 8, kColumns = 8;

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

// Row i along the depth; with the side turned, place i of the depth across the rows.
__device__ inline cuda::Row row_of(const Side &s, int64_t i) {
  const uintptr_t size = static_cast<uintptr_t>(dtype_size(s.dtype));
  const uintptr_t address = reinterpret_cast<uintptr_t>(s.data) + static_cast<uintptr_t>(i * s.stride) * size;
  return {const_cast<void *>(s.data), s.dtype, i * s.stride, s.depth_stride, s.depth_stride == 1 && address % (4 * size) == 0};
}

// The part of a tile [kDepth][kTile] of a side that a thread brings: four elements along what lies closer together.
struct Part {
  int i, k;
  bool is_deep;  // along the depth
  float x[4];
  __device__ explicit Part(const Side &s) : x{} {
    const int64_t across = s.stride < 0 ? -s.stride : s.stride, along = s.depth_stride < 0 ? -s.depth_stride : s.depth_stride;
    is_deep = along <= across;
    i = is_deep ? threadIdx.x / (kDepth / 4) : threadIdx.x % (kTile / 4) * 4;
    k = is_deep ? threadIdx.x % (kDepth / 4) * 4 : threadIdx.x / (kTile / 4);
  }
  // From i0, k0; 0 outside the side.
  __device__ void load(const Side &s, int64_t i0, int64_t k0, int64_t depth) {
    const Side turned = is_deep ? s : Side{s.data, s.dtype, depth, s.depth_stride, s.stride};
    const int64_t row = is_deep ? i0 + i : k0 + k, place = is_deep ? k0 + k : i0 + i, n = is_deep ? depth : s.n;
    const bool is_inside = row < turned.n;
    if (is_inside && s.dtype != FW_NONE) {
      cuda::load_quad(row_of(turned, row), place, n, x);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = is_inside && place + j < n ? 1.0f : 0.0f;
    }
  }
  __device__ void store(float (*to)[kPitch]) const {
    if (is_deep) {
#pragma unroll
      for (int j = 0; j < 4; ++j) to[k + j][i] = x[j];
    } else {
      *reinterpret_cast<float4 *>(&to[k][i]) = make_float4(x[0], x[1], x[2], x[3]);
    }
  }
};
static_assert(kTile * kDepth == 4 * kThreads);

__global__ void __launch_bounds__(kThreads) multiply(const __grid_constant__ Product p) {
  __shared__ float left[kDepth][kPitch], right[kDepth][kPitch];
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
  const int64_t column_tiles = ceil_div(p.right.n, kTile), tiles = ceil_div(p.left.n, kTile) * column_tiles;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t r0 = tile / column_tiles * kTile, c0 = tile % column_tiles * kTile;
    float sum[4][4] = {}, part[4][4] = {};
    Part left_part(p.left), right_part(p.right);
    left_part.load(p.left, r0, 0, p.depth);
    right_part.load(p.right, c0, 0, p.depth);
#pragma unroll 1
    for (int64_t k0 = 0; k0 < p.depth; k0 += kDepth) {
      left_part.store(left);
      right_part.store(right);
      __syncthreads();  // both sides are there
      left_part.load(p.left, r0, k0 + kDepth, p.depth);
      right_part.load(p.right, c0, k0 + kDepth, p.depth);
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

__global__ void __launch_bounds__(kFolds * kColumns) multiply_few(const __grid_constant__ Product p) {
  __shared__ __align__(16) float lefts[kFew][kFolds][kFold + 4];
  __shared__ float parts[kFolds][kFew][kColumns];
  const int fold = threadIdx.x / kColumns, place = threadIdx.x % kColumns, rows = static_cast<int>(p.left.n);
  const int64_t tiles = ceil_div(p.right.n, kColumns);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t column = tile * kColumns + place;
    const bool is_real = column < p.right.n;
    const cuda::Row right = row_of(p.right, is_real ? column : 0);
    float sum = 0;  // of row `fold`
    for (int64_t first = 0; first < p.depth; first += kFolds * kFold) {
      float b[kFold / 4][4], part[kFew] = {};
      cuda::load_quads(right, first + fold * kFold, p.depth, b);
#pragma unroll 1
      for (int e = threadIdx.x; e < rows * kFolds * kFold / 4; e += kFolds * kColumns) {
        const int r = e / (kFolds * kFold / 4), at = e % (kFolds * kFold / 4) * 4;
        float x[4];
        cuda::load_quad(row_of(p.left, r), first + at, p.depth, x);
        *reinterpret_cast<float4 *>(&lefts[r][at / kFold][at % kFold]) = make_float4(x[0], x[1], x[2], x[3]);
      }
      __syncthreads();  // the rows are there
#pragma unroll
      for (int r = 0; r < kFew; ++r) {
        if (r >= rows) break;
#pragma unroll
        for (int q = 0; q < kFold / 4; ++q) {
          const float4 x = *reinterpret_cast<const float4 *>(&lefts[r][fold][4 * q]);
          const float a[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) part[r] = fmaf(a[j], b[q][j], part[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kFew; ++r) parts[fold][r][place] = part[r];
      __syncthreads();  // the parts of these folds are there
      for (int f = 0; f < kFolds && fold < rows && first + f * kFold < p.depth; ++f) sum += parts[f][fold][place];
      __syncthreads();  // they are read
    }
    if (fold >= rows || !is_real) continue;
    const float bias = given(p.bias) ? cuda::load_element(p.bias.data, p.bias.dtype, column * p.bias.strides[0]) : 0.0f;
    cuda::store_element(p.to, p.dtype, fold * p.row_stride + column * p.column_stride, sum + bias);
  }
}

Side rows_of(const fw_tensor &t) { return {t.data, t.dtype, t.shape[0], t.strides[0], t.strides[1]}; }
Side columns_of(const fw_tensor &t) { return {t.data, t.dtype, t.shape[1], t.strides[1], t.strides[0]}; }

void launch(const Problem &p, const Side &left, const Side &right, int64_t depth, const fw_tensor &bias, const fw_tensor &to) {
  if (!given(to) || left.n == 0 || right.n == 0) return;
  const bool is_few = left.n <= kFew && right.dtype != FW_NONE && right.depth_stride == 1;
  const int64_t tiles = is_few ? ceil_div(right.n, kColumns) : ceil_div(left.n, kTile) * ceil_div(right.n, kTile);
  const Product product = {left, right, depth, bias, to.data, to.dtype, to.strides[0], to.ndim == 2 ? to.strides[1] : 0};
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  if (is_few) {
    cuda::launch({cuda::grid_of(tiles, 1), kFolds * kColumns, 0, stream}, multiply_few, product);
  } else {
    cuda::launch({cuda::grid_of(tiles, 1), kThreads, 0, stream}, multiply, product);
  }
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
