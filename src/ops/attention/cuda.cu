// SPDX-License-Identifier: Apache-2.0
// Causal softmax attention on CUDA, right for every type, stride, window and cache; no speed is promised.
//
// Plan
//   1  turn: q (times scale) and k of the call as turned fp32 rows in the workspace, angles in fp64
//   2  forward, step: a block a (row, query head, 256 columns of the output), a warp 64 positions at a time; it walks their keys 32
//      at a time, a lane a key for the scores and 8 columns a lane for the weighted sum. What the warps found is merged in the
//      order of the positions. Both numbers divide the positions where they start, so that a row's bits depend neither on how its
//      sequence is cut into calls nor on the rows beside it
//      backward: the same walk by one warp for the three numbers a row that give its probabilities again, once more for dq, then a warp a (key,
//      key head, 256 columns) walks the rows that see it, for dk and dv
//   3  step: the caches get the last rows, after every read. Backward: dq and dk are turned back and stored
// Workspace: floats, q [R,HQ,D], k [R,HK,D]; backward the same again for dq and dk, and three a (row, query head).
#include <initializer_list>

#include "core/ledger.hpp"
#include "cuda/candidate.hpp"
#include "cuda/launch.cuh"
#include "cuda/launch.hpp"
#include "cuda/rows.cuh"
#include "ops/attention/problem.hpp"

namespace fw::attention {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kOwned = 8;               // columns of a lane
constexpr int64_t kPart = 32 * kOwned;  // columns of a warp
constexpr int kForwardWarps = 8, kSegment = 64;
constexpr int kTogether = 8;  // keys whose values are under way together

struct Buffers {
  float *q, *k;                        // [R,HQ,D] turned, times scale; [R,HK,D] turned
  float *reference, *inverse, *delta;  // [R,HQ]: p = exp(score - reference) * inverse; delta = o . d_o
  float *dq, *dk;                      // [R,HQ,D], [R,HK,D], before they are turned back
};

// A sequence as the device sees it. slot: negative skips it; also of the rows of no sequence.
struct Rows {
  int64_t batch, begin, end, first, oldest, slot;
};
__device__ inline int64_t position_at(const fw_tensor &t, int64_t n) {
  const int64_t at = load_int(t, n);
  return at < 0 ? 0 : at > kMaxPosition ? kMaxPosition : at;
}
__device__ __noinline__ Rows rows_around(const Problem &p, int64_t batch, int64_t row) {
  const int64_t n = cuda::sequence_of_row(p.cu_seqlens, p.N, p.T, batch, row);
  if (n < 0) return {batch, row, row + 1, 0, 0, -1};
  const cuda::DeviceSegment s = cuda::device_segment(p.cu_seqlens, p.T, n);
  Rows rows = {s.batch, s.begin, s.end, 0, 0, n};
  if (p.direction == FW_STEP) {
    rows.first = position_at(p.cache_lengths, n);
    if (given(p.cache_indices)) rows.slot = load_int(p.cache_indices, n);
    if (rows.slot >= p.k_cache.shape[0]) rows.slot = -1;
  } else {
    if (given(p.start_positions)) rows.first = position_at(p.start_positions, n);
    rows.oldest = rows.first;
  }
  return rows;
}

__device__ inline float load_at(const fw_tensor &t, int64_t row, int64_t i) {
  return cuda::load_element(t.data, t.dtype, row + i * t.strides[3]);
}
__device__ inline void store_at(const fw_tensor &t, int64_t row, int64_t i, float x) {
  cuda::store_element(t.data, t.dtype, row + i * t.strides[3], x);
}

struct Sine {
  float cos, sin;
};
__device__ __noinline__ Sine sine_of(const Problem &p, int64_t position, int64_t i) {
  const double angle = static_cast<double>(position) * pow(p.theta, -2.0 * static_cast<double>(i) / static_cast<double>(p.D));
  return {static_cast<float>(cos(angle)), static_cast<float>(sin(angle))};
}

// ---- 1 and 3: rows in and out ----

// Element i (with RoPE: i and i + D/2) of every head of q and k into the workspace.
__global__ void __launch_bounds__(kThreads) turn(const __grid_constant__ Problem p, const __grid_constant__ Buffers b) {
  const bool is_turned = p.theta > 0;
  const int64_t width = is_turned ? p.D / 2 : p.D, heads = p.HQ + p.HK, items = p.rows() * heads * width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t i = item % width, head = item / width % heads, r = item / width / heads, batch = r / p.T, row = r % p.T;
    const Rows s = rows_around(p, batch, row);
    if (s.slot < 0) continue;
    const bool is_q = head < p.HQ;
    const fw_tensor &t = is_q ? p.q : p.k;
    const int64_t h = is_q ? head : head - p.HQ, from = row_offset(t, batch, row, h);
    float *to = is_q ? b.q + (r * p.HQ + h) * p.D : b.k + (r * p.HK + h) * p.D;
    const float scale = is_q ? static_cast<float>(p.scale) : 1.0f;
    if (!is_turned) {
      to[i] = load_at(t, from, i) * scale;
      continue;
    }
    const Sine a = sine_of(p, s.first + row - s.begin, i);
    const float x1 = load_at(t, from, i), x2 = load_at(t, from, i + width);
    to[i] = (x1 * a.cos - x2 * a.sin) * scale;
    to[i + width] = (x2 * a.cos + x1 * a.sin) * scale;
  }
}

