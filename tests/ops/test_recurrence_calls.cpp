// SPDX-License-Identifier: Apache-2.0
// How a call may be made: opaque states, gradients of some operands only, older and newer structs, operands that
// share memory, fused buffers, and a batch entry or a head computed alone.
#include "harness_pieces.hpp"

namespace fw::test {
namespace {

std::vector<Spec> rows() {
  std::vector<Spec> all = named_rows();
  for (Spec &s : all) {
    s.dtype = FW_F32 + s.op % 3;
    s.T = 21, s.K = 9, s.V = 11;
    if (s.n_sub > 1) s.n_sub = 2;
    if (s.op == FW_OP_LINEAR_ATTN) s.normalizer = FW_NORMALIZER_SUM;
  }
  return all;
}

// Import, steps in the opaque layout, export: the bits of the same steps in a plain layout.
TEST(Calls, OpaqueStateIsThePlainState) {
  for (Spec spec : rows()) {
    for (int64_t state_dtype : {FW_F32, FW_BF16, FW_F16}) {
      for (int64_t layout : {FW_STATE_KV, FW_STATE_VK}) {
        spec.state_dtype = state_dtype, spec.layout = layout;
        const Operands all = rounded_operands(spec, true);
        const std::vector<int64_t> indices = {3, 1};
        for (const Path &path : paths(FW_STEP)) {
          const Context &context = forced(path.impl);
          const Outputs plain = run_path(path, spec, all, FW_STEP, indices);
          Call call(spec, all, FW_STEP, indices);
          const fw_tensor outside = call.desc.state;
          int64_t elements = 0;
          ASSERT_EQ(fw_recurrence_opaque_size(context.get(), &call.desc, &elements), FW_OK) << fw_last_error();
          ASSERT_GE(elements, spec.K * spec.V);
          Buffer opaque({outside.shape[0], spec.HV(), elements}, static_cast<fw_dtype>(state_dtype),
                        Strides::kPadded);
          call.desc.state = opaque.tensor();
          call.desc.state_layout = FW_STATE_OPAQUE;
          call.desc.form = path.form;
          uint64_t bytes = 0;
          ASSERT_EQ(fw_recurrence_workspace_size(context.get(), &call.desc, FW_STEP, &bytes), FW_OK)
              << fw_last_error();
          Memory workspace(bytes);
          const auto verbs = [&](const fw_recurrence &d, const fw_recurrence_grads &, void *memory, const Call::Moved &moved) {
            const fw_tensor plain_state = moved(outside);
            const fw_state_layout of_plain = static_cast<fw_state_layout>(layout);
            FW_TRY(fw_recurrence_state_import(context.get(), &d, &plain_state, of_plain));
            FW_TRY(fw_recurrence_step(context.get(), &d, memory, bytes));
            EXPECT_EQ(fw_last_impl(), path.impl);
            return fw_recurrence_state_export(context.get(), &d, &plain_state, of_plain);
          };
          ASSERT_EQ(call.with_memory(context, {&opaque}, workspace, verbs), FW_OK) << fw_last_error();
          EXPECT_TRUE(opaque.gaps_are_unchanged());
          EXPECT_TRUE(workspace.guards_are_unchanged());
          for (const auto &[name, values] : plain.values) {
            EXPECT_EQ(first_difference(values, call.outputs.at(name)->values()), "")
                << name << ", " << path.impl << ": " << text(spec);
          }
        }
      }
    }
  }
}

// Import and export lose nothing, between any two layouts.
TEST(Calls, OpaqueRoundTrip) {
  const Context context("");
  Spec spec = spec_of(FW_OP_GLA);
  Call call(spec, rounded_operands(spec, true), FW_STEP);
  const Buffer &given_state = *call.outputs.at("state");
  fw_tensor plain = call.desc.state;
  int64_t elements = 0;
  ASSERT_EQ(fw_recurrence_opaque_size(context.get(), &call.desc, &elements), FW_OK);
  Buffer opaque({4, 4, elements}, FW_F32, Strides::kDense),
      exported({4, 4, spec.V, spec.K}, FW_F32, Strides::kNegative);
  call.desc.state = opaque.tensor();
  call.desc.state_layout = FW_STATE_OPAQUE;
  Memory nothing(0);
  const auto verbs = [&](const fw_recurrence &d, const fw_recurrence_grads &, void *, const Call::Moved &moved) {
    const fw_tensor from = moved(plain), to = moved(exported.tensor());
    FW_TRY(fw_recurrence_state_import(context.get(), &d, &from, FW_STATE_KV));
    return fw_recurrence_state_export(context.get(), &d, &to, FW_STATE_VK);
  };
  ASSERT_EQ(call.with_memory(context, {&opaque, &exported}, nothing, verbs), FW_OK) << fw_last_error();
  EXPECT_TRUE(exported.gaps_are_unchanged());
  EXPECT_TRUE(given_state.is_unchanged());
  const Values kv = given_state.values(), vk = exported.values();
  for (int64_t i = 0; i < kv.count(); ++i) {
    const int64_t head = i / (spec.K * spec.V), k = i / spec.V % spec.K, v = i % spec.V;
    ASSERT_EQ(kv.data[static_cast<size_t>(i)], vk.data[static_cast<size_t>((head * spec.V + v) * spec.K + k)]);
  }
}

// Each gradient alone has the bits that it has among all others; incoming gradients that are absent are zeros.
TEST(Calls, SomeGradients) {
  for (Spec spec : rows()) {
    if (has_gate_tensor(spec)) spec.gate_input = FW_GATE_INPUT_BOUNDED, spec.parameters = 1;
    const Operands all = rounded_operands(spec);
    for (const Path &path : paths(FW_BACKWARD)) {
      const Outputs whole = run_path(path, spec, all, FW_BACKWARD);
      for (const OutGradField &field : grad_outputs()) {
        if (!all.count(field.of)) continue;
        Call call(spec, all, FW_BACKWARD);
        for (const OutGradField &other : grad_outputs()) {
          if (std::string(other.name) == field.name) continue;
          call.grads.*other.member = fw_tensor{};
          call.outputs.erase(other.name);
        }
        const Outputs one = call.run(forced(path.impl));
        ASSERT_EQ(one.status, FW_OK) << one.error;
        ASSERT_EQ(one.values.size(), 1u);
        EXPECT_EQ(first_difference(whole.values.at(field.name), one.values.at(field.name)), "")
            << field.name << " alone, " << path.impl << ": " << text(spec);
      }
      for (const char *absent : {"d_o", "d_final_state", "d_final_z"}) {
        if (!all.count(absent)) continue;
        Operands zeros = all, without = all;
        std::fill(zeros.at(absent).data.begin(), zeros.at(absent).data.end(), 0.0);
        without.erase(absent);
        const Outputs a = run_path(path, spec, zeros, FW_BACKWARD), b = run_path(path, spec, without, FW_BACKWARD);
        for (const auto &[name, values] : a.values) {
          // 0 and -0 may differ
          for (size_t i = 0; i < values.data.size(); ++i) {
            ASSERT_EQ(values.data[i], b.values.at(name).data[i])
                << name << " without " << absent << ", " << path.impl;
          }
        }
      }
    }
  }
}

// No initial state is a state of zeros, in both directions.
TEST(Calls, NoInitialStateIsZeros) {
  for (const Spec &spec : rows()) {
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD}) {
      Operands zeros = rounded_operands(spec), without = zeros;
      for (const char *name : {"initial_state", "initial_z"}) {
        if (!zeros.count(name)) continue;
        std::fill(zeros.at(name).data.begin(), zeros.at(name).data.end(), 0.0);
        without.erase(name);
      }
      for (const Path &path : paths(direction)) {
        const Outputs a = run_path(path, spec, zeros, direction), b = run_path(path, spec, without, direction);
        for (const auto &[name, values] : b.values) {
          for (size_t i = 0; i < values.data.size(); ++i) {
            ASSERT_EQ(values.data[i], a.values.at(name).data[i]) << name << ", " << path.impl << ": " << text(spec);
          }
        }
      }
    }
  }
}

