// SPDX-License-Identifier: Apache-2.0
// What the chunk forms of CUDA and the decode kernels refuse, in their words, what runs unforced, and two laws of theirs.
#include <math.h>

#include "cuda/device.hpp"
#include "harness_pieces.hpp"

namespace fw::test {
namespace {

Spec of(int64_t op) {
  Spec s = spec_of(op);
  s.B = 2, s.T = 9, s.H = 1, s.group = 2, s.K = 128, s.V = 64, s.n_sub = 1, s.dtype = FW_BF16, s.form = FW_FORM_CHUNK;
  return s;
}
Spec by_axes(fw_gate gate, fw_erase erase, int64_t operands) {
  Spec s = of(FW_OP_BY_AXES);
  s.gate = gate, s.erase = erase, s.operands = operands;
  return s;
}

// The lines of explain about a call, with `impl` forced.
template <class Change>
std::string explain_lines(const char *impl, const Spec &spec, fw_direction direction, Change change) {
  Operands operands = generate(spec, direction == FW_STEP);
  round_operands(spec, operands);
  Call call(spec, operands, direction);
  call.desc.device = FW_DEVICE_CUDA;
  change(call.desc);
  char lines[4096];
  uint64_t needed = 0;
  EXPECT_EQ(fw_recurrence_explain(forced(impl).get(), &call.desc, direction, lines, sizeof lines, &needed), FW_OK) << fw_last_error();
  return lines;
}

// What it says of an implementation: "accepted" or "refused: reason".
template <class Change>
std::string explained(const char *impl, const Spec &spec, Change change, fw_direction direction = FW_FORWARD) {
  const std::string all = explain_lines(impl, spec, direction, change), name = std::string(impl) + ": ";
  const size_t at = all.find(name);
  if (at == std::string::npos) return "no line: " + all;
  return all.substr(at + name.size(), all.find('\n', at) - at - name.size());
}
std::string explained(const Spec &spec, const char *impl = "sm90_chunk", fw_direction direction = FW_FORWARD) {
  return explained(impl, spec, [](fw_recurrence &) {}, direction);
}

TEST(Sm90, Refusals) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  using namespace recurrence;
  Spec s = of(FW_OP_KDA);
  if (explained(s).find("compute capability") != std::string::npos) GTEST_SKIP() << "not run: " << explained(s);
  for (int64_t op = 1; op < FW_OP_COUNT; ++op) EXPECT_EQ(explained(of(op)), "accepted") << row_name(of(op));
  s.K = 136;
  EXPECT_EQ(explained(s), "refused: K and V, allowed multiples of 8 up to 128");
  s.K = 128, s.V = 20;
  EXPECT_EQ(explained(s), "refused: K and V, allowed multiples of 8 up to 128");
  s = of(FW_OP_KDA), s.dtype = FW_F16;
  EXPECT_EQ(explained(s), "refused: the operands are not bf16");
  s = of(FW_OP_KDA), s.o_dtype = FW_F32;
  EXPECT_EQ(explained(s), "refused: o is not bf16");
  s = of(FW_OP_KDA), s.state_dtype = FW_BF16;
  EXPECT_EQ(explained(s), "refused: initial_state is not fp32");
  s = of(FW_OP_GATED_DELTA_PRODUCT), s.n_sub = 2;
  EXPECT_EQ(explained(s), "refused: sub-steps or the normaliser are asked for");
  s = of(FW_OP_LINEAR_ATTN), s.qk_norm = FW_QK_NORM_L2;
  EXPECT_EQ(explained(s), "refused: a norm without gate and erase, whose states hold to fp32");
  const char *const keys = "refused: the erase key: p with no gate or a scalar gate, or erase_gate and write_gate with a vector gate, allowed";
  EXPECT_EQ(explained(by_axes(FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER, kBeta | kP)), "accepted");
  EXPECT_EQ(explained(by_axes(FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER, kBeta | kEraseGate)), keys);
  EXPECT_EQ(explained(by_axes(FW_GATE_NONE, FW_ERASE_SHARED_BEFORE, kBeta | kWriteGate)), keys);
  EXPECT_EQ(explained(by_axes(FW_GATE_VECTOR, FW_ERASE_SHARED_AFTER, kBeta | kP)), keys);
  EXPECT_EQ(explained(by_axes(FW_GATE_VECTOR, FW_ERASE_SHARED_AFTER, kBeta | kEraseGate)), keys);
  EXPECT_EQ(explained(by_axes(FW_GATE_VECTOR, FW_ERASE_SHARED_AFTER, kBeta | kEraseGate | kWriteGate)), "accepted");
  EXPECT_EQ(explained(by_axes(FW_GATE_VECTOR, FW_ERASE_SHARED_BEFORE, kBeta)), "refused: the erase reads before the decay of a vector gate");
  EXPECT_EQ(explained(by_axes(FW_GATE_SCALAR, FW_ERASE_INDEPENDENT, 0)), "refused: independent erase keys with a scalar gate");
  const auto refused = [](int64_t op, auto change) { return explained("sm90_chunk", of(op), change); };
  EXPECT_EQ(refused(FW_OP_DPLR, [](fw_recurrence &d) { d.a.strides[1] += 4; }),
            "refused: a, b, p, erase_gate or write_gate: start or an outer stride is no multiple of 16 bytes, or a stride is negative");
  EXPECT_EQ(refused(FW_OP_DPLR, [](fw_recurrence &d) { d.b.strides[1] = 0; }), "refused: a, b, p or write_gate: a stride of 0");
  EXPECT_EQ(refused(FW_OP_COMBA, [](fw_recurrence &d) { d.p.strides[3] = 2; }).find("refused: the last dimension of q, k, v, o, a, b, p"), 0u);
  EXPECT_EQ(refused(FW_OP_GLA, [](fw_recurrence &d) { d.k.strides[1] += 4; }),
            "refused: q, k, v or o: start or an outer stride is no multiple of 16 bytes, or a stride is negative");
  EXPECT_EQ(refused(FW_OP_GLA, [](fw_recurrence &d) { d.k.strides[1] = 0; }), "refused: q, k or v: a stride of 0");
  EXPECT_EQ(refused(FW_OP_GLA, [](fw_recurrence &d) { d.g.strides[1] += 1; }),
            "refused: g: start or an outer stride is no multiple of two elements");
  EXPECT_EQ(refused(FW_OP_GLA, [](fw_recurrence &d) { d.form = FW_FORM_RECURRENT; }), "refused: the form is not chunk");
}

TEST(CudaChunk, Refusals) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  for (int64_t op = 1; op < FW_OP_COUNT; ++op) {
    for (int64_t dtype : {FW_BF16, FW_F16}) {
      Spec s = of(op);
      s.dtype = dtype, s.K = 97, s.V = 5;
      EXPECT_EQ(explained(s, "cuda_chunk"), "accepted") << row_name(s);
    }
  }
  Spec s = of(FW_OP_KDA);
  s.dtype = FW_F32;
  EXPECT_EQ(explained(s, "cuda_chunk"), "refused: operands are fp32, this computes bf16 and fp16");
  s = of(FW_OP_KDA), s.K = 129;
  EXPECT_EQ(explained(s, "cuda_chunk"), "refused: K is 129 and V 64, this computes up to 128");
  s = of(FW_OP_KDA), s.V = 160;
  EXPECT_EQ(explained(s, "cuda_chunk"), "refused: K is 128 and V 160, this computes up to 128");
  const auto refused = [](auto change) { return explained("cuda_chunk", of(FW_OP_KDA), change); };
  EXPECT_EQ(refused([](fw_recurrence &d) { d.form = FW_FORM_RECURRENT; }), "refused: form is recurrent");
  EXPECT_EQ(refused([](fw_recurrence &d) { d.saved = &d, d.saved_size = uint64_t{1} << 40; }), "refused: saved is given");
  EXPECT_EQ(refused([](fw_recurrence &d) { d.options |= FW_BATCH_INVARIANT; }), "accepted");
  EXPECT_EQ(refused([](fw_recurrence &d) { d.k.strides[1] = 0, d.q.strides[3] = 2, d.g.strides[1] += 1; }), "accepted");
}

