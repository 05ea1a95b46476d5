// SPDX-License-Identifier: Apache-2.0
// One call through the C interface: descriptor from a Spec and its operands, outputs and workspace poisoned with NaN,
// and after the call everything that must not have changed is compared byte by byte.
#pragma once
#include <gtest/gtest.h>
#include <stdlib.h>

#include <functional>
#include <initializer_list>
#include <memory>

#include "harness_device.hpp"
#include "harness_spec.hpp"

namespace fw::test {

struct DescField { const char *name; fw_tensor fw_recurrence::*member; };
struct GradField { const char *name; fw_tensor fw_recurrence_grads::*member; };
struct OutGradField { const char *name, *of; fw_tensor fw_recurrence_grads::*member; };

inline const std::vector<DescField> &desc_inputs() {
  using D = fw_recurrence;
  static const std::vector<DescField> fields = {{"q", &D::q},
                                                {"k", &D::k},
                                                {"v", &D::v},
                                                {"a", &D::a},
                                                {"b", &D::b},
                                                {"p", &D::p},
                                                {"erase_gate", &D::erase_gate},
                                                {"write_gate", &D::write_gate},
                                                {"g", &D::g},
                                                {"beta", &D::beta},
                                                {"a_log", &D::a_log},
                                                {"dt_bias", &D::dt_bias},
                                                {"initial_state", &D::initial_state},
                                                {"initial_z", &D::initial_z}};
  return fields;
}
inline const std::vector<GradField> &grad_inputs() {
  using G = fw_recurrence_grads;
  static const std::vector<GradField> fields = {
      {"d_o", &G::d_o}, {"d_final_state", &G::d_final_state}, {"d_final_z", &G::d_final_z}};
  return fields;
}
inline const std::vector<OutGradField> &grad_outputs() {
  using G = fw_recurrence_grads;
  static const std::vector<OutGradField> fields = {{"dq", "q", &G::dq},
                                                   {"dk", "k", &G::dk},
                                                   {"dv", "v", &G::dv},
                                                   {"da", "a", &G::da},
                                                   {"db", "b", &G::db},
                                                   {"dp", "p", &G::dp},
                                                   {"d_erase_gate", "erase_gate", &G::d_erase_gate},
                                                   {"d_write_gate", "write_gate", &G::d_write_gate},
                                                   {"dg", "g", &G::dg},
                                                   {"dbeta", "beta", &G::dbeta},
                                                   {"d_a_log", "a_log", &G::d_a_log},
                                                   {"d_dt_bias", "dt_bias", &G::d_dt_bias},
                                                   {"d_initial_state", "initial_state", &G::d_initial_state},
                                                   {"d_initial_z", "initial_z", &G::d_initial_z}};
  return fields;
}

// A context with a forced implementation (nullptr: free).
class Context {
 public:
  explicit Context(const char *force_impl = nullptr, int32_t n_threads = 1) {
    fw_context_options options = {};
    options.struct_size = sizeof options;
    options.n_threads = n_threads;
    options.force_impl = force_impl;
    if (force_impl && strncmp(force_impl, "reference", 9) == 0) is_on_cuda_ = false;
    EXPECT_EQ(fw_context_create(&options, &context_), FW_OK) << fw_last_error();
  }
  explicit Context(const fw_context_options &options) {
    EXPECT_EQ(fw_context_create(&options, &context_), FW_OK) << fw_last_error();
  }
  ~Context() { fw_context_destroy(context_); }
  Context(const Context &) = delete;
  Context &operator=(const Context &) = delete;
  fw_context *get() const { return context_; }
  // The references compute on the CPU, whatever device is under test.
  bool runs_on_cuda() const { return is_on_cuda_; }

