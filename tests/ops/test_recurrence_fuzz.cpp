// SPDX-License-Identifier: Apache-2.0
// Malformed descriptors: a valid call with random fields set to random or extreme values, handed to every function of
// the family, to the copies of states and to the functions of forms.h. Each must return a status and a sentence and
// must not crash, write past a buffer or read what it was not given. FW_FUZZ_COUNT: descriptors (20000, with
// FW_TEST_FULL=1 a million; a quarter of it for copies and for forms); FW_FUZZ_SEED: of the first (1); a failing one
// is run alone with the count and the seed that it prints. Seeds that once failed are kept in the list below.
#include "fuzz_forms.hpp"
#include "harness_pieces.hpp"

namespace fw::test {
namespace {

uint64_t number(const char *name, uint64_t usual) {
  const char *value = getenv(name);
  return value && *value ? strtoull(value, nullptr, 10) : usual;
}

uint64_t n_descriptors() { return number("FW_FUZZ_COUNT", is_full() ? 1000000 : 20000); }

int64_t strange(Random &random) {
  static const int64_t values[] = {0,
                                   1,
                                   -1,
                                   2,
                                   -2,
                                   3,
                                   7,
                                   8,
                                   255,
                                   256,
                                   512,
                                   513,
                                   65536,
                                   INT32_MAX,
                                   INT32_MIN,
                                   int64_t{1} << 32,
                                   int64_t{1} << 40,
                                   int64_t{1} << 58,
                                   int64_t{1} << 62,
                                   INT64_MAX,
                                   INT64_MIN};
  if (random.chance(0.2)) return static_cast<int64_t>(random.bits());
  if (random.chance(0.3)) return random.integer(-3, 20);
  return values[random.integer(0, sizeof values / sizeof values[0] - 1)];
}
double strange_real(Random &random) {
  static const double values[] = {0,
                                  1,
                                  -1,
                                  1e-300,
                                  1e300,
                                  -1e300,
                                  static_cast<double>(INFINITY),
                                  -static_cast<double>(INFINITY),
                                  static_cast<double>(NAN),
                                  5e-324};
  return random.chance(0.3) ? random.normal() : values[random.integer(0, sizeof values / sizeof values[0] - 1)];
}

std::vector<fw_tensor *> tensors_of(Call &call) {
  fw_recurrence &d = call.desc;
  std::vector<fw_tensor *> all;
  for (const DescField &field : desc_inputs()) all.push_back(&(d.*field.member));
  for (fw_tensor *t : {&d.cu_seqlens, &d.o, &d.final_state, &d.final_z, &d.state, &d.state_z, &d.state_indices})
    all.push_back(t);
  for (const GradField &field : grad_inputs()) all.push_back(&(call.grads.*field.member));
  for (const OutGradField &field : grad_outputs()) all.push_back(&(call.grads.*field.member));
  return all;
}

// A tensor is only ever made smaller or moved inside what it had, or becomes impossible: whatever is accepted is in
// bounds.
void damage_tensor(fw_tensor &t, Random &random) {
  switch (random.integer(0, 9)) {
    case 0: t.dtype = static_cast<fw_dtype>(random.chance(0.5) ? strange(random) : random.integer(-1, 7)); break;
    case 1: t.ndim = static_cast<int32_t>(strange(random)); break;
    case 2: t.data = nullptr; break;
    case 3: t = fw_tensor{}; break;
    case 4:
    case 5: t.shape[random.integer(0, FW_MAX_DIMS - 1)] = strange(random); break;
    case 6: {
      int64_t &size = t.shape[random.integer(0, FW_MAX_DIMS - 1)];
      if (size > INT64_MIN) --size;
      break;
    }
    case 7: t.strides[random.integer(0, FW_MAX_DIMS - 1)] = 0; break;
    case 8: std::swap(t.shape[random.integer(0, 3)], t.shape[random.integer(0, 3)]); break;
    default: t.strides[random.integer(0, FW_MAX_DIMS - 1)] = strange(random); break;
  }
}
void damage_setting(fw_recurrence &d, Random &random) {
  int32_t *const enums[] = {&d.op,           &d.gate,       &d.erase,     &d.form,       &d.device,
                            &d.state_layout, &d.normalizer, &d.qk_norm,   &d.gate_input, &d.beta_input,
                            &d.n_sub,        &d.layer_idx,  &d.num_layers};
  double *const reals[] = {&d.scale, &d.gate_normalizer, &d.gate_lower_bound, &d.g_min};
  switch (random.integer(0, 5)) {
    case 0: *reals[random.integer(0, 3)] = strange_real(random); break;
    case 1: d.options = static_cast<uint32_t>(strange(random)); break;
    case 2:
      d.struct_size = static_cast<uint32_t>(random.chance(0.5) ? strange(random) : random.integer(0, sizeof d));
      if (d.struct_size % 2) d.struct_size &= ~uint32_t{7};
      break;
    case 3: d.saved_size = static_cast<uint64_t>(strange(random)); break;
    default:
      *enums[random.integer(0, 12)] =
          static_cast<int32_t>(random.chance(0.6) ? random.integer(0, 4) : strange(random));
  }
}

// Whether every element that an accepted call may touch lies in the buffer that the tensor came from. What does not
// is given to the queries and to check only.
bool is_inside(const Call &call, const fw_tensor &t, const std::vector<const Buffer *> &buffers) {
  if (t.dtype == FW_NONE || !t.data) return true;
  if (t.ndim < 0 || t.ndim > FW_MAX_DIMS || dtype_size(t.dtype) == 0) return true;  // refused
  __int128 low = 0, high = 0;
  for (int32_t i = 0; i < t.ndim; ++i) {
    if (t.shape[i] <= 0) return true;  // empty, or refused
    const __int128 reach = static_cast<__int128>(t.shape[i] - 1) * t.strides[i];
    constexpr __int128 kFar = __int128{1} << 80;
    if (reach < -kFar || reach > kFar) return false;
    (reach < 0 ? low : high) += reach;
  }
  (void)call;
  for (const Buffer *buffer : buffers) {
    const unsigned char *begin = buffer->begin(), *end = buffer->end(),
                        *data = static_cast<const unsigned char *>(t.data);
    if (data < begin || data >= end) continue;
    const __int128 size = dtype_size(t.dtype);
    return data - begin + low * size >= 0 && data - begin + (high + 1) * size <= end - begin;
  }
  return false;
}

// Whether an output was moved into this buffer, which belonged to an input before the damage.
bool is_written(const Call &call, const Buffer &buffer) {
  const fw_recurrence &d = call.desc;
  std::vector<const fw_tensor *> outputs = {&d.o, &d.final_state, &d.final_z, &d.state, &d.state_z};
  for (const OutGradField &field : grad_outputs()) outputs.push_back(&(call.grads.*field.member));
  for (const fw_tensor *t : outputs) {
    const unsigned char *data = static_cast<const unsigned char *>(t->data);
    if (t->dtype != FW_NONE && data >= buffer.begin() && data < buffer.end()) return true;
  }
  return false;
}

struct Counts {
  int64_t accepted = 0, refused = 0, ran = 0;
};

void one_descriptor(uint64_t seed, const Context &context, Counts *counts) {
  Random random(seed);
  const std::vector<Spec> &rows = []() -> const std::vector<Spec> & {
    static const std::vector<Spec> all = [] {
      std::vector<Spec> list = option_rows();
      for (const Spec &s : axes_rows()) list.push_back(s);
      return list;
    }();
    return all;
  }();
  Spec spec = rows[static_cast<size_t>(random.integer(0, static_cast<int64_t>(rows.size()) - 1))];
  spec.T = random.integer(0, 5), spec.tail = 0, spec.K = random.integer(1, 6), spec.V = random.integer(1, 6);
  spec.dtype = random.integer(FW_F32, FW_F16);
  const fw_direction direction = static_cast<fw_direction>(random.integer(0, 2));
  std::vector<int64_t> indices;
  if (random.chance(0.5)) {
    for (int64_t n = 0; n < spec.N(); ++n) indices.push_back(n);
  }
  Call call(spec, rounded_operands(spec, direction == FW_STEP), direction, indices);
  std::vector<const Buffer *> buffers;
  for (const auto *map : {&call.inputs, &call.outputs}) {
    for (const auto &[name, buffer] : *map) buffers.push_back(buffer.get());
  }
  const std::vector<fw_tensor *> tensors = tensors_of(call);
  const int64_t n_damages = random.integer(1, 3);
  for (int64_t i = 0; i < n_damages; ++i) {
    if (random.chance(0.3)) {
      damage_setting(call.desc, random);
    } else {
      std::vector<fw_tensor *> given_ones;
      for (fw_tensor *t : tensors) {
        if (t->dtype != FW_NONE) given_ones.push_back(t);
      }
      const std::vector<fw_tensor *> &from = random.chance(0.9) && !given_ones.empty() ? given_ones : tensors;
      fw_tensor &t = *from[static_cast<size_t>(random.integer(0, static_cast<int64_t>(from.size()) - 1))];
      if (random.chance(0.1)) {
        t = *tensors[static_cast<size_t>(random.integer(0, static_cast<int64_t>(tensors.size()) - 1))];
      } else {
        damage_tensor(t, random);
      }
    }
  }
  if (random.chance(0.02)) call.grads.struct_size = static_cast<uint32_t>(strange(random));
  // struct_size past the struct would be read: only sizes inside it are the caller's honest mistakes
  if (call.desc.struct_size > sizeof call.desc && call.desc.struct_size <= 16384) call.desc.struct_size = 12;
  if (call.grads.struct_size > sizeof call.grads && call.grads.struct_size <= 16384) call.grads.struct_size = 12;

  // queries first: they look at no data, so every damage is allowed
  fw_recurrence_grads *grads = direction == FW_BACKWARD ? &call.grads : nullptr;
  uint64_t bytes = 0, saved_bytes = 0, needed = 0;
  int64_t tokens = 0, elements = 0;
  char lines[512];
  const fw_status size_status = fw_recurrence_workspace_size(context.get(), &call.desc, direction, &bytes);
  if (size_status != FW_OK) {
    EXPECT_GT(strlen(fw_last_error()), 10u);
    EXPECT_NE(strchr(fw_last_error(), ':'), nullptr) << fw_last_error();
  }
  fw_recurrence_saved_size(context.get(), &call.desc, &saved_bytes);
  fw_recurrence_chunk_length(context.get(), &call.desc, &tokens);
  fw_recurrence_opaque_size(context.get(), &call.desc, &elements);
  fw_recurrence_explain(context.get(), &call.desc, direction, lines, sizeof lines, &needed);
  bool is_safe = true;
  for (const fw_tensor *t : tensors) is_safe = is_safe && is_inside(call, *t, buffers);
  if (!is_safe && (call.desc.options & FW_CHECK_VALUES)) call.desc.options &= ~uint32_t{FW_CHECK_VALUES};
  const fw_status checked = fw_recurrence_check(context.get(), &call.desc, grads, direction);
  const std::string refusal = checked == FW_OK ? "" : fw_last_error();
  if (!is_safe) return;

  std::vector<unsigned char> workspace(size_status == FW_OK && bytes < (1 << 26) ? bytes : 64);
  fw_status status;
  if (direction == FW_FORWARD)
    status = fw_recurrence_forward(context.get(), &call.desc, workspace.data(), workspace.size());
  if (direction == FW_BACKWARD) {
    status = fw_recurrence_backward(context.get(), &call.desc, &call.grads, workspace.data(), workspace.size());
  }
  if (direction == FW_STEP)
    status = fw_recurrence_step(context.get(), &call.desc, workspace.data(), workspace.size());
  EXPECT_GE(status, FW_OK);
  EXPECT_LT(status, FW_INTERNAL);
  if (status == FW_OK) {
    // the promise g >= g_min is held by check alone, with FW_CHECK_VALUES
    EXPECT_TRUE(checked == FW_OK || refusal.find("allowed at least g_min") != std::string::npos)
        << "ran, but check refuses: " << refusal;
    EXPECT_EQ(size_status, FW_OK);
  }
  (status == FW_OK ? counts->accepted : counts->refused) += 1;
  for (const auto &[name, buffer] : call.inputs) {
    EXPECT_TRUE(buffer->is_unchanged() || (status == FW_OK && is_written(call, *buffer))) << name << " was written";
  }
  if (status == FW_OK) {
    ++counts->ran;
    return;
  }
  EXPECT_GT(strlen(fw_last_error()), 10u);
  for (const auto &[name, buffer] : call.outputs)
    EXPECT_TRUE(buffer->is_unchanged()) << name << " was written by a refusal";
}

TEST(Fuzz, MalformedDescriptors) {
  const uint64_t first = number("FW_FUZZ_SEED", 1), count = n_descriptors();
  const Context context("", 1);
  Counts counts;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    one_descriptor(seed, context, &counts);
    if (HasFailure()) {
      FAIL() << "seed " << seed << ": FW_FUZZ_SEED=" << seed << " FW_FUZZ_COUNT=1 ops_recurrence_fuzz";
    }
  }
  printf("seeds %llu to %llu: %lld refused, %lld accepted\n", static_cast<unsigned long long>(first),
         static_cast<unsigned long long>(first + count - 1), static_cast<long long>(counts.refused),
         static_cast<long long>(counts.accepted));
  if (count >= 1000) {  // both happen often, or the generator tests nothing
    EXPECT_GT(counts.refused, static_cast<int64_t>(count) / 10);
    EXPECT_GT(counts.accepted, static_cast<int64_t>(count) / 100);
  }
}

TEST(Fuzz, KeptSeeds) {
  const Context context("", 1);
  Counts counts;
  // g below a promised g_min, which check refuses and a run does not; final_state in the memory of a state that is
  // not given
  for (uint64_t seed : {2086267, 3107025}) one_descriptor(seed, context, &counts);
  EXPECT_EQ(counts.ran, 2);
}

// Import and export of an opaque state: descriptor, state and plain tensor damaged as above.
void one_state_copy(uint64_t seed, const Context &context, Counts *counts) {
  Random random(seed);
  Spec spec = spec_of(random.integer(1, FW_OP_COUNT - 1));
  spec.T = random.integer(0, 2), spec.K = random.integer(1, 6), spec.V = random.integer(1, 10);
  spec.dtype = random.integer(FW_F32, FW_F16);
  Call call(spec, rounded_operands(spec, true), FW_STEP);
  call.desc.state_layout = FW_STATE_OPAQUE;
  int64_t elements = 0;
  ASSERT_EQ(fw_recurrence_opaque_size(context.get(), &call.desc, &elements), FW_OK) << fw_last_error();
  const bool is_import = random.chance(0.5);
  const fw_state_layout layout = random.chance(0.5) ? FW_STATE_KV : FW_STATE_VK;
  const int64_t slots = spec.N() + random.integer(0, 2);
  const auto made = [&](const std::vector<int64_t> &shape, fw_dtype dtype, Strides strides) {
    Values values = make_values(shape);
    for (double &x : values.data) x = random.normal();
    return Buffer(values, dtype, strides);
  };
  const bool is_vk = layout == FW_STATE_VK;
  Buffer state =
      made({slots, spec.HV(), elements}, static_cast<fw_dtype>(random.integer(FW_F32, FW_F16)), Strides::kDense);
  Buffer plain = made({slots, spec.HV(), is_vk ? spec.V : spec.K, is_vk ? spec.K : spec.V},
                      static_cast<fw_dtype>(random.integer(FW_F32, FW_F16)),
                      random.chance(0.5) ? Strides::kDense : Strides::kNegative);
  fw_tensor to = plain.tensor();
  call.desc.state = state.tensor();
  fw_state_layout asked = layout;
  const int64_t n_damages = random.integer(0, 2);
  for (int64_t i = 0; i < n_damages; ++i) {
    switch (random.integer(0, 6)) {
      case 0: damage_setting(call.desc, random); break;
      case 1: damage_tensor(call.desc.state, random); break;
      case 2: damage_tensor(random.chance(0.5) ? call.desc.q : call.desc.v, random); break;
      case 3:
        asked = static_cast<fw_state_layout>(random.chance(0.5) ? random.integer(0, 3) : strange(random));
        break;
      case 4:
        (random.chance(0.5) ? to : call.desc.state) = random.chance(0.5) ? plain.tensor() : state.tensor();
        break;
      case 5: (random.chance(0.5) ? to : call.desc.state).data = state.tensor().data; break;
      default: damage_tensor(to, random);
    }
  }
  if (call.desc.struct_size > sizeof call.desc && call.desc.struct_size <= 16384) call.desc.struct_size = 12;
  fw_recurrence_opaque_size(context.get(), &call.desc, &elements);
  const std::vector<const Buffer *> buffers = {&state, &plain};
  if (!is_inside(call, call.desc.state, buffers) || !is_inside(call, to, buffers)) return;
  const fw_tensor *plain_or_none = random.chance(0.02) ? nullptr : &to;
  const fw_status status = is_import ? fw_recurrence_state_import(context.get(), &call.desc, plain_or_none, asked)
                                     : fw_recurrence_state_export(context.get(), &call.desc, plain_or_none, asked);
  (status == FW_OK ? counts->accepted : counts->refused) += 1;
  if (status == FW_OK) {
    const fw_tensor &source = is_import ? to : call.desc.state;
    for (const Buffer *buffer : buffers) {
      const unsigned char *data = static_cast<const unsigned char *>(source.data);
      const bool is_source = data >= buffer->begin() && data < buffer->end();
      EXPECT_TRUE(!is_source || numel(source) == 0 || buffer->is_unchanged()) << "the source was written";
    }
    return;
  }
  EXPECT_TRUE(status == FW_INVALID_ARGUMENT || status == FW_UNSUPPORTED) << status;  // the latter: another device
  EXPECT_NE(strchr(fw_last_error(), ':'), nullptr) << fw_last_error();
  EXPECT_TRUE(state.is_unchanged() && plain.is_unchanged()) << "a refusal wrote: " << fw_last_error();
}

template <class One>
void run_seeds(const char *what, uint64_t count, One one) {
  const uint64_t first = number("FW_FUZZ_SEED", 1);
  Counts counts;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    one(seed, &counts);
    if (testing::Test::HasFailure()) {
      FAIL() << "seed " << seed << ": FW_FUZZ_SEED=" << seed
             << " FW_FUZZ_COUNT=4 ops_recurrence_fuzz --gtest_filter=" << what;
    }
  }
  printf("%s: %lld refused, %lld accepted\n", what, static_cast<long long>(counts.refused),
         static_cast<long long>(counts.accepted));
  if (count >= 1000) {
    EXPECT_GT(counts.refused, static_cast<int64_t>(count) / 10);
    EXPECT_GT(counts.accepted, static_cast<int64_t>(count) / 10);
  }
}

