// SPDX-License-Identifier: Apache-2.0
// The instances of gemm.hpp that kernel files share: fp32 with fp32. Plan and order of the sums: there. Scratch:
// none.
#include "cpu/gemm.hpp"

namespace fw::FW_LEVEL {

template void dots<AsF32>(int64_t, int64_t, int64_t, const float *, int64_t, const float *, int64_t, float *, int64_t,
                          bool);
template void gemm_nn<Keep::kNothing>(int64_t, int64_t, int64_t, const float *, int64_t, int64_t, const float *,
                                      int64_t, float *, int64_t, const float *);
template void gemm_nn<Keep::kAll>(int64_t, int64_t, int64_t, const float *, int64_t, int64_t, const float *, int64_t,
                                  float *, int64_t, const float *);
template void gemm_nn<Keep::kScaled>(int64_t, int64_t, int64_t, const float *, int64_t, int64_t, const float *,
                                     int64_t, float *, int64_t, const float *);

}  // namespace fw::FW_LEVEL
