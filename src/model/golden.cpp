// SPDX-License-Identifier: Apache-2.0
#include "model/golden.hpp"

#include <math.h>
#include <string.h>
#include <sys/stat.h>

#include <algorithm>

#include "model/error.hpp"
#include "model/safetensors.hpp"

namespace fw::model {
namespace {

constexpr const char *kName = "golden_logits.safetensors";

}  // namespace

std::optional<Golden> load_golden(const Model &model) {
  const std::string path = model.folder() + "/" + kName;
  struct stat facts;
  if (stat(path.c_str(), &facts) != 0) return std::nullopt;
  const MappedFile mapped(path);
  const Safetensors stored = Safetensors::parse(mapped.bytes(), kName);
  const StoredTensor *tokens = stored.find("tokens"), *logits = stored.find("logits");
  if (!tokens || !logits) FW_MODEL_FAIL("%s: expected the tensors \"tokens\" and \"logits\"", kName);
  if (tokens->dtype != "F32" || tokens->shape.size() != 1 || tokens->shape[0] < 1) {
    FW_MODEL_FAIL("%s: tokens is %s %s, allowed F32 of shape [T], T >= 1", kName, tokens->dtype.c_str(),
                  shape_text(tokens->shape).c_str());
  }
  const std::vector<int64_t> expected = {tokens->shape[0], model.config().vocab_size};
  if (logits->dtype != "F32" || logits->shape != expected) {
    FW_MODEL_FAIL("%s: logits is %s %s, allowed F32 %s", kName, logits->dtype.c_str(),
                  shape_text(logits->shape).c_str(), shape_text(expected).c_str());
  }
  Golden golden;
  for (int64_t t = 0; t < tokens->shape[0]; ++t) {
    float token;
    memcpy(&token, tokens->bytes.data() + sizeof token * static_cast<size_t>(t), sizeof token);
    if (!(token >= 0 && token <= 255 && token == floorf(token))) {
      FW_MODEL_FAIL("%s: tokens[%lld] is %g, allowed bytes", kName, static_cast<long long>(t), token);
    }
    golden.tokens.push_back(static_cast<uint8_t>(token));
  }
  if (golden.tokens[0] != 0) FW_MODEL_FAIL("%s: tokens[0] is not 0, which starts every document", kName);
  golden.logits.resize(logits->bytes.size() / sizeof(float));
  memcpy(golden.logits.data(), logits->bytes.data(), logits->bytes.size());
  return golden;
}

std::vector<float> logits_of_prefill(Session &session, std::span<const uint8_t> tokens) {
  std::vector<float> out;
  session.reset();
  session.prefill(tokens, [&](std::span<const float> rows) { out.insert(out.end(), rows.begin(), rows.end()); });
  return out;
}

std::vector<float> logits_of_steps(Session &session, std::span<const uint8_t> tokens) {
  std::vector<float> out;
  session.reset();
  for (const uint8_t token : tokens) {
    session.step(token);
    out.insert(out.end(), session.logits().begin(), session.logits().end());
  }
  return out;
}

double largest_difference(std::span<const float> a, std::span<const float> b) {
  double largest = a.size() == b.size() ? 0 : NAN;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = fabs(static_cast<double>(a[i]) - b[i]);
    if (!(difference <= largest)) largest = difference;  // a NaN sticks: no comparison with it holds
    if (largest != largest) break;
  }
  return largest;
}

}  // namespace fw::model
