// SPDX-License-Identifier: Apache-2.0
// The tile layer: eight tiles of up to 16 rows x 64 bytes and the product TDPBF16PS; the instructions of AMX where the
// file is compiled for them, else a scalar model of what they do. *.unit.cpp files only.
//
// Tiles 0 to 3 are sums (2 x 2), 4 and 5 rows of a, 6 and 7 rows of b. Numbers of tiles are template arguments since
// the instructions hold them.
#pragma once
#include "cpu/vec.hpp"

namespace fw::FW_LEVEL {

// Sizes of a block of 2 x 2 tiles: rows of its two halves, columns of its two halves (0: the half is not used), pairs.
struct TileShape {
  int64_t rows[2], cols[2], pairs;
  bool operator==(const TileShape &o) const {
    return rows[0] == o.rows[0] && rows[1] == o.rows[1] && cols[0] == o.cols[0] && cols[1] == o.cols[1] && pairs == o.pairs;
  }
};

#if defined(__AMX_BF16__)

class Tiles {
 public:
  // Tiles of this shape hold nothing defined afterwards.
  void configure(const TileShape &s) {
    struct alignas(64) Config {
      uint8_t palette, start_row, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) set(config, 2 * i + j, s.rows[i], s.cols[j]);
      set(config, 4 + i, s.rows[i], s.pairs);
      set(config, 6 + i, s.pairs, s.cols[i]);
    }
    order_memory();
    _tile_loadconfig(&config);
  }
  void release() { _tile_release(); }

  template <int kTile>
  void zero() {
    if constexpr (kTile == 0) _tile_zero(0);
    if constexpr (kTile == 1) _tile_zero(1);
    if constexpr (kTile == 2) _tile_zero(2);
    if constexpr (kTile == 3) _tile_zero(3);
  }
  // stride in words
  template <int kTile>
  void load(const void *from, int64_t stride) {
    order_memory();
    if constexpr (kTile == 0) _tile_loadd(0, from, stride * 4);
    if constexpr (kTile == 1) _tile_loadd(1, from, stride * 4);
    if constexpr (kTile == 2) _tile_loadd(2, from, stride * 4);
    if constexpr (kTile == 3) _tile_loadd(3, from, stride * 4);
    if constexpr (kTile == 4) _tile_loadd(4, from, stride * 4);
    if constexpr (kTile == 5) _tile_loadd(5, from, stride * 4);
    if constexpr (kTile == 6) _tile_loadd(6, from, stride * 4);
    if constexpr (kTile == 7) _tile_loadd(7, from, stride * 4);
  }
  template <int kTile>
  void store(float *to, int64_t stride) {
    if constexpr (kTile == 0) _tile_stored(0, to, stride * 4);
    if constexpr (kTile == 1) _tile_stored(1, to, stride * 4);
    if constexpr (kTile == 2) _tile_stored(2, to, stride * 4);
    if constexpr (kTile == 3) _tile_stored(3, to, stride * 4);
    order_memory();
  }
  // sums kRow, kCol += a of kRow times b of kCol
  template <int kRow, int kCol>
  void multiply() {
    if constexpr (kRow == 0 && kCol == 0) _tile_dpbf16ps(0, 4, 6);
    if constexpr (kRow == 0 && kCol == 1) _tile_dpbf16ps(1, 4, 7);
    if constexpr (kRow == 1 && kCol == 0) _tile_dpbf16ps(2, 5, 6);
    if constexpr (kRow == 1 && kCol == 1) _tile_dpbf16ps(3, 5, 7);
  }

 private:
  // gcc 12 does not know that the instructions read and write memory
  static void order_memory() { __asm__ volatile("" : : : "memory"); }
  template <class Config>
  static void set(Config &config, int tile, int64_t rows, int64_t words) {
    const bool is_used = rows > 0 && words > 0;
    config.rows[tile] = static_cast<uint8_t>(is_used ? rows : 0);
    config.bytes[tile] = static_cast<uint16_t>(is_used ? words * 4 : 0);
  }
};

#else

class Tiles {
 public:
  void configure(const TileShape &s) {
    memset(words_, 0xff, sizeof words_);  // NaN
    for (int i = 0; i < 2; ++i) {
      for (int j = 0; j < 2; ++j) rows_[2 * i + j] = s.rows[i], cols_[2 * i + j] = s.cols[j];
      rows_[4 + i] = s.rows[i], cols_[4 + i] = s.pairs;
      rows_[6 + i] = s.pairs, cols_[6 + i] = s.cols[i];
    }
  }
  void release() {}
  template <int kTile>
  void zero() {
    memset(words_[kTile], 0, sizeof words_[kTile]);
  }
  template <int kTile>
  void load(const void *from, int64_t stride) {
    for (int64_t r = 0; r < rows_[kTile]; ++r) {
      memcpy(words_[kTile][r], static_cast<const uint32_t *>(from) + r * stride, static_cast<size_t>(cols_[kTile]) * 4);
    }
  }
  template <int kTile>
  void store(float *to, int64_t stride) {
    for (int64_t r = 0; r < rows_[kTile]; ++r) {
      memcpy(to + r * stride, words_[kTile][r], static_cast<size_t>(cols_[kTile]) * 4);
    }
  }
  // Firsts and seconds of the pairs are summed apart from 0, both sums are added to the tile's number.
  template <int kRow, int kCol>
  void multiply() {
    constexpr int kSum = 2 * kRow + kCol, kA = 4 + kRow, kB = 6 + kCol;
    for (int64_t m = 0; m < rows_[kSum]; ++m) {
      for (int64_t n = 0; n < cols_[kSum]; ++n) {
        float first = 0, second = 0, sum;
        for (int64_t k = 0; k < cols_[kA]; ++k) {
          const uint32_t a = words_[kA][m][k], b = words_[kB][k][n];
          first = fma(number(a << 16), number(b << 16), first);
          second = fma(number(a & 0xffff0000u), number(b & 0xffff0000u), second);
        }
        memcpy(&sum, &words_[kSum][m][n], 4);
        sum += first + second;
        memcpy(&words_[kSum][m][n], &sum, 4);
      }
    }
  }

 private:
  static float number(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }
  uint32_t words_[8][16][16];
  int64_t rows_[8], cols_[8];
};

#endif

}  // namespace fw::FW_LEVEL
