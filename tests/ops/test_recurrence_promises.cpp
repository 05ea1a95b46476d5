// SPDX-License-Identifier: Apache-2.0
// The written promises of numbers, for every row and direction on every implementation of this machine: extreme
// gates, beta of exactly 0 and 1, NaN and inf that stay where they are, empty calls, every head size, offsets past
// 2^31.
#include <sys/mman.h>

#include "harness_pieces.hpp"

namespace fw::test {
namespace {

constexpr fw_direction kDirections[] = {FW_FORWARD, FW_BACKWARD, FW_STEP};

// Tensors of one batch entry whose rows are moved so far apart that the last lies past 2^31 elements.
struct FarTensors {
  std::map<std::string, fw_tensor> all;
  std::vector<std::pair<void *, size_t>> maps;
  bool is_refused = false;

  FarTensors() = default;
  FarTensors(const FarTensors &) = delete;
  FarTensors &operator=(const FarTensors &) = delete;
  ~FarTensors() {
    for (const auto &[map, size] : maps) munmap(map, size);
  }
  static int32_t axis(const std::string &name) { return name == "state" ? 0 : 1; }
  void add(const std::string &name, fw_tensor &t) {
    if (t.dtype == FW_NONE || is_parameter_name(name) || (is_state_name(name) && name != "state")) return;
    const int32_t rows = axis(name);
    const int64_t n = t.shape[rows], apart = (int64_t{1} << 31) / (n - 1) + 5;
    int64_t width = 1;
    for (int32_t i = rows + 1; i < t.ndim; ++i) width *= t.shape[i];
    const size_t element = static_cast<size_t>(dtype_size(t.dtype)), size = static_cast<size_t>(apart * n) * element;
    void *map = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map == MAP_FAILED) {
      is_refused = true;
      return;
    }
    maps.push_back({map, size});
    for (int64_t row = 0; row < n; ++row) {
      memcpy(static_cast<char *>(map) + static_cast<size_t>(row * apart) * element,
             static_cast<const char *>(t.data) + static_cast<size_t>(row * t.strides[rows]) * element,
             static_cast<size_t>(width) * element);
    }
    t.data = map;
    t.strides[rows] = apart;
    all[name] = t;
  }
};

std::vector<Spec> rows() {
  std::vector<Spec> all = named_rows();
  for (const Spec &s : axes_rows()) {
    if (s.operands == recurrence::kBeta || s.operands == 0) all.push_back(s);
  }
  for (Spec &s : all) {
    s.dtype = FW_F32 + (s.op + s.gate + 2 * s.erase) % 3;
    s.B = 2, s.T = 35, s.K = 9, s.V = 11;
    if (s.n_sub > 1) s.n_sub = 2;
    if (s.op == FW_OP_LINEAR_ATTN) s.normalizer = FW_NORMALIZER_SUM;
  }
  return all;
}

// Promise 1: 0, -1e-8, -1000 and -inf are legal decays, forward and backward; dg at -inf is 0.
TEST(Promises, ExtremeGates) {
  for (Spec spec : rows()) {
    if (!has_gate_tensor(spec)) continue;
    for (fw_direction direction : kDirections) {
      for (int pattern = 0; pattern < 3; ++pattern) {
        Operands operands = generate(spec, direction == FW_STEP);
        Random random(static_cast<uint64_t>(pattern) + 1);
        const double extreme[] = {0.0, -1e-8, -1000.0, -INFINITY};
        for (double &x : operands.at("g").data) {
          // mixed with usual gates; extremes only; one hard reset among decays of 1
          if (pattern == 0 && random.chance(0.3)) x = extreme[random.integer(0, 3)];
          if (pattern == 1) x = extreme[random.integer(0, 3)];
          if (pattern == 2) x = random.chance(0.03) ? -INFINITY : 0.0;
        }
        Checked checked(spec, direction, {}, operands);
        for (const Path &path : paths(direction, spec.dtype)) {
          SCOPED_TRACE("pattern " + std::to_string(pattern));
          const Outputs out = checked.run(path);
          for (const auto &[name, values] : out.values) {
            for (double x : values.data) ASSERT_TRUE(isfinite(x)) << name << ": " << checked.repro(path.impl);
          }
          if (direction != FW_BACKWARD) continue;
          for (size_t i = 0; i < operands.at("g").data.size(); ++i) {
            if (operands.at("g").data[i] == -INFINITY) {
              ASSERT_EQ(out.values.at("dg").data[i], 0.0) << checked.repro(path.impl);
            }
          }
        }
      }
    }
  }
}

// Promise 2.
TEST(Promises, BetaOfZeroAndOne) {
  for (Spec spec : rows()) {
    if (!takes(spec, recurrence::kBeta)) continue;
    for (fw_direction direction : kDirections) {
      Operands operands = generate(spec, direction == FW_STEP);
      Random random(9);
      for (double &x : operands.at("beta").data) x = random.chance(0.5) ? 0.0 : 1.0;
      Checked checked(spec, direction, {}, operands);
      for (const Path &path : paths(direction, spec.dtype)) checked.run(path);
    }
  }
}

// Growth follows the formula while results stay finite.
TEST(Promises, GrowthFollowsTheFormula) {
  for (Spec spec : rows()) {
    if (!has_gate_tensor(spec)) continue;
    spec.T = 19;
    for (fw_direction direction : kDirections) {
      Operands operands = generate(spec, direction == FW_STEP);
      Random random(4);
      for (double &x : operands.at("g").data) x = random.uniform(-0.05, 0.15);
      Checked checked(spec, direction, {}, operands);
      for (const Path &path : paths(direction, spec.dtype)) checked.run(path);
    }
  }
}

// Entries [begin, end) of an axis are set to `x` where the operand has that axis.
void spoil(Values &v, size_t axis, int64_t begin, int64_t end, double x) {
  Values part = cut(v, axis, begin, end);
  for (double &y : part.data) y = x;
  paste(v, axis, begin, part);
}

// Promise 6, sequences: the others keep every bit.
TEST(Promises, NanStaysInItsSequence) {
  for (Spec spec : rows()) {
    spec.B = 3;
    for (fw_direction direction : kDirections) {
      for (bool is_packed : {false, true}) {
        Spec s = spec;
        if (is_packed) s.B = 1, s.pack = 3, s.T = 41, s.offsets = {0, 17, 22, 41};
        const Operands plain = rounded_operands(s, direction == FW_STEP);
        for (double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
          Operands spoilt = plain;
          for (auto &[name, v] : spoilt) {
            if (is_parameter_name(name)) continue;
            if (name == "g" && bad == INFINITY) continue;
            const int64_t n = rows_per_token(s, name);
            if (is_packed && has_tokens(name)) {
              spoil(v, 1, 17 * n, 22 * n, bad);
            } else {
              spoil(v, 0, 1, 2, bad);
            }
          }
          for (const Path &path : paths(direction, s.dtype)) {
            const Outputs a = run_path(path, s, plain, direction), b = run_path(path, s, spoilt, direction);
            for (const auto &[name, values] : a.values) {
              if (is_parameter_name(name)) continue;
              const std::string what = name + ", " + path.impl + " " + direction_name(direction) + ": " + text(s);
              const Values &other = b.values.at(name);
              if (is_packed && has_tokens(name)) {
                const int64_t n = rows_per_token(s, name);
                EXPECT_EQ(first_difference(cut(values, 1, 0, 17 * n), cut(other, 1, 0, 17 * n)), "") << what;
                EXPECT_EQ(first_difference(cut(values, 1, 22 * n, 41 * n), cut(other, 1, 22 * n, 41 * n)), "")
                    << what;
              } else {
                EXPECT_EQ(first_difference(cut(values, 0, 0, 1), cut(other, 0, 0, 1)), "") << what;
                EXPECT_EQ(first_difference(cut(values, 0, 2, 3), cut(other, 0, 2, 3)), "") << what;
              }
              bool has_spread = false;
              for (double x : other.data) has_spread = has_spread || !isfinite(x);
              EXPECT_TRUE(has_spread) << what;  // and it is not swallowed either
            }
          }
        }
      }
    }
  }
}

// Promise 6, heads: what has value heads is spoilt in one of them, what has query heads in one group.
TEST(Promises, NanStaysInItsHead) {
  for (Spec spec : rows()) {
    spec.H = 2, spec.group = 2;
    for (fw_direction direction : kDirections) {
      const Operands plain = rounded_operands(spec, direction == FW_STEP);
      for (int kind = 0; kind < 4; ++kind) {
        const bool by_group = kind % 2;
        const double bad = kind < 2 ? static_cast<double>(NAN) : static_cast<double>(INFINITY);
        Operands spoilt = plain;
        for (auto &[name, v] : spoilt) {
          const size_t axis = is_parameter_name(name) ? 0 : is_state_name(name) ? 1 : 2;
          const bool has_value_heads = v.shape[axis] == spec.HV();
          if (by_group) {
            const int64_t n = has_value_heads ? spec.group : 1;
            spoil(v, axis, n, 2 * n, bad);
          } else if (has_value_heads) {
            spoil(v, axis, 1, 2, bad);
          }
        }
        for (const Path &path : paths(direction, spec.dtype)) {
          const Outputs a = run_path(path, spec, plain, direction), b = run_path(path, spec, spoilt, direction);
          for (const auto &[name, values] : a.values) {
            const size_t axis = is_parameter_name(name) ? 0 : is_state_name(name) ? 1 : 2;
            const bool has_value_heads = values.shape[axis] == spec.HV();
            for (int64_t head = 0; head < values.shape[axis]; ++head) {
              const int64_t group = has_value_heads ? head / spec.group : head;
              // a query head's gradient is the sum over its value heads
              const bool is_spoilt = by_group ? group == 1 : has_value_heads ? head == 1 : group == 0;
              if (is_spoilt) continue;
              EXPECT_EQ(
                  first_difference(cut(values, axis, head, head + 1), cut(b.values.at(name), axis, head, head + 1)),
                  "")
                  << name << " of head " << head << ", " << path.impl << " " << direction_name(direction) << ": "
                  << text(spec);
            }
          }
        }
      }
    }
  }
}

// Promise 9: no tokens, no sequences, empty sequences.
TEST(Promises, NothingToDo) {
  for (Spec row : rows()) {
    for (fw_direction direction : kDirections) {
      Spec no_tokens = row, empty_sequences = row, rows_of_none = row, no_batch = row;
      no_tokens.T = 0;
      empty_sequences.B = 1, empty_sequences.T = 0, empty_sequences.pack = 2, empty_sequences.offsets = {0, 0, 0};
      rows_of_none.B = 1, rows_of_none.T = 5, rows_of_none.pack = 2, rows_of_none.offsets = {0, 0, 0};
      no_batch.B = 0;
      for (Spec spec : {no_tokens, empty_sequences, rows_of_none, no_batch}) {
        for (const int64_t dtype : {FW_F32, FW_BF16}) {
          spec.dtype = dtype;
          Checked checked(spec, direction);
          for (const Path &path : paths(direction, dtype)) checked.run(path);
        }
      }
    }
  }
}

// Promise 10: offsets on a device that are not sorted, negative or past the end lead to wrong numbers, never past the tensors, whose
// guard bands every call of the harness looks at.
TEST(Promises, WrongOffsetsOnADevice) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda, and on the host wrong offsets are refused";
  const std::vector<int64_t> all_wrong[] = {{20, 5, -3, 139}, {33, 40, 12, 40}};
  for (const int64_t op : {FW_OP_GATED_DELTA_RULE, FW_OP_KDA, FW_OP_DPLR}) {
    for (const fw_direction direction : kDirections) {
      Spec spec = spec_of(op);
      spec.B = spec.H = spec.group = 1, spec.T = 40, spec.K = spec.V = 128, spec.pack = 3, spec.dtype = FW_BF16;
      const Operands operands = rounded_operands(spec, direction == FW_STEP);
      for (const std::vector<int64_t> &wrong : all_wrong) {
        spec.offsets = wrong;
        int n_ran = 0;
        const std::vector<const char *> impls = direction == FW_STEP
                                                    ? std::vector<const char *>{"sm90_step_chunk", "sm90_step", "cuda_step", "cuda_portable"}
                                                    : std::vector<const char *>{"sm90_chunk", "cuda_chunk", "cuda_portable"};
        for (const char *impl : impls) {
          const Outputs out = run_call(forced(impl), spec, operands, direction);
          if (out.status == FW_OK) {
            EXPECT_EQ(out.impl, impl) << text(spec);
            ++n_ran;
          } else {
            EXPECT_EQ(out.status, FW_UNSUPPORTED) << impl << ": " << out.error;
          }
        }
        EXPECT_GE(n_ran, 2) << text(spec);
      }
    }
  }
}

