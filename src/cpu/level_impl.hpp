// SPDX-License-Identifier: Apache-2.0
// The list entries of an operation that has one table of kernels a level: cpu_avx512, cpu_avx2, cpu_baseline.
#pragma once
#include "core/impl_list.hpp"
#include "cpu/levels.hpp"

namespace fw {

// Whether kernels of that level may run a call on this device in these dtypes.
inline bool accepts_level(const fw_context &context, fw_device device, bool is_f64, int32_t level, Reason &reason) {
  if (device != FW_DEVICE_CPU) return reason.refuse("device is %d, this runs on 0 (CPU)", device);
  if (!level_is_built(level)) return reason.refuse("%s is not built into this library", level_name(level));
  if (level > context.cpu_level) return reason.refuse("this machine does not execute %s", level_name(level));
  if (is_f64) return reason.refuse("operands are fp64, this computes fp32, bf16 and fp16");
  return true;
}
inline bool accepts_reference(fw_device device, Reason &reason) {
  return device == FW_DEVICE_CPU || reason.refuse("device is %d, this runs on 0 (CPU)", device);
}

// Ops: static workspace<level>, run<level>, reference_workspace, reference_run. Problem has `device` and `is_f64`.
template <class Problem, class Ops>
struct LevelImpls {
  template <int32_t kLevel>
  static bool accepts(const fw_context &context, const Problem &p, Reason &reason) {
    return accepts_level(context, p.device, p.is_f64, kLevel, reason);
  }
  static bool accepts_as_reference(const fw_context &, const Problem &p, Reason &reason) {
    return accepts_reference(p.device, reason);
  }
  static constexpr Impl<Problem> kList[] = {
      {"cpu_avx512", accepts<kAvx512>, Ops::template workspace<kAvx512>, Ops::template run<kAvx512>},
      {"cpu_avx2", accepts<kAvx2>, Ops::template workspace<kAvx2>, Ops::template run<kAvx2>},
      {"cpu_baseline", accepts<kBaseline>, Ops::template workspace<kBaseline>, Ops::template run<kBaseline>},
      {"reference", accepts_as_reference, Ops::reference_workspace, Ops::reference_run},
  };
  static constexpr int32_t kCount = 4;
};

// Scratch rows are as far apart as the widest level needs.
constexpr int64_t kWidestLanes = 16;
inline int64_t scratch_pitch(int64_t n) {
  return n > INT64_MAX - kWidestLanes ? INT64_MAX : (n + kWidestLanes - 1) / kWidestLanes * kWidestLanes;
}

}  // namespace fw
