// SPDX-License-Identifier: Apache-2.0
// Products of packed rows with the panel of a state that a thread block holds in registers, and the chunk of rows that the
// reverse works on: its scores, decayed rows and the solve. Sums run in one order for every block, so results have one value.
#pragma once
#include "ops/recurrence/cuda_rows.cuh"

namespace fw::recurrence {

// ---- one row, token by token ---------------------------------------------------------------------------------------

// What a row reads of the state and what it erases: [0] S~^T q, [1] S~^T e, or S^T e when that is read before the decay.
using RowSums = float[2][kColumnsOwned];

// Decays a tile and adds what its rows give to the sums; q, x and decay point at the first of the rows.
template <fw_gate kGate, fw_erase kErase, int kRows, int kColumns>
__device__ inline void read_tile(const float *q, const float *x, const float *decay, float (&S)[kRows][kColumns],
                                 float (&sums)[2][kColumns]) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kAfter = kErase == FW_ERASE_SHARED_AFTER;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float query = q[r], key = kErases ? x[r] : 0.0f, factor = kGate != FW_GATE_NONE ? decay[r] : 1.0f;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (kErases && !kAfter) sums[1][c] = fmaf(key, S[r][c], sums[1][c]);
      if constexpr (kGate != FW_GATE_NONE) S[r][c] *= factor;
      if constexpr (kErases && kAfter) sums[1][c] = fmaf(key, S[r][c], sums[1][c]);
      sums[0][c] = fmaf(query, S[r][c], sums[0][c]);
    }
  }
}

// Adds up what the groups of a warp have; a warp's sums are then in its first `lanes` lanes, and go to `partial`,
// [warps][2][lanes].
template <fw_erase kErase>
__device__ inline void share_sums(int lanes, int lane, RowSums &sums, float4 *partial) {
  constexpr int kCount = kErase == FW_ERASE_NONE ? 1 : 2;
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
#pragma unroll
    for (int c = 0; c < kColumnsOwned; ++c) {
      for (int offset = lanes; offset < 32; offset *= 2) sums[s][c] += __shfl_xor_sync(0xffffffffu, sums[s][c], offset);
    }
    if (threadIdx.x % 32 < lanes) {
      partial[(threadIdx.x / 32 * 2 + s) * lanes + lane] = make_float4(sums[s][0], sums[s][1], sums[s][2], sums[s][3]);
    }
  }
}

// The whole sums of the thread's columns, after a barrier behind share_sums.
template <fw_erase kErase>
__device__ inline void collect_sums(int lanes, int lane, const float4 *partial, RowSums &sums) {
  constexpr int kCount = kErase == FW_ERASE_NONE ? 1 : 2;
#pragma unroll
  for (int s = 0; s < kCount; ++s) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const float4 part = partial[(w * 2 + s) * lanes + lane];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    sums[s][0] = sum.x, sums[s][1] = sum.y, sums[s][2] = sum.z, sums[s][3] = sum.w;
  }
}

// u: v' comes, what the row writes goes.
template <fw_erase kErase, int kColumns>
__device__ inline void erase_value(const float (&sums)[2][kColumns], float (&u)[kColumns]) {
  if constexpr (kIsShared<kErase>) {
#pragma unroll
    for (int c = 0; c < kColumns; ++c) u[c] -= sums[1][c];
  }
}

// The tile after the row.
template <fw_erase kErase, int kRows, int kColumns>
__device__ inline void write_tile(const float *k, const float *b, const float (&sums)[2][kColumns],
                                  const float (&u)[kColumns], float (&S)[kRows][kColumns]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float key = k[r], with_b = kErase == FW_ERASE_INDEPENDENT ? b[r] : 0.0f;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if constexpr (kErase == FW_ERASE_INDEPENDENT) S[r][c] = fmaf(with_b, sums[1][c], S[r][c]);
      S[r][c] = fmaf(key, u[c], S[r][c]);
    }
  }
}

