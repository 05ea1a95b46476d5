// SPDX-License-Identifier: Apache-2.0
// The inverse of I + L: the ways agree where arithmetic is exact enough, and fail where docs/math.md says they fail.
#include "ops/forms_helpers.hpp"

using namespace forms_test;

namespace {

constexpr fw_inverse_method kWays[] = {FW_INVERSE_SUBSTITUTION, FW_INVERSE_NEUMANN,    FW_INVERSE_DOUBLING,
                                       FW_INVERSE_BLOCK_MERGE,  FW_INVERSE_BLOCK_ROWS, FW_INVERSE_HORNER};

Array inverse(const Array &L, int64_t n, fw_inverse_method method = FW_INVERSE_SUBSTITUTION, int64_t block = 0) {
  Output X(n * n);
  EXPECT_EQ(fw_form_inverse_f64(method, FW_F64, n, block, L.data(), X), FW_OK) << fw_last_error();
  return X.array();
}

Array inverse_in(fw_dtype arithmetic, const Array &L, int64_t n, fw_inverse_method method, int64_t block = 0) {
  const std::vector<float> narrow(L.begin(), L.end());
  std::vector<float> X(n * n, NAN);
  EXPECT_EQ(fw_form_inverse_f32(method, arithmetic, n, block, narrow.data(), X.data()), FW_OK) << fw_last_error();
  return Array(X.begin(), X.end());
}

// L of n keys of length 1 with pairwise cosine `cosine` in expectation, beta in [0.9, 1], no decay; entries rounded
// to fp32, so that every arithmetic is given the same matrix. Above the diagonal: NaN, which nothing may read.
Array similar_keys(int64_t n, double cosine, uint64_t seed) {
  const int64_t K = 128;
  Random r(seed);
  const Array common = r.unit_rows(1, K);
  Array rest = r.unit_rows(n, K), L(n * n, kNan);
  for (int64_t t = 0; t < n; ++t) {
    double along = 0, square = 0;
    for (int64_t i = 0; i < K; ++i) along += rest[t * K + i] * common[i];
    for (int64_t i = 0; i < K; ++i) {
      rest[t * K + i] -= along * common[i];
      square += rest[t * K + i] * rest[t * K + i];
    }
    for (int64_t i = 0; i < K; ++i) {
      rest[t * K + i] = sqrt(cosine) * common[i] + sqrt(1 - cosine) * rest[t * K + i] / sqrt(square);
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const double beta = r.uniform(0.9, 1);
    for (int64_t j = 0; j < i; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < K; ++c) dot += rest[i * K + c] * rest[j * K + c];
      L[i * n + j] = static_cast<double>(static_cast<float>(beta * dot));
    }
  }
  return L;
}

// Sizes that are no power of two and blocks that do not divide them included. |L_ij| <= 0.3: entries of the inverse
// stay below 1.3^12 = 23, so 1e-12 is 400 round-offs of the largest.
TEST(Inverse, AllWaysAgree) {
  for (int64_t n : {0, 1, 2, 3, 4, 7, 8, 12, 13}) {
    Random r(static_cast<uint64_t>(n) + 40);
    const Array L = r.array(n * n, -0.3, 0.3);
    const Array want = inverse(L, n);
    for (fw_inverse_method method : kWays) {
      for (int64_t block : {int64_t{0}, int64_t{1}, int64_t{3}, int64_t{4}, n}) {
        if (block > n) continue;
        EXPECT_LT(max_difference(inverse(L, n, method, block), want), kTight) << "n " << n << " method " << method;
      }
    }
  }
}

TEST(Inverse, ProductIsTheIdentity) {
  const int64_t n = 13;
  Random r(41);
  Array L = r.array(n * n, -0.3, 0.3);
  const Array X = inverse(L, n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i; j < n; ++j) L[i * n + j] = i == j ? 1 : 0;  // now I + L
  }
  Array product = multiply(L, X, n, n, n);
  for (int64_t i = 0; i < n; ++i) product[i * n + i] -= 1;
  EXPECT_LT(largest(product), kTight);
}

TEST(Inverse, DiagonalAndAboveAreNotRead) {
  const int64_t n = 9;
  Random r(42);
  Array L = r.array(n * n, -0.3, 0.3);
  const Array want = inverse(L, n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = i; j < n; ++j) L[i * n + j] = kNan;
  }
  for (fw_inverse_method method : kWays) {
    const Array X = inverse(L, n, method);
    EXPECT_LT(max_difference(X, want), kTight);
    for (int64_t i = 0; i < n; ++i) {
      EXPECT_EQ(X[i * n + i], 1.0);
      for (int64_t j = i + 1; j < n; ++j) EXPECT_EQ(X[i * n + j], 0.0);
    }
  }
}

