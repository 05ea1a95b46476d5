// SPDX-License-Identifier: Apache-2.0
// The warp product in tf32, compute capability 8.0 and later. The emulator of the tests has its own file of this name.
#pragma once
#include <stdint.h>

namespace fw::cuda {

// To nearest; a tie to even, before compute capability 9.0 (where it takes four instructions, not one) away from zero.
__device__ __forceinline__ uint32_t to_tf32(float value) {
  uint32_t rounded;
#if __CUDA_ARCH__ >= 900
  asm("cvt.rn.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
#else
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
#endif
  return rounded;
}

// Adds a[16x8] b[8x8] to d[16x8], in tf32. Thread (g, t) = (lane / 4, lane % 4): a = (g, t), (g+8, t), (g, t+4), (g+8, t+4);
// b = (t, g), (t+4, g); d = (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1). Bits of an operand below tf32's are not read.
__device__ __forceinline__ void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace fw::cuda
