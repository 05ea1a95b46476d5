// SPDX-License-Identifier: Apache-2.0
// Every row x {forward, backward, step} x {fp32, bf16, fp16} x regime against the fp64 truth, on every
// instruction-set level of the machine. FW_TEST_FULL=1: more shapes and seeds, sizes up to T = 515 and K = V = 128.
// FW_TEST_RESULT=PATH writes, a line each (row, direction, dtype, implementation), the cases run and the largest
// share of a limit that was needed.
#include <algorithm>

#include "harness_check.hpp"

namespace fw::test {
namespace {

class WriteResults : public ::testing::Environment {
 public:
  void TearDown() override {
    if (const char *path = getenv("FW_TEST_RESULT"); path && *path) write_results(path);
  }
};
const ::testing::Environment *const kWriteResults = ::testing::AddGlobalTestEnvironment(new WriteResults);

bool is_short() { return getenv("FW_TEST_SHORT") != nullptr; }

int64_t pick(Random &random, std::initializer_list<int64_t> choices) {
  return *(choices.begin() + random.integer(0, static_cast<int64_t>(choices.size()) - 1));
}

// Sizes, types, layouts and strides that a case draws from its seed; K != V and HV != H in more than half, T odd.
Spec draw(Spec s, int64_t dtype, int64_t regime, int64_t seed) {
  Random random(static_cast<uint64_t>(seed));
  s.dtype = dtype, s.regime = regime, s.seed = seed;
  const bool is_large = is_full() && random.chance(0.15);
  s.B = random.integer(1, 2);
  s.H = random.integer(1, 2);
  s.group = random.integer(1, 3);
  s.T = is_large ? pick(random, {127, 129, 257, 515}) : pick(random, {1, 15, 17, 33, 47, 65, 71, 97});
  s.K = is_large ? pick(random, {64, 96, 128}) : pick(random, {3, 8, 16, 17, 24, 32, 40});
  s.V = is_large ? pick(random, {48, 64, 128}) : pick(random, {5, 8, 16, 20, 31, 32, 48});
  if (is_short()) s.T = pick(random, {17, 33}), s.K = pick(random, {5, 16}), s.V = pick(random, {7, 16});
  if (s.n_sub > 1) s.n_sub = random.integer(1, 4);
  if (random.chance(0.3)) s.B = 1, s.pack = random.integer(1, 5), s.tail = s.T > 5 ? random.integer(0, 3) : 0;
  if (random.chance(0.3) && regime != kHold) s.gate_dtype = dtype;  // dg of a large state does not fit in fp16
  if (random.chance(0.25)) s.state_dtype = pick(random, {FW_BF16, FW_F16});
  if (random.chance(0.2)) s.o_dtype = pick(random, {FW_F32, FW_BF16, FW_F16});
  if (random.chance(0.4)) s.layout = FW_STATE_VK;
  s.strides = random.chance(0.5) ? 0 : random.integer(1, 4);
  s.initial = random.chance(0.8) || regime == kHold;
  s.final = random.chance(0.8) || regime == kHold || regime == kOneSign;
  if (regime == kDefault && random.chance(0.4)) s.qk_norm = FW_QK_NORM_L2;
  if (has_gate_tensor(s) && (regime == kDefault || regime == kStrongGates) && random.chance(0.5)) {
    s.gate_input = random.integer(1, 4);
    s.parameters =
        (s.gate_input == FW_GATE_INPUT_SOFTPLUS || s.gate_input == FW_GATE_INPUT_BOUNDED) && random.chance(0.7);
  }
  if (takes(s, recurrence::kBeta) && random.chance(0.3)) s.beta_input = random.integer(1, 2);
  if (s.op == FW_OP_LINEAR_ATTN && random.chance(0.5)) s.normalizer = FW_NORMALIZER_SUM;
  if (random.chance(0.2)) s.scale_milli = random.integer(100, 1500);
  // the true db of 128 tokens and more reached 111114 at K = V = 128, which fp16 does not hold
  if (is_large && dtype == FW_F16 && (regime == kHold || regime == kOneSign)) s.T = 71, s.K = 64, s.V = 48;
  return s;
}

std::vector<Spec> rows() {
  std::vector<Spec> all = named_rows();
  for (const Spec &s : axes_rows()) all.push_back(s);
  return all;
}

int64_t seeds_of(const Spec &row) {
  if (is_full()) return row.op == FW_OP_BY_AXES ? 1 : 4;
  return 1;
}

void run_case(const Spec &spec, fw_direction direction, bool on_every_level) {
  std::vector<int64_t> indices;
  if (direction == FW_STEP && spec.seed % 2) {
    for (int64_t n = 0; n < spec.N(); ++n) indices.push_back(n % 3 == 1 ? -1 : spec.N() + 1 - n);
  }
  const Checked checked(spec, direction, indices);
  for (const std::string &impl : impls(direction, static_cast<fw_form>(spec.form))) {
    checked.run(forced(impl), impl, direction == FW_BACKWARD && spec.seed % 3 == 0);
    if (!on_every_level) break;
  }
}

void run_case_on(const Spec &spec, const std::string &impl) {
  std::vector<int64_t> indices;
  if (spec.seed % 2) {
    for (int64_t n = 0; n < spec.N(); ++n) indices.push_back(n % 3 == 1 ? -1 : spec.N() + 1 - n);
  }
  Checked(spec, FW_STEP, indices).run(forced(impl), impl);
}

void run_grid(fw_direction direction, int64_t dtype) {
  for (const Spec &row : rows()) {
    for (int64_t regime = 0; regime < kRegimeCount; ++regime) {
      // a call by axes runs one regime in the default run, each row another one
      if (!is_full() && row.op == FW_OP_BY_AXES &&
          regime != (row.gate * 3 + row.erase + row.operands + dtype) % kRegimeCount)
        continue;
      if (is_short() && regime != (row.op + dtype) % kRegimeCount) continue;
      for (int64_t i = 0; i < seeds_of(row); ++i) {
        const int64_t seed =
            10000 * row.op + 1000 * regime + 100 * dtype + 10 * direction + row.operands + 37 * row.gate + i;
        Spec spec = draw(row, dtype, regime, seed);
        if (direction == FW_FORWARD && seed % 4 == 0) spec.form = FW_FORM_RECURRENT;
        run_case(spec, direction, is_full() || seed % 5 == 0);
      }
    }
  }
}

TEST(Grid, ForwardFp32) { run_grid(FW_FORWARD, FW_F32); }
TEST(Grid, ForwardBf16) { run_grid(FW_FORWARD, FW_BF16); }
TEST(Grid, ForwardFp16) { run_grid(FW_FORWARD, FW_F16); }
TEST(Grid, BackwardFp32) { run_grid(FW_BACKWARD, FW_F32); }
TEST(Grid, BackwardBf16) { run_grid(FW_BACKWARD, FW_BF16); }
TEST(Grid, BackwardFp16) { run_grid(FW_BACKWARD, FW_F16); }
TEST(Grid, StepFp32) { run_grid(FW_STEP, FW_F32); }
TEST(Grid, StepBf16) { run_grid(FW_STEP, FW_BF16); }
TEST(Grid, StepFp16) { run_grid(FW_STEP, FW_F16); }

// The data on which a narrow state or state gradient shows needs many tokens: T = 512 of the named rows.
TEST(Grid, LongSequences) {
  if (is_short()) GTEST_SKIP() << "not run: sequences of 512 tokens are not in the short list";
  for (const Spec &row : named_rows()) {
    for (int64_t regime : {kHold, kOneSign, kStrongGates, kSimilarKeys}) {
      if (!is_full() && regime != kHold && regime != kOneSign) continue;
      Spec spec = row;
      spec.regime = regime, spec.dtype = regime == kOneSign ? FW_F16 : FW_BF16, spec.seed = 900 + row.op;
      spec.B = 1, spec.H = 1, spec.group = 1, spec.T = 512, spec.K = 32, spec.V = 24;
      if (spec.n_sub > 1) spec.n_sub = 2;
      run_case(spec, FW_FORWARD, false);
      run_case(spec, FW_BACKWARD, false);
    }
  }
}

// The decode kernels of CUDA take whole panels of columns and dense rows only; of those that stream states one takes one token of a
// 16-bit state, the other [K,V] fp32 states and 16-bit operands.
enum class Streams { kNone, kTokens, kChunk };
void run_step_kernel(const char *impl, Streams streams) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  for (const Spec &row : rows()) {
    for (int64_t i = 0; i < (is_full() ? 12 : 3); ++i) {
      const int64_t dtype = FW_F32 + (row.op + i) % 3, regime = (row.op + row.gate + row.erase + i) % kRegimeCount;
      Spec spec = draw(row, dtype, regime, 7000 + 100 * i + 10 * row.op + 3 * row.gate + row.erase + row.operands);
      if (spec.n_sub > 1 || (streams == Streams::kChunk && dtype == FW_F32)) continue;
      Random random(static_cast<uint64_t>(spec.seed));
      spec.K = random.chance(0.5) ? 64 : 128, spec.V = spec.K == 64 ? 64 * random.integer(1, 2) : 32 * random.integer(1, 4);
      spec.T = pick(random, {1, 2, 7, 16}), spec.strides = 0, spec.normalizer = 0, spec.tail = 0;
      if (streams != Streams::kNone) {
        spec.state_dtype = pick(random, {FW_F32, FW_F32, FW_BF16, FW_F16});
        if (streams == Streams::kChunk) spec.state_dtype = FW_F32;
        const bool is_wide = spec.state_dtype == FW_F32;
        spec.V = is_wide ? 32 * random.integer(1, 4) : 64 * random.integer(1, 2);
        if (!is_wide) spec.T = 1, spec.pack = 0;  // which rounds its state once a token
        if (streams == Streams::kChunk && row.op == FW_OP_LINEAR_ATTN && i == 0) spec.qk_norm = FW_QK_NORM_L2, spec.regime = kDefault;
        if (streams == Streams::kChunk) spec.layout = FW_STATE_KV, spec.T = pick(random, {3, 8, 11, 16});
        if (spec.pack == 0) spec.B = random.integer(1, 5);
      }
      run_case_on(spec, impl);
    }
  }
}
TEST(Grid, StepOfWholePanels) { run_step_kernel("cuda_step", Streams::kNone); }
TEST(Grid, StepOfStreamedStates) { run_step_kernel("sm90_step", Streams::kTokens); }
TEST(Grid, StepOfChunks) { run_step_kernel("sm90_step_chunk", Streams::kChunk); }

// Whether the sm_90a forward takes a row: which factors of the erase key and of v it knows.
bool is_of_sm90(const Spec &row) {
  const recurrence::Row facts = row_of(row);
  if (row.n_sub > 1) return false;
  if (facts.erase == FW_ERASE_INDEPENDENT) return facts.gate != FW_GATE_SCALAR;
  const bool has_p = takes(row, recurrence::kP), has_erase_gate = takes(row, recurrence::kEraseGate);
  const bool has_write_gate = takes(row, recurrence::kWriteGate);
  if (facts.gate == FW_GATE_VECTOR) return facts.erase != FW_ERASE_SHARED_BEFORE && !has_p && has_erase_gate == has_write_gate;
  return !has_erase_gate && !has_write_gate;
}

// And its backward.
bool is_of_sm90_backward(const Spec &row) {
  const fw_erase erase = row_of(row).erase;
  return is_of_sm90(row) && (erase == FW_ERASE_NONE || (erase == FW_ERASE_SHARED_AFTER && takes(row, recurrence::kBeta))) &&
         !takes(row, recurrence::kP | recurrence::kEraseGate | recurrence::kWriteGate);
}

// The sm_90a kernels, which take bf16, the forward K and V multiples of 8 up to 128, the backward 128.
void run_sm90(fw_direction direction) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  for (const Spec &row : rows()) {
    const recurrence::Row facts = row_of(row);
    const bool is_backward = direction == FW_BACKWARD;
    if (is_backward ? !is_of_sm90_backward(row) : !is_of_sm90(row)) continue;
    for (int64_t regime = 0; regime < kRegimeCount; ++regime) {
      if (row.op == FW_OP_BY_AXES && regime != (row.gate * 3 + row.erase + row.operands) % kRegimeCount) continue;
      for (int64_t i = 0; i < (is_full() ? 3 : 1); ++i) {
        Spec spec = draw(row, FW_BF16, regime, 8000 + 100 * regime + 10 * row.op + 3 * row.gate + row.erase + row.operands + i);
        Random random(static_cast<uint64_t>(spec.seed));
        spec.K = random.chance(0.6) ? 128 : 8 * random.integer(1, 16), spec.V = random.chance(0.6) ? 128 : 8 * random.integer(1, 16);
        spec.T = pick(random, {1, 63, 64, 65, 130, 200, 257, 515});
        if (regime == kHold && row.op != FW_OP_BY_AXES) {
          spec.B = spec.H = spec.group = 1;
          spec.T = row.op % 3 == 1 || row.op == FW_OP_KDA ? 3700 : 1100;  // the longer ones in segments, without a pack
        }
        if (is_short()) spec.B = spec.H = 1, spec.group = 1 + row.op % 2, spec.T = pick(random, {17, 64, 130});
        if (spec.T < 8) spec.tail = 0;
        spec.state_dtype = FW_F32, spec.o_dtype = FW_NONE, spec.gate_dtype = random.chance(0.3) && regime != kHold ? FW_BF16 : FW_F32;
        spec.strides = 0, spec.normalizer = 0;
        if (facts.gate == FW_GATE_NONE && facts.erase == FW_ERASE_NONE) spec.qk_norm = 0;
        if (is_backward) spec.K = spec.V = 128;
        spec.form = FW_FORM_CHUNK;
        Checked(spec, direction).run(forced("sm90_chunk"), "sm90_chunk");
      }
    }
  }
}

