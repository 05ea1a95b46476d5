// SPDX-License-Identifier: Apache-2.0
// The vector path of attention: tiles of rows x a head of keys, spread over threads.
//
// Plan
//   1  every row: cos and sin of its angles (fp64, then rounded); k turned and v as fp32 rows, head by head;
//      in the backward also q (turned, times scale) and d_o, the heads of a group beside each other
//   2  forward, step: an item is a tile of rows of one group of heads; it walks its keys and writes o
//      backward: the same walk for the two numbers a row that give its probabilities again, then once more for dq;
//      then items are blocks of keys, which walk the rows that see them, for dk and dv
//   3  step: the caches get the last rows, after every read
// No sum is split over items, so nothing depends on the threads.
// Scratch: fp32 k and v of the call, angles; backward q, d_o and three numbers a row; a slot has one tile.
#include <math.h>

#include <initializer_list>

#include "core/ledger.hpp"
#include "core/operands.hpp"
#include "cpu/level_impl.hpp"
#include "ops/attention/kernels.hpp"
#include "ops/attention/problem.hpp"

namespace fw::attention {
namespace {

constexpr int64_t kTileRows = 32;
constexpr double kSineWork = 32;  // a sine in fp64 costs tens of multiply-adds

struct Sizes {
  int64_t k_pitch, v_pitch;
  int64_t tile_positions, tile_rows;  // positions of a tile; with the heads of the group, its rows
  int64_t half;                       // angles of a row
};
Sizes sizes_of(const Problem &p) {
  const int64_t group = p.group(), positions = group >= kTileRows ? 1 : kTileRows / group;
  return {scratch_pitch(p.D), scratch_pitch(p.DV), positions, positions * group, p.theta > 0 ? p.D / 2 : 0};
}

// A slot's scratch.
struct Slot {
  float *q, *o, *dq, *scores, *d_scores, *top, *sum, *highest, *rescale, *k_block, *v_block;
};

struct Buffers {
  int64_t *tiles, *key_blocks;         // [N+1]: tiles, blocks of keys, before each sequence
  double *frequency;                   // [half]
  float *cos, *sin;                    // [R, half]
  float *k, *v;                        // [HK, R, pitch]
  float *q, *d_o;                      // [HK, R, group, pitch] backward
  float *reference, *inverse, *delta;  // [HK, R, group] backward
  float *slots;
  int64_t slot_size;
};

Slot lay_out_slot(Ledger &ledger, const Problem &p, const Sizes &z) {
  Slot s = {};
  const bool is_backward = p.direction == FW_BACKWARD;
  s.o = ledger.take<float>(product(z.tile_rows, z.v_pitch));
  s.scores = ledger.take<float>(product(z.tile_rows, kKeyBlock));
  for (float **numbers : {&s.top, &s.sum, &s.highest, &s.rescale})
    *numbers = ledger.take<float>(scratch_pitch(z.tile_rows));
  s.k_block = ledger.take<float>(product(kKeyBlock, z.k_pitch));
  s.v_block = ledger.take<float>(product(kKeyBlock, z.v_pitch));
  if (is_backward) {
    s.dq = ledger.take<float>(product(z.tile_rows, z.k_pitch));
    s.d_scores = ledger.take<float>(product(z.tile_rows, kKeyBlock));
  } else {
    s.q = ledger.take<float>(product(z.tile_rows, z.k_pitch));
  }
  return s;
}

Buffers lay_out(Ledger &ledger, const fw_context &context, const Problem &p, const Sizes &z) {
  Buffers b = {};
  if (p.rows() == 0) return b;
  const int64_t key_rows = product(p.HK, p.rows()), query_rows = product(key_rows, p.group());
  b.tiles = ledger.take<int64_t>(p.N + 1);
  b.key_blocks = ledger.take<int64_t>(p.N + 1);
  b.frequency = ledger.take<double>(z.half);
  b.cos = ledger.take<float>(product(p.rows(), z.half));
  b.sin = ledger.take<float>(product(p.rows(), z.half));
  b.k = ledger.take<float>(product(key_rows, z.k_pitch));
  b.v = ledger.take<float>(product(key_rows, z.v_pitch));
  if (p.direction == FW_BACKWARD) {
    b.q = ledger.take<float>(product(query_rows, z.k_pitch));
    b.d_o = ledger.take<float>(product(query_rows, z.v_pitch));
    b.reference = ledger.take<float>(query_rows);
    b.inverse = ledger.take<float>(query_rows);
    b.delta = ledger.take<float>(query_rows);
  }
  Ledger slot(nullptr);
  lay_out_slot(slot, p, z);
  const bool fits = slot.bytes() < static_cast<uint64_t>(INT64_MAX) - 64;
  b.slot_size = fits ? static_cast<int64_t>((slot.bytes() + 63) / 64 * 16) : -1;
  b.slots = ledger.take<float>(product(context.n_threads, b.slot_size));
  return b;
}

// Everything that a phase needs.
struct Call {
  const fw_context &context;
  const Problem &p;
  const Kernels &kernels;
  Sizes z;
  Buffers b;
  int64_t n_tiles, n_key_blocks;
  double work;  // multiply-adds of one product of rows and keys over all heads

