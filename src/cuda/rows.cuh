// SPDX-License-Identifier: Apache-2.0
// Rows of tensors on the device: where a RowPlan's rows lie, which sequence a row belongs to, and four neighbouring elements of a
// row at a time, in one access of up to 16 bytes where stride and address allow it. Which elements a thread takes never depends on
// that, so a sum over a row has the same bits in every layout. Compiled by nvcc only.
#pragma once
#include "core/row_plan.hpp"
#include "cuda/element.cuh"

namespace fw::cuda {

// Element offsets of a row in every tensor of the plan.
struct RowOffsets {
  int64_t at[RowPlan::kMaxTensors];
};
__device__ inline RowOffsets seek_row(const RowPlan &plan, int64_t row) {
  RowOffsets offsets = {};
  for (int32_t i = plan.n_dims - 1; i >= 0; --i) {
    const int64_t above = i > 0 ? row / plan.shape[i] : 0, index = row - above * plan.shape[i];
    row = above;
#pragma unroll
    for (int32_t t = 0; t < RowPlan::kMaxTensors; ++t) offsets.at[t] += index * plan.strides[t][i];
  }
  return offsets;
}

// The sequence that owns a row of a batch entry, or -1. Offsets that are not sorted lead to some sequence or none.
__device__ inline int64_t sequence_of_row(const fw_tensor &cu, int64_t n_sequences, int64_t tokens, int64_t batch, int64_t row) {
  if (!given(cu)) return batch;
  int64_t low = 0, high = n_sequences;  // the first sequence that ends after the row
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (clamped_offset(cu, middle + 1, tokens) > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low < n_sequences && clamped_offset(cu, low, tokens) <= row ? low : -1;
}

// A row of a tensor; is_packed: quads of it that start at a multiple of 4 are one aligned access.
struct Row {
  void *data;
  fw_dtype dtype;
  int64_t offset, stride;
  bool is_packed;
};
__device__ inline Row row_at(const fw_tensor &t, int64_t offset, int64_t stride) {
  const uintptr_t size = static_cast<uintptr_t>(dtype_size(t.dtype));
  const uintptr_t address = reinterpret_cast<uintptr_t>(t.data) + static_cast<uintptr_t>(offset) * size;
  return {t.data, t.dtype, offset, stride, stride == 1 && address % (4 * size) == 0};
}

// Four elements as they came in one access: 16-bit ones two a word.
struct QuadBits {
  uint32_t word[4];
};

// One by one: the elements of a quad that exist.
__device__ __noinline__ inline uint4 load_loose_quad(const void *data, fw_dtype dtype, int64_t offset, int64_t stride,
                                                     int64_t left) {
  uint32_t x[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) x[j] = j < left ? load_bits(data, dtype, offset + j * stride) : 0;
  return make_uint4(x[0], x[1], x[2], x[3]);
}
__device__ __noinline__ inline void store_loose_quad(void *data, fw_dtype dtype, int64_t offset, int64_t stride,
                                                     int64_t left, float4 x) {
  const float all[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j < left) store_element(data, dtype, offset + j * stride, all[j]);
  }
}

// A quad that is one aligned access; `offset` counts elements.
__device__ inline QuadBits load_quad_bits(const void *data, fw_dtype dtype, int64_t offset) {
  uint4 x = make_uint4(0, 0, 0, 0);
  if (dtype == FW_F32) {
    x = *reinterpret_cast<const uint4 *>(static_cast<const float *>(data) + offset);
  } else {
    const uint2 two = *reinterpret_cast<const uint2 *>(static_cast<const uint16_t *>(data) + offset);
    x.x = two.x, x.y = two.y;
  }
  return {{x.x, x.y, x.z, x.w}};
}
__device__ inline void from_quad_bits(const QuadBits &bits, fw_dtype dtype, float (&x)[4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t half = bits.word[j / 2] >> (j % 2 * 16) & 0xffff;
    x[j] = from_bits(dtype == FW_F32 ? bits.word[j] : half, dtype);
  }
}

// Elements i to i + 3 of a row of n; those past its end are 0. i: a multiple of 4.
__device__ inline void load_quad(const Row &row, int64_t i, int64_t n, float (&x)[4]) {
  const int64_t at = row.offset + i * row.stride;
  if (row.is_packed && i + 4 <= n) {
    from_quad_bits(load_quad_bits(row.data, row.dtype, at), row.dtype, x);
    return;
  }
  const uint4 bits = load_loose_quad(row.data, row.dtype, at, row.stride, n - i);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) x[j] = from_bits(words[j], row.dtype);
}

// Elements i to i + 4 * kQuads - 1 of a row of n, their loads under way together; those past its end are 0. i: a multiple of 4.
// A load waits behind a branch for those before it, so that here a quad is whole or not loaded, of a type that is known.
template <int kQuads>
__device__ inline void load_quads(const Row &row, int64_t i, int64_t n, float (&x)[kQuads][4]) {
  const int64_t left = n - i, whole = !row.is_packed ? 0 : left < 4 * kQuads ? left / 4 : kQuads;
  const auto load = [&](fw_dtype dtype) {
    const Row known = {row.data, dtype, row.offset + i, 1, true};
#pragma unroll
    for (int q = 0; q < kQuads; ++q) {
      x[q][0] = x[q][1] = x[q][2] = x[q][3] = 0;
      if (q < whole) load_quad(known, 4 * q, 4 * q + 4, x[q]);
    }
  };
  if (row.dtype == FW_F32) {
    load(FW_F32);
  } else if (row.dtype == FW_BF16) {
    load(FW_BF16);
  } else {
    load(FW_F16);
  }
  if (whole == kQuads || left <= 4 * whole) return;
#pragma unroll
  for (int q = 0; q < kQuads; ++q) {
    if (q >= whole && 4 * q < left) load_quad(row, i + 4 * q, n, x[q]);
  }
}

__device__ inline void store_quad(const Row &row, int64_t i, int64_t n, const float (&x)[4]) {
  const int64_t at = row.offset + i * row.stride;
  if (row.is_packed && i + 4 <= n) {
    if (row.dtype == FW_F32) {
      *reinterpret_cast<float4 *>(static_cast<float *>(row.data) + at) = make_float4(x[0], x[1], x[2], x[3]);
      return;
    }
    uint32_t words[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint16_t half = row.dtype == FW_BF16 ? __bfloat16_as_ushort(__float2bfloat16_rn(x[j]))
                                                 : __half_as_ushort(__float2half_rn(x[j]));
      words[j / 2] |= static_cast<uint32_t>(half) << (j % 2 * 16);
    }
    *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(row.data) + at) = make_uint2(words[0], words[1]);
    return;
  }
  store_loose_quad(row.data, row.dtype, at, row.stride, n - i, make_float4(x[0], x[1], x[2], x[3]));
}

}  // namespace fw::cuda
