// SPDX-License-Identifier: Apache-2.0
// The vector path of the linear layer: blocks over rows and outputs, spread over threads.
//
// Plan
//   forward   items are kRows rows x kOuts (or kOutsDecode) outputs; inside, dots() with the weights as stored.
//             Rows of x are packed once for the whole call (few plain ones are read where they lie), weights
//             without unit stride once an item.
//   backward  dx: items are kRows rows x kCols inputs, depth out; dweight: kRows outputs x kCols inputs, depth M;
//             both walk depth in kDepth rows of the right side, packed a panel at a time. dbias: kCols outputs an
//             item, M upward.
// No block size depends on the threads in a way that shows in a sum.
// Scratch: fp32 copies of x or dy where needed; a slot has one tile of results, one panel and kOuts of bias.
#include "core/ledger.hpp"
#include "core/operands.hpp"
#include "ops/linear/kernels.hpp"
#include "ops/linear/problem.hpp"

namespace fw::linear {
namespace {

constexpr int64_t kRows = 32;        // rows of a tile of results
constexpr int64_t kOuts = 48;        // a multiple of every cols_of()
constexpr int64_t kOutsDecode = 24;  // few rows: more items, since there is little to balance them with
constexpr int64_t kFewRows = 8;
constexpr int64_t kCols = 64;    // columns of a panel in the backward, a multiple of 16
constexpr int64_t kDepth = 128;  // rows of a panel in the backward: 32 KB

int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }

bool is_plain(const fw_tensor &t) { return t.dtype == FW_F32 && t.strides[1] == 1; }

// A vector load that crosses a cache line costs two, and rows 4 KB apart evict each other: packed rows of x start
// on a line and are an odd number of lines apart (15 % on rows of 896, AVX2).
int64_t packed_stride(int64_t in) { return (ceil_div(in, 16) | 1) * 16; }

struct Buffers {
  float *x;      // [M, packed_stride(in)]: forward, but for few plain rows
  float *dy;     // [M, out]: backward
  float *tile;   // a slot: [kRows, kCols], at least [kRows, kOuts]
  float *panel;  // a slot: forward [kOuts, in] where weights have no unit stride; backward [kDepth, kCols]
  float *bias;   // a slot: [kOuts]
  int64_t panel_size;
};
constexpr int64_t kTileSize = kRows * kCols;
static_assert(kCols >= kOuts, "a tile holds either kind of result");

Buffers lay_out(Ledger &ledger, const fw_context &context, const Problem &p) {
  Buffers b = {};
  const int64_t n_slots = context.n_threads;
  if (p.direction == FW_FORWARD) {
    if (p.M == 0 || p.out == 0) return b;
    if (!is_plain(p.x) || p.M >= kFewRows) b.x = ledger.take<float>(product(p.M, packed_stride(p.in)));
    b.panel_size = p.weight.strides[1] == 1 ? 0 : product(kOuts, p.in);
    b.bias = ledger.take<float>(n_slots * kOuts);
  } else {
    b.dy = ledger.take<float>(product(p.M, p.out));
    b.panel_size = kDepth * kCols;
  }
  b.tile = ledger.take<float>(n_slots * kTileSize);
  b.panel = ledger.take<float>(product(n_slots, b.panel_size));
  return b;
}

double work_of(const Problem &p) {
  return static_cast<double>(p.M) * static_cast<double>(p.in) * static_cast<double>(p.out);
}

// fp32 rows of t, packed to `to`, a block of rows an item.
void widen_rows(const fw_context &context, const Kernels &kernels, const fw_tensor &t, float *to, int64_t ld) {
  const int64_t rows = t.shape[0], n = t.shape[1];
  parallel_work(context, ceil_div(rows, kRows), static_cast<double>(rows) * static_cast<double>(n),
                [&](int64_t, int64_t item) {
                  const int64_t r = item * kRows;
                  kernels.load_block(t.data, t.dtype, r * t.strides[0], t.strides[0], t.strides[1],
                                     min(kRows, rows - r), n, n, to + r * ld, ld);
                });
}

void forward(const fw_context &context, const Kernels &kernels, const Problem &p, const Buffers &b) {
  const float *x = static_cast<const float *>(p.x.data);
  int64_t ldx = p.x.strides[0];
  if (b.x) {
    ldx = packed_stride(p.in);
    widen_rows(context, kernels, p.x, b.x, ldx);
    x = b.x;
  }
  const int64_t n_outs = p.M < kFewRows ? kOutsDecode : kOuts;
  const int64_t out_blocks = ceil_div(p.out, n_outs), row_blocks = ceil_div(p.M, kRows);
  const fw_tensor &w = p.weight;
  const int64_t ldw = p.in > 0 ? w.strides[0] : 0;  // no step away from a null pointer
  if (p.in == 0) ldx = 0;
  parallel_work(context, out_blocks * row_blocks, work_of(p), [&](int64_t slot, int64_t item) {
    // the rows of a block of outputs one after the other: its weights stay in the cache
    const int64_t o = item / row_blocks * n_outs, m = item % row_blocks * kRows;
    const int64_t outs = min(n_outs, p.out - o), rows = min(kRows, p.M - m);
    float *tile = b.tile + slot * kTileSize, *bias = nullptr;
    if (b.panel_size > 0) {
      float *panel = b.panel + slot * b.panel_size;
      kernels.load_block(w.data, w.dtype, o * w.strides[0], w.strides[0], w.strides[1], outs, p.in, p.in, panel,
                         p.in);
      kernels.dots(rows, outs, p.in, x + m * ldx, ldx, panel, FW_F32, p.in, tile, kOuts);
    } else {
      const char *rows_of_w = static_cast<const char *>(w.data) + o * ldw * dtype_size(w.dtype);
      kernels.dots(rows, outs, p.in, x + m * ldx, ldx, rows_of_w, w.dtype, ldw, tile, kOuts);
    }
    if (given(p.bias)) {
      bias = b.bias + slot * kOuts;
      kernels.load_block(p.bias.data, p.bias.dtype, o * p.bias.strides[0], 0, p.bias.strides[0], 1, outs, outs, bias,
                         0);
    }
    kernels.store_block(p.y.data, p.y.dtype, m * p.y.strides[0] + o * p.y.strides[1], p.y.strides[0], p.y.strides[1],
                        rows, outs, tile, kOuts, bias);
  });
}

// out[r, c] = sum_k a[r * a_row + k * a_col] * right[k, c] for the whole matrix `out`; right has `depth` rows.
void product_into(const fw_context &context, const Kernels &kernels, const fw_tensor &out, int64_t depth,
                  const float *a, int64_t a_row, int64_t a_col, const fw_tensor &right, const Buffers &b,
                  double work) {
  const int64_t rows = out.shape[0], cols = out.shape[1];
  const int64_t col_blocks = ceil_div(cols, kCols);
  parallel_work(context, col_blocks * ceil_div(rows, kRows), work, [&](int64_t slot, int64_t item) {
    const int64_t c = item % col_blocks * kCols, r = item / col_blocks * kRows;
    const int64_t n_cols = min(kCols, cols - c), n_rows = min(kRows, rows - r);
    const int64_t padded = ceil_div(n_cols, 16) * 16;
    float *tile = b.tile + slot * kTileSize, *panel = b.panel + slot * b.panel_size;
    int64_t k = 0;
    do {
      const int64_t part = min(kDepth, depth - k);
      kernels.load_block(right.data, right.dtype, k * right.strides[0] + c * right.strides[1], right.strides[0],
                         right.strides[1], part, n_cols, padded, panel, kCols);
      kernels.products(n_rows, padded, part, a + r * a_row + k * a_col, a_row, a_col, panel, kCols, tile, kCols,
                       k > 0);
      k += part;
    } while (k < depth);
    kernels.store_block(out.data, out.dtype, r * out.strides[0] + c * out.strides[1], out.strides[0], out.strides[1],
                        n_rows, n_cols, tile, kCols, nullptr);
  });
}

void backward(const fw_context &context, const Kernels &kernels, const Problem &p, const Buffers &b) {
  widen_rows(context, kernels, p.dy, b.dy, p.out);
  if (given(p.dx)) product_into(context, kernels, p.dx, p.out, b.dy, p.out, 1, p.weight, b, work_of(p));
  if (given(p.dweight)) product_into(context, kernels, p.dweight, p.M, b.dy, 1, p.out, p.x, b, work_of(p));
  if (!given(p.dbias)) return;
  parallel_work(context, ceil_div(p.out, kCols), static_cast<double>(p.M) * static_cast<double>(p.out),
                [&](int64_t slot, int64_t item) {
                  const int64_t o = item * kCols, n = min(kCols, p.out - o);
                  float *sums = b.tile + slot * kTileSize;
                  for (int64_t i = 0; i < n; ++i) sums[i] = 0;
                  for (int64_t m = 0; m < p.M; ++m) {
                    for (int64_t i = 0; i < n; ++i) sums[i] += b.dy[m * p.out + o + i];
                  }
                  kernels.store_block(p.dbias.data, p.dbias.dtype, o * p.dbias.strides[0], 0, p.dbias.strides[0], 1,
                                      n, sums, 0, nullptr);
                });
}

}  // namespace

uint64_t cpu_workspace(const fw_context &context, const Problem &p) {
  Ledger ledger(nullptr);
  lay_out(ledger, context, p);
  return ledger.bytes();
}

void cpu_run(fw_context &context, const Problem &p, int32_t level, void *workspace) {
  Ledger ledger(workspace);
  const Buffers b = lay_out(ledger, context, p);
  const Kernels &kernels = FW_LEVEL_TABLE(level, kLinearKernels);
  if (p.direction == FW_FORWARD)
    forward(context, kernels, p, b);
  else
    backward(context, kernels, p, b);
}

}  // namespace fw::linear
