// SPDX-License-Identifier: Apache-2.0
// Stand-in for the driver interface: tensor maps, as cuTensorMapEncodeTiled makes them (cudaGetDriverEntryPointByVersion gives it).
#pragma once
#include <stdint.h>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8,
  CU_TENSOR_MAP_DATA_TYPE_UINT16,
  CU_TENSOR_MAP_DATA_TYPE_UINT32,
  CU_TENSOR_MAP_DATA_TYPE_INT32,
  CU_TENSOR_MAP_DATA_TYPE_UINT64,
  CU_TENSOR_MAP_DATA_TYPE_INT64,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT64,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
};
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle {
  CU_TENSOR_MAP_SWIZZLE_NONE,
  CU_TENSOR_MAP_SWIZZLE_32B,
  CU_TENSOR_MAP_SWIZZLE_64B,
  CU_TENSOR_MAP_SWIZZLE_128B
};
enum CUtensorMapL2promotion {
  CU_TENSOR_MAP_L2_PROMOTION_NONE,
  CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B
};
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// 128 bytes, as the real one.
struct alignas(64) CUtensorMap {
  unsigned char *base;
  uint64_t sizes[5], strides[5];  // strides in bytes, [0] of the innermost
  uint32_t box[5];
  uint16_t rank, element_bytes;
  bool is_swizzled;
};
static_assert(sizeof(CUtensorMap) == 128);

namespace fw::emulator {
// Between a box of a tensor and shared memory at `shared` (whose shared address is `address`); is_load: towards shared memory, zeros
// for what lies outside the tensor; else outside is left out.
void copy_box(const CUtensorMap &map, const int (&at)[5], unsigned char *shared, uint32_t address, bool is_load);
uint32_t box_bytes(const CUtensorMap &map);
}  // namespace fw::emulator
