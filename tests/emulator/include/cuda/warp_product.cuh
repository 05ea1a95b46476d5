// SPDX-License-Identifier: Apache-2.0
// The emulator's file for src/cuda/warp_product.cuh; the product in bf16 of sm90/matrix.cuh is made here too.
#pragma once
#include <cuda_runtime.h>

namespace fw::cuda {

// To nearest even.
inline uint32_t to_tf32(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0xfffu + (bits >> 13 & 1)) & ~0x1fffu;
}

struct WarpProduct {
  float *d;
  const uint32_t *a;
  uint32_t b[2];
};
// kDepth: elements of the summed index, kHalves: elements in a word (tf32 1, bf16 2).
template <int kDepth, int kHalves>
void warp_product(void *const *items) {
  float a[16][kDepth], b[kDepth][8];
  const auto value = [](uint32_t word, int half) {
    if (kHalves == 1) return __uint_as_float(word & ~0x1fffu);
    return __uint_as_float(half == 0 ? word << 16 : word & 0xffff0000u);
  };
  for (int lane = 0; lane < 32; ++lane) {
    const WarpProduct &p = *static_cast<WarpProduct *>(items[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      for (int h = 0; h < kHalves; ++h) a[g + i % 2 * 8][kHalves * (t + i / 2 * 4) + h] = value(p.a[i], h);
    }
    for (int i = 0; i < 2; ++i) {
      for (int h = 0; h < kHalves; ++h) b[kHalves * (t + 4 * i) + h][g] = value(p.b[i], h);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float *d = static_cast<WarpProduct *>(items[lane])->d;
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float sum = 0;
      for (int k = 0; k < kDepth; ++k) sum += a[row][k] * b[k][column];
      d[i] += sum;
    }
  }
}
inline void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  WarpProduct p = {d, a, {b0, b1}};
  emulator::warp_meet("multiply_tf32", 0xffffffffu, &p, warp_product<8, 1>);
}

}  // namespace fw::cuda