// dq or dk out of the workspace; 0 for rows of no sequence.
__global__ void __launch_bounds__(kThreads) turn_back(const __grid_constant__ Problem p, const __grid_constant__ fw_tensor t,
                                                      const float *from, float scale) {
  const bool is_turned = p.theta > 0;
  const int64_t width = is_turned ? p.D / 2 : p.D, heads = t.shape[2], items = p.rows() * heads * width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t i = item % width, h = item / width % heads, r = item / width / heads, batch = r / p.T, row = r % p.T;
    const Rows s = rows_around(p, batch, row);
    const float *x = from + (r * heads + h) * p.D;
    const int64_t to = row_offset(t, batch, row, h);
    const bool is_real = s.slot >= 0;
    if (!is_turned) {
      store_at(t, to, i, is_real ? x[i] * scale : 0.0f);
      continue;
    }
    const Sine a = sine_of(p, s.first + row - s.begin, i);
    store_at(t, to, i, is_real ? (x[i] * a.cos + x[i + width] * a.sin) * scale : 0.0f);
    store_at(t, to, i + width, is_real ? (x[i + width] * a.cos - x[i] * a.sin) * scale : 0.0f);
  }
}

__global__ void __launch_bounds__(kThreads) store_caches(const __grid_constant__ Problem p, const float *turned_k) {
  const int64_t width = p.D > p.DV ? p.D : p.DV, items = p.rows() * p.HK * width;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; item < items; item += step) {
    const int64_t i = item % width, h = item / width % p.HK, r = item / width / p.HK, batch = r / p.T, row = r % p.T;
    const Rows s = rows_around(p, batch, row);
    if (s.slot < 0 || row < s.end - p.capacity) continue;
    const int64_t place = (s.first + row - s.begin) % p.capacity;
    if (i < p.D) store_at(p.k_cache, row_offset(p.k_cache, s.slot, place, h), i, turned_k[(r * p.HK + h) * p.D + i]);
    if (i < p.DV) store_at(p.v_cache, row_offset(p.v_cache, s.slot, place, h), i, load_at(p.v, row_offset(p.v, batch, row, h), i));
  }
}

// ---- 2: walks ----

// One row of one query head; it sees positions [low, position].
struct Query {
  Rows s;
  int64_t batch, row, hq, hk, index;  // index: of (row, head) in the workspace
  int64_t low, position;
  __device__ Query(const Problem &p, int64_t i)
      : s(rows_around(p, i / p.HQ / p.T, i / p.HQ % p.T)), batch(i / p.HQ / p.T), row(i / p.HQ % p.T), hq(i % p.HQ),
        hk(hq / p.group()), index(i), position(s.first + row - s.begin) {
    low = position - p.reach + 1 > s.oldest ? position - p.reach + 1 : s.oldest;
  }
};

__device__ inline const float *key_row(const Problem &p, const Buffers &b, const Query &q, int64_t at) {
  return b.k + ((q.batch * p.T + q.s.begin + at - q.s.first) * p.HK + q.hk) * p.D;
}
// v of a position and where it lies: in the call or in the cache.
struct Place {
  const fw_tensor *t;
  int64_t offset;
};
__device__ inline Place value_row(const Problem &p, const Query &q, int64_t at) {
  if (at < q.s.first) return {&p.v_cache, row_offset(p.v_cache, q.s.slot, at % p.capacity, q.hk)};
  return {&p.v, row_offset(p.v, q.batch, q.s.begin + at - q.s.first, q.hk)};
}

