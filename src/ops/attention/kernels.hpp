// SPDX-License-Identifier: Apache-2.0
// What a level brings to attention, and what it works on: tiles of rows against blocks of keys.
#pragma once
#include <stdint.h>

#include "cpu/levels.hpp"
#include "fastweight/types.h"

namespace fw::attention {

// Keys that a softmax takes at a time. Blocks start at positions that are multiples of it, so that a row's bits
// depend neither on how its sequence is cut into calls nor on the rows computed with it.
constexpr int64_t kKeyBlock = 32;

// Keys and values of one sequence and head, by position.
struct Keys {
  const float *k, *v;  // this call's, turned: position first + i is row i
  int64_t first;
  int64_t k_pitch, v_pitch;  // floats from row to row; D and DV rounded up, the rest 0
  int64_t D, DV;
  // positions below `first`: a ring, position p in its row p % capacity
  const void *k_ring, *v_ring;
  fw_dtype k_dtype, v_dtype;
  int64_t k_offset, v_offset;  // element offset of its row 0
  int64_t k_token, v_token;    // strides from row to row
  int64_t k_stride, v_stride;  // and inside a row
  int64_t capacity;
  float *k_block, *v_block;  // scratch [kKeyBlock, pitch]
};

// Rows of one group of heads: row r is position first + r / group. It sees [max(oldest, position - reach + 1),
// position].
struct Tile {
  int64_t first, n_positions, group, oldest, reach;
  const float *q;            // [rows, k_pitch] turned, times scale
  const float *d_o;          // [rows, v_pitch] backward
  float *scores, *d_scores;  // [rows, kKeyBlock]
  float *top, *sum;          // [rows] forward: the largest score and the sum of exponentials relative to it
  float *highest, *rescale;  // [rows] scratch; these four are padded to whole vectors
  float *o;                  // [rows, v_pitch] forward: the weighted sum of values, not yet divided
  const float *reference, *inverse, *delta;  // [rows] backward: p = exp(score - reference) * inverse; delta = o . d_o
  float *dq;                                 // [rows, k_pitch]
  float *dk, *dv;                            // [kKeyBlock, pitch], added to
  int64_t rows() const { return n_positions * group; }
};

struct Kernels {
  // to[i] = element i of a row, turned (cos and sin [n / 2], or null) and times scale; 0 for n <= i < padded
  void (*load_turned)(const void *data, fw_dtype dtype, int64_t offset, int64_t stride, int64_t n, int64_t padded,
                      const float *cos, const float *sin, float scale, float *to);
  // the way back: row times scale, turned back, rounded to nearest even; `row` is changed
  void (*store_turned)(void *data, fw_dtype dtype, int64_t offset, int64_t stride, int64_t n, const float *cos,
                       const float *sin, float scale, float *row);
  // top, sum and o of the tile, from the first key to the last
  void (*forward_tile)(const Keys &keys, const Tile &tile);
  // forward's top and sum into reference and inverse, o and d_o into delta
  void (*statistics)(int64_t rows, int64_t v_pitch, const float *top, const float *sum, const float *o,
                     const float *d_o, float *reference, float *inverse, float *delta);
  // dq of the tile
  void (*query_gradients)(const Keys &keys, const Tile &tile);
  // what the tile adds to dk and dv of the keys at [low, high), at most kKeyBlock
  void (*key_gradients)(const Keys &keys, const Tile &tile, int64_t low, int64_t high);
};

}  // namespace fw::attention

FW_DECLARE_LEVEL_TABLES(::fw::attention::Kernels, kAttentionKernels)
