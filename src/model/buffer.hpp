// SPDX-License-Identifier: Apache-2.0
// A zero-filled block of memory on a 64-byte boundary. Pages that nobody touches stay unbacked, so that an attention
// ring costs what has been written into it.
#pragma once
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <new>
#include <utility>

namespace fw::model {

class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(uint64_t bytes) : bytes_(bytes) {
    if (bytes == 0) return;
    if (bytes > SIZE_MAX - kAlign) throw std::bad_alloc();
    block_ = calloc(1, static_cast<size_t>(bytes) + kAlign);
    if (!block_) throw std::bad_alloc();
  }
  static Buffer floats(int64_t count) { return Buffer(static_cast<uint64_t>(count) * sizeof(float)); }
  Buffer(Buffer &&other) noexcept { *this = std::move(other); }
  Buffer &operator=(Buffer &&other) noexcept {
    std::swap(block_, other.block_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() { free(block_); }

  uint8_t *data() const {
    const uintptr_t start = reinterpret_cast<uintptr_t>(block_);
    return reinterpret_cast<uint8_t *>((start + kAlign - 1) / kAlign * kAlign);
  }
  float *f32() const { return reinterpret_cast<float *>(data()); }
  uint64_t size() const { return bytes_; }
  void clear() const {
    if (bytes_) memset(data(), 0, static_cast<size_t>(bytes_));
  }

 private:
  static constexpr size_t kAlign = 64;
  void *block_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace fw::model
