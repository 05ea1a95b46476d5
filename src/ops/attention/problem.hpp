// SPDX-License-Identifier: Apache-2.0
// A checked call of causal softmax attention: what all implementations read and none checks again.
#pragma once
#include <stdint.h>

#include "core/context.hpp"
#include "core/impl_list.hpp"
#include "core/operands.hpp"
#include "core/tensor.hpp"
#include "fastweight/neighbours.h"

namespace fw::attention {

constexpr int64_t kMaxPosition = int64_t{1} << 52;  // exact in fp64, and positions + rows stay far from overflow

struct Problem {
  fw_direction direction;
  fw_device device;
  void *stream;  // CUDA: a cudaStream_t
  bool is_f64;  // all operands fp64: reference only
  int64_t B, T, N, HQ, HK, D, DV;
  int64_t reach;        // a row sees its own position and the reach - 1 before it
  int64_t capacity;     // step: slots of a sequence's ring
  double scale, theta;  // theta 0: no RoPE
  fw_tensor q, k, v, cu_seqlens, start_positions, o;
  fw_tensor k_cache, v_cache, cache_lengths, cache_indices;  // step
  fw_tensor d_o, dq, dk, dv;                                 // backward; dq, dk, dv may be absent

  FW_HOST_DEVICE int64_t group() const { return HQ / HK; }
  FW_HOST_DEVICE int64_t rows() const { return B * T; }
};

// One sequence of the call.
struct Sequence {
  int64_t batch, begin, length;  // rows [begin, begin + length) of that batch entry
  int64_t first;                 // position of its first row
  int64_t oldest;                // lowest position that exists
  int64_t slot;                  // step: its ring in the caches; -1 skips the sequence
};
Sequence sequence(const Problem &p, int64_t n);
// With cu_seqlens, rows [first_row_of_none, T) belong to no sequence; otherwise T.
int64_t first_row_of_none(const Problem &p);

// Element offset of row t of a batch entry, head h.
FW_HOST_DEVICE inline int64_t row_offset(const fw_tensor &tensor, int64_t batch, int64_t t, int64_t h) {
  return batch * tensor.strides[0] + t * tensor.strides[1] + h * tensor.strides[2];
}

// The operation for core/verbs.hpp.
struct Op {
  using Desc = fw_attention;
  using Grads = fw_attention_grads;
  using Problem = attention::Problem;
  static constexpr const char *kName = "attention";
  static constexpr bool kHasStep = true;
  static fw_status make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data,
                                Problem *problem);
  static fw_status check_more(const Problem &p) { return check_present(kName, "o", p.o, p.direction); }
  static const Impl<Problem> *impls(int32_t *n);
};

// fp64, one row after the other.
uint64_t reference_workspace(const fw_context &context, const Problem &p);
void reference_run(fw_context &context, const Problem &p, void *workspace);

// The vector path.
uint64_t cpu_workspace(const fw_context &context, const Problem &p);
void cpu_run(fw_context &context, const Problem &p, int32_t level, void *workspace);

// The kernels of cuda.cu.
struct CudaPath {
  static uint64_t workspace(const fw_context &context, const Problem &p);
  static fw_status run(fw_context &context, const Problem &p, void *memory);
};

}  // namespace fw::attention
