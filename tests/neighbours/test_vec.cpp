// SPDX-License-Identifier: Apache-2.0
// Accuracy table of the vector math, at every level, through the operations that use it: the largest error over a
// sweep of all binades in which the function is not constant, in units in the last place of the true value (below the
// normal range: of the smallest subnormal). Bounds are the largest errors measured over every 17th fp32 number,
// rounded up; ./test takes every 4001st, ./test --full every 61st.
#include <stdio.h>
#include <stdlib.h>

#include "neighbours/harness.hpp"

namespace fwtest {
namespace {

FWTEST_API(feature_map);
FWTEST_API(gate_activation);

double sigmoid(double x) { return 1 / (1 + exp(-x)); }
double softplus(double x) { return x > 0 ? x + log1p(exp(-x)) : log1p(exp(x)); }

// Sweeps from 2^-40 to `last`, of the signs asked for.
std::vector<float> sweep(bool negative, bool positive, float last) {
  const char *full = getenv("FW_TEST_FULL");
  const uint32_t stride = full && strcmp(full, "1") == 0 ? 61 : 4001;
  uint32_t end;
  memcpy(&end, &last, 4);
  std::vector<float> points;
  for (uint32_t bits = (127u - 40u) << 23; bits <= end; bits += stride) {
    float x;
    memcpy(&x, &bits, 4);
    if (positive) points.push_back(x);
    if (negative) points.push_back(-x);
  }
  return points;
}

double unit_in_last_place(double x) {
  const double magnitude = fabs(x);
  if (magnitude < 0x1p-126) return 0x1p-149;
  int exponent;
  frexp(magnitude, &exponent);
  return ldexp(1.0, exponent - 24);
}

// What a function gives for the points, through a call of an operation.
using Evaluate = std::function<std::vector<double>(fw_context *, const std::vector<float> &)>;

Evaluate through_feature_map(fw_feature_map_kind kind, bool is_slope) {
  return [=](fw_context *context, const std::vector<float> &points) {
    const int64_t n = static_cast<int64_t>(points.size());
    TestTensor x(FW_F32, {n}), out(FW_F32, {n}), dy(FW_F32, {n});
    x.fill([&](int64_t i) { return points[static_cast<size_t>(i)]; });
    dy.fill([](int64_t) { return 1.0; });
    fw_feature_map desc = {};
    desc.struct_size = sizeof desc;
    desc.kind = kind;
    desc.x = x.view();
    if (!is_slope) {
      desc.y = out.view();
      EXPECT_EQ(run_forward<feature_map_api>(context, desc), FW_OK) << fw_last_error();
    } else {
      fw_feature_map_grads grads = {};
      grads.struct_size = sizeof grads;
      grads.dy = dy.view();
      grads.dx = out.view();
      EXPECT_EQ(run_backward<feature_map_api>(context, desc, grads), FW_OK) << fw_last_error();
    }
    return out.values();
  };
}

// points_are_a_log: they go into a_log, and x is 30 (whose softplus is 30 in fp32).
Evaluate through_gate(fw_gate_kind kind, bool is_slope, bool points_are_a_log = false) {
  return [=](fw_context *context, const std::vector<float> &points) {
    const int64_t n = static_cast<int64_t>(points.size());
    TestTensor x(FW_F32, {1, 1, n}), out(FW_F32, {1, 1, n}), dy(FW_F32, {1, 1, n}), a_log;
    x.fill([&](int64_t i) { return points_are_a_log ? 30.0 : points[static_cast<size_t>(i)]; });
    dy.fill([](int64_t) { return 1.0; });
    fw_gate_activation desc = {};
    desc.struct_size = sizeof desc;
    desc.kind = kind;
    desc.normalizer = 1;
    desc.lower_bound = -1;
    desc.x = x.view();
    if (points_are_a_log) {
      a_log = TestTensor(FW_F32, {n});
      a_log.fill([&](int64_t i) { return points[static_cast<size_t>(i)]; });
      desc.a_log = a_log.view();
    }
    if (!is_slope) {
      desc.y = out.view();
      EXPECT_EQ(run_forward<gate_activation_api>(context, desc), FW_OK) << fw_last_error();
    } else {
      fw_gate_activation_grads grads = {};
      grads.struct_size = sizeof grads;
      grads.dy = dy.view();
      grads.dx = out.view();
      EXPECT_EQ(run_backward<gate_activation_api>(context, desc, grads), FW_OK) << fw_last_error();
    }
    return out.values();
  };
}

struct Function {
  const char *name;
  Evaluate evaluate;
  std::function<double(double)> truth;
  bool negative, positive;
  float last;
  double allowed;                            // units in the last place
  std::function<double(double)> scale = {};  // what the error is relative to, where that is not the value
};

std::vector<Function> functions() {
  const double rwkv = exp(-0.5);
  const auto slope = [](double x) { return sigmoid(x) * sigmoid(-x); };
  return {
      {"exp, x <= 0", through_feature_map(FW_FEATURE_ELU_PLUS_ONE, false), [](double x) { return exp(x); }, true,
       false, 104, 1.02},
      {"30 exp", through_gate(FW_GATE_KIND_SOFTPLUS, false, true), [](double x) { return -30 * exp(x); }, true, true,
       85, 2.2},
      {"sigmoid", through_gate(FW_GATE_KIND_BETA, false), sigmoid, true, true, 104, 2.4},
      {"sigmoid'", through_gate(FW_GATE_KIND_BETA, true), slope, true, true, 104, 4.8},
      {"softplus", through_gate(FW_GATE_KIND_SOFTPLUS, false), [](double x) { return -softplus(x); }, true, true, 104,
       2.8},
      {"softplus'", through_gate(FW_GATE_KIND_SOFTPLUS, true), [](double x) { return -sigmoid(x); }, true, true, 104,
       2.4},
      {"log sigmoid", through_gate(FW_GATE_KIND_LOG_SIGMOID, false), [](double x) { return -softplus(-x); }, true,
       true, 104, 2.8},
      {"rwkv7", through_gate(FW_GATE_KIND_RWKV7, false), [=](double x) { return -rwkv * sigmoid(x); }, true, true,
       104, 3.5},
      {"bounded", through_gate(FW_GATE_KIND_BOUNDED, false), [](double x) { return -sigmoid(x); }, true, true, 104,
       2.4},
      {"silu", through_feature_map(FW_FEATURE_SILU, false), [](double x) { return x * sigmoid(x); }, true, true, 104,
       3.3},
      {"silu'", through_feature_map(FW_FEATURE_SILU, true), [=](double x) { return sigmoid(x) + x * slope(x); }, true,
       true, 104, 4.8, [=](double x) { return sigmoid(x) + fabs(x) * slope(x); }},
      {"elu + 1", through_feature_map(FW_FEATURE_ELU_PLUS_ONE, false),
       [](double x) { return x > 0 ? x + 1 : exp(x); }, true, true, 104, 1.02},
  };
}

class VectorMath : public ImplTest {};

TEST_P(VectorMath, ErrorsStayInTheTable) {
  TestContext context(impl());
  printf("%-14s %10s %8s   %s, at\n", "function", "largest", "allowed", impl());
  for (const Function &f : functions()) {
    const std::vector<float> points = sweep(f.negative, f.positive, f.last);
    const std::vector<double> got = f.evaluate(context, points);
    double worst = 0;
    float at = 0;
    for (size_t i = 0; i < points.size(); ++i) {
      const double want = f.truth(points[i]), scale = f.scale ? f.scale(points[i]) : want;
      const double error = fabs(got[i] - want) / unit_in_last_place(scale);
      if (!(error <= worst)) {
        worst = error;
        at = points[i];
      }
    }
    printf("%-14s %10.3f %8.2f   %.9g\n", f.name, worst, f.allowed, static_cast<double>(at));
    EXPECT_LE(worst, f.allowed) << f.name << " at " << at;
    EXPECT_GT(points.size(), 1000u);
  }
}

FWTEST_EVERY_IMPL(VectorMath);

}  // namespace
}  // namespace fwtest