TEST(Grid, ForwardOfSm90) { run_sm90(FW_FORWARD); }
TEST(Grid, BackwardOfSm90) { run_sm90(FW_BACKWARD); }

// The chunk form on the portable tensor cores: every row, bf16 and fp16, K and V up to 128.
void run_cuda_chunk(fw_direction direction, int64_t dtype) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  for (const Spec &row : rows()) {
    for (int64_t regime = 0; regime < kRegimeCount; ++regime) {
      if (row.op == FW_OP_BY_AXES && regime != (row.gate * 3 + row.erase + row.operands + dtype) % kRegimeCount) continue;
      if (is_short() && regime != (row.op + row.gate + row.erase + row.operands + dtype) % kRegimeCount) continue;
      for (int64_t i = 0; i < (is_full() ? 3 : 1); ++i) {
        Spec spec = draw(row, dtype, regime, 6000 + 100 * regime + 10 * row.op + 3 * row.gate + row.erase + row.operands + dtype + i);
        Random random(static_cast<uint64_t>(spec.seed));
        spec.K = random.chance(0.4) ? 128 : random.integer(1, 128), spec.V = random.chance(0.4) ? 128 : random.integer(1, 128);
        spec.T = is_short() ? pick(random, {1, 16, 17, 33, 47}) : pick(random, {1, 15, 16, 17, 65, 130, 257, 515});
        if (is_short()) spec.B = spec.H = 1, spec.group = 1 + row.op % 2;
        if (spec.pack > 0) spec.B = 1;
        if (spec.T < 8) spec.tail = 0;
        if (dtype == FW_F16 && regime == kOneSign) spec.T = std::min<int64_t>(spec.T, 65);  // gradients past 65504 have no limit
        spec.form = FW_FORM_CHUNK;
        Checked(spec, direction).run(forced("cuda_chunk"), "cuda_chunk");
      }
    }
  }
}

