// SPDX-License-Identifier: Apache-2.0
// The sm_90a forward and backward: which calls they take, and the call in the terms of their kernels.
#include "ops/recurrence/sm90_paths.hpp"

#include <initializer_list>

#include "cuda/device.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_paths.hpp"
#include "ops/recurrence/sm90_backward.hpp"

namespace fw::recurrence {

#if defined(FW_HAVE_CUDA)

namespace {

constexpr uint64_t kAlign = 1024;  // of the kernels' workspace

// What the descriptor asks for that these kernels do not do.
const char *unsupported(const Problem &p) {
  if (p.form != FW_FORM_CHUNK) return "the form is not chunk";
  if (p.saved) return "saved is given";
  if (p.n_sub != 1 || p.has_normalizer) return "sub-steps or the normaliser are asked for";
  if (p.q.dtype != FW_BF16 || p.v.dtype != FW_BF16) return "the operands are not bf16";
  if (given(p.o) && p.o.dtype != FW_BF16) return "o is not bf16";
  if (given(p.initial_state) && p.initial_state.dtype != FW_F32) return "initial_state is not fp32";
  if (given(p.d_o) && p.d_o.dtype != FW_BF16) return "d_o is not bf16";
  if (given(p.d_final_state) && p.d_final_state.dtype != FW_F32) return "d_final_state is not fp32";
  if (p.T == 0 || p.N == 0) return "there are no tokens or no sequences";
  return nullptr;
}

// And the backward beside that.
const char *unsupported_backward(const Problem &p) {
  if (p.erase == FW_ERASE_INDEPENDENT || p.erase == FW_ERASE_SHARED_BEFORE) {
    return "backward: the erase is neither none nor shared and read after the decay";
  }
  if (given(p.p) || given(p.erase_gate) || given(p.write_gate)) return "backward: p, erase_gate or write_gate is given";
  // dg of one-sign data with beta 1 in every row missed its bound (1.2 times in RMS): what X and E take from <S, dS> is most of it
  if (p.erase != FW_ERASE_NONE && !given(p.beta)) return "backward: beta is absent";
  return nullptr;
}

bool is_dense(const fw_tensor &t) {
  int64_t stride = 1;
  for (int32_t i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] > 1 && t.strides[i] != stride) return false;
    stride *= t.shape[i];
  }
  return true;
}
const char *unsupported_layout(const Problem &p) {
  const bool is_forward = p.direction == FW_FORWARD;
  for (const fw_tensor *t : {&p.q, &p.k, &p.v, is_forward ? &p.o : &p.d_o, &p.a, &p.b, &p.p, &p.erase_gate, &p.write_gate, &p.dq,
                             &p.dk, &p.dv}) {
    if (given(*t) && t->strides[3] != 1) {
      return "the last dimension of q, k, v, o, a, b, p, erase_gate, write_gate or their gradients is not dense";
    }
  }
  for (const fw_tensor *t : {&p.g, &p.dg}) {
    if (p.gate == FW_GATE_VECTOR && given(*t) && t->strides[3] != 1) return "the last dimension of g or dg is not dense";
  }
  for (const fw_tensor *t : {&p.initial_state, is_forward ? &p.final_state : &p.d_final_state, &p.d_initial_state, &p.cu_seqlens}) {
    if (given(*t) && !is_dense(*t)) return "initial_state, final_state, their gradients or cu_seqlens is not dense";
  }
  return nullptr;
}

Sm90Strides strides_of(const fw_tensor &t) { return {t.strides[0], t.strides[1], t.strides[2]}; }
Sm90Real real_of(const fw_tensor &t) { return t.dtype == FW_F32 ? Sm90Real::kFloat32 : Sm90Real::kBfloat16; }

Sm90Activations activations_of(const Problem &p) {
  Sm90Activations act = {};
  act.gate_kind = p.gate_input, act.beta_kind = p.beta_input;
  act.fixed_op = p.has_fixed_gate ? p.op : 0;
  act.lightning_slope = p.lightning_slope, act.normalizer = p.gate_normalizer, act.lower_bound = p.gate_lower_bound;
  if (given(p.a_log)) act.a_log = static_cast<const float *>(p.a_log.data), act.a_log_head = p.a_log.strides[0];
  if (given(p.dt_bias)) {
    act.dt_bias = static_cast<const float *>(p.dt_bias.data), act.dt_bias_head = p.dt_bias.strides[0];
    act.dt_bias_key = p.gate == FW_GATE_VECTOR ? p.dt_bias.strides[1] : 0;
  }
  return act;
}

// Of an operand that may be absent.
const void *data_of(const fw_tensor &t) { return given(t) ? t.data : nullptr; }