// More chunks than a grid has blocks.
TEST(CudaChunk, LongCalls) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  const auto of_length = [](int64_t T) {
    return explained("cuda_chunk", of(FW_OP_GLA), [T](fw_recurrence &d) {
      for (fw_tensor *t : {&d.q, &d.k, &d.v, &d.g, &d.o}) t->shape[1] = T, t->strides[0] = T * t->strides[1];
    });
  };
  EXPECT_EQ(of_length(int64_t{1} << 32), "accepted");
  EXPECT_EQ(of_length(int64_t{1} << 34), "refused: more than 2^31 chunks of 16 rows times value heads");
}

TEST(Sm90, BackwardRefusals) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  using namespace recurrence;
  if (explained(of(FW_OP_KDA)).find("compute capability") != std::string::npos) GTEST_SKIP() << "not run: " << explained(of(FW_OP_KDA));
  const auto of_backward = [](Spec s) {
    s.V = 128;
    return explained(s, "sm90_chunk", FW_BACKWARD);
  };
  EXPECT_EQ(explained(of(FW_OP_KDA), "sm90_chunk", FW_BACKWARD), "refused: backward: K and V, allowed 128");
  for (int64_t op : {FW_OP_LINEAR_ATTN, FW_OP_SIMPLE_GLA, FW_OP_RETENTION, FW_OP_LIGHTNING, FW_OP_GLA, FW_OP_DELTA_RULE, FW_OP_GATED_DELTA_RULE, FW_OP_KDA}) {
    Spec s = of(op);
    EXPECT_EQ(of_backward(s), "accepted") << row_name(s);
    if (op != FW_OP_LINEAR_ATTN) s.qk_norm = FW_QK_NORM_L2;
    if (has_gate_tensor(s)) s.gate_input = FW_GATE_INPUT_SOFTPLUS, s.parameters = 1;
    if (takes(s, kBeta)) s.beta_input = FW_BETA_INPUT_SIGMOID;
    EXPECT_EQ(of_backward(s), "accepted") << row_name(s);
  }
  EXPECT_EQ(of_backward(by_axes(FW_GATE_SCALAR, FW_ERASE_SHARED_AFTER, 0)), "refused: backward: beta is absent");
  const char *const erase = "refused: backward: the erase is neither none nor shared and read after the decay";
  for (int64_t op : {FW_OP_COMBA, FW_OP_DPLR, FW_OP_IPLR, FW_OP_RWKV7}) EXPECT_EQ(of_backward(of(op)), erase) << row_name(of(op));
  EXPECT_EQ(of_backward(of(FW_OP_GDN2)), "refused: backward: p, erase_gate or write_gate is given");
}

