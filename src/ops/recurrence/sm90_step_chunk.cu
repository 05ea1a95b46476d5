// SPDX-License-Identifier: Apache-2.0
// Decode of several tokens on Hopper: up to eight of a sequence as one small chunk, so that the state is read and written once for
// all of them. fp32 states [K,V] that are one piece of memory a head, bf16 and fp16 operands, K = 64 or 128, V in panels of 32 columns.
//
// Plan: a CTA a head, a warp 32 columns, the state in shared memory; two CTAs a multiprocessor, one computes while the other moves.
//
//   a warp          | box load of its panel |                                                       | box store |
//   warps, by chunk | operands of 8 tokens | scores, decays | X = [Q; E] S | u, o by columns | S = D S + K^T U |
//
// Products are tf32, of one or two parts as cuda_chunk has them. X has the eight queries and the eight erase keys as its 16 rows, decayed from the
// chunk's start; u is solved for in fp32, a lane a column; what the tokens add to the state has sums of its own, added in fp32.
//   u_i = v'_i - x_i^T S - sum over j < i of xk_ij u_j      (shared)       z_i = a_i^T S + sum of xk_ij v_j + xb_ij z_j    (independent)
// Factors are products of decays, row by row. A panel lies as rows of 128 bytes with the 128-byte swizzle, so that no product
// meets a bank twice. Barriers: full[warp], the box's bytes; __syncthreads behind the operands, the scores and a chunk; __syncwarp between
// a warp's own steps.
#include "cuda/device.hpp"
#include "cuda/launch.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/tensor_map.cuh"
#include "cuda/tf32.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_chunk.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/sm90_step.cuh"

namespace fw::recurrence {
namespace {

using namespace sm90;

constexpr int kTokens = 8, kMostWarps = 4, kWarpColumns = 32;
constexpr int kKeyPitch = kChannels + 8, kSumPitch = kWarpColumns + 8;

// Behind the state in shared memory.
template <fw_gate kGate, fw_erase kErase>
struct ChunkShared {
  static constexpr bool kIndependent = kErase == FW_ERASE_INDEPENDENT;
  union {
    StepChannels<kGate, kErase> channels[kTokens];       // as the call brings them
    float sums[kMostWarps][2 * kTokens][kSumPitch];      // S^T q, then u; S^T x, then z
  };
  float values[kTokens][kChannels];                       // v'
  float reads[2 * kTokens][kKeyPitch];                    // q, then x, decayed from the chunk's start
  float ends_k[kTokens][kKeyPitch];                       // k decayed to the chunk's end
  float ends_b[kIndependent ? kTokens : 1][kKeyPitch];
  float total[kChannels];                                 // the decay of the whole chunk
  float qk[kTokens][kTokens], xk[kTokens][kTokens], qb[kTokens][kTokens], xb[kTokens][kTokens];
  float decay[kTokens];                                   // of a scalar gate
  uint64_t full[kMostWarps];
};

// Columns 4 quad to 4 quad + 3 of a row of a panel.
__device__ inline float4 *panel_quad(float *panel, int row, int quad) {
  return reinterpret_cast<float4 *>(panel + row * kWarpColumns) + (quad ^ (row & 7));
}

// Four channels of a lane.
struct LaneKeys {
  float at[kQuad];
  __device__ void load(const float *from) {
    const float4 x = *reinterpret_cast<const float4 *>(from + threadIdx.x % 32 * kQuad);
    at[0] = x.x, at[1] = x.y, at[2] = x.z, at[3] = x.w;
  }
  __device__ void store(float *to) const {
    *reinterpret_cast<float4 *>(to + threadIdx.x % 32 * kQuad) = make_float4(at[0], at[1], at[2], at[3]);
  }
  __device__ void multiply(const LaneKeys &by) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) at[i] *= by.at[i];
  }
  __device__ float dot(const LaneKeys &with) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) sum = fmaf(at[i], with.at[i], sum);
    return cuda::warp_sum(sum);
  }
};

template <fw_gate kGate, fw_erase kErase>
__device__ inline LaneKeys decay_of(ChunkShared<kGate, kErase> &s, int token) {
  LaneKeys decay;
  if constexpr (kGate == FW_GATE_VECTOR) {
    decay.load(s.channels[token].decay());
  } else {
    const float same = kGate == FW_GATE_SCALAR ? s.decay[token] : 1.0f;
    decay = {{same, same, same, same}};
  }
  return decay;
}