 private:
  fw_context *context_ = nullptr;
  bool is_on_cuda_ = is_on_cuda();
};

// Bytes for a workspace or saved buffer at an odd address, NaN inside, guard bands outside.
class Memory {
 public:
  explicit Memory(uint64_t size) : size_(size), bytes_(size + 2 * kGuard + 1, 0xff) {}
  void *data() { return bytes_.data() + kGuard + 1; }
  void *data_with_guards() { return bytes_.data() + 1; }
  uint64_t size() const { return size_; }
  bool guards_are_unchanged() const {
    for (size_t i = 0; i < kGuard; ++i) {
      if (bytes_[i] != 0xff || bytes_[kGuard + 1 + size_ + i] != 0xff) return false;
    }
    return true;
  }
  static constexpr size_t kGuard = 64;

 private:
  uint64_t size_;
  std::vector<unsigned char> bytes_;
};

struct Outputs {
  fw_status status = FW_OK;
  std::string error, impl;
  std::map<std::string, Values> values;
  std::map<std::string, std::vector<uint64_t>> bits;
};

// Everything a call needs; may be changed between construction and `run`.
struct Call {
  Spec spec;
  fw_direction direction;
  fw_recurrence desc = {};
  fw_recurrence_grads grads = {};
  std::map<std::string, std::unique_ptr<Buffer>> inputs, outputs;
  bool uses_saved = false;
  std::vector<Buffer *> more;  // buffers of the test that tensors of the call point into

  // `operands` are rounded to the types of the spec here; a spec of fp64 keeps them. indices: step only, may be
  // empty.
  Call(const Spec &s, const Operands &operands, fw_direction d, const std::vector<int64_t> &indices = {})
      : spec(s), direction(d) {
    desc.struct_size = sizeof desc;
    grads.struct_size = sizeof grads;
    desc.device = is_on_cuda() ? FW_DEVICE_CUDA : FW_DEVICE_CPU;
    desc.op = static_cast<fw_op>(s.op);
    desc.gate = static_cast<fw_gate>(s.gate);
    desc.erase = static_cast<fw_erase>(s.erase);
    desc.form = static_cast<fw_form>(s.form);
    desc.state_layout = static_cast<fw_state_layout>(s.layout);
    desc.normalizer = static_cast<fw_normalizer>(s.normalizer);
    desc.qk_norm = static_cast<fw_qk_norm>(s.qk_norm);
    desc.gate_input = static_cast<fw_gate_input>(s.gate_input);
    desc.beta_input = static_cast<fw_beta_input>(s.beta_input);
    desc.n_sub = static_cast<int32_t>(s.n_sub);
    desc.layer_idx = static_cast<int32_t>(s.layer_idx);
    desc.num_layers = static_cast<int32_t>(s.num_layers);
    desc.scale = static_cast<double>(s.scale_milli) / 1000;
    for (const DescField &field : desc_inputs()) {
      if (operands.count(field.name)) desc.*field.member = add_input(field.name, operands.at(field.name));
    }
    if (s.pack > 0) {
      Values offsets = make_values({s.pack + 1});
      const std::vector<int64_t> at = offsets_of(s);
      for (size_t i = 0; i < at.size(); ++i) offsets.data[i] = static_cast<double>(at[i]);
      inputs["cu_seqlens"] = std::make_unique<Buffer>(offsets, s.seed % 2 ? FW_I32 : FW_I64, Strides::kDense);
      desc.cu_seqlens = inputs["cu_seqlens"]->tensor();
    }
    const std::vector<int64_t> o_shape = {s.B, s.T, s.HV(), s.V};
    if (d != FW_BACKWARD) desc.o = add_output("o", o_shape);
    if (d == FW_FORWARD && s.final) {
      const bool is_vk = s.layout == FW_STATE_VK;
      desc.final_state = add_output("final_state", {s.N(), s.HV(), is_vk ? s.V : s.K, is_vk ? s.K : s.V});
      if (s.normalizer) desc.final_z = add_output("final_z", {s.N(), s.H, s.K});
    }
    if (d == FW_STEP) add_states(operands, indices);
    if (d == FW_BACKWARD) {
      for (const GradField &field : grad_inputs()) {
        if (operands.count(field.name)) grads.*field.member = add_input(field.name, operands.at(field.name));
      }
      for (const OutGradField &field : grad_outputs()) {
        if (operands.count(field.of)) grads.*field.member = add_output(field.name, operands.at(field.of).shape);
      }
    }
  }