// Column c of o before the normaliser: what the row read, and what it wrote through q . k and q . b.
template <fw_erase kErase, int kColumns>
__device__ inline float row_output(const float (&sums)[2][kColumns], const float (&u)[kColumns], int c, float qk,
                                   float qb, float scale) {
  float o = fmaf(qk, u[c], sums[0][c]);
  if constexpr (kErase == FW_ERASE_INDEPENDENT) o = fmaf(qb, sums[1][c], o);
  return o * scale;
}

// ---- a chunk of rows -----------------------------------------------------------------------------------------------

constexpr int kRowsReduced = 4;  // rows of one exchange of reduce_rows

// out[i][c] = sum_k keys[i][k] S[k][c]. partial: [kWarps][kRowsReduced][width]. Ends with a barrier.
__device__ inline void reduce_rows(const Panels &l, const Owner &own, int n, const float *keys, const Tile &S, float *partial,
                                   float *out) {
  const int warp = threadIdx.x / 32, width = l.width();
#pragma unroll 1
  for (int first = 0; first < n; first += kRowsReduced) {
    const int count = n - first < kRowsReduced ? n - first : kRowsReduced;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const float *key = keys + (first + i) * l.pitch + own.row;
      float sum[kColumnsOwned] = {};
#pragma unroll
      for (int r = 0; r < kRowsOwned; ++r) {
        const float x = key[r];
#pragma unroll
        for (int c = 0; c < kColumnsOwned; ++c) sum[c] = fmaf(x, S[r][c], sum[c]);
      }
#pragma unroll
      for (int c = 0; c < kColumnsOwned; ++c) {
        for (int offset = l.lanes; offset < 32; offset *= 2) sum[c] += __shfl_xor_sync(0xffffffffu, sum[c], offset);
      }
      if (threadIdx.x % 32 < l.lanes) {
        reinterpret_cast<float4 *>(partial + (warp * kRowsReduced + i) * width)[own.lane] =
            make_float4(sum[0], sum[1], sum[2], sum[3]);
      }
    }
    __syncthreads();  // partial sums are there
#pragma unroll 1
    for (int at = threadIdx.x; at < count * width; at += kThreads) {
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += partial[w * kRowsReduced * width + at];
      out[(first + at / width) * l.value_pitch() + at % width] = sum;
    }
    __syncthreads();  // partial may be written again, out may be read
  }
}

// Sums each of 8 numbers over the lanes of a state row; lane-wise halving: a lane ends with 1 of them (2 when lanes is 4).
__device__ inline void sum_over_lanes(const Panels &l, const Owner &own, float (&v)[kRowsOwned], float *out) {
  const bool high = own.lane & (l.lanes / 2), middle = own.lane & (l.lanes / 4);
  float half[4], pair[2];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    half[j] = (high ? v[j + 4] : v[j]) + __shfl_xor_sync(0xffffffffu, high ? v[j] : v[j + 4], l.lanes / 2);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    pair[j] = (middle ? half[j + 2] : half[j]) + __shfl_xor_sync(0xffffffffu, middle ? half[j] : half[j + 2], l.lanes / 4);
  }
  const int at = (high ? 4 : 0) + (middle ? 2 : 0);
  if (l.lanes == 4) {
    out[at] = pair[0];
    out[at + 1] = pair[1];
    return;
  }
  const bool low = own.lane & (l.lanes / 8);
  float one = (low ? pair[1] : pair[0]) + __shfl_xor_sync(0xffffffffu, low ? pair[0] : pair[1], l.lanes / 8);
  for (int offset = l.lanes / 16; offset > 0; offset /= 2) one += __shfl_xor_sync(0xffffffffu, one, offset);
  if (own.lane % (l.lanes / 8) == 0) out[at + (low ? 1 : 0)] = one;
}

// out[i][k] = sum_c values[i][c] S[k][c].
__device__ inline void reduce_columns(const Panels &l, const Owner &own, int n, const float *values, const Tile &S, float *out) {
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const float4 x = reinterpret_cast<const float4 *>(values + i * l.value_pitch())[own.lane];
    float v[kRowsOwned];
#pragma unroll
    for (int r = 0; r < kRowsOwned; ++r) v[r] = fmaf(x.x, S[r][0], fmaf(x.y, S[r][1], fmaf(x.z, S[r][2], x.w * S[r][3])));
    sum_over_lanes(l, own, v, out + i * l.pitch + own.row);
  }
}

