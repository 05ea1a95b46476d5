// SPDX-License-Identifier: Apache-2.0
// What the verbs answer to a call on CUDA with memory of the host, with a device and without one.
#include <string.h>

#include "harness_pieces.hpp"

namespace fw::test {
namespace {

// Host memory is refused on CUDA: by every candidate where there is no device, by its address where there is one.
TEST(DeviceRefusals, HostMemoryOnCuda) {
  const Context free("");
  for (fw_direction direction : {FW_FORWARD, FW_STEP}) {
    Call call(spec_of(FW_OP_KDA), rounded_operands(spec_of(FW_OP_KDA), direction == FW_STEP), direction);
    call.desc.device = FW_DEVICE_CUDA;
    std::vector<unsigned char> workspace(1 << 20);
    const fw_status status = direction == FW_FORWARD
                                 ? fw_recurrence_forward(free.get(), &call.desc, workspace.data(), workspace.size())
                                 : fw_recurrence_step(free.get(), &call.desc, workspace.data(), workspace.size());
    const std::string error = fw_last_error();
    if (status == FW_INVALID_ARGUMENT) {
      EXPECT_NE(error.find("kda: q is memory of the host, expected memory of CUDA device"), std::string::npos) << error;
    } else {
      EXPECT_EQ(status, FW_UNSUPPORTED);
      EXPECT_NE(error.find("kda: no implementation accepts this call ("), std::string::npos) << error;
      EXPECT_NE(error.find("cuda_portable: "), std::string::npos) << error;
      EXPECT_NE(error.find("cpu_baseline_recurrent: device is cuda"), std::string::npos) << error;
    }
    for (const auto &[name, buffer] : call.outputs) EXPECT_TRUE(buffer->is_unchanged()) << name;
  }
}

// Where there is no device, import and export say so as the other verbs do.
TEST(DeviceRefusals, OpaqueStateOnCuda) {
  const Context free("");
  Call call(spec_of(FW_OP_KDA), rounded_operands(spec_of(FW_OP_KDA), true), FW_STEP);
  const fw_tensor plain = call.desc.state;
  call.desc.state_layout = FW_STATE_OPAQUE;
  int64_t elements = 0;
  ASSERT_EQ(fw_recurrence_opaque_size(free.get(), &call.desc, &elements), FW_OK) << fw_last_error();
  Buffer opaque({plain.shape[0], plain.shape[1], elements}, FW_F32, Strides::kDense);
  call.desc.state = opaque.tensor();
  call.desc.device = FW_DEVICE_CUDA;
  char devices[512];
  ASSERT_EQ(fw_cuda_devices(devices, sizeof devices, nullptr), FW_OK);
  const bool has_device = strncmp(devices, "none", 4) != 0;
  const fw_status expected = has_device ? FW_INVALID_ARGUMENT : FW_UNSUPPORTED;
  EXPECT_EQ(fw_recurrence_state_import(free.get(), &call.desc, &plain, FW_STATE_KV), expected) << fw_last_error();
  EXPECT_EQ(fw_recurrence_state_export(free.get(), &call.desc, &plain, FW_STATE_KV), expected) << fw_last_error();
  EXPECT_TRUE(opaque.is_unchanged());
  EXPECT_TRUE(call.outputs.at("state")->is_unchanged());
}

}  // namespace
}  // namespace fw::test