__device__ inline cuda::Row workspace_row(const float *x) {
  return {const_cast<float *>(x), FW_F32, 0, 1, reinterpret_cast<uintptr_t>(x) % sizeof(float4) == 0};
}
__device__ __noinline__ float score_of(const Problem &p, const Buffers &b, const Query &q, int64_t at) {
  constexpr int kQuads = 4;
  const cuda::Row x = workspace_row(b.q + q.index * p.D);
  const cuda::Row key = at >= q.s.first ? workspace_row(key_row(p, b, q, at))
                                        : cuda::row_at(p.k_cache, row_offset(p.k_cache, q.s.slot, at % p.capacity, q.hk),
                                                       p.k_cache.strides[3]);
  float sum = 0;
#pragma unroll 1
  for (int64_t d = 0; d < p.D; d += 4 * kQuads) {
    float xs[kQuads][4], ks[kQuads][4];
    cuda::load_quads(key, d, p.D, ks);
    cuda::load_quads(x, d, p.D, xs);
#pragma unroll
    for (int i = 0; i < 4 * kQuads; ++i) sum = fmaf(xs[i / 4][i % 4], ks[i / 4][i % 4], sum);
  }
  return sum;
}
// d_o . v of a (row, query head) and a place of v
__device__ __noinline__ float value_gradient(const Problem &p, int64_t d_o, const Place &v) {
  float sum = 0;
  for (int64_t d = 0; d < p.DV; ++d) sum = fmaf(load_at(p.d_o, d_o, d), load_at(*v.t, v.offset, d), sum);
  return sum;
}

__device__ inline float warp_max(float x) {
  for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
}

// The softmax so far; add returns this lane's weight, relative to the largest score, and rescales what was summed before.
struct Softmax {
  float top = -INFINITY, sum = 0, rescale = 0;
  __device__ float add(bool is_seen, float score) {
    const float next = fmaxf(top, warp_max(is_seen ? score : -INFINITY)), reference = next == -INFINITY ? 0.0f : next;
    const float weight = is_seen ? expf(score - reference) : 0.0f;
    rescale = expf(top - reference);
    sum = sum * rescale + cuda::warp_sum(weight);
    top = next;
    return weight;
  }
  // Takes in the softmax of what comes after; returns the factor of its sums.
  __device__ float merge(float later_top, float later_sum) {
    const float next = fmaxf(top, later_top), reference = next == -INFINITY ? 0.0f : next;
    const float factor = expf(later_top - reference);
    rescale = expf(top - reference);
    sum = sum * rescale + later_sum * factor;
    top = next;
    return factor;
  }
};

// f(first position of a block, whether this lane's position is seen) for the blocks from the one of `first` to `last`
template <class F>
__device__ inline void for_blocks(const Query &q, int64_t first, int64_t last, F f) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int64_t start = first / 32 * 32; start <= last; start += 32) {
    f(start, start + lane >= q.low && start + lane <= q.position);
  }
}

__device__ inline int lanes_from(const Query &q, int64_t start) { return q.low > start ? static_cast<int>(q.low - start) : 0; }
__device__ inline int lanes_to(const Query &q, int64_t start) {
  return q.position - start < 31 ? static_cast<int>(q.position - start) + 1 : 32;
}

// sums[c] += weight of lane j * element(row(j), column c) for the lanes in [begin, end) and this lane's columns below n.
template <class RowOf, class Element>
__device__ inline void add_weighted(float weight, int begin, int end, int64_t column, int64_t n, float (&sums)[kOwned], RowOf row,
                                    Element element) {
#pragma unroll 1
  for (int first = begin; first < end; first += kTogether) {
    float x[kTogether][kOwned];
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (first + u >= end) break;
      const auto from = row(first + u);
#pragma unroll
      for (int c = 0; c < kOwned; ++c) {
        if (column + 32 * c < n) x[u][c] = element(from, column + 32 * c);
      }
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u) {
      if (first + u >= end) break;
      const float w = __shfl_sync(0xffffffffu, weight, first + u);
#pragma unroll
      for (int c = 0; c < kOwned; ++c) {
        if (column + 32 * c < n) sums[c] = fmaf(w, x[u][c], sums[c]);
      }
    }
  }
}

