// SPDX-License-Identifier: Apache-2.0
#include "operations.hpp"

#include <string.h>

#include <initializer_list>
#include <type_traits>

namespace fastweight::python {
namespace {

constexpr const char *kGates[] = {"none", "scalar", "vector", nullptr};
constexpr const char *kErases[] = {"none", "shared_after", "shared_before", "independent", nullptr};
constexpr const char *kForms[] = {"auto", "chunk", "recurrent", "parallel", nullptr};
constexpr const char *kLayouts[] = {"kv", "vk", "opaque", nullptr};
constexpr const char *kNormalizers[] = {"none", "sum", nullptr};
constexpr const char *kQkNorms[] = {"none", "l2", nullptr};
constexpr const char *kGateInputs[] = {"log_decay", "softplus", "log_sigmoid", "bounded", "rwkv7", nullptr};
constexpr const char *kBetaInputs[] = {"plain", "sigmoid", "sigmoid_twice", nullptr};
constexpr const char *kConvActivations[] = {"none", "silu", nullptr};
constexpr const char *kActivations[] = {"none", "silu", "sigmoid", nullptr};
constexpr const char *kGateKinds[] = {"", "softplus", "log_sigmoid", "bounded", "rwkv7", "beta", "beta_twice", nullptr};
constexpr const char *kFeatureMaps[] = {"identity", "elu_plus_one", "silu", "relu", nullptr};

fw_dtype wide(const fw_tensor &like) { return like.dtype == FW_F64 ? FW_F64 : FW_F32; }

void set(fw_tensor *view, fw_dtype dtype, std::initializer_list<int64_t> shape) {
  int64_t sizes[FW_MAX_DIMS] = {};
  int32_t ndim = 0;
  for (const int64_t size : shape) sizes[ndim++] = size < 0 ? 0 : size;
  *view = fw_dense(nullptr, dtype, ndim, sizes);
}

int64_t sequences(const fw_tensor &cu_seqlens, const fw_tensor &batched) {
  return cu_seqlens.dtype == FW_NONE ? batched.shape[0] : cu_seqlens.shape[0] - 1;
}

bool recurrence_o(const void *desc, fw_tensor *view) {
  const auto &d = *static_cast<const fw_recurrence *>(desc);
  if (d.q.ndim != 4 || d.v.ndim != 4) return false;
  set(view, d.v.dtype, {d.q.shape[0], d.q.shape[1], d.v.shape[2], d.v.shape[3]});
  return true;
}

bool recurrence_final_state(const void *desc, fw_tensor *view) {
  const auto &d = *static_cast<const fw_recurrence *>(desc);
  if (d.q.ndim != 4 || d.v.ndim != 4) return false;
  const int64_t N = sequences(d.cu_seqlens, d.q), HV = d.v.shape[2], K = d.q.shape[3], V = d.v.shape[3];
  if (d.state_layout == FW_STATE_VK) set(view, wide(d.q), {N, HV, V, K});
  else set(view, wide(d.q), {N, HV, K, V});
  return true;
}

bool recurrence_final_z(const void *desc, fw_tensor *view) {
  const auto &d = *static_cast<const fw_recurrence *>(desc);
  if (d.q.ndim != 4 || d.normalizer == FW_NORMALIZER_NONE) return false;
  set(view, wide(d.q), {sequences(d.cu_seqlens, d.q), d.q.shape[2], d.q.shape[3]});
  return true;
}

template <class Desc>
bool like_x(const void *desc, fw_tensor *view) {
  const fw_tensor &x = static_cast<const Desc *>(desc)->x;
  *view = fw_dense(nullptr, x.dtype, x.ndim, x.shape);
  return true;
}

bool gate_y(const void *desc, fw_tensor *view) {
  like_x<fw_gate_activation>(desc, view);
  view->dtype = wide(*view);
  return true;
}

bool conv_final_state(const void *desc, fw_tensor *view) {
  const auto &d = *static_cast<const fw_short_conv *>(desc);
  if (d.x.ndim != 3 || d.weight.ndim != 2) return false;
  set(view, d.x.dtype, {sequences(d.cu_seqlens, d.x), d.x.shape[2], d.weight.shape[1] - 1});
  return true;
}

bool attention_o(const void *desc, fw_tensor *view) {
  const auto &d = *static_cast<const fw_attention *>(desc);
  if (d.q.ndim != 4 || d.v.ndim != 4) return false;
  set(view, d.v.dtype, {d.q.shape[0], d.q.shape[1], d.q.shape[2], d.v.shape[3]});
  return true;
}

bool linear_y(const void *desc, fw_tensor *view) {
  const auto &d = *static_cast<const fw_linear *>(desc);
  if (d.x.ndim != 2 || d.weight.ndim != 2) return false;
  set(view, d.x.dtype, {d.x.shape[0], d.weight.shape[0]});
  return true;
}

template <class Desc>
concept has_stream = requires(Desc desc) { desc.stream; };

// The verbs of an operation behind one shape. kStep: its step, or nullptr.
template <class Desc, class Grads, auto kCheck, auto kSize, auto kForward, auto kBackward, auto kStep, auto kExplain>
void set_verbs(Operation *operation) {
  operation->size = sizeof(Desc);
  operation->grads_size = sizeof(Grads);
  operation->device_offset = offsetof(Desc, device);
  if constexpr (has_stream<Desc>) operation->stream_offset = offsetof(Desc, stream);
  operation->check = [](const fw_context *c, const void *d, fw_direction direction) {
    return kCheck(c, static_cast<const Desc *>(d), nullptr, direction);
  };
  operation->workspace_size = [](const fw_context *c, const void *d, fw_direction direction, uint64_t *bytes) {
    return kSize(c, static_cast<const Desc *>(d), direction, bytes);
  };
  operation->run = [](fw_context *c, const void *d, fw_direction direction, void *workspace, uint64_t bytes) {
    if constexpr (!std::is_null_pointer_v<decltype(kStep)>) {
      if (direction == FW_STEP) return kStep(c, static_cast<const Desc *>(d), workspace, bytes);
    }
    return kForward(c, static_cast<const Desc *>(d), workspace, bytes);
  };
  operation->backward = [](fw_context *c, const void *d, const void *grads, void *workspace, uint64_t bytes) {
    return kBackward(c, static_cast<const Desc *>(d), static_cast<const Grads *>(grads), workspace, bytes);
  };
  operation->explain = [](const fw_context *c, const void *d, fw_direction direction, char *text, uint64_t n, uint64_t *needed) {
    return kExplain(c, static_cast<const Desc *>(d), direction, text, n, needed);
  };
}

#define FIELD(name, kind, ...) {#name, offsetof(Desc, name), Kind::kind __VA_OPT__(,) __VA_ARGS__}
#define VERBS(op, step) \
  set_verbs<Desc, fw_##op##_grads, fw_##op##_check, fw_##op##_workspace_size, fw_##op##_forward, fw_##op##_backward, step, \
            fw_##op##_explain>(&made)
#define GRAD(op, of, name) {#of, offsetof(fw_##op##_grads, name)}

Operation recurrence() {
  using Desc = fw_recurrence;
  Operation made = {};
  made.name = "recurrence";
  VERBS(recurrence, fw_recurrence_step);
  made.options_offset = offsetof(Desc, options);
  made.fields = {
      FIELD(op, kInt32), FIELD(gate, kEnum, kGates), FIELD(erase, kEnum, kErases), FIELD(form, kEnum, kForms),
      FIELD(state_layout, kEnum, kLayouts, false, true), FIELD(normalizer, kEnum, kNormalizers), FIELD(qk_norm, kEnum, kQkNorms),
      FIELD(gate_input, kEnum, kGateInputs), FIELD(beta_input, kEnum, kBetaInputs),
      FIELD(n_sub, kInt32, nullptr, true), FIELD(layer_idx, kInt32), FIELD(num_layers, kInt32, nullptr, true),
      FIELD(scale, kDouble, nullptr, true), FIELD(gate_normalizer, kDouble, nullptr, true),
      FIELD(gate_lower_bound, kDouble, nullptr, true), FIELD(g_min, kDouble, nullptr, true),
      FIELD(q, kTensor), FIELD(k, kTensor), FIELD(v, kTensor), FIELD(a, kTensor), FIELD(b, kTensor), FIELD(p, kTensor),
      FIELD(erase_gate, kTensor), FIELD(write_gate, kTensor), FIELD(g, kTensor), FIELD(beta, kTensor),
      FIELD(a_log, kTensor), FIELD(dt_bias, kTensor), FIELD(initial_state, kTensor), FIELD(initial_z, kTensor),
      FIELD(cu_seqlens, kTensor), FIELD(state, kWritten), FIELD(state_z, kWritten), FIELD(state_indices, kTensor),
  };
  made.outputs = {{"o", offsetof(Desc, o), false, recurrence_o, "v"},
                  {"final_state", offsetof(Desc, final_state), true, recurrence_final_state, "initial_state"},
                  {"final_z", offsetof(Desc, final_z), true, recurrence_final_z}};
  made.incoming = {GRAD(recurrence, o, d_o), GRAD(recurrence, final_state, d_final_state), GRAD(recurrence, final_z, d_final_z)};
  made.outgoing = {
      GRAD(recurrence, q, dq), GRAD(recurrence, k, dk), GRAD(recurrence, v, dv), GRAD(recurrence, a, da), GRAD(recurrence, b, db),
      GRAD(recurrence, p, dp), GRAD(recurrence, erase_gate, d_erase_gate), GRAD(recurrence, write_gate, d_write_gate),
      GRAD(recurrence, g, dg), GRAD(recurrence, beta, dbeta), GRAD(recurrence, a_log, d_a_log),
      GRAD(recurrence, dt_bias, d_dt_bias), GRAD(recurrence, initial_state, d_initial_state),
      GRAD(recurrence, initial_z, d_initial_z),
  };
  made.saved_offset = offsetof(Desc, saved);
  made.saved_size_offset = offsetof(Desc, saved_size);
  made.saved_size = [](const fw_context *c, const void *d, uint64_t *bytes) {
    return fw_recurrence_saved_size(c, static_cast<const Desc *>(d), bytes);
  };
  made.saved_has_holes = [](const void *desc) {
    const auto &d = *static_cast<const Desc *>(desc);
    return d.cu_seqlens.dtype != FW_NONE || d.normalizer != FW_NORMALIZER_NONE || d.v.shape[3] % 16 != 0;
  };
  return made;
}

Operation short_conv() {
  using Desc = fw_short_conv;
  Operation made = {};
  made.name = "short_conv";
  VERBS(short_conv, fw_short_conv_step);
  made.options_offset = offsetof(Desc, options);
  made.fields = {FIELD(x, kTensor), FIELD(weight, kTensor), FIELD(bias, kTensor), FIELD(initial_state, kTensor),
                 FIELD(cu_seqlens, kTensor), FIELD(state, kWritten), FIELD(state_indices, kTensor),
                 FIELD(activation, kEnum, kConvActivations)};
  made.outputs = {{"y", offsetof(Desc, y), false, like_x<Desc>, "x"},
                  {"final_state", offsetof(Desc, final_state), true, conv_final_state}};
  made.incoming = {GRAD(short_conv, y, dy), GRAD(short_conv, final_state, d_final_state)};
  made.outgoing = {GRAD(short_conv, x, dx), GRAD(short_conv, weight, dweight), GRAD(short_conv, bias, dbias),
                   GRAD(short_conv, initial_state, d_initial_state)};
  return made;
}

Operation norm() {
  using Desc = fw_norm;
  Operation made = {};
  made.name = "norm";
  VERBS(norm, nullptr);
  made.fields = {FIELD(kind, kInt32), FIELD(x, kTensor), FIELD(weight, kTensor), FIELD(gate, kTensor),
                 FIELD(gate_activation, kEnum, kActivations), FIELD(eps, kDouble, nullptr, true)};
  made.outputs = {{"y", offsetof(Desc, y), false, like_x<Desc>, "x"}};
  made.incoming = {GRAD(norm, y, dy)};
  made.outgoing = {GRAD(norm, x, dx), GRAD(norm, weight, dweight), GRAD(norm, gate, dgate)};
  return made;
}

Operation gate_activation() {
  using Desc = fw_gate_activation;
  Operation made = {};
  made.name = "gate_activation";
  VERBS(gate_activation, nullptr);
  made.fields = {FIELD(x, kTensor), FIELD(kind, kEnum, kGateKinds), FIELD(a_log, kTensor), FIELD(dt_bias, kTensor),
                 FIELD(normalizer, kDouble, nullptr, true), FIELD(lower_bound, kDouble, nullptr, true)};
  made.outputs = {{"y", offsetof(Desc, y), false, gate_y, "x"}};
  made.incoming = {GRAD(gate_activation, y, dy)};
  made.outgoing = {GRAD(gate_activation, x, dx), GRAD(gate_activation, a_log, d_a_log), GRAD(gate_activation, dt_bias, d_dt_bias)};
  return made;
}

Operation feature_map() {
  using Desc = fw_feature_map;
  Operation made = {};
  made.name = "feature_map";
  VERBS(feature_map, nullptr);
  made.fields = {FIELD(x, kTensor), FIELD(kind, kEnum, kFeatureMaps)};
  made.outputs = {{"y", offsetof(Desc, y), false, like_x<Desc>, "x"}};
  made.incoming = {GRAD(feature_map, y, dy)};
  made.outgoing = {GRAD(feature_map, x, dx)};
  return made;
}

Operation attention() {
  using Desc = fw_attention;
  Operation made = {};
  made.name = "attention";
  VERBS(attention, fw_attention_step);
  made.fields = {FIELD(q, kTensor), FIELD(k, kTensor), FIELD(v, kTensor), FIELD(cu_seqlens, kTensor),
                 FIELD(start_positions, kTensor), FIELD(k_cache, kWritten), FIELD(v_cache, kWritten),
                 FIELD(cache_lengths, kTensor), FIELD(cache_indices, kTensor), FIELD(window, kInt64),
                 FIELD(scale, kDouble, nullptr, true), FIELD(rope_theta, kDouble, nullptr, true)};
  made.outputs = {{"o", offsetof(Desc, o), false, attention_o, "q"}};
  made.incoming = {GRAD(attention, o, d_o)};
  made.outgoing = {GRAD(attention, q, dq), GRAD(attention, k, dk), GRAD(attention, v, dv)};
  return made;
}

Operation linear() {
  using Desc = fw_linear;
  Operation made = {};
  made.name = "linear";
  VERBS(linear, nullptr);
  made.options_offset = offsetof(Desc, options);
  made.fields = {FIELD(x, kTensor), FIELD(weight, kTensor), FIELD(bias, kTensor)};
  made.outputs = {{"y", offsetof(Desc, y), false, linear_y}};
  made.incoming = {GRAD(linear, y, dy)};
  made.outgoing = {GRAD(linear, x, dx), GRAD(linear, weight, dweight), GRAD(linear, bias, dbias)};
  return made;
}

#undef FIELD
#undef GRAD
#undef VERBS

}  // namespace

const Field *Operation::find(const char *field) const {
  for (const Field &x : fields) {
    if (strcmp(x.name, field) == 0) return &x;
  }
  return nullptr;
}

const Operation *find_operation(const char *name) {
  static const std::vector<Operation> *all = new std::vector<Operation>{
      recurrence(), short_conv(), norm(), gate_activation(), feature_map(), attention(), linear()};
  for (const Operation &x : *all) {
    if (strcmp(x.name, name) == 0) return &x;
  }
  return nullptr;
}

}  // namespace fastweight::python
