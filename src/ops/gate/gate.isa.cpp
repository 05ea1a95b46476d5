// SPDX-License-Identifier: Apache-2.0
// Gate activations. Plan: an item is a block of tokens of one group; its parameters are laid out as rows once, each
// token's row goes through fp32 scratch (kScratchRows rows of `length` floats a slot). Backward sums the parameters'
// gradients 64 rows at a time into the block's partials, which a second pass adds up block by block: an order that
// the shape fixes.
#include "cpu/activation.hpp"
#include "cpu/rows.hpp"
#include "ops/gate/kernels.hpp"

namespace fw::FW_LEVEL {
namespace {

using gate::Buffers;
using gate::Problem;

// The parameter's row of this group in fp32; a value shared by the row is repeated.
void load_parameter(const Problem &p, const fw_tensor &t, int64_t group, int64_t padded, float *to) {
  if (t.ndim == 1 && p.has_vectors) {
    const float value = static_cast<const float *>(t.data)[group * t.strides[0]];
    for (int64_t i = 0; i < padded; ++i) to[i] = value;
  } else {
    load_row(t.data, t.dtype, gate::parameter_offset(p, t, group, 0), t.strides[t.ndim - 1], p.length, padded, to);
  }
}

void zero_row(float *row, int64_t padded) {
  for (int64_t i = 0; i < padded; ++i) row[i] = 0.0f;
}
// into += row; row = 0
void fold_row(float *row, float *into, int64_t padded) {
  for (int64_t i = 0; i < padded; i += kLanes) store(into + i, load(into + i) + load(row + i));
  zero_row(row, padded);
}

void rows(const Problem &p, const Buffers &buffers, float *scratch, int64_t group, int64_t begin, int64_t end,
          int64_t block) {
  const RowPlan &plan = p.plan;
  const int64_t n = p.length, padded = pad_lanes(n), pitch = buffers.pitch;
  float *x = scratch + gate::kX * pitch, *dy = scratch + gate::kDy * pitch, *out = scratch + gate::kOut * pitch;
  float *a_log = given(p.a_log) ? scratch + gate::kALog * pitch : nullptr;
  float *dt_bias = given(p.dt_bias) ? scratch + gate::kDtBias * pitch : nullptr;
  if (a_log) load_parameter(p, p.a_log, group, padded, a_log);
  if (dt_bias) load_parameter(p, p.dt_bias, group, padded, dt_bias);
  const float normalizer = static_cast<float>(p.normalizer), lower_bound = static_cast<float>(p.lower_bound);
  RowCursor row;
  seek_row(plan, begin, &row);

  if (p.direction == FW_FORWARD) {
    for (int64_t r = begin; r < end; ++r, next_row(plan, &row)) {
      load_row(p.x.data, p.x.dtype, row.offset[0] + group * p.group_stride[0], plan.inner[0], n, padded, x);
      activate_gate_row(p.kind, x, n, a_log, dt_bias, normalizer, lower_bound, out);
      store_row(p.y.data, p.y.dtype, row.offset[1] + group * p.group_stride[1], plan.inner[1], n, out);
    }
    return;
  }

  float *da_tile = given(p.d_a_log) ? scratch + gate::kDaTile * pitch : nullptr, *da = scratch + gate::kDa * pitch;
  float *db_tile = given(p.d_dt_bias) ? scratch + gate::kDbTile * pitch : nullptr, *db = scratch + gate::kDb * pitch;
  for (int64_t i = gate::kDaTile; i <= gate::kDb; ++i) zero_row(scratch + i * pitch, padded);
  for (int64_t r = begin; r < end; ++r, next_row(plan, &row)) {
    load_row(p.x.data, p.x.dtype, row.offset[0] + group * p.group_stride[0], plan.inner[0], n, padded, x);
    load_row(p.dy.data, p.dy.dtype, row.offset[1] + group * p.group_stride[1], plan.inner[1], n, padded, dy);
    gate_grad_row(p.kind, x, dy, n, a_log, dt_bias, normalizer, lower_bound, out, da_tile, db_tile);
    if (given(p.dx))
      store_row(p.dx.data, p.dx.dtype, row.offset[2] + group * p.group_stride[2], plan.inner[2], n, out);
    if ((r - begin) % 64 == 63 || r + 1 == end) {
      if (da_tile) fold_row(da_tile, da, padded);
      if (db_tile) fold_row(db_tile, db, padded);
    }
  }
  if (da_tile && p.has_vectors) {
    Vec sum = {};
    for (int64_t i = n; i < padded; ++i) da[i] = 0.0f;
    for (int64_t i = 0; i < padded; i += kLanes) sum += load(da + i);
    buffers.a_partials[block * p.n_groups + group] = sum_lanes(sum);
  } else if (da_tile) {
    memcpy(buffers.a_partials + block * n, da, static_cast<size_t>(n) * 4);
  }
  if (db_tile) memcpy(buffers.bias_partials + (block * p.n_groups + group) * pitch, db, static_cast<size_t>(n) * 4);
}

void sum_a_log(const Problem &p, const Buffers &buffers, int64_t n_blocks) {
  const int64_t width = p.a_width();
  float *to = static_cast<float *>(p.d_a_log.data);
  for (int64_t i = 0; i < width; ++i) {
    float sum = 0.0f;
    for (int64_t block = 0; block < n_blocks; ++block) sum += buffers.a_partials[block * width + i];
    to[i * p.d_a_log.strides[0]] = sum;
  }
}

void sum_dt_bias(const Problem &p, const Buffers &buffers, float *scratch, int64_t group, int64_t n_blocks) {
  float *sum = scratch;
  zero_row(sum, p.length);
  for (int64_t block = 0; block < n_blocks; ++block) {
    const float *partial = buffers.bias_partials + (block * p.n_groups + group) * buffers.pitch;
    for (int64_t i = 0; i < p.length; ++i) sum[i] += partial[i];
  }
  const fw_tensor &t = p.d_dt_bias;
  store_row(t.data, t.dtype, gate::parameter_offset(p, t, group, 0), t.strides[t.ndim - 1], p.length, sum);
}

}  // namespace

extern const gate::Kernels kGate;
const gate::Kernels kGate = {rows, sum_a_log, sum_dt_bias};

}  // namespace fw::FW_LEVEL
