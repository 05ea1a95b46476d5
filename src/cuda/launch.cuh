// SPDX-License-Identifier: Apache-2.0
// How a kernel is started, and the dynamic shared memory that it is started with. Compiled by nvcc; the emulator of the tests
// has its own file of this name.
#pragma once
#include <cuda_runtime.h>
#include <stdint.h>

namespace fw::cuda {

struct Launch {
  dim3 grid;
  uint32_t threads;      // a block
  int64_t shared_bytes; // dynamic, a block
  cudaStream_t stream;
  uint32_t cluster = 1;  // blocks along x that start together and reach each other's shared memory
  bool overlaps = false; // may start before the kernel before it has ended: it waits itself (sm90::launch_wait)
};

template <class... Parameters, class... Arguments>
cudaError_t launch(const Launch &how, void (*kernel)(Parameters...), const Arguments &...arguments) {
  constexpr int64_t kUnasked = 48 * 1024;  // more of it has to be asked for
  if (how.shared_bytes > kUnasked) {
    const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    static_cast<int>(how.shared_bytes));
    if (status != cudaSuccess) return status;
  }
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = how.grid;
  config.blockDim = dim3(how.threads);
  config.dynamicSmemBytes = static_cast<size_t>(how.shared_bytes);
  config.stream = how.stream;
  config.attrs = attributes;
  if (how.cluster > 1) {
    cudaLaunchAttribute &attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = how.cluster;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (how.overlaps) {
    cudaLaunchAttribute &attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

// Starts at a multiple of 1024 bytes.
template <class T>
__device__ __forceinline__ T *dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char fw_dynamic_shared[];
  return reinterpret_cast<T *>(fw_dynamic_shared);
}

}  // namespace fw::cuda
