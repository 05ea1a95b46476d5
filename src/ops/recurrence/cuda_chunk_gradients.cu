// SPDX-License-Identifier: Apache-2.0
// The gradients of the rows of a chunk of 16, all chunks at once, from its states: of S at its start and of dS at its end.
//
// Plan: a block of 256 threads a (slot, value head), in this order:
//   d_o, u, z and their gradients come by cp.async; keys and decays are packed to shared memory as fp32 rows, 16 threads a row, which
//   have a row of v too and write dv;
//   products in tf32 with the states, which go from global memory to registers, each element once, a warp K / 8 channels:
//     d_reads_q = scale d_o S,  d_reads_x = d_z S,  d_k = u dS,  d_b = z dS   [16][K];  d_total = sum_v S dS in fp32;
//     and of the scores, a warp 8 columns of one: d_qk = scale d_o u^T,  d_qb = scale d_o z^T,  d_xk = d_z u^T,  d_xb = d_z z^T;
//   one thread a channel brings them to q, k, x, b and g, rows of a chunk in registers.
// Shared memory: packed rows, at most 5 arrays of 8 KB at K = 128, and the values' rows, over which the products' sums are written:
// 79 KB at most. Barriers: before the products, after them, when their sums are there, and for the sum of a scalar gate.
#include "cuda/launch.cuh"
#include "cuda/tf32.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_chunk_rows.cuh"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_row_gradients.cuh"

namespace fw::recurrence {
namespace {

constexpr int kStepsTogether = 2;  // of 8 columns of V, whose states are loaded together, while those before are multiplied

template <fw_erase kErase>
constexpr int kWritten = kErase == FW_ERASE_INDEPENDENT ? 2 : 1;  // keys that rows write along
template <fw_erase kErase>
constexpr int kRead = kErase == FW_ERASE_NONE ? 1 : 2;  // rows that read the state

template <fw_gate kGate, fw_erase kErase, int kKeys>
struct GradientShared {
  static constexpr int kArray = kChunkRows * kKeys, kDecay = kGate == FW_GATE_VECTOR ? kArray : kGate == FW_GATE_SCALAR ? kChunkRows : 0;
  static constexpr int kKeyRows = 2 + (kErase != FW_ERASE_NONE) + (kErase == FW_ERASE_INDEPENDENT);
  static constexpr int kSums = kRead<kErase> + kWritten<kErase>;
  static constexpr int kFixed = kKeyRows * kArray + kDecay + 4 * kChunkScores + kKeys;  // floats before the values' rows

  float *q, *k, *x, *b;                      // [16][keys]
  float *decay;                              // [16], or [16][keys]
  float *d_qk, *d_qb, *d_xk, *d_xb;          // [16][16]
  float *d_total;                            // [keys]
  float *d_o, *u, *d_z, *z;                  // [16][width + 8]; with a shared erase key d_z is d_u, to be negated
  float *d_reads_q, *d_k, *d_reads_x, *d_b;  // [16][keys], over them

