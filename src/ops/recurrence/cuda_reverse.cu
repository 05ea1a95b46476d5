// SPDX-License-Identifier: Apache-2.0
// The reverse of the recurrence on CUDA, for every row, type and size.
//
// Plan: as many blocks of 256 threads as fit on the device, two a multiprocessor; each takes (sequence, value head, value
// panel) after another. A panel of the state and one of its gradient stay in registers (8 x 4 each a thread). Segments of
// 64 rows are visited from the last to the first: the states at the starts of the segment's chunks (1024 / padded K rows) are
// rebuilt from the saved one and kept in scratch in global memory; then the chunks are reversed. Sums over columns are those
// of the panel alone: gradients of q, k, x, b and g leave as fp32 rows for each panel, which cuda_finish.cu adds up, since all
// of them are linear in what a panel contributes. Shared memory: at most 14 arrays of 4 KB of keys, 5 of values, scores and
// partial sums of 4 rows a warp: with a vector gate and independent keys 77 KB at K = 128 and 122 KB up to K = 64, so that one
// block a multiprocessor runs there and devices with less (99 KB on 8.6, 8.9 and 12.x) are refused. Barriers: between the steps of a chunk;
// each function says which it ends with.
#include "cuda/device.hpp"
#include "cuda/launch.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_row_gradients.cuh"
#include "ops/recurrence/cuda_tile.cuh"

namespace fw::recurrence {
namespace {

constexpr int kBlocksTogether = 2;  // a multiprocessor

// Shared memory of a block: a chunk and the gradients of it.
struct ReverseShared {
  DeviceChunk chunk;
  float *d_o, *d_u, *d_z;                      // [rows][value_pitch]; d_z also holds what x reads of the state
  float *d_reads_q, *d_reads_x, *d_k, *d_b;    // [rows][pitch]
  float *d_qk, *d_qb, *d_xk, *d_xb;            // [rows][rows]
  float *d_total;                              // [pitch]

