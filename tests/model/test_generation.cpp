// SPDX-License-Identifier: Apache-2.0
// State files, scoring and golden logits: what the program builds on a session.
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <filesystem>

#include "model/golden.hpp"
#include "model/scorer.hpp"
#include "model/state_file.hpp"
#include "model_device.hpp"
#include "model_files.hpp"
#include "plain_network.hpp"
#include "refusals.hpp"
#include "temp_folder.hpp"

using namespace fw::model;
using model_files::Shape;

namespace {

struct Generation : ::testing::Test {
  TempFolder folder;
  Shape shape;
  model_files::Tensors tensors = model_files::random_tensors(Shape(), 31);
  fw_context *context = nullptr;
  std::shared_ptr<const Model> model;

  void SetUp() override {
    ASSERT_EQ(fw_context_create(nullptr, &context), FW_OK);
    model_files::write_model(folder.path / "m", shape, tensors);
    model = Model::load(folder / "m", test_device());
  }
  void TearDown() override { fw_context_destroy(context); }

  std::string file_text(const std::string &name) { return read_whole_file(folder / name, 1 << 24); }
};

std::vector<uint8_t> bytes(const std::string &s) { return {s.begin(), s.end()}; }

}  // namespace

TEST_F(Generation, AStateFileRestoresEverything) {
  Session session(model, context), other(model, context);
  session.prefill(bytes(std::string(1, '\0') + "a prompt of some length, longer than the window"));
  GenerationState state;
  state.settings.seed = 0xfedcba9876543210u;
  state.settings.temperature = 0.7;
  state.settings.top_p = 0.9;
  state.n_drawn = 12;
  state.pending = 101;
  save_state_file(folder / "s", session, state);
  const GenerationState loaded = load_state_file(folder / "s", other);
  EXPECT_EQ(loaded.settings.seed, state.settings.seed);
  EXPECT_EQ(loaded.settings.temperature, 0.7);
  EXPECT_EQ(loaded.settings.top_p, 0.9);
  EXPECT_EQ(loaded.n_drawn, 12u);
  EXPECT_EQ(loaded.pending, 101);
  EXPECT_EQ(other.save(), session.save());
  size_t n_files = 0;
  for (const auto &entry : std::filesystem::directory_iterator(folder.path)) n_files += entry.is_regular_file();
  EXPECT_EQ(n_files, 1u);  // nothing half written stays behind
}

TEST_F(Generation, AStateFileThatIsNotOursIsRefused) {
  Session session(model, context);
  session.prefill(bytes(std::string(1, '\0') + "text"));
  save_state_file(folder / "s", session, {});
  const std::string good = file_text("s"), name = "\"" + folder / "s" + "\"";
  const auto refused = [&](const std::string &changed) {
    model_files::write_file(folder.path / "s", changed);
    const std::string text = refusal([&] { load_state_file(folder / "s", session); });
    EXPECT_TRUE(is_one_sentence(text)) << text;
    return text;
  };
  EXPECT_EQ(refused(""), name + " is not a state file of fastweight");
  EXPECT_EQ(refused(good.substr(0, 95)), name + " is not a state file of fastweight");
  EXPECT_EQ(refused("X" + good.substr(1)), name + " is not a state file of fastweight");
  std::string changed = good;
  changed[8] = 2;
  EXPECT_EQ(refused(changed), name + " has version 2, allowed 1");
  EXPECT_NE(refused(good.substr(0, good.size() - 1)).find("(truncated?)"), std::string::npos);
  EXPECT_NE(refused(good + "x").find("(truncated?)"), std::string::npos);
  changed = good;
  changed[good.size() / 2] ^= 1;
  EXPECT_EQ(refused(changed), name + " is damaged: its checksum does not fit its contents");

  model_files::write_file(folder.path / "s", good);
  model_files::write_model(folder.path / "n", shape, model_files::random_tensors(shape, 32));
  Session foreign(Model::load(folder / "n", test_device()), context);
  EXPECT_NE(refusal([&] { load_state_file(folder / "s", foreign); }).find(" was saved with another model ("),
            std::string::npos);
  EXPECT_EQ(refusal([&] { load_state_file(folder / "absent", session); }),
            "cannot open \"" + folder / "absent" + "\": No such file or directory");
}

TEST_F(Generation, AStateFileIsWrittenWholeOrNotAtAll) {
  Session session(model, context);
  session.prefill(bytes(std::string(1, '\0') + "text"));
  EXPECT_EQ(refusal([&] { save_state_file(folder / "absent/s", session, {}); }),
            "cannot write \"" + folder / "absent/s" + "\": No such file or directory");
  EXPECT_EQ(refusal([&] { save_state_file(folder / "m", session, {}); }),
            "cannot write \"" + folder / "m" + "\": it exists and is not a regular file");
}

