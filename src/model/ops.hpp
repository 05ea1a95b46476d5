// SPDX-License-Identifier: Apache-2.0
// The calls of the C interface that a network is made of and the loops between them, over fp32 views, on one device and
// stream, with one workspace for all of them. While `measuring`, a call only asks for its workspace and touches no data:
// walking the network once that way sizes it.
#pragma once
#include <initializer_list>

#include "fastweight/fastweight.h"
#include "model/buffer.hpp"

namespace fw::model {

fw_tensor view(float *data, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides);
fw_tensor rows_view(float *data, int64_t rows, int64_t cols, int64_t row_stride);

// Operands of a gated delta rule, T tokens of one sequence; see Session::mix_delta for the views.
struct DeltaCall {
  fw_tensor q, k, v, a, b;  // a: gate logits, b: beta logits
  fw_tensor a_log, dt_bias;
  fw_tensor initial, final;  // prefill
  fw_tensor state;           // step, in place
  fw_tensor o;
};

class Ops {
 public:
  // stream: of the device, outlives this.
  Ops(fw_context *context, const Device &device, void *stream) : context_(context), device_(device), stream_(stream) {}

  void start_measuring() { measuring_ = true; }
  void allocate_workspace();  // ends measuring
  uint64_t workspace_bytes() const { return needed_; }

  void linear(const fw_tensor &x, const fw_tensor &weight, const fw_tensor &y);
  void rms_norm(const fw_tensor &x, const fw_tensor &weight, double eps, const fw_tensor &y);
  void gated_norm(const fw_tensor &x, const fw_tensor &weight, const fw_tensor &gate, double eps, const fw_tensor &y);
  void silu(const fw_tensor &x, const fw_tensor &y);
  // y = silu(conv(x)); state tensors [1, D, W-1] or absent for W = 1.
  void conv_prefill(const fw_tensor &x, const fw_tensor &weight, const fw_tensor &initial, const fw_tensor &final,
                    const fw_tensor &y);
  void conv_step(const fw_tensor &x, const fw_tensor &weight, const fw_tensor &state, const fw_tensor &y);
  void delta_prefill(const DeltaCall &call);
  void delta_step(const DeltaCall &call);
  // length: tokens of the document in the caches, on the device; window 0 is as far as the caches reach.
  void attention(const fw_tensor &q, const fw_tensor &k, const fw_tensor &v, const fw_tensor &k_cache,
                 const fw_tensor &v_cache, int64_t *length, int64_t window, double rope_theta, const fw_tensor &o);

  // The loops of glue.hpp; tensors [rows, columns], all but `times` dense.
  void embed(const fw_tensor &table, const Input *input, const fw_tensor &x);
  void add(const fw_tensor &x, const fw_tensor &y);
  void multiply(const fw_tensor &x, const fw_tensor &times);

  // Tokens in a chunk of the recurrence that `call` would run.
  int64_t delta_chunk_length(const DeltaCall &call);

 private:
  template <class Desc>
  using SizeFn = fw_status (*)(const fw_context *, const Desc *, fw_direction, uint64_t *);
  template <class Desc>
  using RunFn = fw_status (*)(fw_context *, const Desc *, void *, uint64_t);
  template <class Desc>
  Desc described() const;
  fw_recurrence delta_desc(const DeltaCall &call) const;
  fw_recurrence delta_prefill_desc(const DeltaCall &call) const;
  template <class Desc>
  void call(const Desc &desc, fw_direction direction, SizeFn<Desc> size, RunFn<Desc> run);

  fw_context *context_;
  const Device &device_;
  void *stream_;
  Buffer workspace_;
  uint64_t needed_ = 0;
  bool measuring_ = false;
};

}  // namespace fw::model
