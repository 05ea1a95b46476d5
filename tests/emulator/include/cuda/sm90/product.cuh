// SPDX-License-Identifier: Apache-2.0
// The emulator's file for src/cuda/sm90/product.cuh. A product reads its operand in shared memory and writes its sums at some moment
// between issue and wait; the first operand in registers is read at the issue. Sums are cut, not rounded, as the hardware's are:
// an error that grows with the number of products added to one sum.
#pragma once
#include <cuda_bf16.h>

#include <algorithm>
#include <cmath>

#include "cuda/sm90/layout.cuh"

namespace fw::sm90 {

inline void product_fence() {}
inline void product_commit() { emulator::product_commit(); }
template <int kPending>
void product_wait() {
  emulator::product_wait(kPending);
}
template <int kCount>
void hold(float (&)[kCount]) {}

// Exponent of a finite float as the sums take it; of 0 one below all others.
inline int exponent_of(float x) {
  const int field = static_cast<int>(__float_as_uint(x) >> 23 & 255);
  return x == 0 ? -1000 : field == 0 ? -126 : field - 127;
}

// sum + left . right over 16 products of bf16, as the hardware adds up: every term cut at two bits below the last of a float
// as large as the largest term, their sum cut to a float. Cut is towards zero.
inline float add_products(float sum, const float *left, const int *left_exponents, const float *right, const int *right_exponents) {
  int most = exponent_of(sum);
  float plain = sum;
  for (int k = 0; k < 16; ++k) {
    most = std::max(most, left_exponents[k] + right_exponents[k]);
    plain += left[k] * right[k];
  }
  if (!std::isfinite(plain) || most < -100 || most > 120) return plain;
  const double unit = __uint_as_float(static_cast<uint32_t>(most - 25 + 127) << 23);
  const double inverse = __uint_as_float(static_cast<uint32_t>(25 - most + 127) << 23);
  double units = std::trunc(sum * inverse);
  for (int k = 0; k < 16; ++k) units += static_cast<double>(static_cast<int32_t>(static_cast<double>(left[k]) * right[k] * inverse));
  const double exact = units * unit;  // all of these are whole and below 2^53
  const float nearest = static_cast<float>(exact);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(exact) ? std::nextafterf(nearest, 0.0f) : nearest;
}

struct GroupProduct {
  float *d;
  const uint32_t *a;  // or nullptr
  uint64_t a_shared, b;
  int add;
};

// [rows][16] of an operand in shared memory: by its rows along the summed index, or along the free index.
inline void read_operand(uint64_t operand, bool is_along_free, int rows, float (*to)[16]) {
  if (operand >> 62 != 1) emulator::stop("a product's operand without the 128-byte swizzle");
  const uint32_t start = static_cast<uint32_t>(operand & 0x3fff) << 4, leading = static_cast<uint32_t>(operand >> 16 & 0x3fff) << 4,
                 stride = static_cast<uint32_t>(operand >> 32 & 0x3fff) << 4;
  for (int i = 0; i < rows; ++i) {
    for (uint32_t k = 0; k < 16; ++k) {
      const uint32_t row = static_cast<uint32_t>(i);
      const uint32_t at = is_along_free ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                                        : start + row / 8 * stride + row % 8 * 128 + k * 2;
      uint16_t half;
      memcpy(&half, emulator::shared_at(emulator::swizzle(at), 2, "a product's operand"), 2);
      to[i][k] = low_bf16(half);
    }
  }
}

// d[64xN] (+)= a[64x16] b[16xN]. kTurned: a in shared memory lies along its free index.
template <int kN, bool kAlongFree, bool kTurned = false>
void issue_product(void *const *items) {
  struct Kept {
    float *d[128], a[64][16];
    uint64_t a_shared, b;
    bool is_a_shared, add;
  };
  auto kept = std::make_shared<Kept>();
  const GroupProduct &first = *static_cast<GroupProduct *>(items[0]);
  kept->a_shared = first.a_shared, kept->b = first.b, kept->add = first.add != 0, kept->is_a_shared = first.a == nullptr;
  for (int thread = 0; thread < 128; ++thread) {
    if (!items[thread]) emulator::stop("a product without thread %d of its warpgroup", thread);
    const GroupProduct &p = *static_cast<GroupProduct *>(items[thread]);
    if (p.b != first.b || p.a_shared != first.a_shared || p.add != first.add) {
      emulator::stop("a product whose operands differ between threads 0 and %d of a warpgroup", thread);
    }
    kept->d[thread] = p.d;
    if (!p.a) continue;
    const int row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
    for (int i = 0; i < 4; ++i) {
      kept->a[row + i % 2 * 8][2 * (t + i / 2 * 4)] = low_bf16(p.a[i]);
      kept->a[row + i % 2 * 8][2 * (t + i / 2 * 4) + 1] = high_bf16(p.a[i]);
    }
  }
  emulator::product_issue([kept] {
    static float b[256][16];
    static int a_exponents[64][16], b_exponents[256][16];
    if (kept->is_a_shared) read_operand(kept->a_shared, kTurned, 64, kept->a);
    read_operand(kept->b, kAlongFree, kN, b);
    for (int k = 0; k < 16; ++k) {
      for (int i = 0; i < 64; ++i) a_exponents[i][k] = exponent_of(kept->a[i][k]);
      for (int i = 0; i < kN; ++i) b_exponents[i][k] = exponent_of(b[i][k]);
    }
    for (int thread = 0; thread < 128; ++thread) {
      const int row = thread / 32 * 16 + thread % 32 / 4, t = thread % 4;
      float *d = kept->d[thread];
      for (int j = 0; j < kN / 2; ++j) {
        const int left = row + j / 2 % 2 * 8, right = j / 4 * 8 + 2 * t + j % 2;
        d[j] = add_products(kept->add ? d[j] : 0.0f, kept->a[left], a_exponents[left], b[right], b_exponents[right]);
      }
    }
  });
}

inline void multiply_n64(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  GroupProduct p = {d, a, 0, b, add};
  emulator::warpgroup_meet("multiply_n64", &p, issue_product<64, false>);
}
inline void multiply_n128_free(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int add) {
  GroupProduct p = {d, a, 0, b, add};
  emulator::warpgroup_meet("multiply_n128_free", &p, issue_product<128, true>);
}
inline void multiply_n64_shared(float (&d)[32], uint64_t a, uint64_t b, int add) {
  GroupProduct p = {d, nullptr, a, b, add};
  emulator::warpgroup_meet("multiply_n64_shared", &p, issue_product<64, false>);
}
inline void multiply_n64_turned(float (&d)[32], uint64_t a, uint64_t b, int add) {
  GroupProduct p = {d, nullptr, a, b, add};
  emulator::warpgroup_meet("multiply_n64_turned", &p, issue_product<64, false, true>);
}
inline void multiply_n64_free(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  GroupProduct p = {d, a, 0, b, add};
  emulator::warpgroup_meet("multiply_n64_free", &p, issue_product<64, true>);
}
inline void multiply_n128_free_shared(float (&d)[64], uint64_t a, uint64_t b, int add) {
  GroupProduct p = {d, nullptr, a, b, add};
  emulator::warpgroup_meet("multiply_n128_free_shared", &p, issue_product<128, true>);
}
inline void multiply_n128_free_turned(float (&d)[64], uint64_t a, uint64_t b, int add) {
  GroupProduct p = {d, nullptr, a, b, add};
  emulator::warpgroup_meet("multiply_n128_free_turned", &p, issue_product<128, true, true>);
}

// With a lower triangle: the columns that 16 of the summed index reach.
template <int kStep>
void multiply_n64_free_to(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int add) {
  GroupProduct p = {d, a, 0, b, add};
  emulator::warpgroup_meet("multiply_n64_free_to", &p, issue_product<16 + 16 * kStep, true>);
}
inline void multiply_lower_free(float (&d)[32], const uint32_t (&a)[4][4], uint64_t b, int add) {
  multiply_n64_free_to<3>(d, a[3], advance(b, 6144), add);
  multiply_n64_free_to<2>(d, a[2], advance(b, 4096), 1);
  multiply_n64_free_to<1>(d, a[1], advance(b, 2048), 1);
  multiply_n64_free_to<0>(d, a[0], b, 1);
}

}  // namespace fw::sm90
