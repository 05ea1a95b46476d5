// SPDX-License-Identifier: Apache-2.0
// The scan over the chunks of a sequence, in tf32: o and the final state, or for the backward the states at the chunks' starts and what
// the rows write.
//
// Plan: grid (sequence, value head, 64 columns of V), 4 warps, 16 columns each; 2 warps where there are few heads or columns. A warp keeps S^T [16 v][K] as sums of products in
// registers (K / 8 tiles of 4), and every product has 16 columns of V as its rows, so that what comes out of one is the first operand
// of the next without leaving registers; second operands are the images of the chunk, brought by cp.async to two or three stages.
//   shared erase       X^T = S^T reads_x^T;  W^T = (V'^T - X^T) t^T;  o^T = S^T reads_q^T + W^T qk^T;  S^T = S^T total + W^T ends_k
//   independent erase  Z^T = S^T solved_x^T + V'^T m^T;  o^T = S^T reads_q^T + V'^T qk^T + Z^T qb^T;
//                      S^T = S^T total + V'^T ends_k + Z^T ends_b
//   none               as shared with W = V'
// What a chunk adds to the state has sums of its own: tensor cores cut where they add, and the state is added to in fp32 to nearest.
// Shared memory: at K = 128 a stage has 31 to 44 KB. Barriers: one a chunk.
#include "cuda/async_copy.cuh"
#include "cuda/device.hpp"
#include "cuda/launch.cuh"
#include "cuda/tf32.cuh"
#include "ops/recurrence/cuda_chunk.cuh"

namespace fw::recurrence {
namespace {

constexpr int kScorePitch = 24;

// Where the images of a chunk lie in a stage, in floats. Pitches put the rows and columns of a warp's access into 32 banks.
template <fw_erase kErase, int kKeys, bool kKeeps, int kWarps>
struct Stage {
  static constexpr int kThreads = 32 * kWarps, kColumns = 16 * kWarps, kValuePitch = kColumns + 4;
  FW_HOST_DEVICE static int32_t panels(const Problem &p) { return (static_cast<int32_t>(p.V) + kColumns - 1) / kColumns; }
  static constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  static constexpr int kReads = kKeys + 16, kEnds = kKeys + 4;  // pitches
  static constexpr int kReadsX = 0;                            // reads_x, or solved_x
  static constexpr int kReadsQ = kReadsX + kErases * kChunkRows * kReads;
  static constexpr int kEndsK = kReadsQ + !kKeeps * kChunkRows * kReads;
  static constexpr int kEndsB = kEndsK + kChunkRows * kEnds;
  static constexpr int kTotal = kEndsB + kIndependent * kChunkRows * kEnds;
  static constexpr int kSolve = kTotal + kKeys;  // t, or m
  static constexpr int kQk = kSolve + kErases * kChunkRows * kScorePitch;
  static constexpr int kQb = kQk + !kKeeps * kChunkRows * kScorePitch;
  static constexpr int kValues = kQb + (kIndependent && !kKeeps) * kChunkRows * kScorePitch;
  static constexpr int kFloats = kValues + kChunkRows * kValuePitch;
};

// Where they lie in a record.
template <fw_erase kErase, int kKeys>
struct Record {
  static constexpr bool kErases = kErase != FW_ERASE_NONE, kIndependent = kErase == FW_ERASE_INDEPENDENT;
  static constexpr int kKeysImage = kChunkRows * kKeys;
  static constexpr int kReadsQ = 0, kEndsK = kKeysImage, kReadsX = 2 * kKeysImage;
  static constexpr int kEndsB = kReadsX + kErases * kKeysImage, kTotal = kEndsB + kIndependent * kKeysImage;
  static constexpr int kQk = kTotal + kKeys, kSolve = kQk + kChunkScores, kQb = kSolve + kErases * kChunkScores;
  static constexpr int kValues = kQb + kIndependent * kChunkScores;
};

// The copies of a thread: of images of keys, of its scores or totals, and of values.
template <fw_erase kErase, int kKeys, bool kKeeps, int kWarps>
struct Copies {
  using At = Stage<kErase, kKeys, kKeeps, kWarps>;
  using From = Record<kErase, kKeys>;
  static constexpr int kThreads = At::kThreads, kHalf = kThreads / 2;
  static constexpr int kKeyQuads = kKeys / 4, kKeyRows = kThreads / kKeyQuads;               // of a row; rows at a time
  static constexpr int kValueQuads = At::kColumns / 4, kValueRows = kThreads / kValueQuads;  // the same of values

