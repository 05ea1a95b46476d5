// SPDX-License-Identifier: Apache-2.0
// The gradients of the rows of a chunk of 16, all chunks at once, from its states: of S at its start and of dS at its end.
//
// Plan: a block of 256 threads a (slot, value head), in this order:
//   keys and decays are packed to shared memory as fp32 rows, d_o beside them, u, z and their gradients come by cp.async;
//   products in tf32 with the states, which go from global memory to registers, each element once, a warp K / 8 channels:
//     d_reads_q = scale d_o S,  d_reads_x = d_z S,  d_k = u dS,  d_b = z dS   [16][K];  d_total = sum_v S dS in fp32;
//     and of the scores, a warp 8 columns of one: d_qk = scale d_o u^T,  d_qb = scale d_o z^T,  d_xk = d_z u^T,  d_xb = d_z z^T;
//   one thread a channel brings them to q, k, x, b and g, rows of a chunk in registers; the other warps meanwhile write dv.
// Shared memory: packed rows, at most 5 arrays of 8 KB at K = 128, and the values' rows, over which the products' sums are written:
// 79 KB at most. Barriers: before the products, after them, when their sums are there, and for the sum of a scalar gate.
#include "cuda/launch.cuh"
#include "cuda/tf32.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_chunk.cuh"
#include "ops/recurrence/cuda_row_gradients.cuh"

namespace fw::recurrence {
namespace {

constexpr int kStepsTogether = 4;  // of 8 columns of V, whose states are loaded together

template <fw_erase kErase>
constexpr int kWritten = kErase == FW_ERASE_INDEPENDENT ? 2 : 1;  // keys that rows write along
template <fw_erase kErase>
constexpr int kRead = kErase == FW_ERASE_NONE ? 1 : 2;  // rows that read the state

struct GradientShared {
  PackedRows rows;                           // without u
  float *d_o, *d_z, *u, *z;                  // [16][width + 8]; with a shared erase key d_z is d_u, to be negated
  float *d_reads_q, *d_reads_x, *d_k, *d_b;  // [16][keys], over them
  float *d_qk, *d_qb, *d_xk, *d_xb;          // [16][16]
  float *d_total;                            // [keys]