// As above for the values of positions start + j, whose weights the lanes hold.
__device__ inline void add_values(const Problem &p, const Query &q, int64_t start, float weight, int64_t column, float (&sums)[kOwned]) {
  const int begin = lanes_from(q, start), end = lanes_to(q, start);
  const int64_t cached = q.s.first - start < begin ? begin : q.s.first - start > end ? end : q.s.first - start;
  const int lane = threadIdx.x % 32;
  const int64_t offset = lane >= begin && lane < end ? value_row(p, q, start + lane).offset : 0;
  for (const bool is_cached : {true, false}) {
    const fw_tensor &t = is_cached ? p.v_cache : p.v;
    const int first = is_cached ? begin : static_cast<int>(cached), last = is_cached ? static_cast<int>(cached) : end;
    const int64_t stride = t.strides[3];
    if (first >= last) continue;
    cuda::with_type(t.data, t.dtype, [&](const auto *data) {
      add_weighted(weight, first, last, column, p.DV, sums, [&](int j) { return data + __shfl_sync(0xffffffffu, offset, j); },
                   [&](const auto *from, int64_t c) { return cuda::to_float(from[c * stride]); });
    });
  }
}
// f(item) by whole warps
template <class F>
__device__ inline void for_items(int64_t items, F f) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t item = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32; item < items; item += step) f(item);
}

__global__ void __launch_bounds__(32 * kForwardWarps) forward_rows(const __grid_constant__ Problem p, const __grid_constant__ Buffers b) {
  __shared__ float found_top[kForwardWarps], found_sum[kForwardWarps], found_o[kForwardWarps][kOwned][32];
  const int64_t parts = ceil_div(p.DV, kPart), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  for (int64_t item = blockIdx.x; item < p.rows() * p.HQ * parts; item += gridDim.x) {
    const Query q(p, item / parts);
    const int64_t column = item % parts * kPart + lane, first = q.low / kSegment, last = q.position / kSegment;
    float o[kOwned] = {};  // the first warp's: of all segments so far
    Softmax softmax;
    for (int64_t round = first; q.s.slot >= 0 && round <= last; round += kForwardWarps) {
      const int64_t begin = (round + warp) * kSegment, end = begin + kSegment - 1;
      float mine[kOwned] = {};
      Softmax segment;
      if (begin <= q.position) {
        for_blocks(q, begin > q.low ? begin : q.low, end < q.position ? end : q.position, [&](int64_t start, bool is_seen) {
          const float weight = segment.add(is_seen, is_seen ? score_of(p, b, q, start + lane) : 0.0f);
#pragma unroll
          for (int c = 0; c < kOwned; ++c) mine[c] *= segment.rescale;
          add_values(p, q, start, weight, column, mine);
        });
      }
      if (lane == 0) found_top[warp] = segment.top, found_sum[warp] = segment.sum;
#pragma unroll
      for (int c = 0; c < kOwned; ++c) found_o[warp][c][lane] = mine[c];
      __syncthreads();  // the segments of this round are there
      for (int64_t w = 0; warp == 0 && w < kForwardWarps && round + w <= last; ++w) {
        const float factor = softmax.merge(found_top[w], found_sum[w]);
#pragma unroll
        for (int c = 0; c < kOwned; ++c) o[c] = o[c] * softmax.rescale + found_o[w][c][lane] * factor;
      }
      __syncthreads();  // they are read
    }
    if (warp != 0) continue;
    const int64_t to = row_offset(p.o, q.batch, q.row, q.hq);
#pragma unroll
    for (int c = 0; c < kOwned; ++c) {
      if (column + 32 * c < p.DV) store_at(p.o, to, column + 32 * c, q.s.slot >= 0 ? o[c] / softmax.sum : 0.0f);
    }
  }
}