// A caller compiled against an older header has a shorter struct; a newer caller a longer one, zero where unknown.
TEST(Calls, StructsOfOtherVersions) {
  const Context context("");
  const Spec spec = spec_of(FW_OP_KDA);
  const Operands all = rounded_operands(spec);
  const Outputs expected = run_call(context, spec, all, FW_FORWARD);
  Call older(spec, all, FW_FORWARD);
  older.desc.struct_size = offsetof(fw_recurrence, saved);
  older.desc.saved = &older;  // not read
  older.desc.saved_size = 1;
  expect_same_bits(expected, older.run(context), "older");
  struct Newer { fw_recurrence desc; unsigned char more[40]; } newer = {};
  Call call(spec, all, FW_FORWARD);
  newer.desc = call.desc;
  newer.desc.struct_size = sizeof newer;
  uint64_t bytes = 0;
  ASSERT_EQ(fw_recurrence_workspace_size(context.get(), &newer.desc, FW_FORWARD, &bytes), FW_OK) << fw_last_error();
  Memory workspace(bytes);
  const auto verb = [&](const fw_recurrence &d, const fw_recurrence_grads &, void *memory, const Call::Moved &) {
    newer.desc = d;
    newer.desc.struct_size = sizeof newer;
    return fw_recurrence_forward(context.get(), &newer.desc, memory, bytes);
  };
  ASSERT_EQ(call.with_memory(context, {}, workspace, verb), FW_OK) << fw_last_error();
  EXPECT_EQ(first_difference(call.outputs.at("o")->values(), expected.values.at("o")), "");
  newer.more[33] = 1;
  EXPECT_EQ(fw_recurrence_forward(context.get(), &newer.desc, workspace.data(), bytes), FW_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fw_last_error()).find("allowed 0"), std::string::npos) << fw_last_error();
}