// Row j of what is read, decayed from the start, and the decay of the whole chunk; by one warp.
template <fw_gate kGate, fw_erase kErase>
__device__ inline void make_reads(ChunkShared<kGate, kErase> &s, int count, int j) {
  LaneKeys run = {{1, 1, 1, 1}}, q = {}, x = {};
  if (j < count) {
    q.load(s.channels[j].q());
    if constexpr (kErase != FW_ERASE_NONE) x.load(s.channels[j].x());
#pragma unroll 1
    for (int i = 0; i < j; ++i) run.multiply(decay_of(s, i));
    if constexpr (kErase != FW_ERASE_NONE && kErase != FW_ERASE_SHARED_AFTER) x.multiply(run);
    run.multiply(decay_of(s, j));
    if constexpr (kErase == FW_ERASE_SHARED_AFTER) x.multiply(run);
    q.multiply(run);
    if (j + 1 == count) run.store(s.total);
  }
  q.store(s.reads[j]);
  x.store(s.reads[kTokens + j]);
}

// Key j (k or b) with the queries and erase keys of later rows, decayed on the way, and at the chunk's end; by one warp.
template <bool kReadsAfter, bool kErases, fw_gate kGate, fw_erase kErase>
__device__ inline void make_scores(ChunkShared<kGate, kErase> &s, int count, int j, const float *from, float (*with_q)[kTokens],
                                   float (*with_x)[kTokens], float *ends) {
  LaneKeys key = {};
  if (j < count) {
    key.load(from);
#pragma unroll 2
    for (int i = j; i < count; ++i) {
      LaneKeys q, x;
      float sum_x = 0;
      q.load(s.channels[i].q());
      if constexpr (kErases) x.load(s.channels[i].x());
      if (i > j) {
        if constexpr (kErases && !kReadsAfter) sum_x = x.dot(key);
        if constexpr (kGate != FW_GATE_NONE) key.multiply(decay_of(s, i));
        if constexpr (kErases && kReadsAfter) sum_x = x.dot(key);
      }
      const float sum_q = q.dot(key);
      if (threadIdx.x % 32 == 0) {
        with_q[i][j] = sum_q;
        if constexpr (kErases) with_x[i][j] = sum_x;
      }
    }
  }
  key.store(ends);
}

// Channels and values of the chunk's tokens; a warp has every warps-th and asks for two of them before it makes one.
template <fw_gate kGate, fw_erase kErase>
__device__ inline void make_operands(const Problem &p, const cuda::DeviceSegment &segment, int64_t token, int count, int64_t hv, int64_t h,
                                     ChunkShared<kGate, kErase> &s) {
  const int first = threadIdx.x % 32 * kQuad, V = static_cast<int>(p.V), warps = static_cast<int>(blockDim.x / 32);
#pragma unroll 1
  for (int at = static_cast<int>(threadIdx.x / 32); at < count; at += 2 * warps) {
    StepBits<kGate, kErase> bits[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (at + i * warps < count) bits[i].ask_all(p, segment.batch, token + at + i * warps, hv, h, first % V);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int j = at + i * warps;
      if (j >= count) break;
      const StepToken made = make_token(p, bits[i], hv, s.channels[j]);
      if (first < V) *reinterpret_cast<float4 *>(s.values[j] + first) = make_float4(made.u[0], made.u[1], made.u[2], made.u[3]);
      if (threadIdx.x % 32 == 0) s.decay[j] = made.decay;
    }
  }
}

// sums[i] += a (component i of two rows of quads).
template <int kParts>
__device__ inline void add_product(float (&sums)[4][4], const cuda::Tf32Rows<kParts> &a, const float4 &low, const float4 &high) {
  cuda::multiply_parts<false>(sums[0], a, low.x, high.x);
  cuda::multiply_parts<false>(sums[1], a, low.y, high.y);
  cuda::multiply_parts<false>(sums[2], a, low.z, high.z);
  cuda::multiply_parts<false>(sums[3], a, low.w, high.w);
}