__global__ void __launch_bounds__(kThreads) statistics(const __grid_constant__ Problem p, const __grid_constant__ Buffers b) {
  const int lane = threadIdx.x % 32;
  for_items(p.rows() * p.HQ, [&](int64_t item) {
    const Query q(p, item);
    if (q.s.slot < 0) return;
    const int64_t d_o = row_offset(p.d_o, q.batch, q.row, q.hq);
    Softmax softmax;
    float delta = 0;
    for_blocks(q, q.low, q.position, [&](int64_t start, bool is_seen) {
      const float weight = softmax.add(is_seen, is_seen ? score_of(p, b, q, start + lane) : 0.0f);
      const float product = is_seen ? weight * value_gradient(p, d_o, value_row(p, q, start + lane)) : 0.0f;
      delta = delta * softmax.rescale + cuda::warp_sum(product);
    });
    if (lane != 0) return;
    b.reference[item] = softmax.top == -INFINITY ? 0.0f : softmax.top;
    b.inverse[item] = 1.0f / softmax.sum;
    b.delta[item] = delta / softmax.sum;
  });
}

__global__ void __launch_bounds__(kThreads) query_gradients(const __grid_constant__ Problem p, const __grid_constant__ Buffers b) {
  const int64_t parts = ceil_div(p.D, kPart), lane = threadIdx.x % 32;
  for_items(p.rows() * p.HQ * parts, [&](int64_t item) {
    const Query q(p, item / parts);
    if (q.s.slot < 0) return;
    const int64_t column = item % parts * kPart + lane, d_o = row_offset(p.d_o, q.batch, q.row, q.hq);
    const float reference = b.reference[q.index], inverse = b.inverse[q.index], delta = b.delta[q.index];
    float dq[kOwned] = {};
    for_blocks(q, q.low, q.position, [&](int64_t start, bool is_seen) {
      float d_score = 0;
      if (is_seen) {
        const float probability = expf(score_of(p, b, q, start + lane) - reference) * inverse;
        d_score = probability * (value_gradient(p, d_o, value_row(p, q, start + lane)) - delta);
      }
      add_weighted(d_score, lanes_from(q, start), lanes_to(q, start), column, p.D, dq,
                   [&](int j) { return key_row(p, b, q, start + j); }, [](const float *key, int64_t c) { return key[c]; });
    });
#pragma unroll
    for (int c = 0; c < kOwned; ++c) {
      if (column + 32 * c < p.D) b.dq[q.index * p.D + column + 32 * c] = dq[c];
    }
  });
}

// dk into the workspace or dv, by key.
__global__ void __launch_bounds__(kThreads) key_gradients(const __grid_constant__ Problem p, const __grid_constant__ Buffers b, bool is_dk) {
  const int64_t n = is_dk ? p.D : p.DV, parts = ceil_div(n, kPart), lane = threadIdx.x % 32, group = p.group();
  for_items(p.rows() * p.HK * parts, [&](int64_t item) {
    const int64_t index = item / parts, hk = index % p.HK, r = index / p.HK, batch = r / p.T, row = r % p.T;
    const int64_t column = item % parts * kPart + lane;
    const Rows s = rows_around(p, batch, row);
    const int64_t last = s.end - row < p.reach ? s.end : row + p.reach;  // first row past those that see the key
    const int64_t queries = s.slot >= 0 ? (last - row) * group : 0;
    const Place v = {&p.v, row_offset(p.v, batch, row, hk)};
    float sums[kOwned] = {};
#pragma unroll 1
    for (int64_t start = 0; start < queries; start += 32) {
      float weight = 0;
      if (start + lane < queries) {
        const int64_t t = row + (start + lane) / group, hq = hk * group + (start + lane) % group, i = (batch * p.T + t) * p.HQ + hq;
        float score = 0;
        for (int64_t d = 0; d < p.D; ++d) score = fmaf(b.q[i * p.D + d], b.k[index * p.D + d], score);
        weight = expf(score - b.reference[i]) * b.inverse[i];
        if (is_dk) weight *= value_gradient(p, row_offset(p.d_o, batch, t, hq), v) - b.delta[i];
      }
      const int end = queries - start < 32 ? static_cast<int>(queries - start) : 32;
      const auto row_of = [&](int j) {
        const int64_t t = row + (start + j) / group, hq = hk * group + (start + j) % group;
        return is_dk ? ((batch * p.T + t) * p.HQ + hq) * p.D : row_offset(p.d_o, batch, t, hq);
      };
      add_weighted(weight, 0, end, column, n, sums, row_of,
                   [&](int64_t at, int64_t c) { return is_dk ? b.q[at + c] : load_at(p.d_o, at, c); });
    }
#pragma unroll
    for (int c = 0; c < kOwned; ++c) {
      if (column + 32 * c >= n) continue;
      if (is_dk) {
        b.dk[index * p.D + column + 32 * c] = sums[c];
      } else {
        store_at(p.dv, row_offset(p.dv, batch, row, hk), column + 32 * c, sums[c]);
      }
    }
  });
}