  template <fw_gate kGate, fw_erase kErase>
  static int32_t floats(const Panels &l) {
    return DeviceChunk::floats<kGate, kErase>(l) + 3 * l.values() + (2 + (kErase != FW_ERASE_NONE) + (kErase == FW_ERASE_INDEPENDENT)) * l.keys() +
           4 * l.scores() + l.pitch;
  }
  template <fw_gate kGate, fw_erase kErase>
  __device__ void lay_out(const Panels &l, float *memory) {
    float *next = chunk.lay_out<kGate, kErase>(l, memory);
    const auto take = [&](int32_t n) {
      float *from = next;
      next += n;
      return from;
    };
    d_o = take(l.values()), d_u = take(l.values()), d_z = take(l.values());
    d_reads_q = take(l.keys()), d_k = take(l.keys());
    d_reads_x = kErase != FW_ERASE_NONE ? take(l.keys()) : nullptr;
    d_b = kErase == FW_ERASE_INDEPENDENT ? take(l.keys()) : nullptr;
    d_qk = take(l.scores()), d_qb = take(l.scores()), d_xk = take(l.scores()), d_xb = take(l.scores());
    d_total = take(l.pitch);
  }
};

// d_o of the rows times scale, through the normaliser's division; one warp a row.
__device__ __noinline__ void load_d_o(const Problem &p, const Panels &l, const RowRange &r, int32_t panel, const float *divisors, float *to) {
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < r.rows; i += kWarps) {
    const TokenPlace place = place_of(p, r.first + i);
    const int64_t token = place.token, first = static_cast<int64_t>(panel) * l.width();
    const bool is_read = given(p.d_o) && place.sub == p.n_sub - 1;
    const float divisor = divisors ? divisors[(r.batch * p.T + token) * p.H + r.h] : 1.0f;
    const int64_t offset = is_read ? head_offset(p.d_o, r.batch, token, r.hv) : 0;
    for (int c = threadIdx.x % 32; c < l.value_pitch(); c += 32) {
      const bool is_there = is_read && c < l.width() && first + c < p.V;
      to[i * l.value_pitch() + c] = is_there ? load_at(p.d_o, offset + (first + c) * p.d_o.strides[3]) / divisor * p.scale_f32 : 0.0f;
    }
  }
}

// Packs, scores and solves the chunk whose state at the start is S. Ends with a barrier.
template <fw_gate kGate, fw_erase kErase>
__device__ inline void prepare(const Problem &p, const Panels &l, const Owner &own, const RowRange &r, int32_t panel,
                               const ReverseShared &s, const Tile &S) {
  __syncthreads();  // the chunk before is done with
  pack_rows<kGate, kErase>(p, l, r, panel, s.chunk.rows);
  __syncthreads();
  score_rows<kGate, kErase>(l, s.chunk, r.rows);
  solve_chunk<kErase>(l, own, s.chunk, r.rows, S, s.d_z);
}

// Gradients of u and w, one thread a column. d_u holds ends_k dS and d_z (independent) ends_b dS. Ends with a barrier.
template <fw_erase kErase>
__device__ __noinline__ void reverse_solve(const Panels &l, const ReverseShared &s, int n) {
  const DeviceChunk &c = s.chunk;
  const int pitch = l.value_pitch();
#pragma unroll 1
  for (int column = threadIdx.x; column < l.width(); column += kThreads) {
#pragma unroll 1
    for (int i = n - 1; i >= 0; --i) {
      if constexpr (kErase == FW_ERASE_INDEPENDENT) {
        float z = s.d_z[i * pitch + column];
#pragma unroll 1
        for (int j = i; j < n; ++j) z = fmaf(c.qb[j * l.rows + i], s.d_o[j * pitch + column], z);
#pragma unroll 1
        for (int j = i + 1; j < n; ++j) z = fmaf(c.xb[j * l.rows + i], s.d_z[j * pitch + column], z);
        s.d_z[i * pitch + column] = z;
      }
      float u = s.d_u[i * pitch + column];
#pragma unroll 1
      for (int j = i; j < n; ++j) u = fmaf(c.qk[j * l.rows + i], s.d_o[j * pitch + column], u);
      if constexpr (kErase != FW_ERASE_NONE) {
#pragma unroll 1
        for (int j = i + 1; j < n; ++j) u = fmaf(c.xk[j * l.rows + i], s.d_z[j * pitch + column], u);
      }
      s.d_u[i * pitch + column] = u;
      if constexpr (kIsShared<kErase>) s.d_z[i * pitch + column] = -u;
    }
  }
  __syncthreads();  // d_u and d_z are there
}

__device__ inline float dot_values(const Panels &l, const float *a, const float *b) {
  float sum = 0;
  for (int c = 0; c < l.width(); c += 4) {
    const float4 x = *reinterpret_cast<const float4 *>(a + c), y = *reinterpret_cast<const float4 *>(b + c);
    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
  }
  return sum;
}

// Gradients of the scores: one thread a pair of rows, none past the diagonal.
template <fw_erase kErase>
__device__ __noinline__ void reverse_pairs(const Panels &l, const ReverseShared &s, int n) {
  const int pitch = l.value_pitch();
  const float *u = s.chunk.rows.u, *w = s.chunk.w;
#pragma unroll 1
  for (int at = threadIdx.x; at < n * n; at += kThreads) {
    const int i = at / n, j = at % n, to = i * l.rows + j;
    if (j > i) continue;
    s.d_qk[to] = dot_values(l, s.d_o + i * pitch, u + j * pitch);
    if constexpr (kErase == FW_ERASE_INDEPENDENT) s.d_qb[to] = dot_values(l, s.d_o + i * pitch, w + j * pitch);
    if (j == i) continue;
    if constexpr (kErase != FW_ERASE_NONE) s.d_xk[to] = dot_values(l, s.d_z + i * pitch, u + j * pitch);
    if constexpr (kErase == FW_ERASE_INDEPENDENT) s.d_xb[to] = dot_values(l, s.d_z + i * pitch, w + j * pitch);
  }
}

// From the gradients of scores, reads, ends and of the whole decay to those of q, x, k, b and g; one thread a channel.
// dg is gathered as the flow across each decay. d_reads_q keeps a scalar gate's part of a channel.
template <fw_gate kGate, fw_erase kErase>
__device__ __noinline__ void reverse_channels(const Problem &p, const Panels &l, const ReverseShared &s, int n, int64_t first_out,
                                        const RowGradients &out) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  constexpr bool kAfter = kErase == FW_ERASE_SHARED_AFTER, kGated = kGate != FW_GATE_NONE;
  const DeviceChunk &c = s.chunk;
#pragma unroll 1
  for (int d = threadIdx.x; d < l.pitch; d += kThreads) {
    float d_run = kGated ? s.d_total[d] : 0.0f;
#pragma unroll 1
    for (int i = n - 1; i >= 0; --i) {
      const int at = i * l.pitch + d, score = i * l.rows;
      const float q = c.rows.q[at], x = kErases ? c.rows.x[at] : 0.0f, d_read_q = s.d_reads_q[at];
      const float decay = kGated ? c.rows.decay[at] : 1.0f, run = kGated ? c.runs[at] : 1.0f;
      const float d_read_x = kErases ? s.d_reads_x[at] : 0.0f;
      float d_q = run * d_read_q, d_x = kAfter ? run * d_read_x : 0.0f;
      d_run = fmaf(q, d_read_q, d_run);
      if constexpr (kAfter) d_run = fmaf(x, d_read_x, d_run);
      d_q = fmaf(s.d_qk[score + i], c.rows.k[at], d_q);
      s.d_k[at] = fmaf(s.d_qk[score + i], q, s.d_k[at]);
      if constexpr (kIndependent) {
        d_q = fmaf(s.d_qb[score + i], c.rows.b[at], d_q);
        s.d_b[at] = fmaf(s.d_qb[score + i], q, s.d_b[at]);
      }
      float d_g = run * d_run, between = 1.0f;  // between: D_{j+1:i-1}
#pragma unroll 1
      for (int j = i - 1; j >= 0; --j) {
        const int from = j * l.pitch + d;
        const float d_xk = kErases ? s.d_xk[score + j] : 0.0f;
        s.d_k[from] = reverse_pair<kGate, kErases, kAfter>(c.rows.k[from] * between, decay, q, x, s.d_qk[score + j], d_xk,
                                                           s.d_k[from], &d_q, &d_x, &d_g);
        if constexpr (kIndependent) {
          s.d_b[from] = reverse_pair<kGate, true, false>(c.rows.b[from] * between, decay, q, x, s.d_qb[score + j],
                                                         s.d_xb[score + j], s.d_b[from], &d_q, &d_x, &d_g);
        }
        if constexpr (kGated) between *= c.rows.decay[from];
      }
      d_run *= decay;
      if constexpr (kErases && !kAfter) {
        d_run = fmaf(x, d_read_x, d_run);
        d_x = fmaf(kGated && i > 0 ? c.runs[at - l.pitch] : 1.0f, d_read_x, d_x);
      }
      if constexpr (kGate == FW_GATE_SCALAR) s.d_reads_q[at] = d_g;
      if (d >= p.K) continue;
      const int64_t to = (first_out + i * p.HV) * p.K + d;
      out.d_q[to] = d_q;
      out.d_k[to] = s.d_k[at];  // no row before i adds to it
      if constexpr (kErases) out.d_x[to] = d_x;
      if constexpr (kIndependent) out.d_b[to] = s.d_b[at];
      if constexpr (kGate == FW_GATE_VECTOR) out.d_g[to] = d_g;
    }
  }
  if constexpr (kGate == FW_GATE_SCALAR) {
    __syncthreads();  // every channel's part is there
#pragma unroll 1
    for (int i = threadIdx.x / 32; i < n; i += kWarps) {
      float sum = 0;
      for (int d = threadIdx.x % 32; d < p.K; d += 32) sum += s.d_reads_q[i * l.pitch + d];
      sum = cuda::warp_sum(sum);
      if (threadIdx.x % 32 == 0) out.d_g[first_out + i * p.HV] = sum;
    }
  }
}

