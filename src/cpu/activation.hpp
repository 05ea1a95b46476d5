// SPDX-License-Identifier: Apache-2.0
// Vector math above exp: log1p, softplus, SiLU, gate activations and L2/RMS norms on rows of padded fp32 scratch,
// forward and derivative. Included by *.isa.cpp files only. Every row has room for pad_lanes(n) floats: the lanes
// past n are read (whatever is there) and written (as 0), so that a caller's own memory is never passed here unless n
// is a multiple.
//
// Far below 0, e^x is subnormal in fp32 and loses bits before a large factor can bring it back. So what decays like
// e^x is kept as m 2^n ("parts") until the last product.
#pragma once
#include "cpu/vec.hpp"
#include "fastweight/neighbours.h"

namespace fw::FW_LEVEL {

// log(1 + e) for e in [0, 1], relative error below 2 units in the last place: 2 atanh(s), s = e / (2 + e)
inline __attribute__((always_inline)) Vec log1p_unit(Vec e) {
  const Vec s = e / (splat(2.0f) + e), z = s * s;
  Vec p = splat(2.4289568409e-1f);
  p = fma(p, z, splat(2.1430737448e-1f));
  p = fma(p, z, splat(2.8616597116e-1f));
  p = fma(p, z, splat(3.9998888337e-1f));
  p = fma(p, z, splat(6.6666675501e-1f));
  return fma(s * z, p, s + s);
}

// What sigmoid, its slope and softplus share: e^-|x| as parts and as a number.
struct Decay {
  Vec m, e;
  IntVec n;
};
inline __attribute__((always_inline)) Decay decay_of(Vec x) {
  Decay d;
  exp_parts(-abs(x), &d.m, &d.n);
  d.e = scale_by(d.m, d.n);
  return d;
}

// sigmoid(x) = *m 2^*n
inline __attribute__((always_inline)) void sigmoid_parts(Vec x, const Decay &d, Vec *m, IntVec *n) {
  const IntVec is_negative = ~(x >= splat(0.0f));
  *m = select(is_negative, d.m, splat(1.0f)) / (splat(1.0f) + d.e);
  *n = d.n & is_negative;
}
// sigmoid(x) (1 - sigmoid(x)) = *m 2^d.n
inline __attribute__((always_inline)) Vec sigmoid_slope_part(const Decay &d) {
  const Vec inverse = splat(1.0f) / (splat(1.0f) + d.e);
  return d.m * inverse * inverse;
}
// softplus(x + low) = *m 2^*n, |low| at most a round-off of x
inline __attribute__((always_inline)) void softplus_parts(Vec x, Vec low, Vec *m, IntVec *n) {
  const Decay d = decay_of(x);
  const IntVec is_positive = x >= splat(0.0f), is_far = x < splat(-20.0f);  // e^-20 / 2 is below a round-off
  const Vec slope = select(is_positive, splat(1.0f), d.e) / (splat(1.0f) + d.e);
  const Vec near = fma(slope, low, (Vec)((IntVec)x & is_positive) + log1p_unit(d.e));
  *m = select(is_far, fma(d.m, low, d.m), near);
  *n = d.n & is_far;
}

inline __attribute__((always_inline)) Vec softplus(Vec x) {
  Vec m;
  IntVec n;
  softplus_parts(x, Vec{}, &m, &n);
  return scale_by(m, n);
}
inline __attribute__((always_inline)) Vec silu(Vec x) {
  Vec m;
  IntVec n;
  sigmoid_parts(x, decay_of(x), &m, &n);
  return scale_by(max(splat(-1000.0f), x) * m, n);  // 0 from there on; -inf too
}
inline __attribute__((always_inline)) Vec sigmoid_slope(Vec x) {
  const Decay d = decay_of(x);
  return scale_by(sigmoid_slope_part(d), d.n);
}
inline __attribute__((always_inline)) Vec silu_slope(Vec x) {  // s (1 + x (1 - s))
  const Decay d = decay_of(x);
  Vec m;
  IntVec n;
  sigmoid_parts(x, d, &m, &n);
  const Vec rest = select(x >= splat(0.0f), d.e, splat(1.0f)) / (splat(1.0f) + d.e);
  const Vec inside = min(splat(1000.0f), max(splat(-1000.0f), x));  // 0 and 1 from there on; +-inf too
  return scale_by(m * fma(inside, rest, splat(1.0f)), n);
}

// FW_ACTIVATION_NONE, SILU, SIGMOID
inline __attribute__((always_inline)) Vec activate(fw_activation kind, Vec x) {
  return kind == FW_ACTIVATION_SILU ? silu(x) : kind == FW_ACTIVATION_SIGMOID ? sigmoid(x) : x;
}
inline __attribute__((always_inline)) Vec activation_slope(fw_activation kind, Vec x) {
  return kind == FW_ACTIVATION_SILU ? silu_slope(x) : kind == FW_ACTIVATION_SIGMOID ? sigmoid_slope(x) : splat(1.0f);
}

inline void zero_tail(float *row, int64_t n) {
  const int64_t padded = pad_lanes(n);
  for (int64_t i = n; i < padded; ++i) row[i] = 0.0f;
}

// x + bias as high + low, without rounding; low is 0 where the sum is not finite
inline __attribute__((always_inline)) void two_sum(Vec x, Vec bias, Vec *high, Vec *low) {
  const Vec sum = x + bias, back = sum - x;
  const Vec rest = (x - (sum - back)) + (bias - back);
  *high = sum;
  *low = (Vec)((IntVec)rest & (abs(sum) < splat(__builtin_inff())));
}

// gate activations, kind FW_GATE_KIND_*

// y = g or beta of the logits x. a_log and dt_bias: rows of n (a splat for one value), nullptr for 0.
inline void activate_gate_row(int32_t kind, const float *x, int64_t n, const float *a_log, const float *dt_bias,
                              float normalizer, float lower_bound, float *y) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec logits = load(x + i);
    Vec m;
    IntVec e;
    if (kind == FW_GATE_KIND_SOFTPLUS) {
      Vec u = logits, low = {};
      if (dt_bias) two_sum(logits, load(dt_bias + i), &u, &low);
      softplus_parts(u, low, &m, &e);
      if (a_log) {
        Vec rate;
        IntVec rate_exponent;
        exp_parts(load(a_log + i), &rate, &rate_exponent);
        m *= rate;
        e += rate_exponent;
      }
      m = -m;
    } else if (kind == FW_GATE_KIND_LOG_SIGMOID) {
      softplus_parts(-logits, Vec{}, &m, &e);
      m /= splat(-normalizer);
    } else if (kind == FW_GATE_KIND_BOUNDED) {
      Vec u = dt_bias ? logits + load(dt_bias + i) : logits;
      if (a_log) u *= exp(load(a_log + i));
      sigmoid_parts(u, decay_of(u), &m, &e);
      m *= splat(lower_bound);
    } else {
      sigmoid_parts(logits, decay_of(logits), &m, &e);
      m *= splat(kind == FW_GATE_KIND_RWKV7 ? -0.606530659713f : kind == FW_GATE_KIND_BETA ? 1.0f : 2.0f);
    }
    store(y + i, scale_by(m, e));
  }
  zero_tail(y, n);
}