  Slot slot(int64_t i) const {
    Ledger ledger(b.slots + i * b.slot_size);
    return lay_out_slot(ledger, p, z);
  }
  // Row of the buffers that hold a row for every (batch, t).
  int64_t row(const Sequence &s, int64_t t) const { return s.batch * p.T + s.begin + t; }
  const float *cos(int64_t row) const { return z.half ? b.cos + row * z.half : nullptr; }
  const float *sin(int64_t row) const { return z.half ? b.sin + row * z.half : nullptr; }
};

// Sequence of an item; starts[n] items come before sequence n.
int64_t find_sequence(const int64_t *starts, int64_t n, int64_t item) {
  int64_t low = 0, high = n;  // starts[low] <= item < starts[high]
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (starts[middle] <= item)
      low = middle;
    else
      high = middle;
  }
  return low;
}

struct Rows {  // of one sequence: [begin, begin + count)
  Sequence s;
  int64_t begin, count;
};
Rows rows_of_item(const Problem &p, const int64_t *starts, int64_t item, int64_t block) {
  const int64_t n = find_sequence(starts, p.N, item);
  const Sequence s = sequence(p, n);
  const int64_t begin = (item - starts[n]) * block;
  return {s, begin, s.length - begin < block ? s.length - begin : block};
}

void count_items(Call *c) {
  const Problem &p = c->p;
  c->b.tiles[0] = c->b.key_blocks[0] = 0;
  double pairs = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence(p, n);
    c->b.tiles[n + 1] = c->b.tiles[n] + ceil_div(s.length, c->z.tile_positions);
    c->b.key_blocks[n + 1] = c->b.key_blocks[n] + ceil_div(s.length, kKeyBlock);
    const int64_t keys = s.first - s.oldest + s.length;
    pairs += static_cast<double>(s.length) * static_cast<double>(keys < p.reach ? keys : p.reach);
  }
  c->n_tiles = c->b.tiles[p.N];
  c->n_key_blocks = c->b.key_blocks[p.N];
  c->work = pairs * static_cast<double>(p.HQ) * static_cast<double>(c->z.k_pitch + c->z.v_pitch);
  for (int64_t i = 0; i < c->z.half; ++i) {
    c->b.frequency[i] = pow(p.theta, -2.0 * static_cast<double>(i) / static_cast<double>(p.D));
  }
}

// ---- 1: rows as the kernels read them ----

void load_q(const Call &c, const Sequence &s, int64_t t, int64_t hk, float *to) {
  const Problem &p = c.p;
  const int64_t row = c.row(s, t);
  for (int64_t g = 0; g < p.group(); ++g) {
    c.kernels.load_turned(p.q.data, p.q.dtype, row_offset(p.q, s.batch, s.begin + t, hk * p.group() + g),
                          p.q.strides[3], p.D, c.z.k_pitch, c.cos(row), c.sin(row), static_cast<float>(p.scale),
                          to + g * c.z.k_pitch);
  }
}

