// SPDX-License-Identifier: Apache-2.0
#include "cpu/dot_units.hpp"

#if defined(FW_HAVE_X86_LEVELS)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif
#if defined(FW_HAVE_NEON_BF16) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "cpu/levels.hpp"

namespace fw {

namespace amx_model { extern const DotUnits kDotUnits; }
namespace pairs_model { extern const DotUnits kDotUnits; }
#if defined(FW_HAVE_X86_LEVELS)
namespace amx { extern const DotUnits kDotUnits; }
namespace avx512_bf16 { extern const DotUnits kDotUnits; }
#endif
#if defined(FW_HAVE_NEON_BF16)
namespace neon_bf16 { extern const DotUnits kDotUnits; }
#endif

namespace {

#if defined(FW_HAVE_X86_LEVELS)
struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};
Registers cpuid(unsigned leaf, unsigned sub) {
  Registers r;
  if (!__get_cpuid_count(leaf, sub, &r.a, &r.b, &r.c, &r.d)) return {};
  return r;
}

bool has_avx512_bf16() { return level_is_available(kAvx512) && (cpuid(7, 1).a & (1u << 5)) != 0; }

// AMX-BF16 and AMX-TILE, saved by the system (XCR0 bits 17 and 18), and allowed to this process: Linux asks for that.
bool has_amx() {
  constexpr unsigned kTileBits = 3u << 17, kNeeded = (1u << 22) | (1u << 24);
  if (!level_is_available(kAvx512) || (cpuid(7, 0).d & kNeeded) != kNeeded) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kTileBits) != kTileBits) return false;
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

// The display family and model, as vendors count them.
bool is_family(const char *vendor, unsigned family, unsigned first_model, unsigned last_model) {
  const Registers name = cpuid(0, 0), version = cpuid(1, 0);
  const unsigned words[3] = {name.b, name.d, name.c};
  if (__builtin_memcmp(words, vendor, 12) != 0) return false;
  const unsigned base = (version.a >> 8) & 15, found = base == 15 ? base + ((version.a >> 20) & 255) : base;
  const unsigned model = ((version.a >> 4) & 15) | ((version.a >> 16) & 15) << 4;
  return found == family && model >= first_model && model <= last_model;
}

// Families where the rate of the units was measured, in fp32 multiply-adds a second: a prototype's tile of vdpbf16ps ran
// at 2.0 times that on Zen 4 (its chunk forward took 0.65 of the time), at 0.5 on Emerald Rapids (1.5 of the time). No
// rate of AMX or of an Arm CPU has been measured, so none is here.
struct Family {
  int32_t kind;
  const char *vendor;
  unsigned family, first_model, last_model;
};
constexpr Family kFamilies[] = {
    {kAvx512Bf16, "AuthenticAMD", 0x19, 0x10, 0x1f},  // Zen 4, servers
    {kAvx512Bf16, "AuthenticAMD", 0x19, 0x60, 0x7f},  // Zen 4, desktops and laptops
    {kAvx512Bf16, "AuthenticAMD", 0x19, 0xa0, 0xaf},  // Zen 4c, servers
};
#endif

}  // namespace

const char *dot_units_name(int32_t kind) {
  switch (kind) {
    case kAmx: return "amx";
    case kAvx512Bf16: return "avx512_bf16";
    case kNeonBf16: return "neon_bf16";
    case kAmxModel: return "amx_model";
    case kPairsModel: return "bf16_model";
    default: return "none";
  }
}

bool dot_units_are_built(int32_t kind) {
#if defined(FW_HAVE_X86_LEVELS)
  if (kind == kAmx || kind == kAvx512Bf16) return true;
#endif
#if defined(FW_HAVE_NEON_BF16)
  if (kind == kNeonBf16) return true;
#endif
  return kind == kAmxModel || kind == kPairsModel;
}

bool dot_units_are_available(int32_t kind) {
#if defined(FW_HAVE_X86_LEVELS)
  if (kind == kAmx) {
    static const bool amx = has_amx();
    return amx;
  }
  if (kind == kAvx512Bf16) {
    static const bool avx512_bf16 = has_avx512_bf16();
    return avx512_bf16;
  }
#endif
#if defined(FW_HAVE_NEON_BF16)
  if (kind == kNeonBf16) {
#if defined(__linux__)
    constexpr unsigned long kBf16 = 1ul << 14;  // HWCAP2_BF16
    static const bool neon_bf16 = (getauxval(AT_HWCAP2) & kBf16) != 0;
    return neon_bf16;
#else
    return false;
#endif
  }
#endif
  return kind == kAmxModel || kind == kPairsModel;
}

const DotUnits &dot_units(int32_t kind) {
#if defined(FW_HAVE_X86_LEVELS)
  if (kind == kAmx) return amx::kDotUnits;
  if (kind == kAvx512Bf16) return avx512_bf16::kDotUnits;
#endif
#if defined(FW_HAVE_NEON_BF16)
  if (kind == kNeonBf16) return neon_bf16::kDotUnits;
#endif
  return kind == kAmxModel ? amx_model::kDotUnits : pairs_model::kDotUnits;
}

bool dot_units_pay(int32_t kind) {
#if defined(FW_HAVE_X86_LEVELS)
  static const uint32_t paying = [] {  // asked once: cpuid leaves a virtual machine
    uint32_t kinds = 0;
    for (const Family &f : kFamilies) {
      if (is_family(f.vendor, f.family, f.first_model, f.last_model)) kinds |= 1u << f.kind;
    }
    return kinds;
  }();
  return kind >= 0 && kind < kDotUnitCount && (paying >> kind & 1) != 0;
#else
  (void)kind;
  return false;
#endif
}

}  // namespace fw
