// SPDX-License-Identifier: Apache-2.0
// Vector log gates of logits, [B, T, HV, K], to fp32 in the workspace, before prep.
// A pass of its own: 768 bytes a token and head and 512 for prep to read in the place of 256, a quarter of what prep moves;
// inside prep, which waits for instructions more than for memory, it would be about 4000 of a warp a chunk on top of 18000.
// Grid (B ceil(T / 64), HV), 256 threads: a warp has 8 tokens of a head, a thread 4 keys of each, all loads before the first
// use. Formulas in fp32 (cuda/activation.cuh).
#include "cuda/launch.cuh"
#include "ops/recurrence/sm90_operands.cuh"

namespace fw::sm90 {
namespace {

constexpr int kWarps = 8, kRows = kChunk / kWarps;

__global__ void __launch_bounds__(32 * kWarps) gate_kernel(const __grid_constant__ PrepArguments in, float *out) {
  const int key = threadIdx.x % 32 * 4, hv = blockIdx.y, chunks = in.shape.dense_chunks;
  const int batch = blockIdx.x / chunks, first = blockIdx.x % chunks * kChunk + threadIdx.x / 32 * kRows;
  if (key >= in.shape.K) return;
  const Sm90Strides &s = in.g_strides;
  const int64_t at = batch * s.batch + hv * s.head + key;
  float x[kRows][4];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {  // rows past the end read the last one
    const int64_t row = at + min(first + r, in.shape.T - 1) * s.token;
#pragma unroll
    for (int e = 0; e < 4; e += 2) {
      if (in.g_type == Sm90Real::kFloat32) {
        const float2 pair = *reinterpret_cast<const float2 *>(static_cast<const float *>(in.g) + row + e);
        x[r][e] = pair.x, x[r][e + 1] = pair.y;
      } else {
        const uint32_t pair = *reinterpret_cast<const uint32_t *>(static_cast<const uint16_t *>(in.g) + row + e);
        x[r][e] = low_bf16(pair), x[r][e + 1] = high_bf16(pair);
      }
    }
  }
  if (in.activations.gate_kind != FW_GATE_INPUT_LOG_DECAY) {
    const float rate = expf(a_log_of(in.activations, hv));
    float bias[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) bias[e] = dt_bias_of(in.activations, hv, key + e);
    cuda::for_gate_kind(gate_settings(in.activations), [&](const cuda::GateSettings &settings) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[r][e] = cuda::activate_gate_at<float>(settings, x[r][e], rate, bias[e]);
      }
    });
  }
  float *to = out + ((static_cast<int64_t>(batch) * in.shape.T + first) * in.shape.HV + hv) * in.shape.K + key;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first + r < in.shape.T) {
      *reinterpret_cast<float4 *>(to + int64_t{r} * in.shape.HV * in.shape.K) = make_float4(x[r][0], x[r][1], x[r][2], x[r][3]);
    }
  }
}

}  // namespace

cudaError_t launch_gate(const PrepArguments &in, float *out, cudaStream_t stream) {
  return cuda::launch({dim3(in.shape.B * in.shape.dense_chunks, in.shape.HV), 32 * kWarps, 0, stream}, gate_kernel, in, out);
}

}  // namespace fw::sm90
