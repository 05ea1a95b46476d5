// SPDX-License-Identifier: Apache-2.0
// Causal depthwise convolution. Plan: channels are the lanes. A tile of rows of one panel of channels, with the W-1
// rows before it, is brought to fp32 scratch [rows, kPanel]; taps go oldest first, bias before them, four rows at a
// time so that a tap is loaded once for four. Every output's sum has that one order, wherever a block, sequence or
// call begins. Backward takes z again, dz = dy act'(z), dx = the same convolution of dz with reversed taps, dweight
// and dbias 64 rows at a time (tile_rows when W > 65) into the caller's sums. Scratch: kernels.hpp, (3 tile_rows + 9
// W) * 256 bytes at most.
#include "cpu/activation.hpp"
#include "cpu/rows.hpp"
#include "ops/short_conv/kernels.hpp"

namespace fw::FW_LEVEL {
namespace {

using short_conv::kPanel;
using short_conv::Panel;
using short_conv::Problem;
using short_conv::Scratch;
using short_conv::Sequence;

int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

// rows [row, row + n) of one batch entry of a [B,T,D] tensor; along the rows when those are closer together than
// channels
void load_tile(const fw_tensor &t, int64_t batch, int64_t row, int64_t n, Panel panel, float *line, float *to) {
  const int64_t at = batch * t.strides[0] + row * t.strides[1] + panel.begin * t.strides[2],
                padded = pad_lanes(panel.n);
  if (panel.n > 1 && n > 1 && magnitude(t.strides[1]) < magnitude(t.strides[2])) {
    for (int64_t d = 0; d < panel.n; ++d) {
      load_row(t.data, t.dtype, at + d * t.strides[2], t.strides[1], n, n, line);
      for (int64_t r = 0; r < n; ++r) to[r * kPanel + d] = line[r];
    }
    for (int64_t r = 0; r < n; ++r) {
      for (int64_t d = panel.n; d < padded; ++d) to[r * kPanel + d] = 0.0f;
    }
  } else {
    for (int64_t r = 0; r < n; ++r) {
      load_row(t.data, t.dtype, at + r * t.strides[1], t.strides[2], panel.n, padded, to + r * kPanel);
    }
  }
}

void store_tile(const fw_tensor &t, int64_t batch, int64_t row, int64_t n, Panel panel, float *line,
                const float *from) {
  const int64_t at = batch * t.strides[0] + row * t.strides[1] + panel.begin * t.strides[2];
  if (panel.n > 1 && n > 1 && magnitude(t.strides[1]) < magnitude(t.strides[2])) {
    for (int64_t d = 0; d < panel.n; ++d) {
      for (int64_t r = 0; r < n; ++r) line[r] = from[r * kPanel + d];
      store_row(t.data, t.dtype, at + d * t.strides[2], t.strides[1], n, line);
    }
  } else {
    for (int64_t r = 0; r < n; ++r) {
      store_row(t.data, t.dtype, at + r * t.strides[1], t.strides[2], panel.n, from + r * kPanel);
    }
  }
}

void zero_panel_rows(float *to, int64_t n) { memset(to, 0, static_cast<size_t>(n) * kPanel * 4); }

#if defined(__AVX2__)
// Columns of fp32 rows whose columns are adjacent, four rows at a time through registers: 3 or 4 columns, the taps of a
// weight and the rows of a window. A step of 8192 channels takes 71 us so, 136 with loads of one float and the window
// brought twice (Zen 3, one thread).
struct Four {
  __m128 rows[4];
};
inline Four transpose(Four x) {
  _MM_TRANSPOSE4_PS(x.rows[0], x.rows[1], x.rows[2], x.rows[3]);
  return x;
}
#endif

// Columns [0, columns) of rows [0, n) at `offset` to to[column * kPanel + row], zeros up to `padded`.
void load_columns(const fw_tensor &t, int64_t offset, int64_t row_stride, int64_t column_stride, int64_t columns,
                  int64_t n, int64_t padded, float *to) {
  int64_t done = 0;
#if defined(__AVX2__)
  if (t.dtype == FW_F32 && column_stride == 1 && (columns == 3 || columns == 4)) {
    const float *from = static_cast<const float *>(t.data) + offset;
    // a row of 3 is read with the float behind it: rows that have another one behind them in this panel
    const int64_t stop = columns == 4 ? n : row_stride >= 3 ? n - 1 : 0;
    for (; done + 4 <= stop; done += 4) {
      Four x;
      for (int i = 0; i < 4; ++i) x.rows[i] = _mm_loadu_ps(from + (done + i) * row_stride);
      x = transpose(x);
      for (int64_t c = 0; c < columns; ++c) _mm_storeu_ps(to + c * kPanel + done, x.rows[c]);
    }
  }
#endif
  for (int64_t c = 0; c < columns; ++c) {
    load_row(t.data, t.dtype, offset + done * row_stride + c * column_stride, row_stride, n - done, padded - done,
             to + c * kPanel + done);
  }
}

// The other way round.
void store_columns(const fw_tensor &t, int64_t offset, int64_t row_stride, int64_t column_stride, int64_t columns,
                   int64_t n, const float *from) {
  int64_t done = 0;
#if defined(__AVX2__)
  if (t.dtype == FW_F32 && column_stride == 1 && columns == 3) {
    float *to = static_cast<float *>(t.data) + offset;
    for (; done + 4 <= n; done += 4) {
      Four x = {};
      for (int c = 0; c < 3; ++c) x.rows[c] = _mm_loadu_ps(from + c * kPanel + done);
      x = transpose(x);
      for (int i = 0; i < 4; ++i) {
        float *row = to + (done + i) * row_stride;
        _mm_storel_pi(reinterpret_cast<__m64 *>(row), x.rows[i]);
        _mm_store_ss(row + 2, _mm_movehl_ps(x.rows[i], x.rows[i]));
      }
    }
  }
#endif
  for (int64_t c = 0; c < columns; ++c) {
    store_row(t.data, t.dtype, offset + done * row_stride + c * column_stride, row_stride, n - done,
              from + c * kPanel + done);
  }
}

// Inputs at positions [from, to), from >= -(W-1).
void load_window(const Problem &p, const Sequence &s, Panel panel, int64_t from, int64_t to, float *line,
                 float *rows) {
  const fw_tensor &state = p.direction == FW_STEP ? p.state : p.initial_state;
  int64_t position = from;
  if (from < 0) {
    const int64_t before = to < 0 ? to - from : -from;
    const int64_t at =
        s.slot * state.strides[0] + panel.begin * state.strides[1] + (p.W - 1 + from) * state.strides[2];
    if (state.dtype == FW_NONE) zero_panel_rows(rows, before);
    else load_columns(state, at, state.strides[1], state.strides[2], before, panel.n, pad_lanes(panel.n), rows);
    position += before;
    rows += before * kPanel;
  }
  if (position < to) load_tile(p.x, s.batch, s.begin + position, to - position, panel, line, rows);
}

// out[r] = bias + sum over taps of weight[tap] * in[r + tap] for kRows rows; out may be in.
template <int kRows>
void convolve(const float *in, const float *weight, const float *bias, int64_t taps, int64_t padded, float *out) {
  for (int64_t d = 0; d < padded; d += kLanes) {
    Vec sum[kRows];
    for (int r = 0; r < kRows; ++r) sum[r] = bias ? load(bias + d) : Vec{};
    for (int64_t tap = 0; tap < taps; ++tap) {
      const Vec w = load(weight + tap * kPanel + d);
      for (int r = 0; r < kRows; ++r) sum[r] = fma(w, load(in + (r + tap) * kPanel + d), sum[r]);
    }
    for (int r = 0; r < kRows; ++r) store(out + r * kPanel + d, sum[r]);
  }
}
// The same for 1 to 4 rows.
void convolve_some(int64_t n, const float *in, const float *weight, const float *bias, int64_t taps, int64_t padded,
                   float *out) {
  if (n >= 4) return convolve<4>(in, weight, bias, taps, padded, out);
  for (int64_t r = 0; r < n; ++r) convolve<1>(in + r * kPanel, weight, bias, taps, padded, out + r * kPanel);
}

void load_weights(const Problem &p, Panel panel, const Scratch &scratch) {
  const fw_tensor &w = p.weight;
  const int64_t padded = pad_lanes(panel.n);
  load_columns(w, panel.begin * w.strides[0], w.strides[0], w.strides[1], p.W, panel.n, padded, scratch.weight);
  for (int64_t tap = 0; tap < p.W; ++tap) {
    if (scratch.reversed) {
      memcpy(scratch.reversed + (p.W - 1 - tap) * kPanel, scratch.weight + tap * kPanel,
             static_cast<size_t>(padded) * 4);
    }
  }
  if (p.bias.dtype == FW_NONE) {
    zero_panel_rows(scratch.bias, 1);
  } else {
    load_row(p.bias.data, p.bias.dtype, panel.begin * p.bias.strides[0], p.bias.strides[0], panel.n, padded,
             scratch.bias);
  }
}

void forward(const Problem &p, const Sequence &s, Panel panel, int64_t from, int64_t to, const Scratch &scratch) {
  const int64_t past = p.W - 1, tile = past > 64 ? past : 64, padded = pad_lanes(panel.n);
  for (int64_t begin = from; begin < to; begin += tile) {
    const int64_t n = to - begin < tile ? to - begin : tile;
    load_window(p, s, panel, begin - past, begin + n, scratch.line, scratch.x);
    for (int64_t r = 0; r < n; r += 4) {
      const int64_t some = n - r < 4 ? n - r : 4;
      float *rows = scratch.x + r * kPanel;
      convolve_some(some, rows, scratch.weight, scratch.bias, p.W, padded, rows);
      for (int64_t i = 0; p.has_silu && i < some; ++i) {
        for (int64_t d = 0; d < padded; d += kLanes) store(rows + i * kPanel + d, silu(load(rows + i * kPanel + d)));
      }
    }
    store_tile(p.y, s.batch, s.begin + begin, n, panel, scratch.line, scratch.x);
  }
}

// W-1 rows of scratch into slot `slot` of `state`.
void store_window(const Problem &p, Panel panel, const fw_tensor &state, int64_t slot, const float *rows) {
  store_columns(state, slot * state.strides[0] + panel.begin * state.strides[1], state.strides[1], state.strides[2],
                p.W - 1, panel.n, rows);
}

void write_state(const Problem &p, const Sequence &s, Panel panel, const fw_tensor &state, int64_t slot,
                 const Scratch &scratch) {
  const int64_t past = p.W - 1, length = s.end - s.begin;
  load_window(p, s, panel, length - past, length, scratch.line, scratch.x);
  store_window(p, panel, state, slot, scratch.x);
}

// forward and write_state of one position, the window brought once: the output goes over the row that it loses.
void step_row(const Problem &p, const Sequence &s, Panel panel, const Scratch &scratch) {
  forward(p, s, panel, 0, 1, scratch);
  store_window(p, panel, p.state, s.slot, scratch.x + kPanel);
}

// dz at positions [from, to) of the sequence, all inside it, over dy in `dz`; x holds positions [from - (W-1), to).
void activation_gradient(const Problem &p, int64_t n, int64_t padded, const Scratch &scratch, float *dz) {
  for (int64_t r = 0; p.has_silu && r < n; r += 4) {
    const int64_t some = n - r < 4 ? n - r : 4;
    convolve_some(some, scratch.x + r * kPanel, scratch.weight, scratch.bias, p.W, padded, scratch.z);
    for (int64_t i = 0; i < some; ++i) {
      float *row = dz + (r + i) * kPanel;
      for (int64_t d = 0; d < padded; d += kLanes)
        store(row + d, load(row + d) * silu_slope(load(scratch.z + i * kPanel + d)));
    }
  }
}

// sums[tap] += sum over n rows of dz[r] x[r + tap]; sums[W] += sum of dz
void add_sums(int64_t taps, int64_t n, int64_t padded, const float *x, const float *dz, float *sums, int64_t pitch) {
  for (int64_t d = 0; d < padded; d += kLanes) {
    int64_t tap = 0;
    for (; tap + 4 <= taps; tap += 4) {
      Vec sum[4] = {};
      for (int64_t r = 0; r < n; ++r) {
        const Vec g = load(dz + r * kPanel + d);
        for (int i = 0; i < 4; ++i) sum[i] = fma(g, load(x + (r + tap + i) * kPanel + d), sum[i]);
      }
      for (int i = 0; i < 4; ++i) store(sums + (tap + i) * pitch + d, load(sums + (tap + i) * pitch + d) + sum[i]);
    }
    for (; tap < taps; ++tap) {
      Vec sum = {};
      for (int64_t r = 0; r < n; ++r) sum = fma(load(dz + r * kPanel + d), load(x + (r + tap) * kPanel + d), sum);
      store(sums + tap * pitch + d, load(sums + tap * pitch + d) + sum);
    }
    Vec sum = {};
    for (int64_t r = 0; r < n; ++r) sum += load(dz + r * kPanel + d);
    store(sums + taps * pitch + d, load(sums + taps * pitch + d) + sum);
  }
}

// rows[i] += d_final_state at position from + i, where the state holds that position
void add_d_final_state(const Problem &p, const Sequence &s, Panel panel, int64_t from, int64_t to, float *rows,
                       float *line) {
  const fw_tensor &t = p.d_final_state;
  const int64_t first = s.end - s.begin - (p.W - 1), padded = pad_lanes(panel.n);
  for (int64_t position = from > first ? from : first; position < to; ++position) {
    const int64_t at = s.n * t.strides[0] + panel.begin * t.strides[1] + (position - first) * t.strides[2];
    load_row(t.data, t.dtype, at, t.strides[1], panel.n, padded, line);
    float *row = rows + (position - from) * kPanel;
    for (int64_t d = 0; d < padded; d += kLanes) store(row + d, load(row + d) + load(line + d));
  }
}

void backward_tile(const Problem &p, const Sequence &s, Panel panel, int64_t from, int64_t to, float *sums,
                   int64_t pitch, const Scratch &scratch) {
  const int64_t past = p.W - 1, length = s.end - s.begin, padded = pad_lanes(panel.n);
  // dz row i is position from + i; those outside the sequence are 0
  const int64_t dz_from = from > 0 ? from : 0, dz_to = to + past < length ? to + past : length,
                rows = to - from + past;
  zero_panel_rows(scratch.dz, rows);
  if (p.dy.dtype != FW_NONE && dz_from < dz_to) {
    float *dz = scratch.dz + (dz_from - from) * kPanel;
    const int64_t n = dz_to - dz_from, n_own = (to < length ? to : length) - dz_from;
    load_tile(p.dy, s.batch, s.begin + dz_from, n, panel, scratch.line, dz);
    if (p.has_silu || sums) load_window(p, s, panel, dz_from - past, dz_to, scratch.line, scratch.x);
    activation_gradient(p, n, padded, scratch, dz);
    if (sums && n_own > 0) add_sums(p.W, n_own, padded, scratch.x, dz, sums, pitch);
  }
  const bool is_wanted = (from < 0 ? p.d_initial_state.dtype : p.dx.dtype) != FW_NONE;
  if (!is_wanted) return;
  for (int64_t r = 0; r < to - from; r += 4) {
    float *row = scratch.dz + r * kPanel;
    convolve_some(to - from - r < 4 ? to - from - r : 4, row, scratch.reversed, nullptr, p.W, padded, row);
  }
  if (p.d_final_state.dtype != FW_NONE) add_d_final_state(p, s, panel, from, to, scratch.dz, scratch.z);
  if (from >= 0) return store_tile(p.dx, s.batch, s.begin + from, to - from, panel, scratch.line, scratch.dz);
  const fw_tensor &t = p.d_initial_state;
  for (int64_t i = from; i < to; ++i) {
    const int64_t at = s.n * t.strides[0] + panel.begin * t.strides[1] + (i + past) * t.strides[2];
    store_row(t.data, t.dtype, at, t.strides[1], panel.n, scratch.dz + (i - from) * kPanel);
  }
}

void backward(const Problem &p, const Sequence &s, Panel panel, int64_t from, int64_t to, float *sums, int64_t pitch,
              const Scratch &scratch) {
  const int64_t tile = p.W - 1 > 64 ? p.W - 1 : 64;
  for (int64_t begin = from; begin < to; begin += tile) {
    backward_tile(p, s, panel, begin, to - begin < tile ? to : begin + tile, sums, pitch, scratch);
  }
}

void sum_blocks(const float *partials, int64_t block_pitch, int64_t n_blocks, const fw_tensor &t, int64_t offset,
                int64_t stride, int64_t n, float *scratch) {
  for (int64_t i = 0; i < n; ++i) scratch[i] = 0.0f;
  for (int64_t block = 0; block < n_blocks; ++block) {
    for (int64_t i = 0; i < n; ++i) scratch[i] += partials[block * block_pitch + i];
  }
  store_row(t.data, t.dtype, offset, stride, n, scratch);
}

}  // namespace

extern const short_conv::Kernels kShortConv;
const short_conv::Kernels kShortConv = {load_weights, forward, write_state, step_row, backward, sum_blocks};

}  // namespace fw::FW_LEVEL
