// SPDX-License-Identifier: Apache-2.0
// Products of rows with rows (dot products), the right side stored in fp32, bf16 or fp16. Included by *.isa.cpp
// files only.
//
// Plan: tiles of 1 to 4 rows x cols_of(rows) lane-wise accumulators run along the depth, kDotDepth at a time; the
// right side is widened in registers, which leaves a stream of weights at its stored size. With one row, 8 right
// rows are read side by side: enough independent sums to hide the latency of the fused multiply-add.
#pragma once
#include "cpu/rows.hpp"
#include "cpu/vec.hpp"

namespace fw::FW_LEVEL {

// Sums of four accumulators, each by the same tree.
inline __attribute__((always_inline)) void sum_lanes_4(Vec w, Vec x, Vec y, Vec z, float *to) {
#if defined(__AVX512F__)
  const __m256 a = (__m256)fold_halves(w), b = (__m256)fold_halves(x);
  const __m256 c = (__m256)fold_halves(y), d = (__m256)fold_halves(z);
#elif defined(__AVX2__)
  const __m256 a = (__m256)w, b = (__m256)x, c = (__m256)y, d = (__m256)z;
#endif
#if defined(__AVX2__)
  const __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#elif defined(__aarch64__)
  vst1q_f32(to, vpaddq_f32(vpaddq_f32((float32x4_t)w, (float32x4_t)x), vpaddq_f32((float32x4_t)y, (float32x4_t)z)));
#else
  to[0] = (w[0] + w[1]) + (w[2] + w[3]);
  to[1] = (x[0] + x[1]) + (x[2] + x[3]);
  to[2] = (y[0] + y[1]) + (y[2] + y[3]);
  to[3] = (z[0] + z[1]) + (z[2] + z[3]);
#endif
}

// Vectors of a sum that run before its lanes are folded: rows of a tile stay in the first cache that long.
constexpr int64_t kDotDepth = 1024;

struct AsF32 {
  typedef float Stored;
  static inline __attribute__((always_inline)) Vec widen(const float *p) { return load(p); }
  static float widen_one(float x) { return x; }
};

typedef uint16_t HalfBits __attribute__((vector_size(kLanes * 2)));
typedef uint16_t UnalignedHalfBits __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));

struct AsBf16 {
  typedef uint16_t Stored;
  static inline __attribute__((always_inline)) Vec widen(const uint16_t *p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))),
                                  16);
#elif defined(__AVX2__)
    return (Vec)widen_bf16_8(p);
#elif defined(__aarch64__)
    return (Vec)vshll_n_u16(vld1_u16(p), 16);
#else
    return (Vec)(__builtin_convertvector(*reinterpret_cast<const UnalignedHalfBits *>(p), IntVec) << 16);
#endif
  }
  static float widen_one(uint16_t x) { return bf16_to_f32(x); }
};

struct AsF16 {
  typedef uint16_t Stored;
  static inline __attribute__((always_inline)) Vec widen(const uint16_t *p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
#elif defined(__aarch64__)
    return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    Vec x;
    for (int i = 0; i < kLanes; ++i) x[i] = f16_to_f32(p[i]);
    return x;
#endif
  }
  static float widen_one(uint16_t x) { return f16_to_f32(x); }
};

template <class W>
FW_NOINLINE Vec widen_tail(const typename W::Stored *p, int64_t n) {
  float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = i < n ? W::widen_one(p[i]) : 0.0f;
  return load(lanes);
}

// Rows of w beside each other for `rows` rows of x: the accumulators and a row of each side fit the registers.
constexpr int cols_of(int rows) {
#if defined(__AVX512F__) || defined(__aarch64__)  // 32 registers
  return rows == 4 ? 6 : 8;
#else
  return rows == 4 ? 3 : rows == 3 ? 4 : rows == 2 ? 6 : 8;
#endif
}

