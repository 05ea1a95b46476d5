// SPDX-License-Identifier: Apache-2.0
// The images of all chunks of 16 rows, for the chunk form of every row in bf16 and fp16.
//
// Plan: a block of 128 threads a (slot, value head), in fp32 on the ordinary cores; every factor is a product of decays, row by row, and at
// most 1.
//   1. Rows to shared memory with everything that is done to an operand; 16 threads a row, v' straight to its image.
//   2. Scores: 16 threads walk key j and key 15 - j, so that all have as much to do, down the rows: the key is decayed by each row that
//      it passes and met with its query and erase key; a thread has every 16th quad of channels, sums are halved over 16 lanes. At the
//      end the keys are ends_k and ends_b.
//   3. One thread a channel: reads_q, reads_x, total, from the first row to the last.
//   4. One thread a column: of t (16), or for independent keys of solved_x, m and t, by substitution.
// Shared memory: at K = 128 up to 5 arrays of 8 KB, scores of 4 KB. Barriers: after 1 and after 3.
#include <initializer_list>

#include "cuda/launch.cuh"
#include "cuda/rows.cuh"
#include "cuda/tf32.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_chunk.cuh"
#include "ops/recurrence/cuda_launch.hpp"

namespace fw::recurrence {
namespace {

constexpr int kPrepThreads = 128, kGroups = 16;  // threads a row
constexpr int kLast = kChunkRows - 1;

template <fw_gate kGate, fw_erase kErase, int kKeys>
struct PrepShared {
  static constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  static constexpr int kArray = kChunkRows * kKeys, kDecay = kGate == FW_GATE_VECTOR ? kArray : kChunkRows;
  float q[kArray], k[kArray], x[kErases ? kArray : 4], b[kIndependent ? kArray : 4];
  float decay[kGate == FW_GATE_NONE ? 4 : kDecay];  // [row], or [row][channel]
  float qk[kChunkScores], qb[kChunkScores];         // [i][j]
  float xk[kChunkScores], xb[kChunkScores];         // [j][i]
};

// Four elements of 16 bits; those from `left` on are 0.
__device__ __forceinline__ uint2 load_halves(const fw_tensor &t, int64_t offset, int64_t channel, int64_t left, bool is_dense) {
  if (left <= 0) return make_uint2(0, 0);
  if (is_dense) return *reinterpret_cast<const uint2 *>(static_cast<const uint16_t *>(t.data) + offset + channel);
  const uint4 x = cuda::load_loose_quad(t.data, t.dtype, offset + channel * t.strides[3], t.strides[3], left);
  return make_uint2(x.x | x.y << 16, x.z | x.w << 16);
}
struct Quad {
  float x[4];
};
__device__ __forceinline__ Quad halves_of(uint2 bits, bool is_bf16) {
  Quad quad;
  cuda::from_quad_bits({{bits.x, bits.y, 0, 0}}, is_bf16 ? FW_BF16 : FW_F16, quad.x);
  return quad;
}
__device__ __forceinline__ float4 as_vector(const Quad &q) { return make_float4(q.x[0], q.x[1], q.x[2], q.x[3]); }
__device__ __forceinline__ Quad read_quad(const float *from) {
  const float4 x = *reinterpret_cast<const float4 *>(from);
  return {{x.x, x.y, x.z, x.w}};
}

// 1 / length of a row that 16 threads hold (eps 1e-6 inside the root).
template <int kQuads>
__device__ __forceinline__ float row_factor(const Quad (&row)[kQuads]) {
  double sum = 0;
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum += static_cast<double>(row[quad].x[e]) * row[quad].x[e];
  }
  for (int offset = kGroups / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return static_cast<float>(rsqrt(sum + 1e-6));
}

template <fw_gate kGate, fw_erase kErase, int kKeys>
struct Prep {
  using Shared = PrepShared<kGate, kErase, kKeys>;
  static constexpr int kQuads = kKeys / (4 * kGroups);
  static constexpr bool kErases = Shared::kErases, kIndependent = Shared::kIndependent, kAfter = kErase == FW_ERASE_SHARED_AFTER;

