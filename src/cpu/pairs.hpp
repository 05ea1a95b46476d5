// SPDX-License-Identifier: Apache-2.0
// Pairs of bf16 in the vector layer: a dot product of pairs onto fp32 sums (one instruction where the level has it),
// and packing. Files that are compiled for dot units only (*.unit.cpp).
#pragma once
#include "core/tensor.hpp"
#include "cpu/vec.hpp"

namespace fw::FW_LEVEL {

typedef uint32_t WordVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UnalignedWordVec __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));

struct Pairs {
  typedef uint32_t Element;
  typedef WordVec Wide;
  static inline __attribute__((always_inline)) WordVec spread(uint32_t x) { return x - WordVec{}; }
  static inline __attribute__((always_inline)) WordVec row(const uint32_t *p) {
    return *reinterpret_cast<const UnalignedWordVec *>(p);
  }
  static inline __attribute__((always_inline)) Vec add(WordVec a, WordVec b, Vec sum) {
#if defined(__AVX512BF16__)
    return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    return (Vec)vbfdotq_f32((float32x4_t)sum, vreinterpretq_bf16_u32((uint32x4_t)a), vreinterpretq_bf16_u32((uint32x4_t)b));
#else
    // a product of two bf16 is exact in fp32; the order of vdpbf16ps: the second of a pair first
    const Vec later = fma((Vec)(a & 0xffff0000u), (Vec)(b & 0xffff0000u), sum);
    return fma((Vec)(a << 16), (Vec)(b << 16), later);
#endif
  }
};

// bf16 of x, to nearest even, in the upper half of each word; the lower half is not 0.
inline __attribute__((always_inline)) WordVec round_upper(Vec x) {
  const WordVec bits = (WordVec)x;
  const WordVec is_nan = (WordVec)(x != x);
  return ((bits + 0x7fffu + ((bits >> 16) & 1u)) & ~is_nan) | ((bits | 0x400000u) & is_nan);
}

// The pair (first, second) of each lane.
inline __attribute__((always_inline)) WordVec pair_up(Vec first, Vec second) {
#if defined(__AVX512BF16__)
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20,
                                         4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (WordVec)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
#else
  return (round_upper(first) >> 16) | (round_upper(second) & 0xffff0000u);
#endif
}

inline void pack_columns(int64_t rows, int64_t padded, int64_t cols, const float *from, int64_t ld, uint32_t *pairs) {
  for (int64_t i = 0; i < padded; i += 2) {
    const float *first = from + i * ld, *second = first + ld;
    uint32_t *to = pairs + i / 2 * cols;
    for (int64_t c = 0; c < cols; c += kLanes) {
      const Vec low = i < rows ? load(first + c) : Vec{}, high = i + 1 < rows ? load(second + c) : Vec{};
      *reinterpret_cast<UnalignedWordVec *>(to + c) = pair_up(low, high);
    }
  }
}

inline void pack_rows(int64_t n, const float *from, uint32_t *pairs) {
#if defined(__AVX512BF16__)
  for (int64_t i = 0; i < n; i += 16) {
    const __m256bh half = _mm512_cvtneps_pbh((__m512)load(from + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(pairs + i / 2), (__m256i)half);
  }
#elif defined(__aarch64__)
  for (int64_t i = 0; i < n; i += 8) {  // the upper halves of both vectors' words
    const uint32x4_t low = (uint32x4_t)round_upper(load(from + i)), high = (uint32x4_t)round_upper(load(from + i + 4));
    vst1q_u32(pairs + i / 2, vreinterpretq_u32_u16(vuzp2q_u16(vreinterpretq_u16_u32(low), vreinterpretq_u16_u32(high))));
  }
#else
  for (int64_t i = 0; i < n; i += 2) {
    pairs[i / 2] = f32_to_bf16(from[i]) | static_cast<uint32_t>(f32_to_bf16(from[i + 1])) << 16;
  }
#endif
}

}  // namespace fw::FW_LEVEL
