// SPDX-License-Identifier: Apache-2.0
// Kernels of attention, once a level.
//
// Plan of a tile: for each block of keys, scores = q k^T (dot products), one pass over each row for its largest
// score, its exponentials and their sum, then o = o * rescale + p v. Rows whose keys of a block are the same go
// through one product; a key that a row does not see takes no part in it, so that NaN there stays there. The
// backward takes the probabilities again from two numbers a row and walks the same blocks: by rows for dq, by
// keys for dk and dv, each sum in the order of positions (then heads of the group).
#include "ops/attention/kernels.hpp"
#include "cpu/gemm.hpp"
#include "cpu/rows.hpp"

namespace fw::FW_LEVEL {
namespace {

using attention::Keys;
using attention::kKeyBlock;
using attention::Tile;

inline int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t clamp(int64_t x, int64_t high) { return x < 0 ? 0 : x > high ? high : x; }

// ---- rows ----

// x1' = x1 c - x2 s, x2' = x2 c + x1 s, halves apart; sign -1 turns back.
void turn(float *x, int64_t n, const float *cos, const float *sin, float sign) {
  const int64_t half = n / 2;
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    const Vec c = load(cos + i), s = load(sin + i) * splat(sign), x1 = load(x + i), x2 = load(x + half + i);
    store(x + i, fma(x1, c, -(x2 * s)));
    store(x + half + i, fma(x2, c, x1 * s));
  }
  for (; i < half; ++i) {
    const float c = cos[i], s = sin[i] * sign, x1 = x[i], x2 = x[half + i];
    x[i] = fma(x1, c, -(x2 * s));
    x[half + i] = fma(x2, c, x1 * s);
  }
}

void scale_row(float *x, int64_t n, float scale) {
  for (int64_t i = 0; i < n; ++i) x[i] *= scale;
}

void load_turned(const void *data, fw_dtype dtype, int64_t offset, int64_t stride, int64_t n, int64_t padded,
                 const float *cos, const float *sin, float scale, float *to) {
  load_row(data, dtype, offset, stride, n, padded, to);
  if (cos) turn(to, n, cos, sin, 1.0f);
  if (scale != 1.0f) scale_row(to, n, scale);
}

void store_turned(void *data, fw_dtype dtype, int64_t offset, int64_t stride, int64_t n, const float *cos,
                  const float *sin, float scale, float *row) {
  if (scale != 1.0f) scale_row(row, n, scale);
  if (cos) turn(row, n, cos, sin, -1.0f);
  store_row(data, dtype, offset, stride, n, row);
}

// ---- blocks of keys ----

struct Block {
  const float *k, *v;  // rows of positions low, low + 1, ...
  int64_t ldk, ldv;
};

// Rows [low, low + count) of one side, in place where they lie as fp32 rows of the padded width, else gathered.
inline const float *fetch_side(const float *rows, const void *ring, fw_dtype dtype, int64_t offset, int64_t token,
                               int64_t stride, int64_t n, int64_t pitch, int64_t first, int64_t capacity,
                               float *scratch, int64_t low, int64_t count, int64_t *ld) {
  *ld = pitch;
  if (low >= first) return rows + (low - first) * pitch;
  const int64_t slot = low % capacity;
  if (low + count <= first && slot + count <= capacity && dtype == FW_F32 && stride == 1 && n == pitch) {
    *ld = token;
    return static_cast<const float *>(ring) + offset + slot * token;
  }
  for (int64_t i = 0; i < count; ++i) {
    float *to = scratch + i * pitch;
    if (low + i >= first)
      memcpy(to, rows + (low + i - first) * pitch, static_cast<size_t>(pitch) * 4);
    else
      load_row(ring, dtype, offset + (low + i) % capacity * token, stride, n, pitch, to);
  }
  return scratch;
}

Block fetch(const Keys &x, int64_t low, int64_t count) {
  Block b;
  b.k = fetch_side(x.k, x.k_ring, x.k_dtype, x.k_offset, x.k_token, x.k_stride, x.D, x.k_pitch, x.first, x.capacity,
                   x.k_block, low, count, &b.ldk);
  b.v = fetch_side(x.v, x.v_ring, x.v_dtype, x.v_offset, x.v_token, x.v_stride, x.DV, x.v_pitch, x.first, x.capacity,
                   x.v_block, low, count, &b.ldv);
  return b;
}

// Columns [*begin, *end) of a block starting at `start` that the tile's position i sees.
inline void columns_seen(const Tile &t, int64_t i, int64_t start, int64_t *begin, int64_t *end) {
  const int64_t position = t.first + i;
  *begin = clamp(greater(t.oldest, position - t.reach + 1) - start, kKeyBlock);
  *end = clamp(position + 1 - start, kKeyBlock);
}

// Calls f(row, n_rows, begin, end) for each run of rows that see the same columns, if they see any.
template <class F>
inline void for_runs(const Tile &t, int64_t start, F f) {
  for (int64_t i = 0; i < t.n_positions;) {
    int64_t begin, end, next = i + 1;
    columns_seen(t, i, start, &begin, &end);
    for (; next < t.n_positions; ++next) {
      int64_t next_begin, next_end;
      columns_seen(t, next, start, &next_begin, &next_end);
      if (next_begin != begin || next_end != end) break;
    }
    if (begin < end) f(i * t.group, (next - i) * t.group, begin, end);
    i = next;
  }
}

// Walks the blocks that the tile sees any key of: f(block, start, low, high), keys at positions [low, high).
template <class F>
inline void for_blocks(const Keys &keys, const Tile &t, F f) {
  const int64_t lowest = greater(t.oldest, t.first - t.reach + 1), last = t.first + t.n_positions - 1;
  for (int64_t start = lowest / kKeyBlock * kKeyBlock; start <= last; start += kKeyBlock) {
    const int64_t low = greater(start, lowest), high = lesser(start + kKeyBlock, last + 1);
    f(fetch(keys, low, high - low), start, low, high);
  }
}

// ---- forward ----

inline Vec column_index(int64_t j) {
  Vec index;
  for (int i = 0; i < kLanes; ++i) index[i] = static_cast<float>(i);
  return index + splat(static_cast<float>(j));
}

// The largest score of a row in columns [begin, end) of a block and `top`; all other columns become -inf.
inline float mask_row(float *scores, int64_t begin, int64_t end, float top) {
  Vec most = splat(top);
  if (begin == 0 && end == kKeyBlock) {
    for (int64_t j = 0; j < kKeyBlock; j += kLanes) most = max(load(scores + j), most);
  } else {
    const Vec from = splat(static_cast<float>(begin)), to = splat(static_cast<float>(end));
    for (int64_t j = 0; j < kKeyBlock; j += kLanes) {
      const Vec index = column_index(j);
      const Vec x = select((index >= from) & (index < to), load(scores + j), splat(-__builtin_inff()));
      store(scores + j, x);
      most = max(x, most);  // a NaN is passed over here and comes back through its exponential
    }
  }
  float lanes[kLanes], highest = top;
  store(lanes, most);
  for (int i = 0; i < kLanes; ++i) highest = lanes[i] > highest ? lanes[i] : highest;
  return highest;
}

inline Vec reference_of(Vec top) { return select(top == splat(-__builtin_inff()), Vec{}, top); }

// Scores of a block become exponentials relative to the largest score so far; top, sum and rescale move on.
void softmax_block(const Tile &t, int64_t start) {
  const int64_t rows = t.rows();
  memcpy(t.highest, t.top, static_cast<size_t>(pad_lanes(rows)) * 4);
  for_runs(t, start, [&](int64_t row, int64_t n, int64_t begin, int64_t end) {
    for (int64_t r = row; r < row + n; ++r) t.highest[r] = mask_row(t.scores + r * kKeyBlock, begin, end, t.top[r]);
  });
  for (int64_t r = 0; r < rows; r += kLanes) {
    const Vec highest = load(t.highest + r);
    store(t.rescale + r, exp(load(t.top + r) - reference_of(highest)));  // 1 for a row that sees nothing of the block
    store(t.top + r, highest);
  }
  for_runs(t, start, [&](int64_t row, int64_t n, int64_t, int64_t) {
    for (int64_t r = row; r < row + n; ++r) {
      const Vec reference = reference_of(splat(t.top[r]));
      float *scores = t.scores + r * kKeyBlock;
      Vec total = {};
      for (int64_t j = 0; j < kKeyBlock; j += kLanes) {
        const Vec e = exp(load(scores + j) - reference);
        store(scores + j, e);
        total += e;
      }
      t.sum[r] = fma(t.sum[r], t.rescale[r], sum_lanes(total));
    }
  });
}

void forward_tile(const Keys &keys, const Tile &t) {
  const int64_t rows = t.rows(), v_pitch = keys.v_pitch;
  for (int64_t r = 0; r < pad_lanes(rows); ++r) {
    t.top[r] = -__builtin_inff();
    t.sum[r] = 0;
  }
  memset(t.o, 0, static_cast<size_t>(rows * v_pitch) * 4);
  for_blocks(keys, t, [&](const Block &b, int64_t start, int64_t low, int64_t high) {
    gemm_nt(rows, high - low, keys.k_pitch, t.q, keys.k_pitch, b.k, b.ldk, t.scores + (low - start), kKeyBlock,
            false);
    softmax_block(t, start);
    for_runs(t, start, [&](int64_t row, int64_t n, int64_t begin, int64_t end) {
      gemm_nn<Keep::kScaled>(n, v_pitch, end - begin, t.scores + row * kKeyBlock + begin, kKeyBlock, 1,
                             b.v + (start + begin - low) * b.ldv, b.ldv, t.o + row * v_pitch, v_pitch,
                             t.rescale + row);
    });
  });
}

// ---- backward ----

void statistics(int64_t rows, int64_t v_pitch, const float *top, const float *sum, const float *o, const float *d_o,
                float *reference, float *inverse, float *delta) {
  for (int64_t r = 0; r < rows; ++r) {
    reference[r] = top[r] == -__builtin_inff() ? 0.0f : top[r];
    inverse[r] = 1.0f / sum[r];
    delta[r] = dot(v_pitch, o + r * v_pitch, d_o + r * v_pitch) * inverse[r];
  }
}

// scores: probabilities, d_scores: their gradients, of the tile against keys at [low, high); columns from low -
// start on.
inline void score_gradients(const Keys &keys, const Tile &t, const Block &b, int64_t start, int64_t low,
                            int64_t high) {
  const int64_t rows = t.rows(), at = low - start;
  gemm_nt(rows, high - low, keys.k_pitch, t.q, keys.k_pitch, b.k, b.ldk, t.scores + at, kKeyBlock, false);
  gemm_nt(rows, high - low, keys.v_pitch, t.d_o, keys.v_pitch, b.v, b.ldv, t.d_scores + at, kKeyBlock, false);
  for (int64_t r = 0; r < rows; ++r) {
    const Vec reference = splat(t.reference[r]), inverse = splat(t.inverse[r]), delta = splat(t.delta[r]);
    float *p = t.scores + r * kKeyBlock, *ds = t.d_scores + r * kKeyBlock;
    for (int64_t j = 0; j < kKeyBlock; j += kLanes) {
      const Vec probability = exp(load(p + j) - reference) * inverse;
      store(p + j, probability);
      store(ds + j, probability * (load(ds + j) - delta));
    }
  }
}

void query_gradients(const Keys &keys, const Tile &t) {
  const int64_t k_pitch = keys.k_pitch;
  memset(t.dq, 0, static_cast<size_t>(t.rows() * k_pitch) * 4);
  for_blocks(keys, t, [&](const Block &b, int64_t start, int64_t low, int64_t high) {
    score_gradients(keys, t, b, start, low, high);
    for_runs(t, start, [&](int64_t row, int64_t n, int64_t begin, int64_t end) {
      gemm_nn<Keep::kAll>(n, k_pitch, end - begin, t.d_scores + row * kKeyBlock + begin, kKeyBlock, 1,
                          b.k + (start + begin - low) * b.ldk, b.ldk, t.dq + row * k_pitch, k_pitch);
    });
  });
}

// Rows [*begin, *end) of the tile that see the key at `position`.
inline void rows_seeing(const Tile &t, int64_t position, int64_t *begin, int64_t *end) {
  *begin = clamp(position - t.first, t.n_positions) * t.group;
  *end = clamp(position + t.reach - t.first, t.n_positions) * t.group;
}

void key_gradients(const Keys &keys, const Tile &t, int64_t low, int64_t high) {
  const Block b = fetch(keys, low, high - low);
  score_gradients(keys, t, b, low, low, high);
  for (int64_t j = low; j < high;) {
    int64_t begin, end, next = j + 1;
    rows_seeing(t, j, &begin, &end);
    for (; next < high; ++next) {
      int64_t next_begin, next_end;
      rows_seeing(t, next, &next_begin, &next_end);
      if (next_begin != begin || next_end != end) break;
    }
    if (begin < end) {
      const int64_t at = begin * kKeyBlock + (j - low);
      gemm_nn<Keep::kAll>(next - j, keys.v_pitch, end - begin, t.scores + at, 1, kKeyBlock,
                          t.d_o + begin * keys.v_pitch, keys.v_pitch, t.dv + (j - low) * keys.v_pitch, keys.v_pitch);
      gemm_nn<Keep::kAll>(next - j, keys.k_pitch, end - begin, t.d_scores + at, 1, kKeyBlock,
                          t.q + begin * keys.k_pitch, keys.k_pitch, t.dk + (j - low) * keys.k_pitch, keys.k_pitch);
    }
    j = next;
  }
}

}  // namespace

extern const attention::Kernels kAttentionKernels;
const attention::Kernels kAttentionKernels = {load_turned, store_turned,    forward_tile,
                                              statistics,  query_gradients, key_gradients};

}  // namespace fw::FW_LEVEL
