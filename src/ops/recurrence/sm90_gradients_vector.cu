// SPDX-License-Identifier: Apache-2.0
#include "ops/recurrence/sm90_gradients.cuh"
namespace fw::sm90 {
cudaError_t launch_gradients_vector(const GradientArguments &, Sm90Erase, cudaStream_t) { return cudaErrorNotSupported; }
}  // namespace fw::sm90
