// SPDX-License-Identifier: Apache-2.0
// The runner against the plain network in fp64, and the laws of a session: prefill = token by token, cuts, documents,
// independence, threads.
#include <gtest/gtest.h>

#include <math.h>

#include <algorithm>

#include "model/golden.hpp"
#include "model/model.hpp"
#include "model/session.hpp"
#include "model_device.hpp"
#include "model_files.hpp"
#include "plain_network.hpp"
#include "refusals.hpp"
#include "temp_folder.hpp"

using namespace fw::model;
using model_files::Shape;
using model_files::Tensors;

namespace {

// fp32 logits of magnitude up to about 5 after some dozen layers of sums below a hundred terms; the format's own
// promise
constexpr double kTolerance = 1e-4;

struct ContextHolder {
  fw_context *context = nullptr;
  explicit ContextHolder(int32_t threads) {
    fw_context_options options = {};
    options.struct_size = sizeof options;
    options.n_threads = threads;
    EXPECT_EQ(fw_context_create(&options, &context), FW_OK);
  }
  ~ContextHolder() { fw_context_destroy(context); }
};

// A zero byte and `n - 1` bytes, with further zero bytes at `zeros`.
std::vector<uint8_t> tokens_of(size_t n, uint64_t seed, std::vector<size_t> zeros = {}) {
  model_files::Random random{seed};
  std::vector<uint8_t> out;
  for (size_t i = 0; i < n; ++i) out.push_back(static_cast<uint8_t>(1 + random.below(255)));
  out[0] = 0;
  for (const size_t at : zeros) out[at] = 0;
  return out;
}

std::vector<float> plain_logits(const Shape &shape, const Tensors &tensors, const std::vector<uint8_t> &tokens) {
  plain::Network network(shape, tensors);
  std::vector<float> out;
  for (const uint8_t token : tokens) {
    for (const double logit : network.read(token)) out.push_back(static_cast<float>(logit));
  }
  return out;
}

// Logits after every token when the tokens come in calls of the given length.
std::vector<float> in_calls(Session &session, std::span<const uint8_t> tokens, size_t length) {
  std::vector<float> out;
  session.reset();
  for (size_t at = 0; at < tokens.size(); at += length) {
    session.prefill(tokens.subspan(at, std::min(length, tokens.size() - at)),
                    [&](std::span<const float> rows) { out.insert(out.end(), rows.begin(), rows.end()); });
  }
  return out;
}

struct Case {
  const char *name;
  Shape shape;
  size_t pad;
};

std::vector<Case> cases() {
  std::vector<Case> out;
  out.push_back({"hybrid", Shape(), 0});
  Shape s;
  s.tie_embeddings = false;
  s.d_model = 33;
  s.conv_size = 1;
  s.n_heads = s.n_value_heads = 3;
  s.head_k_dim = 5;
  s.head_v_dim = 7;
  s.mlp_hidden = 21;
  s.rope_theta = 100;
  s.norm_eps = 1e-3;
  out.push_back({"odd_sizes_no_convolution", s, 1});  // the data starts at an odd address: no view into the file
  s = Shape();
  s.layers = {"gated_delta_rule", "gated_delta_rule"};
  s.conv_size = 2;
  s.head_k_dim = 16;
  out.push_back({"recurrent_only", s, 2});
  s = Shape();
  s.layers = {"full_attention", "sliding_attention"};
  s.window = 1;
  s.kv_heads = 4;
  s.max_context = 20;
  out.push_back({"attention_only", s, 3});
  return out;
}

struct Network : ::testing::TestWithParam<size_t> {
  TempFolder folder;
  Case c = cases()[GetParam()];
  Tensors tensors = model_files::random_tensors(c.shape, 21 + GetParam());
  std::shared_ptr<const Model> model;
  ContextHolder one{1}, two{2};

  void SetUp() override {
    model_files::write_model(folder.path, c.shape, tensors, c.pad);
    model = Model::load(folder.path.string(), test_device());
  }
};

}  // namespace

TEST_P(Network, AgreesWithThePlainNetwork) {
  const std::vector<uint8_t> tokens = tokens_of(330, 4, {7, 8, 90});
  const std::vector<float> expected = plain_logits(c.shape, tensors, tokens);
  double square = 0;
  for (const float logit : expected) square += logit * logit / static_cast<double>(expected.size());
  EXPECT_GT(square, 0.01);  // logits that say something
  Session session(model, one.context);
  EXPECT_LT(largest_difference(logits_of_prefill(session, tokens), expected), kTolerance);
  EXPECT_LT(largest_difference(logits_of_steps(session, tokens), expected), kTolerance);
}

TEST_P(Network, CutsAgreeAndAtPiecesBitForBit) {
  Session session(model, one.context);
  const size_t piece = static_cast<size_t>(session.piece_tokens());
  const std::vector<uint8_t> tokens = tokens_of(2 * piece + 39, 6);
  const std::vector<float> whole = in_calls(session, tokens, tokens.size());
  EXPECT_EQ(in_calls(session, tokens, tokens.size()), whole);
  EXPECT_EQ(in_calls(session, tokens, piece), whole);
  for (const size_t length : {size_t{1}, size_t{3}, size_t{60}, size_t{64}, size_t{128}, size_t{300}}) {
    EXPECT_LT(largest_difference(in_calls(session, tokens, length), whole), kTolerance) << length;
  }
}