  template <fw_gate kGate, fw_erase kErase>
  FW_HOST_DEVICE static int32_t values_at(int32_t keys) {
    return (2 + (kErase != FW_ERASE_NONE) + (kErase == FW_ERASE_INDEPENDENT) + (kGate != FW_GATE_NONE)) * kChunkRows * keys;
  }
  template <fw_gate kGate, fw_erase kErase>
  FW_HOST_DEVICE static int32_t floats(int32_t keys, int32_t width) {
    const int32_t larger = keys > width + 8 ? keys : width + 8;
    return values_at<kGate, kErase>(keys) + (kRead<kErase> + kWritten<kErase>) * kChunkRows * larger + 4 * kChunkScores + keys;
  }
  template <fw_gate kGate, fw_erase kErase>
  __device__ void lay_out(int32_t keys, int32_t width, float *memory) {
    const Panels l = {width / kColumnsOwned, 1, kChunkRows, keys};
    rows.lay_out<kGate, kErase>(l, memory);
    float *next = memory + values_at<kGate, kErase>(keys);
    const int32_t values = kChunkRows * (width + 8), sums = kChunkRows * keys;
    d_o = next, u = d_o + values, d_z = u + values, z = d_z + values;
    d_reads_q = next, d_k = d_reads_q + sums, d_reads_x = d_k + sums, d_b = d_reads_x + sums;
    d_total = memory + floats<kGate, kErase>(keys, width) - keys;
    d_xb = d_total - kChunkScores, d_xk = d_xb - kChunkScores, d_qb = d_xk - kChunkScores, d_qk = d_qb - kChunkScores;
  }
};

// Rows from n on: nothing is read, written or decayed there.
template <fw_gate kGate, fw_erase kErase>
__device__ inline void clear_keys(const PackedRows &rows, int pitch, int n) {
  for (int at = n * pitch + threadIdx.x; at < kChunkRows * pitch; at += kThreads) {
    rows.q[at] = rows.k[at] = 0.0f;
    if constexpr (kErase != FW_ERASE_NONE) rows.x[at] = 0.0f;
    if constexpr (kErase == FW_ERASE_INDEPENDENT) rows.b[at] = 0.0f;
    if constexpr (kGate != FW_GATE_NONE) rows.decay[at] = 1.0f;
  }
}

// Rows of 8 columns from column `v`, as the first operand of a product that sums over them.
template <int kParts>
__device__ __forceinline__ cuda::Tf32Rows<kParts> rows_at(const float *values, int pitch, int v) {
  const float *from = values + threadIdx.x % 32 / 4 * pitch + v + 2 * (threadIdx.x % 4);
  const float2 x = *reinterpret_cast<const float2 *>(from), y = *reinterpret_cast<const float2 *>(from + 8 * pitch);
  cuda::Tf32Rows<kParts> a;
  a.set(0, x.x), a.set(1, y.x), a.set(2, x.y), a.set(3, y.y);
  return a;
}

// d += a b with b the rows 8 tile .. 8 tile + 7 of `rows`, transposed.
template <int kParts>
__device__ __forceinline__ void multiply_rows(float (&d)[4], const cuda::Tf32Rows<kParts> &a, const cuda::Tf32Rows<kParts> &rows, int tile) {
  const auto of = [&](int part, int i) { return tile == 0 ? rows.part[part][i] : rows.part[part][i + 1]; };
  if constexpr (kParts == 2) {
    cuda::multiply_tf32(d, a.part[1], of(0, 0), of(0, 2));
    cuda::multiply_tf32(d, a.part[0], of(1, 0), of(1, 2));
  }
  cuda::multiply_tf32(d, a.part[0], of(0, 0), of(0, 2));
}

// The products. Begins after a barrier, ends with one.
template <fw_erase kErase, int kKeys, int kParts>
__device__ __noinline__ void multiply_states(const Problem &p, const GradientShared &s, int width, const float *states, const float *d_states) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  constexpr int kTiles = kKeys / 64;  // of 8 channels, a warp
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, pitch = width + 8;
  const int steps = static_cast<int>((p.V + 15) / 16) * 2, channel = 8 * kTiles * warp + kTiles * g;
  const float *S = states + 2 * t * kKeys + channel, *dS = d_states + 2 * t * kKeys + channel;
  float d_reads_q[kTiles][4] = {}, d_reads_x[kTiles][4] = {}, d_k[kTiles][4] = {}, d_b[kTiles][4] = {}, score[4] = {}, total[kTiles] = {};
  // Which score: rows of d_o or d_z, with u or z, 8 of its columns.
  const bool is_of_x = warp & 1, is_with_z = warp & 2;
#pragma unroll 1
  for (int first = 0; first < steps; first += kStepsTogether) {
    float x[kStepsTogether][2][kTiles], y[kStepsTogether][2][kTiles];
#pragma unroll
    for (int i = 0; i < kStepsTogether; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const int at = (8 * (first + i) + row) * kKeys;
        const bool is_there = first + i < steps;
        if constexpr (kTiles == 2) {
          const float2 zero = make_float2(0, 0);
          const float2 a = is_there ? *reinterpret_cast<const float2 *>(S + at) : zero, b = is_there ? *reinterpret_cast<const float2 *>(dS + at) : zero;
          x[i][row][0] = a.x, x[i][row][kTiles - 1] = a.y, y[i][row][0] = b.x, y[i][row][kTiles - 1] = b.y;
        } else {
          x[i][row][0] = is_there ? S[at] : 0.0f, y[i][row][0] = is_there ? dS[at] : 0.0f;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kStepsTogether; ++i) {
      if (first + i >= steps) break;
      const int v = 8 * (first + i);
      const cuda::Tf32Rows<kParts> a_o = rows_at<kParts>(s.d_o, pitch, v), a_u = rows_at<kParts>(s.u, pitch, v);
      cuda::Tf32Rows<kParts> a_x, a_z;
      if constexpr (kErases) a_x = rows_at<kParts>(s.d_z, pitch, v);
      if constexpr (kIndependent) a_z = rows_at<kParts>(s.z, pitch, v);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        const float x0 = x[i][0][tile], x1 = x[i][1][tile], y0 = y[i][0][tile], y1 = y[i][1][tile];
        cuda::multiply_parts<false>(d_reads_q[tile], a_o, x0, x1);
        cuda::multiply_parts<false>(d_k[tile], a_u, y0, y1);
        if constexpr (kErases) cuda::multiply_parts<false>(d_reads_x[tile], a_x, x0, x1);
        if constexpr (kIndependent) cuda::multiply_parts<false>(d_b[tile], a_z, y0, y1);
        total[tile] = fmaf(x0, y0, fmaf(x1, y1, total[tile]));
      }
      if constexpr (kIndependent) {
        const auto with = [&](const cuda::Tf32Rows<kParts> &a) {
          is_with_z ? multiply_rows(score, a, a_z, warp / 4) : multiply_rows(score, a, a_u, warp / 4);
        };
        is_of_x ? with(a_x) : with(a_o);
      } else if (!is_with_z) {
        if constexpr (kErases) {
          is_of_x ? multiply_rows(score, a_x, a_u, warp / 4) : multiply_rows(score, a_o, a_u, warp / 4);
        } else if (!is_of_x) {
          multiply_rows(score, a_o, a_u, warp / 4);
        }
      }
    }
  }
  __syncthreads();  // the values' rows are read
  const auto store = [&](float *to, const float (&sums)[kTiles][4], float factor) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float *at = to + (g + 8 * half) * kKeys + 8 * kTiles * warp + 2 * kTiles * t;
      if constexpr (kTiles == 2) {
        *reinterpret_cast<float4 *>(at) = make_float4(factor * sums[0][2 * half], factor * sums[kTiles - 1][2 * half], factor * sums[0][2 * half + 1],
                                                      factor * sums[kTiles - 1][2 * half + 1]);
      } else {
        *reinterpret_cast<float2 *>(at) = make_float2(factor * sums[0][2 * half], factor * sums[0][2 * half + 1]);
      }
    }
  };
  constexpr float kSign = kIndependent ? 1.0f : -1.0f;  // of d_z
  store(s.d_reads_q, d_reads_q, p.scale_f32);
  store(s.d_k, d_k, 1.0f);
  if constexpr (kErases) store(s.d_reads_x, d_reads_x, kSign);
  if constexpr (kIndependent) store(s.d_b, d_b, 1.0f);
  if ((!is_of_x || kErases) && (!is_with_z || kIndependent)) {
    float *to = is_of_x ? (is_with_z ? s.d_xb : s.d_xk) : (is_with_z ? s.d_qb : s.d_qk);
    const float factor = is_of_x ? kSign : p.scale_f32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2 *>(to + (g + 8 * half) * kChunkRows + warp / 4 * 8 + 2 * t) = make_float2(factor * score[2 * half], factor * score[2 * half + 1]);
    }
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    for (int offset = 1; offset < 4; offset *= 2) total[tile] += __shfl_xor_sync(0xffffffffu, total[tile], offset);
    if (t == 0) s.d_total[channel + tile] = total[tile];
  }
  __syncthreads();  // all sums are there
}

