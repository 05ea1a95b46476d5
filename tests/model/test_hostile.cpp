// SPDX-License-Identifier: Apache-2.0
// A whole model folder with small damages: every one is read or refused with one sentence, and nothing else happens.
#include <gtest/gtest.h>

#include "model/config.hpp"
#include "model/model.hpp"
#include "model/safetensors.hpp"
#include "model/session.hpp"
#include "model_files.hpp"
#include "refusals.hpp"
#include "temp_folder.hpp"

using namespace model_files;
using fw::model::Model;

namespace {

Shape tiny() {
  Shape s;
  s.d_model = 6;
  s.layers = {"gated_delta_rule", "full_attention"};
  s.n_heads = 1;
  s.n_value_heads = 2;
  s.head_k_dim = 3;
  s.head_v_dim = 4;
  s.attn_heads = s.kv_heads = 1;
  s.head_dim = 4;
  s.mlp_hidden = 5;
  return s;
}

struct Hostile : ::testing::Test {
  TempFolder folder;
  Shape shape = tiny();
  Tensors tensors = random_tensors(tiny(), 5);

  std::string load_refused() {
    return refusal([&] { Model::load(folder.path.string()); });
  }
  std::string refused_with(const Tensors &changed) {
    write_model(folder.path, shape, changed);
    return load_refused();
  }
};

}  // namespace

TEST_F(Hostile, AFolderThatIsNone) {
  EXPECT_EQ(refusal([&] { Model::load(folder / "absent"); }),
            "model \"" + folder / "absent" + "\" is not a folder with config.json and model.safetensors");
  EXPECT_EQ(load_refused(), "cannot open \"" + folder / "config.json" + "\": No such file or directory");
  write_file(folder.path / "config.json", config_text(shape));
  EXPECT_EQ(load_refused(), "cannot open \"" + folder / "model.safetensors" + "\": No such file or directory");
  write_file(folder.path / "config.json", std::string(2 << 20, ' '));
  EXPECT_EQ(load_refused(), "\"" + folder / "config.json" + "\" has 2097152 bytes, allowed at most 1048576");
}

TEST_F(Hostile, TensorsThatDoNotFitTheConfig) {
  EXPECT_EQ(refused_with(tensors), "");
  Tensors changed = tensors;
  changed.erase("layers.1.mixer.q_proj.weight");
  EXPECT_EQ(refused_with(changed),
            "model.safetensors: no tensor \"layers.1.mixer.q_proj.weight\", which config.json asks for");
  changed = tensors;
  changed["layers.2.mixer_norm.weight"] = tensors["norm.weight"];
  EXPECT_EQ(refused_with(changed),
            "model.safetensors: tensor \"layers.2.mixer_norm.weight\" belongs to no part of the network that "
            "config.json describes");
  changed = tensors;
  changed["lm_head.weight"] = tensors["embed.weight"];
  EXPECT_EQ(
      refused_with(changed),
      "model.safetensors: tensor \"lm_head.weight\" belongs to no part of the network that config.json describes");
  changed = tensors;
  changed["embed.weight"].shape = {6, 256};
  EXPECT_EQ(refused_with(changed),
            "model.safetensors: tensor \"embed.weight\" has shape [6, 256], but config.json asks for [256, 6]");
  changed = tensors;
  changed["layers.0.mixer.q_conv1d.weight"].shape = {3, 4};
  EXPECT_EQ(refused_with(changed),
            "model.safetensors: tensor \"layers.0.mixer.q_conv1d.weight\" has shape [3, 4], but config.json asks for "
            "[3, 1, 4]");
  shape.mlp_hidden = 7;
  EXPECT_EQ(refused_with(tensors),
            "model.safetensors: tensor \"layers.0.mlp.gate_proj.weight\" has shape [5, 6], but config.json asks for "
            "[7, 6]");
}

TEST_F(Hostile, ATypeThatIsNotAllowed) {
  write_model(folder.path, shape, tensors);
  std::string bytes = safetensors_bytes(tensors);
  const size_t name = bytes.find("\"norm.weight\"");
  bytes.replace(bytes.find("F32", name), 3, "I32");
  write_file(folder.path / "model.safetensors", bytes);
  EXPECT_EQ(load_refused(), "model.safetensors: tensor \"norm.weight\" has dtype I32, allowed BF16 and F32");
}