  static int32_t floats(int32_t width) { return kFixed + kSums * kChunkRows * (kKeys > width + 8 ? kKeys : width + 8); }
  __device__ __forceinline__ GradientShared(int width, float *memory) {
    q = memory, k = q + kArray, x = k + kArray, b = x + kArray, decay = q + kKeyRows * kArray;
    d_qk = decay + kDecay, d_qb = d_qk + kChunkScores, d_xk = d_qb + kChunkScores, d_xb = d_xk + kChunkScores, d_total = d_xb + kChunkScores;
    const int values = kChunkRows * (width + 8);
    d_o = memory + kFixed, u = d_o + values, d_z = u + values, z = d_z + values;
    d_reads_q = memory + kFixed, d_k = d_reads_q + kArray, d_reads_x = d_k + kArray, d_b = d_reads_x + kArray;
  }
};

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

// The products. Begins with copies of the values' rows under way, ends with a barrier.
template <fw_gate kGate, fw_erase kErase, int kKeys, int kParts>
__device__ __noinline__ void multiply_states(int V, float scale, int width, const float *states, const float *d_states) {
  const GradientShared<kGate, kErase, kKeys> s(width, cuda::dynamic_shared<float>());  // made here: pointers that come are not known to be to it
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  constexpr int kTiles = kKeys / 64;  // of 8 channels, a warp
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, pitch = width + 8;
  const int steps = (V + 15) / 16 * 2, channel = 8 * kTiles * warp + kTiles * g;
  const float *S = states + 2 * t * kKeys + channel, *dS = d_states + 2 * t * kKeys + channel;
  float d_reads_q[kTiles][4] = {}, d_reads_x[kTiles][4] = {}, d_k[kTiles][4] = {}, d_b[kTiles][4] = {}, score[4] = {}, total[kTiles] = {};
  // Which score: rows of d_o or d_z, with u or z, 8 of its columns.
  const bool is_of_x = warp & 1, is_with_z = warp & 2;
  using Part = float[kStepsTogether][2][kTiles];
  const auto load = [&](const float *from, Part &to) {
#pragma unroll
    for (int i = 0; i < kStepsTogether; ++i) {
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        const float *at = from + (8 * i + row) * kKeys;
        if constexpr (kTiles == 2) {
          const float2 pair = *reinterpret_cast<const float2 *>(at);
          to[i][row][0] = pair.x, to[i][row][kTiles - 1] = pair.y;
        } else {
          to[i][row][0] = *at;
        }
      }
    }
  };
  const auto multiply = [&](int first, const Part &x, const Part &y) {
#pragma unroll
    for (int i = 0; i < kStepsTogether; ++i) {
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
        if constexpr (kGate != FW_GATE_NONE) total[tile] = fmaf(x0, y0, fmaf(x1, y1, total[tile]));
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
  };
  Part x, y, next_x, next_y;
  load(S, x), load(dS, y);
  cuda::copy_wait<0>();
  __syncthreads();  // rows of keys and values are there
#pragma unroll 1
  for (int first = 0; first < steps; first += 2 * kStepsTogether) {
    const float *const from = S + 8 * (first + kStepsTogether) * kKeys, *const d_from = dS + 8 * (first + kStepsTogether) * kKeys;
    const bool has_next = first + kStepsTogether < steps, has_third = first + 2 * kStepsTogether < steps;
    if (has_next) load(from, next_x), load(d_from, next_y);
    multiply(first, x, y);
    if (has_third) load(from + 8 * kStepsTogether * kKeys, x), load(d_from + 8 * kStepsTogether * kKeys, y);
    if (has_next) multiply(first + kStepsTogether, next_x, next_y);
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
  store(s.d_reads_q, d_reads_q, scale);
  store(s.d_k, d_k, 1.0f);
  if constexpr (kErases) store(s.d_reads_x, d_reads_x, kSign);
  if constexpr (kIndependent) store(s.d_b, d_b, 1.0f);
  if ((!is_of_x || kErases) && (!is_with_z || kIndependent)) {
    float *to = is_of_x ? (is_with_z ? s.d_xb : s.d_xk) : (is_with_z ? s.d_qb : s.d_qk);
    const float factor = is_of_x ? kSign : scale;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<float2 *>(to + (g + 8 * half) * kChunkRows + warp / 4 * 8 + 2 * t) = make_float2(factor * score[2 * half], factor * score[2 * half + 1]);
    }
  }
#pragma unroll
  for (int tile = 0; kGate != FW_GATE_NONE && tile < kTiles; ++tile) {
    for (int offset = 1; offset < 4; offset *= 2) total[tile] += __shfl_xor_sync(0xffffffffu, total[tile], offset);
    if (t == 0) s.d_total[channel + tile] = total[tile];
  }
  __syncthreads();  // all sums are there
}

// From the gradients of scores, reads, ends and of the whole decay to those of q, x, k, b and g; see reverse_channels of cuda_reverse.cu.
// One thread a channel, which holds the rows' keys and decays. d_reads_q keeps a scalar gate's part of a channel. out_*: of the first row.
template <fw_gate kGate, fw_erase kErase, int kKeys>
__device__ __noinline__ void reverse_chunk_channels(int width, int K, int64_t stride, int n, float *out_q, float *out_k, float *out_x, float *out_b,
                                                    float *out_g) {
  const GradientShared<kGate, kErase, kKeys> s(width, cuda::dynamic_shared<float>());
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  constexpr bool kAfter = kErase == FW_ERASE_SHARED_AFTER, kGated = kGate != FW_GATE_NONE;
  const int d = threadIdx.x;
  float k[kChunkRows], d_k[kChunkRows], b[kChunkRows], d_b[kChunkRows], decay[kChunkRows], run[kChunkRows];
#pragma unroll
  for (int i = 0; i < kChunkRows; ++i) {
    const int at = i * kKeys + d;
    k[i] = s.k[at], d_k[i] = s.d_k[at];
    if constexpr (kIndependent) b[i] = s.b[at], d_b[i] = s.d_b[at];
    decay[i] = !kGated ? 1.0f : s.decay[kGate == FW_GATE_VECTOR ? at : i];
    run[i] = !kGated ? 1.0f : i > 0 ? run[i - 1] * decay[i] : decay[0];
  }
  int64_t to = (kChunkRows - 1) * stride + d;
  float d_run = kGated ? s.d_total[d] : 0.0f;
#pragma unroll
  for (int i = kChunkRows - 1; i >= 0; --i, to -= stride) {
    const int at = i * kKeys + d;
    const float q = s.q[at], x = kErases ? s.x[at] : 0.0f, d_read_q = s.d_reads_q[at], d_read_x = kErases ? s.d_reads_x[at] : 0.0f;
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
    if constexpr (kGate == FW_GATE_SCALAR) s.d_reads_q[at] = d < K ? d_g : 0.0f;
    if (d < K && i < n) {
      out_q[to] = d_q;
      out_k[to] = d_k[i];  // no row before i adds to it
      if constexpr (kErases) out_x[to] = d_x;
      if constexpr (kIndependent) out_b[to] = d_b[i];
      if constexpr (kGate == FW_GATE_VECTOR) out_g[to] = d_g;
    }
  }
}

// What a thread has of a row of v: dv, d_write_gate, and what v' gives of dbeta.
template <fw_gate kGate, fw_erase kErase, int kKeys>
__device__ __forceinline__ void store_value_row(const ChunkRows<kGate, kErase, kKeys> &rows, const typename ChunkRows<kGate, kErase, kKeys>::Bits &bits,
                                                int i, const Quad (&d_u)[2], int64_t first_out, const RowGradients &out) {
  const Problem &p = rows.p;
  const int64_t row = rows.place.first + i, to = head_offset(p.dv, rows.place.batch, row, rows.hv);
  const int64_t to_gate = head_offset(p.d_write_gate, rows.place.batch, bits.at.token, rows.hv);
  const bool stores = bits.is_there && given(p.dv), stores_gate = bits.is_there && rows.has_write_gate() && given(p.d_write_gate);
  float sum = 0;
#pragma unroll
  for (int quad = 0; quad < 2; ++quad) {
    const int column = 4 * (threadIdx.x % kGroups + kGroups * quad);
    const Quad v = rows.value(bits, quad), gate = rows.write_gate(bits, quad);
    float d_v[4], d_gate[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      sum = fmaf(d_u[quad].x[e], v.x[e] * gate.x[e], sum);
      d_v[e] = d_u[quad].x[e] * bits.beta * gate.x[e], d_gate[e] = d_u[quad].x[e] * bits.beta * v.x[e];
    }
    if (column >= p.V) continue;
    if (stores) cuda::store_quad(cuda::row_at(p.dv, to, p.dv.strides[3]), column, p.V, d_v);
    if (stores_gate) cuda::store_quad(cuda::row_at(p.d_write_gate, to_gate, p.d_write_gate.strides[3]), column, p.V, d_gate);
  }
  if (!out.d_beta) return;
  for (int offset = kGroups / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % kGroups == 0 && bits.is_there) out.d_beta[first_out + i * p.HV] = sum;
}

template <fw_gate kGate, fw_erase kErase, int kKeys>
__global__ void __launch_bounds__(kThreads, 2)
    chunk_gradients(const __grid_constant__ Problem p, int width, bool is_dense, bool is_one_part, const __grid_constant__ ChunkStates kept,
                    const __grid_constant__ ChunkGradients gradients, const __grid_constant__ RowGradients out) {
  constexpr bool kIndependent = kErase == FW_ERASE_INDEPENDENT;
  const uint32_t heads = static_cast<uint32_t>(p.HV), local = blockIdx.x / heads, hv = blockIdx.x - local * heads;
  const int64_t slot = slot_of(p, kept.range, local), head = static_cast<int64_t>(local) * p.HV + hv;
  const ChunkPlace place = find_chunk(p, slot);
  const int n = place.rows;
  if (n <= 0) return;
  const GradientShared<kGate, kErase, kKeys> s(width, cuda::dynamic_shared<float>());
  const int64_t values_at = head * kChunkRows * width, states_at = head * width * kKeys;
  const auto copy = [&](float *to, const float *from) {
    if (width == 64) {
      copy_image<kThreads, 64>(to, 64 + 8, from + values_at, 64);
    } else {
      copy_image<kThreads, 128>(to, 128 + 8, from + values_at, 128);
    }
  };
  copy(s.d_o, gradients.d_o);
  copy(s.u, kept.u);
  if constexpr (kErase != FW_ERASE_NONE) copy(s.d_z, kIndependent ? gradients.d_z : gradients.d_u);
  if constexpr (kIndependent) copy(s.z, kept.z);
  cuda::copy_commit();
  const int64_t first_out = (place.batch * p.R + place.first) * p.HV + hv;
  {
    const ChunkRows<kGate, kErase, kKeys> rows = {p, place, hv, hv / static_cast<uint32_t>(p.group()), is_dense};
    typename ChunkRows<kGate, kErase, kKeys>::Bits bits;
    const int i = threadIdx.x / kGroups;
    rows.load(i, bits);
    Quad d_u[2] = {};
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const int column = 4 * (threadIdx.x % kGroups + kGroups * quad);
      if (column < p.V) d_u[quad] = read_quad(gradients.d_u + values_at + i * width + column);
    }
    rows.keep_keys(bits, i, s.q, s.k, s.x, s.b, s.decay);
    store_value_row(rows, bits, i, d_u, first_out, out);
  }
  if (is_one_part) {
    multiply_states<kGate, kErase, kKeys, 1>(static_cast<int>(p.V), p.scale_f32, width, kept.states + states_at, gradients.states + states_at);
  } else {
    multiply_states<kGate, kErase, kKeys, 2>(static_cast<int>(p.V), p.scale_f32, width, kept.states + states_at, gradients.states + states_at);
  }
  if (threadIdx.x < kKeys) {
    const int64_t first = first_out * p.K;
    reverse_chunk_channels<kGate, kErase, kKeys>(width, static_cast<int>(p.K), p.HV * p.K, n, out.d_q + first, out.d_k + first,
                                                 kErase != FW_ERASE_NONE ? out.d_x + first : nullptr, kIndependent ? out.d_b + first : nullptr,
                                                 kGate == FW_GATE_VECTOR ? out.d_g + first : nullptr);
  }
  if constexpr (kGate == FW_GATE_SCALAR) {
    __syncthreads();  // every channel's part is there
    for (int i = threadIdx.x / 32; i < n; i += kWarps) {
      float sum = 0;
      for (int d = threadIdx.x % 32; d < kKeys; d += 32) sum += s.d_reads_q[i * kKeys + d];
      sum = cuda::warp_sum(sum);
      if (threadIdx.x % 32 == 0) out.d_g[first_out + i * p.HV] = sum;
    }
  }
}

// d_o of the range's chunks, a thread a quad.
__global__ void __launch_bounds__(kThreads) load_outputs(const __grid_constant__ Problem p, int width, const float *divisors,
                                                         const __grid_constant__ ChunkRange range, float *to) {
  const uint32_t heads = static_cast<uint32_t>(p.HV), local = blockIdx.x / heads, hv = blockIdx.x - local * heads;
  const ChunkPlace place = find_chunk(p, slot_of(p, range, local));
  if (place.rows <= 0) return;
  const int quads = width / 4;
  for (int at = threadIdx.x; at < kChunkRows * quads; at += kThreads) {
    const int i = at / quads, column = at % quads * 4;
    const TokenPlace token = place_of(p, place.first + i);
    float x[4] = {};
    if (i < place.rows && token.sub == p.n_sub - 1 && given(p.d_o) && column < p.V) {
      cuda::load_quad(cuda::row_at(p.d_o, head_offset(p.d_o, place.batch, token.token, hv), p.d_o.strides[3]), column, p.V, x);
      if (divisors) {
        const float divisor = divisors[(place.batch * p.T + token.token) * p.H + hv / static_cast<uint32_t>(p.group())];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] /= divisor;
      }
    }
    reinterpret_cast<float4 *>(to + (static_cast<int64_t>(local) * p.HV + hv) * kChunkRows * width)[at] = make_float4(x[0], x[1], x[2], x[3]);
  }
}

