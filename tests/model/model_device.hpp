// SPDX-License-Identifier: Apache-2.0
// The switch of the tests: with FW_TEST_DEVICE=cuda models and their sessions lie on the CUDA device.
#pragma once
#include <stdlib.h>

#include "model/device.hpp"

inline const fw::model::Device &test_device() {
  const char *name = getenv("FW_TEST_DEVICE");
  return fw::model::device_named(name && *name ? name : "cpu");
}