// Promise 9: K and V from 1 to 512, not only powers of two.
TEST(Promises, EveryHeadSize) {
  const int64_t sizes[] = {1, 2, 3, 4, 7, 15, 31, 33, 63, 65, 100, 127, 129, 192, 255, 257, 320, 383, 511, 512};
  constexpr int64_t n_sizes = sizeof sizes / sizeof sizes[0];
  const std::vector<Spec> all = rows();
  const int64_t n_per_row = is_full() ? n_sizes : 3;
  for (size_t r = 0; r < all.size(); ++r) {
    for (int64_t i = 0; i < n_per_row; ++i) {
      Spec spec = all[r];
      spec.B = 1, spec.H = 1, spec.group = 1;
      spec.K = sizes[(static_cast<int64_t>(r) * 7 + i * 11) % n_sizes],
      spec.V = sizes[(static_cast<int64_t>(r) * 3 + i * 13 + 5) % n_sizes];
      spec.T = spec.K * spec.V > 40000 && !is_full() ? 5 : 18;
      // a unit key of one channel with beta = 1 erases to exactly 0 in the truth, and no error is small beside 0
      if (spec.K == 1) spec.regime = kUnnormalised;
      for (fw_direction direction : kDirections) {
        const std::vector<Path> all_paths = paths(direction);
        Checked(spec, direction).run(all_paths[static_cast<size_t>(i) % all_paths.size()]);
      }
    }
  }
}

