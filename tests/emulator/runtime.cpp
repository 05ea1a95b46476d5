// SPDX-License-Identifier: Apache-2.0
// The emulated device's memory, streams and tensor maps.
#include <cuda.h>
#include <cuda_runtime.h>

namespace {

std::mutex lock;
std::map<const char *, size_t> allocations;  // start, bytes
std::map<const void *, std::vector<std::function<void()>>> captures;  // by stream

CUresult encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base, const cuuint64_t *sizes,
                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *steps, CUtensorMapInterleave,
                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  *map = {};
  const bool is_wide = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  if (rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(base) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  if (!is_wide && type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16) return CUDA_ERROR_INVALID_VALUE;
  map->base = static_cast<unsigned char *>(base);
  map->rank = static_cast<uint16_t>(rank), map->element_bytes = is_wide ? 4 : 2;
  map->is_swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  if (!map->is_swizzled && swizzle != CU_TENSOR_MAP_SWIZZLE_NONE) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < 5; ++i) {
    map->sizes[i] = i < rank ? sizes[i] : 1;
    map->box[i] = i < rank ? box[i] : 1;
    map->strides[i] = i == 0 ? map->element_bytes : i < rank ? strides[i - 1] : 0;
    if (map->sizes[i] == 0 || map->sizes[i] > (uint64_t{1} << 32) || map->box[i] == 0 || map->box[i] > 256) return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && i < rank && (map->strides[i] % 16 != 0 || map->strides[i] == 0 || map->strides[i] >= (uint64_t{1} << 40))) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (i < rank && steps[i] != 1) return CUDA_ERROR_INVALID_VALUE;
  }
  const uint32_t inner = map->box[0] * map->element_bytes;
  if (inner % 16 != 0 || (map->is_swizzled && inner > 128)) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

}  // namespace

struct CUgraph_st {
  std::vector<std::function<void()>> work;
};
struct CUgraphExec_st {
  std::vector<std::function<void()>> work;
};

namespace fw::emulator {

bool is_captured(const void *stream, const std::function<void()> &work) {
  const std::lock_guard<std::mutex> held(lock);
  const auto found = captures.find(stream);
  if (found == captures.end()) return false;
  found->second.push_back(work);
  return true;
}

uint32_t box_bytes(const CUtensorMap &map) {
  uint32_t bytes = map.element_bytes;
  for (const uint32_t size : map.box) bytes *= size;
  return bytes;
}

void copy_box(const CUtensorMap &map, const int (&at)[5], unsigned char *shared, uint32_t address, bool is_load) {
  if (address % (map.is_swizzled ? 1024 : 128) != 0) stop("a box at shared address %u", address);
  uint32_t place = 0;
  uint32_t i[5];
  const uint32_t size = map.element_bytes;
  for (i[4] = 0; i[4] < map.box[4]; ++i[4]) {
    for (i[3] = 0; i[3] < map.box[3]; ++i[3]) {
      for (i[2] = 0; i[2] < map.box[2]; ++i[2]) {
        for (i[1] = 0; i[1] < map.box[1]; ++i[1]) {
          for (i[0] = 0; i[0] < map.box[0]; ++i[0], place += size) {
            bool is_inside = true;
            unsigned char *global = map.base;
            for (int d = 0; d < 5; ++d) {
              const int64_t index = static_cast<int64_t>(at[d]) + i[d];
              is_inside = is_inside && index >= 0 && index < static_cast<int64_t>(map.sizes[d]);
              global += index * static_cast<int64_t>(map.strides[d]);
            }
            unsigned char *cell = shared + (map.is_swizzled ? swizzle(address + place) - address : place);
            if (is_load && is_inside) memcpy(cell, global, size);
            if (is_load && !is_inside) memset(cell, 0, size);
            if (!is_load && is_inside) memcpy(global, cell, size);
          }
        }
      }
    }
  }
}

}  // namespace fw::emulator

const char *cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "an error of the emulated device"; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int *count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int *device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr what, int) {
  switch (what) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMultiProcessorCount: *value = 1; break;  // so that CTAs that take one chunk after another do
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp *properties, int) {
  *properties = {"emulated device", 9, 0, 132};
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

cudaError_t cudaMalloc(void **memory, size_t bytes) {
  *memory = aligned_alloc(512, (bytes + 511) / 512 * 512 + 512);
  if (!*memory) return cudaErrorMemoryAllocation;
  const std::lock_guard<std::mutex> held(lock);
  allocations[static_cast<const char *>(*memory)] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void *memory) {
  if (!memory) return cudaSuccess;
  const std::lock_guard<std::mutex> held(lock);
  if (allocations.erase(static_cast<const char *>(memory)) == 0) return cudaErrorInvalidValue;
  free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind) {
  memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream) {
  const auto work = [=] { cudaMemcpy(to, from, bytes, kind); };
  if (!fw::emulator::is_captured(stream, work)) work();
  return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  memset(to, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  const auto work = [=] { cudaMemset(to, value, bytes); };
  if (!fw::emulator::is_captured(stream, work)) work();
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *pointer) {
  const std::lock_guard<std::mutex> held(lock);
  *found = {cudaMemoryTypeUnregistered, 0};
  auto after = allocations.upper_bound(static_cast<const char *>(pointer));
  if (after == allocations.begin()) return cudaSuccess;
  --after;
  if (static_cast<const char *>(pointer) < after->first + after->second) found->type = cudaMemoryTypeDevice;
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) {
  *stream = reinterpret_cast<cudaStream_t>(new char);
  return cudaSuccess;
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete reinterpret_cast<char *>(stream);
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  const std::lock_guard<std::mutex> held(lock);
  return stream && captures.try_emplace(stream).second ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
  const std::lock_guard<std::mutex> held(lock);
  const auto found = captures.find(stream);
  if (found == captures.end()) return cudaErrorInvalidValue;
  *graph = new CUgraph_st{std::move(found->second)};
  captures.erase(found);
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long) {
  *made = new CUgraphExec_st{graph->work};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  for (const std::function<void()> &work : graph->work) work();
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *found) {
  const bool is_known = strcmp(name, "cuTensorMapEncodeTiled") == 0;
  *entry = is_known ? reinterpret_cast<void *>(&encode) : nullptr;
  *found = is_known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