void load_d_o(const Call &c, const Sequence &s, int64_t t, int64_t hk, float *to) {
  const Problem &p = c.p;
  for (int64_t g = 0; g < p.group(); ++g) {
    c.kernels.load_turned(p.d_o.data, p.d_o.dtype, row_offset(p.d_o, s.batch, s.begin + t, hk * p.group() + g),
                          p.d_o.strides[3], p.DV, c.z.v_pitch, nullptr, nullptr, 1.0f, to + g * c.z.v_pitch);
  }
}

void load_rows(const Call &c) {
  const Problem &p = c.p;
  const double work =
      static_cast<double>(p.rows()) * static_cast<double>(p.HK) * static_cast<double>(c.z.k_pitch + c.z.v_pitch) +
      static_cast<double>(p.rows()) * static_cast<double>(c.z.half) * kSineWork;
  parallel_work(c.context, c.n_tiles, work, [&](int64_t, int64_t item) {
    const Rows r = rows_of_item(p, c.b.tiles, item, c.z.tile_positions);
    if (r.s.slot < 0) return;
    for (int64_t t = r.begin; t < r.begin + r.count; ++t) {
      const int64_t row = c.row(r.s, t);
      for (int64_t i = 0; i < c.z.half; ++i) {
        const double angle = static_cast<double>(r.s.first + t) * c.b.frequency[i];
        c.b.cos[row * c.z.half + i] = static_cast<float>(::cos(angle));
        c.b.sin[row * c.z.half + i] = static_cast<float>(::sin(angle));
      }
      for (int64_t h = 0; h < p.HK; ++h) {
        const int64_t key_row = h * p.rows() + row;
        c.kernels.load_turned(p.k.data, p.k.dtype, row_offset(p.k, r.s.batch, r.s.begin + t, h), p.k.strides[3], p.D,
                              c.z.k_pitch, c.cos(row), c.sin(row), 1.0f, c.b.k + key_row * c.z.k_pitch);
        c.kernels.load_turned(p.v.data, p.v.dtype, row_offset(p.v, r.s.batch, r.s.begin + t, h), p.v.strides[3], p.DV,
                              c.z.v_pitch, nullptr, nullptr, 1.0f, c.b.v + key_row * c.z.v_pitch);
        if (p.direction != FW_BACKWARD) continue;
        load_q(c, r.s, t, h, c.b.q + key_row * p.group() * c.z.k_pitch);
        load_d_o(c, r.s, t, h, c.b.d_o + key_row * p.group() * c.z.v_pitch);
      }
    }
  });
}

// ---- 2: tiles ----

Keys keys_of(const Call &c, const Sequence &s, int64_t hk, const Slot &slot) {
  const Problem &p = c.p;
  const int64_t row = hk * p.rows() + c.row(s, 0);
  Keys keys = {};
  keys.k = c.b.k + row * c.z.k_pitch;
  keys.v = c.b.v + row * c.z.v_pitch;
  keys.first = s.first;
  keys.k_pitch = c.z.k_pitch;
  keys.v_pitch = c.z.v_pitch;
  keys.D = p.D;
  keys.DV = p.DV;
  keys.k_block = slot.k_block;
  keys.v_block = slot.v_block;
  if (p.direction != FW_STEP) return keys;
  keys.k_ring = p.k_cache.data;
  keys.v_ring = p.v_cache.data;
  keys.k_dtype = p.k_cache.dtype;
  keys.v_dtype = p.v_cache.dtype;
  keys.k_offset = row_offset(p.k_cache, s.slot, 0, hk);
  keys.v_offset = row_offset(p.v_cache, s.slot, 0, hk);
  keys.k_token = p.k_cache.strides[1];
  keys.v_token = p.v_cache.strides[1];
  keys.k_stride = p.k_cache.strides[3];
  keys.v_stride = p.v_cache.strides[3];
  keys.capacity = p.capacity;
  return keys;
}

Tile tile_of(const Call &c, const Rows &r, const Slot &slot) {
  Tile t = {};
  t.first = r.s.first + r.begin;
  t.n_positions = r.count;
  t.group = c.p.group();
  t.oldest = r.s.oldest;
  t.reach = c.p.reach;
  t.q = slot.q;
  t.scores = slot.scores;
  t.d_scores = slot.d_scores;
  t.top = slot.top;
  t.sum = slot.sum;
  t.highest = slot.highest;
  t.rescale = slot.rescale;
  t.o = slot.o;
  t.dq = slot.dq;
  return t;
}

