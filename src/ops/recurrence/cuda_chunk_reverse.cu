// SPDX-License-Identifier: Apache-2.0
// The reverse of the scan over chunks of 16 rows, in tf32: from d_o and d_final_state to the gradients of the states at the chunks'
// ends, of what the rows write, and of the initial state.
//
// Plan: grid (sequence, value head, 64 columns of V), 4 warps, 16 columns each. A warp keeps dS^T [16 v][K] as sums of products in
// registers, and every product has 16 columns of V as its rows, as in the scan; second operands are the images of the chunk, brought by
// cp.async to kStages slots; d_o of the next chunk is on its way in registers.
//   shared erase       dU^T = (dS^T ends_k^T + dO^T qk) t;  dZ = -dU;  dS^T = dS^T total + dO^T reads_q + dZ^T reads_x
//   independent erase  dZ^T = (dS^T ends_b^T + dO^T qb) t;  dU^T = dS^T ends_k^T + dO^T qk + dZ^T xk;  dS^T as above
//   none               dU^T = dS^T ends_k^T + dO^T qk;  dS^T = dS^T total + dO^T reads_q
// d_o is an operand as it is stored, exact in tf32 where it has 16 bits: scale multiplies sums. What a chunk adds to dS has sums of its
// own, as in the scan. Four tiles of 8 channels are 32 channels in turn: column c of tile j is channel 4 c + j, so that a thread's part of
// an image or of dS is whole quads. Shared memory: at K = 128 a stage has 19 to 39 KB. Barriers: one a chunk.
#include <type_traits>

#include "cuda/async_copy.cuh"
#include "cuda/device.hpp"
#include "cuda/launch.cuh"
#include "cuda/tf32.cuh"
#include "ops/recurrence/cuda_chunk.cuh"

namespace fw::recurrence {
namespace {

constexpr int kReverseWarps = 4, kReverseThreads = 32 * kReverseWarps, kReverseColumns = 16 * kReverseWarps;
constexpr int kScorePitch = kChunkRows + 4;

// Where the images of a chunk lie in a stage, in floats. Pitches put the rows and columns of a warp's access into 32 banks.
template <fw_erase kErase, int kKeys>
struct Stage {
  static constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  static constexpr int kPitch = kKeys + 4, kRows = kChunkRows * kPitch, kScores = kChunkRows * kScorePitch;
  static constexpr int kEndsK = 0;
  static constexpr int kReadsQ = kEndsK + kRows;
  static constexpr int kReadsX = kReadsQ + kRows;
  static constexpr int kEndsB = kReadsX + kErases * kRows;
  static constexpr int kQk = kEndsB + kIndependent * kRows;
  static constexpr int kSolve = kQk + kScores;
  static constexpr int kQb = kSolve + kErases * kScores;
  static constexpr int kXk = kQb + kIndependent * kScores;
  static constexpr int kTotal = kXk + kIndependent * kScores;
  static constexpr int kFloats = kTotal + kKeys;
};

template <fw_erase kErase, int kKeys>
__device__ __forceinline__ void copy_chunk(const ChunkImages &images, const float *record, float *to) {
  using At = Stage<kErase, kKeys>;
  const auto copy = [&](int at, int pitch, int32_t image, auto columns) {
    copy_image<columns.value, kReverseThreads>(to + at, pitch, record + image, columns.value);
  };
  constexpr std::integral_constant<int, kKeys> keys = {};
  constexpr std::integral_constant<int, kChunkRows> scores = {};
  copy(At::kEndsK, At::kPitch, images.ends_k, keys);
  copy(At::kReadsQ, At::kPitch, images.reads_q, keys);
  copy(At::kQk, kScorePitch, images.qk, scores);
  if constexpr (At::kErases) {
    copy(At::kReadsX, At::kPitch, images.reads_x, keys);
    copy(At::kSolve, kScorePitch, images.t, scores);
  }
  if constexpr (At::kIndependent) {
    copy(At::kEndsB, At::kPitch, images.ends_b, keys);
    copy(At::kQb, kScorePitch, images.qb, scores);
    copy(At::kXk, kScorePitch, images.xk, scores);
  }
  if (threadIdx.x < kKeys / 4) cuda::copy_quad(to + At::kTotal + 4 * threadIdx.x, record + images.total + 4 * threadIdx.x);
}

using Gradient = float[4];     // of a tile: (v, c), (v, c + 1), (v + 8, c), (v + 8, c + 1) with v = lane / 4, c = 2 (lane % 4)
using RowTiles = float[2][4];  // 16 columns of V by 16 rows

// f(block, tile, element, k, v) for the elements of a warp's gradient that exist.
template <int kBlocks, class F>
__device__ __forceinline__ void for_gradient(const Problem &p, int64_t column, F f) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int64_t k = 32 * m + 8 * t + e % 2 * 4 + j, v = column + g + e / 2 * 8;
        if (k < p.K && v < p.V) f(m, j, e, k, v);
      }
    }
  }
}