  const float *keys, *scores, *total, *values;
  int64_t step;  // to the next chunk's
  int reads_to, ends_to, scores_to, values_to, width;

  __device__ __forceinline__ Copies(const Problem &p, const ChunkImages &images, const float *record, int column) {
    const int thread = threadIdx.x, key_row = thread / kKeyQuads, key_column = thread % kKeyQuads * 4;
    const int half = thread % kHalf, score_row = half / 4, score_column = half % 4 * 4;
    const int value_row = thread / kValueQuads, value_column = thread % kValueQuads * 4;
    keys = record + key_row * kKeys + key_column;
    scores = record + score_row * kChunkRows + score_column;
    total = record + From::kTotal + 4 * half;
    values = record + From::kValues + value_row * images.width + column + value_column;
    step = p.HV * images.record, width = images.width;
    reads_to = key_row * At::kReads + key_column, ends_to = key_row * At::kEnds + key_column;
    scores_to = score_row * kScorePitch + score_column, values_to = value_row * At::kValuePitch + value_column;
  }
  __device__ __forceinline__ void copy_scores(float *stage, const float *from) const {
#pragma unroll
    for (int i = 0; i < kChunkRows; i += kHalf / 4) cuda::copy_quad(stage + i * kScorePitch, from + i * kChunkRows);
  }
  // The next chunk, to `stage`.
  __device__ __forceinline__ void copy(float *stage) {
    float *const reads = stage + reads_to, *const ends = stage + ends_to;
#pragma unroll
    for (int i = 0; i < kChunkRows; i += kKeyRows) {
      if constexpr (At::kErases) cuda::copy_quad(reads + At::kReadsX + i * At::kReads, keys + From::kReadsX + i * kKeys);
      if constexpr (!kKeeps) cuda::copy_quad(reads + At::kReadsQ + i * At::kReads, keys + From::kReadsQ + i * kKeys);
      cuda::copy_quad(ends + At::kEndsK + i * At::kEnds, keys + From::kEndsK + i * kKeys);
      if constexpr (At::kIndependent) cuda::copy_quad(ends + At::kEndsB + i * At::kEnds, keys + From::kEndsB + i * kKeys);
    }
#pragma unroll
    for (int i = 0; i < kChunkRows; i += kValueRows) cuda::copy_quad(stage + At::kValues + values_to + i * At::kValuePitch, values + i * width);
    if (threadIdx.x < kHalf) {
      if constexpr (At::kErases) copy_scores(stage + At::kSolve + scores_to, scores + From::kSolve);
      if constexpr (At::kIndependent && !kKeeps) copy_scores(stage + At::kQb + scores_to, scores + From::kQb);
    } else {
      if constexpr (!kKeeps) copy_scores(stage + At::kQk + scores_to, scores + From::kQk);
      if (threadIdx.x % kHalf < kKeyQuads) cuda::copy_quad(stage + At::kTotal + 4 * (threadIdx.x % kHalf), total);
    }
    keys += step, scores += step, total += step, values += step;
  }
};

// Two tiles of a state share 16 channels, so that a thread reads its four of an image together: thread (g, t) has channels 4t and
// 4t + 2 of the first tile's, 4t + 1 and 4t + 3 of the second's, of columns g and g + 8.
// f(tile, element, offset in elements) for the elements of a warp's state that exist.
template <int kTiles, class F>
__device__ __forceinline__ void for_state(const Problem &p, const StatePlace &at, int64_t column, F f) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t k = tile / 2 * 16 + 4 * t + e % 2 * 2 + tile % 2, v = column + g + e / 2 * 8;
      if (k < p.K && v < p.V) f(tile, e, at.base + k * at.row + v * at.column);
    }
  }
}

