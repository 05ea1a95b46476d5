// SPDX-License-Identifier: Apache-2.0
// Reader of the safetensors format over memory that the caller keeps alive: 8 bytes of header length, a JSON header,
// and a data part that the tensors must cover without overlap, hole or rest. Nothing of the file is believed before
// it is checked; `parse` throws Error with one sentence.
#pragma once
#include <stdint.h>

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace fw::model {

struct StoredTensor {
  std::string dtype;  // "BF16", "F32", ...
  std::vector<int64_t> shape;
  std::span<const uint8_t> bytes;  // exactly the product of shape times the size of dtype; any alignment

  int64_t n_elements() const {
    int64_t n = 1;
    for (const int64_t size : shape) n *= size;
    return n;
  }
};

std::string shape_text(std::span<const int64_t> shape);  // "[320, 64]"

class Safetensors {
 public:
  // file: how sentences call it.
  static Safetensors parse(std::span<const uint8_t> bytes, const std::string &file);

  const StoredTensor *find(const std::string &name) const;
  const std::map<std::string, StoredTensor> &tensors() const { return tensors_; }
  const std::string &file() const { return file_; }

 private:
  std::string file_;
  std::map<std::string, StoredTensor> tensors_;
};

}  // namespace fw::model