// Operands made inside, of every kind: the norm, gate logits with and without parameters, beta logits; packs, several value heads.
TEST(Grid, BackwardOfSm90Inside) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  for (int64_t op : {FW_OP_SIMPLE_GLA, FW_OP_RETENTION, FW_OP_GLA, FW_OP_DELTA_RULE, FW_OP_GATED_DELTA_RULE, FW_OP_KDA}) {
    Spec spec = spec_of(op);
    const int64_t kinds = has_gate_tensor(spec) ? 4 : 1;
    for (int64_t kind = 1; kind <= kinds; ++kind) {
      spec.B = spec.H = 1, spec.group = 1 + kind % 2, spec.T = kind % 2 ? 70 : 130, spec.K = spec.V = 128;
      spec.dtype = FW_BF16, spec.gate_dtype = kind % 3 == 1 ? FW_BF16 : FW_F32, spec.form = FW_FORM_CHUNK;
      spec.qk_norm = op == FW_OP_GLA && kind < 4 ? FW_QK_NORM_NONE : FW_QK_NORM_L2;
      spec.gate_input = has_gate_tensor(spec) ? kind : 0;
      spec.regime = kind == 2 ? kOneSign : kind == 3 ? kStrongGates : kind == 4 ? kSimilarKeys : kDefault;
      spec.parameters = spec.gate_input == FW_GATE_INPUT_SOFTPLUS || spec.gate_input == FW_GATE_INPUT_BOUNDED;
      spec.beta_input = takes(spec, recurrence::kBeta) ? 1 + kind / 2 % 2 : 0;
      spec.pack = kind % 2 ? 0 : 3, spec.tail = kind % 2 ? 0 : 2, spec.seed = 8900 + 10 * op + kind;
      Checked(spec, FW_BACKWARD).run(forced("sm90_chunk"), "sm90_chunk");
    }
  }
}

