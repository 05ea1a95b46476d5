// SPDX-License-Identifier: Apache-2.0
// The states at the starts of all segments, S_(g+1) = Pi_g S_g + H_g in fp32, from the segments' summaries.
// Grid (heads, 128 / kRows), 512 threads: a CTA carries kRows value rows of S^T through all segments. Thread (part, i):
// key column i, the 32 input columns of its part; the four parts are added in a fixed order. The next Pi is loaded into
// registers before the sum over the present one, so that a link costs 256 multiply-adds a thread and two barriers.
// Shared memory: state 4096, partial sums 16384 bytes.
#include "cuda/sm90/barrier.cuh"
#include "ops/recurrence/sm90_scan.cuh"

namespace fw::sm90 {
namespace {

constexpr int kRows = 8, kParts = 4, kDepth = kKey / kParts;

__global__ void __launch_bounds__(512) link_kernel(const LinkArguments in) {
  __shared__ float4 state[kKey][kRows / 4];
  __shared__ float partial[kParts][kRows][kKey];
  const int i = threadIdx.x % kKey, part = threadIdx.x / kKey, row = blockIdx.y * kRows;
  const int64_t head = blockIdx.x;
  constexpr int64_t kSize = kKey * kKey;
  const float *summary = in.summary + head * in.segments * 2 * kSize;
  float *out = in.start_state + head * in.segments * kSize + row * kKey;
  float *values = reinterpret_cast<float *>(state);

  for (int r = part; r < kRows; r += kParts) {
    const int64_t at = head * kSize + (row + r) * in.state_value + i * in.state_key;
    values[i * kRows + r] = out[r * kKey + i] = in.initial_state ? in.initial_state[at] : 0.0f;
  }
  launch_next();
  launch_wait();
  float next[kDepth];
#pragma unroll
  for (int j = 0; j < kDepth; ++j) next[j] = summary[kSize + (part * kDepth + j) * kKey + i];
  for (int segment = 0; segment + 1 < in.segments; ++segment) {
    float now[kDepth], sum[kRows] = {};
#pragma unroll
    for (int j = 0; j < kDepth; ++j) now[j] = next[j];
    const float *h = summary + segment * 2 * kSize + row * kKey;
    float added[kRows / kParts];
#pragma unroll
    for (int r = 0; r < kRows / kParts; ++r) added[r] = h[(part + kParts * r) * kKey + i];
    if (segment + 2 < in.segments) {
#pragma unroll
      for (int j = 0; j < kDepth; ++j) next[j] = summary[((segment + 1) * 2 + 1) * kSize + (part * kDepth + j) * kKey + i];
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kDepth; ++j) {
#pragma unroll
      for (int four = 0; four < kRows / 4; ++four) {
        const float4 s = state[part * kDepth + j][four];
        sum[4 * four] = fmaf(s.x, now[j], sum[4 * four]);
        sum[4 * four + 1] = fmaf(s.y, now[j], sum[4 * four + 1]);
        sum[4 * four + 2] = fmaf(s.z, now[j], sum[4 * four + 2]);
        sum[4 * four + 3] = fmaf(s.w, now[j], sum[4 * four + 3]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) partial[part][r][i] = sum[r];
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kRows / kParts; ++step) {
      const int r = part + kParts * step;
      const float value = added[step] + ((partial[0][r][i] + partial[1][r][i]) + (partial[2][r][i] + partial[3][r][i]));
      values[i * kRows + r] = value;
      out[(segment + 1) * kSize + r * kKey + i] = value;
    }
  }
}

}  // namespace

cudaError_t launch_link(const LinkArguments &in, cudaStream_t stream) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(in.heads, kKey / kRows);
  config.blockDim = dim3(512);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, link_kernel, in);
}

}  // namespace fw::sm90