using Sums = float[4];          // of an n8 tile
using RowTiles = float[2][4];   // 16 columns of V by 16 rows

// sums[v][i] += a[v][j] scores[i][j], j <= i.
template <int kParts>
__device__ __forceinline__ void multiply_scores(RowTiles &sums, const cuda::Tf32Rows<kParts> (&a)[2], const float *scores) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int j = 0; j <= i; ++j) {
      const float2 b = *reinterpret_cast<const float2 *>(scores + (8 * i + g) * kScorePitch + 8 * j + 2 * t);
      cuda::multiply_parts<true>(sums[i], a[j], b.x, b.y);
    }
  }
}

// o of a chunk's rows. Thread (g, t): rows 2t, 2t + 1, 2t + 8, 2t + 9, columns g and g + 8 of those of its warp.
struct OutputPlace {
  int64_t at, row, half;  // of row 2t, column g; to the next row; to column g + 8
  int columns;            // from column g on
};
__device__ __forceinline__ void store_rows(const fw_tensor &t, const OutputPlace &place, int rows, const RowTiles &o) {
  const int first = threadIdx.x % 4 * 2;
  cuda::with_type(t.data, t.dtype, [&](auto *to) {
    to += place.at;
#pragma unroll
    for (int i = 0; i < 2; ++i, to += 8 * place.row) {
      auto *const next = to + place.row;
      const bool has_row = first + 8 * i < rows && place.columns > 0, has_next = first + 8 * i + 1 < rows && place.columns > 0;
      if (has_row) cuda::from_float(o[i][0], to);
      if (has_next) cuda::from_float(o[i][1], next);
      if (has_row && place.columns > 8) cuda::from_float(o[i][2], to + place.half);
      if (has_next && place.columns > 8) cuda::from_float(o[i][3], next + place.half);
    }
  });
}
// With sub-steps or divisors.
__device__ __noinline__ void store_some_rows(const Problem &p, const ChunkPlace &rows, int64_t hv, int64_t h, int64_t column, const float *divisors,
                                             const float *o) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll 1
  for (int row = 0; row < 4; ++row) {
    const int at = 8 * (row / 2) + 2 * t + row % 2;
    const TokenPlace place = place_of(p, rows.first + at);
    if (at >= rows.rows || place.sub != p.n_sub - 1) continue;
    const float divisor = divisors ? divisors[(rows.batch * p.T + place.token) * p.H + h] : 1.0f;
    const int64_t offset = head_offset(p.o, rows.batch, place.token, hv);
#pragma unroll 1
    for (int64_t half = 0, v = column + g; half < 2 && v < p.V; ++half, v += 8) {
      store_at(p.o, offset + v * p.o.strides[3], o[row / 2 * 4 + row % 2 + 2 * half] / divisor);
    }
  }
}

