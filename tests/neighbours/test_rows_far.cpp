// SPDX-License-Identifier: Apache-2.0
// Strides past 2^31 elements in every operation beside the recurrence: every row of every tensor of a small call lies
// 2^31 + 64 elements from the one before, in memory that is reserved and mostly never touched. The bits must be those
// of the dense call.
#include <sys/mman.h>

#include "neighbours/harness.hpp"

namespace fwtest {
namespace {

FWTEST_API(short_conv);
FWTEST_API(norm);
FWTEST_API(gate_activation);
FWTEST_API(feature_map);
FWTEST_API(linear);
FWTEST_API(attention);

constexpr int64_t kFar = (int64_t{1} << 31) + 64;
constexpr int64_t kRows = 3, kLength = 5;

// [kRows, kLength] of bf16, rows kFar elements apart.
class FarRows {
 public:
  FarRows() {
    memory_ = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  }
  ~FarRows() {
    if (is_there()) munmap(memory_, bytes());
  }
  FarRows(const FarRows &) = delete;
  FarRows &operator=(const FarRows &) = delete;
  bool is_there() const { return memory_ != MAP_FAILED; }
  // As `like`, a dense tensor of kRows rows in dimension row_dim.
  fw_tensor view(const fw_tensor &like, int32_t row_dim) const {
    fw_tensor t = like;
    t.data = memory_;
    t.strides[row_dim] = kFar;
    return t;
  }
  void read_from(const TestTensor &t) {
    for (int64_t i = 0; i < t.size(); ++i)
      fw::store_f64(memory_, FW_BF16, i / kLength * kFar + i % kLength, t.get(i));
  }
  void expect_equals(const TestTensor &t, const char *name) const {
    for (int64_t i = 0; i < t.size(); ++i) {
      EXPECT_EQ(fw::load_f64(memory_, FW_BF16, i / kLength * kFar + i % kLength), t.get(i))
          << name << " " << t.index_text(i);
    }
  }