// The warp's columns of what all rows read of the state: sums [16][32]. Columns of product tile i: 4 n + i.
template <int kParts>
__device__ inline void read_state(float *panel, int K, const float (*reads)[kKeyPitch], float (*sums)[kSumPitch]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float parts[2][4][4] = {};
#pragma unroll 2
  for (int first = 0; first < K; first += 16) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + 8 * half + 2 * t;
      const float2 q = *reinterpret_cast<const float2 *>(&reads[g][row]), x = *reinterpret_cast<const float2 *>(&reads[kTokens + g][row]);
      cuda::Tf32Rows<kParts> a;
      a.set(0, q.x), a.set(1, x.x), a.set(2, q.y), a.set(3, x.y);
      add_product(parts[half], a, *panel_quad(panel, row, g), *panel_quad(panel, row + 1, g));
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const float4 all = make_float4(parts[0][0][e] + parts[1][0][e], parts[0][1][e] + parts[1][1][e], parts[0][2][e] + parts[1][2][e],
                                   parts[0][3][e] + parts[1][3][e]);
    *reinterpret_cast<float4 *>(&sums[g + e / 2 * 8][8 * t + e % 2 * 4]) = all;
  }
  __syncwarp();  // a column's sums are there
}

// u and z of the lane's column in the place of its sums, and o.
template <fw_gate kGate, fw_erase kErase>
__device__ inline void solve_column(const Problem &p, ChunkShared<kGate, kErase> &s, const cuda::DeviceSegment &segment, int64_t first,
                                    int count, int64_t hv, int column, float (*sums)[kSumPitch]) {
  constexpr bool kIndependent = kErase == FW_ERASE_INDEPENDENT;
  const int lane = threadIdx.x % 32;
  float u[kTokens], z[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    u[i] = z[i] = 0;
    if (i < count) {
      const float value = s.values[i][column];
      float o = sums[i][lane], x = sums[kTokens + i][lane];
      u[i] = value;
#pragma unroll
      for (int j = 0; j < i; ++j) {
        if constexpr (kErase != FW_ERASE_NONE) x = fmaf(s.xk[i][j], u[j], x);
        if constexpr (kIndependent) x = fmaf(s.xb[i][j], z[j], x);
      }
      if constexpr (kIsShared<kErase>) u[i] = value - x;
      if constexpr (kIndependent) z[i] = x;
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        o = fmaf(s.qk[i][j], u[j], o);
        if constexpr (kIndependent) o = fmaf(s.qb[i][j], z[j], o);
      }
      store_at(p.o, head_offset(p.o, segment.batch, first + i, hv) + column * p.o.strides[3], o * p.scale_f32);
    }
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    sums[i][lane] = u[i];
    if constexpr (kIndependent) sums[kTokens + i][lane] = z[i];
  }
  __syncwarp();  // u and z of the warp's columns are there
}

// The first operand of 16 keys: keys[token][first + key].
template <int kParts>
__device__ inline cuda::Tf32Rows<kParts> rows_of_keys(const float (*keys)[kKeyPitch], int first) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  cuda::Tf32Rows<kParts> a;
  a.set(0, keys[t][first + g]), a.set(1, keys[t][first + g + 8]), a.set(2, keys[t + 4][first + g]), a.set(3, keys[t + 4][first + g + 8]);
  return a;
}

// S = D S + ends_k^T u + ends_b^T z of the warp's columns.
template <int kParts, fw_gate kGate, fw_erase kErase>
__device__ inline void write_state(float *panel, int K, const ChunkShared<kGate, kErase> &s, const float (*written)[kSumPitch]) {
  constexpr bool kIndependent = kErase == FW_ERASE_INDEPENDENT;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const auto row_of = [&](int token) { return *reinterpret_cast<const float4 *>(&written[token][4 * g]); };
  const float4 u_low = row_of(t), u_high = row_of(t + 4);
  const float4 z_low = kIndependent ? row_of(kTokens + t) : u_low, z_high = kIndependent ? row_of(kTokens + t + 4) : u_high;
#pragma unroll 2
  for (int first = 0; first < K; first += 16) {
    float sums[4][4] = {};
    add_product(sums, rows_of_keys<kParts>(s.ends_k, first), u_low, u_high);
    if constexpr (kIndependent) add_product(sums, rows_of_keys<kParts>(s.ends_b, first), z_low, z_high);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = first + g + 8 * half;
      const float decay = kGate == FW_GATE_NONE ? 1.0f : s.total[row];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float4 &place = *panel_quad(panel, row, 2 * t + e);
        const float4 old = place;
        const int i = 2 * half + e;
        place = make_float4(fmaf(decay, old.x, sums[0][i]), fmaf(decay, old.y, sums[1][i]), fmaf(decay, old.z, sums[2][i]),
                            fmaf(decay, old.w, sums[3][i]));
      }
    }
  }
}