// acc[m * kCols + n] += x[m] * w[n], a vector of depth. The side with fewer rows stays in registers, the other
// passes by.
template <int kRows, int kCols, class X, class W>
inline __attribute__((always_inline)) void dot_vectors(X row_at, W col_at, Vec *acc) {
  constexpr bool kHoldRows = kRows < kCols;
  constexpr int kHeld = kHoldRows ? kRows : kCols, kPassing = kHoldRows ? kCols : kRows;
  Vec held[kHeld];
#pragma GCC unroll 8
  for (int i = 0; i < kHeld; ++i) held[i] = kHoldRows ? row_at(i) : col_at(i);
#pragma GCC unroll 8
  for (int j = 0; j < kPassing; ++j) {
    const Vec passing = kHoldRows ? col_at(j) : row_at(j);
#pragma GCC unroll 8
    for (int i = 0; i < kHeld; ++i) {
      Vec &sum = acc[kHoldRows ? i * kCols + j : j * kCols + i];
      sum = fma(passing, held[i], sum);
    }
  }
}

template <int kRows, int kCols, class W>
inline __attribute__((always_inline)) void dot_tile(int64_t depth, const float *x, int64_t ldx,
                                                    const typename W::Stored *w, int64_t ldw, float *y, int64_t ldy,
                                                    bool is_added) {
  constexpr int kSums = (kRows * kCols + 3) / 4 * 4;
  Vec acc[kSums];
#pragma GCC unroll 64
  for (int i = 0; i < kSums; ++i) acc[i] = Vec{};
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    dot_vectors<kRows, kCols>(
        [&](int m) __attribute__((always_inline)) { return load(x + m * ldx + k); },
        [&](int n) __attribute__((always_inline)) { return W::widen(w + n * ldw + k); }, acc);
  }
  if (k < depth) {
    dot_vectors<kRows, kCols>([&](int m) { return widen_tail<AsF32>(x + m * ldx + k, depth - k); },
                              [&](int n) { return widen_tail<W>(w + n * ldw + k, depth - k); }, acc);
  }
  float sums[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i += 4) sum_lanes_4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], sums + i);
  if (is_added) {
    for (int m = 0; m < kRows; ++m) {
      for (int n = 0; n < kCols; ++n) y[m * ldy + n] += sums[m * kCols + n];
    }
  } else {
#pragma GCC unroll 8
    for (int m = 0; m < kRows; ++m) memcpy(y + m * ldy, sums + m * kCols, kCols * sizeof(float));
  }
}

template <int kRows, int kCols, class W>
FW_NOINLINE void dot_cols(int64_t cols, int64_t depth, const float *x, int64_t ldx, const typename W::Stored *w,
                          int64_t ldw, float *y, int64_t ldy, bool is_added) {
  int64_t n = 0;
  for (; n + kCols <= cols; n += kCols)
    dot_tile<kRows, kCols, W>(depth, x, ldx, w + n * ldw, ldw, y + n, ldy, is_added);
  if constexpr (kCols > 1) {
    constexpr int kFewer = kCols > 4 ? 4 : kCols > 2 ? 2 : 1;
    if (n < cols) dot_cols<kRows, kFewer, W>(cols - n, depth, x, ldx, w + n * ldw, ldw, y + n, ldy, is_added);
  }
}

// y[m * ldy + n] (+)= sum_k x[m * ldx + k] * w[n * ldw + k], k < depth. Order of each sum: lanes, the tree of
// sum_lanes_4, then blocks of kDotDepth; it depends on depth alone.
template <class W>
FW_NOINLINE void dots(int64_t rows, int64_t cols, int64_t depth, const float *x, int64_t ldx,
                      const typename W::Stored *w, int64_t ldw, float *y, int64_t ldy, bool is_added) {
  int64_t k = 0;
  do {
    const int64_t part = depth - k < kDotDepth ? depth - k : kDotDepth;
    const float *from = x + k;
    float *to = y;
    int64_t m = 0;
    for (; m + 4 <= rows; m += 4, from += 4 * ldx, to += 4 * ldy) {
      dot_cols<4, cols_of(4), W>(cols, part, from, ldx, w + k, ldw, to, ldy, is_added);
    }
    if (rows - m == 3) dot_cols<3, cols_of(3), W>(cols, part, from, ldx, w + k, ldw, to, ldy, is_added);
    if (rows - m == 2) dot_cols<2, cols_of(2), W>(cols, part, from, ldx, w + k, ldw, to, ldy, is_added);
    if (rows - m == 1) dot_cols<1, cols_of(1), W>(cols, part, from, ldx, w + k, ldw, to, ldy, is_added);
    k += part;
    is_added = true;
  } while (k < depth);
}

}  // namespace fw::FW_LEVEL
