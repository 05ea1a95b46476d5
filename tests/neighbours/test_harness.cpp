// SPDX-License-Identifier: Apache-2.0
// The harness can fail: each of its watches is shown something wrong once.
#include "neighbours/harness.hpp"

#include "alloc_count.hpp"

namespace fwtest {
namespace {

const Layout kLayouts[] = {Layout::kDense, Layout::kPadded, Layout::kSwapped, Layout::kReversed,
                           Layout::kInterleaved};

TEST(Harness, ViewsAddressTheirElements) {
  for (Layout layout : kLayouts) {
    TestTensor t(FW_BF16, {2, 3, 5}, layout);
    t.fill([](int64_t i) { return static_cast<double>(i); });
    EXPECT_TRUE(t.surroundings_intact()) << layout_name(layout);
    for (int64_t i = 0; i < t.size(); ++i) EXPECT_EQ(t.get(i), i);
    const fw_tensor v = t.view();
    EXPECT_EQ(fw::load_f64(v.data, v.dtype, v.strides[0] + 2 * v.strides[1] + 4 * v.strides[2]), 29);
    EXPECT_EQ(t.index_text(29), "[1,2,4]");
  }
}

TEST(Harness, SeesAWriteOutsideTheView) {
  for (Layout layout : {Layout::kDense, Layout::kPadded, Layout::kInterleaved}) {
    TestTensor t(FW_F32, {3, 4}, layout);
    const fw_tensor v = t.view();
    // dense: past the end; padded and interleaved: a gap
    static_cast<float *>(v.data)[layout == Layout::kDense ? 12 : layout == Layout::kPadded ? 4 : 1] = 0;
    EXPECT_FALSE(t.surroundings_intact()) << layout_name(layout);
  }
  TestTensor input(FW_F32, {4});
  const std::vector<uint8_t> before = input.memory();
  EXPECT_TRUE(input.is_same_memory(before));
  input.set(2, 1);
  EXPECT_FALSE(input.is_same_memory(before));
}

TEST(Harness, SeesAWorkspaceOverrun) {
  TestWorkspace workspace(100);
  EXPECT_TRUE(workspace.guard_intact());
  static_cast<uint8_t *>(workspace.data())[99] = 0;
  EXPECT_TRUE(workspace.guard_intact());
  static_cast<uint8_t *>(workspace.data())[100] = 0;
  EXPECT_FALSE(workspace.guard_intact());
}

TEST(Harness, CountsAllocations) {
  if (!is_counting()) GTEST_SKIP() << "not run: another allocator is in place";
  CountAllocations counted;
  int *volatile p = new int;
  delete p;
  EXPECT_EQ(counted.count(), 1);
}

}  // namespace
}  // namespace fwtest
