// SPDX-License-Identifier: Apache-2.0
// Values and buffers of the tests. Values are dense, row-major and fp64; a Buffer holds them in a storage type behind
// chosen strides, between guard bands, with NaN in every byte that is not an element.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <string>
#include <vector>

#include "core/tensor.hpp"
#include "fastweight/types.h"

namespace fw::test {

// splitmix64: the same numbers on every machine and standard library.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x1234567u) {}
  uint64_t bits() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  double uniform(double low, double high) { return low + (high - low) * uniform(); }
  int64_t integer(int64_t low, int64_t high) {  // both ends included
    return low + static_cast<int64_t>(bits() % static_cast<uint64_t>(high - low + 1));
  }
  bool chance(double p) { return uniform() < p; }
  double normal() {
    const double radius = sqrt(-2 * log(1 - uniform()));
    return radius * cos(6.283185307179586 * uniform());
  }

 private:
  uint64_t state_;
};

struct Values {
  std::vector<int64_t> shape;
  std::vector<double> data;  // row-major

  bool is_given() const { return !shape.empty(); }
  int64_t count() const {
    int64_t n = 1;
    for (int64_t s : shape) n *= s;
    return n;
  }
};

inline Values make_values(const std::vector<int64_t> &shape, double fill = 0) {
  Values v;
  v.shape = shape;
  v.data.assign(static_cast<size_t>(v.count()), fill);
  return v;
}

// "[1,0,2]" of a row-major index.
inline std::string index_text(const std::vector<int64_t> &shape, int64_t index) {
  std::vector<int64_t> at(shape.size());
  for (size_t i = shape.size(); i-- > 0;) {
    at[i] = index % shape[i];
    index /= shape[i];
  }
  std::string text = "[";
  for (size_t i = 0; i < at.size(); ++i) text.append(i ? "," : "").append(std::to_string(at[i]));
  return text.append("]");
}

enum class Strides { kDense, kPadded, kNegative, kTransposed, kBroadcast };

// Rounds every value to the storage type (to nearest even).
inline void round_to(fw_dtype dtype, Values &v) {
  unsigned char cell[8];
  for (double &x : v.data) {
    store_f64(cell, dtype, 0, x);
    x = load_f64(cell, dtype, 0);
  }
}

class Buffer {
 public:
  Buffer() { tensor_ = fw_tensor{}; }

  // An input: holds `values`. kBroadcast needs values that do not change along the second dimension.
  Buffer(const Values &values, fw_dtype dtype, Strides strides) {
    allocate(values.shape, dtype, strides);
    for (int64_t i = 0; i < values.count(); ++i) set(i, values.data[static_cast<size_t>(i)]);
    before_ = bytes_;
  }
  // An output: every byte 0xff, which is NaN in every float type.
  Buffer(const std::vector<int64_t> &shape, fw_dtype dtype, Strides strides) {
    allocate(shape, dtype, strides);
    before_ = bytes_;
  }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;
  Buffer(Buffer &&) = default;
  Buffer &operator=(Buffer &&) = default;

  const fw_tensor &tensor() const { return tensor_; }
  fw_tensor &tensor() { return tensor_; }

  Values values() const {
    Values v;
    v.shape.assign(tensor_.shape, tensor_.shape + tensor_.ndim);
    v.data.resize(static_cast<size_t>(v.count()));
    for (int64_t i = 0; i < v.count(); ++i)
      v.data[static_cast<size_t>(i)] = load_f64(tensor_.data, tensor_.dtype, offset(i));
    return v;
  }
  // Elements as they are stored, for comparisons to the bit.
  std::vector<uint64_t> element_bits() const {
    const size_t size = static_cast<size_t>(dtype_size(tensor_.dtype));
    std::vector<uint64_t> bits(static_cast<size_t>(numel(tensor_)), 0);
    for (size_t i = 0; i < bits.size(); ++i) {
      const char *from =
          static_cast<const char *>(tensor_.data) + offset(static_cast<int64_t>(i)) * static_cast<int64_t>(size);
      memcpy(&bits[i], from, size);
    }
    return bits;
  }