// A power of two on q is one on o, for gates of any strength: no factor of a score may cost it digits.
TEST(Sm90, ScaledQueries) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  if (explained(of(FW_OP_KDA)).find("compute capability") != std::string::npos) GTEST_SKIP() << "not run: " << explained(of(FW_OP_KDA));
  for (int64_t op : {FW_OP_GLA, FW_OP_KDA, FW_OP_DPLR}) {
    for (double gate : {-5.0, -2.5, -0.5}) {
      Spec s = of(op);
      s.B = 1, s.T = 64, s.group = 1, s.V = 128, s.initial = 0, s.scale_milli = 1000;
      Operands operands = generate(s);
      for (double &g : operands.at("g").data) g = gate;
      round_operands(s, operands);
      const Outputs once = run_call(forced("sm90_chunk"), s, operands, FW_FORWARD);
      for (double &x : operands.at("q").data) x = ldexp(x, -40);
      const Outputs scaled = run_call(forced("sm90_chunk"), s, operands, FW_FORWARD);
      ASSERT_EQ(once.status, FW_OK) << once.error;
      ASSERT_EQ(scaled.status, FW_OK) << scaled.error;
      const std::vector<double> &o = once.values.at("o").data, &small = scaled.values.at("o").data;
      int64_t n_other = 0;
      for (size_t i = 0; i < o.size(); ++i) n_other += ldexp(o[i], -40) != small[i];
      EXPECT_EQ(n_other, 0) << "of " << o.size() << " at gate " << gate << ": " << text(s);
    }
  }
}