// The tile's part of what the backward holds a row.
void point_at_backward(const Call &c, const Rows &r, int64_t hk, Tile *t) {
  const int64_t row = (hk * c.p.rows() + c.row(r.s, r.begin)) * c.p.group();
  t->q = c.b.q + row * c.z.k_pitch;
  t->d_o = c.b.d_o + row * c.z.v_pitch;
  t->reference = c.b.reference + row;
  t->inverse = c.b.inverse + row;
  t->delta = c.b.delta + row;
}

// f(slot, rows, hk) for every tile and head of keys. Last tiles first: with a causal mask they have the most keys.
template <class F>
void for_tiles(const Call &c, double work, F f) {
  parallel_work(c.context, c.n_tiles * c.p.HK, work, [&](int64_t i_slot, int64_t item) {
    const Rows r = rows_of_item(c.p, c.b.tiles, c.n_tiles - 1 - item / c.p.HK, c.z.tile_positions);
    f(c.slot(i_slot), r, item % c.p.HK);
  });
}

void store_row(const Call &c, const fw_tensor &to, const Sequence &s, int64_t t, int64_t head, bool is_turned,
               float scale, float *row) {
  const int64_t at = c.row(s, t);
  c.kernels.store_turned(to.data, to.dtype, row_offset(to, s.batch, s.begin + t, head), to.strides[3], to.shape[3],
                         is_turned ? c.cos(at) : nullptr, is_turned ? c.sin(at) : nullptr, scale, row);
}

void zero_rows(const fw_tensor &t, int64_t batch, int64_t begin, int64_t end) {
  for (int64_t row = begin; given(t) && row < end; ++row) {
    for (int64_t h = 0; h < t.shape[2]; ++h) {
      for (int64_t d = 0; d < t.shape[3]; ++d)
        store_f32(t.data, t.dtype, row_offset(t, batch, row, h) + d * t.strides[3], 0.0f);
    }
  }
}

void forward(const Call &c) {
  const Problem &p = c.p;
  for_tiles(c, c.work, [&](const Slot &slot, const Rows &r, int64_t hk) {
    if (r.s.slot < 0) {
      if (hk == 0) zero_rows(p.o, r.s.batch, r.s.begin + r.begin, r.s.begin + r.begin + r.count);
      return;
    }
    const Tile tile = tile_of(c, r, slot);
    for (int64_t i = 0; i < r.count; ++i) load_q(c, r.s, r.begin + i, hk, slot.q + i * p.group() * c.z.k_pitch);
    c.kernels.forward_tile(keys_of(c, r.s, hk, slot), tile);
    for (int64_t i = 0; i < tile.rows(); ++i) {
      store_row(c, p.o, r.s, r.begin + i / p.group(), hk * p.group() + i % p.group(), false, 1.0f / tile.sum[i],
                tile.o + i * c.z.v_pitch);
    }
  });
}