  const Problem &p;
  const ChunkImages &images;
  Shared &s;
  float *record;
  ChunkPlace place;
  int64_t hv, h;
  bool is_dense, rounds;

  __device__ __forceinline__ float stored(float x) const { return rounds ? __uint_as_float(cuda::to_tf32(x)) : x; }
  __device__ __forceinline__ void store_stored(float *to, const Quad &x) const {
    *reinterpret_cast<float4 *>(to) = make_float4(stored(x.x[0]), stored(x.x[1]), stored(x.x[2]), stored(x.x[3]));
  }

  // A row of keys as the tensor has it.
  __device__ __forceinline__ void load_keys(const fw_tensor &t, int64_t offset, bool is_there, uint2 (&to)[kQuads]) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int channel = 4 * (threadIdx.x % kGroups + kGroups * quad);
      to[quad] = load_halves(t, offset, channel, is_there ? p.K - channel : 0, is_dense);
    }
  }
  __device__ __forceinline__ void as_floats(const uint2 (&bits)[kQuads], bool is_normed, Quad (&to)[kQuads]) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) to[quad] = halves_of(bits[quad], p.q.dtype == FW_BF16);
    if (!is_normed) return;
    const float factor = row_factor<kQuads>(to);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[quad].x[e] *= factor;
    }
  }
  __device__ __forceinline__ void keep(const Quad (&row)[kQuads], int i, float *to) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      *reinterpret_cast<float4 *>(to + i * kKeys + 4 * (threadIdx.x % kGroups + kGroups * quad)) = as_vector(row[quad]);
    }
  }

  __device__ __forceinline__ float scalar_gate(const TokenPlace &at) const {
    if (p.has_fixed_gate) return scalar_decay(fixed_gate(p, hv));
    if (at.sub != 0) return 1.0f;
    return scalar_decay(log_decay(p, hv, 0, load_at(p.g, head_offset(p.g, place.batch, at.token, hv))));
  }

  __device__ __forceinline__ void pack_row(int i) const {
    const bool is_there = i < place.rows, is_bf16 = p.q.dtype == FW_BF16;
    const int64_t row = place.first + (is_there ? i : 0), batch = place.batch;
    const TokenPlace at = place_of(p, row);
    const bool is_read = is_there && at.sub == p.n_sub - 1;
    const int group = threadIdx.x % kGroups;
    uint2 q[kQuads], k[kQuads], x[kQuads], b[kQuads], erase_gate[kQuads], v[2], write_gate[2];
    cuda::QuadBits g[kQuads];
    load_keys(p.q, head_offset(p.q, batch, at.token, h), is_read, q);
    load_keys(p.k, head_offset(p.k, batch, row, h), is_there, k);
    if constexpr (kIsShared<kErase>) {
      if (given(p.p)) load_keys(p.p, head_offset(p.p, batch, at.token, h), is_there, x);
      if (given(p.erase_gate)) load_keys(p.erase_gate, head_offset(p.erase_gate, batch, at.token, h), is_there, erase_gate);
    }
    if constexpr (kIndependent) {
      load_keys(p.a, head_offset(p.a, batch, at.token, h), is_there, x);
      load_keys(p.b, head_offset(p.b, batch, at.token, h), is_there, b);
    }
    if constexpr (kGate == FW_GATE_VECTOR) {
      const int64_t offset = head_offset(p.g, batch, at.token, hv);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int channel = 4 * (group + kGroups * quad);
        g[quad] = {};
        if (!is_there || channel >= p.K) continue;
        if (is_dense) {
          g[quad] = cuda::load_quad_bits(p.g.data, p.g.dtype, offset + channel);
        } else {
          const uint4 x = cuda::load_loose_quad(p.g.data, p.g.dtype, offset + channel * p.g.strides[3], p.g.strides[3], p.K - channel);
          const bool is_fp32 = p.g.dtype == FW_F32;
          g[quad] = {{is_fp32 ? x.x : x.x | x.y << 16, is_fp32 ? x.y : x.z | x.w << 16, x.z, x.w}};
        }
      }
    }
    const int64_t from_v = head_offset(p.v, batch, row, hv), from_gate = head_offset(p.write_gate, batch, at.token, hv);
    const bool has_write_gate = kIsShared<kErase> && given(p.write_gate);
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const int column = 4 * (group + kGroups * quad);
      const int64_t left = is_there ? p.V - column : 0;
      v[quad] = load_halves(p.v, from_v, column, left, is_dense);
      if (has_write_gate) write_gate[quad] = load_halves(p.write_gate, from_gate, column, left, is_dense);
    }
    const float beta = kIsShared<kErase> && is_there ? load_beta(p, batch, row, hv) : 1.0f;

    Quad now[kQuads];
    as_floats(q, p.has_l2norm, now);
    keep(now, i, s.q);
    as_floats(k, p.has_l2norm, now);
    keep(now, i, s.k);
    if constexpr (kIsShared<kErase>) {
      if (given(p.p)) as_floats(x, p.has_l2norm, now);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const Quad gate = given(p.erase_gate) ? halves_of(erase_gate[quad], is_bf16) : Quad{{1, 1, 1, 1}};
#pragma unroll
        for (int e = 0; e < 4; ++e) now[quad].x[e] *= beta * gate.x[e];
      }
      keep(now, i, s.x);
    }
    if constexpr (kIndependent) {
      as_floats(x, false, now);
      keep(now, i, s.x);
      as_floats(b, false, now);
      keep(now, i, s.b);
    }
    if constexpr (kGate == FW_GATE_VECTOR) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int channel = 4 * (group + kGroups * quad);
        cuda::from_quad_bits(g[quad], p.g.dtype, now[quad].x);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          now[quad].x[e] = is_there && channel + e < p.K ? expf(log_decay(p, hv, channel + e, now[quad].x[e])) : 1.0f;
        }
      }
      keep(now, i, s.decay);
    }
    if constexpr (kGate == FW_GATE_SCALAR) {
      if (group == 0) s.decay[i] = is_there ? scalar_gate(at) : 1.0f;
    }
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const int column = 4 * (group + kGroups * quad);
      if (column >= images.width) continue;
      Quad value = halves_of(v[quad], is_bf16);
      const Quad gate = has_write_gate ? halves_of(write_gate[quad], is_bf16) : Quad{{1, 1, 1, 1}};