  // Writes one element; what is_unchanged compares with stays as it was until `settle`.
  void set(int64_t index, double x) {
    if (tensor_.dtype == FW_I32) {
      static_cast<int32_t *>(tensor_.data)[offset(index)] = static_cast<int32_t>(x);
    } else if (tensor_.dtype == FW_I64) {
      static_cast<int64_t *>(tensor_.data)[offset(index)] = static_cast<int64_t>(x);
    } else {
      store_f64(tensor_.data, tensor_.dtype, offset(index), x);
    }
  }
  void settle() { before_ = bytes_; }

  unsigned char *bytes() { return bytes_.data(); }
  const unsigned char *begin() const { return bytes_.data(); }
  const unsigned char *end() const { return bytes_.data() + bytes_.size(); }
  bool is_unchanged() const { return bytes_ == before_; }
  // Whether every byte that is no element is as it was: guard bands and the gaps between strided rows.
  bool gaps_are_unchanged() const {
    std::vector<bool> is_element(bytes_.size(), false);
    const size_t size = static_cast<size_t>(dtype_size(tensor_.dtype));
    const size_t base = static_cast<size_t>(static_cast<const unsigned char *>(tensor_.data) - bytes_.data());
    for (int64_t i = 0; i < numel(tensor_); ++i) {
      const size_t at = base + static_cast<size_t>(offset(i) * static_cast<int64_t>(size));
      for (size_t j = 0; j < size; ++j) is_element[at + j] = true;
    }
    for (size_t i = 0; i < bytes_.size(); ++i) {
      if (!is_element[i] && bytes_[i] != before_[i]) return false;
    }
    return true;
  }

 private:
  static constexpr int64_t kGuard = 64;  // elements on each side

  void allocate(const std::vector<int64_t> &shape, fw_dtype dtype, Strides strides) {
    tensor_ = fw_dense(nullptr, dtype, static_cast<int32_t>(shape.size()), shape.data());
    const int32_t n = tensor_.ndim;
    if (strides == Strides::kTransposed && n >= 3) {  // heads before rows in memory: [B,H,T,...]
      int64_t stride = 1;
      for (int32_t i : {4, 3, 1, 2, 0}) {
        if (i >= n) continue;
        tensor_.strides[i] = stride;
        stride *= shape[static_cast<size_t>(i)] > 0 ? shape[static_cast<size_t>(i)] : 1;
      }
    }
    if (strides == Strides::kPadded || strides == Strides::kNegative) {
      int64_t stride = n >= 2 ? 1 : 3;
      for (int32_t i = n - 1; i >= 0; --i) {
        tensor_.strides[i] = strides == Strides::kNegative ? -stride : stride;
        stride = stride * (shape[static_cast<size_t>(i)] > 0 ? shape[static_cast<size_t>(i)] : 1) + 3;
      }
    }
    if (strides == Strides::kBroadcast && n >= 2) tensor_.strides[1] = 0;
    int64_t low = 0, high = 0;
    for (int32_t i = 0; i < n; ++i) {
      const int64_t reach =
          (shape[static_cast<size_t>(i)] > 0 ? shape[static_cast<size_t>(i)] - 1 : 0) * tensor_.strides[i];
      (reach < 0 ? low : high) += reach;
    }
    const int64_t size = dtype_size(dtype);
    bytes_.assign(static_cast<size_t>((high - low + 1 + 2 * kGuard) * size), 0xff);
    tensor_.data = bytes_.data() + (kGuard - low) * size;
  }

  int64_t offset(int64_t index) const {
    int64_t at = 0;
    for (int32_t i = tensor_.ndim - 1; i >= 0; --i) {
      at += index % tensor_.shape[i] * tensor_.strides[i];
      index /= tensor_.shape[i];
    }
    return at;
  }

  std::vector<unsigned char> bytes_, before_;
  fw_tensor tensor_;
};

}  // namespace fw::test
