// SPDX-License-Identifier: Apache-2.0
// Which rows a slot of the chunk form holds, and the images of a chunk on the device.
#pragma once
#include "cuda/async_copy.cuh"
#include "ops/recurrence/cuda_chunk.hpp"
#include "ops/recurrence/cuda_rows.cuh"

namespace fw::recurrence {

// Rows first .. first + rows - 1 of batch entry `batch`; rows is 0 or less for a slot without any.
struct ChunkPlace {
  int64_t batch, first;
  int32_t rows;
};
__device__ inline ChunkPlace chunk_of(const cuda::DeviceSegment &segment, int64_t n_sub, int64_t index) {
  const int64_t first = segment.begin * n_sub + index * kChunkRows, left = segment.end * n_sub - first;
  return {segment.batch, first, left < kChunkRows ? static_cast<int32_t>(left) : kChunkRows};
}
__device__ inline ChunkPlace find_chunk(const Problem &p, int64_t slot) {
  const uint32_t each = static_cast<uint32_t>((p.R + kChunkRows - 1) / kChunkRows), at = static_cast<uint32_t>(slot);
  if (!given(p.cu_seqlens)) return chunk_of({at / each, 0, p.T}, p.n_sub, at % each);
  int64_t low = 0, high = p.N;  // the last sequence whose first slot is not past this one
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (slot_at(p, middle, cuda::clamped_offset(p.cu_seqlens, middle, p.T) * p.n_sub, kChunkRows) <= slot) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const cuda::DeviceSegment segment = cuda::device_segment(p.cu_seqlens, p.T, low);
  return chunk_of(segment, p.n_sub, slot - slot_at(p, low, segment.begin * p.n_sub, kChunkRows));
}

// Of sequence n: its chunks first .. last - 1 are in the range, of `chunks`; chunk c has the slots slot + c, in the range local + c.
struct ChunkSpan {
  int first, last, chunks;
  int64_t slot, local;
};
__device__ inline ChunkSpan span_of(const Problem &p, const ChunkRange &range, const cuda::DeviceSegment &segment, int64_t n) {
  const int64_t chunks = ((segment.end - segment.begin) * p.n_sub + kChunkRows - 1) / kChunkRows;
  const int64_t slot = slot_at(p, n, segment.begin * p.n_sub, kChunkRows), zero = given(p.cu_seqlens) ? slot : 0;
  const auto clamp = [&](int64_t at) { return static_cast<int>(at < 0 ? 0 : at > chunks ? chunks : at); };
  const int64_t local = zero - range.begin + (given(p.cu_seqlens) ? 0 : n * (range.end - range.begin));
  return {clamp(range.begin - zero), clamp(range.end - zero), static_cast<int>(chunks), slot, local};
}
// The slot of a range's slot.
__device__ inline int64_t slot_of(const Problem &p, const ChunkRange &range, int64_t local) {
  if (given(p.cu_seqlens)) return range.begin + local;
  const uint32_t each = static_cast<uint32_t>(range.end - range.begin), at = static_cast<uint32_t>(local), n = at / each;
  return slot_at(p, n, 0, kChunkRows) + range.begin + (at - n * each);
}

// S^T of a sequence and head at the start of chunk (with a pack, slot) `at`, where a range begins.
__device__ inline float *start_of(const Problem &p, const ChunkStates &kept, int64_t at, int64_t n, int64_t hv, int64_t state) {
  const bool is_packed = given(p.cu_seqlens);
  const int64_t range = static_cast<uint32_t>(at) / static_cast<uint32_t>(kept.length) - 1;
  return kept.starts + ((range * (is_packed ? 1 : p.N) + (is_packed ? 0 : n)) * p.HV + hv) * state;
}

// Of a ring of two or three stages the oldest has come, and every warp is done with the stage before.
__device__ __forceinline__ void wait_for_stage(int stages) {
  if (stages == 2) {
    cuda::copy_wait<0>();
  } else {
    cuda::copy_wait<1>();
  }
  __syncthreads();
}

// 16 rows to shared memory, by kThreadsOf threads.
template <int kThreadsOf, int kColumns>
__device__ __forceinline__ void copy_image(float *to, int pitch, const float *from, int from_pitch) {
  constexpr int kQuads = kColumns / 4, kTogether = kThreadsOf / kQuads;  // of a row; rows
  const int row = threadIdx.x / kQuads, column = threadIdx.x % kQuads * 4;
  to += row * pitch + column, from += row * from_pitch + column;
#pragma unroll
  for (int i = 0; i < kChunkRows; i += kTogether) cuda::copy_quad(to + i * pitch, from + i * from_pitch);
}
// Of scores, by half of the threads.
template <int kThreadsOf, int kPitch>
__device__ __forceinline__ void copy_scores(float *to, const float *from) {
  constexpr int kTogether = kThreadsOf / 8;
  const int row = threadIdx.x % (kThreadsOf / 2) / 4, column = threadIdx.x % 4 * 4;
#pragma unroll
  for (int i = row; i < row + kChunkRows; i += kTogether) cuda::copy_quad(to + i * kPitch + column, from + i * kChunkRows + column);
}

__device__ inline float *record_at(const Problem &p, const ChunkImages &images, int64_t slot, int64_t hv) {
  return images.data + (slot * p.HV + hv) * images.record;
}

}  // namespace fw::recurrence
