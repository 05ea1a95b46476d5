// SPDX-License-Identifier: Apache-2.0
// Strides, dtypes and conversions: what every operation needs to look at a caller's tensor. No SIMD. Inline functions are
// static: level files use them, and a copy that the linker shares could be one with instructions that the machine lacks.
#pragma once
#include <stdint.h>
#include <string.h>

#include "core/host_device.hpp"
#include "fastweight/types.h"

namespace fw {

FW_HOST_DEVICE static inline int64_t dtype_size(fw_dtype dtype) {
  switch (dtype) {
    case FW_F32: case FW_I32: return 4;
    case FW_BF16: case FW_F16: return 2;
    case FW_F64: case FW_I64: return 8;
    default: return 0;
  }
}
const char *dtype_name(fw_dtype dtype);  // "fp32", "bf16", ...; "dtype 17" text is not made: unknown is "unknown dtype"
FW_HOST_DEVICE static inline bool is_half(fw_dtype dtype) { return dtype == FW_BF16 || dtype == FW_F16; }
static inline bool is_float32_or_half(fw_dtype dtype) { return dtype == FW_F32 || is_half(dtype); }
FW_HOST_DEVICE static inline bool given(const fw_tensor &t) { return t.dtype != FW_NONE; }
int64_t numel(const fw_tensor &t);

// Formats a shape as "[2,3,4]" into buf and returns it.
const char *shape_text(const fw_tensor &t, char *buf, int64_t capacity);
const char *shape_text(const int64_t *shape, int32_t ndim, char *buf, int64_t capacity);

// The checks every operand passes. `op` and `name` go into the sentence. with_data: data must not be null (unless empty).
fw_status check_tensor(const char *op, const char *name, const fw_tensor &t, const int64_t *shape, int32_t ndim,
                       bool with_data);
fw_status check_dtype(const char *op, const char *name, const fw_tensor &t, const fw_dtype *allowed, int32_t n_allowed);
// Elements at different indices must have different addresses; refused too when that takes too long to tell.
fw_status check_output(const char *op, const char *name, const fw_tensor &t);
// Byte ranges of an output and another tensor must not meet. Views with holes are compared when they start at the same
// address only: types.h says so.
fw_status check_disjoint(const char *op, const char *out_name, const fw_tensor &out, const char *name, const fw_tensor &t);

FW_HOST_DEVICE static inline float bf16_to_f32(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
FW_HOST_DEVICE static inline uint16_t f32_to_bf16(float f) {  // to nearest even; NaN stays NaN
  uint32_t bits;
  memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  bits += 0x7fffu + ((bits >> 16) & 1u);
  return static_cast<uint16_t>(bits >> 16);
}
float f16_to_f32(uint16_t h);
uint16_t f32_to_f16(float f);  // to nearest even; past 65504 becomes inf, as IEEE 754 says
uint16_t f64_to_f16(double x);
uint16_t f64_to_bf16(double x);

// One element at a linear element offset.
static inline double load_f64(const void *data, fw_dtype dtype, int64_t offset) {
  switch (dtype) {
    case FW_F32: return static_cast<const float *>(data)[offset];
    case FW_F64: return static_cast<const double *>(data)[offset];
    case FW_BF16: return bf16_to_f32(static_cast<const uint16_t *>(data)[offset]);
    case FW_F16: return f16_to_f32(static_cast<const uint16_t *>(data)[offset]);
    case FW_I32: return static_cast<const int32_t *>(data)[offset];
    case FW_I64: return static_cast<double>(static_cast<const int64_t *>(data)[offset]);
    default: return 0;
  }
}
static inline float load_f32(const void *data, fw_dtype dtype, int64_t offset) {
  switch (dtype) {
    case FW_F32: return static_cast<const float *>(data)[offset];
    case FW_BF16: return bf16_to_f32(static_cast<const uint16_t *>(data)[offset]);
    case FW_F16: return f16_to_f32(static_cast<const uint16_t *>(data)[offset]);
    case FW_F64: return static_cast<float>(static_cast<const double *>(data)[offset]);
    default: return 0;
  }
}
static inline void store_f32(void *data, fw_dtype dtype, int64_t offset, float x) {
  switch (dtype) {
    case FW_F32: static_cast<float *>(data)[offset] = x; break;
    case FW_BF16: static_cast<uint16_t *>(data)[offset] = f32_to_bf16(x); break;
    case FW_F16: static_cast<uint16_t *>(data)[offset] = f32_to_f16(x); break;
    case FW_F64: static_cast<double *>(data)[offset] = x; break;
    default: break;
  }
}
static inline void store_f64(void *data, fw_dtype dtype, int64_t offset, double x) {  // one rounding, never two
  switch (dtype) {
    case FW_F32: static_cast<float *>(data)[offset] = static_cast<float>(x); break;
    case FW_F64: static_cast<double *>(data)[offset] = x; break;
    case FW_BF16: static_cast<uint16_t *>(data)[offset] = f64_to_bf16(x); break;
    case FW_F16: static_cast<uint16_t *>(data)[offset] = f64_to_f16(x); break;
    default: break;
  }
}
FW_HOST_DEVICE static inline int64_t load_int(const fw_tensor &t, int64_t i) {
  return t.dtype == FW_I32 ? static_cast<const int32_t *>(t.data)[i * t.strides[0]]
                           : static_cast<const int64_t *>(t.data)[i * t.strides[0]];
}

// Sequences of a call: from cu_seqlens, or one a batch entry.
struct Segment {
  int64_t batch, begin, end;  // rows [begin, end) of that batch entry
};
// cu_seqlens: [N+1] int32 or int64, batch 1, first 0, last at most T, non-decreasing. *n: the number of sequences.
// with_data: the pointer is there; its numbers are read when the tensor is of the host.
fw_status check_cu_seqlens(const char *op, const fw_tensor &cu, int64_t batch, int64_t tokens, bool with_data, int64_t *n,
                           fw_device device = FW_DEVICE_CPU);
static inline Segment segment(const fw_tensor &cu, int64_t tokens, int64_t n) {
  if (given(cu)) return {0, load_int(cu, n), load_int(cu, n + 1)};
  return {n, 0, tokens};
}

// *c = a * b and whether it fits.
static inline bool mul_fits(int64_t a, int64_t b, int64_t *c) { return !__builtin_mul_overflow(a, b, c); }

}  // namespace fw
