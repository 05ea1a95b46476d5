// SPDX-License-Identifier: Apache-2.0
// The error rule itself: an honest fp32 computation passes it on every regime, planted faults do not.
#include "planted_chunk.hpp"

namespace fw::test {
namespace {

const Context &reference() {
  static const Context context("reference_recurrent", 2);
  return context;
}

Spec held(int64_t op, int64_t dtype) {
  Spec s = spec_of(op);
  s.dtype = dtype, s.regime = kHold, s.B = 1, s.H = 1, s.group = 2, s.K = 24, s.V = 16, s.T = 128;
  if (s.n_sub > 1) s.n_sub = 2;
  return s;
}

// Forward in pieces of 16 tokens with the state rounded to `state_dtype` between them.
Outputs forward_in_pieces(const Spec &spec, const Operands &all, fw_dtype state_dtype) {
  Outputs out;
  Values state = all.at("initial_state"), o = make_values({spec.B, spec.T, spec.HV(), spec.V});
  for (int64_t begin = 0; begin < spec.T; begin += 16) {
    Spec piece = spec;
    piece.T = 16, piece.state_dtype = FW_F32;
    Operands part = tokens_between(spec, all, begin, begin + 16);
    part["initial_state"] = state;
    const Outputs one = run_call(reference(), piece, part, FW_FORWARD);
    EXPECT_EQ(one.status, FW_OK) << one.error;
    state = one.values.at("final_state");
    round_to(state_dtype, state);
    const Values &o_part = one.values.at("o");
    std::copy(o_part.data.begin(), o_part.data.end(), o.data.begin() + begin * spec.HV() * spec.V);
  }
  out.values["o"] = o;
  out.values["final_state"] = state;
  return out;
}

// The state's gradient rounded on its way from piece to piece.
Outputs backward_in_pieces(const Spec &spec, const Operands &all, fw_dtype state_dtype) {
  std::vector<Values> states = {all.at("initial_state")};
  for (int64_t begin = 0; begin < spec.T; begin += 16) {
    Spec piece = spec;
    piece.T = 16;
    Operands part = tokens_between(spec, all, begin, begin + 16);
    part["initial_state"] = states.back();
    states.push_back(run_call(reference(), piece, part, FW_FORWARD).values.at("final_state"));
  }
  Values dS = all.at("d_final_state");
  for (int64_t begin = spec.T - 16; begin >= 0; begin -= 16) {
    Spec piece = spec;
    piece.T = 16;
    Operands part = tokens_between(spec, all, begin, begin + 16);
    part["initial_state"] = states[static_cast<size_t>(begin / 16)];
    part["d_final_state"] = dS;
    dS = run_call(reference(), piece, part, FW_BACKWARD).values.at("d_initial_state");
    round_to(state_dtype, dS);
  }
  Outputs out;
  out.values["d_initial_state"] = dS;
  return out;
}

TEST(Yardstick, HonestComputationPasses) {
  for (const Spec &row : named_rows()) {
    for (int64_t regime = 0; regime < kRegimeCount; ++regime) {
      Spec spec = row;
      spec.regime = regime, spec.dtype = FW_F32 + (row.op + regime) % 3, spec.T = 40, spec.K = 12, spec.V = 9;
      for (fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP}) {
        const Checked checked(spec, direction);
        checked.run(reference(), "reference_recurrent");
      }
    }
  }
}

TEST(Yardstick, NarrowStateIsCaught) {
  for (int64_t op : {FW_OP_GATED_DELTA_RULE, FW_OP_KDA, FW_OP_DELTA_RULE, FW_OP_GLA, FW_OP_SIMPLE_GLA, FW_OP_DPLR}) {
    SCOPED_TRACE(recurrence::find_row(static_cast<fw_op>(op))->name);
    const Checked checked(held(op, FW_BF16), FW_FORWARD);
    EXPECT_LE(checked.share(forward_in_pieces(checked.spec(), checked.operands(), FW_F32)), 1.0);
    EXPECT_GT(checked.share(forward_in_pieces(checked.spec(), checked.operands(), FW_BF16)), 1.0);
  }
}

TEST(Yardstick, NarrowStateGradientIsCaught) {
  for (int64_t op : {FW_OP_GATED_DELTA_RULE, FW_OP_KDA, FW_OP_DELTA_RULE, FW_OP_GLA, FW_OP_SIMPLE_GLA, FW_OP_DPLR}) {
    SCOPED_TRACE(recurrence::find_row(static_cast<fw_op>(op))->name);
    const Checked checked(held(op, FW_BF16), FW_BACKWARD);
    EXPECT_LE(checked.share(backward_in_pieces(checked.spec(), checked.operands(), FW_F32)), 1.0);
    EXPECT_GT(checked.share(backward_in_pieces(checked.spec(), checked.operands(), FW_BF16)), 1.0);
  }
}

// In the regime that shows it, one head and a chunk computation whose only fault is `fault`.
void expect_chunk_fault_is_caught(const Spec &row, int64_t regime, const ChunkFault &fault) {
  for (int64_t dtype : {FW_BF16, FW_F16}) {
    SCOPED_TRACE(row_name(row) + (dtype == FW_BF16 ? " bf16" : " fp16"));
    Spec spec = row;
    spec.dtype = dtype, spec.regime = regime, spec.B = 1, spec.H = 1, spec.group = 2, spec.K = 24, spec.V = 16;
    spec.T = 256;  // at 128 a draw may hide a fault
    const Checked checked(spec, FW_FORWARD);
    ChunkFault none;
    none.chunk = fault.chunk;
    EXPECT_LE(checked.share(planted_chunk(spec, checked.operands(), none)), 0.1);
    const double share = checked.share(planted_chunk(spec, checked.operands(), fault));
    EXPECT_FALSE(share <= 1.0) << share;
    ::testing::Test::RecordProperty(row_name(row) + (dtype == FW_BF16 ? "_bf16" : "_fp16"), std::to_string(share));
  }
}

TEST(Yardstick, Fp16NeumannInverseIsCaught) {
  ChunkFault fault;
  fault.inverse = FW_F16;
  for (int64_t op :
       {FW_OP_DELTA_RULE, FW_OP_GATED_DELTA_RULE, FW_OP_COMBA, FW_OP_KDA, FW_OP_IPLR, FW_OP_DPLR, FW_OP_RWKV7})
    expect_chunk_fault_is_caught(spec_of(op), kSimilarKeys, fault);
}

TEST(Yardstick, NarrowCumulativeGatesAreCaught) {
  for (fw_dtype held : {FW_BF16, FW_F16}) {
    SCOPED_TRACE(held == FW_BF16 ? "gates in bf16" : "gates in fp16");
    ChunkFault fault;
    fault.gates = held, fault.chunk = 64;
    for (int64_t op :
         {FW_OP_SIMPLE_GLA, FW_OP_GLA, FW_OP_GATED_DELTA_RULE, FW_OP_COMBA, FW_OP_KDA, FW_OP_DPLR, FW_OP_RWKV7})
      expect_chunk_fault_is_caught(spec_of(op), kStrongGates, fault);
  }
}

TEST(Yardstick, GateGradientByCancellationIsCaught) {
  Spec free_key = spec_of(FW_OP_BY_AXES);  // kda, its erase key an operand
  free_key.gate = FW_GATE_VECTOR, free_key.erase = FW_ERASE_SHARED_AFTER, free_key.operands = recurrence::kP;
  for (Spec spec : {spec_of(FW_OP_SIMPLE_GLA), spec_of(FW_OP_GLA), spec_of(FW_OP_GATED_DELTA_RULE), free_key,
                    spec_of(FW_OP_DPLR), spec_of(FW_OP_RWKV7)}) {
    for (int64_t dtype : {FW_BF16, FW_F16}) {
      SCOPED_TRACE(row_name(spec) + (dtype == FW_BF16 ? " bf16" : " fp16"));
      spec.dtype = dtype, spec.regime = kStrongGates, spec.B = 1, spec.H = 2, spec.group = 1, spec.K = 24,
      spec.V = 16;
      spec.T = 256;
      const Checked backward(spec, FW_BACKWARD), forward(spec, FW_FORWARD);
      const auto share = [&](fw_dtype held) {
        Outputs out;
        out.values["dg"] = dg_by_cancellation(spec, backward.operands(), backward.exact(),
                                              forward.exact().values.at("final_state"), held);
        return backward.share(out);
      };
      EXPECT_LE(share(FW_F64), 1.0);
      EXPECT_GT(share(static_cast<fw_dtype>(dtype)), 1.0);
      ::testing::Test::RecordProperty(
          row_name(spec) + (dtype == FW_BF16 ? "_bf16" : "_fp16"),
          std::to_string(share(FW_F64)) + " " + std::to_string(share(static_cast<fw_dtype>(dtype))));
    }
  }
}

// A half type where the caller gave fp32 is caught by the fp32 limits, six times as wide as they are.
TEST(Yardstick, NarrowOperandsInFp32AreCaught) {
  for (const Spec &row : named_rows()) {
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD}) {
      SCOPED_TRACE(row_name(row) + " " + direction_name(direction));
      Spec spec = row;
      spec.T = 40, spec.K = 12, spec.V = 9;
      const Checked checked(spec, direction);
      Operands narrow = checked.operands();
      round_to(FW_F16, narrow.at("k"));
      EXPECT_GT(checked.share(run_call(reference(), spec, narrow, direction)), 10.0);
    }
  }
}

