// SPDX-License-Identifier: Apache-2.0
// The reverse of the scan over chunks of 16 rows, in tf32: from d_o and d_final_state to the gradients of the states at the chunks'
// ends, of what the rows write, and of the initial state.
//
// Plan: grid (sequence, value head, 64 columns of V), 4 warps, 16 columns each. A warp keeps dS^T [16 v][K] as sums of products in
// registers, and every product has 16 columns of V as its rows, as in the scan; second operands are the images of the chunk, brought by
// cp.async, as d_o is, to two or three stages.
//   shared erase       dU^T = (dS^T ends_k^T + dO^T qk) t;  dZ = -dU;  dS^T = dS^T total + dO^T reads_q + dZ^T reads_x
//   independent erase  dZ^T = (dS^T ends_b^T + dO^T qb) t;  dU^T = dS^T ends_k^T + dO^T qk + dZ^T xk;  dS^T as above
//   none               dU^T = dS^T ends_k^T + dO^T qk;  dS^T = dS^T total + dO^T reads_q
// d_o is an operand as it is stored, exact in tf32 where it has 16 bits: scale multiplies sums. What a chunk adds to dS has sums of its
// own, as in the scan, and so has every product that could wait for the one before. Four tiles of 8 channels are 32 channels in turn: column c of tile j is channel 4 c + j, so that a thread's part of
// an image or of dS is whole quads. Shared memory: at K = 128 a stage has 23 to 43 KB. Barriers: one a chunk.
#include "cuda/async_copy.cuh"
#include "cuda/device.hpp"
#include "cuda/launch.cuh"
#include "cuda/tf32.cuh"
#include "ops/recurrence/cuda_chunk.cuh"