// Inputs may be one another; outputs may be slices of one buffer.
TEST(Calls, SharedAndFusedMemory) {
  Spec spec = spec_of(FW_OP_DELTA_RULE);
  spec.T = 21, spec.group = 1, spec.K = spec.V = 9;
  Operands all = rounded_operands(spec);
  all["q"] = all["v"] = all["k"];
  for (const Path &path : paths(FW_BACKWARD)) {
    const Outputs expected = run_path(path, spec, all, FW_BACKWARD);
    Call call(spec, all, FW_BACKWARD);
    call.desc.q = call.desc.v = call.desc.k;
    Buffer fused({spec.B, spec.T, spec.H, 3 * spec.K}, FW_F32, Strides::kDense);
    fw_tensor *const slices[] = {&call.grads.dq, &call.grads.dk, &call.grads.dv};
    for (int i = 0; i < 3; ++i) {
      for (int axis = 0; axis < 4; ++axis) slices[i]->strides[axis] = fused.tensor().strides[axis];
      slices[i]->data = static_cast<float *>(fused.tensor().data) + i * spec.K;
    }
    call.desc.form = path.form;
    call.more = {&fused};
    const Outputs out = call.run(forced(path.impl));
    ASSERT_EQ(out.status, FW_OK) << out.error;
    EXPECT_TRUE(fused.gaps_are_unchanged());
    const Values all_three = fused.values();
    int64_t i = 0;
    for (const char *name : {"dq", "dk", "dv"}) {
      EXPECT_EQ(first_difference(cut(all_three, 3, i * spec.K, (i + 1) * spec.K), expected.values.at(name)), "")
          << name;
      ++i;
    }
  }
}

