// SPDX-License-Identifier: Apache-2.0
// Stand-in for the CUDA runtime: the words of CUDA C++ that the library's kernels use, and the functions that its host code and
// the tests call, on the emulated device (emulator.hpp). One device of compute capability 9.0; its memory is the host's, marked
// as the device's by its address; every stream is in order and finished when a call returns; a graph is
// the list of what was captured.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// everything of the standard library that uses __noinline__ as an attribute's name comes before the word is defined
#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <sstream>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "emulator.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define __shared__ static
#define __constant__

#define threadIdx (fw::emulator::current->thread)
#define blockIdx (fw::emulator::current->block)
#define blockDim (fw::emulator::block_size)
#define gridDim (fw::emulator::grid_size)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

#define FW_VECTORS(type, name, align2, align4)                                         \
  struct alignas(align2) name##2 { type x, y; };                                       \
  struct name##3 { type x, y, z; };                                                    \
  struct alignas(align4) name##4 { type x, y, z, w; };                                 \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }                     \
  inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }          \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
FW_VECTORS(float, float, 8, 16)
FW_VECTORS(int, int, 8, 16)
FW_VECTORS(unsigned, uint, 8, 16)
FW_VECTORS(double, double, 16, 16)
FW_VECTORS(unsigned short, ushort, 4, 8)
FW_VECTORS(long long, longlong, 16, 16)
#undef FW_VECTORS

// ---- what threads do ----

inline void __syncthreads() { fw::emulator::block_meet("__syncthreads"); }
inline void __syncwarp(uint32_t mask = 0xffffffffu) { fw::emulator::warp_meet("__syncwarp", mask, nullptr, nullptr); }
inline void __threadfence() {}
inline void __threadfence_block() {}

namespace fw::emulator {
// The value of lane `from`, or one's own where that lane takes no part.
template <class T>
T shuffle(const char *what, uint32_t mask, T value, int from) {
  struct Item {
    T value, result;
    int from;
  } item = {value, value, from};
  warp_meet(what, mask, &item, [](void *const *items) {
    for (int lane = 0; lane < 32; ++lane) {
      Item *to = static_cast<Item *>(items[lane]);
      if (!to) continue;
      const Item *source = static_cast<const Item *>(items[to->from]);
      if (!source) stop("a shuffle from lane %d, which takes no part", to->from);
      to->result = source->value;
    }
  });
  return item.result;
}
template <class F>
uint32_t vote(uint32_t mask, int predicate, F) {
  struct Item {
    int predicate;
    uint32_t ballot;
  } item = {predicate, 0};
  warp_meet("vote", mask, &item, [](void *const *items) {
    uint32_t ballot = 0;
    for (int lane = 0; lane < 32; ++lane) {
      if (items[lane] && static_cast<Item *>(items[lane])->predicate) ballot |= 1u << lane;
    }
    for (int lane = 0; lane < 32; ++lane) {
      if (items[lane]) static_cast<Item *>(items[lane])->ballot = ballot;
    }
  });
  return item.ballot;
}
inline int shuffle_base(int width) { return current->lane / width * width; }
}  // namespace fw::emulator

template <class T>
T __shfl_sync(uint32_t mask, T value, int from, int width = 32) {
  return fw::emulator::shuffle("__shfl_sync", mask, value, fw::emulator::shuffle_base(width) + (from & (width - 1)));
}
template <class T>
T __shfl_xor_sync(uint32_t mask, T value, int bits, int width = 32) {
  const int from = fw::emulator::current->lane ^ bits;
  return fw::emulator::shuffle("__shfl_xor_sync", mask, value,
                               from / width == fw::emulator::current->lane / width ? from : fw::emulator::current->lane);
}
template <class T>
T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int from = fw::emulator::current->lane - static_cast<int>(delta);
  return fw::emulator::shuffle("__shfl_up_sync", mask, value,
                               from < fw::emulator::shuffle_base(width) ? fw::emulator::current->lane : from);
}
template <class T>
T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32) {
  const int from = fw::emulator::current->lane + static_cast<int>(delta);
  return fw::emulator::shuffle("__shfl_down_sync", mask, value,
                               from >= fw::emulator::shuffle_base(width) + width ? fw::emulator::current->lane : from);
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) { return fw::emulator::vote(mask, predicate, 0); }
inline int __any_sync(uint32_t mask, int predicate) { return fw::emulator::vote(mask, predicate, 0) != 0; }
inline int __all_sync(uint32_t mask, int predicate) { return fw::emulator::vote(mask, !predicate, 0) == 0; }

inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}
// Bytes 0 to 3 of x and 4 to 7 of y, by the digits of `which`, the lowest first.
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t which) {
  const uint64_t both = x | static_cast<uint64_t>(y) << 32;
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) word |= static_cast<uint32_t>(both >> (8 * (which >> (4 * i) & 7)) & 255) << (8 * i);
  return word;
}
inline int __float_as_int(float x) { return static_cast<int>(__float_as_uint(x)); }
inline float __int_as_float(int bits) { return __uint_as_float(static_cast<uint32_t>(bits)); }
inline size_t __cvta_generic_to_shared(const void *pointer) { return fw::emulator::address_of(pointer); }
template <class T>
T __ldg(const T *p) {
  return *p;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __logf(float x) { return logf(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<uint32_t>(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

#include "emulated_runtime.h"
