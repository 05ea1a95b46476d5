// SPDX-License-Identifier: Apache-2.0
// What a device gives to the runner, by FW_TEST_DEVICE the CPU or CUDA: memory, copies, the loops between the operators, and
// steps that are kept and run again. Short enough for the emulated device.
#include <gtest/gtest.h>

#include <math.h>
#include <string.h>

#include "model/buffer.hpp"
#include "model/golden.hpp"
#include "model_device.hpp"
#include "model_files.hpp"
#include "plain_network.hpp"
#include "refusals.hpp"
#include "temp_folder.hpp"

using namespace fw::model;

namespace {

constexpr float kUntouched = 12345.0f;

// Host rows on the device with a guard before and after them.
struct Rows {
  static constexpr size_t kGuard = 64;
  const Device &device = test_device();
  std::vector<float> host;
  Buffer there;

  explicit Rows(const std::vector<float> &values) : host(values.size() + 2 * kGuard, kUntouched) {
    std::copy(values.begin(), values.end(), host.begin() + kGuard);
    there = Buffer::floats(static_cast<int64_t>(host.size()), device);
    device.write(there.data(), host.data(), there.size(), nullptr);
  }
  float *f32() const { return there.f32() + kGuard; }
  // What lies there after the work on `stream`.
  std::vector<float> values(void *stream) {
    device.read(host.data(), there.data(), there.size(), stream);
    for (size_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(host[i], kUntouched) << i;
      EXPECT_EQ(host[host.size() - 1 - i], kUntouched) << i;
    }
    return {host.begin() + kGuard, host.end() - kGuard};
  }
};

std::vector<float> numbers(size_t n, uint64_t seed) {
  model_files::Random random{seed};
  std::vector<float> out;
  for (size_t i = 0; i < n; ++i) out.push_back(static_cast<float>(random.normal()));
  return out;
}

struct Loops : ::testing::Test {
  const Device &device = test_device();
  Handle stream = device.open_stream();
};

}  // namespace

TEST_F(Loops, MemoryIsClearAndCopiesComeBack) {
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{63}, uint64_t{100000}}) {
    const Buffer buffer(bytes, device);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % 64, 0u);
    const std::vector<uint8_t> zeros(bytes, 0);
    std::vector<uint8_t> sent(bytes), found(bytes, 0xff);
    device.read(found.data(), buffer.data(), bytes, stream.get());
    EXPECT_EQ(found, zeros);
    for (size_t i = 0; i < sent.size(); ++i) sent[i] = static_cast<uint8_t>(7 * i + 1);
    device.write(buffer.data(), sent.data(), bytes, stream.get());
    device.read(found.data(), buffer.data(), bytes, stream.get());
    EXPECT_EQ(found, sent);
    buffer.clear(stream.get());
    device.read(found.data(), buffer.data(), bytes, stream.get());
    EXPECT_EQ(found, zeros);
  }
  EXPECT_EQ(Buffer(0, device).data(), nullptr);
  EXPECT_THROW(Buffer(uint64_t{1} << 62, device), std::bad_alloc);
}

TEST_F(Loops, EmbedTakesTheRowsOfTheTokens) {
  for (const int64_t columns : {int64_t{1}, int64_t{37}}) {
    for (const bool is_bf16 : {false, true}) {
      for (const int64_t rows : {int64_t{1}, kPieceTokens}) {
        std::vector<float> table = numbers(static_cast<size_t>(256 * columns), 5);
        std::vector<uint16_t> halves;
        for (float &value : table) {
          if (!is_bf16) continue;
          value = model_files::round_to_bf16(value);
          uint32_t bits;
          memcpy(&bits, &value, sizeof bits);
          halves.push_back(static_cast<uint16_t>(bits >> 16));
        }
        const Buffer stored(is_bf16 ? halves.size() * 2 : table.size() * 4, device), input(sizeof(Input), device);
        device.write(stored.data(), is_bf16 ? static_cast<const void *>(halves.data()) : table.data(), stored.size(), nullptr);
        Input sent = {9, {}};
        std::vector<float> expected;
        for (int64_t row = 0; row < rows; ++row) {
          sent.tokens[row] = static_cast<uint8_t>(255 - 31 * row);
          const auto from = table.begin() + sent.tokens[row] * columns;
          expected.insert(expected.end(), from, from + columns);
        }
        Input *there = reinterpret_cast<Input *>(input.data());
        device.set_input(there, sent, stream.get());
        sent = {};  // may change at once
        Rows x(std::vector<float>(expected.size(), NAN));
        device.embed({stored.data(), is_bf16, columns, there, x.f32()}, rows, columns, stream.get());
        EXPECT_EQ(x.values(stream.get()), expected);
        int64_t position = 0;
        device.read(&position, &there->position, sizeof position, stream.get());
        EXPECT_EQ(position, 9);
      }
    }
  }
}

