// SPDX-License-Identifier: Apache-2.0
// L2, RMS and gated RMS norms. Plan: an item is a block of rows; a row goes through fp32 scratch (kScratchRows rows
// of its length a slot): y = xhat * weight * act(gate), xhat = x rstd. Backward takes xhat again, then
//   d_scaled = dy act(gate)   dweight += d_scaled xhat   dgate = dy xhat weight act'(gate)   dx from d_scaled weight
// dweight is summed 64 rows at a time into the block's partial row, and a second pass adds the blocks in order.
#include "cpu/activation.hpp"
#include "cpu/rows.hpp"
#include "ops/norm/kernels.hpp"

namespace fw::FW_LEVEL {
namespace {

using norm::Buffers;
using norm::Problem;

struct Rows {
  float *x, *weight, *gate, *dy, *out, *tile, *sum;
};
Rows lay_out_rows(const Problem &p, float *scratch, int64_t pitch) {
  Rows r;
  r.x = scratch + norm::kRowX * pitch;
  r.weight = given(p.weight) ? scratch + norm::kRowWeight * pitch : nullptr;
  r.gate = given(p.gate) ? scratch + norm::kRowGate * pitch : nullptr;
  r.dy = scratch + norm::kRowDy * pitch;
  r.out = scratch + norm::kRowOut * pitch;
  r.tile = scratch + norm::kRowTile * pitch;
  r.sum = scratch + norm::kRowSum * pitch;
  return r;
}

void forward_row(const Problem &p, const Rows &r, const RowCursor &row, int64_t padded) {
  const RowPlan &plan = p.plan;
  const int64_t n = plan.length;
  load_row(p.x.data, p.x.dtype, row.offset[norm::kX], plan.inner[norm::kX], n, padded, r.x);
  norm_row(r.x, padded, static_cast<float>(p.count), static_cast<float>(p.eps), r.x);
  if (r.gate)
    load_row(p.gate.data, p.gate.dtype, row.offset[norm::kGate], plan.inner[norm::kGate], n, padded, r.gate);
  if (r.weight || r.gate) {
    for (int64_t i = 0; i < padded; i += kLanes) {
      Vec y = load(r.x + i);
      if (r.weight) y *= load(r.weight + i);
      if (r.gate) y *= activate(p.gate_activation, load(r.gate + i));
      store(r.x + i, y);
    }
  }
  store_row(p.y.data, p.y.dtype, row.offset[norm::kY], plan.inner[norm::kY], n, r.x);
}

void backward_row(const Problem &p, const Rows &r, const RowCursor &row, int64_t padded) {
  const RowPlan &plan = p.plan;
  const int64_t n = plan.length;
  const float count = static_cast<float>(p.count);
  load_row(p.x.data, p.x.dtype, row.offset[norm::kX], plan.inner[norm::kX], n, padded, r.x);
  load_row(p.dy.data, p.dy.dtype, row.offset[norm::kDy], plan.inner[norm::kDy], n, padded, r.dy);
  const float rstd = norm_row(r.x, padded, count, static_cast<float>(p.eps), r.x);
  if (r.gate) {
    load_row(p.gate.data, p.gate.dtype, row.offset[norm::kGate], plan.inner[norm::kGate], n, padded, r.gate);
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Vec z = load(r.gate + i), dy = load(r.dy + i);
      const Vec normed = r.weight ? load(r.x + i) * load(r.weight + i) : load(r.x + i);
      store(r.out + i, dy * normed * activation_slope(p.gate_activation, z));
      store(r.dy + i, dy * activate(p.gate_activation, z));
    }
    if (given(p.dgate))
      store_row(p.dgate.data, p.dgate.dtype, row.offset[norm::kDgate], plan.inner[norm::kDgate], n, r.out);
  }
  if (r.weight) {
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Vec d_scaled = load(r.dy + i);
      store(r.tile + i, fma(d_scaled, load(r.x + i), load(r.tile + i)));
      store(r.dy + i, d_scaled * load(r.weight + i));
    }
  }
  if (!given(p.dx)) return;
  norm_grad_row(r.x, rstd, r.dy, padded, count, r.out);
  store_row(p.dx.data, p.dx.dtype, row.offset[norm::kDx], plan.inner[norm::kDx], n, r.out);
}

void zero_row(float *row, int64_t padded) {
  for (int64_t i = 0; i < padded; ++i) row[i] = 0.0f;
}

void rows(const Problem &p, int64_t pitch, float *scratch, int64_t begin, int64_t end, float *partial) {
  const int64_t padded = pad_lanes(p.plan.length);
  const Rows r = lay_out_rows(p, scratch, pitch);
  if (r.weight) load_row(p.weight.data, p.weight.dtype, 0, p.weight.strides[0], p.plan.length, padded, r.weight);
  RowCursor row;
  seek_row(p.plan, begin, &row);
  if (p.direction == FW_FORWARD) {
    for (int64_t i = begin; i < end; ++i, next_row(p.plan, &row)) forward_row(p, r, row, padded);
    return;
  }
  zero_row(r.tile, padded);
  zero_row(r.sum, padded);
  for (int64_t i = begin; i < end; ++i, next_row(p.plan, &row)) {
    backward_row(p, r, row, padded);
    if (partial && ((i - begin) % 64 == 63 || i + 1 == end)) {
      for (int64_t j = 0; j < padded; j += kLanes) store(r.sum + j, load(r.sum + j) + load(r.tile + j));
      zero_row(r.tile, padded);
    }
  }
  if (partial) memcpy(partial, r.sum, static_cast<size_t>(p.plan.length) * 4);
}

void sum_dweight(const Problem &p, const Buffers &buffers, int64_t n_blocks, int64_t begin, int64_t end, float *sum) {
  const int64_t n = end - begin;
  zero_row(sum, n);
  for (int64_t block = 0; block < n_blocks; ++block) {
    const float *partial = buffers.partials + block * buffers.pitch + begin;
    for (int64_t i = 0; i < n; ++i) sum[i] += partial[i];
  }
  const fw_tensor &t = p.dweight;
  store_row(t.data, t.dtype, begin * t.strides[0], t.strides[0], n, sum);
}

}  // namespace

extern const norm::Kernels kNorm;
const norm::Kernels kNorm = {rows, sum_dweight};

}  // namespace fw::FW_LEVEL