template <fw_erase kErase, int kKeys, int kParts, int kScoreParts, bool kKeeps, int kWarps>
__global__ void __launch_bounds__(32 * kWarps) scan(const __grid_constant__ Problem p, const __grid_constant__ ChunkImages images,
                                                     const float *divisors, const __grid_constant__ ChunkStates kept, int stages) {
  using At = Stage<kErase, kKeys, kKeeps, kWarps>;
  constexpr int kTiles = kKeys / 8;
  float *const shared = cuda::dynamic_shared<float>();
  const BlockPlace block = place_of_block(p, At::panels(p), blockIdx.x);
  const int64_t hv = block.hv, n = block.n;
  const int first_column = block.panel * At::kColumns, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int in_block = threadIdx.x / 32 * 16, column = first_column + in_block;
  const cuda::DeviceSegment segment = cuda::device_segment(p.cu_seqlens, p.T, n);
  const ChunkSpan span = span_of(p, kept.range, segment, n);
  if (kKeeps && span.first >= span.last) return;
  const int64_t begin = segment.begin * p.n_sub, first_slot = span.slot + span.first;
  const int chunks = span.last - span.first;
  const bool has_columns = column < p.V;

  Copies<kErase, kKeys, kKeeps, kWarps> copies(p, images, record_at(p, images, first_slot, hv), first_column);
  int to_copy = 0, to_stage = 0;
  const auto copy_next = [&] {
    if (to_copy < chunks) copies.copy(shared + to_stage * At::kFloats);
    cuda::copy_commit();
    ++to_copy, to_stage = to_stage + 1 == stages ? 0 : to_stage + 1;
  };
  for (int i = 0; i < stages - 1; ++i) copy_next();

  Sums S[kTiles];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) S[tile][0] = S[tile][1] = S[tile][2] = S[tile][3] = 0.0f;
  const auto move_state = [&](float *base, auto f) {  // as the buffers of states lie
    float *at = base + (column + g) * kKeys + 4 * t;
#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      Sums &a = S[tile], &b = S[tile + 1];
      f(*reinterpret_cast<float4 *>(at + 8 * tile), a[0], b[0], a[1], b[1]);
      f(*reinterpret_cast<float4 *>(at + 8 * kKeys + 8 * tile), a[2], b[2], a[3], b[3]);
    }
  };
  const auto store_state = [&](float *base) { move_state(base, [](float4 &at, float a, float b, float c, float d) { at = make_float4(a, b, c, d); }); };
  const int64_t state = static_cast<int64_t>(images.width) * kKeys;
  if (kKeeps && span.first > 0) {
    float *const start = start_of(p, kept, kept.range.begin, n, hv, state);
    if (has_columns) move_state(start, [](const float4 &at, float &a, float &b, float &c, float &d) { a = at.x, b = at.y, c = at.z, d = at.w; });
  } else if (given(p.initial_state)) {
    for_state<kTiles>(p, find_state(p, p.initial_state, n, hv), column, [&](int tile, int e, int64_t at) { S[tile][e] = load_at(p.initial_state, at); });
  }
  ChunkPlace rows = {segment.batch, begin, 0};
  const bool stores_all = p.n_sub == 1 && !divisors;
  OutputPlace output = {};
  if constexpr (!kKeeps) {
    output = {head_offset(p.o, segment.batch, segment.begin + 2 * t, hv) + (column + g) * p.o.strides[3], p.o.strides[1], 8 * p.o.strides[3],
              static_cast<int>(p.V) - column - g};
  }
  const int64_t end = segment.end * p.n_sub;
  int64_t slot_head = (span.local + span.first) * p.HV + hv;
  const uint32_t first_in_range = static_cast<uint32_t>(given(p.cu_seqlens) ? first_slot : span.first);
  for (int chunk = 0, at_stage = 0; chunk < chunks; ++chunk) {
    wait_for_stage(stages);
    copy_next();
    if (!has_columns) continue;
    const float *const stage = shared + at_stage * At::kFloats;
    if constexpr (kKeeps) {
      if (kept.states) {
        store_state(kept.states + slot_head * state);
      } else if (chunk > 0 && (first_in_range + chunk) % static_cast<uint32_t>(kept.length) == 0) {
        store_state(start_of(p, kept, first_in_range + chunk, n, hv, state));
      }
    }

    // what the rows read of the state
    RowTiles x = {}, o = {};
    if constexpr (At::kErases || !kKeeps) {
#pragma unroll
      for (int tile = 0; tile < kTiles; tile += 2) {
        const auto a = cuda::rows_of_pair<kParts, 0>(S[tile], S[tile + 1]), b = cuda::rows_of_pair<kParts, 1>(S[tile], S[tile + 1]);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float *const from = stage + (8 * i + g) * At::kReads + 8 * tile + 4 * t;
          if constexpr (At::kErases) {
            const float4 key = *reinterpret_cast<const float4 *>(from + At::kReadsX);
            cuda::multiply_parts<true>(x[i], a, key.x, key.y);
            cuda::multiply_parts<true>(x[i], b, key.z, key.w);
          }
          if constexpr (!kKeeps) {
            const float4 query = *reinterpret_cast<const float4 *>(from + At::kReadsQ);
            cuda::multiply_parts<true>(o[i], a, query.x, query.y);
            cuda::multiply_parts<true>(o[i], b, query.z, query.w);
          }
        }
      }
    }

    // what they write: along k and, with independent keys, along b
    RowTiles u;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        u[i][e] = stage[At::kValues + (8 * i + 2 * t + e % 2) * At::kValuePitch + in_block + g + e / 2 * 8];
        if constexpr (kIsShared<kErase>) u[i][e] -= x[i][e];
      }
    }
    using Written = cuda::Tf32Rows<kScoreParts>;
    Written written[2] = {cuda::rows_of_sums<kScoreParts>(u[0]), cuda::rows_of_sums<kScoreParts>(u[1])}, along_b[2];
    if constexpr (kIsShared<kErase>) {
#pragma unroll
      for (int i = 0; i < 2; ++i) u[i][0] = u[i][1] = u[i][2] = u[i][3] = 0.0f;
      multiply_scores<kScoreParts>(u, written, stage + At::kSolve);
      written[0] = cuda::rows_of_sums<kScoreParts>(u[0]), written[1] = cuda::rows_of_sums<kScoreParts>(u[1]);
    }
    if constexpr (At::kIndependent) {
      multiply_scores<kScoreParts>(x, written, stage + At::kSolve);
      along_b[0] = cuda::rows_of_sums<kScoreParts>(x[0]), along_b[1] = cuda::rows_of_sums<kScoreParts>(x[1]);
    }
    if constexpr (!kKeeps) {
      multiply_scores<kScoreParts>(o, written, stage + At::kQk);
      if constexpr (At::kIndependent) multiply_scores<kScoreParts>(o, along_b, stage + At::kQb);
    }