  Outputs run(const Context &context) {
    Outputs out;
    uint64_t bytes = 0;
    desc.device = context.runs_on_cuda() ? FW_DEVICE_CUDA : FW_DEVICE_CPU;
    out.status = fw_recurrence_workspace_size(context.get(), &desc, direction, &bytes);
    if (out.status != FW_OK) return failed(out);
    Memory workspace(bytes);
    out.status = with_memory(context, {}, workspace, [&](const fw_recurrence &d, const fw_recurrence_grads &g, void *memory, const Moved &) {
      return run_verb(context, d, g, memory, bytes);
    });
    if (out.status != FW_OK) return failed(out);
    out.impl = fw_last_impl();
    EXPECT_TRUE(workspace.guards_are_unchanged()) << "workspace overrun: " << text(spec);
    for (const auto &[name, buffer] : inputs)
      EXPECT_TRUE(buffer->is_unchanged()) << name << " was written: " << text(spec);
    for (const auto &[name, buffer] : outputs) {
      EXPECT_TRUE(buffer->gaps_are_unchanged()) << name << " was written outside its elements: " << text(spec);
      out.values[name] = buffer->values();
      out.bits[name] = buffer->element_bits();
    }
    return out;
  }

  // fw_recurrence_check, of values too, where the context computes.
  fw_status check_values(const Context &context) {
    Memory none(0);
    desc.options |= FW_CHECK_VALUES;
    return with_memory(context, {}, none, [&](const fw_recurrence &d, const fw_recurrence_grads &g, void *, const Moved &) {
      return fw_recurrence_check(context.get(), &d, direction == FW_BACKWARD ? &g : nullptr, direction);
    });
  }

  using Moved = std::function<fw_tensor(fw_tensor)>;
  // f(desc, grads, workspace, moved) with everything where the context computes: on CUDA the buffers of the call, `more`, `own`, the saved
  // buffer and the workspace are there as copies that come back afterwards, and moved(t) is where a tensor of theirs lies.
  template <class F>
  fw_status with_memory(const Context &context, std::initializer_list<Buffer *> own, Memory &workspace, F f) {
    (void)own;
    if (!context.runs_on_cuda()) return f(desc, grads, workspace.data(), [](fw_tensor t) { return t; });
#if defined(FW_HAVE_CUDA)
    DeviceMirror mirror;
    const auto add = [&](Buffer &b) { mirror.add(b.bytes(), static_cast<size_t>(b.end() - b.begin())); };
    for (auto *buffers : {&inputs, &outputs}) {
      for (auto &[name, buffer] : *buffers) add(*buffer);
    }
    for (Buffer *buffer : own) add(*buffer);
    for (Buffer *buffer : more) add(*buffer);
    const Moved moved = [&](fw_tensor t) {
      t.data = mirror.find(t.data);
      return t;
    };
    fw_recurrence d = desc;
    fw_recurrence_grads g = grads;
    for (const DescField &field : desc_inputs()) d.*field.member = moved(d.*field.member);
    for (fw_tensor *t : {&d.cu_seqlens, &d.o, &d.final_state, &d.final_z, &d.state, &d.state_z, &d.state_indices}) *t = moved(*t);
    for (const GradField &field : grad_inputs()) g.*field.member = moved(g.*field.member);
    for (const OutGradField &field : grad_outputs()) g.*field.member = moved(g.*field.member);
    if (d.saved && d.struct_size == sizeof d) d.saved = mirror.add(d.saved, d.saved_size);
    // the workspace with its guard bands, its first byte where the device's memory is aligned
    char *guarded = static_cast<char *>(mirror.add(workspace.data_with_guards(), workspace.size() + 2 * Memory::kGuard));
    d.stream = mirror.stream();
    mirror.settle();
    const fw_status status = f(d, g, workspace.size() ? guarded + Memory::kGuard : nullptr, moved);
    mirror.fetch();
    return status;
#else
    throw std::runtime_error("FW_TEST_DEVICE is cuda, this build has none");
#endif
  }