// ---- decode

Spec of_step(int64_t op) {
  Spec s = of(op);
  s.B = 2, s.T = 1, s.H = 1, s.group = 1, s.V = 128, s.form = FW_FORM_AUTO;
  return s;
}
template <class Change>
void expect_step(const char *impl, const Spec &spec, const std::string &line, Change change) {
  const std::string all = explain_lines(impl, spec, FW_STEP, change);
  EXPECT_NE(all.find(line + "\n"), std::string::npos) << line << "\n" << all;
}

TEST(Sm90, StepRefusals) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  const auto same = [](fw_recurrence &) {};
  if (explain_lines("sm90_step", of_step(FW_OP_KDA), FW_STEP, same).find("this runs on 9.0 only") != std::string::npos) {
    GTEST_SKIP() << "not run: the device is not of compute capability 9.0";
  }
  for (const char *impl : {"cuda_step", "sm90_step", "sm90_step_chunk"}) {
    const std::string name = impl;
    Spec s = of_step(FW_OP_KDA);
    expect_step(impl, s, "*" + name + ": accepted", same);
    s.T = 7;
    expect_step(impl, s, "*" + name + ": accepted", same);
    s.K = 96;
    expect_step(impl, s, name + ": refused: K is 96, this computes 64 and 128", same);
    s = of_step(FW_OP_KDA), s.V = 24;
    expect_step(impl, s, name + ": refused: V is 24, at this K a multiple of 16 is needed", same);
    s = of_step(FW_OP_LINEAR_ATTN), s.normalizer = 1;
    expect_step(impl, s, name + ": refused: the normaliser is asked for", same);
    const std::string rows = " has a last dimension that is not dense, or rows that do not start at multiples of 4 elements";
    expect_step(impl, of_step(FW_OP_KDA), name + ": refused: q" + rows, [](fw_recurrence &d) { d.q.strides[0] += 1; });
    expect_step(impl, of_step(FW_OP_KDA), name + ": refused: v" + rows, [](fw_recurrence &d) { d.v.strides[3] = 2; });
    expect_step(impl, of_step(FW_OP_KDA), name + ": refused: state" + rows, [](fw_recurrence &d) { d.state.strides[1] += 2, d.state.strides[0] += 2; });
    expect_step(impl, of_step(FW_OP_KDA), "*" + name + ": accepted", [](fw_recurrence &d) { d.q.strides[1] += 1, d.state.strides[1] += 2; });  // of dimensions of one
  }
  for (const char *impl : {"sm90_step", "sm90_step_chunk"}) {
    const std::string name = impl;
    expect_step(impl, of_step(FW_OP_DPLR), "*" + name + ": accepted", same);
    expect_step(impl, of_step(FW_OP_KDA), name + ": refused: batch_invariant is asked for, which cuda_step gives at every batch",
                [](fw_recurrence &d) { d.options = FW_BATCH_INVARIANT; });
    Spec s = of_step(FW_OP_KDA);
    s.V = 48;
    expect_step(impl, s, name + ": refused: V is 48, of a state of fp32 this computes multiples of 32 up to 128", same);
    s.V = 160;
    expect_step(impl, s, name + ": refused: V is 160, of a state of fp32 this computes multiples of 32 up to 128", same);
    expect_step(impl, of_step(FW_OP_KDA), name + ": refused: a head's state is not one piece of memory",
                [](fw_recurrence &d) { d.state.strides[2] += 4, d.state.strides[1] = d.state.strides[0] = 128 * d.state.strides[2]; });
  }
  Spec s = of_step(FW_OP_KDA);
  s.state_dtype = FW_BF16;
  expect_step("sm90_step", s, "*sm90_step: accepted", same);
  expect_step("cuda_step", s, "*cuda_step: accepted", same);
  expect_step("sm90_step_chunk", s, "sm90_step_chunk: refused: the state is bf16, this computes fp32", same);
  s.T = 2;
  expect_step("sm90_step", s, "sm90_step: refused: the state is bf16, which one token a sequence may round", same);
  s = of_step(FW_OP_KDA), s.layout = FW_STATE_VK;
  expect_step("sm90_step_chunk", s, "sm90_step_chunk: refused: the state lies as [V,K], this computes [K,V]", same);
  s = of_step(FW_OP_KDA), s.dtype = s.gate_dtype = FW_F32;
  expect_step("sm90_step_chunk", s, "sm90_step_chunk: refused: operands are fp32, this computes bf16 and fp16", same);
}

