// SPDX-License-Identifier: Apache-2.0
// Which rows a slot of the chunk form holds, and the images of a chunk on the device.
#pragma once
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

__device__ inline float *record_at(const Problem &p, const ChunkImages &images, int64_t slot, int64_t hv) {
  return images.data + (slot * p.HV + hv) * images.record;
}

}  // namespace fw::recurrence
