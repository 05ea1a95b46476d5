// SPDX-License-Identifier: Apache-2.0
// What the sm_90a forward refuses, in its words.
#include "harness_check.hpp"

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

// What explain says of sm90_chunk: "accepted" or "refused: reason".
template <class Change>
std::string explained(const Spec &spec, Change change) {
  Operands operands = generate(spec);
  round_operands(spec, operands);
  Call call(spec, operands, FW_FORWARD);
  call.desc.device = FW_DEVICE_CUDA;
  change(call.desc);
  char lines[4096];
  uint64_t needed = 0;
  EXPECT_EQ(fw_recurrence_explain(forced("sm90_chunk").get(), &call.desc, FW_FORWARD, lines, sizeof lines, &needed), FW_OK)
      << fw_last_error();
  const std::string all = lines, name = "sm90_chunk: ";
  const size_t at = all.find(name);
  if (at == std::string::npos) return "no line: " + all;
  return all.substr(at + name.size(), all.find('\n', at) - at - name.size());
}
std::string explained(const Spec &spec) {
  return explained(spec, [](fw_recurrence &) {});
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
  const auto refused = [](int64_t op, auto change) { return explained(of(op), change); };
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

}  // namespace
}  // namespace fw::test