#pragma unroll
      for (int e = 0; e < 4; ++e) value.x[e] *= beta * gate.x[e];
      *reinterpret_cast<float4 *>(record + images.values + i * images.width + column) = as_vector(value);
    }
  }

  // The half of two numbers that this lane goes on with, added to the other lane's.
  static __device__ __forceinline__ float halve(float low, float high, int offset) {
    const bool is_high = threadIdx.x & offset;
    const float sent = __shfl_xor_sync(0xffffffffu, is_high ? low : high, offset);
    return (is_high ? high : low) + sent;
  }

  // A key passes row i: its products with query and erase key, before or after the decay. passes: the row is past the key's own.
  template <bool kReadsAfter>
  static __device__ __forceinline__ void pass(Quad &key, const Quad &decay, const Quad &q, const Quad &x, bool passes, float &with_q, float &with_x) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if constexpr (kErases && !kReadsAfter) with_x = fmaf(x.x[e], key.x[e], with_x);
      if constexpr (kGate != FW_GATE_NONE) {
        if (passes) key.x[e] *= decay.x[e];
      }
      if constexpr (kErases && kReadsAfter) with_x = fmaf(x.x[e], key.x[e], with_x);
      with_q = fmaf(q.x[e], key.x[e], with_q);
    }
  }

  __device__ __forceinline__ void score() const {
    const int lane = threadIdx.x % 32, group = threadIdx.x % kGroups, pair = threadIdx.x / kGroups;
    const int first = threadIdx.x / 32 * 2, both = kLast - 1 - first;  // rows at which the warp's first keys, and their partners, begin
    const int j[2] = {pair, kLast - pair};
    Quad key[2][kQuads], other[2][kIndependent ? kQuads : 1];
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int at = j[side] * kKeys + 4 * (group + kGroups * quad);
        key[side][quad] = read_quad(s.k + at);
        if constexpr (kIndependent) other[side][quad] = read_quad(s.b + at);
      }
    }