// From the gradients of scores, reads, ends and of the whole decay to those of q, x, k, b and g; see reverse_channels of cuda_reverse.cu.
// One thread a channel, which holds the rows' keys and decays. d_reads_q keeps a scalar gate's part of a channel.
template <fw_gate kGate, fw_erase kErase>
__device__ __noinline__ void reverse_chunk_channels(const Problem &p, const GradientShared &s, int pitch, int n, int64_t first_out, const RowGradients &out) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  constexpr bool kAfter = kErase == FW_ERASE_SHARED_AFTER, kGated = kGate != FW_GATE_NONE;
  const int d = threadIdx.x;
  float k[kChunkRows], d_k[kChunkRows], b[kChunkRows], d_b[kChunkRows], decay[kChunkRows], run[kChunkRows];
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) {
    const int at = i * pitch + d;
    k[i] = s.rows.k[at], d_k[i] = s.d_k[at];
    if constexpr (kIndependent) b[i] = s.rows.b[at], d_b[i] = s.d_b[at];
    decay[i] = kGated ? s.rows.decay[at] : 1.0f;
    run[i] = !kGated ? 1.0f : i > 0 ? run[i - 1] * decay[i] : decay[0];
  }
  const int64_t stride = p.HV * p.K;
  int64_t to = (first_out + (kChunkRows - 1) * p.HV) * p.K + d;
  float d_run = kGated ? s.d_total[d] : 0.0f;
