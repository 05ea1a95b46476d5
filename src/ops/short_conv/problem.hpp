// SPDX-License-Identifier: Apache-2.0
// A checked call of fw_short_conv. Inside a sequence, positions count from its first row; the W-1 positions before it
// are the rows of the incoming state (initial_state, or in a step the sequence's slot of `state`).
#pragma once
#include "core/impl_list.hpp"
#include "core/row_plan.hpp"
#include "fastweight/fastweight.h"

namespace fw::short_conv {

struct Problem {
  fw_device device;
  void *stream;  // CUDA: a cudaStream_t
  fw_direction direction;
  uint32_t options;
  bool is_f64;
  bool has_silu;
  int64_t B, T, N, D, W;
  fw_tensor x, weight, bias, initial_state, cu_seqlens, y, final_state, state, state_indices;
  fw_tensor dy, d_final_state, dx, dweight, dbias, d_initial_state;
};

struct Sequence {
  int64_t n, batch, begin, end;  // rows [begin, end) of that batch entry
  int64_t slot;                  // of the incoming state; step: negative skips
  int64_t length() const { return end - begin; }
};
Sequence sequence(const Problem &p, int64_t n);
// The sequence that row `row` of that batch entry belongs to, or N when it belongs to none.
int64_t sequence_of_row(const Problem &p, int64_t batch, int64_t row);

// The tensor that the positions before the first row are read from; may be absent (zeros).
inline const fw_tensor &incoming_state(const Problem &p) {
  return p.direction == FW_STEP ? p.state : p.initial_state;
}

// Writes 0 in rows [begin, end) of a [B,T,D] output, channels [d, d + n).
void zero_rows(const fw_tensor &t, int64_t batch, int64_t begin, int64_t end, int64_t d, int64_t n);

struct ShortConv {
  using Desc = fw_short_conv;
  using Grads = fw_short_conv_grads;
  using Problem = short_conv::Problem;
  static constexpr const char *kName = "short_conv";
  static constexpr bool kHasStep = true;
  static fw_status make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data,
                                Problem *p);
  static fw_status check_more(const Problem &p);
  static const Impl<Problem> *impls(int32_t *n);
};

uint64_t reference_workspace(const fw_context &context, const Problem &p);
void reference_run(fw_context &context, const Problem &p, void *workspace);

// The kernels of cuda.cu.
struct CudaPath {
  static uint64_t workspace(const fw_context &context, const Problem &p);
  static fw_status run(fw_context &context, const Problem &p, void *memory);
};

}  // namespace fw::short_conv
