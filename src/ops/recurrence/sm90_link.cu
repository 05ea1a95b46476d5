// SPDX-License-Identifier: Apache-2.0
// The states at the starts of all segments, S_(g+1) = Pi_g S_g + H_g to fp32: 16 value rows of S^T times Pi^T as three
// tf32 products of the high and low parts (high high, high low, low high), summed in fp32.
// Grid (heads, 128 / 16), 256 threads: a CTA carries its rows through all segments, warp w key columns 16w .. 16w + 15.
// A word of Pi^T is replaced in its register by that of the next segment as soon as it is used.
// Shared memory: state, high and low parts, 16896 bytes. Barriers: two __syncthreads a segment.
// Tried: fp32 multiply-adds, 4.0 us a segment at 64 CTAs and 2.5 us at 128.
#include "cuda/launch.cuh"
#include "cuda/sm90/barrier.cuh"
#include "cuda/tf32.cuh"
#include "ops/recurrence/sm90_scan.cuh"

namespace fw::sm90 {
namespace {

constexpr int kRows = 16, kSteps = kKey / 8;
constexpr int64_t kSize = kKey * kKey;

struct LinkShared {
  uint32_t high[kRows][kKey + 4], low[kRows][kKey + 4];  // rows 4 banks apart
};

__global__ void __launch_bounds__(256) link_kernel(const LinkArguments in) {
  __shared__ LinkShared shared;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int64_t head = blockIdx.x;
  const int row = blockIdx.y * kRows, column = 16 * warp + 2 * t;
  const float *summary = in.summary + head * in.segments * 2 * kSize;
  float *out = in.start_state + head * in.segments * kSize + row * kKey;
  launch_next();

  // Element e of tile n of a thread: row g + 8 (e / 2), column 16 warp + 8 n + 2 t + e % 2.
  float state[2][4];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = row + g + i % 4 / 2 * 8, c = column + i / 4 * 8 + i % 2;
    const bool here = in.initial_state && r < in.values && c < in.keys;
    const float *from = in.initial_state + head * in.keys * in.values;
    state[i / 4][i % 4] = here ? from[r * in.state_value + c * in.state_key] : 0.0f;
  }
  launch_wait();
  const float *pi = summary + kSize + warp * (kSteps * 128) + lane * 4;
  const auto load_words = [](float(&to)[4], const float *from) {
    const float4 four = *reinterpret_cast<const float4 *>(from);
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  };
  float words[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) load_words(words[step], pi + step * 128);
  float2 written[4];
  const auto load_written = [&](int segment) {
    const float *h = summary + segment * 2 * kSize + row * kKey;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      written[i] = *reinterpret_cast<const float2 *>(h + (g + i % 2 * 8) * kKey + column + i / 2 * 8);
    }
  };
  load_written(0);
  for (int segment = 0; segment < in.segments; ++segment) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = g + i % 2 * 8, c = column + i / 2 * 8;
      const float2 pair = make_float2(state[i / 2][i % 2 * 2], state[i / 2][i % 2 * 2 + 1]);
      *reinterpret_cast<float2 *>(out + segment * kSize + r * kKey + c) = pair;
      cuda::split_tf32(pair.x, shared.high[r][c], shared.low[r][c]);
      cuda::split_tf32(pair.y, shared.high[r][c + 1], shared.low[r][c + 1]);
    }
    if (segment + 1 == in.segments) break;
    float small[2][4] = {}, mixed[2][4] = {};  // three sums, so that products do not wait for each other
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      state[i / 2][i % 2 * 2] = written[i].x, state[i / 2][i % 2 * 2 + 1] = written[i].y;
    }
    const bool more = segment + 2 < in.segments;
    if (more) load_written(segment + 1);
    const float *after = pi + (segment + 1) * 2 * kSize;
    __syncthreads();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      uint32_t high[4], low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        high[e] = shared.high[g + e % 2 * 8][8 * step + t + e / 2 * 4];
        low[e] = shared.low[g + e % 2 * 8][8 * step + t + e / 2 * 4];
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        uint32_t high0, low0, high1, low1;
        cuda::split_tf32(words[step][2 * n], high0, low0);
        cuda::split_tf32(words[step][2 * n + 1], high1, low1);
        cuda::multiply_tf32(small[n], low, high0, high1);
        cuda::multiply_tf32(mixed[n], high, low0, low1);
        cuda::multiply_tf32(state[n], high, high0, high1);
      }
      if (more) load_words(words[step], after + step * 128);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) state[i / 4][i % 4] += small[i / 4][i % 4] + mixed[i / 4][i % 4];
    __syncthreads();
  }
}

}  // namespace

cudaError_t launch_link(const LinkArguments &in, cudaStream_t stream) {
  return cuda::launch({dim3(in.heads, kKey / kRows), 256, 0, stream, 1, true}, link_kernel, in);
}

}  // namespace fw::sm90
