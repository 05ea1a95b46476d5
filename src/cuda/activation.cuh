// SPDX-License-Identifier: Apache-2.0
// Gate activations and their gradients on the device, and SiLU and sigmoid. The gates are in fp64: exp, log1p and the sums inside
// then neither overflow nor cancel at any fp32 logit, and every result is rounded once. In fp32 they are for operands of 16
// bits, whose round-off theirs does not reach. Formulas: gate_input of fastweight/recurrence.h.
#pragma once
#include "core/activation_f64.hpp"
#include "fastweight/neighbours.h"

namespace fw::cuda {

// In fp32 by the units that approximate: relative errors of 2^-22, of small logarithms up to 2^-18.
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float exponential(float x) { return __expf(x); }
__device__ inline double quotient(double x, double y) { return x / y; }
__device__ inline float quotient(float x, float y) { return __fdividef(x, y); }
// log(1 + e) for e from 0 to 1
__device__ inline double log_from_one(double e) { return log1p(e); }
__device__ inline float log_from_one(float e) {
  const float near = e * fmaf(e, fmaf(e, fmaf(e, fmaf(e, 0.2f, -0.25f), 1.0f / 3), -0.5f), 1.0f);
  return e < 0.0625f ? near : __logf(1 + e);
}

template <class Real>
__device__ inline Real sigmoid(Real x) {
  const Real e = exponential(-fabs(x)), larger = quotient(static_cast<Real>(1), 1 + e);
  return x >= 0 ? larger : e * larger;
}
template <class Real>
__device__ inline Real softplus(Real x) { return (x > 0 ? x : 0) + log_from_one(exponential(-fabs(x))); }

struct GateSettings {
  int32_t kind;  // FW_GATE_KIND_*
  double normalizer, lower_bound;
};

constexpr double kRwkv7Rate = -0.60653065971263342;  // -exp(-1/2)

// g or beta of the logit x; rate: exp(a_log); a_log and dt_bias are 0 when absent.
template <class Real>
__device__ inline float activate_gate_at(const GateSettings &s, float x, Real rate, float dt_bias) {
  const Real u = static_cast<Real>(x) + static_cast<Real>(dt_bias);
  switch (s.kind) {
    case FW_GATE_KIND_SOFTPLUS: return static_cast<float>(-rate * softplus(u));
    case FW_GATE_KIND_LOG_SIGMOID: return static_cast<float>(quotient(-softplus(-u), static_cast<Real>(s.normalizer)));
    case FW_GATE_KIND_BOUNDED: return static_cast<float>(static_cast<Real>(s.lower_bound) * sigmoid(rate * u));
    case FW_GATE_KIND_RWKV7: return static_cast<float>(static_cast<Real>(kRwkv7Rate) * sigmoid(u));
    case FW_GATE_KIND_BETA: return static_cast<float>(sigmoid(u));
    default: return static_cast<float>(2 * sigmoid(u));
  }
}
template <class Real = double>
__device__ inline float activate_gate(const GateSettings &s, float x, float a_log, float dt_bias) {
  return activate_gate_at<Real>(s, x, exp(static_cast<Real>(a_log)), dt_bias);
}

// f(settings): of a gate's kinds the one at hand, known to the compiler where f is made.
template <class F>
__device__ __forceinline__ void for_gate_kind(const GateSettings &s, F f) {
  if (s.kind == FW_GATE_KIND_SOFTPLUS) {
    f(GateSettings{FW_GATE_KIND_SOFTPLUS, s.normalizer, s.lower_bound});
  } else if (s.kind == FW_GATE_KIND_LOG_SIGMOID) {
    f(GateSettings{FW_GATE_KIND_LOG_SIGMOID, s.normalizer, s.lower_bound});
  } else if (s.kind == FW_GATE_KIND_BOUNDED) {
    f(GateSettings{FW_GATE_KIND_BOUNDED, s.normalizer, s.lower_bound});
  } else {
    f(GateSettings{FW_GATE_KIND_RWKV7, s.normalizer, s.lower_bound});
  }
}

struct GateGradient {
  float dx, da_log;  // d_dt_bias = dx
};
// For the incoming gradient dy; a dy of 0 gives 0, also where g is -inf. rate: exp(a_log).
template <class Real>
__device__ inline GateGradient activate_gate_gradient_at(const GateSettings &s, float x, Real rate, float dt_bias, float dy) {
  const Real u = static_cast<Real>(x) + static_cast<Real>(dt_bias);
  const auto gradient = [dy](Real dx, Real da_log) {
    return GateGradient{dy == 0 ? 0 : static_cast<float>(dx), dy == 0 ? 0 : static_cast<float>(da_log)};
  };
  if (s.kind == FW_GATE_KIND_SOFTPLUS) return gradient(-rate * sigmoid(u) * dy, -rate * softplus(u) * dy);
  if (s.kind == FW_GATE_KIND_LOG_SIGMOID) return gradient(quotient(sigmoid(-u), static_cast<Real>(s.normalizer)) * dy, 0);
  const Real z = s.kind == FW_GATE_KIND_BOUNDED ? rate * u : u, bound = static_cast<Real>(s.lower_bound);
  const Real slope = sigmoid(z) * sigmoid(-z) * dy;
  switch (s.kind) {
    case FW_GATE_KIND_BOUNDED: return gradient(bound * slope * rate, slope == 0 ? 0 : bound * slope * z);
    case FW_GATE_KIND_RWKV7: return gradient(static_cast<Real>(kRwkv7Rate) * slope, 0);
    case FW_GATE_KIND_BETA: return gradient(slope, 0);
    default: return gradient(2 * slope, 0);
  }
}
__device__ inline GateGradient activate_gate_gradient(const GateSettings &s, float x, float a_log, float dt_bias, float dy) {
  return activate_gate_gradient_at<double>(s, x, exp(static_cast<double>(a_log)), dt_bias, dy);
}

// In fp32 down to -80; below it exp is near the end of fp32's range and x exp(x) is wanted to its last bit.
constexpr float kFarLeft = -80.0f;
__device__ __noinline__ inline float far_activation(fw_activation kind, float x) { return static_cast<float>(activation_f64(kind, x)); }
__device__ __noinline__ inline float far_slope(fw_activation kind, float x) {
  return static_cast<float>(activation_slope_f64(kind, x));
}

// act(x) and its derivative: NONE, SILU, SIGMOID
__device__ inline float activate(fw_activation kind, float x) {
  if (kind == FW_ACTIVATION_NONE) return x;
  if (x < kFarLeft) return far_activation(kind, x);
  const float e = expf(-fabsf(x)), sigmoid = (x >= 0 ? 1.0f : e) / (1.0f + e);
  return kind == FW_ACTIVATION_SILU ? x * sigmoid : sigmoid;
}
__device__ inline float activation_slope(fw_activation kind, float x) {
  if (kind == FW_ACTIVATION_NONE) return 1.0f;
  if (x < kFarLeft || x > 1e4f) return far_slope(kind, x);
  const float e = expf(-fabsf(x)), larger = 1.0f / (1.0f + e), smaller = e * larger;
  const float left = x >= 0 ? larger : smaller, right = x >= 0 ? smaller : larger;  // sigmoid of x, of -x
  return left * (kind == FW_ACTIVATION_SILU ? fmaf(x, right, 1.0f) : right);
}
// Of four numbers; not inlined: compiled once a file, not once a use.
__device__ __noinline__ inline float4 activate_quad(fw_activation kind, float4 x) {
  return make_float4(activate(kind, x.x), activate(kind, x.y), activate(kind, x.z), activate(kind, x.w));
}
__device__ __noinline__ inline float4 slope_quad(fw_activation kind, float4 x) {
  return make_float4(activation_slope(kind, x.x), activation_slope(kind, x.y), activation_slope(kind, x.z),
                     activation_slope(kind, x.w));
}
__device__ inline float silu(float x) { return activate(FW_ACTIVATION_SILU, x); }
__device__ inline float silu_slope(float x) { return activation_slope(FW_ACTIVATION_SILU, x); }

}  // namespace fw::cuda
