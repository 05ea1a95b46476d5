// SPDX-License-Identifier: Apache-2.0
#include "cli/case_tensor.hpp"

#include <math.h>
#include <string.h>

#include "model/error.hpp"
#include "model/sampler.hpp"

namespace fw::cli {
namespace {

struct NamedType {
  const char *name;
  fw_dtype dtype;
  uint64_t size;
};
constexpr NamedType kTypes[] = {{"f32", FW_F32, 4}, {"bf16", FW_BF16, 2}, {"f16", FW_F16, 2}, {"f64", FW_F64, 8}};

const NamedType &type_of(fw_dtype dtype) {
  for (const NamedType &type : kTypes) {
    if (type.dtype == dtype) return type;
  }
  return kTypes[0];
}

uint16_t to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

float from_bf16(uint16_t half) {
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// Within the range of the operands here (|x| below 16); smaller than the smallest normal number becomes 0.
uint16_t to_f16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude < 0x38800000) return static_cast<uint16_t>(sign);
  const uint32_t rounded = magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1);
  return static_cast<uint16_t>(sign | rounded >> 13);
}

float from_f16(uint16_t half) {
  const uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
  const float magnitude = exponent == 0
                              ? ldexpf(static_cast<float>(fraction), -24)
                              : ldexpf(static_cast<float>(fraction + 1024), static_cast<int>(exponent) - 25);
  return half & 0x8000 ? -magnitude : magnitude;
}

}  // namespace

fw_dtype dtype_named(const std::string &name) {
  for (const NamedType &type : kTypes) {
    if (name == type.name && type.dtype != FW_F64) return type.dtype;
  }
  FW_MODEL_FAIL("dtype is %s, allowed f32, bf16 and f16", model::quote(name).c_str());
}

const char *dtype_name(fw_dtype dtype) { return type_of(dtype).name; }

int64_t count(const fw_tensor &t) {
  int64_t n = 1;
  for (int32_t i = 0; i < t.ndim; ++i) n *= t.shape[i];
  return n;
}

uint64_t bytes_of(const fw_tensor &t) {
  return t.dtype == FW_NONE ? 0 : static_cast<uint64_t>(count(t)) * type_of(t.dtype).size;
}

double get(const fw_tensor &t, int64_t i) {
  switch (t.dtype) {
    case FW_F64: return static_cast<const double *>(t.data)[i];
    case FW_BF16: return from_bf16(static_cast<const uint16_t *>(t.data)[i]);
    case FW_F16: return from_f16(static_cast<const uint16_t *>(t.data)[i]);
    default: return static_cast<const float *>(t.data)[i];
  }
}

void put(const fw_tensor &t, int64_t i, double value) {
  switch (t.dtype) {
    case FW_F64: static_cast<double *>(t.data)[i] = value; break;
    case FW_BF16: static_cast<uint16_t *>(t.data)[i] = to_bf16(static_cast<float>(value)); break;
    case FW_F16: static_cast<uint16_t *>(t.data)[i] = to_f16(static_cast<float>(value)); break;
    default: static_cast<float *>(t.data)[i] = static_cast<float>(value);
  }
}

std::vector<double> values(const fw_tensor &t) {
  std::vector<double> out;
  for (int64_t i = 0; i < count(t); ++i) out.push_back(get(t, i));
  return out;
}

double relative_difference(const std::vector<double> &a, const std::vector<double> &reference) {
  double largest = 0, square = 0;
  for (size_t i = 0; i < reference.size(); ++i) {
    const double difference = fabs(a[i] - reference[i]);
    if (!(difference <= largest)) largest = difference;
    if (largest != largest) return largest;
    square += reference[i] * reference[i];
  }
  return square > 0 ? largest / sqrt(square / static_cast<double>(reference.size())) : largest;
}

double CaseTensors::uniform() { return model::uniform_draw(7, random_++); }

fw_tensor CaseTensors::tensor(std::initializer_list<int64_t> shape, fw_dtype dtype) {
  return like(fw_dense(nullptr, dtype, static_cast<int32_t>(shape.size()), shape.begin()));
}

fw_tensor CaseTensors::like(const fw_tensor &t) {
  fw_tensor made = t;
  if (t.dtype == FW_NONE || !has_data_) return made;
  owned_.emplace_back(bytes_of(t));
  made.data = owned_.back().data();
  return made;
}

fw_tensor CaseTensors::random_like(const fw_tensor &t) {
  const fw_tensor made = like(t);
  for (int64_t i = 0; made.data && i < count(made); ++i) put(made, i, 2 * uniform() - 1);
  return made;
}

fw_tensor CaseTensors::copy_as(const fw_tensor &t, fw_dtype dtype) {
  fw_tensor shape = t;
  if (t.dtype != FW_NONE) shape.dtype = dtype;
  const fw_tensor made = like(shape);
  for (int64_t i = 0; t.dtype != FW_NONE && i < count(t); ++i) put(made, i, get(t, i));
  return made;
}

fw_tensor CaseTensors::random(std::initializer_list<int64_t> shape, fw_dtype dtype, double low, double high) {
  const fw_tensor t = tensor(shape, dtype);
  for (int64_t i = 0; has_data_ && i < count(t); ++i) put(t, i, low + (high - low) * uniform());
  return t;
}

fw_tensor CaseTensors::unit_rows(std::initializer_list<int64_t> shape, fw_dtype dtype) {
  const fw_tensor t = random(shape, dtype, -1, 1);
  const int64_t size = t.shape[t.ndim - 1];
  for (int64_t row = 0; has_data_ && row < count(t); row += size) {
    double square = 1e-12;
    for (int64_t i = 0; i < size; ++i) square += get(t, row + i) * get(t, row + i);
    for (int64_t i = 0; i < size; ++i) put(t, row + i, get(t, row + i) / sqrt(square));
  }
  return t;
}

}  // namespace fw::cli
