// SPDX-License-Identifier: Apache-2.0
// What the programs of times share: normal numbers, and replays of a CUDA graph with the second-level cache cleared before each.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define MUST(call)                                                                                  \
  do {                                                                                              \
    const cudaError_t status_ = static_cast<cudaError_t>(call);                                     \
    if (status_ != cudaSuccess) {                                                                   \
      std::printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status_));       \
      std::exit(2);                                                                                 \
    }                                                                                               \
  } while (0)

__device__ inline float draw_normal(uint64_t index, uint32_t seed) {
  uint64_t x = (index + 1) * 0x9e3779b97f4a7c15ull + seed * 0xbf58476d1ce4e5b9ull;
  x ^= x >> 30, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 27, x *= 0x94d049bb133111ebull, x ^= x >> 31;
  const float u = (static_cast<uint32_t>(x) + 1.0f) * 2.3283064e-10f, v = static_cast<uint32_t>(x >> 32) * 2.3283064e-10f;
  return sqrtf(-2.0f * logf(fminf(u, 1.0f))) * cospif(2.0f * v);
}

struct Clock {
  static constexpr size_t kFlush = size_t{256} << 20;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin, end;
  void *flush;
  Clock() {
    MUST(cudaMalloc(&flush, kFlush));
    MUST(cudaStreamCreate(&stream));
    MUST(cudaEventCreate(&begin));
    MUST(cudaEventCreate(&end));
  }
  // Milliseconds of `count` replays after a few that do not count, the least first.
  std::vector<float> replay(cudaGraphExec_t exec, int count, int uncounted = 3) const {
    std::vector<float> times;
    for (int i = 0; i < count + uncounted; ++i) {
      MUST(cudaMemsetAsync(flush, i, kFlush, stream));
      MUST(cudaEventRecord(begin, stream));
      MUST(cudaGraphLaunch(exec, stream));
      MUST(cudaEventRecord(end, stream));
      MUST(cudaEventSynchronize(end));
      float ms;
      MUST(cudaEventElapsedTime(&ms, begin, end));
      if (i >= uncounted) times.push_back(ms);
    }
    std::sort(times.begin(), times.end());
    return times;
  }
};