// Enough heads that four warps share a chunk on any device; the cases above take two on most.
TEST(Grid, ForwardOfCudaChunkManyHeads) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  for (int64_t op : {FW_OP_GLA, FW_OP_KDA, FW_OP_DPLR}) {
    for (int64_t dtype : {FW_BF16, FW_F16}) {
      Spec spec = spec_of(op);
      spec.B = 1, spec.H = is_short() ? 2 : 96, spec.group = 1, spec.T = 37, spec.K = 40, spec.V = 100;
      spec.dtype = dtype, spec.form = FW_FORM_CHUNK, spec.initial = spec.final = 1;
      Checked(spec, FW_FORWARD).run(forced("cuda_chunk"), "cuda_chunk");
    }
  }
}

TEST(Grid, ForwardOfCudaChunkBf16) { run_cuda_chunk(FW_FORWARD, FW_BF16); }
TEST(Grid, ForwardOfCudaChunkFp16) { run_cuda_chunk(FW_FORWARD, FW_F16); }
TEST(Grid, BackwardOfCudaChunkBf16) { run_cuda_chunk(FW_BACKWARD, FW_BF16); }
TEST(Grid, BackwardOfCudaChunkFp16) { run_cuda_chunk(FW_BACKWARD, FW_F16); }

// Nine chunks whose operands are exact: only the sums are rounded, which the tensor cores cut. Missed the bound of the state by
// 4 % when all products of a chunk went into the state's own sums.
TEST(Grid, ForwardOfExactOperands) {
  if (!is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is not cuda";
  const Spec spec = parse_spec("op=1 B=2 T=515 group=2 K=128 V=104 dtype=2 layout=1 regime=4 form=1 scale_milli=1173 seed=8410");
  Checked(spec, FW_FORWARD).run(forced("sm90_chunk"), "sm90_chunk");
}

// The references in fp32 pass the same limits.
TEST(Grid, References) {
  const Context recurrent("reference_recurrent", 2), parallel("reference_parallel", 2);
  for (const Spec &row : named_rows()) {
    for (fw_direction direction : {FW_FORWARD, FW_BACKWARD, FW_STEP}) {
      const int64_t dtype = FW_F32 + row.op % 3;
      const Spec spec = draw(row, dtype, (row.op + direction) % kRegimeCount, 5000 + row.op);
      Checked(spec, direction).run(recurrent, "reference_recurrent");
      if (direction != FW_FORWARD) continue;
      Spec matrix = spec;
      matrix.form = FW_FORM_PARALLEL;
      Checked(matrix, direction).run(parallel, "reference_parallel");
    }
  }
}

// One case from the line that a failure printed.
TEST(Repro, Case) {
  const char *line = getenv("FW_TEST_CASE"), *direction = getenv("FW_TEST_DIRECTION"), *impl = getenv("FW_TEST_IMPL");
  if (!line || !direction || !impl)
    GTEST_SKIP() << "not run: FW_TEST_CASE, FW_TEST_DIRECTION and FW_TEST_IMPL name no case";
  const Spec spec = parse_spec(line);
  std::vector<int64_t> indices;
  if (atoi(direction) == FW_STEP && spec.seed % 2) {
    for (int64_t n = 0; n < spec.N(); ++n) indices.push_back(n % 3 == 1 ? -1 : spec.N() + 1 - n);
  }
  Checked(spec, atoi(direction), indices)
      .run(forced(impl), impl, atoi(direction) == FW_BACKWARD && spec.seed % 3 == 0);
}

}  // namespace
}  // namespace fw::test
