// SPDX-License-Identifier: Apache-2.0
// config.json of docs/model_format.md: every field is required, checked and known; nothing is guessed.
#pragma once
#include <stdint.h>

#include <string>
#include <string_view>
#include <vector>

namespace fw::model {

enum class LayerKind { kGatedDeltaRule, kSlidingAttention, kFullAttention };

struct DeltaShape {
  int64_t n_heads = 0, n_value_heads = 0, head_k_dim = 0, head_v_dim = 0, conv_size = 0;

  int64_t qk_dim() const { return n_heads * head_k_dim; }
  int64_t v_dim() const { return n_value_heads * head_v_dim; }
  int64_t conv_dim() const { return 2 * qk_dim() + v_dim(); }                  // q, k, v
  int64_t in_dim() const { return conv_dim() + v_dim() + 2 * n_value_heads; }  // q, k, v, g, a, b
};

struct AttentionShape {
  int64_t n_heads = 0, n_kv_heads = 0, head_dim = 0, window = 0;
  double rope_theta = 0;

  int64_t q_dim() const { return n_heads * head_dim; }
  int64_t kv_dim() const { return n_kv_heads * head_dim; }
  int64_t in_dim() const { return q_dim() + 2 * kv_dim(); }
};

struct Config {
  int64_t vocab_size = 0, d_model = 0, mlp_hidden = 0, max_context = 0;
  std::vector<LayerKind> layers;
  DeltaShape delta;          // zeros when no layer uses it
  AttentionShape attention;  // zeros when no layer uses it
  double norm_eps = 0;
  bool tie_embeddings = false;

  bool has(LayerKind kind) const;
  // Tokens that a layer's cache keeps.
  int64_t capacity(LayerKind kind) const {
    return kind == LayerKind::kSlidingAttention ? attention.window : max_context;
  }
};

const char *layer_name(LayerKind kind);  // as in config.json

// file: how sentences call the text. Throws Error.
Config parse_config(std::string_view text, const std::string &file);

}  // namespace fw::model
