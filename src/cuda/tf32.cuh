// SPDX-License-Identifier: Apache-2.0
// Operands of a warp product in tf32 as one part (11 bits) or two, high and low (22 bits).
#pragma once
#include "cuda/warp_product.cuh"

namespace fw::cuda {

__device__ __forceinline__ void split_tf32(float value, uint32_t &high, uint32_t &low) {
  high = to_tf32(value);
  low = to_tf32(value - __uint_as_float(high));
}

template <int kParts>
struct Tf32Parts {
  uint32_t part[kParts];
};
template <int kParts>
__device__ __forceinline__ Tf32Parts<kParts> parts_of(float value) {
  Tf32Parts<kParts> x;
  if constexpr (kParts == 2) {
    split_tf32(value, x.part[0], x.part[1]);
  } else {
    x.part[0] = to_tf32(value);
  }
  return x;
}

// First operand of a product.
template <int kParts>
struct Tf32Rows {
  uint32_t part[kParts][4];
  __device__ __forceinline__ void set(int i, float value) {
    const Tf32Parts<kParts> x = parts_of<kParts>(value);
#pragma unroll
    for (int p = 0; p < kParts; ++p) part[p][i] = x.part[p];
  }
};

template <int kParts, int kAll>
__device__ __forceinline__ Tf32Rows<kParts> first_parts(const Tf32Rows<kAll> &all) {
  Tf32Rows<kParts> a;
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a.part[p][i] = all.part[p][i];
  }
  return a;
}

// From sums of a product with eight columns, which are the summed index of the next: column t of the operand is column 2t of the sums,
// column t + 4 is 2t + 1. The second operand is then b0 = (2t, g), b1 = (2t + 1, g).
template <int kParts>
__device__ __forceinline__ Tf32Rows<kParts> rows_of_sums(const float (&sums)[4]) {
  Tf32Rows<kParts> a;
  a.set(0, sums[0]), a.set(1, sums[2]), a.set(2, sums[1]), a.set(3, sums[3]);
  return a;
}

// From the sums of two products whose columns interleave, c of the first being 2c and c of the second 2c + 1: kHalf 0 has 4t in
// column t and 4t + 1 in column t + 4, 1 has 4t + 2 and 4t + 3, so that a thread's part of both second operands is four neighbours.
template <int kParts, int kHalf>
__device__ __forceinline__ Tf32Rows<kParts> rows_of_pair(const float (&even)[4], const float (&odd)[4]) {
  Tf32Rows<kParts> a;
  a.set(0, even[kHalf]), a.set(1, even[2 + kHalf]), a.set(2, odd[kHalf]), a.set(3, odd[2 + kHalf]);
  return a;
}

// d += a b; of two parts low b high, high b low and high b high, in this order. kRounded: as one part b is tf32 already.
template <bool kRounded, int kParts>
__device__ __forceinline__ void multiply_parts(float (&d)[4], const Tf32Rows<kParts> &a, float b0, float b1) {
  if constexpr (kParts == 1 && kRounded) {
    multiply_tf32(d, a.part[0], __float_as_uint(b0), __float_as_uint(b1));
    return;
  }
  const Tf32Parts<kParts> x = parts_of<kParts>(b0), y = parts_of<kParts>(b1);
  if constexpr (kParts == 2) {
    multiply_tf32(d, a.part[1], x.part[0], y.part[0]);
    multiply_tf32(d, a.part[0], x.part[1], y.part[1]);
  }
  multiply_tf32(d, a.part[0], x.part[0], y.part[0]);
}

}  // namespace fw::cuda