 private:
  fw_status run_verb(const Context &context, const fw_recurrence &d, const fw_recurrence_grads &g, void *workspace,
                     uint64_t bytes) const {
    if (direction == FW_FORWARD) return fw_recurrence_forward(context.get(), &d, workspace, bytes);
    if (direction == FW_BACKWARD) return fw_recurrence_backward(context.get(), &d, &g, workspace, bytes);
    return fw_recurrence_step(context.get(), &d, workspace, bytes);
  }
  Strides strides() const { return static_cast<Strides>(spec.strides); }
  // Outputs must not overlap themselves, so they are padded where inputs are broadcast.
  Strides output_strides() const { return strides() == Strides::kBroadcast ? Strides::kPadded : strides(); }
  Strides input_strides(const std::string &name, const Values &v) const {
    const bool has_rows =
        v.shape.size() >= 3 && name.find("state") == std::string::npos && name.find("_z") == std::string::npos;
    return strides() == Strides::kBroadcast && !has_rows ? Strides::kPadded : strides();
  }

  fw_tensor add_input(const std::string &name, const Values &values) {
    inputs[name] = std::make_unique<Buffer>(values, dtype_of(spec, name), input_strides(name, values));
    return inputs[name]->tensor();
  }
  fw_tensor add_output(const std::string &name, const std::vector<int64_t> &shape) {
    outputs[name] = std::make_unique<Buffer>(shape, dtype_of(spec, name), output_strides());
    return outputs[name]->tensor();
  }
  void add_states(const Operands &operands, const std::vector<int64_t> &indices) {
    for (const char *name : {"state", "state_z"}) {
      if (!operands.count(name)) continue;
      outputs[name] = std::make_unique<Buffer>(operands.at(name), dtype_of(spec, name), output_strides());
      (std::string(name) == "state" ? desc.state : desc.state_z) = outputs[name]->tensor();
    }
    if (indices.empty()) return;
    Values v = make_values({static_cast<int64_t>(indices.size())});
    for (size_t i = 0; i < indices.size(); ++i) v.data[i] = static_cast<double>(indices[i]);
    inputs["state_indices"] =
        std::make_unique<Buffer>(v, FW_I32, strides() == Strides::kDense ? Strides::kDense : Strides::kPadded);
    desc.state_indices = inputs["state_indices"]->tensor();
  }
  // A refusal writes nothing.
  Outputs failed(Outputs out) const {
    out.error = fw_last_error();
    for (const auto &[name, buffer] : inputs)
      EXPECT_TRUE(buffer->is_unchanged()) << name << " was written: " << text(spec);
    for (const auto &[name, buffer] : outputs)
      EXPECT_TRUE(buffer->is_unchanged()) << name << " was written: " << text(spec);
    return out;
  }
};

inline Outputs run_call(const Context &context, const Spec &spec, const Operands &operands, fw_direction direction,
                        const std::vector<int64_t> &indices = {}) {
  Call call(spec, operands, direction, indices);
  return call.run(context);
}

// The same problem with every operand fp64, by the token-by-token reference.
inline Spec as_f64(Spec spec) {
  spec.dtype = spec.gate_dtype = spec.state_dtype = FW_F64;
  spec.o_dtype = FW_NONE;
  spec.form = FW_FORM_RECURRENT;
  spec.strides = 0;
  return spec;
}
inline Outputs truth(const Spec &spec, const Operands &operands, fw_direction direction,
                     const std::vector<int64_t> &indices = {}) {
  static const Context context("reference_recurrent", 1);
  Outputs out = run_call(context, as_f64(spec), operands, direction, indices);
  EXPECT_EQ(out.status, FW_OK) << out.error << ": " << text(spec);
  return out;
}

}  // namespace fw::test