Buffers lay_out(Ledger &ledger, const Problem &p) {
  Buffers b = {};
  if (p.B == 0 || p.T == 0) return b;
  const int64_t rows = product(p.B, p.T), queries = product(rows, p.HQ), keys = product(rows, p.HK);
  b.q = ledger.take<float>(product(queries, p.D));
  b.k = ledger.take<float>(product(keys, p.D));
  if (p.direction != FW_BACKWARD) return b;
  for (float **numbers : {&b.reference, &b.inverse, &b.delta}) *numbers = ledger.take<float>(queries);
  b.dq = ledger.take<float>(product(queries, p.D));
  b.dk = ledger.take<float>(product(keys, p.D));
  return b;
}

void run_backward(const Problem &p, const Buffers &b, int64_t width) {
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  const int64_t queries = p.rows() * p.HQ, keys = p.rows() * p.HK;
  cuda::launch({cuda::grid_of(queries, kWarps), kThreads, 0, stream}, statistics, p, b);
  if (given(p.dq)) {
    cuda::launch({cuda::grid_of(queries * ceil_div(p.D, kPart), kWarps), kThreads, 0, stream}, query_gradients, p, b);
    cuda::launch({cuda::grid_of(queries * width, kThreads), kThreads, 0, stream}, turn_back, p, p.dq, b.dq, static_cast<float>(p.scale));
  }
  if (given(p.dk)) {
    cuda::launch({cuda::grid_of(keys * ceil_div(p.D, kPart), kWarps), kThreads, 0, stream}, key_gradients, p, b, true);
    cuda::launch({cuda::grid_of(keys * width, kThreads), kThreads, 0, stream}, turn_back, p, p.dk, b.dk, 1.0f);
  }
  if (given(p.dv)) cuda::launch({cuda::grid_of(keys * ceil_div(p.DV, kPart), kWarps), kThreads, 0, stream}, key_gradients, p, b, false);
}

}  // namespace

uint64_t CudaPath::workspace(const fw_context &, const Problem &p) {
  Ledger ledger(nullptr);
  lay_out(ledger, p);
  return ledger.bytes();
}

fw_status CudaPath::run(fw_context &, const Problem &p, void *memory) {
  const Operand operands[] = {{"q", &p.q},
                              {"k", &p.k},
                              {"v", &p.v},
                              {"cu_seqlens", &p.cu_seqlens},
                              {"start_positions", &p.start_positions},
                              {"o", &p.o},
                              {"k_cache", &p.k_cache},
                              {"v_cache", &p.v_cache},
                              {"cache_lengths", &p.cache_lengths},
                              {"cache_indices", &p.cache_indices},
                              {"d_o", &p.d_o},
                              {"dq", &p.dq},
                              {"dk", &p.dk},
                              {"dv", &p.dv}};
  FW_TRY(cuda::check_places(Op::kName, operands, 14, memory));
  if (p.rows() == 0) return FW_OK;
  Ledger ledger(memory);
  const Buffers b = lay_out(ledger, p);
  const cudaStream_t stream = static_cast<cudaStream_t>(p.stream);
  const int64_t width = p.theta > 0 ? p.D / 2 : p.D;
  cuda::launch({cuda::grid_of(p.rows() * (p.HQ + p.HK) * width, kThreads), kThreads, 0, stream}, turn, p, b);
  if (p.direction == FW_BACKWARD) {
    run_backward(p, b, width);
  } else {
    cuda::launch({cuda::grid_of(p.rows() * p.HQ * ceil_div(p.DV, kPart), 1), 32 * kForwardWarps, 0, stream}, forward_rows, p, b);
  }
  if (p.direction == FW_STEP) {
    const int64_t widest = p.D > p.DV ? p.D : p.DV;
    cuda::launch({cuda::grid_of(p.rows() * p.HK * widest, kThreads), kThreads, 0, stream}, store_caches, p, b.k);
  }
  return cuda::check_launches(Op::kName, "cuda");
}

}  // namespace fw::attention