// dv, d_write_gate, and what v' gives of dbeta; one warp a row.
template <fw_erase kErase>
__device__ __noinline__ void store_values(const Problem &p, const Panels &l, const RowRange &r, int32_t panel, const float *d_u,
                                    int64_t first_out, const RowGradients &out) {
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < r.rows; i += kWarps) {
    const int64_t row = r.first + i, token = place_of(p, row).token, first = static_cast<int64_t>(panel) * l.width();
    const float beta = kIsShared<kErase> ? load_beta(p, r.batch, row, r.hv) : 1.0f;
    const bool has_gate = kIsShared<kErase> && given(p.write_gate);
    const int64_t from = head_offset(p.v, r.batch, row, r.hv), to = head_offset(p.dv, r.batch, row, r.hv);
    const int64_t gate = head_offset(p.write_gate, r.batch, token, r.hv);
    float sum = 0;
    for (int c = threadIdx.x % 32; c < l.width() && first + c < p.V; c += 32) {
      const float d = d_u[i * l.value_pitch() + c], v = load_at(p.v, from + (first + c) * p.v.strides[3]);
      const float g = has_gate ? load_at(p.write_gate, gate + (first + c) * p.write_gate.strides[3]) : 1.0f;
      sum = fmaf(d, v * g, sum);
      if (given(p.dv)) store_at(p.dv, to + (first + c) * p.dv.strides[3], d * beta * g);
      if (has_gate && given(p.d_write_gate)) {
        store_at(p.d_write_gate, head_offset(p.d_write_gate, r.batch, token, r.hv) + (first + c) * p.d_write_gate.strides[3], d * beta * v);
      }
    }
    sum = cuda::warp_sum(sum);
    if (out.d_beta && threadIdx.x % 32 == 0) out.d_beta[first_out + i * p.HV] = sum;
  }
}

