// SPDX-License-Identifier: Apache-2.0
#include "model/ops.hpp"

#include <algorithm>

#include "model/error.hpp"

namespace fw::model {

fw_tensor view(float *data, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides) {
  fw_tensor t = {};
  t.data = data;
  t.dtype = FW_F32;
  t.ndim = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  std::copy(strides.begin(), strides.end(), t.strides);
  return t;
}

fw_tensor rows_view(float *data, int64_t rows, int64_t cols, int64_t row_stride) {
  return view(data, {rows, cols}, {row_stride, 1});
}

template <class Desc>
Desc Ops::described() const {
  Desc desc = {};
  desc.struct_size = sizeof desc;
  desc.device = device_.kind;
  desc.stream = stream_;
  return desc;
}

fw_recurrence Ops::delta_desc(const DeltaCall &call) const {
  fw_recurrence d = described<fw_recurrence>();
  d.op = FW_OP_GATED_DELTA_RULE;
  d.qk_norm = FW_QK_NORM_L2;
  d.gate_input = FW_GATE_INPUT_SOFTPLUS;
  d.beta_input = FW_BETA_INPUT_SIGMOID;
  d.q = call.q;
  d.k = call.k;
  d.v = call.v;
  d.g = call.a;
  d.beta = call.b;
  d.a_log = call.a_log;
  d.dt_bias = call.dt_bias;
  d.o = call.o;
  return d;
}

fw_recurrence Ops::delta_prefill_desc(const DeltaCall &call) const {
  fw_recurrence d = delta_desc(call);
  d.initial_state = call.initial;
  d.final_state = call.final;
  return d;
}

void Ops::allocate_workspace() {
  workspace_ = Buffer(needed_, device_);
  measuring_ = false;
}

template <class Desc>
void Ops::call(const Desc &desc, fw_direction direction, SizeFn<Desc> size, RunFn<Desc> run) {
  if (measuring_) {
    uint64_t bytes = 0;
    check(size(context_, &desc, direction, &bytes));
    needed_ = std::max(needed_, bytes);
  } else {
    check(run(context_, &desc, workspace_.data(), workspace_.size()));
  }
}

void Ops::linear(const fw_tensor &x, const fw_tensor &weight, const fw_tensor &y) {
  fw_linear d = described<fw_linear>();
  d.x = x;
  d.weight = weight;
  d.y = y;
  call(d, FW_FORWARD, fw_linear_workspace_size, fw_linear_forward);
}

void Ops::rms_norm(const fw_tensor &x, const fw_tensor &weight, double eps, const fw_tensor &y) {
  fw_norm d = described<fw_norm>();
  d.kind = FW_NORM_RMS;
  d.eps = eps;
  d.x = x;
  d.weight = weight;
  d.y = y;
  call(d, FW_FORWARD, fw_norm_workspace_size, fw_norm_forward);
}

void Ops::gated_norm(const fw_tensor &x, const fw_tensor &weight, const fw_tensor &gate, double eps,
                     const fw_tensor &y) {
  fw_norm d = described<fw_norm>();
  d.kind = FW_NORM_RMS;
  d.gate_activation = FW_ACTIVATION_SILU;
  d.eps = eps;
  d.x = x;
  d.weight = weight;
  d.gate = gate;
  d.y = y;
  call(d, FW_FORWARD, fw_norm_workspace_size, fw_norm_forward);
}

void Ops::silu(const fw_tensor &x, const fw_tensor &y) {
  fw_feature_map d = described<fw_feature_map>();
  d.kind = FW_FEATURE_SILU;
  d.x = x;
  d.y = y;
  call(d, FW_FORWARD, fw_feature_map_workspace_size, fw_feature_map_forward);
}

void Ops::conv_prefill(const fw_tensor &x, const fw_tensor &weight, const fw_tensor &initial, const fw_tensor &final,
                       const fw_tensor &y) {
  fw_short_conv d = described<fw_short_conv>();
  d.activation = FW_ACTIVATION_SILU;
  d.x = x;
  d.weight = weight;
  d.initial_state = initial;
  d.final_state = final;
  d.y = y;
  call(d, FW_FORWARD, fw_short_conv_workspace_size, fw_short_conv_forward);
}

void Ops::conv_step(const fw_tensor &x, const fw_tensor &weight, const fw_tensor &state, const fw_tensor &y) {
  fw_short_conv d = described<fw_short_conv>();
  d.activation = FW_ACTIVATION_SILU;
  d.x = x;
  d.weight = weight;
  d.state = state;
  d.y = y;
  call(d, FW_STEP, fw_short_conv_workspace_size, fw_short_conv_step);
}

void Ops::delta_prefill(const DeltaCall &operands) {
  call(delta_prefill_desc(operands), FW_FORWARD, fw_recurrence_workspace_size, fw_recurrence_forward);
}

void Ops::delta_step(const DeltaCall &operands) {
  fw_recurrence d = delta_desc(operands);
  d.state = operands.state;
  call(d, FW_STEP, fw_recurrence_workspace_size, fw_recurrence_step);
}

int64_t Ops::delta_chunk_length(const DeltaCall &operands) {
  const fw_recurrence d = delta_prefill_desc(operands);
  int64_t tokens = 0;
  check(fw_recurrence_chunk_length(context_, &d, &tokens));
  return tokens;
}

void Ops::attention(const fw_tensor &q, const fw_tensor &k, const fw_tensor &v, const fw_tensor &k_cache,
                    const fw_tensor &v_cache, int64_t *length, int64_t window, double rope_theta,
                    const fw_tensor &o) {
  const int64_t one = 1;
  fw_attention d = described<fw_attention>();
  d.window = window;
  d.rope_theta = rope_theta;
  d.q = q;
  d.k = k;
  d.v = v;
  d.o = o;
  d.k_cache = k_cache;
  d.v_cache = v_cache;
  d.cache_lengths = fw_dense(length, FW_I64, 1, &one);
  call(d, FW_STEP, fw_attention_workspace_size, fw_attention_step);
}


void Ops::embed(const fw_tensor &table, const Input *input, const fw_tensor &x) {
  if (measuring_) return;
  device_.embed({table.data, table.dtype == FW_BF16, x.shape[1], input, static_cast<float *>(x.data)}, x.shape[0],
                x.shape[1], stream_);
}

void Ops::add(const fw_tensor &x, const fw_tensor &y) {
  if (measuring_) return;
  device_.add({static_cast<float *>(x.data), static_cast<const float *>(y.data), x.shape[1]}, x.shape[0], x.shape[1],
              stream_);
}

void Ops::multiply(const fw_tensor &x, const fw_tensor &times) {
  if (measuring_) return;
  device_.multiply({static_cast<float *>(x.data), static_cast<const float *>(times.data), x.shape[1], times.strides[0]},
                   x.shape[0], x.shape[1], stream_);
}

}  // namespace fw::model
