// SPDX-License-Identifier: Apache-2.0
// The multiply-adds of each form, counted by running it on a type that counts, are the formulas of docs/math.md,
// "Costs".
#include "ops/forms/forms.hpp"

#include <gtest/gtest.h>

namespace counting {

int64_t products = 0;  // multiply-adds of products

struct Counted {
  double value = 0;
  Counted() = default;
  explicit Counted(double x) : value(x) {}
  Counted operator-() const { return Counted(-value); }
  Counted operator+(const Counted &o) const { return Counted(value + o.value); }
  Counted operator-(const Counted &o) const { return Counted(value - o.value); }
  Counted operator*(const Counted &o) const { return Counted(value * o.value); }
};
Counted exp(const Counted &x) { return Counted(::exp(x.value)); }
void add_product(Counted &sum, const Counted &a, const Counted &b) {
  sum.value += a.value * b.value;
  ++products;
}

}  // namespace counting

namespace {

using counting::Counted;
using namespace fw::forms;

struct Sizes {
  int64_t T, K, V, C;
};

Problem<Counted> make(fw_erase erase, const Sizes &z) {
  const std::vector<Counted> rows(static_cast<size_t>(z.T * (z.K > z.V ? z.K : z.V)), Counted(0.25));
  const bool independent = erase == FW_ERASE_INDEPENDENT;
  const Counted *r = rows.data();
  return make_problem(Operands<Counted>{FW_GATE_VECTOR, erase, z.T, z.K, z.V, Counted(1), r, r, r, nullptr, nullptr,
                                        nullptr, nullptr, independent ? r : nullptr, independent ? r : nullptr, r,
                                        nullptr});
}

template <class Body>
int64_t count(Body body) {
  counting::products = 0;
  body();
  return counting::products;
}

TEST(Forms, MultiplyAddsAreThoseOfTheTable) {
  for (const Sizes &z : {Sizes{24, 5, 3, 8}, Sizes{24, 4, 7, 6}, Sizes{24, 6, 6, 24}}) {
    const int64_t KV = z.K * z.V, sum = z.K + z.V;
    const struct {
      fw_erase erase;
      int64_t recurrent, solve, factors;  // a token; solve and factors times 2
    } table[] = {
        {FW_ERASE_NONE, 2 * KV, 4 * KV + (z.C + 1) * sum, 4 * KV + (z.C + 1) * sum},
        {FW_ERASE_SHARED_AFTER, 3 * KV, 6 * KV + 2 * z.C * sum, 6 * KV + 2 * z.C * sum + (z.C - 1) * z.K},
        {FW_ERASE_INDEPENDENT, 4 * KV, 8 * KV + 4 * z.C * sum, 8 * KV + 4 * z.C * sum + (z.C - 1) * z.K},
    };
    for (const auto &row : table) {
      const Problem<Counted> p = make(row.erase, z);
      EXPECT_EQ(count([&] { recurrent(p); }), z.T * row.recurrent) << row.erase;
      EXPECT_EQ(2 * count([&] { chunk(p, z.C, FW_CHUNK_SOLVE); }), z.T * row.solve) << row.erase;
      EXPECT_EQ(2 * count([&] { chunk(p, z.C, FW_CHUNK_FACTORS); }), z.T * row.factors) << row.erase;
    }
  }
}

// Independent keys over a shared key: KV + C (K + V) more multiply-adds a token in both chunk forms, KV in the
// recurrent one.
TEST(Forms, IndependentKeysCostOneMoreProductOfEachKind) {
  const Sizes z{24, 5, 3, 8};
  const Problem<Counted> one = make(FW_ERASE_SHARED_AFTER, z), two = make(FW_ERASE_INDEPENDENT, z);
  const int64_t KV = z.K * z.V, extra = z.T * (KV + z.C * (z.K + z.V));
  EXPECT_EQ(count([&] { recurrent(two); }) - count([&] { recurrent(one); }), z.T * KV);
  for (fw_chunk_kind kind : {FW_CHUNK_SOLVE, FW_CHUNK_FACTORS}) {
    EXPECT_EQ(count([&] { chunk(two, z.C, kind); }) - count([&] { chunk(one, z.C, kind); }), extra);
  }
}

// The explicit inverse by substitution costs n^2 (n-1) / 2 as a product with the identity; applying it costs what
// substitution costs, plus its diagonal. Doubling: 2 (ceil(log2 n) - 1) products of triangles, each n (n+1) (n+2)
// / 6.
TEST(Inverse, MultiplyAddsOfTheWays) {
  const int64_t n = 16, V = 3;
  Matrix<Counted> L(n, n), R(n, V);
  EXPECT_EQ(count([&] { substitute(L, R); }), V * n * (n - 1) / 2);
  EXPECT_EQ(count([&] { inverse(FW_INVERSE_SUBSTITUTION, L, 4, Exact()); }), n * n * (n - 1) / 2);
  const int64_t triangle = n * (n + 1) * (n + 2) / 6;
  EXPECT_EQ(count([&] { inverse(FW_INVERSE_DOUBLING, L, 4, Exact()); }), 2 * 3 * triangle);
  EXPECT_EQ(count([&] { inverse(FW_INVERSE_NEUMANN, L, 4, Exact()); }), (n - 1) * triangle);
}

}  // namespace