// The elements of d_o that a thread has of a chunk as a first operand [v][row]; zeros where a row is none or not read.
struct OutputBits {
  uint32_t at[2][4];
  float divisors[2][2];
};
__device__ __forceinline__ void load_output(const Problem &p, const ChunkPlace &rows, int64_t hv, int64_t h, int64_t column, const float *divisors,
                                            OutputBits &to) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int row = 8 * i + 2 * t + e;
      const TokenPlace place = place_of(p, rows.first + row);
      const bool is_read = given(p.d_o) && row < rows.rows && place.sub == p.n_sub - 1;
      const int64_t offset = is_read ? head_offset(p.d_o, rows.batch, place.token, hv) : 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t v = column + g + 8 * half;
        to.at[i][2 * e + half] = is_read && v < p.V ? cuda::load_bits(p.d_o.data, p.d_o.dtype, offset + v * p.d_o.strides[3]) : 0;
      }
      to.divisors[i][e] = divisors && is_read ? divisors[(rows.batch * p.T + place.token) * p.H + h] : 1.0f;
    }
  }
}

// sums[v][i] += a[v][j] scores[j][i], j >= i.
template <int kParts>
__device__ __forceinline__ void multiply_scores(RowTiles &sums, const cuda::Tf32Rows<kParts> (&a)[2], const float *scores) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = i; j < 2; ++j) {
      const float *from = scores + (8 * j + 2 * t) * kScorePitch + 8 * i + g;
      cuda::multiply_parts<true>(sums[i], a[j], from[0], from[kScorePitch]);
    }
  }
}