namespace fw::recurrence {
namespace {

constexpr int kReverseWarps = 4, kReverseThreads = 32 * kReverseWarps, kReverseColumns = 16 * kReverseWarps;
constexpr int kScorePitch = kChunkRows + 4, kOutputPitch = kReverseColumns + 4;

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
  static constexpr int kOutput = kTotal + kKeys;  // d_o
  static constexpr int kFloats = kOutput + kChunkRows * kOutputPitch;
};

template <fw_erase kErase, int kKeys>
__device__ __forceinline__ void copy_chunk(const ChunkImages &images, const float *record, const float *d_o, float *to) {
  using At = Stage<kErase, kKeys>;
  const auto keys = [&](int at, int32_t image) { copy_image<kReverseThreads, kKeys>(to + at, At::kPitch, record + image, kKeys); };
  const auto scores = [&](int at, int32_t image) { copy_scores<kReverseThreads, kScorePitch>(to + at, record + image); };
  copy_image<kReverseThreads, kReverseColumns>(to + At::kOutput, kOutputPitch, d_o, images.width);
  if (threadIdx.x < kReverseThreads / 2) {
    scores(At::kQk, images.qk);
    if constexpr (At::kErases) scores(At::kSolve, images.t);
  } else {
    if constexpr (At::kIndependent) scores(At::kQb, images.qb), scores(At::kXk, images.xk);
    const int quad = threadIdx.x - kReverseThreads / 2;
    if (quad < kKeys / 4) cuda::copy_quad(to + At::kTotal + 4 * quad, record + images.total + 4 * quad);
  }
  keys(At::kEndsK, images.ends_k);
  if constexpr (At::kIndependent) keys(At::kEndsB, images.ends_b);
  keys(At::kReadsQ, images.reads_q);
  if constexpr (At::kErases) keys(At::kReadsX, images.reads_x);
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

template <fw_erase kErase, int kKeys, int kParts>
__global__ void __launch_bounds__(kReverseThreads)
    reverse_scan(const __grid_constant__ Problem p, const __grid_constant__ ChunkImages images, const __grid_constant__ ChunkRange range,
                 const __grid_constant__ ChunkGradients out, int stages) {
  using At = Stage<kErase, kKeys>;
  constexpr int kBlocks = kKeys / 32;
  float *const shared = cuda::dynamic_shared<float>();
  const BlockPlace block = place_of_block(p, images.width / kReverseColumns, blockIdx.x);
  const int64_t hv = block.hv, n = block.n;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, in_block = threadIdx.x / 32 * 16, column = block.panel * kReverseColumns + in_block;
  const cuda::DeviceSegment segment = cuda::device_segment(p.cu_seqlens, p.T, n);
  const ChunkSpan span = span_of(p, range, segment, n);
  if (span.first >= span.last && span.chunks > 0) return;
  const bool has_columns = column < p.V;

  // From the last chunk back, one chunk a call.
  const int64_t record_step = p.HV * images.record, output_step = p.HV * kChunkRows * images.width;
  const float *record = record_at(p, images, span.slot + span.last - 1, hv);
  const float *d_o_rows = out.d_o + ((span.local + span.last - 1) * p.HV + hv) * kChunkRows * images.width + block.panel * kReverseColumns;
  int to_copy = span.last - span.first, to_stage = 0;
  const auto copy_next = [&] {
    if (to_copy-- > 0) copy_chunk<kErase, kKeys>(images, record, d_o_rows, shared + to_stage * At::kFloats);
    cuda::copy_commit();
    record -= record_step, d_o_rows -= output_step;
    to_stage = to_stage + 1 == stages ? 0 : to_stage + 1;
  };
  for (int i = 0; i < stages - 1; ++i) copy_next();

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

  for (int chunk = span.last - 1, at_stage = 0; chunk >= span.first; --chunk) {
    wait_for_stage(stages);
    copy_next();
    if (!has_columns) continue;
    const float *const stage = shared + at_stage * At::kFloats;
    at_stage = at_stage + 1 == stages ? 0 : at_stage + 1;
    store_whole(out.states, span.local + chunk);

    cuda::Tf32Rows<kParts> d_o[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) d_o[i].set(e, stage[At::kOutput + (8 * i + 2 * t + e / 2) * kOutputPitch + in_block + g + e % 2 * 8]);
    }

    // What the rows' writes get of the state after the chunk and of d_o. Products that follow each other have sums of their own.
    RowTiles d_u = {}, d_z = {}, from_d_o = {}, from_d_o_b = {}, odd = {}, odd_b = {};
#pragma unroll
    for (int m = 0; m < kBlocks; ++m) {
      cuda::Tf32Rows<kParts> a[4];
      float4 low[2], high[2], low_b[2], high_b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = (8 * i + g) * At::kPitch + 32 * m + 8 * t;
        low[i] = quad_at(stage + At::kEndsK + at), high[i] = quad_at(stage + At::kEndsK + at + 4);
        if constexpr (At::kIndependent) low_b[i] = quad_at(stage + At::kEndsB + at), high_b[i] = quad_at(stage + At::kEndsB + at + 4);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) a[j] = cuda::rows_of_sums<kParts>(dS[m][j]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          cuda::multiply_parts<true>(j % 2 ? odd[i] : d_u[i], a[j], of_quad(low[i], j), of_quad(high[i], j));
          if constexpr (At::kIndependent) cuda::multiply_parts<true>(j % 2 ? odd_b[i] : d_z[i], a[j], of_quad(low_b[i], j), of_quad(high_b[i], j));
        }
      }
    }
    multiply_scores<kParts>(from_d_o, d_o, stage + At::kQk);
    if constexpr (At::kIndependent) multiply_scores<kParts>(from_d_o_b, d_o, stage + At::kQb);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        d_u[i][e] = fmaf(from_d_o[i][e], p.scale_f32, d_u[i][e] + odd[i][e]);
        if constexpr (At::kIndependent) d_z[i][e] = fmaf(from_d_o_b[i][e], p.scale_f32, d_z[i][e] + odd_b[i][e]);
      }
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
      Gradient added[4] = {}, erased[4] = {};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = (8 * i + 2 * t) * At::kPitch + 32 * m + 4 * g;
        const float4 low = quad_at(stage + At::kReadsQ + at), high = quad_at(stage + At::kReadsQ + at + At::kPitch);
        float4 low_x, high_x;
        if constexpr (At::kErases) low_x = quad_at(stage + At::kReadsX + at), high_x = quad_at(stage + At::kReadsX + at + At::kPitch);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          cuda::multiply_parts<true>(added[j], d_o[i], of_quad(low, j), of_quad(high, j));
          if constexpr (At::kErases) cuda::multiply_parts<true>(erased[j], z[i], of_quad(low_x, j), of_quad(high_x, j));
        }
      }
      const float *total = stage + At::kTotal + 32 * m + 8 * t;
      const float4 low = quad_at(total), high = quad_at(total + 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float scaled = fmaf(added[j][e], p.scale_f32, erased[j][e]);
          dS[m][j][e] = fmaf(dS[m][j][e], of_quad(e % 2 ? high : low, j), scaled);
        }
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
void launch_parts(const Problem &p, const ChunkImages &images, const ChunkRange &range, const ChunkGradients &out) {
  constexpr int kFloats = Stage<kErase, kKeys>::kFloats;
  const uint32_t blocks = static_cast<uint32_t>(p.N * p.HV * (images.width / kReverseColumns));
  const int stages = 3 * 4 * kFloats <= cuda::shared_memory_limit() ? 3 : 2;
  cuda::launch({blocks, kReverseThreads, 4 * stages * kFloats, static_cast<cudaStream_t>(p.stream)}, reverse_scan<kErase, kKeys, kParts>, p, images,
               range, out, stages);
}
template <fw_erase kErase>
void launch_erase(const Problem &p, const ChunkImages &images, const ChunkRange &range, const ChunkGradients &out) {
  const bool is_one = chunk_parts(p) == 1;
  if (images.keys == 64) {
    is_one ? launch_parts<kErase, 64, 1>(p, images, range, out) : launch_parts<kErase, 64, 2>(p, images, range, out);
  } else {
    is_one ? launch_parts<kErase, 128, 1>(p, images, range, out) : launch_parts<kErase, 128, 2>(p, images, range, out);
  }
}

}  // namespace

void launch_chunk_reverse(const Problem &p, const ChunkImages &images, const ChunkRange &range, const ChunkGradients &out) {
  switch (p.erase) {
    case FW_ERASE_NONE: return launch_erase<FW_ERASE_NONE>(p, images, range, out);
    case FW_ERASE_INDEPENDENT: return launch_erase<FW_ERASE_INDEPENDENT>(p, images, range, out);
    default: return launch_erase<FW_ERASE_SHARED_AFTER>(p, images, range, out);
  }
}

}  // namespace fw::recurrence