TEST_F(Generation, BitsAreThoseOfThePlainNetwork) {
  const std::string stream("One two three four.\0\0\0Five.\0six, unfinished", 43);
  plain::Network network(shape, tensors);
  double expected = 0;
  std::vector<double> logits = network.read(0);
  for (const char c : stream) {
    double sum = 0;
    for (const double logit : logits) sum += exp(logit);
    expected += (log(sum) - logits[static_cast<uint8_t>(c)]) / log(2.0);
    logits = network.read(static_cast<uint8_t>(c));
  }
  Session session(model, context);
  for (const size_t cut : {stream.size(), size_t{1}, size_t{7}}) {
    Scorer scorer(session);
    const std::vector<uint8_t> all = bytes(stream);
    for (size_t at = 0; at < all.size(); at += cut)
      scorer.add(std::span(all).subspan(at, std::min(cut, all.size() - at)));
    scorer.finish();
    EXPECT_NEAR(scorer.bits(), expected, 1e-3) << cut;
    EXPECT_EQ(scorer.n_bytes(), 43);
    EXPECT_EQ(scorer.n_zero_bytes(), 4);
  }
}

TEST_F(Generation, ScoringDoesNotDependOnCutsBitForBit) {
  Session session(model, context);
  std::vector<uint8_t> stream(3000);
  model_files::Random random{5};
  for (uint8_t &byte : stream) byte = static_cast<uint8_t>(random.below(256) % 200);
  double first = 0;
  for (const size_t cut : {size_t{3000}, size_t{1}, size_t{256}, size_t{999}}) {
    Scorer scorer(session);
    for (size_t at = 0; at < stream.size(); at += cut) {
      scorer.add(std::span(stream).subspan(at, std::min(cut, stream.size() - at)));
    }
    scorer.finish();
    if (first == 0) first = scorer.bits();
    EXPECT_EQ(scorer.bits(), first) << cut;
  }
  EXPECT_GT(first / 3000, 4);
}

TEST_F(Generation, AFileOfZerosCostsTheSameForEveryByte) {
  Session session(model, context);
  Scorer one(session), many(session);
  one.add(std::vector<uint8_t>(1));
  one.finish();
  many.add(std::vector<uint8_t>(100000));
  many.finish();
  EXPECT_NEAR(many.bits(), 100000 * one.bits(), 1e-6 * many.bits());
}

TEST_F(Generation, GoldenLogitsAreReadAndChecked) {
  EXPECT_FALSE(load_golden(*model).has_value());
  const auto write = [&](const std::string &dtype, std::vector<float> values) {
    values.resize(3 + 3 * 256);
    const std::string header = "{\"tokens\":{\"dtype\":\"" + dtype +
                               "\",\"shape\":[3],\"data_offsets\":[0,12]},"
                               "\"logits\":{\"dtype\":\"F32\",\"shape\":[3,256],\"data_offsets\":[12,3084]}}";
    const uint64_t length = header.size();
    std::string out(8, '\0');
    memcpy(out.data(), &length, 8);
    out += header + std::string(reinterpret_cast<const char *>(values.data()), values.size() * sizeof(float));
    model_files::write_file(folder.path / "m/golden_logits.safetensors", out);
  };
  write("F32", {0, 'a', 'b', 1.5f});
  const std::optional<Golden> golden = load_golden(*model);
  ASSERT_TRUE(golden.has_value());
  EXPECT_EQ(golden->tokens, (std::vector<uint8_t>{0, 'a', 'b'}));
  ASSERT_EQ(golden->logits.size(), 768u);
  EXPECT_EQ(golden->logits[0], 1.5f);
  const auto refused = [&] { return refusal([&] { load_golden(*model); }); };
  write("F32", {'x', 'a', 'b'});
  EXPECT_EQ(refused(), "golden_logits.safetensors: tokens[0] is not 0, which starts every document");
  write("F32", {0, 256, 'b'});
  EXPECT_EQ(refused(), "golden_logits.safetensors: tokens[1] is 256, allowed bytes");
  write("F32", {0, 1, 2.5f});
  EXPECT_EQ(refused(), "golden_logits.safetensors: tokens[2] is 2.5, allowed bytes");
  write("I32", {0, 'a', 'b'});
  EXPECT_EQ(refused(), "golden_logits.safetensors: tokens is I32 [3], allowed F32 of shape [T], T >= 1");
}