// One chunk from the gradient of the state at its end, dS, to that at its start.
template <fw_gate kGate, fw_erase kErase>
__device__ inline void reverse_chunk(const Problem &p, const Panels &l, const Owner &own, const RowRange &r, int32_t panel,
                                     const float *divisors, const ReverseShared &s, const Tile &S, Tile &dS,
                                     const RowGradients &out) {
  constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  const DeviceChunk &c = s.chunk;
  const int n = r.rows;
  const int64_t first_out = ((panel * p.B + r.batch) * p.R + r.first) * p.HV + r.hv;
  prepare<kGate, kErase>(p, l, own, r, panel, s, S);
  load_d_o(p, l, r, panel, divisors, s.d_o);
  reduce_rows(l, own, n, c.ends_k, dS, c.partial, s.d_u);
  if constexpr (kIndependent) reduce_rows(l, own, n, c.ends_b, dS, c.partial, s.d_z);
  reverse_solve<kErase>(l, s, n);
  reverse_pairs<kErase>(l, s, n);
  reduce_columns(l, own, n, s.d_o, S, s.d_reads_q);
  reduce_columns(l, own, n, c.rows.u, dS, s.d_k);
  if constexpr (kErases) reduce_columns(l, own, n, s.d_z, S, s.d_reads_x);
  if constexpr (kIndependent) reduce_columns(l, own, n, c.w, dS, s.d_b);
  if constexpr (kGate != FW_GATE_NONE) {
    float v[kRowsOwned];
#pragma unroll
    for (int i = 0; i < kRowsOwned; ++i) {
      v[i] = fmaf(S[i][0], dS[i][0], fmaf(S[i][1], dS[i][1], fmaf(S[i][2], dS[i][2], S[i][3] * dS[i][3])));
    }
    sum_over_lanes(l, own, v, s.d_total + own.row);
    scale_tile(own, c.runs + (n - 1) * l.pitch, dS);
  }
  add_outer_rows(l, own, n, c.reads_q, s.d_o, dS);
  if constexpr (kErases) add_outer_rows(l, own, n, c.reads_x, s.d_z, dS);
  __syncthreads();  // gradients of scores, reads and ends are there
  reverse_channels<kGate, kErase>(p, l, s, n, first_out, out);
  store_values<kErase>(p, l, r, panel, s.d_u, first_out, out);
}

__device__ inline void keep_tile(float4 *states, int chunk, const Tile &S) {
#pragma unroll
  for (int r = 0; r < kRowsOwned; ++r) {
    states[(chunk * kRowsOwned + r) * kThreads + threadIdx.x] = make_float4(S[r][0], S[r][1], S[r][2], S[r][3]);
  }
}
__device__ inline void fetch_tile(const float4 *states, int chunk, Tile &S) {
#pragma unroll
  for (int r = 0; r < kRowsOwned; ++r) {
    const float4 x = states[(chunk * kRowsOwned + r) * kThreads + threadIdx.x];
    S[r][0] = x.x, S[r][1] = x.y, S[r][2] = x.z, S[r][3] = x.w;
  }
}