TEST(Fuzz, StateCopies) {
  const Context context("", 1);
  run_seeds("Fuzz.StateCopies", n_descriptors() / 4,
            [&](uint64_t seed, Counts *counts) { one_state_copy(seed, context, counts); });
}

TEST(Fuzz, Forms) {
  run_seeds("Fuzz.Forms", n_descriptors() / 4, [](uint64_t seed, Counts *counts) {
    const FormCall call = seed % 2 ? one_form<FormsF64>(seed, strange) : one_form<FormsF32>(seed, strange);
    (call.status == FW_OK ? counts->accepted : counts->refused) += 1;
    EXPECT_LT(call.status, FW_INTERNAL);
    EXPECT_TRUE(call.inputs_unchanged) << "function " << call.function;
    if (call.status == FW_OK) return;
    EXPECT_NE(strchr(fw_last_error(), ':'), nullptr) << fw_last_error();
    EXPECT_TRUE(call.outputs_unchanged) << "function " << call.function << " refused and wrote: " << fw_last_error();
  });
}

// Bytes of chance in the whole struct.
TEST(Fuzz, RandomBytes) {
  const Context context("", 1);
  Random random(number("FW_FUZZ_SEED", 1));
  for (uint64_t i = 0; i < n_descriptors() / 4; ++i) {
    fw_recurrence d;
    unsigned char *bytes = reinterpret_cast<unsigned char *>(&d);
    const double density = random.uniform();
    for (size_t b = 0; b < sizeof d; ++b)
      bytes[b] = random.chance(density) ? static_cast<unsigned char>(random.bits()) : 0;
    d.struct_size = sizeof d;
    d.options &= ~uint32_t{FW_CHECK_VALUES};  // its pointers lead nowhere
    uint64_t size = 0;
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP}) {
      EXPECT_NE(fw_recurrence_workspace_size(context.get(), &d, direction, &size), FW_OK);
      EXPECT_NE(fw_recurrence_check(context.get(), &d, nullptr, direction), FW_OK);
    }
  }
}

}  // namespace
}  // namespace fw::test