TEST_F(Loops, AddAndMultiplyAreElementByElement) {
  const std::vector<float> x = numbers(3 * 211, 6), y = numbers(3 * 222, 7);
  Rows sum(x), product(x), right(y);
  device.add({sum.f32(), right.f32(), 211}, 3, 211, stream.get());
  device.multiply({product.f32(), right.f32() + 5, 211, 222}, 3, 211, stream.get());
  std::vector<float> sums, products;
  for (size_t i = 0; i < x.size(); ++i) {
    sums.push_back(x[i] + y[i]);
    products.push_back(x[i] * y[5 + i / 211 * 222 + i % 211]);
  }
  EXPECT_EQ(sum.values(stream.get()), sums);
  EXPECT_EQ(product.values(stream.get()), products);
  EXPECT_EQ(right.values(stream.get()), y);
  device.add({sum.f32(), right.f32(), 211}, 0, 211, stream.get());
  EXPECT_EQ(sum.values(stream.get()), sums);
}

// Steps after an even and an odd number of pieces, more of each than it takes to keep one, into a second document, with a
// state put aside between them.
TEST(Device, PiecesAndKeptStepsAgreeWithThePlainNetwork) {
  TempFolder folder;
  const model_files::Shape shape;
  const model_files::Tensors tensors = model_files::random_tensors(shape, 41);
  model_files::write_model(folder.path, shape, tensors);
  const std::shared_ptr<const Model> model = Model::load(folder.path.string(), test_device());
  EXPECT_EQ(&model->device(), &test_device());
  EXPECT_EQ(model->digest(), Model::load(folder.path.string())->digest());
  fw_context *context = nullptr;
  ASSERT_EQ(fw_context_create(nullptr, &context), FW_OK);
  {
    Session session(model, context), other(model, context);
    plain::Network network(shape, tensors);
    std::vector<float> found, expected;
    const auto expect = [&](const std::vector<uint8_t> &tokens) {
      for (const uint8_t token : tokens) {
        for (const double logit : network.read(token)) expected.push_back(static_cast<float>(logit));
      }
    };
    const auto prefill = [&](const std::vector<uint8_t> &tokens) {
      expect(tokens);
      session.prefill(tokens, [&](std::span<const float> rows) { found.insert(found.end(), rows.begin(), rows.end()); });
    };
    const auto step = [&](const std::vector<uint8_t> &tokens) {
      expect(tokens);
      for (const uint8_t token : tokens) {
        session.step(token);
        found.insert(found.end(), session.logits().begin(), session.logits().end());
      }
    };
    prefill({0, 10, 200, 30, 40, 50, 60});
    step({70, 80, 90, 100});
    prefill({1, 2, 3});
    step({4, 5, 6, 7, 0, 8});
    other.restore(session.save());
    EXPECT_EQ(other.save(), session.save());
    step({9, 10});
    for (const uint8_t token : {9, 10}) other.step(static_cast<uint8_t>(token));
    EXPECT_EQ(other.save(), session.save());
    EXPECT_LT(largest_difference(found, expected), 1e-4);  // as in test_network.cpp
  }
  fw_context_destroy(context);
}