#pragma unroll
    for (int tile = 0; tile < kTiles; tile += 2) {
      Sums added[2] = {};
      const auto add = [&](const Written &rows, const float *ends) {
        const cuda::Tf32Rows<kParts> a = cuda::first_parts<kParts>(rows);
        const float2 k0 = *reinterpret_cast<const float2 *>(ends), k1 = *reinterpret_cast<const float2 *>(ends + At::kEnds);
        cuda::multiply_parts<true>(added[0], a, k0.x, k1.x);
        cuda::multiply_parts<true>(added[1], a, k0.y, k1.y);
      };
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int at = (8 * i + 2 * t) * At::kEnds + 8 * tile + 2 * g;
        add(written[i], stage + At::kEndsK + at);
        if constexpr (At::kIndependent) add(along_b[i], stage + At::kEndsB + at);
      }
      const float4 total = *reinterpret_cast<const float4 *>(stage + At::kTotal + 8 * tile + 4 * t);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        S[tile][e] = fmaf(S[tile][e], e % 2 ? total.z : total.x, added[0][e]);
        S[tile + 1][e] = fmaf(S[tile + 1][e], e % 2 ? total.w : total.y, added[1][e]);
      }
    }

    if constexpr (kKeeps) {
#pragma unroll
      for (int i = 0; kept.states && i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int64_t at = (slot_head * kChunkRows + 8 * i + 2 * t + e % 2) * images.width + column + g + e / 2 * 8;
          kept.u[at] = u[i][e];
          if constexpr (At::kIndependent) kept.z[at] = x[i][e];
        }
      }
      slot_head += p.HV;
    } else {
      rows.rows = static_cast<int32_t>(end - rows.first < kChunkRows ? end - rows.first : kChunkRows);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[i][e] *= p.scale_f32;
      }
      if (stores_all) {
        store_rows(p.o, output, rows.rows, o);
        output.at += kChunkRows * output.row;
      } else {
        const float copy[8] = {o[0][0], o[0][1], o[0][2], o[0][3], o[1][0], o[1][1], o[1][2], o[1][3]};
        store_some_rows(p, rows, hv, block.h, column, divisors, copy);
      }
    }
    rows.first += kChunkRows;
    at_stage = at_stage + 1 == stages ? 0 : at_stage + 1;
  }
  cuda::copy_wait<0>();
  if (given(p.final_state)) {
    for_state<kTiles>(p, find_state(p, p.final_state, n, hv), column, [&](int tile, int e, int64_t at) { store_at(p.final_state, at, S[tile][e]); });
  }
}

