// SPDX-License-Identifier: Apache-2.0
// The states at the starts of all segments, S_(g+1) = Pi_g S_g + H_g in fp32, from the segments' summaries.
// Grid (heads, 128 / kRows), 512 threads: a CTA carries kRows value rows of S^T through all segments. Thread (part, c):
// key columns 2c and 2c + 1, the kDepth input columns of its part; the parts are added in a fixed order. The next Pi is
// loaded into registers before the sum over the present one. kRows 8 read every Pi from the second-level cache twice as
// often: 2.4 us a link at 8 heads.
// Shared memory: state 8192, partial sums 65536 bytes.
#include "cuda/sm90/barrier.cuh"
#include "ops/recurrence/sm90_scan.cuh"

namespace fw::sm90 {
namespace {

constexpr int kRows = 16, kParts = 8, kDepth = kKey / kParts;

struct LinkShared {
  float state[kKey][kRows];
  float2 partial[kParts][kRows][kKey / 2];
};

__global__ void __launch_bounds__(512) link_kernel(const LinkArguments in) {
  extern __shared__ __align__(16) unsigned char raw[];
  LinkShared &shared = *reinterpret_cast<LinkShared *>(raw);
  const int c = threadIdx.x % (kKey / 2), part = threadIdx.x / (kKey / 2), row = blockIdx.y * kRows;
  const int64_t head = blockIdx.x;
  constexpr int64_t kSize = kKey * kKey;
  const float *summary = in.summary + head * in.segments * 2 * kSize;
  float *out = in.start_state + head * in.segments * kSize + row * kKey + 2 * c;
  launch_next();

#pragma unroll
  for (int step = 0; step < kRows / kParts; ++step) {
    const int r = part + kParts * step;
    const float *from = in.initial_state + head * kSize + (row + r) * in.state_value + 2 * c * in.state_key;
    const float2 value = in.initial_state ? make_float2(from[0], from[in.state_key]) : make_float2(0.0f, 0.0f);
    shared.state[2 * c][r] = value.x, shared.state[2 * c + 1][r] = value.y;
    *reinterpret_cast<float2 *>(out + r * kKey) = value;
  }
  launch_wait();
  const auto load = [&](float2(&to)[kDepth], int segment) {
    const float *pi = summary + (segment * 2 + 1) * kSize + part * kDepth * kKey + 2 * c;
#pragma unroll
    for (int j = 0; j < kDepth; ++j) to[j] = *reinterpret_cast<const float2 *>(pi + j * kKey);
  };
  float2 next[kDepth];
  load(next, 0);
  for (int segment = 0; segment + 1 < in.segments; ++segment) {
    float2 now[kDepth], sum[kRows] = {}, added[kRows / kParts];
#pragma unroll
    for (int j = 0; j < kDepth; ++j) now[j] = next[j];
#pragma unroll
    for (int step = 0; step < kRows / kParts; ++step) {
      added[step] = *reinterpret_cast<const float2 *>(summary + segment * 2 * kSize +
                                                      (row + part + kParts * step) * kKey + 2 * c);
    }
    if (segment + 2 < in.segments) load(next, segment + 1);
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kDepth; ++j) {
      const float4 *s = reinterpret_cast<const float4 *>(shared.state[part * kDepth + j]);
#pragma unroll
      for (int four = 0; four < kRows / 4; ++four) {
        const float4 v = s[four];
        const float by[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
          sum[4 * four + r].x = fmaf(by[r], now[j].x, sum[4 * four + r].x);
          sum[4 * four + r].y = fmaf(by[r], now[j].y, sum[4 * four + r].y);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) shared.partial[part][r][c] = sum[r];
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kRows / kParts; ++step) {
      const int r = part + kParts * step;
      float2 value = added[step];
#pragma unroll
      for (int p = 0; p < kParts; ++p) {
        const float2 more = shared.partial[p][r][c];
        value.x += more.x, value.y += more.y;
      }
      shared.state[2 * c][r] = value.x, shared.state[2 * c + 1][r] = value.y;
      *reinterpret_cast<float2 *>(out + (segment + 1) * kSize + r * kKey) = value;
    }
  }
}

}  // namespace

cudaError_t launch_link(const LinkArguments &in, cudaStream_t stream) {
  constexpr int kBytes = sizeof(LinkShared);
  const cudaError_t status = cudaFuncSetAttribute(link_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(in.heads, kKey / kRows);
  config.blockDim = dim3(512);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, link_kernel, in);
}

}  // namespace fw::sm90
