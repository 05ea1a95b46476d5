// SPDX-License-Identifier: Apache-2.0
#include "core/tensor.hpp"

#include <stdio.h>

#include "core/overlap.hpp"
#include "core/status.hpp"

namespace fw {

const char *dtype_name(fw_dtype dtype) {
  switch (dtype) {
    case FW_NONE: return "none";
    case FW_F32: return "fp32";
    case FW_BF16: return "bf16";
    case FW_F16: return "fp16";
    case FW_F64: return "fp64";
    case FW_I32: return "int32";
    case FW_I64: return "int64";
    default: return "an unknown dtype";
  }
}

int64_t numel(const fw_tensor &t) {
  int64_t n = 1;
  for (int32_t i = 0; i < t.ndim; ++i) {
    if (t.shape[i] == 0) return 0;  // the other sizes are unbounded then
  }
  for (int32_t i = 0; i < t.ndim; ++i) n *= t.shape[i];
  return n;
}

const char *shape_text(const int64_t *shape, int32_t ndim, char *buf, int64_t capacity) {
  int64_t length = snprintf(buf, static_cast<size_t>(capacity), "[");
  for (int32_t i = 0; i < ndim && length < capacity; ++i) {
    length += snprintf(buf + length, static_cast<size_t>(capacity - length), "%s%lld", i ? "," : "",
                       static_cast<long long>(shape[i]));
  }
  if (length < capacity) snprintf(buf + length, static_cast<size_t>(capacity - length), "]");
  return buf;
}
const char *shape_text(const fw_tensor &t, char *buf, int64_t capacity) {
  const int32_t ndim = t.ndim < 0 ? 0 : (t.ndim > FW_MAX_DIMS ? FW_MAX_DIMS : t.ndim);
  return shape_text(t.shape, ndim, buf, capacity);
}

namespace {

// Lowest and highest element offset of a checked, non-empty tensor; false when they do not fit in 62 bits.
bool offset_range(const fw_tensor &t, int64_t *low, int64_t *high) {
  *low = *high = 0;
  for (int32_t i = 0; i < t.ndim; ++i) {
    int64_t reach;
    if (!mul_fits(t.shape[i] - 1, t.strides[i], &reach)) return false;
    int64_t *side = reach < 0 ? low : high;
    if (__builtin_add_overflow(*side, reach, side)) return false;
  }
  const int64_t limit = int64_t{1} << 58;
  return *low > -limit && *high < limit;
}

}  // namespace

fw_status check_tensor(const char *op, const char *name, const fw_tensor &t, const int64_t *shape, int32_t ndim,
                       bool with_data) {
  if (!given(t)) return fail(FW_INVALID_ARGUMENT, "%s: %s is missing", op, name);
  if (dtype_size(t.dtype) == 0) {
    return fail(FW_INVALID_ARGUMENT, "%s: %s has dtype number %d, allowed 1 to 6", op, name, t.dtype);
  }
  if (t.ndim != ndim) {
    return fail(FW_INVALID_ARGUMENT, "%s: %s has %d dimensions, expected %d", op, name, t.ndim, ndim);
  }
  char found[160], allowed[160];
  int64_t count = 1;
  for (int32_t i = 0; i < ndim; ++i) {
    if (t.shape[i] != shape[i]) {
      return fail(FW_INVALID_ARGUMENT, "%s: %s has shape %s, expected %s", op, name,
                  shape_text(t, found, sizeof found), shape_text(shape, ndim, allowed, sizeof allowed));
    }
    if (t.shape[i] < 0) {
      return fail(FW_INVALID_ARGUMENT, "%s: %s has shape %s, sizes must not be negative", op, name,
                  shape_text(t, found, sizeof found));
    }
  }
  bool is_empty = false;
  for (int32_t i = 0; i < ndim; ++i) is_empty = is_empty || t.shape[i] == 0;
  if (is_empty) return FW_OK;
  for (int32_t i = 0; i < ndim; ++i) {
    if (!mul_fits(count, t.shape[i], &count) || count > (int64_t{1} << 58)) {
      return fail(FW_INVALID_ARGUMENT, "%s: %s has shape %s, more than 2^58 elements", op, name,
                  shape_text(t, found, sizeof found));
    }
  }
  int64_t low, high;
  if (!offset_range(t, &low, &high)) {
    return fail(FW_INVALID_ARGUMENT, "%s: %s has strides that reach further than 2^58 elements", op, name);
  }
  if (with_data && t.data == nullptr) return fail(FW_INVALID_ARGUMENT, "%s: %s has a null data pointer", op, name);
  if (with_data && reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(dtype_size(t.dtype)) != 0) {
    return fail(FW_INVALID_ARGUMENT, "%s: %s has a data pointer that is not a multiple of %lld bytes", op, name,
                static_cast<long long>(dtype_size(t.dtype)));
  }
  return FW_OK;
}

fw_status check_dtype(const char *op, const char *name, const fw_tensor &t, const fw_dtype *allowed,
                      int32_t n_allowed) {
  char list[96] = "";
  size_t length = 0;
  for (int32_t i = 0; i < n_allowed; ++i) {
    if (t.dtype == allowed[i]) return FW_OK;
    bool is_named = false;
    for (int32_t j = 0; j < i; ++j) is_named = is_named || allowed[j] == allowed[i];
    if (is_named) continue;
    const int n = snprintf(list + length, sizeof list - length, "%s%s", i ? ", " : "", dtype_name(allowed[i]));
    length += n > 0 && length + static_cast<size_t>(n) < sizeof list ? static_cast<size_t>(n) : 0;
  }
  return fail(FW_INVALID_ARGUMENT, "%s: %s has dtype %s, allowed %s", op, name, dtype_name(t.dtype), list);
}

fw_status check_output(const char *op, const char *name, const fw_tensor &t) {
  const Overlap overlap = overlap_of(t);
  if (overlap == Overlap::kNone) return FW_OK;
  char strides[160];
  shape_text(t.strides, t.ndim, strides, sizeof strides);
  if (overlap == Overlap::kSome) {
    return fail(FW_INVALID_ARGUMENT, "%s: output %s overlaps itself: strides %s", op, name, strides);
  }
  return fail(FW_INVALID_ARGUMENT, "%s: output %s may overlap itself: strides %s need more than %lld cases to tell",
              op, name, strides, static_cast<long long>(kOverlapCases));
}

fw_status check_disjoint(const char *op, const char *out_name, const fw_tensor &out, const char *name,
                         const fw_tensor &t) {
  if (!given(out) || !given(t) || numel(out) == 0 || numel(t) == 0 || !out.data || !t.data) return FW_OK;
  int64_t low[2], high[2];
  if (!offset_range(out, &low[0], &high[0]) || !offset_range(t, &low[1], &high[1])) return FW_OK;
  // interleaved views of one buffer (the slices of a fused gradient) have holes and are the caller's business
  const bool has_holes = high[0] - low[0] + 1 != numel(out) || high[1] - low[1] + 1 != numel(t);
  if (has_holes && out.data != t.data) return FW_OK;
  const int64_t size[2] = {dtype_size(out.dtype), dtype_size(t.dtype)};
  const intptr_t base[2] = {reinterpret_cast<intptr_t>(out.data), reinterpret_cast<intptr_t>(t.data)};
  const intptr_t begin[2] = {base[0] + low[0] * size[0], base[1] + low[1] * size[1]};
  const intptr_t end[2] = {base[0] + (high[0] + 1) * size[0], base[1] + (high[1] + 1) * size[1]};
  if (begin[0] < end[1] && begin[1] < end[0]) {
    return fail(FW_INVALID_ARGUMENT, "%s: output %s shares memory with %s, allowed: none", op, out_name, name);
  }
  return FW_OK;
}

fw_status check_cu_seqlens(const char *op, const fw_tensor &cu, int64_t batch, int64_t tokens, bool with_data,
                           int64_t *n, fw_device device) {
  const fw_dtype allowed[] = {FW_I32, FW_I64};
  FW_TRY(check_dtype(op, "cu_seqlens", cu, allowed, 2));
  if (cu.ndim != 1 || cu.shape[0] < 1) {
    char found[160];
    return fail(FW_INVALID_ARGUMENT, "%s: cu_seqlens has shape %s, expected [N+1]", op,
                shape_text(cu, found, sizeof found));
  }
  FW_TRY(check_tensor(op, "cu_seqlens", cu, cu.shape, 1, with_data));
  if (batch != 1) {
    return fail(FW_INVALID_ARGUMENT, "%s: batch is %lld, must be 1 with cu_seqlens", op,
                static_cast<long long>(batch));
  }
  *n = cu.shape[0] - 1;
  if (!with_data || device != FW_DEVICE_CPU) return FW_OK;
  int64_t previous = 0;
  for (int64_t i = 0; i <= *n; ++i) {
    const int64_t at = load_int(cu, i);
    if (i == 0 && at != 0) {
      return fail(FW_INVALID_ARGUMENT, "%s: cu_seqlens[0] is %lld, must be 0", op, static_cast<long long>(at));
    }
    if (at < previous) {
      return fail(FW_INVALID_ARGUMENT, "%s: cu_seqlens[%lld] is %lld, below the entry before it, %lld", op,
                  static_cast<long long>(i), static_cast<long long>(at), static_cast<long long>(previous));
    }
    if (at > tokens) {
      return fail(FW_INVALID_ARGUMENT, "%s: cu_seqlens[%lld] is %lld, allowed at most T = %lld", op,
                  static_cast<long long>(i), static_cast<long long>(at), static_cast<long long>(tokens));
    }
    previous = at;
  }
  return FW_OK;
}

float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {
    const float value = static_cast<float>(mantissa) * 0x1p-24f;  // exact
    memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

uint16_t f64_to_f16(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  const uint16_t sign = static_cast<uint16_t>((bits >> 48) & 0x8000u);
  bits &= 0x7fffffffffffffffu;
  if (bits > 0x7ff0000000000000u) return static_cast<uint16_t>(sign | 0x7e00u);
  double magnitude;
  memcpy(&magnitude, &bits, 8);
  if (magnitude >= 65520.0) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x1p-14) {  // subnormal: adding 2^28 rounds to a multiple of 2^-24
    const double shifted = magnitude + 0x1p28;
    return static_cast<uint16_t>(sign | static_cast<uint16_t>((shifted - 0x1p28) * 0x1p24));
  }
  const uint64_t round = 0x1ffffffffffu + ((bits >> 42) & 1u);
  bits += round;
  const uint64_t exponent = (bits >> 52) - 1023 + 15;
  return static_cast<uint16_t>(sign | (exponent << 10) | ((bits >> 42) & 0x3ffu));
}
uint16_t f32_to_f16(float f) { return f64_to_f16(f); }

uint16_t f64_to_bf16(double x) {
  uint64_t bits;
  memcpy(&bits, &x, 8);
  const uint16_t sign = static_cast<uint16_t>((bits >> 48) & 0x8000u);
  const uint64_t magnitude_bits = bits & 0x7fffffffffffffffu;
  if (magnitude_bits > 0x7ff0000000000000u) return static_cast<uint16_t>(sign | 0x7fc0u);
  // round to odd in fp32, so that the second rounding sees everything
  float f = static_cast<float>(x);
  uint32_t fbits;
  memcpy(&fbits, &f, 4);
  const double back = f;
  if (back != x && (fbits & 0x7f800000u) != 0x7f800000u) {
    const double up = back < 0 ? -back : back, want = x < 0 ? -x : x;
    if (up > want) fbits -= 1;
    fbits |= 1u;
    memcpy(&f, &fbits, 4);
  }
  return f32_to_bf16(f);
}

}  // namespace fw