TEST_P(Network, LastLogitsAreTheLastRow) {
  Session session(model, one.context), other(model, one.context);
  const std::vector<uint8_t> tokens = tokens_of(70, 6, {20});
  const std::vector<float> rows = logits_of_prefill(session, tokens);
  EXPECT_TRUE(std::equal(session.logits().begin(), session.logits().end(), rows.end() - 256));
  other.prefill(tokens);
  EXPECT_TRUE(std::equal(other.logits().begin(), other.logits().end(), rows.end() - 256));
  EXPECT_EQ(other.position(), 50);
}

TEST_P(Network, AZeroByteIsAFreshSession) {
  Session used(model, one.context), fresh(model, one.context);
  used.prefill(tokens_of(333, 8));
  const std::vector<uint8_t> tokens = tokens_of(100, 9);
  EXPECT_EQ(in_calls(fresh, tokens, tokens.size()), logits_of_prefill(used, tokens));
  used.prefill(tokens_of(77, 10));
  fresh.reset();
  for (const uint8_t token : tokens) {
    used.step(token);
    fresh.step(token);
    ASSERT_TRUE(std::equal(used.logits().begin(), used.logits().end(), fresh.logits().begin()));
  }
}

TEST_P(Network, ThreadsDoNotMatter) {
  Session a(model, one.context), b(model, two.context);
  const std::vector<uint8_t> tokens = tokens_of(300, 12);
  EXPECT_EQ(logits_of_prefill(a, tokens), logits_of_prefill(b, tokens));
  EXPECT_EQ(logits_of_steps(a, tokens), logits_of_steps(b, tokens));
}

TEST_P(Network, SessionsOfOneModelDoNotMeet) {
  Session alone(model, one.context), left(model, one.context), right(model, one.context);
  const std::vector<uint8_t> a = tokens_of(60, 13), b = tokens_of(60, 14);
  const std::vector<float> expected_a = logits_of_steps(alone, a), expected_b = logits_of_steps(alone, b);
  for (size_t i = 0; i < a.size(); ++i) {
    left.step(a[i]);
    right.step(b[i]);
    ASSERT_TRUE(
        std::equal(left.logits().begin(), left.logits().end(), expected_a.begin() + static_cast<ptrdiff_t>(256 * i)));
    ASSERT_TRUE(std::equal(right.logits().begin(), right.logits().end(),
                           expected_b.begin() + static_cast<ptrdiff_t>(256 * i)));
  }
}

TEST_P(Network, TheFutureIsNotSeen) {
  Session session(model, one.context);
  std::vector<uint8_t> tokens = tokens_of(300, 15);
  const std::vector<float> before = logits_of_prefill(session, tokens);
  for (size_t i = 200; i < tokens.size(); ++i) tokens[i] = static_cast<uint8_t>(1 + tokens[i] % 255);
  const std::vector<float> after = logits_of_prefill(session, tokens);
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + 200 * 256, after.begin()));
  EXPECT_FALSE(std::equal(before.begin() + 200 * 256, before.end(), after.begin() + 200 * 256));
}

// A state saved after r tokens past a piece, for every small r, continues as if nothing had happened.
TEST_P(Network, RestoreIsExact) {
  Session session(model, one.context), other(model, one.context);
  const size_t piece = static_cast<size_t>(session.piece_tokens());
  for (const size_t length :
       {size_t{1}, size_t{2}, size_t{3}, size_t{11}, size_t{47}, piece - 1, piece, piece + 1, piece + 7}) {
    session.reset();
    session.prefill(tokens_of(length, 16));
    const std::vector<uint8_t> saved = session.save();
    other.reset();
    other.prefill(tokens_of(91, 17));
    other.restore(saved);
    EXPECT_EQ(other.position(), static_cast<int64_t>(length));
    EXPECT_TRUE(std::equal(session.logits().begin(), session.logits().end(), other.logits().begin()));
    EXPECT_EQ(other.save(), saved);
    const std::vector<uint8_t> rest = tokens_of(60, 18);
    for (size_t i = 1; i < rest.size(); ++i) {
      session.step(rest[i]);
      other.step(rest[i]);
    }
    session.prefill(std::span(rest).subspan(1));
    other.prefill(std::span(rest).subspan(1));
    EXPECT_EQ(session.save(), other.save()) << length;
  }
}

TEST_P(Network, StateHasTheSizeThatIsTold) {
  Session session(model, one.context);
  session.prefill(tokens_of(400, 19));
  const StateBytes bytes = state_bytes(model->config());
  EXPECT_EQ(session.save().size(), 8 + 256 * 4 + bytes.recurrent + bytes.convolution + bytes.attention);
}