template <fw_gate kGate, fw_erase kErase, int kParts>
__global__ void __launch_bounds__(32 * kMostWarps, 2)
    chunk_step(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap states) {
  constexpr bool kReadsAfter = kErase == FW_ERASE_SHARED_AFTER, kErases = kErase != FW_ERASE_NONE;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32, K = static_cast<int>(p.K);
  float *panel = cuda::dynamic_shared<float>() + warp * K * kWarpColumns;
  auto &s = *reinterpret_cast<ChunkShared<kGate, kErase> *>(cuda::dynamic_shared<float>() + warps * K * kWarpColumns);
  const uint32_t full = shared_address(&s.full[warp]);
  const StepHead head = begin_head(p, full, lane == 0);
  if (head.sequence.slot < 0) return;
  const cuda::DeviceSegment segment = head.sequence.segment;
  const int64_t hv = head.hv, h = head.h;
  const int column = warp * kWarpColumns, slot = static_cast<int>(head.sequence.slot);
  if (lane == 0) {
    barrier_expect_bytes(full, static_cast<uint32_t>(K * kWarpColumns * 4));
    load_box(shared_address(panel), &states, full, column, 0, static_cast<int>(hv), slot);
  }
#pragma unroll 1
  for (int64_t token = segment.begin; token < segment.end; token += kTokens) {
    const int count = segment.end - token < kTokens ? static_cast<int>(segment.end - token) : kTokens;
    if (token > segment.begin) __syncthreads();  // the chunk before is done with
    make_operands(p, segment, token, count, hv, h, s);
    __syncthreads();  // operands are there
#pragma unroll 1
    for (int pass = 0; pass * warps < kTokens; ++pass) {
      const int j = pass * warps + (pass % 2 ? warps - 1 - warp : warp);  // so that long keys meet short ones
      if (j >= kTokens) continue;
      make_reads(s, count, j);
      make_scores<kReadsAfter, kErases>(s, count, j, s.channels[j].k(), s.qk, s.xk, s.ends_k[j]);
      if constexpr (kErase == FW_ERASE_INDEPENDENT) make_scores<false, true>(s, count, j, s.channels[j].b(), s.qb, s.xb, s.ends_b[j]);
    }
    __syncthreads();  // rows and scores are there, the channels are read
    if (token == segment.begin) barrier_wait(full, 0);
    float(*sums)[kSumPitch] = s.sums[warp];
    read_state<kParts>(panel, K, s.reads, sums);
    solve_column(p, s, segment, token, count, hv, column + lane, sums);
    write_state<kParts>(panel, K, s, sums);
  }
  fence_async_shared();
  __syncwarp();  // the panel is written
  if (lane == 0) {
    store_box(&states, shared_address(panel), column, 0, static_cast<int>(hv), slot);
    store_commit();
    store_wait_read<0>();
  }
}

struct ChunkStep {
  template <fw_gate kGate, fw_erase kErase>
  static cudaError_t run(const Problem &p) {
    return chunk_parts(p) == 1 ? run_parts<kGate, kErase, 1>(p) : run_parts<kGate, kErase, 2>(p);
  }
  template <fw_gate kGate, fw_erase kErase, int kParts>
  static cudaError_t run_parts(const Problem &p) {
    const int64_t warps = p.V / kWarpColumns, head = p.K * p.V * static_cast<int64_t>(sizeof(float));
    const auto stride = [&](int i) { return p.state.shape[i] > 1 ? p.state.strides[i] * static_cast<int64_t>(sizeof(float)) : head; };
    CUtensorMap states;
    const cudaError_t status = encode_boxes(&states, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, p.state.data, {p.V, p.K, p.HV, p.state.shape[0]},
                                            {p.V * static_cast<int64_t>(sizeof(float)), stride(1), stride(0)},
                                            {kWarpColumns, static_cast<uint32_t>(p.K), 1, 1});
    if (status != cudaSuccess) return status;
    cuda::Launch how = {static_cast<uint32_t>(p.N * p.HV), static_cast<uint32_t>(warps) * 32,
                        head + static_cast<int64_t>(sizeof(ChunkShared<kGate, kErase>)), static_cast<cudaStream_t>(p.stream)};
    how.overlaps = true;
    return cuda::launch(how, chunk_step<kGate, kErase, kParts>, p, states);
  }
};

}  // namespace

int launch_chunk_step(const Problem &p) { return static_cast<int>(dispatch_axes<ChunkStep>(p, p)); }

}  // namespace fw::recurrence