#pragma unroll 2
    for (int i = first; i < kChunkRows; ++i) {
      float q_sums[2][2] = {}, x_sums[2][2] = {};  // [side][k or b]
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int at = i * kKeys + 4 * (group + kGroups * quad);
        const Quad q = read_quad(s.q + at);
        Quad x = {}, decay = {};
        if constexpr (kErases) x = read_quad(s.x + at);
        if constexpr (kGate == FW_GATE_VECTOR) decay = read_quad(s.decay + at);
        if constexpr (kGate == FW_GATE_SCALAR) decay.x[0] = decay.x[1] = decay.x[2] = decay.x[3] = s.decay[i];
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          if (side == 1 && i < both) continue;
          pass<kAfter>(key[side][quad], decay, q, x, i > j[side], q_sums[side][0], x_sums[side][0]);
          if constexpr (kIndependent) pass<false>(other[side][quad], decay, q, x, i > j[side], q_sums[side][1], x_sums[side][1]);
        }
      }
      float sum = halve(q_sums[0][0], q_sums[1][0], 8);
      if constexpr (kErases) {
        const float with_x = halve(x_sums[0][0], x_sums[1][0], 8);
        sum = halve(sum, with_x, 4);
      } else {
        sum += __shfl_xor_sync(0xffffffffu, sum, 4);
      }
      if constexpr (kIndependent) {
        const float with_q = halve(q_sums[0][1], q_sums[1][1], 8), with_x = halve(x_sums[0][1], x_sums[1][1], 8);
        sum = halve(sum, halve(with_q, with_x, 4), 2);
      } else {
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      const bool is_x = kErases && (lane & 4), is_b = kIndependent && (lane & 2);
      const int column = lane & 8 ? j[1] : j[0], others = (kErases ? 0 : 4) | (kIndependent ? 0 : 2) | 1;
      if ((lane & others) == 0 && i >= column + is_x) {
        float *const to = is_x ? (is_b ? s.xb : s.xk) : is_b ? s.qb : s.qk;
        to[is_x ? column * kChunkRows + i : i * kChunkRows + column] = sum;
      }
    }
