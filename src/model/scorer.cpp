// SPDX-License-Identifier: Apache-2.0
#include "model/scorer.hpp"

#include <math.h>

#include "model/error.hpp"
#include "model/sampler.hpp"

namespace fw::model {

Scorer::Scorer(Session &session) : session_(session) {
  inputs_.reserve(static_cast<size_t>(session.piece_tokens()));
  targets_.reserve(static_cast<size_t>(session.piece_tokens()));
  inputs_.push_back(0);
}

void Scorer::add(std::span<const uint8_t> bytes) {
  for (const uint8_t byte : bytes) {
    targets_.push_back(byte);
    // a document's pieces start at multiples of the piece, and a zero byte starts a document
    if (byte == 0 || inputs_.size() == static_cast<size_t>(session_.piece_tokens())) flush();
    inputs_.push_back(byte);
  }
}

void Scorer::finish() {
  if (!targets_.empty()) flush();
}

void Scorer::flush() {
  const size_t vocab = static_cast<size_t>(session_.model().config().vocab_size);
  const bool is_empty_document = targets_.size() == 1 && inputs_[0] == 0 && targets_[0] == 0;
  if (is_empty_document && empty_document_) {
    bits_ += *empty_document_;  // a file of zeros would otherwise run the network at one token a piece
  } else {
    size_t i = 0;
    double bits = 0;
    // at the end of the stream the last byte is an input whose target never came
    session_.prefill({inputs_.data(), targets_.size()}, [&](std::span<const float> rows) {
      for (; !rows.empty(); rows = rows.subspan(vocab)) bits += bits_of(rows.first(vocab), targets_[i++]);
    });
    if (!isfinite(bits)) throw Error("the model gave a logit that is not a finite number");
    if (is_empty_document) empty_document_ = bits;
    bits_ += bits;
  }
  n_bytes_ += static_cast<int64_t>(targets_.size());
  if (targets_.back() == 0) ++n_zero_bytes_;
  inputs_.clear();
  targets_.clear();
}

}  // namespace fw::model
