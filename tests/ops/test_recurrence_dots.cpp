// SPDX-License-Identifier: Apache-2.0
// The forward on bf16 dot units: the units' own arithmetic, then every row that they take against the error rule and
// the laws that a product could break. The models of the units run on every machine, the units where it has them.
#include <math.h>

#include "cpu/dot_units.hpp"
#include "harness_pieces.hpp"

namespace fw::test {
namespace {

bool is_short() { return getenv("FW_TEST_SHORT") != nullptr; }

std::string impl_of(int32_t kind) { return std::string("cpu_") + dot_units_name(kind) + "_chunk"; }

std::vector<int32_t> kinds_that_run() {
  std::vector<int32_t> kinds;
  for (int32_t kind = 0; kind < kDotUnitCount; ++kind) {
    if (dot_units_are_available(kind)) kinds.push_back(kind);
  }
  return kinds;
}

TEST(DotUnits, WhichOnesRan) {
  for (int32_t kind = 0; kind < kDotUnitCount; ++kind) {
    printf("%s: %s\n", dot_units_name(kind),
           dot_units_are_available(kind) ? "ran" : dot_units_are_built(kind) ? "not run: this machine lacks it" : "not built");
  }
  EXPECT_TRUE(dot_units_are_available(kAmxModel) && dot_units_are_available(kPairsModel));
  EXPECT_STREQ(dot_units_name(kDotUnitCount), "none");
  EXPECT_FALSE(dot_units_are_built(kDotUnitCount));
  EXPECT_FALSE(dot_units_pay(kDotUnitCount));
}

// Rounding to nearest even at ties, both sides of them, NaN, infinities, the largest number; the order in a word.
TEST(DotUnits, PackToNearestEven) {
  const float infinity = INFINITY;
  const float special[] = {1.0f, -1.0f, 1.00390625f, 1.01171875f, 1.0039063f, -1.00390625f, 1.0039061f, 0.0f,
                           -0.0f, infinity, -infinity, NAN, 3.4e38f, 65504.0f, 1e-30f, -2.7182817f};
  constexpr int64_t kRows = 5, kPadded = 16, kCols = 16;
  for (int32_t kind : kinds_that_run()) {
    const DotUnits &units = dot_units(kind);
    std::vector<uint32_t> pairs(kCols / 2 + 2, 0xabababab);
    units.pack_rows(kCols, special, pairs.data() + 1);
    EXPECT_EQ(pairs.front(), 0xabababab);
    EXPECT_EQ(pairs.back(), 0xabababab);
    for (int64_t i = 0; i < kCols; ++i) {
      const uint16_t found = static_cast<uint16_t>(pairs[static_cast<size_t>(1 + i / 2)] >> (i % 2 * 16));
      if (isnan(special[i])) EXPECT_TRUE(isnan(bf16_to_f32(found)));
      else EXPECT_EQ(found, f32_to_bf16(special[i])) << dot_units_name(kind) << " " << special[i];
    }
    std::vector<float> from(kRows * 20, NAN);
    for (int64_t r = 0; r < kRows; ++r) {
      for (int64_t c = 0; c < kCols; ++c) from[static_cast<size_t>(r * 20 + c)] = special[(c + 3 * r) % 16];
    }
    std::vector<uint32_t> columns(kPadded / 2 * kCols, 0xabababab);
    units.pack_columns(kRows, kPadded, kCols, from.data(), 20, columns.data());
    for (int64_t r = 0; r < kPadded; ++r) {
      for (int64_t c = 0; c < kCols; ++c) {
        const uint16_t found = static_cast<uint16_t>(columns[static_cast<size_t>(r / 2 * kCols + c)] >> (r % 2 * 16));
        const float x = r < kRows ? special[(c + 3 * r) % 16] : 0.0f;
        if (isnan(x)) EXPECT_TRUE(isnan(bf16_to_f32(found)));
        else EXPECT_EQ(found, f32_to_bf16(x)) << dot_units_name(kind) << " row " << r << " column " << c;
      }
    }
  }
}

float half_of(uint32_t pair, int which) { return bf16_to_f32(static_cast<uint16_t>(pair >> (16 * which))); }

// Every tail of rows, columns and depth, both orders of a, the three ways to treat c, and nothing beside c written.
TEST(DotUnits, MultiplyAgreesWithAPlainLoop) {
  Random random(17);
  const auto bf16 = [&] { return f32_to_bf16(static_cast<float>(random.normal())); };
  for (int32_t kind : kinds_that_run()) {
    const DotUnits &units = dot_units(kind);
    const int64_t cols_step = kind == kAmx || kind == kAvx512Bf16 ? 16 : 4;
    for (int64_t rows : {1, 2, 3, 5, 11, 12, 16, 17, 32, 33, 48}) {
      for (int64_t wide : {1, 2, 3, 5, 9}) {
        for (int64_t depth : {8, 16, 24, 64}) {
          const int64_t cols = wide * cols_step, ldb = cols + 4, ldc = cols + 3;
          const bool is_turned = depth <= 16 && (rows + wide + depth / 8) % 2 == 0;
          const int64_t a_row = is_turned ? 1 : depth + 1, a_col = is_turned ? rows + 2 : 1;
          std::vector<uint32_t> a(static_cast<size_t>(is_turned ? depth * a_col : rows * a_row)),
              b(static_cast<size_t>(depth * ldb));
          for (uint32_t &x : a) x = bf16() | static_cast<uint32_t>(bf16()) << 16;
          for (uint32_t &x : b) x = bf16() | static_cast<uint32_t>(bf16()) << 16;
          std::vector<float> scale(static_cast<size_t>(rows)), before(static_cast<size_t>(rows * ldc));
          for (float &x : scale) x = static_cast<float>(random.uniform(0, 1));
          for (float &x : before) x = static_cast<float>(random.normal());
          for (int how = 0; how < 3; ++how) {  // overwrite, add, scale and add
            std::vector<float> c = before;
            units.multiply(how > 0, how == 2 ? scale.data() : nullptr, rows, cols, depth, a.data(), a_row, a_col,
                           b.data(), ldb, c.data(), ldc);
            for (int64_t m = 0; m < rows; ++m) {
              for (int64_t n = 0; n < ldc; ++n) {
                const size_t at = static_cast<size_t>(m * ldc + n);
                if (n >= cols) {
                  EXPECT_EQ(c[at], before[at]) << "written beside c";
                  continue;
                }
                double sum = how == 0 ? 0 : before[at] * (how == 2 ? static_cast<double>(scale[static_cast<size_t>(m)]) : 1.0);
                double size = fabs(sum);
                for (int64_t k = 0; k < depth; ++k) {
                  const uint32_t x = a[static_cast<size_t>(m * a_row + k * a_col)], y = b[static_cast<size_t>(k * ldb + n)];
                  for (int which : {0, 1}) {
                    const double product = static_cast<double>(half_of(x, which)) * half_of(y, which);
                    sum += product;
                    size += fabs(product);
                  }
                }
                // a rounding of the running sum for each of the 2 depth products, and one of the scaling
                ASSERT_NEAR(c[at], sum, (2 * static_cast<double>(depth) + 2) * 0x1p-24 * size)
                    << dot_units_name(kind) << " rows " << rows << " cols " << cols << " depth " << depth << " how " << how
                    << " at " << m << "," << n;
              }
            }
          }
        }
      }
    }
  }
}

// The rows that dot units take: all but linear_attn with a norm or a normaliser.
std::vector<Spec> rows() {
  std::vector<Spec> all = named_rows();
  for (const Spec &s : axes_rows()) all.push_back(s);
  for (Spec &s : all) {
    s.dtype = FW_BF16, s.form = FW_FORM_CHUNK;
    if (s.n_sub > 1) s.n_sub = 2;
  }
  return all;
}

TEST(Dots, ErrorRule) {
  if (is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is cuda, dot units are the CPU's";
  for (const Spec &row : rows()) {
    for (int64_t regime = 0; regime < kRegimeCount; ++regime) {
      if (row.op == FW_OP_BY_AXES && regime != (row.gate * 3 + row.erase + row.operands) % kRegimeCount && !is_full()) continue;
      if (is_short() && regime != (row.op + 1) % kRegimeCount) continue;
      Spec spec = row;
      spec.regime = regime, spec.seed = 100 * row.op + 10 * row.gate + row.erase + 7 * row.operands + regime;
      Random random(static_cast<uint64_t>(spec.seed));
      const auto pick = [&](std::initializer_list<int64_t> choices) {
        return *(choices.begin() + random.integer(0, static_cast<int64_t>(choices.size()) - 1));
      };
      spec.B = random.integer(1, 2), spec.group = random.integer(1, 2);
      spec.T = is_short() ? pick({17, 33}) : pick({1, 15, 16, 17, 47, 97});
      spec.K = is_short() ? 32 : pick({32, 48, 64, 128});
      spec.V = is_short() ? pick({7, 16}) : pick({5, 16, 24, 31, 64, 72});
      if (random.chance(0.3)) spec.B = 1, spec.pack = random.integer(1, 4), spec.tail = spec.T > 5 ? 2 : 0;
      if (random.chance(0.3)) spec.state_dtype = pick({FW_BF16, FW_F16});
      if (random.chance(0.3)) spec.o_dtype = FW_F32;
      if (random.chance(0.4)) spec.layout = FW_STATE_VK;
      spec.strides = random.chance(0.5) ? 0 : random.integer(1, 4);
      if (row_of(spec).erase != FW_ERASE_NONE && regime == kDefault && random.chance(0.5)) spec.qk_norm = FW_QK_NORM_L2;
      const Checked checked(spec, FW_FORWARD);
      for (int32_t kind : kinds_that_run()) checked.run(forced(impl_of(kind)), impl_of(kind));
    }
  }
}

TEST(Dots, Laws) {
  if (is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is cuda, dot units are the CPU's";
  for (const Spec &row : rows()) {
    if (row.op == FW_OP_BY_AXES) continue;
    if (is_short() && row.op % 4 != 3) continue;
    Spec spec = row;
    spec.B = 1, spec.T = 45, spec.K = 48, spec.V = 71, spec.H = 1, spec.group = 1, spec.seed = 40 + row.op;
    const Operands all = rounded_operands(spec);
    for (int32_t kind : kinds_that_run()) {
      const Path path = {impl_of(kind), FW_FORM_CHUNK};
      const std::string what = path.impl + ": " + text(spec);
      const Outputs whole = run_path(path, spec, all, FW_FORWARD);
      for (int32_t n_threads : {1, 3, 8}) {
        expect_same_bits(whole, run_call(Context(path.impl.c_str(), n_threads), spec, all, FW_FORWARD),
                         std::to_string(n_threads) + " threads, " + what);
      }
      // a cut at a multiple of the chunk, and a prefix: the same bits
      const int64_t C = 2 * chunk_length(path, spec, all);
      Operands second = tokens_between(spec, all, C, spec.T);
      Spec piece = spec;
      piece.T = C;
      const Outputs early = run_path(path, piece, tokens_between(spec, all, 0, C), FW_FORWARD);
      second["initial_state"] = early.values.at("final_state");
      piece.T = spec.T - C;
      Outputs joined = run_path(path, piece, second, FW_FORWARD);
      Values o = whole.values.at("o");
      paste(o, 1, 0, early.values.at("o"));
      paste(o, 1, C, joined.values.at("o"));
      joined.values["o"] = o;
      expect_same_bits(whole, joined, "cut, " + what);
      for (int64_t t : {3, 21, 44}) {
        piece.T = t;
        const Outputs prefix = run_path(path, piece, tokens_between(spec, all, 0, t), FW_FORWARD);
        EXPECT_EQ(first_difference(cut(whole.values.at("o"), 1, 0, t), prefix.values.at("o")), "") << what;
      }
      // NaN stays in its sequence
      Spec both = spec;
      both.B = 2, both.V = 16;
      const Operands plain = rounded_operands(both);
      Operands spoilt = plain;
      for (double &x : spoilt.at("v").data) {
        if (&x < spoilt.at("v").data.data() + spoilt.at("v").data.size() / 2) x = NAN;
      }
      const Outputs clean = run_path(path, both, plain, FW_FORWARD), bad = run_path(path, both, spoilt, FW_FORWARD);
      EXPECT_EQ(first_difference(cut(clean.values.at("o"), 0, 1, 2), cut(bad.values.at("o"), 0, 1, 2)), "") << what;
      EXPECT_TRUE(isnan(bad.values.at("o").data[0])) << what;
    }
  }
}

std::string refusal(const std::string &impl, const Spec &spec, bool with_saved = false) {
  const Operands all = rounded_operands(spec);
  Call call(spec, all, FW_FORWARD);
  unsigned char saved[1];
  if (with_saved) call.desc.saved = saved;
  uint64_t bytes = 0;
  EXPECT_EQ(fw_recurrence_workspace_size(forced(impl).get(), &call.desc, FW_FORWARD, &bytes), FW_UNSUPPORTED);
  const std::string error = fw_last_error(), start = "implementation " + impl + " is forced and refuses: ";
  const size_t at = error.find(start);
  return at == std::string::npos ? error : error.substr(at + start.size());
}

TEST(Dots, Refusals) {
  if (is_on_cuda()) GTEST_SKIP() << "not run: FW_TEST_DEVICE is cuda, dot units are the CPU's";
  Spec good;
  good.dtype = FW_BF16, good.K = 32, good.form = FW_FORM_CHUNK;
  const std::string impl = impl_of(kPairsModel);
  Spec s = good;
  s.dtype = FW_F32;
  EXPECT_EQ(refusal(impl, s), "q is fp32, bf16 dot units take bf16");
  s = good;
  s.K = 40;
  EXPECT_EQ(refusal(impl, s), "K is 40, taken multiples of 16 from 32 on");
  s.K = 16;
  EXPECT_EQ(refusal(impl, s), "K is 16, taken multiples of 16 from 32 on");
  s = good;
  s.form = FW_FORM_RECURRENT;
  EXPECT_EQ(refusal(impl, s), "form is recurrent");
  s = good;
  s.op = FW_OP_LINEAR_ATTN, s.qk_norm = FW_QK_NORM_L2;
  const std::string normalised = "keys are normalised inside or outputs divided, which linear_attn computes in fp32";
  EXPECT_EQ(refusal(impl, s), normalised);
  s.qk_norm = 0, s.normalizer = FW_NORMALIZER_SUM;
  EXPECT_EQ(refusal(impl, s), normalised);
  EXPECT_EQ(refusal(impl, good, true), "saved is given, written by the fp32 chunk form only");
  for (int32_t kind = 0; kind < kDotUnitCount; ++kind) {
    const std::string name = dot_units_name(kind);
    if (!dot_units_are_built(kind)) {
      EXPECT_EQ(refusal(impl_of(kind), good), name + " is not built into this library");
    } else if (!dot_units_are_available(kind)) {
      EXPECT_EQ(refusal(impl_of(kind), good), "this machine does not execute " + name);
    }
  }
  // without being named, none of them runs
  const Operands all = rounded_operands(good);
  Call call(good, all, FW_FORWARD);
  char lines[4096];
  uint64_t needed = 0;
  ASSERT_EQ(fw_recurrence_explain(Context().get(), &call.desc, FW_FORWARD, lines, sizeof lines, &needed), FW_OK);
  const std::string text = lines;
  for (const char *kind : {"amx", "bf16"}) {
    EXPECT_NE(text.find(std::string("cpu_") + kind + "_model_chunk: refused: a model of the units: runs when it is forced by its name\n"),
              std::string::npos)
        << text;
  }
  for (int32_t kind : kinds_that_run()) {
    if (kind == kAmxModel || kind == kPairsModel) continue;
    const std::string name = impl_of(kind) + ": refused: ";
    EXPECT_NE(text.find(name + (dot_units_pay(kind) ? "on trial: runs when it is forced by its name"
                                                    : std::string("this CPU's family is not one where ") + dot_units_name(kind) +
                                                          " was measured to pay")),
              std::string::npos)
        << text;
  }
}

}  // namespace
}  // namespace fw::test
