// SPDX-License-Identifier: Apache-2.0
// What the words of sm_90a work on, in plain C++: slots of a ring, places in swizzled tiles, operands of warpgroup products,
// halves of a packed pair.
#pragma once
#include <cuda_fp16.h>
#include <stdint.h>

namespace fw::sm90 {

// A ring of `kStages` slots: which slot, and the parity of its current phase.
template <int kStages>
struct Ring {
  int slot = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++slot == kStages) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Byte offset in a tile of 128-byte rows that starts at a multiple of 1024.
__device__ __forceinline__ uint32_t swizzled(uint32_t row, uint32_t byte) {
  return row * 128 + (byte ^ ((row & 7) << 4));
}

// Rows of 128 bytes along the summed index (64 elements), 8 rows each 1024 bytes; `address` steps 32 bytes for 16 elements.
__device__ __forceinline__ uint64_t rows_along_sum(uint32_t address) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (uint64_t{1} << 16) | ((address & 0x3ffff) >> 4);
}

// Rows of 128 bytes along the second operand's free index (64 elements); blocks of 64 are `block_bytes` apart;
// `address` steps 2048 bytes for 16 rows of the summed index.
__device__ __forceinline__ uint64_t rows_along_free(uint32_t address, uint32_t block_bytes) {
  return (uint64_t{1} << 62) | (uint64_t{1024 >> 4} << 32) | (static_cast<uint64_t>(block_bytes >> 4) << 16) |
         ((address & 0x3ffff) >> 4);
}

// The same operand `bytes` (a multiple of 16) further on.
__device__ __forceinline__ uint64_t advance(uint64_t operand, uint32_t bytes) { return operand + (bytes >> 4); }

// Of two bf16 in a word.
__device__ __forceinline__ float low_bf16(uint32_t packed) { return __uint_as_float(packed << 16); }
__device__ __forceinline__ float high_bf16(uint32_t packed) { return __uint_as_float(packed & 0xffff0000u); }

// Of two fp16.
__device__ __forceinline__ float low_f16(uint32_t packed) { return __half2float(__ushort_as_half(static_cast<uint16_t>(packed))); }
__device__ __forceinline__ float high_f16(uint32_t packed) { return __half2float(__ushort_as_half(static_cast<uint16_t>(packed >> 16))); }

}  // namespace fw::sm90
