// SPDX-License-Identifier: Apache-2.0
// Tensors of the problems that the program makes up itself: dense, at random, the same in every run, and compared
// with a run of the same values in fp64.
#pragma once
#include <stdint.h>

#include <initializer_list>
#include <string>
#include <vector>

#include "fastweight/fastweight.h"
#include "model/buffer.hpp"

namespace fw::cli {

fw_dtype dtype_named(const std::string &name);  // "f32", "bf16", "f16"; throws Error
const char *dtype_name(fw_dtype dtype);

int64_t count(const fw_tensor &t);
uint64_t bytes_of(const fw_tensor &t);  // 0 when absent
double get(const fw_tensor &t, int64_t i);
void put(const fw_tensor &t, int64_t i, double value);
std::vector<double> values(const fw_tensor &t);

// The largest difference over the root mean square of the reference; NaN when a difference is.
double relative_difference(const std::vector<double> &a, const std::vector<double> &reference);

// Makes tensors and owns their memory. Without data they are shapes alone.
class CaseTensors {
 public:
  explicit CaseTensors(bool has_data) : has_data_(has_data) {}
  bool has_data() const { return has_data_; }

  fw_tensor tensor(std::initializer_list<int64_t> shape, fw_dtype dtype);  // zeros
  fw_tensor random(std::initializer_list<int64_t> shape, fw_dtype dtype, double low, double high);
  fw_tensor unit_rows(std::initializer_list<int64_t> shape, fw_dtype dtype);  // each row of length 1
  // Of the shape and type of t; absent when t is.
  fw_tensor like(const fw_tensor &t);
  fw_tensor random_like(const fw_tensor &t);  // in [-1, 1)
  fw_tensor copy_as(const fw_tensor &t, fw_dtype dtype);

 private:
  double uniform();

  std::vector<model::Buffer> owned_;
  bool has_data_;
  uint64_t random_ = 1;
};

}  // namespace fw::cli
