// SPDX-License-Identifier: Apache-2.0
// golden_logits.safetensors of a model folder: `tokens` [T] and `logits` [T, vocab_size], both F32, row t after token t,
// the first token 0; made by the training code in fp64 from the stored weights.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "model/session.hpp"

namespace fw::model {

struct Golden {
  std::vector<uint8_t> tokens;
  std::vector<float> logits;
};

std::optional<Golden> load_golden(const Model &model);  // nothing when the folder has no such file; throws Error

// Rows of logits after every token from a fresh session's state, in one prefill or token by token.
std::vector<float> logits_of_prefill(Session &session, std::span<const uint8_t> tokens);
std::vector<float> logits_of_steps(Session &session, std::span<const uint8_t> tokens);

double largest_difference(std::span<const float> a, std::span<const float> b);  // NaN when either holds one

}  // namespace fw::model
