// SPDX-License-Identifier: Apache-2.0
// Every sentence with which the recurrence refuses a call: operation, argument, value found, value allowed. The
// status is checked too, and that nothing was written.
#include <string.h>

#include <functional>

#include "harness_pieces.hpp"

namespace fw::test {
namespace {

struct Refusal {
  const char *what;  // the sentence
  fw_direction direction;
  Spec spec;
  std::function<void(Call &)> breaks;
  fw_status status = FW_INVALID_ARGUMENT;
};

Spec kda() { return spec_of(FW_OP_KDA); }  // B=2 T=7 H=2 HV=4 K=5 V=3
Spec packed() {
  Spec s = kda();
  s.B = 1, s.pack = 2, s.offsets = {0, 3, 7};
  return s;
}
Spec normalised() {
  Spec s = spec_of(FW_OP_LINEAR_ATTN);
  s.normalizer = FW_NORMALIZER_SUM;
  return s;
}
Spec with_logits() {
  Spec s = kda();
  s.gate_input = FW_GATE_INPUT_SOFTPLUS, s.parameters = 1;
  return s;
}

// Of an element of cu_seqlens or state_indices.
bool reads_values(const Refusal &r) { return strstr(r.what, "cu_seqlens[") || strstr(r.what, "state_indices["); }

void expect_refusals(const std::vector<Refusal> &all) {
  const Context context("");
  for (const Refusal &r : all) {
    const std::vector<int64_t> indices = r.direction == FW_STEP ? std::vector<int64_t>{0, 3} : std::vector<int64_t>{};
    Call call(r.spec, rounded_operands(r.spec, r.direction == FW_STEP), r.direction, indices);
    r.breaks(call);
    std::vector<unsigned char> workspace(1 << 20);
    fw_status status = FW_OK;
    if (reads_values(r) && is_on_cuda()) {  // the host does not read them in a call, only in a check
      EXPECT_EQ(call.check_values(context), r.status) << r.what;
      EXPECT_STREQ(fw_last_error(), r.what);
      continue;
    }
    if (r.direction == FW_FORWARD)
      status = fw_recurrence_forward(context.get(), &call.desc, workspace.data(), workspace.size());
    if (r.direction == FW_BACKWARD) {
      status = fw_recurrence_backward(context.get(), &call.desc, &call.grads, workspace.data(), workspace.size());
    }
    if (r.direction == FW_STEP)
      status = fw_recurrence_step(context.get(), &call.desc, workspace.data(), workspace.size());
    EXPECT_EQ(status, r.status) << r.what;
    EXPECT_STREQ(fw_last_error(), r.what);
    for (const auto &[name, buffer] : call.outputs)
      EXPECT_TRUE(buffer->is_unchanged()) << name << " was written: " << r.what;
  }
}

TEST(Refusals, Settings) {
  expect_refusals({
      {"recurrence: desc.struct_size is 4, expected 2136 (allowed 8 to 16384)", FW_FORWARD, kda(),
       [](Call &c) { c.desc.struct_size = 4; }},
      {"recurrence: desc.struct_size is 1609, expected 2136 (allowed multiples of 8)", FW_FORWARD, kda(),
       [](Call &c) { c.desc.struct_size = offsetof(fw_recurrence, o.strides[2]) + 1; }},
      {"recurrence: op is 15, allowed 0 to 14", FW_FORWARD, kda(), [](Call &c) { c.desc.op = 15; }},
      {"recurrence: op is -1, allowed 0 to 14", FW_FORWARD, kda(), [](Call &c) { c.desc.op = -1; }},
      {"recurrence: gate is 3, allowed 0 to 2", FW_FORWARD, kda(),
       [](Call &c) { c.desc.op = FW_OP_BY_AXES, c.desc.gate = 3; }},
      {"recurrence: erase is -2, allowed 0 to 3", FW_FORWARD, kda(),
       [](Call &c) { c.desc.op = FW_OP_BY_AXES, c.desc.erase = -2; }},
      {"kda: gate and erase are 2 and 0, allowed 0 and 0 unless op is FW_OP_BY_AXES", FW_FORWARD, kda(),
       [](Call &c) { c.desc.gate = 2; }},
      {"kda: form is 4, allowed 0 to 3", FW_FORWARD, kda(), [](Call &c) { c.desc.form = 4; }},
      {"kda: device is 7, allowed 0 to 1", FW_FORWARD, kda(), [](Call &c) { c.desc.device = 7; }},
      {"kda: state_layout is 2, allowed 0 to 1", FW_FORWARD, kda(),
       [](Call &c) { c.desc.state_layout = FW_STATE_OPAQUE; }},
      {"kda: normalizer is 2, allowed 0 to 1", FW_FORWARD, kda(), [](Call &c) { c.desc.normalizer = 2; }},
      {"kda: normalizer is SUM, allowed for linear_attn only", FW_FORWARD, kda(),
       [](Call &c) { c.desc.normalizer = 1; }},
      {"kda: qk_norm is 5, allowed 0 to 1", FW_FORWARD, kda(), [](Call &c) { c.desc.qk_norm = 5; }},
      {"kda: gate_input is 5, allowed 0 to 4", FW_FORWARD, kda(), [](Call &c) { c.desc.gate_input = 5; }},
      {"kda: beta_input is 3, allowed 0 to 2", FW_FORWARD, kda(), [](Call &c) { c.desc.beta_input = 3; }},
      {"kda: options is 8, allowed 0 to 7", FW_FORWARD, kda(), [](Call &c) { c.desc.options = 8; }},
      {"kda: n_sub is 2, allowed 1 to 1", FW_FORWARD, kda(), [](Call &c) { c.desc.n_sub = 2; }},
      {"gated_delta_product: n_sub is 65, allowed 1 to 64", FW_FORWARD, spec_of(FW_OP_GATED_DELTA_PRODUCT),
       [](Call &c) { c.desc.n_sub = 65; }},
      {"kda: scale is inf, allowed finite numbers", FW_FORWARD, kda(), [](Call &c) { c.desc.scale = INFINITY; }},
      {"kda: gate_normalizer is nan, allowed finite numbers", FW_FORWARD, kda(),
       [](Call &c) { c.desc.gate_normalizer = fabs(NAN); }},
      {"kda: gate_lower_bound is 1, allowed finite numbers below 0, or 0 for the default", FW_FORWARD, kda(),
       [](Call &c) { c.desc.gate_lower_bound = 1; }},
      {"kda: g_min is 0.5, allowed finite numbers below 0, or 0 for none", FW_FORWARD, kda(),
       [](Call &c) { c.desc.g_min = 0.5; }},
      {"lightning: layer_idx is 3 of num_layers 3, allowed 0 to num_layers - 1", FW_FORWARD, spec_of(FW_OP_LIGHTNING),
       [](Call &c) { c.desc.layer_idx = 3; }},
      {"kda: layer_idx and num_layers are 0 and 2, allowed for lightning only", FW_FORWARD, kda(),
       [](Call &c) { c.desc.num_layers = 2; }},
  });
}

TEST(Refusals, SizesAndOperands) {
  expect_refusals({
      {"kda: q is missing", FW_FORWARD, kda(), [](Call &c) { c.desc.q = fw_tensor{}; }},
      {"kda: v has 3 dimensions, expected 4", FW_FORWARD, kda(), [](Call &c) { c.desc.v.ndim = 3; }},
      {"kda: q has shape [2,-1,2,5], sizes must not be negative", FW_FORWARD, kda(),
       [](Call &c) { c.desc.q.shape[1] = -1; }},
      {"kda: K (last size of q) is 513, allowed 1 to 512", FW_FORWARD, kda(),
       [](Call &c) { c.desc.q.shape[3] = 513; }},
      {"kda: V (last size of v) is 0, allowed 1 to 512", FW_FORWARD, kda(), [](Call &c) { c.desc.v.shape[3] = 0; }},
      {"kda: v has 3 heads and q has 2, the first must be a multiple of the second", FW_FORWARD, kda(),
       [](Call &c) { c.desc.v.shape[2] = 3; }},
      {"gated_delta_product: T * n_sub does not fit in 64 bits", FW_FORWARD, spec_of(FW_OP_GATED_DELTA_PRODUCT),
       [](Call &c) { c.desc.q.shape[1] = INT64_MAX / 2; }},
      {"kda: q has shape [2,288230376151711744,2,5], more than 2^58 elements", FW_FORWARD, kda(),
       [](Call &c) { c.desc.q.shape[1] = int64_t{1} << 58; }},
      {"kda: 1152921504606846976 sequences of 4 heads and 0 rows, more than 2^58 elements", FW_FORWARD, kda(),
       [](Call &c) {
         for (fw_tensor *t : {&c.desc.q, &c.desc.k, &c.desc.v, &c.desc.g, &c.desc.beta}) {
           t->shape[0] = int64_t{1} << 60, t->shape[1] = 0;
         }
       }},
      {"kda: k has a data pointer that is not a multiple of 4 bytes", FW_FORWARD, kda(),
       [](Call &c) { c.desc.k.data = static_cast<char *>(c.desc.k.data) + 1; }},
      {"kda: q has dtype int32, allowed fp32, bf16, fp16, fp64", FW_FORWARD, kda(),
       [](Call &c) { c.desc.q.dtype = FW_I32; }},
      {"kda: k has dtype bf16, allowed fp32", FW_FORWARD, kda(), [](Call &c) { c.desc.k.dtype = FW_BF16; }},
      {"kda: k has shape [2,6,2,5], expected [2,7,2,5]", FW_FORWARD, kda(), [](Call &c) { c.desc.k.shape[1] = 6; }},
      {"kda: k has a null data pointer", FW_FORWARD, kda(), [](Call &c) { c.desc.k.data = nullptr; }},
      {"kda: k has strides that reach further than 2^58 elements", FW_FORWARD, kda(),
       [](Call &c) { c.desc.k.strides[1] = INT64_MAX / 8; }},
      {"kda: g is missing", FW_FORWARD, kda(), [](Call &c) { c.desc.g = fw_tensor{}; }},
      {"kda: g has 3 dimensions, expected 4", FW_FORWARD, kda(), [](Call &c) { c.desc.g.ndim = 3; }},
      {"kda: g has dtype fp16, allowed fp32", FW_FORWARD, kda(), [](Call &c) { c.desc.g.dtype = FW_F16; }},
      {"kda: beta has shape [2,7,2], expected [2,7,4]", FW_FORWARD, kda(), [](Call &c) { c.desc.beta.shape[2] = 2; }},
      {"kda: p is given, this operator does not take it", FW_FORWARD, kda(), [](Call &c) { c.desc.p = c.desc.k; }},
      {"linear_attn: beta is given, this operator does not take it", FW_FORWARD, spec_of(FW_OP_LINEAR_ATTN),
       [](Call &c) { c.desc.beta = c.desc.q; }},
      {"iplr: b is missing", FW_FORWARD, spec_of(FW_OP_IPLR), [](Call &c) { c.desc.b = fw_tensor{}; }},
      {"gdn2: write_gate is missing", FW_FORWARD, spec_of(FW_OP_GDN2),
       [](Call &c) { c.desc.write_gate = fw_tensor{}; }},
      {"kda: a_log is given, allowed with gate_input SOFTPLUS or BOUNDED only", FW_FORWARD, with_logits(),
       [](Call &c) { c.desc.gate_input = FW_GATE_INPUT_RWKV7; }},
      {"kda: dt_bias has 1 dimensions, expected 2", FW_FORWARD, with_logits(),
       [](Call &c) { c.desc.dt_bias.ndim = 1; }},
      {"kda: a_log has dtype bf16, allowed fp32", FW_FORWARD, with_logits(),
       [](Call &c) { c.desc.a_log.dtype = FW_BF16; }},
      {"linear_attn: gate_input is 3 but g (the gate_logits) is missing", FW_FORWARD, spec_of(FW_OP_LINEAR_ATTN),
       [](Call &c) { c.desc.gate_input = FW_GATE_INPUT_BOUNDED; }},
      {"gla: beta_input is 1 but beta (the beta_logits) is missing", FW_FORWARD, spec_of(FW_OP_GLA),
       [](Call &c) { c.desc.beta_input = FW_BETA_INPUT_SIGMOID; }},
      {"kda: batch is 2, must be 1 with cu_seqlens", FW_FORWARD, kda(),
       [](Call &c) {
         static int32_t at[3] = {0, 3, 7};
         const int64_t shape[] = {3};
         c.desc.cu_seqlens = fw_dense(at, FW_I32, 1, shape);
       }},
      {"kda: cu_seqlens has dtype fp32, allowed int32, int64", FW_FORWARD, packed(),
       [](Call &c) { c.desc.cu_seqlens.dtype = FW_F32; }},
      {"kda: cu_seqlens has shape [3,1], expected [N+1]", FW_FORWARD, packed(),
       [](Call &c) { c.desc.cu_seqlens.ndim = 2, c.desc.cu_seqlens.shape[1] = 1; }},
      {"kda: cu_seqlens[0] is 1, must be 0", FW_FORWARD, packed(),
       [](Call &c) { c.inputs["cu_seqlens"]->set(0, 1), c.inputs["cu_seqlens"]->settle(); }},
      {"kda: cu_seqlens[2] is 2, below the entry before it, 3", FW_FORWARD, packed(),
       [](Call &c) { c.inputs["cu_seqlens"]->set(2, 2), c.inputs["cu_seqlens"]->settle(); }},
      {"kda: cu_seqlens[2] is 8, allowed at most T = 7", FW_FORWARD, packed(),
       [](Call &c) { c.inputs["cu_seqlens"]->set(2, 8), c.inputs["cu_seqlens"]->settle(); }},
  });
}

TEST(Refusals, StatesAndOutputs) {
  expect_refusals({
      {"kda: o is missing", FW_FORWARD, kda(), [](Call &c) { c.desc.o = fw_tensor{}; }},
      {"kda: o has shape [2,7,4,2], expected [2,7,4,3]", FW_FORWARD, kda(), [](Call &c) { c.desc.o.shape[3] = 2; }},
      {"kda: output o overlaps itself: strides [84,0,3,1]", FW_FORWARD, kda(),
       [](Call &c) { c.desc.o.strides[1] = 0; }},
      {"kda: o has dtype fp64, allowed fp32, bf16, fp16", FW_FORWARD, kda(),
       [](Call &c) { c.desc.o.dtype = FW_F64; }},
      {"kda: output o shares memory with v, allowed: none", FW_FORWARD, kda(),
       [](Call &c) { c.desc.o.data = c.desc.v.data; }},
      {"kda: output o shares memory with final_state, allowed: none", FW_FORWARD, kda(),
       [](Call &c) { c.desc.o.data = c.desc.final_state.data; }},
      {"kda: initial_state has shape [2,4,5,3], expected [2,4,3,5]", FW_FORWARD, kda(),
       [](Call &c) { c.desc.state_layout = FW_STATE_VK; }},
      {"kda: initial_state has dtype fp64, allowed fp32, bf16, fp16", FW_FORWARD, kda(),
       [](Call &c) { c.desc.initial_state.dtype = FW_F64; }},
      {"kda: final_state has dtype bf16, allowed fp32", FW_FORWARD, kda(),
       [](Call &c) { c.desc.final_state.dtype = FW_BF16; }},
      {"kda: final_z is given, allowed with normalizer SUM only", FW_FORWARD, kda(),
       [](Call &c) { c.desc.final_z = c.desc.final_state; }},
      {"linear_attn: initial_z has dtype bf16, allowed fp32", FW_FORWARD, normalised(),
       [](Call &c) { c.desc.initial_z.dtype = FW_BF16; }},
      {"kda: state is given, allowed in step only", FW_FORWARD, kda(),
       [](Call &c) { c.desc.state = c.desc.initial_state; }},
      {"kda: state_z is given, allowed in step only", FW_FORWARD, kda(),
       [](Call &c) { c.desc.state_z = c.desc.initial_state; }},
      {"kda: state_indices is given, allowed in step only", FW_FORWARD, kda(),
       [](Call &c) { c.desc.state_indices = c.desc.initial_state; }},
      {"kda: initial_state is given, allowed outside step only", FW_STEP, kda(),
       [](Call &c) { c.desc.initial_state = c.desc.state; }},
      {"kda: final_state is given, allowed outside step only", FW_STEP, kda(),
       [](Call &c) { c.desc.final_state = c.desc.state; }},
      {"kda: initial_z is given, allowed outside step only", FW_STEP, kda(),
       [](Call &c) { c.desc.initial_z = c.desc.state; }},
      {"kda: final_z is given, allowed outside step only", FW_STEP, kda(),
       [](Call &c) { c.desc.final_z = c.desc.state; }},
      {"kda: state is missing", FW_STEP, kda(), [](Call &c) { c.desc.state = fw_tensor{}; }},
      {"kda: state has 3 dimensions, expected 4", FW_STEP, kda(), [](Call &c) { c.desc.state.ndim = 3; }},
      {"kda: state has 4 dimensions, expected 3", FW_STEP, kda(),
       [](Call &c) { c.desc.state_layout = FW_STATE_OPAQUE; }},
      {"kda: state has 1 slots, allowed at least N = 2 without state_indices", FW_STEP, kda(),
       [](Call &c) { c.desc.state_indices = fw_tensor{}, c.desc.state.shape[0] = 1; }},
      {"kda: state_indices has dtype int64, allowed int32", FW_STEP, kda(),
       [](Call &c) { c.desc.state_indices.dtype = FW_I64; }},
      {"kda: state_indices has shape [1], expected [2]", FW_STEP, kda(),
       [](Call &c) { c.desc.state_indices.shape[0] = 1; }},
      {"kda: state_indices[1] is 4, allowed below the 4 slots of state", FW_STEP, kda(),
       [](Call &c) { c.inputs["state_indices"]->set(1, 4), c.inputs["state_indices"]->settle(); }},
      {"kda: state_indices[0] and [1] are both 3, a slot may be used once", FW_STEP, kda(),
       [](Call &c) { c.inputs["state_indices"]->set(0, 3), c.inputs["state_indices"]->settle(); }},
      {"linear_attn: state_z is missing", FW_STEP, normalised(), [](Call &c) { c.desc.state_z = fw_tensor{}; }},
  });
}

TEST(Refusals, Gradients) {
  expect_refusals({
      {"recurrence: grads.struct_size is 0, expected 1640 (allowed 8 to 16384)", FW_BACKWARD, kda(),
       [](Call &c) { c.grads.struct_size = 0; }},
      {"recurrence: grads.struct_size is 1639, expected 1640 (allowed multiples of 8)", FW_BACKWARD, kda(),
       [](Call &c) { c.grads.struct_size -= 1; }},
      {"kda: da is asked for, but a is not given", FW_BACKWARD, kda(), [](Call &c) { c.grads.da = c.grads.dk; }},
      {"kda: dk has dtype bf16, allowed fp32", FW_BACKWARD, kda(), [](Call &c) { c.grads.dk.dtype = FW_BF16; }},
      {"kda: dk has shape [2,7,2,4], expected [2,7,2,5]", FW_BACKWARD, kda(),
       [](Call &c) { c.grads.dk.shape[3] = 4; }},
      {"kda: dv has a null data pointer", FW_BACKWARD, kda(), [](Call &c) { c.grads.dv.data = nullptr; }},
      {"kda: output dv overlaps itself: strides [84,12,0,1]", FW_BACKWARD, kda(),
       [](Call &c) { c.grads.dv.strides[2] = 0; }},
      {"kda: output dq shares memory with dk, allowed: none", FW_BACKWARD, kda(),
       [](Call &c) { c.grads.dk.data = c.grads.dq.data; }},
      {"kda: output dv shares memory with d_o, allowed: none", FW_BACKWARD, kda(),
       [](Call &c) { c.grads.dv.data = c.grads.d_o.data; }},
      {"kda: d_o has shape [2,6,4,3], expected [2,7,4,3]", FW_BACKWARD, kda(),
       [](Call &c) { c.grads.d_o.shape[1] = 6; }},
      {"kda: d_final_z is given, allowed with normalizer SUM only", FW_BACKWARD, kda(),
       [](Call &c) { c.grads.d_final_z = c.grads.d_o; }},
      {"kda: d_a_log is asked for, but a_log is not given", FW_BACKWARD, kda(),
       [](Call &c) { c.grads.d_a_log = c.grads.dbeta; }},
  });
}

// Pointers, sizes and names that are no part of a descriptor.
TEST(Refusals, Calls) {
  const Context context("");
  Call call(kda(), rounded_operands(kda()), FW_FORWARD);
  uint64_t bytes = 0;
  EXPECT_EQ(fw_recurrence_workspace_size(nullptr, &call.desc, FW_FORWARD, &bytes), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "recurrence: context is a null pointer");
  EXPECT_EQ(fw_recurrence_workspace_size(context.get(), nullptr, FW_FORWARD, &bytes), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "recurrence: desc is a null pointer");
  EXPECT_EQ(fw_recurrence_workspace_size(context.get(), &call.desc, FW_FORWARD, nullptr), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "recurrence: bytes is a null pointer");
  EXPECT_EQ(fw_recurrence_workspace_size(context.get(), &call.desc, 3, &bytes), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "recurrence: direction is 3, allowed 0 to 2");
  EXPECT_EQ(fw_recurrence_backward(context.get(), &call.desc, nullptr, nullptr, 0), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "kda: grads is a null pointer");
  EXPECT_EQ(fw_recurrence_saved_size(context.get(), &call.desc, nullptr), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "recurrence: bytes is a null pointer");
  EXPECT_EQ(fw_recurrence_chunk_length(context.get(), &call.desc, nullptr), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "recurrence: tokens is a null pointer");
  EXPECT_EQ(fw_recurrence_opaque_size(context.get(), &call.desc, nullptr), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "recurrence: elements is a null pointer");

  ASSERT_EQ(fw_recurrence_workspace_size(context.get(), &call.desc, FW_FORWARD, &bytes), FW_OK);
  if (bytes > 0) {
    Memory workspace(bytes);
    const std::string impl = cpu_impls("chunk")[0];
    EXPECT_EQ(fw_recurrence_forward(context.get(), &call.desc, workspace.data(), bytes - 1), FW_WORKSPACE_TOO_SMALL);
    EXPECT_EQ(std::string(fw_last_error()), "kda: workspace has " + std::to_string(bytes - 1) + " bytes, needed " +
                                                std::to_string(bytes) + " (" + impl + ")");
    EXPECT_EQ(fw_recurrence_forward(context.get(), &call.desc, nullptr, bytes), FW_WORKSPACE_TOO_SMALL);
    EXPECT_EQ(std::string(fw_last_error()),
              "kda: workspace has 0 bytes, needed " + std::to_string(bytes) + " (" + impl + ")");
  }
  EXPECT_EQ(fw_recurrence_check(context.get(), &call.desc, &call.grads, FW_FORWARD), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "kda: grads is given, allowed null unless the direction is backward");
  ASSERT_EQ(fw_recurrence_saved_size(context.get(), &call.desc, &bytes), FW_OK);
  ASSERT_GT(bytes, 0u);
  Memory saved(bytes), workspace(1 << 20);
  call.desc.saved = saved.data();
  call.desc.saved_size = bytes - 1;
  EXPECT_EQ(fw_recurrence_forward(context.get(), &call.desc, workspace.data(), workspace.size()),
            FW_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(fw_last_error()),
            "kda: saved_size is " + std::to_string(bytes - 1) + ", allowed at least " + std::to_string(bytes));
  for (const auto &[name, buffer] : call.outputs) EXPECT_TRUE(buffer->is_unchanged()) << name;

  fw_gate gate;
  fw_erase erase;
  EXPECT_EQ(fw_op_axes(15, &gate, &erase), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "op_axes: op is 15, allowed 1 to 14");
  EXPECT_EQ(fw_op_axes(FW_OP_KDA, nullptr, &erase), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "op_axes: gate or erase is a null pointer");
  EXPECT_EQ(fw_op_name(15), nullptr);
  EXPECT_EQ(fw_op_name(-1), nullptr);
  EXPECT_STREQ(fw_op_name(FW_OP_BY_AXES), "by_axes");
}

// Sizes of calls so long that a count of bytes passes 64 bits are refused, not wrapped.
TEST(Refusals, SizesPast64Bits) {
  const Context context("");
  Spec spec = spec_of(FW_OP_DELTA_RULE);
  spec.B = spec.H = spec.group = 1, spec.K = spec.V = 512, spec.T = 1;
  Call call(spec, rounded_operands(spec), FW_BACKWARD);
  for (fw_tensor *t : {&call.desc.q, &call.desc.k, &call.desc.v, &call.desc.beta}) t->shape[1] = int64_t{1} << 49;
  uint64_t bytes = 7;
  EXPECT_EQ(fw_recurrence_saved_size(context.get(), &call.desc, &bytes), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "delta_rule: saved does not fit in 64 bits");
  EXPECT_EQ(fw_recurrence_workspace_size(context.get(), &call.desc, FW_BACKWARD, &bytes), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "delta_rule: the workspace does not fit in 64 bits");
  EXPECT_EQ(bytes, 7u);
}

// However many sequences and slots there are, a slot that two of them name is found, and distinct ones pass.
TEST(Refusals, SlotsUsedTwice) {
  const Context context("");
  struct Case {
    int64_t n_sequences, slots, first, second;
  };
  for (const Case &c : {Case{3, 3, 0, 2}, Case{64, 70, 3, 63}, Case{65, 65, 0, 1}, Case{300, 300, 7, 299},
                        Case{300, 70000, 5, 298}, Case{66, 70000, 64, 65}, Case{4, 200000, 1, 3}}) {
    Spec spec = spec_of(FW_OP_SIMPLE_GLA);
    spec.B = c.n_sequences, spec.T = 1, spec.H = spec.group = spec.K = spec.V = 1;
    std::vector<int64_t> indices;
    for (int64_t n = 0; n < c.n_sequences; ++n) indices.push_back(n % 5 == 4 ? -n : c.slots - 1 - n);
    Operands all = rounded_operands(spec, true);
    all.at("state") = make_values({c.slots, 1, 1, 1});
    EXPECT_EQ(run_call(context, spec, all, FW_STEP, indices).status, FW_OK) << fw_last_error();
    indices[static_cast<size_t>(c.first)] = indices[static_cast<size_t>(c.second)] = c.slots - 1 - c.first;
    Call refused(spec, all, FW_STEP, indices);
    EXPECT_EQ(is_on_cuda() ? refused.check_values(context) : refused.run(context).status, FW_INVALID_ARGUMENT);
    const std::string expected = "simple_gla: state_indices[" + std::to_string(c.first) + "] and [" +
                                 std::to_string(c.second) + "] are both " + std::to_string(c.slots - 1 - c.first) +
                                 ", a slot may be used once";
    EXPECT_EQ(std::string(fw_last_error()), expected);
  }
}

// Import and export of the opaque state.
TEST(Refusals, OpaqueState) {
  const Context context("");
  Spec spec = kda();
  Call call(spec, rounded_operands(spec, true), FW_STEP);
  const fw_tensor plain = call.desc.state;
  EXPECT_EQ(fw_recurrence_state_import(context.get(), &call.desc, &plain, FW_STATE_KV), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "kda: state_layout is 0, allowed OPAQUE for import and export");
  int64_t elements = 0;
  ASSERT_EQ(fw_recurrence_opaque_size(context.get(), &call.desc, &elements), FW_OK) << fw_last_error();
  Buffer opaque({4, 4, elements}, FW_F32, Strides::kDense);
  call.desc.state_layout = FW_STATE_OPAQUE;
  call.desc.state = opaque.tensor();
  EXPECT_EQ(fw_recurrence_state_import(context.get(), &call.desc, nullptr, FW_STATE_KV), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "kda: plain is a null pointer");
  EXPECT_EQ(fw_recurrence_state_import(context.get(), &call.desc, &plain, FW_STATE_OPAQUE), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "kda: layout is 2, allowed KV (0) or VK (1)");
  EXPECT_EQ(fw_recurrence_state_import(context.get(), &call.desc, &plain, FW_STATE_VK), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "kda: plain has shape [4,4,5,3], expected [4,4,3,5]");
  call.desc.state.data = nullptr;
  EXPECT_EQ(fw_recurrence_state_import(context.get(), &call.desc, &plain, FW_STATE_KV), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "kda: state has a null data pointer");
  call.desc.state.data = static_cast<char *>(opaque.tensor().data) + 1;
  EXPECT_EQ(fw_recurrence_state_import(context.get(), &call.desc, &plain, FW_STATE_KV), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "kda: state has a data pointer that is not a multiple of 4 bytes");
  call.desc.state = opaque.tensor();
  fw_tensor shared = fw_dense(opaque.tensor().data, FW_F32, 4, plain.shape);
  EXPECT_EQ(fw_recurrence_state_import(context.get(), &call.desc, &shared, FW_STATE_KV), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "kda: output state shares memory with plain, allowed: none");
  EXPECT_EQ(fw_recurrence_state_export(context.get(), &call.desc, &shared, FW_STATE_KV), FW_INVALID_ARGUMENT);
  EXPECT_STREQ(fw_last_error(), "kda: output plain shares memory with state, allowed: none");
  call.desc.state.shape[2] += 1;
  EXPECT_EQ(fw_recurrence_state_export(context.get(), &call.desc, &plain, FW_STATE_KV), FW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fw_last_error()).find("kda: state has shape [4,4,"), std::string::npos) << fw_last_error();
}

// A forced implementation that refuses says why; free choice lists every refusal; explain lists all candidates.
TEST(Refusals, Implementations) {
  if (is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is cuda, these are the reasons of candidates of the CPU";
  const std::string best = cpu_impls("chunk")[0], recurrent = cpu_impls("recurrent")[0];
  Spec spec = kda();
  spec.form = FW_FORM_RECURRENT;
  Call call(spec, rounded_operands(spec), FW_FORWARD);
  uint64_t bytes;
  EXPECT_EQ(fw_recurrence_workspace_size(forced(best).get(), &call.desc, FW_FORWARD, &bytes), FW_UNSUPPORTED);
  EXPECT_EQ(std::string(fw_last_error()),
            "kda: implementation " + best + " is forced and refuses: form is recurrent");
  call.desc.form = FW_FORM_CHUNK;
  EXPECT_EQ(fw_recurrence_workspace_size(forced(recurrent).get(), &call.desc, FW_FORWARD, &bytes), FW_UNSUPPORTED);
  EXPECT_EQ(std::string(fw_last_error()),
            "kda: implementation " + recurrent + " is forced and refuses: form is chunk");
  const Context free("");
  call.desc.form = FW_FORM_PARALLEL;
  EXPECT_EQ(fw_recurrence_workspace_size(free.get(), &call.desc, FW_BACKWARD, &bytes), FW_UNSUPPORTED);
  EXPECT_NE(std::string(fw_last_error()).find("cuda_portable: device is cpu; cpu_"), std::string::npos)
      << fw_last_error();
  EXPECT_NE(std::string(fw_last_error()).find("form is parallel"), std::string::npos) << fw_last_error();

  call.desc.form = FW_FORM_AUTO;
  char lines[4096];
  uint64_t needed = 0;
  ASSERT_EQ(fw_recurrence_explain(free.get(), &call.desc, FW_FORWARD, lines, sizeof lines, &needed), FW_OK);
  EXPECT_EQ(needed, strlen(lines) + 1);
  const std::string all = lines;
  EXPECT_NE(all.find("*" + best + ": accepted\n"), std::string::npos) << all;
  EXPECT_NE(all.find("reference_recurrent: accepted\n"), std::string::npos) << all;
  EXPECT_NE(all.find("reference_parallel: refused: form is chunk\n"), std::string::npos) << all;
  EXPECT_NE(all.find(recurrent + ": refused: form is chunk\n"), std::string::npos) << all;
  // every other reason to refuse
  const auto explained = [&](fw_direction direction) {
    uint64_t length = 0;
    EXPECT_EQ(fw_recurrence_explain(free.get(), &call.desc, direction, lines, sizeof lines, &length), FW_OK)
        << fw_last_error();
    return std::string(lines);
  };
  for (int32_t level = 0; level < kLevelCount; ++level) {
    if (level_is_available(level)) continue;
    const std::string name = level_name(level);
    EXPECT_NE(all.find("cpu_" + name + "_chunk: refused: this machine or build lacks " + name + "\n"),
              std::string::npos)
        << all;
  }
  call.desc.form = FW_FORM_PARALLEL;
  EXPECT_NE(explained(FW_BACKWARD).find(best + ": refused: form is parallel, which is forward only\n"),
            std::string::npos);
  EXPECT_NE(explained(FW_BACKWARD).find("reference_recurrent: refused: form is parallel\n"), std::string::npos);
  call.desc.form = FW_FORM_RECURRENT;
  unsigned char saved[1];
  call.desc.saved = saved;
  EXPECT_NE(explained(FW_FORWARD).find(recurrent + ": refused: saved is given, written by the chunk form only\n"),
            std::string::npos);
  EXPECT_NE(
      explained(FW_FORWARD).find("reference_recurrent: refused: saved is given, written by the chunk form only\n"),
      std::string::npos);
  call.desc.form = FW_FORM_PARALLEL;
  EXPECT_NE(
      explained(FW_FORWARD).find("reference_parallel: refused: saved is given, written by the chunk form only\n"),
      std::string::npos);
  Call exact(as_f64(kda()), rounded_operands(kda()), FW_FORWARD);
  exact.desc.form = FW_FORM_CHUNK;
  std::swap(call.desc, exact.desc);
  EXPECT_NE(explained(FW_FORWARD).find(best + ": refused: operands are fp64, computed by the reference only\n"),
            std::string::npos);
  EXPECT_NE(explained(FW_FORWARD).find("*reference_recurrent: accepted\n"), std::string::npos);
  std::swap(call.desc, exact.desc);
  call.desc.form = FW_FORM_AUTO, call.desc.saved = nullptr;
  Call step(kda(), rounded_operands(kda(), true), FW_STEP);
  int64_t elements = 0;
  ASSERT_EQ(fw_recurrence_opaque_size(free.get(), &step.desc, &elements), FW_OK) << fw_last_error();
  Buffer opaque({4, 4, elements}, FW_F32, Strides::kDense);
  step.desc.state = opaque.tensor(), step.desc.state_layout = FW_STATE_OPAQUE;
  std::swap(call.desc, step.desc);
  EXPECT_NE(explained(FW_STEP).find("reference_recurrent: refused: the state layout is opaque\n"), std::string::npos);
  std::swap(call.desc, step.desc);

  // a short buffer gets the beginning and a closing zero, and nothing behind it
  std::string shortened(40, '#');
  ASSERT_EQ(fw_recurrence_explain(free.get(), &call.desc, FW_FORWARD, shortened.data(), 30, &needed), FW_OK);
  EXPECT_EQ(needed, all.size() + 1);
  EXPECT_EQ(std::string(shortened.c_str()), all.substr(0, 29));
  EXPECT_EQ(shortened.substr(30), std::string(10, '#'));
  ASSERT_EQ(fw_recurrence_explain(free.get(), &call.desc, FW_FORWARD, nullptr, 0, &needed), FW_OK);
  EXPECT_EQ(needed, all.size() + 1);
}

}  // namespace
}  // namespace fw::test