template <fw_gate kGate, fw_erase kErase>
__global__ void __launch_bounds__(kThreads, kBlocksTogether)
    reverse(const __grid_constant__ Problem p, const __grid_constant__ Panels l, const float *divisors, const float *saved,
            const __grid_constant__ RowGradients out) {
  ReverseShared s;
  s.lay_out<kGate, kErase>(l, cuda::dynamic_shared<float>());
  const int chunks = static_cast<int>(kSegmentRows / l.rows);
  float4 *states = reinterpret_cast<float4 *>(out.states) + static_cast<int64_t>(blockIdx.x) * chunks * kRowsOwned * kThreads;
  const int64_t items = p.N * p.HV * l.count;
  for (int64_t item = blockIdx.x; item < items; item += gridDim.x) {
    const BlockPlace block = place_of_block(p, l.count, static_cast<uint32_t>(item));
    const int32_t panel = block.panel;
    const int64_t hv = block.hv, n = block.n;
    const cuda::DeviceSegment segment = cuda::device_segment(p.cu_seqlens, p.T, n);
    const int64_t begin = segment.begin * p.n_sub, end = segment.end * p.n_sub;
    const Owner own(l, panel);
    Tile S, dS;
    load_tile(p, p.d_final_state, n, hv, own, dS);
    const auto range = [&](int64_t first) {
      return RowRange{segment.batch, first, hv, block.h, end - first < l.rows ? static_cast<int32_t>(end - first) : l.rows};
    };
    for (int64_t segments = (end - begin + kSegmentRows - 1) / kSegmentRows, i = segments - 1; i >= 0; --i) {
      const int64_t first = begin + i * kSegmentRows, rows = end - first < kSegmentRows ? end - first : kSegmentRows;
      const int last = static_cast<int>((rows - 1) / l.rows);
      load_saved_tile(p, saved_slot_at(p, n, begin) + i, hv, own, saved, S);
      for (int chunk = 0; chunk < last; ++chunk) {
        keep_tile(states, chunk, S);
        const RowRange r = range(first + chunk * l.rows);
        prepare<kGate, kErase>(p, l, own, r, panel, s, S);
        advance_tile<kGate, kErase>(l, own, s.chunk, r.rows, S);
      }
      for (int chunk = last; chunk >= 0; --chunk) {
        if (chunk < last) fetch_tile(states, chunk, S);
        reverse_chunk<kGate, kErase>(p, l, own, range(first + chunk * l.rows), panel, divisors, s, S, dS, out);
      }
    }
    store_tile(p, p.d_initial_state, n, hv, own, dS);
  }
}

struct SharedBytes {
  template <fw_gate kGate, fw_erase kErase>
  static int32_t run(const Panels &l) {
    return 4 * ReverseShared::floats<kGate, kErase>(l);
  }
};

struct Launch {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p, const Panels &l, const float *divisors, const float *saved, const RowGradients &rows) {
    const int32_t bytes = SharedBytes::run<kGate, kErase>(l);
    cuda::launch({static_cast<uint32_t>(reverse_blocks(p)), kThreads, bytes, static_cast<cudaStream_t>(p.stream)}, reverse<kGate, kErase>, p, l, divisors, saved, rows);
  }
};

}  // namespace

int32_t reverse_shared_bytes(const Problem &p) { return dispatch_axes<SharedBytes>(p, plan_panels(p)); }

int64_t reverse_blocks(const Problem &p) {
  const int64_t items = p.N * p.HV * plan_panels(p).count, most = kBlocksTogether * cuda::multiprocessor_count();
  return items < most ? items : most;
}

int64_t reverse_state_floats(const Problem &p) {
  return kSegmentRows / plan_panels(p).rows * kRowsOwned * kColumnsOwned * kThreads;
}

void launch_reverse(const Problem &p, const float *divisors, const float *saved, const RowGradients &rows) {
  dispatch_axes<Launch>(p, p, plan_panels(p), divisors, saved, rows);
}

}  // namespace fw::recurrence