template <int kKeys>
struct SharedBytes {
  template <fw_gate kGate, fw_erase kErase>
  static int32_t run(const ChunkImages &images) {
    return 4 * GradientShared<kGate, kErase, kKeys>::floats(images.width);
  }
};

template <int kKeys>
struct Launch {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p, const ChunkImages &images, const ChunkStates &kept, const ChunkGradients &gradients, const RowGradients &out) {
    const uint32_t blocks = static_cast<uint32_t>(range_slots(p, kept.range) * p.HV);
    const int32_t bytes = 4 * GradientShared<kGate, kErase, kKeys>::floats(images.width);
    cuda::launch({blocks, kThreads, bytes, static_cast<cudaStream_t>(p.stream)}, chunk_gradients<kGate, kErase, kKeys>, p, images.width,
                 has_dense_rows(p), chunk_parts(p) == 1, kept, gradients, out);
  }
};

}  // namespace

int32_t chunk_gradients_shared_bytes(const Problem &p) {
  const ChunkImages images = plan_chunk_images(p, nullptr, true);
  return images.keys == 64 ? dispatch_axes<SharedBytes<64>>(p, images) : dispatch_axes<SharedBytes<128>>(p, images);
}

void launch_chunk_outputs(const Problem &p, int32_t width, const float *divisors, const ChunkRange &range, const ChunkGradients &out) {
  const uint32_t blocks = static_cast<uint32_t>(range_slots(p, range) * p.HV);
  if (blocks > 0) cuda::launch({blocks, kThreads, 0, static_cast<cudaStream_t>(p.stream)}, load_outputs, p, width, divisors, range, out.d_o);
}

void launch_chunk_gradients(const Problem &p, const ChunkImages &images, const ChunkStates &kept, const ChunkGradients &gradients,
                            const RowGradients &out) {
  if (range_slots(p, kept.range) == 0) return;
  if (images.keys == 64) {
    dispatch_axes<Launch<64>>(p, p, images, kept, gradients, out);
  } else {
    dispatch_axes<Launch<128>>(p, p, images, kept, gradients, out);
  }
}

}  // namespace fw::recurrence