#pragma unroll
  for (int i = kChunkRows - 1; i >= 0; --i, to -= stride) {
    const int at = i * pitch + d;
    const float q = s.rows.q[at], x = kErases ? s.rows.x[at] : 0.0f, d_read_q = s.d_reads_q[at], d_read_x = kErases ? s.d_reads_x[at] : 0.0f;
    float d_q = run[i] * d_read_q, d_x = kAfter ? run[i] * d_read_x : 0.0f;
    d_run = fmaf(q, d_read_q, d_run);
    if constexpr (kAfter) d_run = fmaf(x, d_read_x, d_run);
    const float own = s.d_qk[i * kChunkRows + i];
    d_q = fmaf(own, k[i], d_q);
    d_k[i] = fmaf(own, q, d_k[i]);
    if constexpr (kIndependent) {
      const float own_b = s.d_qb[i * kChunkRows + i];
      d_q = fmaf(own_b, b[i], d_q);
      d_b[i] = fmaf(own_b, q, d_b[i]);
    }
    float d_g = run[i] * d_run, between = 1.0f;  // between: D_{j+1:i-1}
#pragma unroll
    for (int quad = (i + 3) / 4 - 1; quad >= 0; --quad) {
      const auto load = [&](const float *scores, float (&four)[4]) {
        const float4 x4 = *reinterpret_cast<const float4 *>(scores + i * kChunkRows + 4 * quad);
        four[0] = x4.x, four[1] = x4.y, four[2] = x4.z, four[3] = x4.w;
      };
      float qk[4], qb[4], xk[4] = {}, xb[4];
      load(s.d_qk, qk);
      if constexpr (kErases) load(s.d_xk, xk);
      if constexpr (kIndependent) load(s.d_qb, qb), load(s.d_xb, xb);
#pragma unroll
      for (int r = 3; r >= 0; --r) {
        const int j = 4 * quad + r;
        if (j >= i) continue;
        d_k[j] = reverse_pair<kGate, kErases, kAfter>(kGated ? k[j] * between : k[j], decay[i], q, x, qk[r], xk[r], d_k[j], &d_q, &d_x, &d_g);
        if constexpr (kIndependent) {
          d_b[j] = reverse_pair<kGate, true, false>(kGated ? b[j] * between : b[j], decay[i], q, x, qb[r], xb[r], d_b[j], &d_q, &d_x, &d_g);
        }
        if constexpr (kGated) between *= decay[j];
      }
    }
    d_run *= decay[i];
    if constexpr (kErases && !kAfter) {
      d_run = fmaf(x, d_read_x, d_run);
      d_x = fmaf(i > 0 ? run[i > 0 ? i - 1 : 0] : 1.0f, d_read_x, d_x);
    }
    if constexpr (kGate == FW_GATE_SCALAR) s.d_reads_q[at] = d < p.K ? d_g : 0.0f;
    if (d >= p.K || i >= n) continue;
    out.d_q[to] = d_q;
    out.d_k[to] = d_k[i];  // no row before i adds to it
    if constexpr (kErases) out.d_x[to] = d_x;
    if constexpr (kIndependent) out.d_b[to] = d_b[i];
    if constexpr (kGate == FW_GATE_VECTOR) out.d_g[to] = d_g;
  }
}

