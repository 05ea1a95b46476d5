// SPDX-License-Identifier: Apache-2.0
// FW_HOST_DEVICE marks the small functions that CUDA kernels call too; nothing for a C++ compiler.
#pragma once

#if defined(__CUDACC__)
#define FW_HOST_DEVICE __host__ __device__
#else
#define FW_HOST_DEVICE
#endif