template <fw_erase kErase, int kKeys, int kParts, int kScoreParts, bool kKeeps, int kWarps>
void launch_warps(const Problem &p, const ChunkImages &images, const float *divisors, const ChunkStates &kept) {
  using At = Stage<kErase, kKeys, kKeeps, kWarps>;
  const uint32_t blocks = static_cast<uint32_t>(p.N * p.HV * At::panels(p));
  const int stages = 3 * 4 * At::kFloats <= cuda::shared_memory_limit() ? 3 : 2;
  cuda::launch({blocks, At::kThreads, 4 * stages * At::kFloats, static_cast<cudaStream_t>(p.stream)},
               scan<kErase, kKeys, kParts, kScoreParts, kKeeps, kWarps>, p, images, divisors, kept, stages);
}
// Four warps share the images of a chunk, unless two have all columns, or four would leave half of the device without work.
template <fw_erase kErase, int kKeys, int kParts, int kScoreParts, bool kKeeps>
void launch_as(const Problem &p, const ChunkImages &images, const float *divisors, const ChunkStates &kept) {
  if (p.V <= 32 || 2 * p.N * p.HV * Stage<kErase, kKeys, kKeeps, 4>::panels(p) <= cuda::multiprocessor_count()) {
    launch_warps<kErase, kKeys, kParts, kScoreParts, kKeeps, 2>(p, images, divisors, kept);
  } else {
    launch_warps<kErase, kKeys, kParts, kScoreParts, kKeeps, 4>(p, images, divisors, kept);
  }
}
template <fw_erase kErase, int kKeys>
void launch_keys(const Problem &p, const ChunkImages &images, const float *divisors, const ChunkStates *kept) {
  const bool is_one = chunk_parts(p) == 1;
  ChunkStates all = {};
  all.range = whole_range(p);
  if (kept) {
    is_one ? launch_as<kErase, kKeys, 1, 1, true>(p, images, divisors, *kept) : launch_as<kErase, kKeys, 2, 2, true>(p, images, divisors, *kept);
  } else if (is_one) {
    launch_as<kErase, kKeys, 1, 1, false>(p, images, divisors, all);
  } else if (images.rounds_keys) {
    launch_as<kErase, kKeys, 1, 2, false>(p, images, divisors, all);
  } else if constexpr (kErase == FW_ERASE_NONE) {
    launch_as<kErase, kKeys, 2, 2, false>(p, images, divisors, all);
  }
}
template <fw_erase kErase>
void launch_erase(const Problem &p, const ChunkImages &images, const float *divisors, const ChunkStates *kept) {
  images.keys == 64 ? launch_keys<kErase, 64>(p, images, divisors, kept) : launch_keys<kErase, 128>(p, images, divisors, kept);
}

}  // namespace

void launch_chunk_scan(const Problem &p, const ChunkImages &images, const float *divisors, const ChunkStates *kept) {
  switch (p.erase) {
    case FW_ERASE_NONE: return launch_erase<FW_ERASE_NONE>(p, images, divisors, kept);
    case FW_ERASE_INDEPENDENT: return launch_erase<FW_ERASE_INDEPENDENT>(p, images, divisors, kept);
    default: return launch_erase<FW_ERASE_SHARED_AFTER>(p, images, divisors, kept);
  }
}

}  // namespace fw::recurrence
