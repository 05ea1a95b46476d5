// SPDX-License-Identifier: Apache-2.0
// On the host: tensor maps of four dimensions for box copies (copy.cuh).
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

namespace fw::sm90 {

// Boxes with the 128-byte swizzle (box[0] is 128 bytes), zeros outside. strides: bytes of dimensions 1 to 3, multiples of 16.
inline cudaError_t encode_boxes(CUtensorMap *map, CUtensorMapDataType type, const void *base, const int64_t (&sizes)[4],
                                const int64_t (&strides)[3], const uint32_t (&box)[4]) {
  using Encode = CUresult (*)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                              const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  void *entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
  if (status != cudaSuccess) return status;
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  cuuint64_t all[4], bytes[3];
  cuuint32_t boxes[4], steps[4];
  for (int i = 0; i < 4; ++i) all[i] = static_cast<cuuint64_t>(sizes[i]), boxes[i] = box[i], steps[i] = 1;
  for (int i = 0; i < 3; ++i) bytes[i] = static_cast<cuuint64_t>(strides[i]);
  const CUresult result = reinterpret_cast<Encode>(entry)(
      map, type, 4, const_cast<void *>(base), all, bytes, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace fw::sm90