TEST(Yardstick, OneWrongElementIsCaught) {
  for (int64_t dtype : {FW_F32, FW_BF16, FW_F16}) {
    Spec spec = spec_of(FW_OP_KDA);
    spec.dtype = dtype, spec.T = 40, spec.K = 12, spec.V = 9;
    const Checked checked(spec, FW_BACKWARD);
    const Outputs honest = run_call(reference(), spec, checked.operands(), FW_BACKWARD);
    EXPECT_LE(checked.share(honest), 1.0);
    for (const auto &[name, values] : honest.values) {
      Outputs wrong = honest;
      wrong.values[name].data[values.data.size() / 2] += 0.1 * peak(values);
      EXPECT_GT(checked.share(wrong), 1.0) << name;
      wrong.values[name].data[values.data.size() / 2] = NAN;
      EXPECT_FALSE(checked.share(wrong) <= 1.0) << name;
    }
  }
}

TEST(Yardstick, RoundingKeepsTheExponent) {
  EXPECT_EQ(shorten(1.0f + 0x1p-8f, 16), 1.0f);
  EXPECT_EQ(shorten(1.0f + 0x1.8p-7f, 16), 1.0f + 0x1p-6f);
  EXPECT_NEAR(shorten(1e30f, 13) / 1e30f, 1.0, 0x1p-11);  // past 65504
  EXPECT_NEAR(shorten(1e-30f, 13) / 1e-30f, 1.0, 0x1p-11);
  EXPECT_TRUE(isnan(shorten(NAN, 16)));
  EXPECT_EQ(shorten(-INFINITY, 16), -INFINITY);
  Random random(3);
  for (int i = 0; i < 2000; ++i) {
    const float x = static_cast<float>(random.normal());
    EXPECT_EQ(shorten(x, 16), bf16_to_f32(f32_to_bf16(x)));
    if (fabsf(x) > 0x1p-14f) {
      EXPECT_EQ(shorten(x, 13), f16_to_f32(f32_to_f16(x)));
    }
  }
}

}  // namespace
}  // namespace fw::test