 private:
  static constexpr size_t bytes() { return static_cast<size_t>(((kRows - 1) * kFar + kLength) * 2); }
  void *memory_;
};

class RowsFar : public ImplTest {
 protected:
  void SetUp() override {
    if (fw::test::is_on_cuda()) GTEST_SKIP() << "not run: the far rows are memory of the host";
    ImplTest::SetUp();
  }
};

// run(desc, grads) does a forward and a backward; fields are the four tensors of the shape of x
template <class Desc, class Grads>
void expect_far_equals_near(const std::vector<int64_t> &shape, int32_t row_dim,
                            const std::function<void(Desc &, Grads &)> &prepare,
                            const std::function<void(const Desc &, const Grads &)> &run) {
  TestTensor x(FW_BF16, shape), dy(FW_BF16, shape), y(FW_BF16, shape), dx(FW_BF16, shape);
  Rng rng(3);
  x.fill_normal(rng);
  dy.fill_normal(rng);
  Desc desc = {};
  Grads grads = {};
  desc.struct_size = sizeof desc;
  grads.struct_size = sizeof grads;
  desc.x = x.view(), desc.y = y.view(), grads.dy = dy.view(), grads.dx = dx.view();
  prepare(desc, grads);
  run(desc, grads);
  FarRows far_x, far_dy, far_y, far_dx;
  for (const FarRows *far : {&far_x, &far_dy, &far_y, &far_dx}) {
    if (!far->is_there()) GTEST_SKIP() << "not run: 8 GiB of address space could not be reserved";
  }
  far_x.read_from(x);
  far_dy.read_from(dy);
  desc.x = far_x.view(desc.x, row_dim), desc.y = far_y.view(desc.y, row_dim);
  grads.dy = far_dy.view(grads.dy, row_dim), grads.dx = far_dx.view(grads.dx, row_dim);
  run(desc, grads);
  far_y.expect_equals(y, "y");
  far_dx.expect_equals(dx, "dx");
}

template <class Api>
auto forward_and_backward(fw_context *context) {
  return [=](const typename Api::Desc &desc, const typename Api::Grads &grads) {
    EXPECT_EQ(run_forward<Api>(context, desc), FW_OK) << fw_last_error();
    EXPECT_EQ(run_backward<Api>(context, desc, grads), FW_OK) << fw_last_error();
  };
}

TEST_P(RowsFar, FeatureMap) {
  TestContext context(impl());
  expect_far_equals_near<fw_feature_map, fw_feature_map_grads>(
      {kRows, kLength}, 0, [](auto &desc, auto &) { desc.kind = FW_FEATURE_SILU; },
      forward_and_backward<feature_map_api>(context));
}

TEST_P(RowsFar, Norm) {
  TestContext context(impl());
  expect_far_equals_near<fw_norm, fw_norm_grads>(
      {kRows, kLength}, 0, [](auto &desc, auto &) { desc.kind = FW_NORM_RMS; },
      forward_and_backward<norm_api>(context));
}

TEST_P(RowsFar, GateActivation) {
  TestContext context(impl());
  expect_far_equals_near<fw_gate_activation, fw_gate_activation_grads>(
      {1, kRows, kLength}, 1, [](auto &desc, auto &) { desc.kind = FW_GATE_KIND_LOG_SIGMOID; },
      forward_and_backward<gate_activation_api>(context));
}

TEST_P(RowsFar, ShortConv) {
  TestContext context(impl());
  TestTensor weight(FW_F32, {kLength, 3});
  Rng rng(4);
  weight.fill_normal(rng);
  expect_far_equals_near<fw_short_conv, fw_short_conv_grads>(
      {1, kRows, kLength}, 1, [&](auto &desc, auto &) { desc.weight = weight.view(); },
      forward_and_backward<short_conv_api>(context));
}

TEST_P(RowsFar, Linear) {
  TestContext context(impl());
  TestTensor weight(FW_F32, {kLength, kLength});
  Rng rng(5);
  weight.fill_normal(rng);
  expect_far_equals_near<fw_linear, fw_linear_grads>(
      {kRows, kLength}, 0, [&](auto &desc, auto &) { desc.weight = weight.view(); },
      forward_and_backward<linear_api>(context));
}

TEST_P(RowsFar, Attention) {
  TestContext context(impl());
  const std::vector<int64_t> shape = {1, kRows, 1, kLength};
  const auto make = [&] { return TestTensor(FW_BF16, shape); };
  TestTensor q = make(), k = make(), v = make(), o = make(), d_o = make(), dq = make(), dk = make(), dv = make();
  Rng rng(6);
  for (TestTensor *t : {&q, &k, &v, &d_o}) t->fill_normal(rng);
  fw_attention desc = {};
  fw_attention_grads grads = {};
  desc.struct_size = sizeof desc, grads.struct_size = sizeof grads;
  desc.q = q.view(), desc.k = k.view(), desc.v = v.view(), desc.o = o.view();
  grads.d_o = d_o.view(), grads.dq = dq.view(), grads.dk = dk.view(), grads.dv = dv.view();
  const auto run = forward_and_backward<attention_api>(context);
  run(desc, grads);
  FarRows far[8];
  fw_tensor *const moved[] = {&desc.q, &desc.k, &desc.v, &grads.d_o, &desc.o, &grads.dq, &grads.dk, &grads.dv};
  const TestTensor *const from[] = {&q, &k, &v, &d_o, &o, &dq, &dk, &dv};
  for (int i = 0; i < 8; ++i) {
    if (!far[i].is_there()) GTEST_SKIP() << "not run: 8 GiB of address space could not be reserved";
    if (i < 4) far[i].read_from(*from[i]);
    *moved[i] = far[i].view(*moved[i], 1);
  }
  run(desc, grads);
  const char *const names[] = {"q", "k", "v", "d_o", "o", "dq", "dk", "dv"};
  for (int i = 4; i < 8; ++i) far[i].expect_equals(*from[i], names[i]);
}

FWTEST_EVERY_IMPL(RowsFar);

}  // namespace
}  // namespace fwtest
