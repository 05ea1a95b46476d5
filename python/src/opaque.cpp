// SPDX-License-Identifier: Apache-2.0
#include "opaque.hpp"

#include <string.h>

#include "context.hpp"
#include "cuda.hpp"

namespace fastweight::python {
namespace {

constexpr const char *kLayouts[] = {"kv", "vk"};

fw_state_layout layout_named(const char *label, const std::string &name) {
  for (fw_state_layout i = FW_STATE_KV; i <= FW_STATE_VK; ++i) {
    if (name == kLayouts[i]) return i;
  }
  throw_value_error({label, "state_layout"}, "is '" + name + "', allowed \"kv\", \"vk\"");
}

// A step of no token, whose state is `state`. cuda: as in Reading.
fw_recurrence describe(const fw_tensor &state, int64_t HV, int64_t K, int64_t V, int cuda) {
  fw_recurrence desc = {};
  desc.struct_size = sizeof desc;
  desc.op = FW_OP_LINEAR_ATTN;
  desc.state_layout = FW_STATE_OPAQUE;
  const int64_t key[] = {1, 0, 1, K}, value[] = {1, 0, HV, V};
  desc.q = desc.k = fw_dense(nullptr, FW_F32, 4, key);
  desc.v = desc.o = fw_dense(nullptr, FW_F32, 4, value);
  desc.state = state;
  if (cuda >= 0) {
    desc.device = FW_DEVICE_CUDA;
    desc.stream = cuda_stream(cuda);
  }
  return desc;
}

void check_read(const Place &place, const Reading &reading, const fw_tensor &view, int32_t ndim) {
  if (reading.requires_grad && is_torch_grad_enabled()) {
    throw_value_error(place, "requires grad, a state in the library's own layout has no gradient; call it under torch.no_grad() or "
                             "with detached tensors");
  }
  if (view.ndim != ndim) {
    throw_value_error(place, "has " + std::to_string(view.ndim) + " dimensions, expected " + std::to_string(ndim));
  }
}

}  // namespace

nb::object state_import(const nb::object &state, const std::string &state_layout, const nb::object &dtype) {
  const char *label = "state_import";
  const fw_state_layout layout = layout_named(label, state_layout);
  std::vector<nb::object> kept;
  fw_tensor plain = {};
  const Reading reading = read_array({label, "state"}, state.ptr(), false, &plain, &kept);
  check_read({label, "state"}, reading, plain, 4);
  const bool is_vk = layout == FW_STATE_VK;
  const int64_t slots = plain.shape[0], HV = plain.shape[1], K = plain.shape[is_vk ? 3 : 2], V = plain.shape[is_vk ? 2 : 3];
  const CudaGuard guard(reading.cuda);
  fw_recurrence desc = describe(fw_tensor{}, HV, K, V, reading.cuda);
  const std::shared_ptr<Context> context = default_context();
  int64_t elements = 0;
  check_status(fw_recurrence_opaque_size(context->get(), &desc, &elements));
  const int64_t shape[] = {slots, HV, elements};
  fw_tensor view = fw_dense(nullptr, dtype.is_none() ? plain.dtype : read_dtype({label, "dtype"}, dtype.ptr()), 3, shape);
  nb::object made = make_array({label, "state"}, reading.is_torch, nullptr, &view, reading.cuda);
  if (slots == 0) return made;
  desc.state = view;
  check_status(fw_recurrence_state_import(context->get(), &desc, &plain, layout));
  return made;
}

nb::object state_export(const nb::object &state, int64_t K, int64_t V, const std::string &state_layout, const nb::object &dtype) {
  const char *label = "state_export";
  const fw_state_layout layout = layout_named(label, state_layout);
  std::vector<nb::object> kept;
  fw_tensor opaque = {};
  const Reading reading = read_array({label, "state"}, state.ptr(), false, &opaque, &kept);
  check_read({label, "state"}, reading, opaque, 3);
  const bool is_vk = layout == FW_STATE_VK;
  const int64_t slots = opaque.shape[0], HV = opaque.shape[1];
  const int64_t shape[] = {slots, HV, is_vk ? V : K, is_vk ? K : V};
  fw_tensor view = fw_dense(nullptr, dtype.is_none() ? opaque.dtype : read_dtype({label, "dtype"}, dtype.ptr()), 4, shape);
  const CudaGuard guard(reading.cuda);
  fw_recurrence desc = describe(opaque, HV, K, V, reading.cuda);
  const std::shared_ptr<Context> context = default_context();
  int64_t elements = 0;
  check_status(fw_recurrence_opaque_size(context->get(), &desc, &elements));  // refuses K and V that no state has
  if (elements != opaque.shape[2]) {
    throw_value_error({label, "state"}, "has " + std::to_string(opaque.shape[2]) + " elements a head, expected " + std::to_string(elements) +
                                            " for K = " + std::to_string(K) + " and V = " + std::to_string(V));
  }
  nb::object made = make_array({label, "state"}, reading.is_torch, nullptr, &view, reading.cuda);
  if (slots == 0) return made;
  check_status(fw_recurrence_state_export(context->get(), &desc, &view, layout));
  return made;
}

}  // namespace fastweight::python