template <fw_gate kGate, fw_erase kErase>
__global__ void __launch_bounds__(kThreads, 2)
    chunk_gradients(const __grid_constant__ Problem p, const __grid_constant__ Panels l, const float *divisors, const __grid_constant__ ChunkStates kept,
                    const __grid_constant__ ChunkGradients gradients, bool is_one_part,
                    const __grid_constant__ RowGradients out) {
  constexpr bool kIndependent = kErase == FW_ERASE_INDEPENDENT;
  const uint32_t heads = static_cast<uint32_t>(p.HV), local = blockIdx.x / heads, hv = blockIdx.x - local * heads;
  const int64_t slot = slot_of(p, kept.range, local), head = static_cast<int64_t>(local) * p.HV + hv;
  const ChunkPlace place = find_chunk(p, slot);
  const int n = place.rows, width = l.width();
  if (n <= 0) return;
  GradientShared s;
  s.lay_out<kGate, kErase>(l.pitch, width, cuda::dynamic_shared<float>());
  const int64_t rows_at = head * kChunkRows * width;
  const auto copy = [&](float *to, const float *from) {
    if (width == 64) {
      copy_image<64, kThreads>(to, 64 + 8, from + rows_at, 64);
    } else {
      copy_image<128, kThreads>(to, 128 + 8, from + rows_at, 128);
    }
  };
  copy(s.u, kept.u);
  if constexpr (kErase != FW_ERASE_NONE) copy(s.d_z, kIndependent ? gradients.d_z : gradients.d_u);
  if constexpr (kIndependent) copy(s.z, kept.z);
  cuda::copy_commit();
  const RowRange r = {place.batch, place.first, hv, hv / static_cast<uint32_t>(p.group()), n};
  pack_keys<kGate, kErase>(p, l, r, s.rows);
  clear_keys<kGate, kErase>(s.rows, l.pitch, n);
  load_d_o(p, l, r, 0, divisors, 1.0f, s.d_o, width + 8);
  for (int at = n * (width + 8) + threadIdx.x; at < kChunkRows * (width + 8); at += kThreads) s.d_o[at] = 0.0f;
  cuda::copy_wait<0>();
  __syncthreads();  // rows of keys and values are there
  const int64_t states_at = head * width * l.pitch;
  const float *states = kept.states + states_at, *d_states = gradients.states + states_at;
  if (l.pitch == 64) {
    is_one_part ? multiply_states<kErase, 64, 1>(p, s, width, states, d_states) : multiply_states<kErase, 64, 2>(p, s, width, states, d_states);
  } else {
    is_one_part ? multiply_states<kErase, 128, 1>(p, s, width, states, d_states) : multiply_states<kErase, 128, 2>(p, s, width, states, d_states);
  }
  const int64_t first_out = (r.batch * p.R + r.first) * p.HV + hv;
  const int warp = threadIdx.x / 32, of_channels = l.pitch / 32;
  if (warp < of_channels) {
    reverse_chunk_channels<kGate, kErase>(p, s, l.pitch, n, first_out, out);
  } else {
    store_values<kErase>(p, l, r, 0, gradients.d_u + rows_at, width, warp - of_channels, kWarps - of_channels, first_out, out);
  }
  if constexpr (kGate == FW_GATE_SCALAR) {
    __syncthreads();  // every channel's part is there
    for (int i = warp; i < n; i += kWarps) {
      float sum = 0;
      for (int d = threadIdx.x % 32; d < l.pitch; d += 32) sum += s.d_reads_q[i * l.pitch + d];
      sum = cuda::warp_sum(sum);
      if (threadIdx.x % 32 == 0) out.d_g[first_out + i * p.HV] = sum;
    }
  }
}

struct SharedBytes {
  template <fw_gate kGate, fw_erase kErase>
  static int32_t run(const ChunkImages &images) {
    return 4 * GradientShared::floats<kGate, kErase>(images.keys, images.width);
  }
};

struct Launch {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p, const ChunkImages &images, const float *divisors, const ChunkStates &kept,
                  const ChunkGradients &gradients, const RowGradients &out) {
    const Panels l = {images.width / kColumnsOwned, 1, kChunkRows, images.keys};
    const uint32_t blocks = static_cast<uint32_t>(range_slots(p, kept.range) * p.HV);
    const int32_t bytes = SharedBytes::run<kGate, kErase>(images);
    cuda::launch({blocks, kThreads, bytes, static_cast<cudaStream_t>(p.stream)}, chunk_gradients<kGate, kErase>, p, l, divisors, kept, gradients,
                 chunk_parts(p) == 1, out);
  }
};

}  // namespace

int32_t chunk_gradients_shared_bytes(const Problem &p) { return dispatch_axes<SharedBytes>(p, plan_chunk_images(p, nullptr, true)); }

void launch_chunk_gradients(const Problem &p, const ChunkImages &images, const float *divisors, const ChunkStates &kept,
                            const ChunkGradients &gradients, const RowGradients &out) {
  if (range_slots(p, kept.range) > 0) dispatch_axes<Launch>(p, p, images, divisors, kept, gradients, out);
}

}  // namespace fw::recurrence