// Promise 9: elements further than 2^31 from the first. Every tensor that has tokens (in step, the states) gets rows
// that far apart, in a mapping of which only the touched pages exist.
TEST(Promises, OffsetsPastTwoToThe31) {
  if (is_on_cuda()) GTEST_SKIP() << "not run: the offsets of this test are made with address space of the host";
  for (int64_t op :
       {FW_OP_LINEAR_ATTN, FW_OP_SIMPLE_GLA, FW_OP_KDA, FW_OP_COMBA, FW_OP_GATED_DELTA_PRODUCT, FW_OP_DPLR}) {
    Spec spec = spec_of(op);
    spec.dtype = FW_BF16, spec.B = 1, spec.T = 9;
    if (spec.n_sub > 1) spec.n_sub = 2;
    for (fw_direction direction : kDirections) {
      const Operands operands = rounded_operands(spec, direction == FW_STEP);
      for (const Path &path : paths(direction)) {
        spec.form = path.form;
        Call near(spec, operands, direction), far(spec, operands, direction);
        const Outputs expected = near.run(forced(path.impl));
        ASSERT_EQ(expected.status, FW_OK) << expected.error;
        FarTensors moved;
        for (const DescField &field : desc_inputs()) moved.add(field.name, far.desc.*field.member);
        moved.add("o", far.desc.o);
        moved.add("state", far.desc.state);
        for (const GradField &field : grad_inputs()) moved.add(field.name, far.grads.*field.member);
        for (const OutGradField &field : grad_outputs()) moved.add(field.name, far.grads.*field.member);
        if (moved.is_refused) GTEST_SKIP() << "not run: the machine refuses that much address space";
        uint64_t bytes = 0;
        ASSERT_EQ(fw_recurrence_workspace_size(forced(path.impl).get(), &far.desc, direction, &bytes), FW_OK)
            << fw_last_error();
        Memory workspace(bytes);
        fw_context *context = forced(path.impl).get();
        const fw_status status = direction == FW_FORWARD
                                     ? fw_recurrence_forward(context, &far.desc, workspace.data(), bytes)
                                 : direction == FW_BACKWARD
                                     ? fw_recurrence_backward(context, &far.desc, &far.grads, workspace.data(), bytes)
                                     : fw_recurrence_step(context, &far.desc, workspace.data(), bytes);
        ASSERT_EQ(status, FW_OK) << fw_last_error();
        int64_t n_compared = 0;
        for (const auto &[name, t] : moved.all) {
          if (!expected.values.count(name)) continue;
          const Values &values = expected.values.at(name);
          const int64_t width = values.count() / t.shape[moved.axis(name)];
          for (int64_t i = 0; i < values.count(); ++i) {
            const double found = load_f64(t.data, t.dtype, i / width * t.strides[moved.axis(name)] + i % width);
            ASSERT_EQ(found, values.data[static_cast<size_t>(i)]) << name << ", " << path.impl << ": " << text(spec);
            ++n_compared;
          }
        }
        EXPECT_GT(n_compared, 0);
      }
    }
  }
}