// Row i of X <- I - L X is final after i passes, and is then what forward substitution computes, operation by
// operation: the same bits, in every arithmetic.
TEST(Inverse, HornerIsForwardSubstitution) {
  for (int64_t n : {5, 16, 64}) {
    for (double cosine : {0.0, 0.5, 0.99}) {
      const Array L = similar_keys(n, cosine, 43);
      EXPECT_EQ(inverse(L, n, FW_INVERSE_HORNER), inverse(L, n, FW_INVERSE_SUBSTITUTION));
      for (fw_dtype arithmetic : {FW_F32, FW_BF16, FW_F16}) {
        EXPECT_EQ(inverse_in(arithmetic, L, n, FW_INVERSE_HORNER),
                  inverse_in(arithmetic, L, n, FW_INVERSE_SUBSTITUTION));
      }
    }
  }
}

// L^n = 0, so the series is finite: n terms, and no fewer.
TEST(Inverse, NeumannSeriesEndsAfterNTerms) {
  const int64_t n = 6;
  Array L(n * n);
  for (int64_t i = 1; i < n; ++i) L[i * n + i - 1] = 1;  // one path only, of n - 1 edges
  const Array X = inverse(L, n, FW_INVERSE_NEUMANN);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j <= i; ++j) EXPECT_EQ(X[i * n + j], (i - j) % 2 == 0 ? 1.0 : -1.0);
  }
}

// Equal keys, beta = 1: L is ones below the diagonal, (L^m)_ij = C(i-j-1, m-1) and the inverse is I minus one
// subdiagonal. Of 64 rows the largest power has C(62,31) = 4.65e17 in its corner and all of them cancel to 1, 0 and
// -1.
TEST(Inverse, EqualKeysHaveBinomialPowers) {
  const int64_t n = 16;
  Array L(n * n), power(n * n), choose((n + 1) * (n + 1));
  for (int64_t i = 0; i < n; ++i) {
    power[i * n + i] = 1;
    for (int64_t j = 0; j < i; ++j) L[i * n + j] = 1;
  }
  for (int64_t i = 0; i <= n; ++i) {
    choose[i * (n + 1)] = 1;
    for (int64_t j = 1; j <= i; ++j) {
      choose[i * (n + 1) + j] = choose[(i - 1) * (n + 1) + j - 1] + (j < i ? choose[(i - 1) * (n + 1) + j] : 0);
    }
  }
  for (int64_t m = 1; m < n; ++m) {
    power = multiply(L, power, n, n, n);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        EXPECT_EQ(power[i * n + j], i - j - 1 < m - 1 ? 0.0 : choose[(i - j - 1) * (n + 1) + m - 1]);
      }
    }
  }
  const Array X = inverse(L, n);
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < n; ++j) EXPECT_EQ(X[i * n + j], i == j ? 1.0 : (i == j + 1 ? -1.0 : 0.0));
  }
}

// T_ij = -x_i^T (D - y x^T)_{i-1} ... (D - y x^T)_{j+1} k_j when one key erases and writes. With |k| = 1, 0 <= beta
// <= 2 and g <= 0 every factor is a contraction, so |T_ij| <= beta_i. (T_k of independent keys has no such bound.)
TEST(Inverse, EntriesAreTransitionsAndStayBelowBeta) {
  for (fw_gate gate : {FW_GATE_NONE, FW_GATE_SCALAR, FW_GATE_VECTOR}) {
    const Shape s{gate, FW_ERASE_SHARED_AFTER, 12, 4, 3};
    Data d(s, 44);
    Random r(45);
    d.beta = r.array(s.T, 0, 2);
    const Array T = inverse(graph(d).L, s.T);
    for (int64_t i = 0; i < s.T; ++i) {
      for (int64_t j = 0; j < i; ++j) {
        Array along(d.k.begin() + j * s.K, d.k.begin() + (j + 1) * s.K);  // k_j, carried forward
        for (int64_t t = j + 1; t <= i; ++t) {
          double read = 0;
          for (int64_t c = 0; c < s.K; ++c) read += d.beta[t] * d.decay(t, c) * d.k[t * s.K + c] * along[c];
          if (t == i) {
            EXPECT_NEAR(T[i * s.T + j], -read, kTight);
          }
          for (int64_t c = 0; c < s.K; ++c) along[c] = d.decay(t, c) * along[c] - d.k[t * s.K + c] * read;
        }
        EXPECT_LE(fabs(T[i * s.T + j]), d.beta[i] + kTight);
      }
    }
  }
}

double worst_error(fw_dtype arithmetic, int64_t n, double cosine, fw_inverse_method method) {
  double worst = 0;
  for (uint64_t seed : {46u, 47u, 48u}) {
    const Array L = similar_keys(n, cosine, seed);
    const double error = max_difference(inverse_in(arithmetic, L, n, method), inverse(L, n));
    worst = error > worst ? error : worst;
  }
  return worst;
}

