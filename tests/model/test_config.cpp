// SPDX-License-Identifier: Apache-2.0
// config.json: the example of the document is read, and every field that is missing, wrong or unknown is named.
#include <gtest/gtest.h>

#include "model/config.hpp"
#include "model_files.hpp"
#include "refusals.hpp"

using fw::model::Config;
using fw::model::LayerKind;
using fw::model::parse_config;

namespace {

const char *const kExample = R"({
  "format": "fastweight-lm",
  "version": 1,
  "vocab_size": 256,
  "d_model": 320,
  "layers": ["gated_delta_rule", "gated_delta_rule", "sliding_attention", "full_attention"],
  "gated_delta_rule": {"n_heads": 5, "n_value_heads": 10, "head_k_dim": 64, "head_v_dim": 48, "conv_size": 4},
  "attention": {"n_heads": 6, "n_kv_heads": 3, "head_dim": 32, "rope_theta": 10000.0, "window": 256},
  "mlp_hidden": 896,
  "norm_eps": 1e-6,
  "max_context": 2048,
  "tie_embeddings": true
})";

// The example with one text replaced by another, parsed.
std::string refused(const std::string &from, const std::string &to) {
  std::string text = kExample;
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  text.replace(at, from.size(), to);
  const std::string sentence = refusal([&] { parse_config(text, "c"); });
  EXPECT_TRUE(sentence.empty() || is_one_sentence(sentence)) << sentence;
  return sentence;
}

}  // namespace

TEST(Config, ReadsTheExample) {
  const Config c = parse_config(kExample, "c");
  EXPECT_EQ(c.d_model, 320);
  ASSERT_EQ(c.layers.size(), 4u);
  EXPECT_EQ(c.layers[2], LayerKind::kSlidingAttention);
  EXPECT_EQ(c.delta.conv_dim(), 2 * 5 * 64 + 10 * 48);
  EXPECT_EQ(c.delta.in_dim(), 2 * 5 * 64 + 2 * 10 * 48 + 2 * 10);
  EXPECT_EQ(c.attention.in_dim(), 6 * 32 + 2 * 3 * 32);
  EXPECT_EQ(c.capacity(LayerKind::kSlidingAttention), 256);
  EXPECT_EQ(c.capacity(LayerKind::kFullAttention), 2048);
  EXPECT_EQ(c.attention.rope_theta, 10000.0);
  EXPECT_EQ(c.norm_eps, 1e-6);
  EXPECT_TRUE(c.tie_embeddings);
}

TEST(Config, ReadsWhatTheTestsWrite) {
  const Config c = parse_config(model_files::config_text(model_files::Shape::large()), "c");
  EXPECT_EQ(c.layers.size(), 10u);
  EXPECT_EQ(c.mlp_hidden, 832);
}

TEST(Config, ASectionThatNoLayerUsesMayBeAbsent) {
  EXPECT_EQ(refused("\"attention\":", "\"no_attention\":"), "c: no field \"attention\"");
  std::string text = kExample;
  text.replace(text.find(", \"sliding_attention\", \"full_attention\""), 39, "");
  text.erase(text.find("  \"attention\""), text.find("  \"mlp_hidden\"") - text.find("  \"attention\""));
  EXPECT_EQ(parse_config(text, "c").attention.n_heads, 0);
}