INSTANTIATE_TEST_SUITE_P(Shapes, Network, ::testing::Range(size_t{0}, cases().size()),
                         [](const auto &info) { return cases()[info.param].name; });

TEST(Model, CountsParametersAndHashesFiles) {
  TempFolder folder;
  const Shape shape;
  const Tensors tensors = model_files::random_tensors(shape, 1);
  model_files::write_model(folder.path, shape, tensors);
  const std::shared_ptr<const Model> model = Model::load(folder.path.string(), test_device());
  int64_t n = 0;
  for (const auto &[name, tensor] : tensors) n += static_cast<int64_t>(tensor.values.size());
  EXPECT_EQ(model->n_parameters(), n);
  const std::string bytes = model_files::safetensors_bytes(tensors);
  EXPECT_EQ(model->weights_digest(), sha256({reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size()}));
}

TEST(Model, MixedTypesInOneGroupAreWidened) {
  TempFolder folder;
  const Shape shape;
  Tensors tensors = model_files::random_tensors(shape, 2);
  tensors["layers.0.mixer.k_proj.weight"].is_bf16 = false;
  tensors["layers.1.mlp.up_proj.weight"].is_bf16 = false;
  tensors["embed.weight"].is_bf16 = false;
  tensors["layers.0.mixer.A_log"].is_bf16 = true;
  for (float &value : tensors["layers.0.mixer.A_log"].values) value = model_files::round_to_bf16(value);
  for (float &value : tensors["embed.weight"].values) value += 1e-4f;
  model_files::write_model(folder.path, shape, tensors);
  const ContextHolder context(1);
  Session session(Model::load(folder.path.string(), test_device()), context.context);
  const std::vector<uint8_t> tokens = tokens_of(60, 3);
  EXPECT_LT(largest_difference(logits_of_prefill(session, tokens), plain_logits(shape, tensors, tokens)), kTolerance);
}

TEST(Session, RefusesASavedStateThatDoesNotFit) {
  TempFolder folder;
  model_files::write_model(folder.path, Shape(), model_files::random_tensors(Shape(), 1));
  const ContextHolder context(1);
  Session session(Model::load(folder.path.string(), test_device()), context.context);
  EXPECT_EQ(refusal([&] { session.save(); }), "save: the session has read no token");
  EXPECT_EQ(refusal([&] { session.restore({}); }), "restore: the saved position is 0, allowed 1 to 2^53");
  session.prefill(tokens_of(5, 1));
  std::vector<uint8_t> saved = session.save();
  saved.pop_back();
  const std::string text = refusal([&] { session.restore(saved); });
  EXPECT_NE(text.find("for this model at position 5"), std::string::npos) << text;
  saved[7] = 0x80;
  EXPECT_NE(refusal([&] { session.restore(saved); }).find("the saved position is -"), std::string::npos);
}

// A checkpoint with three value heads a key head and weights that all differ.
TEST(FieldReports, Field064TwoKeyHeadsAndSixValueHeads) {
  TempFolder folder;
  Shape shape;
  shape.n_heads = 2, shape.n_value_heads = 6;
  const Tensors tensors = model_files::random_tensors(shape, 64);
  model_files::write_model(folder.path, shape, tensors);
  const std::shared_ptr<const Model> model = Model::load(folder.path.string(), test_device());
  ContextHolder two{2};
  Session session(model, two.context);
  const std::vector<uint8_t> tokens = tokens_of(100, 64);
  const std::vector<float> expected = plain_logits(shape, tensors, tokens);
  EXPECT_LT(largest_difference(logits_of_prefill(session, tokens), expected), kTolerance);
  EXPECT_LT(largest_difference(logits_of_steps(session, tokens), expected), kTolerance);
}

// 512 tokens chosen greedily by the plain network are those that the runner would choose; where its best two are
// closer than the tolerance either may be.
TEST(FieldReports, Field065LongGreedyGenerationIsTheReferences) {
  TempFolder folder;
  const Shape shape;
  const Tensors tensors = model_files::random_tensors(shape, 65);
  model_files::write_model(folder.path, shape, tensors);
  const std::shared_ptr<const Model> model = Model::load(folder.path.string(), test_device());
  ContextHolder one{1};
  Session session(model, one.context);
  plain::Network network(shape, tensors);
  uint8_t token = 0;
  int64_t n_equal = 0;
  for (int64_t t = 0; t < 512; ++t) {
    const auto expected = network.read(token);
    session.step(token);
    const std::span<const float> found = session.logits();
    const size_t theirs =
        static_cast<size_t>(std::max_element(expected.begin() + 1, expected.end()) - expected.begin());
    const size_t ours = static_cast<size_t>(std::max_element(found.begin() + 1, found.end()) - found.begin());
    n_equal += ours == theirs ? 1 : 0;
    EXPECT_LT(expected[theirs] - expected[ours], 2 * kTolerance) << "token " << t;
    token = static_cast<uint8_t>(theirs);  // 1 to 255: a zero byte would start a document
  }
  EXPECT_GE(n_equal, 510);
}