__device__ __forceinline__ float4 quad_at(const float *from) { return *reinterpret_cast<const float4 *>(from); }
__device__ __forceinline__ float of_quad(const float4 &x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

template <fw_erase kErase, int kKeys, int kParts, int kStages>
__global__ void __launch_bounds__(kReverseThreads)
    reverse_scan(const __grid_constant__ Problem p, const __grid_constant__ ChunkImages images, const float *divisors,
                 const __grid_constant__ ChunkRange range, const __grid_constant__ ChunkGradients out) {
  using At = Stage<kErase, kKeys>;
  constexpr int kBlocks = kKeys / 32;
  float *const shared = cuda::dynamic_shared<float>();
  const BlockPlace block = place_of_block(p, images.width / kReverseColumns, blockIdx.x);
  const int64_t hv = block.hv, n = block.n;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, column = block.panel * kReverseColumns + threadIdx.x / 32 * 16;
  const cuda::DeviceSegment segment = cuda::device_segment(p.cu_seqlens, p.T, n);
  const ChunkSpan span = span_of(p, range, segment, n);
  if (span.first >= span.last && span.chunks > 0) return;
  const bool has_columns = column < p.V;

  const auto copy = [&](int chunk) {
    if (chunk >= span.first) {
      copy_chunk<kErase, kKeys>(images, record_at(p, images, span.slot + chunk, hv), shared + chunk % kStages * At::kFloats);
    }
    cuda::copy_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) copy(span.last - 1 - i);
  OutputBits next;
  if (span.first < span.last) load_output(p, chunk_of(segment, p.n_sub, span.last - 1), hv, block.h, column, divisors, next);

  Gradient dS[kBlocks][4] = {};
  const auto move_whole = [&](float *states, int64_t slot, auto f) {  // as the buffers of states lie
    float *const base = states + ((slot * p.HV + hv) * images.width + column + g) * kKeys + 8 * t;
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float4 *at = reinterpret_cast<float4 *>(base + e / 2 * 8 * kKeys + 32 * m + e % 2 * 4);
        f(*at, dS[m][0][e], dS[m][1][e], dS[m][2][e], dS[m][3][e]);
      }
    }
  };
  const auto store_whole = [&](float *states, int64_t slot) {
    move_whole(states, slot, [](float4 &at, float a, float b, float c, float d) { at = make_float4(a, b, c, d); });
  };
  if (span.last < span.chunks) {
    if (has_columns) move_whole(out.carried, n, [](const float4 &at, float &a, float &b, float &c, float &d) { a = at.x, b = at.y, c = at.z, d = at.w; });
  } else if (given(p.d_final_state)) {
    const StatePlace at = find_state(p, p.d_final_state, n, hv);
    for_gradient<kBlocks>(p, column, [&](int m, int j, int e, int64_t k, int64_t v) {
      dS[m][j][e] = load_at(p.d_final_state, at.base + k * at.row + v * at.column);
    });
  }

  for (int chunk = span.last - 1; chunk >= span.first; --chunk) {
    cuda::copy_wait<kStages - 2>();
    __syncthreads();  // this chunk's images are there, and every warp is done with those of the chunk before
    copy(chunk - (kStages - 1));
    if (!has_columns) continue;
    const float *const stage = shared + chunk % kStages * At::kFloats;
    store_whole(out.states, span.local + chunk);

    cuda::Tf32Rows<kParts> d_o[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float x = cuda::from_bits(next.at[i][e], p.d_o.dtype);
        d_o[i].set(e, divisors ? x / next.divisors[i][e / 2] : x);
      }
    }
    if (chunk > span.first) load_output(p, chunk_of(segment, p.n_sub, chunk - 1), hv, block.h, column, divisors, next);

    // what the rows' writes get of the state after the chunk and of d_o; two chains of sums each
    RowTiles d_u = {}, d_z = {}, odd = {};
    multiply_scores<kParts>(d_u, d_o, stage + At::kQk);
    if constexpr (At::kIndependent) multiply_scores<kParts>(d_z, d_o, stage + At::kQb);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) d_u[i][e] *= p.scale_f32, d_z[i][e] *= p.scale_f32;
    }
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      cuda::Tf32Rows<kParts> a[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = cuda::rows_of_sums<kParts>(dS[m][j]);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = (8 * i + g) * At::kPitch + 32 * m + 8 * t;
        const float4 low = quad_at(stage + At::kEndsK + at), high = quad_at(stage + At::kEndsK + at + 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) cuda::multiply_parts<true>(m % 2 ? odd[i] : d_u[i], a[j], of_quad(low, j), of_quad(high, j));
        if constexpr (At::kIndependent) {
          const float4 low_b = quad_at(stage + At::kEndsB + at), high_b = quad_at(stage + At::kEndsB + at + 4);
#pragma unroll
          for (int j = 0; j < 4; ++j) cuda::multiply_parts<true>(d_z[i], a[j], of_quad(low_b, j), of_quad(high_b, j));
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) d_u[i][e] += odd[i][e];
    }

    cuda::Tf32Rows<kParts> z[2];
    if constexpr (At::kErases) {
      const RowTiles &right = At::kIndependent ? d_z : d_u;
      cuda::Tf32Rows<kParts> a[2] = {cuda::rows_of_sums<kParts>(right[0]), cuda::rows_of_sums<kParts>(right[1])};
      RowTiles solved = {};
      multiply_scores<kParts>(solved, a, stage + At::kSolve);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          d_z[i][e] = At::kIndependent ? solved[i][e] : -solved[i][e];
          if constexpr (!At::kIndependent) d_u[i][e] = solved[i][e];
        }
        z[i] = cuda::rows_of_sums<kParts>(d_z[i]);
      }
      if constexpr (At::kIndependent) multiply_scores<kParts>(d_u, z, stage + At::kXk);
    }
    float *const rows = out.d_u + ((span.local + chunk) * p.HV + hv) * kChunkRows * images.width + column + g;
    float *const rows_z = At::kIndependent ? out.d_z + (rows - out.d_u) : nullptr;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int at = (8 * i + 2 * t + e % 2) * images.width + e / 2 * 8;
        rows[at] = d_u[i][e];
        if constexpr (At::kIndependent) rows_z[at] = d_z[i][e];
      }
    }