// S[k][c] += sum_i keys[i][k] values[i][c].
__device__ inline void add_outer_rows(const Panels &l, const Owner &own, int n, const float *keys, const float *values, Tile &S) {
#pragma unroll 1
  for (int i = 0; i < n; ++i) {
    const float4 x = reinterpret_cast<const float4 *>(values + i * l.value_pitch())[own.lane];
#pragma unroll
    for (int r = 0; r < kRowsOwned; ++r) {
      const float key = keys[i * l.pitch + own.row + r];
      S[r][0] = fmaf(key, x.x, S[r][0]);
      S[r][1] = fmaf(key, x.y, S[r][1]);
      S[r][2] = fmaf(key, x.z, S[r][2]);
      S[r][3] = fmaf(key, x.w, S[r][3]);
    }
  }
}

// S[k][:] *= factor[k].
__device__ inline void scale_tile(const Owner &own, const float *factor, Tile &S) {
#pragma unroll
  for (int r = 0; r < kRowsOwned; ++r) {
    const float x = factor[own.row + r];
#pragma unroll
    for (int c = 0; c < kColumnsOwned; ++c) S[r][c] *= x;
  }
}

// One chunk of packed rows in shared memory; names as in cpu_chunk.hpp. Without a gate the decayed rows are the rows.
struct DeviceChunk {
  PackedRows rows;
  float *ends_k, *ends_b, *reads_q, *reads_x, *runs;  // [rows][pitch]
  float *qk, *qb, *xk, *xb;                           // [rows][rows]
  float *w;                                           // [rows][value_pitch], what an independent erase reads
  float *partial;                                     // of reduce_rows

  template <fw_gate kGate, fw_erase kErase>
  FW_HOST_DEVICE static int32_t floats(const Panels &l) {
    constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
    const int32_t decayed = kGate == FW_GATE_NONE ? 0 : (3 + kIndependent + kErases) * l.keys();
    return PackedRows::floats<kGate, kErase>(l) + decayed + 4 * l.scores() + kIndependent * l.values() +
           kWarps * kRowsReduced * l.width();
  }
  template <fw_gate kGate, fw_erase kErase>
  __device__ float *lay_out(const Panels &l, float *memory) {
    float *next = rows.lay_out<kGate, kErase>(l, memory);
    const auto take = [&](int32_t n) {
      float *from = next;
      next += n;
      return from;
    };
    constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
    if constexpr (kGate == FW_GATE_NONE) {
      ends_k = rows.k, ends_b = rows.b, reads_q = rows.q, reads_x = rows.x, runs = nullptr;
    } else {
      ends_k = take(l.keys()), reads_q = take(l.keys()), runs = take(l.keys());
      ends_b = kIndependent ? take(l.keys()) : nullptr;
      reads_x = kErases ? take(l.keys()) : nullptr;
    }
    qk = take(l.scores()), qb = take(l.scores()), xk = take(l.scores()), xb = take(l.scores());
    w = kIndependent ? take(l.values()) : nullptr;
    partial = take(kWarps * kRowsReduced * l.width());
    return next;
  }
};

// The products of key j with later queries and erase keys, decayed row by row on the way; one warp a key, which leaves
// `ends` = D_{j+1:n} key_j behind.
template <fw_gate kGate, bool kErases, bool kAfter>
__device__ __noinline__ inline void score_key(const Panels &l, const DeviceChunk &c, int n, int j, const float *keys, float *ends,
                                 float *with_q, float *with_x) {
  const int lane = threadIdx.x % 32;
  float diagonal = 0;
#pragma unroll 1
  for (int d = lane; d < l.pitch; d += 32) {
    const float key = keys[j * l.pitch + d];
    if constexpr (kGate != FW_GATE_NONE) ends[j * l.pitch + d] = key;
    diagonal = fmaf(c.rows.q[j * l.pitch + d], key, diagonal);
  }
  diagonal = cuda::warp_sum(diagonal);
  if (lane == 0) with_q[j * l.rows + j] = diagonal;
#pragma unroll 1
  for (int i = j + 1; i < n; ++i) {
    float sum_q = 0, sum_x = 0;
#pragma unroll 1
    for (int d = lane; d < l.pitch; d += 32) {
      const int at = i * l.pitch + d, from = j * l.pitch + d;
      const float earlier = ends[from], decayed = kGate == FW_GATE_NONE ? earlier : earlier * c.rows.decay[at];
      if constexpr (kGate != FW_GATE_NONE) ends[from] = decayed;
      sum_q = fmaf(c.rows.q[at], decayed, sum_q);
      if constexpr (kErases) sum_x = fmaf(c.rows.x[at], kAfter ? decayed : earlier, sum_x);
    }
    sum_q = cuda::warp_sum(sum_q);
    sum_x = cuda::warp_sum(sum_x);
    if (lane == 0) {
      with_q[i * l.rows + j] = sum_q;
      if constexpr (kErases) with_x[i * l.rows + j] = sum_x;
    }
  }
}

