// SPDX-License-Identifier: Apache-2.0
// Warpgroup products on sm_90a: bf16 operands, fp32 sums. 128 threads of one warpgroup call together. The second operand
// lies in shared memory with the 128-byte swizzle; the first in registers or likewise in shared memory.
// Protocol: product_fence, any number of products, product_commit, then product_wait before the sums (or the registers
// of a first operand) are touched. Thread (warp w, g = lane / 4, t = lane % 4) holds of an m64nN sum rows
// 16w + g and 16w + g + 8: d[4j], d[4j+1] = (g, 8j + 2t), (g, 8j + 2t + 1); d[4j+2], d[4j+3] the same of row g + 8.
// A first operand m64k16 in registers is four words of two: (g, 2t), (g+8, 2t), (g, 2t+8), (g+8, 2t+8).
#pragma once
#include <stdint.h>

#include "cuda/sm90/layout.cuh"

namespace fw::sm90 {

__device__ __forceinline__ void product_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void product_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// All but the last kPending committed groups of this warpgroup are complete.
template <int kPending>
__device__ __forceinline__ void product_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving uses of these registers across this point.
template <int kCount>
__device__ __forceinline__ void hold(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The sums of a product as operands 0 to 31 or 0 to 63 of its instruction, and their names in its text.
#define FW_SUMS_32 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), \
  "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), \
  "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), \
  "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define FW_SUMS_64 \
  FW_SUMS_32, \
  "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), \
  "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), \
  "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
  "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define FW_NAMES_32 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FW_NAMES_64 \
  FW_NAMES_32 ", " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// d[64x64] (+)= a[64x16] b[16x64], b by rows_along_sum; add = 0 overwrites d.
__device__ __forceinline__ void multiply_n64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      FW_NAMES_32
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, 0;\n}\n"
      : FW_SUMS_32
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// d[64x128] (+)= a[64x16] b[16x128], b by rows_along_free.
__device__ __forceinline__ void multiply_n128_free(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      FW_NAMES_64
      "}, {%64, %65, %66, %67}, %68, add, 1, 1, 1;\n}\n"
      : FW_SUMS_64
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// d[64x64] (+)= a[64x16] b[16x64], both by rows_along_sum.
__device__ __forceinline__ void multiply_n64_shared(float (&d)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      FW_NAMES_32
      "}, %32, %33, add, 1, 1, 0, 0;\n}\n"
      : FW_SUMS_32
      : "l"(a), "l"(b), "r"(add));
}

// d[64x64] (+)= a[64x16] b[16x64], b by rows_along_free (its block_bytes is not used).
__device__ __forceinline__ void multiply_n64_free(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      FW_NAMES_32
      "}, {%32, %33, %34, %35}, %36, add, 1, 1, 1;\n}\n"
      : FW_SUMS_32
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
}

// d[64x64] (+)= a[64x16] b[16x64], a by rows_along_free (its block_bytes is not used), b by rows_along_sum.
__device__ __forceinline__ void multiply_n64_turned(float (&d)[32], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      FW_NAMES_32
      "}, %32, %33, add, 1, 1, 1, 0;\n}\n"
      : FW_SUMS_32
      : "l"(a), "l"(b), "r"(add));
}

// d[64x128] (+)= a[64x16] b[16x128], a by rows_along_sum, b by rows_along_free.
__device__ __forceinline__ void multiply_n128_free_shared(float (&d)[64], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      FW_NAMES_64
      "}, %64, %65, add, 1, 1, 0, 1;\n}\n"
      : FW_SUMS_64
      : "l"(a), "l"(b), "r"(add));
}

// d[64x128] (+)= a[64x16] b[16x128], both by rows_along_free (of a one block: its 64 rows).
__device__ __forceinline__ void multiply_n128_free_turned(float (&d)[64], uint64_t a, uint64_t b, int add) {
  asm volatile(
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      FW_NAMES_64
      "}, %64, %65, add, 1, 1, 1, 1;\n}\n"
      : FW_SUMS_64
      : "l"(a), "l"(b), "r"(add));
}

// Products with a lower triangle of 64x64 as the second operand, 16 of its rows at a time: only the columns that they reach.
#define FW_SUMS_8(o) \
  "+f"(d[o]), "+f"(d[o + 1]), "+f"(d[o + 2]), "+f"(d[o + 3]), "+f"(d[o + 4]), "+f"(d[o + 5]), "+f"(d[o + 6]), "+f"(d[o + 7])

// d (+)= a b, of columns 0 to 16 kStep + 15; b by rows_along_free.
template <int kStep>
__device__ __forceinline__ void multiply_n64_free_to(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  if constexpr (kStep == 3) {
    multiply_n64_free(d, a, b, add);
  } else if constexpr (kStep == 2) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %29, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23}, {%24, %25, %26, %27}, %28, add, 1, 1, 1;\n}\n"
        : FW_SUMS_8(0), FW_SUMS_8(8), FW_SUMS_8(16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  } else if constexpr (kStep == 1) {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
        "{%16, %17, %18, %19}, %20, add, 1, 1, 1;\n}\n"
        : FW_SUMS_8(0), FW_SUMS_8(8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  } else {
    asm volatile(
        "{\n.reg .pred add;\nsetp.ne.b32 add, %13, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, "
        "{%8, %9, %10, %11}, %12, add, 1, 1, 1;\n}\n"
        : FW_SUMS_8(0)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));
  }
}

// d (+)= a times a lower triangle whose rows are an image; a: four first operands. Its transpose would need sums that start inside
// d, for which the compiler serializes all products.
__device__ __forceinline__ void multiply_lower_free(float (&d)[32], const uint32_t (&a)[4][4], uint64_t b, int add) {
  multiply_n64_free_to<3>(d, a[3], advance(b, 6144), add);
  multiply_n64_free_to<2>(d, a[2], advance(b, 4096), 1);
  multiply_n64_free_to<1>(d, a[1], advance(b, 2048), 1);
  multiply_n64_free_to<0>(d, a[0], b, 1);
}

#undef FW_SUMS_8
#undef FW_SUMS_32
#undef FW_SUMS_64
#undef FW_NAMES_32
#undef FW_NAMES_64

}  // namespace fw::sm90
