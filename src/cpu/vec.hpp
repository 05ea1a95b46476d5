// SPDX-License-Identifier: Apache-2.0
// The vector layer: one fp32 vector type a level, explicit fused multiply-add (the build contracts nothing by itself),
// exp and its kin, and conversions of the three storage types. Included by *.isa.cpp files only.
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if !defined(FW_LEVEL)
#error "vec.hpp belongs in *.isa.cpp files, which the build compiles once a level"
#endif

// For functions of a whole row or tile: a call costs nothing there, copies in every instance cost minutes of compiling.
#define FW_NOINLINE __attribute__((noinline))

namespace fw::FW_LEVEL {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));
typedef float UnalignedVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

constexpr int64_t pad_lanes(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

inline __attribute__((always_inline)) Vec load(const float *p) { return *reinterpret_cast<const UnalignedVec *>(p); }
inline __attribute__((always_inline)) void store(float *p, Vec x) { *reinterpret_cast<UnalignedVec *>(p) = x; }
inline __attribute__((always_inline)) Vec splat(float x) { return x - Vec{}; }

// a * b + c; one rounding where the level has FMA
inline __attribute__((always_inline)) Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}
inline __attribute__((always_inline)) float fma(float a, float b, float c) {
#if defined(__AVX2__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

#if defined(__AVX512F__)
typedef float HalfVec __attribute__((vector_size(32)));
inline __attribute__((always_inline)) HalfVec fold_halves(Vec x) {
  return __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
}
#endif

// Sum of the lanes, always in the same order: halves are folded onto each other.
inline __attribute__((always_inline)) float sum_lanes(Vec x) {
#if defined(__AVX512F__)
  const __m256 half = (__m256)fold_halves(x);
#elif defined(__AVX2__)
  const __m256 half = (__m256)x;
#endif
#if defined(__AVX2__)
  __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  quarter = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(quarter, _mm_movehdup_ps(quarter)));
#else
  return (x[0] + x[2]) + (x[1] + x[3]);
#endif
}

inline __attribute__((always_inline)) Vec select(IntVec mask, Vec yes, Vec no) {
  return (Vec)(((IntVec)yes & mask) | ((IntVec)no & ~mask));
}
inline __attribute__((always_inline)) Vec max(Vec a, Vec b) { return select(a > b, a, b); }  // b when either is NaN
inline __attribute__((always_inline)) Vec min(Vec a, Vec b) { return select(a < b, a, b); }

// Nearest integer as a float, for |x| < 2^22.
inline __attribute__((always_inline)) Vec round_near(Vec x) {
  const Vec shift = splat(0x1.8p23f);  // its unit is 1
  return (x + shift) - shift;
}

// e^x = m 2^n for x clamped to [-300, 300], m in (0.7, 1.42) within 1 unit in the last place; NaN stays in m.
inline __attribute__((always_inline)) void exp_parts(Vec x, Vec *m, IntVec *n) {
  const Vec clamped = min(max(x, splat(-300.0f)), splat(300.0f));
  const Vec whole = round_near(clamped * splat(1.44269504f));
  // ln 2 in two parts, the first of 13 bits: whole * part is exact without FMA too
  Vec r = fma(whole, splat(-0x1.62ep-1f), clamped);
  r = fma(whole, splat(-0x1.0bfbe8p-15f), r);
  Vec p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  *m = select(x == x, p, x);
  *n = __builtin_convertvector(whole, IntVec);
}

// m 2^n with one rounding where the result is subnormal, for n in [-252, 254]: in two steps, each inside the exponent range
inline __attribute__((always_inline)) Vec scale_inside(Vec m, IntVec n) {
  const IntVec first = n >> 1, second = n - first;
  return m * (Vec)((first + 127) << 23) * (Vec)((second + 127) << 23);
}
// m 2^n for any n: below 2^-252 times m it is 0 (NaN stays), above 2^254 times m as for 254
inline __attribute__((always_inline)) Vec scale_by(Vec m, IntVec n) {
  const IntVec is_tiny = n < -252, is_huge = n > 254;
  const IntVec inside = (n & ~is_tiny & ~is_huge) | (254 & is_huge);
  return scale_inside(select(is_tiny, m * splat(0.0f), m), inside);
}

// e^x within 1.02 units in the last place (tests/neighbours/test_vec.cpp); 0 for -inf, inf past 88.72, NaN for NaN,
// gradual underflow kept.
inline __attribute__((always_inline)) Vec exp(Vec x) {
  Vec m;
  IntVec n;
  exp_parts(min(splat(89.0f), max(splat(-104.0f), x)), &m, &n);
  return scale_inside(m, n);
}

inline __attribute__((always_inline)) Vec abs(Vec x) { return (Vec)((IntVec)x & 0x7fffffff); }

inline __attribute__((always_inline)) Vec sigmoid(Vec x) {
  // e^-|x| never overflows; the two branches are 1/(1+e) and e/(1+e)
  const Vec e = exp(-abs(x));
  return select(x >= splat(0.0f), splat(1.0f), e) / (splat(1.0f) + e);
}

}  // namespace fw::FW_LEVEL