// Scores and decayed rows of a packed chunk. Begins after a barrier behind the packing, ends with one.
template <fw_gate kGate, fw_erase kErase>
__device__ __noinline__ inline void score_rows(const Panels &l, const DeviceChunk &c, int n) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kAfter = kErase == FW_ERASE_SHARED_AFTER;
#pragma unroll 1
  for (int j = threadIdx.x / 32; j < n; j += kWarps) {
    score_key<kGate, kErases, kAfter>(l, c, n, j, c.rows.k, c.ends_k, c.qk, c.xk);
    if constexpr (kErase == FW_ERASE_INDEPENDENT) score_key<kGate, true, false>(l, c, n, j, c.rows.b, c.ends_b, c.qb, c.xb);
  }
  if constexpr (kGate != FW_GATE_NONE) {
#pragma unroll 1
    for (int d = threadIdx.x; d < l.pitch; d += kThreads) {
      float run = 1.0f;
#pragma unroll 1
      for (int i = 0; i < n; ++i) {
        const int at = i * l.pitch + d;
        const float before = run;
        run *= c.rows.decay[at];
        c.runs[at] = run;
        c.reads_q[at] = run * c.rows.q[at];
        if constexpr (kErases) c.reads_x[at] = (kAfter ? run : before) * c.rows.x[at];
      }
    }
  }
  __syncthreads();  // scores and decayed rows are there
}

// What the rows write: u (in place over v') and w, from the state at the chunk's start; one thread a column.
template <fw_erase kErase>
__device__ inline void solve_chunk(const Panels &l, const Owner &own, const DeviceChunk &c, int n, const Tile &S, float *from_x) {
  if constexpr (kErase == FW_ERASE_NONE) return;
  reduce_rows(l, own, n, c.reads_x, S, c.partial, from_x);
  const int pitch = l.value_pitch();
#pragma unroll 1
  for (int column = threadIdx.x; column < l.width(); column += kThreads) {
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      float z = from_x[i * pitch + column];
#pragma unroll 1
      for (int j = 0; j < i; ++j) z = fmaf(c.xk[i * l.rows + j], c.rows.u[j * pitch + column], z);
      if constexpr (kIsShared<kErase>) c.rows.u[i * pitch + column] -= z;
      if constexpr (kErase == FW_ERASE_INDEPENDENT) {
#pragma unroll 1
        for (int j = 0; j < i; ++j) z = fmaf(c.xb[i * l.rows + j], c.w[j * pitch + column], z);
        c.w[i * pitch + column] = z;
      }
    }
  }
  __syncthreads();  // u and w are there
}

// S = D_{1:n} S + ends_k^T u + ends_b^T w.
template <fw_gate kGate, fw_erase kErase>
__device__ inline void advance_tile(const Panels &l, const Owner &own, const DeviceChunk &c, int n, Tile &S) {
  if constexpr (kGate != FW_GATE_NONE) scale_tile(own, c.runs + (n - 1) * l.pitch, S);
  add_outer_rows(l, own, n, c.ends_k, c.rows.u, S);
  if constexpr (kErase == FW_ERASE_INDEPENDENT) add_outer_rows(l, own, n, c.ends_b, c.w, S);
}

}  // namespace fw::recurrence
