// SPDX-License-Identifier: Apache-2.0
// A head's state between the caller's memory and the padded fp32 scratch [K][W]. *.isa.cpp files only.
#pragma once
#include "ops/recurrence/cpu_chunk.hpp"

namespace fw::FW_LEVEL {

// state[k][d] = tensor[n, hv, k, panel.first + d]; zeros in the padding, and everywhere when the tensor is absent.
FW_NOINLINE inline void load_state(const Problem &p, const fw_tensor &t, int64_t n, int64_t hv, const Panel &panel,
                                   float *state) {
  const int64_t W = panel.width();
  if (!given(t)) {
    memset(state, 0, static_cast<size_t>(p.K * W) * 4);
    return;
  }
  const int64_t v_stride = t.strides[p.state_layout == FW_STATE_VK ? 2 : 3];
  for (int64_t k = 0; k < p.K; ++k) {
    const int64_t offset = recurrence::state_offset(t, p.state_layout, n, hv, k, panel.first);
    load_row(t.data, t.dtype, offset, v_stride, panel.count, W, state + k * W);
  }
}

FW_NOINLINE inline void store_state(const Problem &p, const fw_tensor &t, int64_t n, int64_t hv, const Panel &panel,
                                    const float *state) {
  if (!given(t)) return;
  const int64_t W = panel.width(), v_stride = t.strides[p.state_layout == FW_STATE_VK ? 2 : 3];
  for (int64_t k = 0; k < p.K; ++k) {
    const int64_t offset = recurrence::state_offset(t, p.state_layout, n, hv, k, panel.first);
    store_row(t.data, t.dtype, offset, v_stride, panel.count, state + k * W);
  }
}

// The normaliser's column: z [.., H, K], the same for every value head of a group.
FW_NOINLINE inline void load_sum(const Problem &p, const fw_tensor &z, int64_t n, int64_t hv, const Panel &panel,
                                 float *state) {
  if (!panel.has_sum || !given(z)) return;
  const int64_t W = panel.width(), offset = n * z.strides[0] + hv / p.group() * z.strides[1];
  for (int64_t k = 0; k < p.K; ++k) state[k * W + panel.count] = load_f32(z.data, z.dtype, offset + k * z.strides[2]);
}

FW_NOINLINE inline void store_sum(const Problem &p, const fw_tensor &z, int64_t n, int64_t hv, const Panel &panel,
                                  const float *state) {
  if (!panel.has_sum || !given(z) || hv % p.group() != 0 || panel.first != 0) return;
  const int64_t W = panel.width(), offset = n * z.strides[0] + hv / p.group() * z.strides[1];
  for (int64_t k = 0; k < p.K; ++k) store_f32(z.data, z.dtype, offset + k * z.strides[2], state[k * W + panel.count]);
}

// Scales a row of sums, divides by the normaliser when there is one, and stores it as o[token].
FW_NOINLINE inline void store_output(const Problem &p, int64_t batch, int64_t token, int64_t hv, const Panel &panel,
                                     float *row) {
  scale_row(row, p.scale_f32, panel.width(), row);
  if (panel.has_sum) {
    const float divisor = row[panel.count] + 1e-10f;
    for (int64_t d = 0; d < panel.count; ++d) row[d] /= divisor;
  }
  store_row(p.o.data, p.o.dtype, head_offset(p.o, batch, token, hv) + panel.first * p.o.strides[3], p.o.strides[3],
            panel.count, row);
}

// Rows of a [B,T,...] tensor that belong to no sequence become 0. last: the head size, or 0 for a [B,T,HV] tensor.
FW_NOINLINE inline void clear_tail(const Problem &p, const fw_tensor &t, int64_t rows_a_token, int64_t heads,
                                   int64_t last) {
  if (!given(t) || !given(p.cu_seqlens)) return;
  const int64_t begin = load_int(p.cu_seqlens, p.N) * rows_a_token, end = p.T * rows_a_token;
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t d = 0; d < (last > 0 ? last : 1); ++d) {
        store_f32(t.data, t.dtype, head_offset(t, 0, row, head) + (last > 0 ? d * t.strides[3] : 0), 0.0f);
      }
    }
  }
}

}  // namespace fw::FW_LEVEL
