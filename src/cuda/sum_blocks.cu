// SPDX-License-Identifier: Apache-2.0
// Plan: a thread block takes 32 sums with 8 threads each; thread j of a sum adds the partials j, j + 8, .. and the first of them
// adds the eight, in order, through 1 KB of shared memory.
#include "cuda/sum_blocks.hpp"

#include "cuda/element.cuh"
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"

namespace fw::cuda {
namespace {

constexpr int kSums = 32, kParts = 8;

__global__ void __launch_bounds__(kSums *kParts) sum_blocks(const float *partials, int64_t n_blocks, int64_t pitch,
                                                            const __grid_constant__ SumTarget to) {
  __shared__ float parts[kParts][kSums];
  const int column = threadIdx.x % kSums, part = threadIdx.x / kSums;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kSums; first < to.n; first += static_cast<int64_t>(gridDim.x) * kSums) {
    const int64_t i = first + column;
    float sum = 0;
    if (i < to.n) {
#pragma unroll 4
      for (int64_t block = part; block < n_blocks; block += kParts) sum += partials[block * pitch + i];
    }
    parts[part][column] = sum;
    __syncthreads();  // the parts are there
    if (part == 0 && i < to.n) {
      float all = 0;
      for (int j = 0; j < kParts; ++j) all += parts[j][column];
      store_element(to.tensor.data, to.tensor.dtype, i / to.columns * to.row_stride + i % to.columns * to.column_stride, all);
    }
    __syncthreads();  // the parts are read
  }
}

}  // namespace

void launch_sum_blocks(void *stream, const float *partials, int64_t n_blocks, int64_t pitch, const SumTarget &to) {
  if (to.n == 0) return;
  cuda::launch({grid_of(to.n, kSums), kSums * kParts, 0, static_cast<cudaStream_t>(stream)}, sum_blocks, partials, n_blocks, pitch, to);
}

}  // namespace fw::cuda
