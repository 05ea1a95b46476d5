// SPDX-License-Identifier: Apache-2.0
// Kernels of the linear layer, once a level.
//
// Plan of dots: tiles of kRows x cols_of(kRows) lane-wise accumulators run along depth, kDepth at a time, so that the rows
// of a tile stay in the first cache; half-precision weights are widened in registers, which leaves the stream of weights
// (all there is to a decode step) at its stored size. With one row, 8 weight rows are read side by side: enough independent
// sums to hide the latency of the fused multiply-add. Order of each sum: lanes, then the tree of sum_lanes_4, then blocks.
#include "cpu/gemm.hpp"
#include "cpu/rows.hpp"
#include "ops/linear/kernels.hpp"

namespace fw::FW_LEVEL {
namespace {

constexpr int64_t kDepth = 1024;

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
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))), 16);
#elif defined(__AVX2__)
    return (Vec)widen_bf16_8(p);
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
#else
    Vec x;
    for (int i = 0; i < kLanes; ++i) x[i] = f16_to_f32(p[i]);
    return x;
#endif
  }
  static float widen_one(uint16_t x) { return f16_to_f32(x); }
};

template <class W>
__attribute__((noinline)) Vec widen_tail(const typename W::Stored *p, int64_t n) {
  float lanes[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) lanes[i] = i < n ? W::widen_one(p[i]) : 0.0f;
  return load(lanes);
}

// Weight rows beside each other for kRows rows of x: the accumulators and a row of each side fit the registers.
constexpr int cols_of(int rows) {
#if defined(__AVX512F__)
  return rows == 4 ? 6 : 8;
#else
  return rows == 4 ? 3 : rows == 3 ? 4 : rows == 2 ? 6 : 8;
#endif
}
constexpr int kMaxRows = 4;

// acc[m * kCols + n] += x[m] * w[n], a vector of depth. The side with fewer rows stays in registers, the other passes by.
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
inline __attribute__((always_inline)) void dot_tile(int64_t depth, const float *x, int64_t ldx, const typename W::Stored *w,
                                                    int64_t ldw, float *y, int64_t ldy, bool is_added) {
  constexpr int kSums = (kRows * kCols + 3) / 4 * 4;
  Vec acc[kSums];
#pragma GCC unroll 64
  for (int i = 0; i < kSums; ++i) acc[i] = Vec{};
  int64_t k = 0;
  for (; k + kLanes <= depth; k += kLanes) {
    dot_vectors<kRows, kCols>([&](int m) __attribute__((always_inline)) { return load(x + m * ldx + k); },
                              [&](int n) __attribute__((always_inline)) { return W::widen(w + n * ldw + k); }, acc);
  }
  if (k < depth) {
    dot_vectors<kRows, kCols>([&](int m) { return widen_tail<AsF32>(x + m * ldx + k, depth - k); },
                              [&](int n) { return widen_tail<W>(w + n * ldw + k, depth - k); }, acc);
  }
  float sums[kSums];
#pragma GCC unroll 16
  for (int i = 0; i < kSums; i += 4) gemm_detail::sum_lanes_4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], sums + i);
  for (int m = 0; m < kRows; ++m) {
    for (int n = 0; n < kCols; ++n) {
      const float sum = sums[m * kCols + n];
      y[m * ldy + n] = is_added ? y[m * ldy + n] + sum : sum;
    }
  }
}

template <int kRows, class W>
void dot_rows(int64_t outs, int64_t depth, const float *x, int64_t ldx, const typename W::Stored *w, int64_t ldw, float *y,
              int64_t ldy, bool is_added) {
  constexpr int kCols = cols_of(kRows);
  int64_t o = 0;
  for (; o + kCols <= outs; o += kCols) dot_tile<kRows, kCols, W>(depth, x, ldx, w + o * ldw, ldw, y + o, ldy, is_added);
  for (; o < outs; ++o) dot_tile<kRows, 1, W>(depth, x, ldx, w + o * ldw, ldw, y + o, ldy, is_added);
}

template <class W>
void dots_as(int64_t rows, int64_t outs, int64_t depth, const float *x, int64_t ldx, const typename W::Stored *w, int64_t ldw,
             float *y, int64_t ldy) {
  int64_t k = 0;
  do {
    const int64_t part = depth - k < kDepth ? depth - k : kDepth;
    int64_t m = 0;
    for (; m + kMaxRows <= rows; m += kMaxRows) {
      dot_rows<kMaxRows, W>(outs, part, x + m * ldx + k, ldx, w + k, ldw, y + m * ldy, ldy, k > 0);
    }
    const float *x_rest = x + m * ldx + k;
    float *y_rest = y + m * ldy;
    if (rows - m == 3) dot_rows<3, W>(outs, part, x_rest, ldx, w + k, ldw, y_rest, ldy, k > 0);
    if (rows - m == 2) dot_rows<2, W>(outs, part, x_rest, ldx, w + k, ldw, y_rest, ldy, k > 0);
    if (rows - m == 1) dot_rows<1, W>(outs, part, x_rest, ldx, w + k, ldw, y_rest, ldy, k > 0);
    k += part;
  } while (k < depth);
}

void dots(int64_t rows, int64_t outs, int64_t depth, const float *x, int64_t ldx, const void *w, fw_dtype dtype, int64_t ldw,
          float *y, int64_t ldy) {
  if (dtype == FW_F32) return dots_as<AsF32>(rows, outs, depth, x, ldx, static_cast<const float *>(w), ldw, y, ldy);
  const uint16_t *bits = static_cast<const uint16_t *>(w);
  if (dtype == FW_BF16) return dots_as<AsBf16>(rows, outs, depth, x, ldx, bits, ldw, y, ldy);
  dots_as<AsF16>(rows, outs, depth, x, ldx, bits, ldw, y, ldy);
}

void products(int64_t rows, int64_t cols, int64_t depth, const float *a, int64_t a_row, int64_t a_col, const float *b,
              int64_t ldb, float *c, int64_t ldc, bool is_added) {
  if (is_added) gemm_nn<Keep::kAll>(rows, cols, depth, a, a_row, a_col, b, ldb, c, ldc);
  else gemm_nn<Keep::kNothing>(rows, cols, depth, a, a_row, a_col, b, ldb, c, ldc);
}

void load_block(const void *data, fw_dtype dtype, int64_t offset, int64_t row_stride, int64_t stride, int64_t rows, int64_t n,
                int64_t padded, float *to, int64_t ld) {
  for (int64_t r = 0; r < rows; ++r) load_row(data, dtype, offset + r * row_stride, stride, n, padded, to + r * ld);
}

void store_block(void *data, fw_dtype dtype, int64_t offset, int64_t row_stride, int64_t stride, int64_t rows, int64_t n,
                 float *from, int64_t ld, const float *bias) {
  for (int64_t r = 0; r < rows; ++r) {
    float *row = from + r * ld;
    for (int64_t i = 0; bias && i < n; ++i) row[i] += bias[i];
    store_row(data, dtype, offset + r * row_stride, stride, n, row);
  }
}

}  // namespace

extern const linear::Kernels kLinearKernels;
const linear::Kernels kLinearKernels = {dots, products, load_block, store_block};

}  // namespace fw::FW_LEVEL