#pragma unroll
    for (int side = 0; side < 2; ++side) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int at = j[side] * kKeys + 4 * (group + kGroups * quad);
        store_stored(record + images.ends_k + at, key[side][quad]);
        if constexpr (kIndependent) store_stored(record + images.ends_b + at, other[side][quad]);
      }
    }
  }

  // x: reads_x of a channel.
  __device__ __forceinline__ void read(int channel, float (&x)[kChunkRows]) const {
    float run = 1.0f;
#pragma unroll
    for (int i = 0; i < kChunkRows; ++i) {
      const int at = i * kKeys + channel;
      const float before = run;
      if constexpr (kGate != FW_GATE_NONE) run *= s.decay[kGate == FW_GATE_VECTOR ? at : i];
      record[images.reads_q + at] = stored(run * s.q[at]);
      if constexpr (kErases) {
        x[i] = (kAfter ? run : before) * s.x[at];
        if (images.reads_x >= 0) record[images.reads_x + at] = stored(x[i]);
      }
    }
    record[images.total + channel] = run;
  }

  // A column of (I + sign L)^-1 x to the image at `to`; L strictly lower, [j][i].
  __device__ __forceinline__ void solve(const float *lower, float sign, float (&x)[kChunkRows], float *to, int pitch) const {
#pragma unroll
    for (int j = 0; j < kLast; ++j) {
      const float known = -sign * x[j];
#pragma unroll
      for (int quad = (j + 1) / 4; quad < kChunkRows / 4; ++quad) {
        const Quad row = read_quad(lower + j * kChunkRows + 4 * quad);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int i = 4 * quad + e;
          if (i > j) x[i] = fmaf(row.x[e], known, x[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kChunkRows; ++i) to[i * pitch] = stored(x[i]);
  }
  __device__ __forceinline__ void solve_scores(const float *lower, float sign, int32_t image, int column, const float *from) const {
    float x[kChunkRows];
#pragma unroll
    for (int i = 0; i < kChunkRows; ++i) x[i] = from ? from[column * kChunkRows + i] : i == column ? 1.0f : 0.0f;
    solve(lower, sign, x, record + image + column, kChunkRows);
  }

  __device__ __forceinline__ void run() const {
    const int thread = threadIdx.x;
    for (int i = thread / kGroups; i < kChunkRows; i += kPrepThreads / kGroups) pack_row(i);
    for (int at = thread; at < kChunkScores; at += kPrepThreads) s.qk[at] = s.qb[at] = s.xk[at] = s.xb[at] = 0.0f;
    __syncthreads();  // the rows are there, scores are 0
    score();
    float x[kChunkRows];
    if (thread < kKeys) read(thread, x);
    __syncthreads();  // the scores are there
    if constexpr (kIndependent) {
      if (thread < kKeys) solve(s.xb, -1.0f, x, record + images.solved_x + thread, kKeys);
      if (thread < kChunkRows) {
        solve_scores(s.xb, -1.0f, images.m, thread, s.xk);
      } else if (thread < 2 * kChunkRows && images.t >= 0) {
        solve_scores(s.xb, -1.0f, images.t, thread - kChunkRows, nullptr);
      }
    } else if constexpr (kErases) {
      if (thread < kChunkRows) solve_scores(s.xk, 1.0f, images.t, thread, nullptr);
    }
    for (int at = kPrepThreads - 1 - thread; at < kChunkScores; at += kPrepThreads) {  // the last warps first: they have not solved
      record[images.qk + at] = stored(s.qk[at]);
      if constexpr (kIndependent) {
        record[images.qb + at] = stored(s.qb[at]);
        if (images.xk >= 0) record[images.xk + at] = stored(s.xk[at % kChunkRows * kChunkRows + at / kChunkRows]);
      }
    }
  }
};

template <fw_gate kGate, fw_erase kErase, int kKeys>
__global__ void __launch_bounds__(kPrepThreads, 5) prep(const __grid_constant__ Problem p, const __grid_constant__ ChunkImages images,
                                                        bool is_dense, bool rounds) {
  const uint32_t heads = static_cast<uint32_t>(p.HV), slot = blockIdx.x / heads, hv = blockIdx.x - slot * heads;
  const ChunkPlace place = find_chunk(p, slot);
  if (place.rows <= 0) return;
  auto &shared = *cuda::dynamic_shared<PrepShared<kGate, kErase, kKeys>>();
  const int64_t h = hv / (heads / static_cast<uint32_t>(p.H));
  Prep<kGate, kErase, kKeys>{p, images, shared, record_at(p, images, slot, hv), place, hv, h, is_dense, rounds}.run();
}

struct Launch {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p, const ChunkImages &images, bool is_dense) {
    const auto start = [&](auto kernel, int64_t bytes) {
      cuda::launch({static_cast<uint32_t>(chunk_slots(p) * p.HV), kPrepThreads, bytes, static_cast<cudaStream_t>(p.stream)}, kernel, p, images,
                   is_dense, chunk_parts(p) == 1);
    };
    if (images.keys == 64) {
      start(prep<kGate, kErase, 64>, sizeof(PrepShared<kGate, kErase, 64>));
    } else {
      start(prep<kGate, kErase, 128>, sizeof(PrepShared<kGate, kErase, 128>));
    }
  }
};

}  // namespace

void launch_chunk_prep(const Problem &p, const ChunkImages &images) {
  bool is_dense = p.K % 4 == 0 && p.V % 4 == 0;
  for (const fw_tensor *t : {&p.q, &p.k, &p.v, &p.a, &p.b, &p.p, &p.erase_gate, &p.write_gate, p.gate == FW_GATE_VECTOR ? &p.g : &p.q}) {
    is_dense = is_dense && (!given(*t) || has_whole_quads(*t));
  }
  if (chunk_slots(p) > 0) dispatch_axes<Launch>(p, p, images, is_dense);
}

}  // namespace fw::recurrence
