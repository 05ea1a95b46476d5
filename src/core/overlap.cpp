// SPDX-License-Identifier: Apache-2.0
// Two elements share an address when a sum of a_i * stride_i is 0 for some a_i that are not all 0, |a_i| < size_i.
//  1. An axis that steps over the reach of all others together has a = 0 and is left out; usual layouts end here.
//  2. Two axes: the least solution is (stride_1, stride_0) over their greatest common divisor.
//  3. More: every a of all but the two longest axes, and for each the two as a linear equation.
#include "core/overlap.hpp"

#include <numeric>
#include <utility>

namespace fw {
namespace {

typedef __int128 Wide;  // products of two offsets

struct Axis {
  int64_t stride, reach;  // stride > 0, reach = size - 1 >= 1
};

Wide floor_of(Wide a, int64_t b) { return a / b - (a % b != 0 && a < 0 ? 1 : 0); }
Wide ceiling_of(Wide a, int64_t b) { return -floor_of(-a, b); }

int64_t inverse_modulo(int64_t a, int64_t m) {  // a and m without a common divisor
  int64_t r0 = m, r1 = a % m, t0 = 0, t1 = 1;
  while (r1 != 0) {
    const int64_t n = r0 / r1;
    r0 -= n * r1, t0 -= n * t1;
    std::swap(r0, r1), std::swap(t0, t1);
  }
  return t0 < 0 ? t0 + m : t0;
}

// Whether a * x.stride + b * y.stride = c within the reaches; for c = 0 with a and b not 0.
bool is_solvable(const Axis &x, const Axis &y, int64_t c) {
  const int64_t divisor = std::gcd(x.stride, y.stride), p = x.stride / divisor, q = y.stride / divisor;
  if (c == 0) return q <= x.reach && p <= y.reach;
  if (c % divisor != 0) return false;
  const int64_t right = c / divisor, residue = right % q;
  // a = a0 + n q and b = b0 - n p for whole n
  const Wide a0 = static_cast<Wide>(residue < 0 ? residue + q : residue) * inverse_modulo(p, q) % q;
  const Wide b0 = (right - a0 * p) / q;
  const Wide low_a = ceiling_of(-x.reach - a0, q), high_a = floor_of(x.reach - a0, q);
  const Wide low_b = ceiling_of(b0 - y.reach, p), high_b = floor_of(b0 + y.reach, p);
  return (low_a > low_b ? low_a : low_b) <= (high_a < high_b ? high_a : high_b);
}

// By insertion: at most FW_MAX_DIMS.
template <class Before>
void sort(Axis *axes, int32_t n, Before before) {
  for (int32_t i = 1; i < n; ++i) {
    for (int32_t j = i; j > 0 && before(axes[j], axes[j - 1]); --j) std::swap(axes[j], axes[j - 1]);
  }
}

}  // namespace

Overlap overlap_of(const fw_tensor &t) {
  Axis axes[FW_MAX_DIMS];
  int32_t n = 0;
  for (int32_t i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return Overlap::kNone;
  }
  for (int32_t i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 1) continue;
    if (t.strides[i] == 0) return Overlap::kSome;
    axes[n++] = {t.strides[i] < 0 ? -t.strides[i] : t.strides[i], t.shape[i] - 1};
  }
  sort(axes, n, [](const Axis &a, const Axis &b) { return a.stride < b.stride; });
  int64_t extent = 0;
  for (int32_t i = 0; i + 1 < n; ++i) extent += axes[i].stride * axes[i].reach;
  while (n > 0 && axes[n - 1].stride > extent) {
    if (--n > 0) extent -= axes[n - 1].stride * axes[n - 1].reach;
  }
  if (n < 2) return Overlap::kNone;
  sort(axes, n, [](const Axis &a, const Axis &b) { return a.reach > b.reach; });
  int64_t cases = 1;
  for (int32_t i = 2; i < n; ++i) {
    if (__builtin_mul_overflow(cases, 2 * axes[i].reach + 1, &cases) || cases > kOverlapCases)
      return Overlap::kUnknown;
  }
  for (int64_t number = 0; number < cases; ++number) {
    int64_t sum = 0, rest = number;
    bool is_zero = true;
    for (int32_t i = 2; i < n; ++i) {
      const int64_t a = rest % (2 * axes[i].reach + 1) - axes[i].reach;
      rest /= 2 * axes[i].reach + 1;
      sum += a * axes[i].stride;
      is_zero = is_zero && a == 0;
    }
    if ((sum == 0 && !is_zero) || is_solvable(axes[0], axes[1], -sum)) return Overlap::kSome;
  }
  return Overlap::kNone;
}

}  // namespace fw
