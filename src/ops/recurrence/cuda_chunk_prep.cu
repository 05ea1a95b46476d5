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
#include "cuda/tf32.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_chunk_rows.cuh"
#include "ops/recurrence/cuda_launch.hpp"

namespace fw::recurrence {
namespace {

constexpr int kPrepThreads = 128;
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
  bool is_dense;

  static __device__ __forceinline__ float stored(float x, bool rounds) { return rounds ? __uint_as_float(cuda::to_tf32(x)) : x; }
  __device__ __forceinline__ float stored(float x) const { return stored(x, images.rounds_keys); }
  __device__ __forceinline__ void store_stored(float *to, const Quad &x) const {
    *reinterpret_cast<float4 *>(to) = make_float4(stored(x.x[0]), stored(x.x[1]), stored(x.x[2]), stored(x.x[3]));
  }

  __device__ __forceinline__ void pack_row(int i) const {
    const ChunkRows<kGate, kErase, kKeys> rows = {p, place, hv, h, is_dense};
    typename ChunkRows<kGate, kErase, kKeys>::Bits bits;
    rows.load(i, bits);
    rows.keep_keys(bits, i, s.q, s.k, s.x, s.b, s.decay);
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const int column = 4 * (threadIdx.x % kGroups + kGroups * quad);
      if (column >= images.width) continue;
      const Quad v = rows.value(bits, quad), gate = rows.write_gate(bits, quad);
      Quad value;
#pragma unroll
      for (int e = 0; e < 4; ++e) value.x[e] = v.x[e] * (bits.beta * gate.x[e]);
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
  __device__ __forceinline__ void solve(const float *lower, float sign, float (&x)[kChunkRows], float *to, int pitch, bool rounds) const {
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
    for (int i = 0; i < kChunkRows; ++i) to[i * pitch] = stored(x[i], rounds);
  }
  __device__ __forceinline__ void solve_scores(const float *lower, float sign, int32_t image, int column, const float *from) const {
    float x[kChunkRows];
#pragma unroll
    for (int i = 0; i < kChunkRows; ++i) x[i] = from ? from[column * kChunkRows + i] : i == column ? 1.0f : 0.0f;
    solve(lower, sign, x, record + image + column, kChunkRows, images.rounds_scores);
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
      if (thread < kKeys) solve(s.xb, -1.0f, x, record + images.solved_x + thread, kKeys, images.rounds_keys);
      if (thread < kChunkRows) {
        solve_scores(s.xb, -1.0f, images.m, thread, s.xk);
      } else if (thread < 2 * kChunkRows && images.t >= 0) {
        solve_scores(s.xb, -1.0f, images.t, thread - kChunkRows, nullptr);
      }
    } else if constexpr (kErases) {
      if (thread < kChunkRows) solve_scores(s.xk, 1.0f, images.t, thread, nullptr);
    }
    for (int at = kPrepThreads - 1 - thread; at < kChunkScores; at += kPrepThreads) {  // the last warps first: they have not solved
      record[images.qk + at] = stored(s.qk[at], images.rounds_scores);
      if constexpr (kIndependent) {
        record[images.qb + at] = stored(s.qb[at], images.rounds_scores);
        if (images.xk >= 0) record[images.xk + at] = stored(s.xk[at % kChunkRows * kChunkRows + at / kChunkRows], images.rounds_scores);
      }
    }
  }
};

template <fw_gate kGate, fw_erase kErase, int kKeys>
__global__ void __launch_bounds__(kPrepThreads, 5) prep(const __grid_constant__ Problem p, const __grid_constant__ ChunkImages images,
                                                        bool is_dense) {
  const uint32_t heads = static_cast<uint32_t>(p.HV), slot = blockIdx.x / heads, hv = blockIdx.x - slot * heads;
  const ChunkPlace place = find_chunk(p, slot);
  if (place.rows <= 0) return;
  auto &shared = *cuda::dynamic_shared<PrepShared<kGate, kErase, kKeys>>();
  const int64_t h = hv / (heads / static_cast<uint32_t>(p.H));
  Prep<kGate, kErase, kKeys>{p, images, shared, record_at(p, images, slot, hv), place, hv, h, is_dense}.run();
}

struct Launch {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p, const ChunkImages &images, bool is_dense) {
    const auto start = [&](auto kernel, int64_t bytes) {
      cuda::launch({static_cast<uint32_t>(chunk_slots(p) * p.HV), kPrepThreads, bytes, static_cast<cudaStream_t>(p.stream)}, kernel, p, images,
                   is_dense);
    };
    if (images.keys == 64) {
      start(prep<kGate, kErase, 64>, sizeof(PrepShared<kGate, kErase, 64>));
    } else {
      start(prep<kGate, kErase, 128>, sizeof(PrepShared<kGate, kErase, 128>));
    }
  }
};

}  // namespace

bool has_dense_rows(const Problem &p) {
  bool is_dense = p.K % 4 == 0 && p.V % 4 == 0;
  for (const fw_tensor *t : {&p.q, &p.k, &p.v, &p.a, &p.b, &p.p, &p.erase_gate, &p.write_gate, p.gate == FW_GATE_VECTOR ? &p.g : &p.q}) {
    is_dense = is_dense && (!given(*t) || has_whole_quads(*t));
  }
  return is_dense;
}

void launch_chunk_prep(const Problem &p, const ChunkImages &images) {
  if (chunk_slots(p) > 0) dispatch_axes<Launch>(p, p, images, has_dense_rows(p));
}

}  // namespace fw::recurrence
