// SPDX-License-Identifier: Apache-2.0
// Gate activations, SiLU and their derivatives as fp64 scalars, for the reference
// implementations and for what fp32 cannot reach on CUDA.
#pragma once
#include <math.h>
#include <stdint.h>

#include "core/host_device.hpp"
#include "fastweight/neighbours.h"

namespace fw {

FW_HOST_DEVICE inline double sigmoid_f64(double x) {
  const double e = ::exp(-::fabs(x));
  return (x >= 0 ? 1.0 : e) / (1.0 + e);
}
inline double softplus_f64(double x) { return (x > 0 ? x : 0.0) + ::log1p(::exp(-::fabs(x))); }
// past +-1e4 both have reached their limits, which +-inf then gets
FW_HOST_DEVICE inline double silu_f64(double x) { return (x < -1e4 ? -1e4 : x) * sigmoid_f64(x); }
FW_HOST_DEVICE inline double silu_slope_f64(double x) {
  const double inside = x < -1e4 ? -1e4 : x > 1e4 ? 1e4 : x;
  return sigmoid_f64(x) * (1.0 + inside * sigmoid_f64(-x));
}

// act(x) and its derivative, for NONE, SILU, SIGMOID
FW_HOST_DEVICE inline double activation_f64(fw_activation kind, double x) {
  return kind == FW_ACTIVATION_SILU ? silu_f64(x) : kind == FW_ACTIVATION_SIGMOID ? sigmoid_f64(x) : x;
}
FW_HOST_DEVICE inline double activation_slope_f64(fw_activation kind, double x) {
  if (kind == FW_ACTIVATION_SILU) return silu_slope_f64(x);
  return kind == FW_ACTIVATION_SIGMOID ? sigmoid_f64(x) * sigmoid_f64(-x) : 1.0;
}

// The formulas of fw_gate_kind; a_log and dt_bias 0 where absent.
inline double gate_f64(fw_gate_kind kind, double x, double a_log, double dt_bias, double normalizer,
                       double lower_bound) {
  switch (kind) {
    case FW_GATE_KIND_SOFTPLUS: return -::exp(a_log) * softplus_f64(x + dt_bias);
    case FW_GATE_KIND_LOG_SIGMOID: return -softplus_f64(-x) / normalizer;
    case FW_GATE_KIND_BOUNDED: return lower_bound * sigmoid_f64(::exp(a_log) * (x + dt_bias));
    case FW_GATE_KIND_RWKV7: return -::exp(-0.5) * sigmoid_f64(x);
    case FW_GATE_KIND_BETA: return sigmoid_f64(x);
    default: return 2.0 * sigmoid_f64(x);
  }
}

// Gradients of gate_f64 for the incoming dy; the gradient of dt_bias is *dx. dy = 0 gives 0 where g is -inf.
inline void gate_grad_f64(fw_gate_kind kind, double x, double a_log, double dt_bias, double normalizer,
                          double lower_bound, double dy, double *dx, double *da_log) {
  *da_log = 0;
  if (kind == FW_GATE_KIND_SOFTPLUS) {
    const double rate = -::exp(a_log), u = x + dt_bias, g = rate * softplus_f64(u);
    *dx = rate * sigmoid_f64(u) * dy;
    *da_log = dy == 0 && g == -INFINITY ? 0.0 : g * dy;
  } else if (kind == FW_GATE_KIND_LOG_SIGMOID) {
    *dx = sigmoid_f64(-x) / normalizer * dy;
  } else if (kind == FW_GATE_KIND_BOUNDED) {
    const double rate = ::exp(a_log), u = rate * (x + dt_bias),
                 slope = lower_bound * sigmoid_f64(u) * sigmoid_f64(-u) * dy;
    *dx = slope * rate;
    *da_log = slope * (::isinf(u) ? 0.0 : u);
  } else {
    const double top = kind == FW_GATE_KIND_RWKV7 ? -::exp(-0.5) : kind == FW_GATE_KIND_BETA ? 1.0 : 2.0;
    *dx = top * sigmoid_f64(x) * sigmoid_f64(-x) * dy;
  }
}

}  // namespace fw
