// SPDX-License-Identifier: Apache-2.0
#include "cpu/levels.hpp"

#if defined(FW_HAVE_X86_LEVELS)
#include <cpuid.h>
#endif

namespace fw {
namespace {

#if defined(FW_HAVE_X86_LEVELS)
// clang 14 does not know the name "f16c" in __builtin_cpu_supports
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & (1u << 29));
}

bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

}  // namespace

const char *level_name(int32_t level) {
  switch (level) {
    case kBaseline: return "baseline";
    case kAvx2: return "avx2";
    case kAvx512: return "avx512";
    default: return "none";
  }
}

bool level_is_built(int32_t level) {
#if defined(FW_HAVE_X86_LEVELS)
  return level >= 0 && level < kLevelCount;
#else
  return level == kBaseline;
#endif
}

bool level_is_available(int32_t level) {
  if (!level_is_built(level)) return false;
#if defined(FW_HAVE_X86_LEVELS)
  // Asked once: cpuid leaves a virtual machine, and two of them were half the time of a step of one head.
  static const bool avx2 = has_avx2(), avx512 = has_avx512();
  if (level == kAvx2) return avx2;
  if (level == kAvx512) return avx512;
#endif
  return true;
}

int32_t best_level() {
  for (int32_t level = kLevelCount - 1; level > 0; --level) {
    if (level_is_available(level)) return level;
  }
  return kBaseline;
}

}  // namespace fw