TEST_F(Hostile, EveryTruncationIsRefused) {
  write_model(folder.path, shape, tensors);
  const std::string bytes = safetensors_bytes(tensors);
  Random random{3};
  for (int i = 0; i < 300; ++i) {
    const size_t length = static_cast<size_t>(random.below(bytes.size()));
    const std::string text = refusal([&] {
      fw::model::Safetensors::parse({reinterpret_cast<const uint8_t *>(bytes.data()), length}, "f");
    });
    ASSERT_TRUE(is_one_sentence(text)) << length << ": " << text;
  }
  write_file(folder.path / "model.safetensors", bytes + "x");
  EXPECT_EQ(load_refused(), "model.safetensors: 1 bytes after the last tensor belong to no tensor");
}

// Bytes of the header and of config.json flipped, copied, removed and replaced by what parsers like least. What is
// still accepted must also run: a few tokens through a session.
TEST_F(Hostile, SmallMutations) {
  const std::string config = config_text(shape), stored = safetensors_bytes(tensors);
  uint64_t header = 0;
  memcpy(&header, stored.data(), 8);
  const std::vector<std::string> tokens = {"0",
                                           "-1",
                                           "1e30",
                                           "18446744073709551615",
                                           "9223372036854775807",
                                           "null",
                                           "[]",
                                           "{}",
                                           "\"\"",
                                           ",",
                                           ":",
                                           "\"dtype\"",
                                           "256",
                                           "\\u0000",
                                           "\xff",
                                           "4294967296",
                                           "BF16",
                                           "F32",
                                           "}"};
  Random random{11};
  fw_context *context = nullptr;
  ASSERT_EQ(fw_context_create(nullptr, &context), FW_OK);
  int n_accepted = 0, n_refused = 0;
  for (int i = 0; i < 5000; ++i) {
    std::string c = config, s = stored;
    const bool in_config = random.below(3) == 0;
    std::string &target = in_config ? c : s;
    const uint64_t n_changes = 1 + random.below(3);
    for (uint64_t change = 0; change < n_changes; ++change) {
      const size_t limit =
          in_config ? target.size() : std::min<size_t>(target.size(), 8 + static_cast<size_t>(header));
      const size_t at = static_cast<size_t>(random.below(limit));
      switch (random.below(6)) {
        case 0: target[at] = static_cast<char>(target[at] ^ static_cast<char>(1 << random.below(8))); break;
        case 1: target.erase(at, static_cast<size_t>(1 + random.below(20))); break;
        case 2:
          target.insert(
              at, target.substr(static_cast<size_t>(random.below(limit)), static_cast<size_t>(random.below(60))));
          break;
        case 3: target.insert(at, tokens[static_cast<size_t>(random.below(tokens.size()))]); break;
        case 4: {  // one digit for another: the text stays JSON
          const size_t digit = target.find_first_of("0123456789", at);
          if (digit < limit) target[digit] = static_cast<char>('0' + random.below(10));
          break;
        }
        default: {
          const std::string &token = tokens[static_cast<size_t>(random.below(tokens.size()))];
          target.replace(at, std::min(token.size(), target.size() - at), token);
        }
      }
    }
    // a header's own length stays right in half of the cases, so that mutations reach past it
    if (!in_config && random.below(2) == 0 && s.size() > 8 + (stored.size() - 8 - header)) {
      const uint64_t length = s.size() - 8 - (stored.size() - 8 - header);
      memcpy(s.data(), &length, 8);
    }
    const std::string text = refusal([&] {
      const std::shared_ptr<const Model> model =
          Model::from_memory(c, {reinterpret_cast<const uint8_t *>(s.data()), s.size()});
      if (model->config().max_context > 1 << 16 || model->config().attention.window > 1 << 16) return;
      fw::model::Session session(model, context);
      const std::vector<uint8_t> input = {0, 'a', 'b'};
      session.prefill(input);
      session.step('c');
    });
    if (text.empty()) {
      ++n_accepted;
    } else {
      ++n_refused;
      ASSERT_TRUE(is_one_sentence(text)) << i << ": " << text;
    }
  }
  fw_context_destroy(context);
  EXPECT_GT(n_accepted, 20);
  EXPECT_GT(n_refused, 3000);
}