// The promise g_min changes no result beyond rounding, and `check` finds what breaks it.
TEST(Promises, LowerBoundOfTheGate) {
  for (Spec spec : rows()) {
    if (!has_gate_tensor(spec)) continue;
    spec.T = 40;
    for (fw_direction direction : kDirections) {
      Operands operands = generate(spec, direction == FW_STEP);
      for (double &x : operands.at("g").data) x = fmax(x, -4.5);
      const Checked checked(spec, direction, {}, operands);
      for (const Path &path : paths(direction)) {
        Spec formed = spec;
        formed.form = path.form;
        Call call(formed, checked.operands(), direction);
        call.desc.g_min = -5;
        const Outputs out = call.run(forced(path.impl));
        EXPECT_LE(checked.share(out), 1.0) << checked.repro(path.impl);
        EXPECT_GE(out.values.size(), 2u);
        EXPECT_EQ(call.check_values(forced(path.impl)), FW_OK) << fw_last_error();
        call.inputs.at("g")->set(3, -5.5);
        EXPECT_EQ(call.check_values(forced(path.impl)), FW_INVALID_ARGUMENT);
        const std::string expected = std::string(row_of(spec).name) +
                                     (row_of(spec).gate == FW_GATE_VECTOR ? ": g[0,0,0]" : ": g[0,0,3]") +
                                     " is -5.5, allowed at least g_min = -5";
        EXPECT_EQ(std::string(fw_last_error()), expected);
      }
    }
  }
}

// What forward saves changes nothing in what backward returns, beyond rounding; the size asked for is enough.
TEST(Promises, SavedBuffer) {
  for (const Spec &row : rows()) {
    Spec spec = row;
    spec.T = 70;
    const Checked checked(spec, FW_BACKWARD);
    for (const std::string &impl : impls(FW_BACKWARD, FW_FORM_CHUNK)) {
      const Outputs with = checked.run(forced(impl), impl, true), without = checked.run(forced(impl), impl, false);
      expect_same_bits(with, without, impl + ": " + text(spec));
    }
  }
}

}  // namespace
}  // namespace fw::test
