// SPDX-License-Identifier: Apache-2.0
// Rows of a caller's tensor to padded fp32 scratch and back. Included by *.isa.cpp files only.
#pragma once
#include "core/tensor.hpp"
#include "cpu/vec.hpp"

namespace fw::FW_LEVEL {

#if defined(__AVX2__)
inline __attribute__((always_inline)) __m256 widen_bf16_8(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))), 16));
}
#endif

// to[i] = data[offset + i * stride], i < n; to[n .. padded) = 0.
FW_NOINLINE inline void load_row(const void *data, fw_dtype dtype, int64_t offset, int64_t stride, int64_t n, int64_t padded, float *to) {
  if (dtype == FW_F32) {
    const float *from = static_cast<const float *>(data) + offset;
    if (stride == 1 && n > 0) {  // a tensor without elements may have no address
      memcpy(to, from, static_cast<size_t>(n) * 4);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = from[i * stride];
    }
  } else if (dtype == FW_BF16) {
    const uint16_t *from = static_cast<const uint16_t *>(data) + offset;
    int64_t i = 0;
#if defined(__AVX2__)
    if (stride == 1) {
      for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, widen_bf16_8(from + i));
    }
#elif defined(__aarch64__)
    if (stride == 1) {
      for (; i + 4 <= n; i += 4) vst1q_f32(to + i, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + i), 16)));
    }
#endif
    for (; i < n; ++i) to[i] = bf16_to_f32(from[i * stride]);
  } else {
    const uint16_t *from = static_cast<const uint16_t *>(data) + offset;
    int64_t i = 0;
#if defined(__AVX2__)
    if (stride == 1) {
      for (; i + 8 <= n; i += 8) {
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i))));
      }
    }
#elif defined(__aarch64__)
    if (stride == 1) {
      for (; i + 4 <= n; i += 4) vst1q_f32(to + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + i))));
    }
#endif
    for (; i < n; ++i) to[i] = f16_to_f32(from[i * stride]);
  }
  for (int64_t i = n; i < padded; ++i) to[i] = 0.0f;
}

// data[offset + i * stride] = from[i], rounded to nearest even, i < n.
FW_NOINLINE inline void store_row(void *data, fw_dtype dtype, int64_t offset, int64_t stride, int64_t n, const float *from) {
  if (dtype == FW_F32) {
    float *to = static_cast<float *>(data) + offset;
    if (stride == 1 && n > 0) {  // a tensor without elements may have no address
      memcpy(to, from, static_cast<size_t>(n) * 4);
    } else {
      for (int64_t i = 0; i < n; ++i) to[i * stride] = from[i];
    }
  } else if (dtype == FW_BF16) {
    uint16_t *to = static_cast<uint16_t *>(data) + offset;
    for (int64_t i = 0; i < n; ++i) to[i * stride] = f32_to_bf16(from[i]);
  } else {
    uint16_t *to = static_cast<uint16_t *>(data) + offset;
    int64_t i = 0;
#if defined(__AVX2__)
    if (stride == 1) {
      for (; i + 8 <= n; i += 8) {
        const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(to + i), half);
      }
    }
#elif defined(__aarch64__)
    if (stride == 1) {
      for (; i + 4 <= n; i += 4) vst1_u16(to + i, vreinterpret_u16_f16(vcvt_f16_f32(vld1q_f32(from + i))));
    }
#endif
    for (; i < n; ++i) to[i * stride] = f32_to_f16(from[i]);
  }
}

}  // namespace fw::FW_LEVEL