TEST(Config, NamesTheFieldTheFoundAndTheAllowed) {
  EXPECT_EQ(refused("fastweight-lm", "gguf"), "c: format is \"gguf\", allowed \"fastweight-lm\"");
  EXPECT_EQ(refused("\"version\": 1", "\"version\": 2"), "c: version is 2, allowed whole numbers from 1 to 1");
  EXPECT_EQ(refused("\"vocab_size\": 256", "\"vocab_size\": 50257"),
            "c: vocab_size is 50257, allowed whole numbers from 256 to 256");
  EXPECT_EQ(refused("\"d_model\": 320", "\"d_model\": 0"), "c: d_model is 0, allowed whole numbers from 1 to 65536");
  EXPECT_EQ(refused("\"d_model\": 320", "\"d_model\": -3"),
            "c: d_model is -3, allowed whole numbers from 1 to 65536");
  EXPECT_EQ(refused("\"d_model\": 320", "\"d_model\": 320.0"),
            "c: d_model is 320.0, allowed whole numbers from 1 to 65536");
  EXPECT_EQ(refused("\"d_model\": 320", "\"d_model\": \"320\""),
            "c: d_model is \"320\", allowed whole numbers from 1 to 65536");
  EXPECT_EQ(refused("\"d_model\": 320", "\"d_model\": 99999999999999999999"),
            "c: d_model is 1e+20, allowed whole numbers from 1 to 65536");
  EXPECT_EQ(refused("\"d_model\": 320,", ""), "c: no field \"d_model\"");
  EXPECT_EQ(refused("\"d_model\": 320", "\"d_model\": 320, \"d_model\": 8"), "c: the name \"d_model\" occurs twice");
  EXPECT_EQ(refused("\"d_model\": 320", "\"d_model\": 320, \"dropout\": 0"), "c: unknown field \"dropout\"");
  EXPECT_EQ(refused("[\"gated_delta_rule\", \"gated_delta_rule\", \"sliding_attention\", \"full_attention\"]", "[]"),
            "c: layers is a list of 0, allowed a list of 1 to 1024 names");
  EXPECT_EQ(refused("[\"gated_delta_rule\", \"gated_delta_rule\", \"sliding_attention\", \"full_attention\"]", "7"),
            "c: layers is 7, allowed a list of 1 to 1024 names");
  EXPECT_EQ(refused("\"sliding_attention\"", "\"mamba\""),
            "c: layers[2] is \"mamba\", allowed \"gated_delta_rule\", \"sliding_attention\" and \"full_attention\"");
  EXPECT_EQ(refused("\"conv_size\": 4", "\"conv_size\": 65"),
            "c: gated_delta_rule: conv_size is 65, allowed whole numbers from 1 to 64");
  EXPECT_EQ(refused("\"n_value_heads\": 10", "\"n_value_heads\": 7"),
            "c: gated_delta_rule: n_value_heads is 7, allowed multiples of n_heads, which is 5");
  EXPECT_EQ(refused("\"head_k_dim\": 64", "\"head_k_dim\": 513"),
            "c: gated_delta_rule: head_k_dim is 513, allowed whole numbers from 1 to 512");
  EXPECT_EQ(refused("\"conv_size\": 4", "\"conv_size\": 4, \"bias\": true"),
            "c: gated_delta_rule: unknown field \"bias\"");
  EXPECT_EQ(refused("\"n_kv_heads\": 3", "\"n_kv_heads\": 4"),
            "c: attention: n_heads is 6, allowed multiples of n_kv_heads, which is 4");
  EXPECT_EQ(refused("\"head_dim\": 32", "\"head_dim\": 31"), "c: attention: head_dim is 31, allowed even numbers");
  EXPECT_EQ(refused("\"rope_theta\": 10000.0", "\"rope_theta\": 0"),
            "c: attention: rope_theta is 0, allowed numbers from 1 to 1e+12");
  EXPECT_EQ(refused("\"window\": 256", "\"window\": 0"),
            "c: attention: window is 0, allowed whole numbers from 1 to 16777216");
  EXPECT_EQ(refused("\"norm_eps\": 1e-6", "\"norm_eps\": null"),
            "c: norm_eps is null, allowed numbers from 1e-12 to 1");
  EXPECT_EQ(refused("\"norm_eps\": 1e-6", "\"norm_eps\": 0"), "c: norm_eps is 0, allowed numbers from 1e-12 to 1");
  EXPECT_EQ(refused("\"max_context\": 2048", "\"max_context\": true"),
            "c: max_context is true, allowed whole numbers from 1 to 16777216");
  EXPECT_EQ(refused("\"tie_embeddings\": true", "\"tie_embeddings\": 1"),
            "c: tie_embeddings is 1, allowed true and false");
  EXPECT_EQ(refused("\"attention\": {", "\"attention\": [], \"x\": {"), "c: attention is a list, expected an object");
  EXPECT_EQ(refused("{", "["), "c: not valid JSON at byte 13 of 482");
}
