// SPDX-License-Identifier: Apache-2.0
// The emulator's file for src/cuda/sm90/matrix.cuh.
#pragma once
#include <cuda_bf16.h>

#include "cuda/sm90/layout.cuh"
#include "cuda/warp_product.cuh"

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
inline void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  cuda::WarpProduct p = {d, a, {b0, b1}};
  emulator::warp_meet("multiply_bf16", 0xffffffffu, &p, cuda::warp_product<16, 2>);
}

}  // namespace fw::sm90