void backward(const Call &c) {
  const Problem &p = c.p;
  for_tiles(c, 2 * c.work, [&](const Slot &slot, const Rows &r, int64_t hk) {
    Tile tile = tile_of(c, r, slot);
    point_at_backward(c, r, hk, &tile);
    const Keys keys = keys_of(c, r.s, hk, slot);
    const int64_t row = (hk * p.rows() + c.row(r.s, r.begin)) * p.group();
    c.kernels.forward_tile(keys, tile);
    c.kernels.statistics(tile.rows(), c.z.v_pitch, tile.top, tile.sum, tile.o, tile.d_o, c.b.reference + row,
                         c.b.inverse + row, c.b.delta + row);
    if (!given(p.dq)) return;
    c.kernels.query_gradients(keys, tile);
    for (int64_t i = 0; i < tile.rows(); ++i) {
      store_row(c, p.dq, r.s, r.begin + i / p.group(), hk * p.group() + i % p.group(), true,
                static_cast<float>(p.scale), tile.dq + i * c.z.k_pitch);
    }
  });
  if (!given(p.dk) && !given(p.dv)) return;
  parallel_work(c.context, c.n_key_blocks * p.HK, 2 * c.work, [&](int64_t i_slot, int64_t item) {
    const int64_t hk = item % p.HK;
    const Rows block = rows_of_item(p, c.b.key_blocks, item / p.HK, kKeyBlock);
    const Slot slot = c.slot(i_slot);
    const Keys keys = keys_of(c, block.s, hk, slot);
    float *dk = slot.k_block, *dv = slot.v_block;
    for (int64_t i = 0; i < kKeyBlock * c.z.k_pitch; ++i) dk[i] = 0;
    for (int64_t i = 0; i < kKeyBlock * c.z.v_pitch; ++i) dv[i] = 0;
    // first row past those that see a key of the block
    const int64_t unseen = block.begin + block.count - 1 + p.reach;
    const int64_t end = unseen < block.s.length ? unseen : block.s.length;
    for (int64_t t = block.begin; t < end; t += c.z.tile_positions) {
      const Rows r = {block.s, t, end - t < c.z.tile_positions ? end - t : c.z.tile_positions};
      Tile tile = tile_of(c, r, slot);
      point_at_backward(c, r, hk, &tile);
      tile.dk = dk;
      tile.dv = dv;
      const int64_t low = block.s.first + block.begin;
      c.kernels.key_gradients(keys, tile, low, low + block.count);
    }
    for (int64_t i = 0; i < block.count; ++i) {
      if (given(p.dk)) store_row(c, p.dk, block.s, block.begin + i, hk, true, 1.0f, dk + i * c.z.k_pitch);
      if (given(p.dv)) store_row(c, p.dv, block.s, block.begin + i, hk, false, 1.0f, dv + i * c.z.v_pitch);
    }
  });
}

// ---- 3: caches ----

void store_caches(const Call &c) {
  const Problem &p = c.p;
  const double work =
      static_cast<double>(p.rows()) * static_cast<double>(p.HK) * static_cast<double>(c.z.k_pitch + c.z.v_pitch);
  parallel_work(c.context, c.n_tiles, work, [&](int64_t, int64_t item) {
    const Rows r = rows_of_item(p, c.b.tiles, item, c.z.tile_positions);
    if (r.s.slot < 0) return;
    const int64_t kept = r.s.length > p.capacity ? r.s.length - p.capacity : 0;
    for (int64_t t = r.begin > kept ? r.begin : kept; t < r.begin + r.count; ++t) {
      const int64_t ring_row = (r.s.first + t) % p.capacity;
      for (int64_t h = 0; h < p.HK; ++h) {
        const int64_t key_row = h * p.rows() + c.row(r.s, t);
        c.kernels.store_turned(p.k_cache.data, p.k_cache.dtype, row_offset(p.k_cache, r.s.slot, ring_row, h),
                               p.k_cache.strides[3], p.D, nullptr, nullptr, 1.0f, c.b.k + key_row * c.z.k_pitch);
        c.kernels.store_turned(p.v_cache.data, p.v_cache.dtype, row_offset(p.v_cache, r.s.slot, ring_row, h),
                               p.v_cache.strides[3], p.DV, nullptr, nullptr, 1.0f, c.b.v + key_row * c.z.v_pitch);
      }
    }
  });
}

}  // namespace

uint64_t cpu_workspace(const fw_context &context, const Problem &p) {
  Ledger ledger(nullptr);
  lay_out(ledger, context, p, sizes_of(p));
  return ledger.bytes();
}

void cpu_run(fw_context &context, const Problem &p, int32_t level, void *workspace) {
  if (p.rows() == 0) return;
  Ledger ledger(workspace);
  const Sizes z = sizes_of(p);
  Call c = {context, p, FW_LEVEL_TABLE(level, kAttentionKernels), z, lay_out(ledger, context, p, z), 0, 0, 0};
  count_items(&c);
  load_rows(c);
  if (p.direction == FW_BACKWARD)
    backward(c);
  else
    forward(c);
  if (p.direction == FW_STEP) store_caches(c);
  for (const fw_tensor *t : {&p.o, &p.dq, &p.dk, &p.dv}) zero_rows(*t, 0, first_row_of_none(p), p.T);
}

}  // namespace fw::attention
