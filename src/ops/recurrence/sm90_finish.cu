// SPDX-License-Identifier: Apache-2.0
// The backward's end where gates or beta were made of logits (a vector gate's go through the activation in
// sm90_gradients_vector.cu): per-token gradients of log gates and beta through their activations, and the sums for a_log and
// dt_bias, always in the same order. Formulas: cuda/activation.cuh, in fp32.
//   finish_tokens: grid (slots, ceil(HV / 32)), 256 threads: a lane a head, a warp eight rows of the slot; sums of a slot by way
//                  of shared memory, 2 KB, to gate_sums.
//   sum_slots:     grid (HV, ceil(columns / 32)), 1024 threads: a lane a column of gate_sums, a warp every 32nd slot; slots without
//                  rows, whose sums nobody wrote, are passed over.
// 8 bytes a token and head read, 4 written: no more than the launches cost.
#include "cuda/launch.cuh"
#include "ops/recurrence/sm90_gradients.cuh"
#include "ops/recurrence/sm90_operands.cuh"

namespace fw::sm90 {
namespace {

constexpr int kWarps = 8, kRows = kChunk / kWarps, kParts = 32;

__global__ void __launch_bounds__(32 * kWarps) finish_tokens(const __grid_constant__ FinishArguments in) {
  __shared__ float2 sums[kWarps][32];
  const int slot = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32, hv = blockIdx.y * 32 + lane;
  const Chunk chunk = chunk_of(in.shape, slot);
  if (chunk.rows == 0) return;
  const Sm90Activations &act = in.activations;
  float2 sum = make_float2(0.0f, 0.0f);
  if (hv < in.shape.HV) {
    const float rate = expf(a_log_of(act, hv)), bias = in.dg ? dt_bias_of(act, hv, 0) : 0.0f;
#pragma unroll 2
    for (int row = warp * kRows; row < min((warp + 1) * kRows, chunk.rows); ++row) {
      const int64_t token = chunk.start + row, at = (chunk.batch * static_cast<int64_t>(in.shape.T) + token) * in.shape.HV + hv;
      const auto place = [&](const Sm90Strides &s) { return chunk.batch * s.batch + token * s.token + hv * s.head; };
      if (in.dg) {
        const float x = load_real(in.g, in.g_type, place(in.g_strides));
        const cuda::GateGradient d = cuda::activate_gate_gradient_at<float>(gate_settings(act), x, rate, bias, in.dg[at]);
        sum.x += d.da_log, sum.y += d.dx;
        if (in.to_g) store_real(in.to_g, in.g_type, place(in.to_g_strides), d.dx);
      }
      if (in.dbeta) {
        const float x = load_real(in.beta, in.beta_type, place(in.beta_strides));
        const cuda::GateGradient d = cuda::activate_gate_gradient_at<float>(beta_settings(act), x, 1.0f, 0.0f, in.dbeta[at]);
        store_real(in.to_beta, in.beta_type, place(in.to_beta_strides), d.dx);
      }
    }
  }
  if (!in.dg || !in.gate_sums) return;
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || hv >= in.shape.HV) return;
  for (int w = 1; w < kWarps; ++w) sum.x += sums[w][lane].x, sum.y += sums[w][lane].y;
  float *to = in.gate_sums + (static_cast<int64_t>(slot) * in.shape.HV + hv) * 2;
  to[0] = sum.x, to[1] = sum.y;
}

__global__ void __launch_bounds__(32 * kParts) sum_slots(const __grid_constant__ FinishArguments in) {
  __shared__ float sums[kParts][32];
  const int hv = blockIdx.x, lane = threadIdx.x % 32, part = threadIdx.x / 32, column = blockIdx.y * 32 + lane;
  float sum = 0.0f;
  if (column < in.width) {
#pragma unroll 4
    for (int slot = part; slot < in.shape.slots; slot += kParts) {
      if (in.shape.cu_seqlens && chunk_of(in.shape, slot).rows == 0) continue;
      sum += in.gate_sums[(static_cast<int64_t>(slot) * in.shape.HV + hv) * in.width + column];
    }
  }
  sums[part][lane] = sum;
  __syncthreads();
  if (part > 0 || column >= in.width) return;
  for (int p = 1; p < kParts; ++p) sum += sums[p][lane];
  if (column == 0) {
    if (in.d_a_log) in.d_a_log[hv * in.d_a_log_head] = sum;
  } else if (in.d_dt_bias) {
    in.d_dt_bias[hv * in.d_dt_bias_head + (column - 1) * in.d_dt_bias_key] = sum;
  }
}

}  // namespace

cudaError_t launch_finish(const FinishArguments &in, cudaStream_t stream) {
  const unsigned heads = static_cast<unsigned>(in.shape.HV);
  if (in.dg || in.dbeta) {
    const dim3 grid(static_cast<unsigned>(in.shape.slots), (heads + 31) / 32);
    const cudaError_t status = cuda::launch({grid, 32 * kWarps, 0, stream}, finish_tokens, in);
    if (status != cudaSuccess) return status;
  }
  if (!in.gate_sums) return cudaSuccess;
  return cuda::launch({dim3(heads, static_cast<unsigned>(in.width + 31) / 32), 32 * kParts, 0, stream}, sum_slots, in);
}

}  // namespace fw::sm90
