// SPDX-License-Identifier: Apache-2.0
// Bits that a model needs for a stream of documents, each ended by a zero byte. Every byte counts, the zero bytes
// too; the first document starts as if a zero byte stood before the stream. Memory does not grow with the stream, and
// the result does not depend on how the stream is cut into calls of `add`.
#pragma once
#include <optional>
#include <span>
#include <vector>

#include "model/session.hpp"

namespace fw::model {

class Scorer {
 public:
  explicit Scorer(Session &session);

  void add(std::span<const uint8_t> bytes);  // throws Error when a logit is not finite
  void finish();                             // after the last byte

  double bits() const { return bits_; }
  int64_t n_bytes() const { return n_bytes_; }  // scored so far, up to a piece behind what was added
  int64_t n_zero_bytes() const { return n_zero_bytes_; }

 private:
  void flush();

  Session &session_;
  std::vector<uint8_t> inputs_, targets_;  // the piece being gathered: targets_[i] follows inputs_[i]
  std::optional<double> empty_document_;   // bits of a zero byte right after a zero byte
  double bits_ = 0;
  int64_t n_bytes_ = 0, n_zero_bytes_ = 0;
};

}  // namespace fw::model