Sm90Forward call_of(const Problem &p) {
  Sm90Forward c = {};
  c.gate = p.gate == FW_GATE_NONE ? Sm90Gate::kNone : p.gate == FW_GATE_SCALAR ? Sm90Gate::kScalar : Sm90Gate::kVector;
  const bool is_separate = given(p.p) || given(p.erase_gate) || given(p.write_gate);
  c.erase = p.erase == FW_ERASE_NONE ? Sm90Erase::kNone : p.erase == FW_ERASE_INDEPENDENT ? Sm90Erase::kIndependent : is_separate ? Sm90Erase::kSeparate : Sm90Erase::kShared;
  c.reads_before = p.erase == FW_ERASE_SHARED_BEFORE;
  c.has_l2norm = p.has_l2norm;
  c.p = data_of(p.p), c.erase_gate = data_of(p.erase_gate), c.write_gate = data_of(p.write_gate);
  c.p_strides = strides_of(p.p);
  c.a = data_of(p.a), c.b = data_of(p.b), c.a_strides = strides_of(p.a), c.b_strides = strides_of(p.b);
  c.erase_gate_strides = strides_of(p.erase_gate), c.write_gate_strides = strides_of(p.write_gate);
  c.activations = activations_of(p);
  c.B = p.B, c.T = p.T, c.H = p.H, c.HV = p.HV, c.K = p.K, c.V = p.V, c.N = p.N;
  c.cu_seqlens = given(p.cu_seqlens) ? p.cu_seqlens.data : nullptr;
  c.cu_seqlens_64 = p.cu_seqlens.dtype == FW_I64;
  c.q = p.q.data, c.k = p.k.data, c.v = p.v.data;
  c.q_strides = strides_of(p.q), c.k_strides = strides_of(p.k), c.v_strides = strides_of(p.v);
  c.g = data_of(p.g), c.beta = data_of(p.beta);
  c.g_type = real_of(p.g), c.beta_type = real_of(p.beta);
  c.g_strides = strides_of(p.g), c.beta_strides = strides_of(p.beta);
  c.initial_state = given(p.initial_state) ? static_cast<const float *>(p.initial_state.data) : nullptr;
  const bool is_forward = p.direction == FW_FORWARD;
  c.final_state = given(p.final_state) && is_forward ? static_cast<float *>(p.final_state.data) : nullptr;
  c.layout = p.state_layout == FW_STATE_VK ? Sm90Layout::kValueKey : Sm90Layout::kKeyValue;
  if (is_forward) c.o = p.o.data, c.o_strides = strides_of(p.o);
  c.scale = p.scale_f32;
  c.batch_invariant = p.is_batch_invariant;
  return c;
}

Sm90Backward backward_of(const Problem &p) {
  Sm90Backward c = {};
  c.call = call_of(p);
  const auto take = [](const fw_tensor &t, void **data, Sm90Strides *strides) {
    if (given(t)) *data = t.data, *strides = strides_of(t);
  };
  void *d_o = nullptr;
  take(p.d_o, &d_o, &c.d_o_strides);
  c.d_o = d_o;
  take(p.dq, &c.dq, &c.dq_strides);
  take(p.dk, &c.dk, &c.dk_strides);
  take(p.dv, &c.dv, &c.dv_strides);
  take(p.dg, &c.dg, &c.dg_strides);
  take(p.dbeta, &c.dbeta, &c.dbeta_strides);
  if (given(p.d_a_log)) c.d_a_log = static_cast<float *>(p.d_a_log.data), c.d_a_log_head = p.d_a_log.strides[0];
  if (given(p.d_dt_bias)) {
    c.d_dt_bias = static_cast<float *>(p.d_dt_bias.data), c.d_dt_bias_head = p.d_dt_bias.strides[0];
    c.d_dt_bias_key = p.gate == FW_GATE_VECTOR ? p.d_dt_bias.strides[1] : 0;
  }
  if (given(p.d_final_state)) c.d_final_state = static_cast<const float *>(p.d_final_state.data);
  if (given(p.d_initial_state)) c.d_initial_state = static_cast<float *>(p.d_initial_state.data);
  return c;
}

}  // namespace

bool sm90_accepts(const fw_context &context, const Problem &p, Reason &reason) {
  if (!cuda_accepts(context, p, reason) || !cuda::is_exactly(9, 0, reason)) return false;
  if (const char *why = unsupported(p)) return reason.refuse("%s", why);
  if (p.direction == FW_BACKWARD) {
    if (const char *why = unsupported_backward(p)) return reason.refuse("%s", why);
  }
  if (const char *why = unsupported_layout(p)) return reason.refuse("%s", why);
  const char *why = p.direction == FW_BACKWARD ? sm90_backward_refusal(backward_of(p)) : sm90_forward_refusal(call_of(p));
  return !why || reason.refuse("%s", why);
}

uint64_t sm90_workspace(const fw_context &, const Problem &p) {
  return (p.direction == FW_BACKWARD ? sm90_backward_workspace(call_of(p)) : sm90_forward_workspace(call_of(p))) + kAlign;
}

fw_status sm90_run(fw_context &, const Problem &p, void *memory) {
  FW_TRY(cuda_check_places(p, memory));
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory), aligned = (address + kAlign - 1) / kAlign * kAlign;
  int error;
  if (p.direction == FW_BACKWARD) {
    error = sm90_backward_launch(backward_of(p), reinterpret_cast<void *>(aligned), p.stream);
    launch_clear(p, p.dq, 1, p.K);
    launch_clear(p, p.dk, 1, p.K);
    launch_clear(p, p.dv, 1, p.V);
    launch_clear(p, p.dg, 1, p.gate == FW_GATE_VECTOR ? p.K : 0);
    launch_clear(p, p.dbeta, 1, 0);
  } else {
    error = sm90_forward_launch(call_of(p), reinterpret_cast<void *>(aligned), p.stream);
    launch_clear(p, p.o, 1, p.V);
  }
  FW_TRY(cuda::check_launches(p.op_name, "sm90_chunk"));
  return cuda::check_launch(p.op_name, "sm90_chunk", error);
}

#else

bool sm90_accepts(const fw_context &context, const Problem &p, Reason &reason) { return cuda_accepts(context, p, reason); }
uint64_t sm90_workspace(const fw_context &, const Problem &) { return UINT64_MAX; }
fw_status sm90_run(fw_context &, const Problem &p, void *) { return cuda::check_launches(p.op_name, "sm90_chunk"); }

#endif

int64_t sm90_chunk_length() { return kSm90Chunk; }

}  // namespace fw::recurrence