// Unit round-offs of the operands.
constexpr double kF32 = 0x1p-24, kF16 = 0x1p-11, kBf16 = 0x1p-8;

// Dissimilar keys: all ways are good. Entries of L are random with root mean square 128^-1/2 = 0.09 and at most 0.4,
// those of X likewise next to a diagonal of 1. Of the 64 products of an entry the one with the diagonal is off by 0.4
// u at most, the others by 2 * 0.09^2 u each with random sign, three sigma 0.4 u: 0.8 u, and twice that is allowed.
// In fp32 the sums round too, 64 times at most 0.4 u more.
TEST(Inverse, DissimilarKeysAreEasy) {
  for (fw_inverse_method method : kWays) {
    EXPECT_LT(worst_error(FW_BF16, 64, 0, method), 1.6 * kBf16) << method;
    EXPECT_LT(worst_error(FW_F16, 64, 0, method), 1.6 * kF16) << method;
    EXPECT_LT(worst_error(FW_F32, 64, 0, method), 27 * kF32) << method;
  }
}

// Similar keys: the true entries stay below 1 while powers of L grow like binomials, so the two series lose every
// digit even on 16 rows in half precision, and in fp32 on 64; substitution and the block methods keep theirs. A
// column of X is 1, then about -1, then small: its products with a row of L are off by 2 u (1 + 1) at most, and as
// much again comes through the rows before: 8 u. In fp32 the 64 sums of size 1 add 64 u.
TEST(Inverse, SimilarKeysBreakTheSeriesOnly) {
  for (fw_inverse_method method : {FW_INVERSE_SUBSTITUTION, FW_INVERSE_BLOCK_MERGE, FW_INVERSE_BLOCK_ROWS}) {
    for (int64_t n : {16, 64}) {
      EXPECT_LT(worst_error(FW_F32, n, 0.9, method), 72 * kF32) << method;
      EXPECT_LT(worst_error(FW_F16, n, 0.9, method), 8 * kF16) << method;
      EXPECT_LT(worst_error(FW_BF16, n, 0.9, method), 8 * kBf16) << method;
    }
  }
  for (fw_inverse_method method : {FW_INVERSE_NEUMANN, FW_INVERSE_DOUBLING}) {
    EXPECT_GT(worst_error(FW_F16, 16, 0.9, method), 0.1) << method;
    EXPECT_GT(worst_error(FW_BF16, 16, 0.9, method), 0.5) << method;
    EXPECT_GT(worst_error(FW_F32, 64, 0.9, method), 1) << method;
  }
}

// fp16 has no room for the powers either: L^32 of 64 similar keys passes 65504.
TEST(Inverse, DoublingOverflowsFp16) {
  const Array X = inverse_in(FW_F16, similar_keys(64, 0.99, 49), 64, FW_INVERSE_DOUBLING);
  bool is_finite = true;
  for (double x : X) is_finite = is_finite && isfinite(x);
  EXPECT_FALSE(is_finite);
}

// Operands are rounded to the type, to nearest even; sums are not. 1 + 2^-8 and 1 + 2^-11 lie half way between two
// numbers of bf16 and fp16.
TEST(Inverse, OperandsAreRoundedSumsAreNot) {
  const auto corner = [](fw_dtype arithmetic, double l10, double l21) {
    const Array L = {0, 0, 0, l10, 0, 0, 0, l21, 0};
    return inverse_in(arithmetic, L, 3, FW_INVERSE_SUBSTITUTION)[6];  // l21 * l10, both rounded
  };
  EXPECT_EQ(corner(FW_F32, 1 + 0x1p-9, 3), 3 * (1 + 0x1p-9));
  EXPECT_EQ(corner(FW_BF16, 1 + 0x1p-8, 3), 3.0);
  EXPECT_EQ(corner(FW_BF16, 1 + 3 * 0x1p-8, 3), 3 * (1 + 0x1p-6));
  EXPECT_EQ(corner(FW_F16, 1 + 0x1p-11, 3), 3.0);
  EXPECT_EQ(corner(FW_F16, 1 + 3 * 0x1p-11, 3), 3 * (1 + 0x1p-9));
  EXPECT_EQ(corner(FW_F16, 1, 70000), kInf);
  EXPECT_EQ(corner(FW_BF16, 1, 70000), 70144.0);
  // 1 + 2^-8 as a sum of two products: kept whole by the fp32 accumulator
  const Array X =
      inverse_in(FW_BF16, {0, 0, 0, 0, -1, 0, 0, 0, -0x1p-8, 0, 0, 0, 0, -1, -1, 0}, 4, FW_INVERSE_SUBSTITUTION);
  EXPECT_EQ(X[12], 1 + 0x1p-8);
}

}  // namespace