// What runs when nothing is forced: with states for three rounds of every multiprocessor, and with few.
TEST(Sm90, StepThatRuns) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  Spec s = of_step(FW_OP_GATED_DELTA_RULE);
  s.B = 3 * cuda::multiprocessor_count() + 1, s.final = 0, s.initial = 0;
  const Operands operands = rounded_operands(s, true);
  const Context free("");
  Call call(s, operands, FW_STEP);
  const Outputs many = call.run(free);
  ASSERT_EQ(many.status, FW_OK) << many.error;
  const Outputs panels = run_call(forced("cuda_step"), s, operands, FW_STEP);
  ASSERT_EQ(panels.status, FW_OK) << panels.error;
  EXPECT_TRUE(many.impl == "sm90_step" || many.impl == "cuda_step") << many.impl;
  if (many.impl == "cuda_step") GTEST_SKIP() << "not run: the device is not of compute capability 9.0";
  double worst = 0, largest = 0;
  for (const char *name : {"o", "state"}) {
    const std::vector<double> &x = many.values.at(name).data, &y = panels.values.at(name).data;
    for (size_t i = 0; i < x.size(); ++i) worst = fmax(worst, fabs(x[i] - y[i])), largest = fmax(largest, fabs(y[i]));
  }
  EXPECT_LE(worst, largest / 128);  // a rounding of o in bf16
  s.T = 3;
  const Operands longer = rounded_operands(s, true);
  EXPECT_EQ(run_call(free, s, longer, FW_STEP).impl, "sm90_step_chunk");
}

// With batch_invariant one sequence alone has the bits that it has in a batch.
TEST(Sm90, StepOfABatch) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  for (int64_t K : {64, 128}) {
    Spec s = of_step(FW_OP_KDA);
    s.K = K, s.V = 64, s.B = 20 * cuda::multiprocessor_count();
    const Operands operands = rounded_operands(s, true);
    Spec one = s;
    one.B = 1;
    Operands first = operands;
    for (auto &[name, values] : first) {
      const int64_t n = values.shape[0];
      if (n != s.B) continue;
      values.data.resize(values.data.size() / static_cast<size_t>(n));
      values.shape[0] = 1;
    }
    const auto run = [](const Spec &spec, const Operands &of_call) {
      Call call(spec, of_call, FW_STEP);
      call.desc.options = FW_BATCH_INVARIANT;
      return call.run(Context(""));
    };
    const Outputs alone = run(one, first), together = run(s, operands);
    ASSERT_EQ(alone.status, FW_OK) << alone.error;
    EXPECT_EQ(alone.impl, "cuda_step");
    EXPECT_EQ(together.impl, "cuda_step");
    for (const auto &[name, bits] : alone.bits) {
      const std::vector<uint64_t> &all = together.bits.at(name);
      const auto end = bits.begin() + (name == "state" ? K * s.V : s.V);  // slots that no sequence has stay as they were
      EXPECT_TRUE(std::equal(bits.begin(), end, all.begin())) << name << " at K = " << K;
    }
  }
}

}  // namespace
}  // namespace fw::test