// dx = gradient of x for the incoming dy. da_log and ddt_bias (nullptr: not wanted) ACCUMULATE element by element:
// the caller sums what its a_log shares. A dy of 0 gives 0, also where g is -inf.
inline void gate_grad_row(int32_t kind, const float *x, const float *dy, int64_t n, const float *a_log,
                          const float *dt_bias, float normalizer, float lower_bound, float *dx, float *da_log,
                          float *ddt_bias) {
  const Vec infinity = splat(__builtin_inff());
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec logits = load(x + i), incoming = load(dy + i);
    Vec m, out, for_a = {};
    IntVec e;
    if (kind == FW_GATE_KIND_SOFTPLUS) {
      Vec u = logits, low = {}, rate = splat(1.0f);
      IntVec rate_exponent = {};
      if (dt_bias) two_sum(logits, load(dt_bias + i), &u, &low);
      if (a_log) exp_parts(load(a_log + i), &rate, &rate_exponent);
      sigmoid_parts(u, decay_of(u), &m, &e);
      m = fma(m, (Vec)((IntVec)low & (u < splat(0.0f))),
              m);  // e^low where sigmoid is e^u; elsewhere below a round-off
      out = scale_by(m * rate * -incoming, e + rate_exponent);
      if (da_log) {
        softplus_parts(u, low, &m, &e);
        const Vec g = scale_by(-m * rate, e + rate_exponent);
        for_a = select((incoming == splat(0.0f)) & (g == -infinity), Vec{},
                       scale_by(-m * rate * incoming, e + rate_exponent));
      }
    } else if (kind == FW_GATE_KIND_LOG_SIGMOID) {
      sigmoid_parts(-logits, decay_of(logits), &m, &e);
      out = scale_by(m / splat(normalizer) * incoming, e);
    } else if (kind == FW_GATE_KIND_BOUNDED) {
      Vec u = dt_bias ? logits + load(dt_bias + i) : logits;
      const Vec rate = a_log ? exp(load(a_log + i)) : splat(1.0f);
      u *= rate;
      const Decay d = decay_of(u);
      m = sigmoid_slope_part(d) * splat(lower_bound) * incoming;
      out = scale_by(m * rate, d.n);
      for_a = scale_by(m * select(abs(u) == infinity, Vec{}, u), d.n);
    } else {
      const Decay d = decay_of(logits);
      m = sigmoid_slope_part(d) * splat(kind == FW_GATE_KIND_RWKV7  ? -0.606530659713f
                                        : kind == FW_GATE_KIND_BETA ? 1.0f
                                                                    : 2.0f);
      out = scale_by(m * incoming, d.n);
    }
    store(dx + i, out);
    if (da_log) store(da_log + i, load(da_log + i) + for_a);
    if (ddt_bias) store(ddt_bias + i, load(ddt_bias + i) + out);
  }
  zero_tail(dx, n);
}

