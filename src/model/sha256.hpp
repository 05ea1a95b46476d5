// SPDX-License-Identifier: Apache-2.0
// SHA-256 (FIPS 180-4): ties a state file to its model and lets `verify` print what sha256sum prints.
#pragma once
#include <stdint.h>

#include <array>
#include <span>
#include <string>

namespace fw::model {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  void add(std::span<const uint8_t> bytes);
  Digest finish();

 private:
  void block(const uint8_t *bytes);

  uint32_t h_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  uint8_t tail_[64] = {};
  uint64_t length_ = 0;
};

Digest sha256(std::span<const uint8_t> bytes);
std::string hex(std::span<const uint8_t> bytes);

}  // namespace fw::model