// A packed step gives each sequence what it gets alone, in its own slot of the pool.
TEST(Calls, PackedStepsAreSeparate) {
  for (Spec spec : rows()) {
    spec.B = 1, spec.T = 13, spec.pack = 4, spec.offsets = {0, 5, 5, 6, 11};
    const std::vector<int64_t> slots = {4, 1, 0, 3};
    const Operands all = rounded_operands(spec, true);
    for (const Path &path : paths(FW_STEP)) {
      const Outputs packed = run_path(path, spec, all, FW_STEP, slots);
      Outputs joined = packed;
      std::fill(joined.values.at("o").data.begin(), joined.values.at("o").data.end(), 0.0);
      Operands states = all;
      for (size_t n = 0; n < slots.size(); ++n) {
        Spec one = spec;
        one.T = spec.offsets[n + 1] - spec.offsets[n], one.pack = 0, one.offsets.clear();
        Operands part = tokens_between(spec, all, spec.offsets[n], spec.offsets[n + 1]);
        for (const char *name : {"state", "state_z"}) {
          if (states.count(name)) part[name] = states.at(name);
        }
        const Outputs alone = run_path(path, one, part, FW_STEP, {slots[n]});
        paste(joined.values.at("o"), 1, spec.offsets[n], alone.values.at("o"));
        for (const char *name : {"state", "state_z"}) {
          if (alone.values.count(name)) states[name] = joined.values[name] = alone.values.at(name);
        }
      }
      expect_same_bits(packed, joined, path.impl + ": " + text(spec));
    }
  }
}

// form auto is chunk; what the options allow is not needed on a CPU.
TEST(Calls, AutoIsChunkAndOptionsChangeNoBit) {
  for (const Spec &spec : rows()) {
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP}) {
      const Operands all = rounded_operands(spec, direction == FW_STEP);
      for (const Path &path : paths(direction)) {
        if (direction == FW_FORWARD && path.form != FW_FORM_CHUNK) continue;
        const Outputs expected = run_path(path, spec, all, direction);
        Call automatic(spec, all, direction);
        automatic.desc.form = FW_FORM_AUTO;
        expect_same_bits(expected, automatic.run(forced(path.impl)), "auto, " + path.impl + ": " + text(spec));
        Call free(spec, all, direction);
        free.desc.options = FW_BATCH_INVARIANT | FW_ALLOW_TF32;
        expect_same_bits(expected, free.run(forced(path.impl)), "options, " + path.impl + ": " + text(spec));
      }
    }
  }
}

// A batch entry, or one query head with its value heads, gives alone the bits that it gives among others.
TEST(Calls, BatchEntryAndHeadAlone) {
  for (Spec spec : rows()) {
    spec.B = 3, spec.H = 3, spec.group = 2;
    if (row_of(spec).has_fixed_gate) continue;  // the decay depends on the number of heads
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP}) {
      const Operands all = rounded_operands(spec, direction == FW_STEP);
      for (const Path &path : paths(direction)) {
        const Outputs whole = run_path(path, spec, all, direction);
        Spec one = spec;
        one.B = 1, one.H = 1;
        Operands part;
        const auto select = [&](const std::string &name, const Values &v) {
          const size_t axis = is_parameter_name(name) ? 0 : is_state_name(name) ? 1 : 2;
          const int64_t per_head = v.shape[axis] / spec.H;
          const Values head = cut(v, axis, per_head, 2 * per_head);
          return is_parameter_name(name) ? head : cut(head, 0, 2, 3);
        };
        for (const auto &[name, v] : all) part[name] = select(name, v);
        const Outputs alone = run_path(path, one, part, direction);
        for (const auto &[name, values] : alone.values) {
          EXPECT_EQ(first_difference(values, select(name, whole.values.at(name))), "")
              << name << ", " << path.impl << " " << direction_name(direction) << ": " << text(spec);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fw::test