// norms of a row; rows are padded with 0

// sum a[i] b[i] in four chains, always in the same order for one `padded`
inline float dot_row(const float *a, const float *b, int64_t padded) {
  Vec sum[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= padded; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) sum[j] = fma(load(a + i + j * kLanes), load(b + i + j * kLanes), sum[j]);
  }
  for (; i < padded; i += kLanes) sum[0] = fma(load(a + i), load(b + i), sum[0]);
  return sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// y = x rstd with rstd = 1 / sqrt(sum x^2 / count + eps), returned; count 1 for the L2 norm, the row's length for
// RMS. A sum that leaves fp32 is taken again of x 2^-80. y may be x.
inline float norm_row(const float *x, int64_t padded, float count, float eps, float *y) {
  float sum = dot_row(x, x, padded);
  float scale = 1.0f;
  if (sum == __builtin_inff()) {
    scale = 0x1p-80f;
    Vec squares = {};
    for (int64_t i = 0; i < padded; i += kLanes) {
      const Vec small = load(x + i) * splat(scale);
      squares = fma(small, small, squares);
    }
    sum = sum_lanes(squares);
    eps = 0.0f;  // below a round-off of a sum this large
  }
  const float inverse = 1.0f / __builtin_sqrtf(sum / count + eps);
  for (int64_t i = 0; i < padded; i += kLanes) store(y + i, load(x + i) * splat(scale) * splat(inverse));
  return inverse * scale;
}

// dx = rstd (dy - y (y . dy) / count), y the normalised row
inline void norm_grad_row(const float *y, float rstd, const float *dy, int64_t padded, float count, float *dx) {
  const Vec along = splat(dot_row(y, dy, padded) / count), inverse = splat(rstd);
  for (int64_t i = 0; i < padded; i += kLanes) store(dx + i, inverse * fma(-along, load(y + i), load(dy + i)));
}

inline float l2norm_row(const float *x, int64_t padded, float eps, float *y) {
  return norm_row(x, padded, 1.0f, eps, y);
}
inline void l2norm_grad_row(const float *y, float rstd, const float *dy, int64_t padded, float *dx) {
  norm_grad_row(y, rstd, dy, padded, 1.0f, dx);
}

}  // namespace fw::FW_LEVEL
