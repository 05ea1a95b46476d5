// SPDX-License-Identifier: Apache-2.0
// The list entry "cuda" of an operation beside the recurrence. Path: static workspace(context, problem) and run(context, problem,
// memory), defined in a .cu file; a build without CUDA does not name them. Problem has `device` and `is_f64`.
#pragma once
#include "core/impl_list.hpp"
#include "core/operands.hpp"
#include "cuda/device.hpp"

namespace fw::cuda {

template <class Problem, class Path>
struct Candidate {
  static bool accepts(const fw_context &, const Problem &p, Reason &reason) {
    if (p.device != FW_DEVICE_CUDA) return reason.refuse("device is cpu");
    if (p.is_f64) return reason.refuse("operands are fp64, this computes fp32, bf16 and fp16");
    return is_available(8, 0, reason);
  }
#if defined(FW_HAVE_CUDA)
  static constexpr Impl<Problem> kImpl = {"cuda", accepts, Path::workspace, nullptr, Path::run};
#else
  static uint64_t no_workspace(const fw_context &, const Problem &) { return UINT64_MAX; }
  static fw_status never_run(fw_context &, const Problem &, void *) { return check_launches("call", "cuda"); }
  static constexpr Impl<Problem> kImpl = {"cuda", accepts, no_workspace, nullptr, never_run};
#endif
};

// Whether the current device reaches every operand and the workspace, which may be absent.
inline fw_status check_places(const char *op, const Operand *operands, int32_t n, const void *workspace) {
  for (int32_t i = 0; i < n; ++i) FW_TRY(check_memory(op, operands[i].name, *operands[i].tensor));
  return workspace ? check_memory(op, "workspace", workspace) : FW_OK;
}

}  // namespace fw::cuda
