// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup between images in shared memory (64 rows of 64 bf16, 128-byte swizzle; 128 columns are two images
// kTileBytes apart). Operands that bf16 does not hold are two images, a high part and what it left, and three products, or
// two where the other side is one bf16. Sums and first operands have 16 rows a warp.
#pragma once
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/product.cuh"
#include "ops/recurrence/sm90_plan.cuh"

namespace fw::sm90 {

// Four m64k16 first operands: an image, or its transpose.
__device__ __forceinline__ void load_operand(uint32_t (&a)[4][4], uint32_t image, int warp, int lane) {
  const int part = lane / 8;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    load_tiles(a[step], image + swizzled(16 * warp + 8 * (part & 1) + lane % 8, 32 * step + 16 * (part >> 1)));
  }
}
__device__ __forceinline__ void load_operand_transposed(uint32_t (&a)[4][4], uint32_t image, int warp, int lane) {
  const int part = lane / 8;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    load_tiles_transposed(a[step], image + swizzled(16 * step + 8 * (part >> 1) + lane % 8, 32 * warp + 16 * (part & 1)));
  }
}

// Where a lane's row of the 8x8 tiles 2i, 2i + 1 of a warp's 16 rows lies.
__device__ __forceinline__ uint32_t image_corner(int i, int warp, int lane) {
  const int part = lane / 8;
  return i / 4 * kTileBytes + swizzled(16 * warp + 8 * (part & 1) + lane % 8, i % 4 * 32 + 16 * (part >> 1));
}

// d = the images `high` + `low`.
template <int kCount>
__device__ __forceinline__ void load_image(float (&d)[kCount], uint32_t high, uint32_t low, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    uint32_t x[4], y[4];
    load_tiles(x, high + image_corner(i, warp, lane));
    load_tiles(y, low + image_corner(i, warp, lane));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      d[8 * i + 2 * e] = low_bf16(x[e]) + low_bf16(y[e]), d[8 * i + 2 * e + 1] = high_bf16(x[e]) + high_bf16(y[e]);
    }
  }
}

// The image of d, rounded; and that of what the rounding left.
template <int kCount>
__device__ __forceinline__ void store_image(const float (&d)[kCount], uint32_t image, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    const float *x = d + 8 * i;
    store_tiles(image + image_corner(i, warp, lane), pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]),
                pack_bf16(x[6], x[7]));
  }
}
template <int kCount>
__device__ __forceinline__ void store_image_rest(float (&d)[kCount], uint32_t image, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const uint32_t packed = pack_bf16(d[i], d[i + 1]);
    d[i] -= low_bf16(packed), d[i + 1] -= high_bf16(packed);
  }
  store_image(d, image, warp, lane);
}

__device__ __forceinline__ void multiply_free(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add) { multiply_n128_free(d, a, b, add); }
__device__ __forceinline__ void multiply_free(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) { multiply_n64_free(d, a, b, add); }

// d (+)= (high + low) times images: [64x128] times the two at `second`, [64x64] times the one.
template <int kCount>
__device__ __forceinline__ void multiply_parts(float (&d)[kCount], const uint32_t (&high)[4][4], const uint32_t (&low)[4][4],
                                               uint32_t second, int add) {
  const uint64_t b = rows_along_free(second, kTileBytes);
  hold(d);
  product_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply_free(d, high[step], advance(b, step * 2048), add || step > 0);
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply_free(d, low[step], advance(b, step * 2048), 1);
  product_commit();
  product_wait<0>();
  hold(d);
}

// d[64x64] (+)= (high + low) times the sum of the image at `second` and the one behind it, but for low times low.
__device__ __forceinline__ void multiply_both_parts(float (&d)[32], const uint32_t (&high)[4][4], const uint32_t (&low)[4][4],
                                                    uint32_t second, int add) {
  const uint64_t b = rows_along_free(second, kTileBytes), rest = rows_along_free(second + kTileBytes, kTileBytes);
  hold(d);
  product_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply_n64_free(d, high[step], advance(b, step * 2048), add || step > 0);
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply_n64_free(d, high[step], advance(rest, step * 2048), 1);
#pragma unroll
  for (int step = 0; step < 4; ++step) multiply_n64_free(d, low[step], advance(b, step * 2048), 1);
  product_commit();
  product_wait<0>();
  hold(d);
}

}  // namespace fw::sm90
