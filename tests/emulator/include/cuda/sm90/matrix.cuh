// SPDX-License-Identifier: Apache-2.0
// The emulator's file for src/cuda/sm90/matrix.cuh.
#pragma once
#include <cuda_bf16.h>

#include "cuda/sm90/layout.cuh"

namespace fw::sm90 {

// Four 8x8 tiles between shared memory and the registers of a warp; lane l has the address of row l % 8 of tile l / 8.
struct TileMove {
  uint32_t address, *tile[4];
  bool is_transposed, is_load;
};
inline void move_tiles(const char *what, TileMove move) {
  emulator::warp_meet(what, 0xffffffffu, &move, [](void *const *items) {
    for (int i = 0; i < 4; ++i) {
      uint16_t *rows[8];
      for (int row = 0; row < 8; ++row) {
        const uint32_t address = static_cast<TileMove *>(items[8 * i + row])->address;
        if (address % 16 != 0) emulator::stop("a row of a tile at shared address %u", address);
        rows[row] = reinterpret_cast<uint16_t *>(emulator::shared_at(address, 16, "a row of a tile"));
      }
      for (int lane = 0; lane < 32; ++lane) {
        const TileMove &m = *static_cast<TileMove *>(items[lane]);
        uint16_t halves[2];
        for (int h = 0; h < 2; ++h) {
          const int row = m.is_transposed ? lane % 4 * 2 + h : lane / 4, column = m.is_transposed ? lane / 4 : lane % 4 * 2 + h;
          if (m.is_load) {
            halves[h] = rows[row][column];
          } else {
            rows[row][column] = static_cast<uint16_t>(*m.tile[i] >> (16 * h));
          }
        }
        if (m.is_load) *m.tile[i] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
      }
    }
  });
}
inline void load_tiles_transposed(uint32_t (&tile)[4], uint32_t address) {
  move_tiles("load_tiles_transposed", {address, {&tile[0], &tile[1], &tile[2], &tile[3]}, true, true});
}
inline void load_tiles(uint32_t (&tile)[4], uint32_t address) {
  move_tiles("load_tiles", {address, {&tile[0], &tile[1], &tile[2], &tile[3]}, false, true});
}
inline void store_tiles_transposed(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  move_tiles("store_tiles_transposed", {address, {&a, &b, &c, &d}, true, false});
}
inline void store_tiles(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  move_tiles("store_tiles", {address, {&a, &b, &c, &d}, false, false});
}

inline uint32_t load_word(uint32_t address) {
  return *reinterpret_cast<uint32_t *>(emulator::shared_at(address, 4, "load_word"));
}
inline void store_word(uint32_t address, uint32_t value) {
  *reinterpret_cast<uint32_t *>(emulator::shared_at(address, 4, "store_word")) = value;
}

inline uint32_t pack_bf16(float low, float high) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
         static_cast<uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}
inline uint32_t pack_f16(float low, float high) {
  return __half_as_ushort(__float2half_rn(low)) | static_cast<uint32_t>(__half_as_ushort(__float2half_rn(high))) << 16;
}
// To nearest, halves away from zero.
inline uint32_t to_tf32(float value) {
  const uint32_t bits = __float_as_uint(value);
  return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
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
    return half == 0 ? low_bf16(word) : high_bf16(word);
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
inline void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  WarpProduct p = {d, a, {b0, b1}};
  emulator::warp_meet("multiply_bf16", 0xffffffffu, &p, warp_product<16, 2>);
}

}  // namespace fw::sm90