// A device that does not keep steps, and one whose additions fail when they are told to.
int additions_left = 0;
void add_or_fail(const Add &loop, int64_t rows, int64_t columns, void *stream) {
  if (additions_left-- == 0) throw Error("no more additions");
  test_device().add(loop, rows, columns, stream);
}
int writes_left = 0, clears_left = 0;
void write_or_fail(void *to, const void *host, uint64_t bytes, void *stream) {
  if (writes_left-- == 0) throw Error("no more writes");
  test_device().write(to, host, bytes, stream);
}
void clear_or_fail(void *to, uint64_t bytes, void *stream) {
  if (clears_left-- == 0) throw Error("no more clears");
  test_device().clear(to, bytes, stream);
}
Handle fail_to_record(const std::function<void()> &, void *) { throw Error("no recording"); }

TEST(Device, AFailureInsideAStepOrAPieceIsNotReadOver) {
  TempFolder folder;
  const model_files::Shape shape;
  model_files::write_model(folder.path, shape, model_files::random_tensors(shape, 41));
  Device device = test_device();
  device.add = add_or_fail;
  device.record = fail_to_record;
  device.write = write_or_fail;
  device.clear = clear_or_fail;
  writes_left = clears_left = 1 << 30;
  const std::shared_ptr<const Model> model = Model::load(folder.path.string(), device);
  const std::shared_ptr<const Model> whole = Model::load(folder.path.string(), test_device());
  const std::string torn = "the session failed half way before: reset or restore it first";
  fw_context *context = nullptr;
  ASSERT_EQ(fw_context_create(nullptr, &context), FW_OK);
  {
    Session session(model, context), other(whole, context);
    const std::vector<uint8_t> first = {0, 10, 200, 30}, second = {5, 6};
    additions_left = 1 << 30;
    session.prefill(first);
    other.prefill(first);
    const std::vector<uint8_t> saved = session.save();
    for (const uint8_t token : {1, 2, 3}) {  // the second would be kept, the third run from what was kept
      session.step(token);
      other.step(token);
    }
    EXPECT_EQ(session.save(), other.save());
    EXPECT_EQ(session.why_not_kept(), "no recording");
    EXPECT_EQ(other.why_not_kept(), "");
    writes_left = 1;
    EXPECT_EQ(refusal([&] { session.restore(saved); }), "no more writes");
    writes_left = 1 << 30;
    EXPECT_EQ(refusal([&] { session.step(7); }), torn);
    clears_left = 1;
    EXPECT_EQ(refusal([&] { session.prefill(first); }), "no more clears");
    clears_left = 1 << 30;
    EXPECT_EQ(refusal([&] { session.prefill(second); }), torn);
    for (int fails_at = 0; fails_at < 3; ++fails_at) {
      session.restore(saved);
      additions_left = fails_at;
      EXPECT_EQ(refusal([&] { fails_at == 1 ? session.step(7) : session.prefill(second); }), "no more additions");
      EXPECT_FALSE(session.has_logits());
      additions_left = 1 << 30;
      EXPECT_EQ(refusal([&] { session.step(7); }), torn);
      EXPECT_EQ(refusal([&] { session.prefill(second); }), torn);
      EXPECT_EQ(refusal([&] { session.save(); }), "save: the session has read no token");
    }
    session.prefill(first);  // its zero byte starts anew
    EXPECT_EQ(session.save(), saved);
    // the sink's own failure comes between pieces: what was read stays read
    session.restore(saved);
    EXPECT_EQ(refusal([&] { session.prefill(second, [](std::span<const float>) { throw Error("full"); }); }), "full");
    EXPECT_EQ(session.position(), 6);
    session.step(7);
    other.restore(saved);
    other.prefill(second);
    other.step(7);
    EXPECT_EQ(session.save(), other.save());
  }
  fw_context_destroy(context);
}

TEST(Device, NamesThatAreNoneAndDevicesThatAreNotThereAreRefused) {
  EXPECT_EQ(refusal([] { device_named("tpu"); }), "device is \"tpu\", allowed cpu and cuda");
  EXPECT_EQ(&device_named("cpu"), &host_device());
  const std::string found = cuda_devices();
  if (found.rfind("none", 0) == 0) {
    EXPECT_EQ(refusal([] { device_named("cuda"); }), "device is cuda, but there is " + found);
  } else {
    EXPECT_EQ(device_named("cuda").kind, FW_DEVICE_CUDA);
  }
}