#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      Gradient added[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float *from = stage + At::kReadsQ + (8 * i + 2 * t) * At::kPitch + 32 * m + 4 * g;
        const float4 low = quad_at(from), high = quad_at(from + At::kPitch);
#pragma unroll
        for (int j = 0; j < 4; ++j) cuda::multiply_parts<true>(added[j], d_o[i], of_quad(low, j), of_quad(high, j));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) added[j][e] *= p.scale_f32;
      }
      if constexpr (At::kErases) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float *from = stage + At::kReadsX + (8 * i + 2 * t) * At::kPitch + 32 * m + 4 * g;
          const float4 low = quad_at(from), high = quad_at(from + At::kPitch);
#pragma unroll
          for (int j = 0; j < 4; ++j) cuda::multiply_parts<true>(added[j], z[i], of_quad(low, j), of_quad(high, j));
        }
      }
      const float *total = stage + At::kTotal + 32 * m + 8 * t;
      const float4 low = quad_at(total), high = quad_at(total + 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) dS[m][j][e] = fmaf(dS[m][j][e], of_quad(e % 2 ? high : low, j), added[j][e]);
      }
    }
  }
  cuda::copy_wait<0>();
  if (!has_columns) return;
  if (span.first > 0) {
    store_whole(out.carried, n);
  } else if (given(p.d_initial_state)) {
    const StatePlace at = find_state(p, p.d_initial_state, n, hv);
    for_gradient<kBlocks>(p, column, [&](int m, int j, int e, int64_t k, int64_t v) {
      store_at(p.d_initial_state, at.base + k * at.row + v * at.column, dS[m][j][e]);
    });
  }
}

template <fw_erase kErase, int kKeys, int kParts>
void launch_parts(const Problem &p, const ChunkImages &images, const float *divisors, const ChunkRange &range, const ChunkGradients &out) {
  constexpr int kFloats = Stage<kErase, kKeys>::kFloats;
  const uint32_t blocks = static_cast<uint32_t>(p.N * p.HV * (images.width / kReverseColumns));
  const auto run = [&](auto kernel, int stages) {
    cuda::launch({blocks, kReverseThreads, 4 * stages * kFloats, static_cast<cudaStream_t>(p.stream)}, kernel, p, images, divisors, range, out);
  };
  if (3 * 4 * kFloats <= cuda::shared_memory_limit()) {
    run(reverse_scan<kErase, kKeys, kParts, 3>, 3);
  } else {
    run(reverse_scan<kErase, kKeys, kParts, 2>, 2);
  }
}
template <fw_erase kErase>
void launch_erase(const Problem &p, const ChunkImages &images, const float *divisors, const ChunkRange &range, const ChunkGradients &out) {
  const bool is_one = chunk_parts(p) == 1;
  if (images.keys == 64) {
    is_one ? launch_parts<kErase, 64, 1>(p, images, divisors, range, out) : launch_parts<kErase, 64, 2>(p, images, divisors, range, out);
  } else {
    is_one ? launch_parts<kErase, 128, 1>(p, images, divisors, range, out) : launch_parts<kErase, 128, 2>(p, images, divisors, range, out);
  }
}

}  // namespace

void launch_chunk_reverse(const Problem &p, const ChunkImages &images, const float *divisors, const ChunkRange &range, const ChunkGradients &out) {
  switch (p.erase) {
    case FW_ERASE_NONE: return launch_erase<FW_ERASE_NONE>(p, images, divisors, range, out);
    case FW_ERASE_INDEPENDENT: return launch_erase<FW_ERASE_INDEPENDENT>(p, images, divisors, range, out);
    default: return launch_erase<FW_ERASE_SHARED_AFTER>(p, images, divisors, range, out);
  }
}

}  // namespace fw::recurrence
