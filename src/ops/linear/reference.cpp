// SPDX-License-Identifier: Apache-2.0
// The linear layer in fp64, element by element, any dtype and strides. The truth for the vector paths.
#include "ops/linear/problem.hpp"

namespace fw::linear {
namespace {

double at(const fw_tensor &t, int64_t i, int64_t j) {
  return load_f64(t.data, t.dtype, i * t.strides[0] + j * t.strides[1]);
}
void put(const fw_tensor &t, int64_t i, int64_t j, double x) {
  store_f64(t.data, t.dtype, i * t.strides[0] + j * t.strides[1], x);
}

void forward(const Problem &p) {
  for (int64_t m = 0; m < p.M; ++m) {
    for (int64_t o = 0; o < p.out; ++o) {
      double sum = 0;
      for (int64_t i = 0; i < p.in; ++i) sum += at(p.x, m, i) * at(p.weight, o, i);
      if (given(p.bias)) sum += load_f64(p.bias.data, p.bias.dtype, o * p.bias.strides[0]);
      put(p.y, m, o, sum);
    }
  }
}

void backward(const Problem &p) {
  for (int64_t m = 0; given(p.dx) && m < p.M; ++m) {
    for (int64_t i = 0; i < p.in; ++i) {
      double sum = 0;
      for (int64_t o = 0; o < p.out; ++o) sum += at(p.dy, m, o) * at(p.weight, o, i);
      put(p.dx, m, i, sum);
    }
  }
  for (int64_t o = 0; given(p.dweight) && o < p.out; ++o) {
    for (int64_t i = 0; i < p.in; ++i) {
      double sum = 0;
      for (int64_t m = 0; m < p.M; ++m) sum += at(p.dy, m, o) * at(p.x, m, i);
      put(p.dweight, o, i, sum);
    }
  }
  for (int64_t o = 0; given(p.dbias) && o < p.out; ++o) {
    double sum = 0;
    for (int64_t m = 0; m < p.M; ++m) sum += at(p.dy, m, o);
    store_f64(p.dbias.data, p.dbias.dtype, o * p.dbias.strides[0], sum);
  }
}

}  // namespace

void reference_run(fw_context &, const Problem &p, void *) {
  if (p.direction == FW_FORWARD)
    forward(p);
  else
    backward(p);
}

}  // namespace fw::linear
