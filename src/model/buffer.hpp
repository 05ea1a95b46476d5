// SPDX-License-Identifier: Apache-2.0
// A zero-filled block of a device's memory on a 64-byte boundary.
#pragma once
#include <stdint.h>

#include <utility>

#include "model/device.hpp"

namespace fw::model {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(uint64_t bytes, const Device &device = host_device())
      : device_(&device), data_(bytes > 0 ? device.allocate(bytes) : nullptr), bytes_(bytes) {}
  static Buffer floats(int64_t count, const Device &device = host_device()) {
    return Buffer(static_cast<uint64_t>(count) * sizeof(float), device);
  }
  Buffer(Buffer &&other) noexcept { *this = std::move(other); }
  Buffer &operator=(Buffer &&other) noexcept {
    std::swap(device_, other.device_);
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() {
    if (data_) device_->release(data_);
  }

  uint8_t *data() const { return static_cast<uint8_t *>(data_); }
  float *f32() const { return static_cast<float *>(data_); }
  uint64_t size() const { return bytes_; }
  void clear(void *stream = nullptr) const {
    if (data_) device_->clear(data_, bytes_, stream);
  }

 private:
  const Device *device_ = nullptr;
  void *data_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace fw::model
