// SPDX-License-Identifier: Apache-2.0
// Instruction-set levels. A file named *.isa.cpp is compiled once a level, everything in it inside namespace
// fw::FW_LEVEL (baseline, avx2, avx512; baseline is NEON on aarch64, where every processor has it), and exports one table of functions a level; nothing in such a file may be an
// inline function or template of the standard library, since the linker would keep a single copy of it.
#pragma once
#include <stdint.h>

namespace fw {

enum : int32_t { kBaseline = 0, kAvx2 = 1, kAvx512 = 2, kLevelCount = 3 };

const char *level_name(int32_t level);
bool level_is_built(int32_t level);       // compiled into this library
bool level_is_available(int32_t level);   // built, and this machine executes it
int32_t best_level();

// tables[level] for a level that is available; the pattern of every *.isa.cpp:
//   namespace fw::baseline { extern const Table kTable; }  ...  level_table(level, &baseline::kTable, ...)
#if defined(FW_HAVE_X86_LEVELS)
#define FW_DECLARE_LEVEL_TABLES(Type, name)                \
  namespace fw::baseline { extern const Type name; }       \
  namespace fw::avx2 { extern const Type name; }           \
  namespace fw::avx512 { extern const Type name; }
#define FW_LEVEL_TABLE(level, name) \
  ((level) == ::fw::kAvx512 ? ::fw::avx512::name : (level) == ::fw::kAvx2 ? ::fw::avx2::name : ::fw::baseline::name)
#else
#define FW_DECLARE_LEVEL_TABLES(Type, name) \
  namespace fw::baseline { extern const Type name; }
#define FW_LEVEL_TABLE(level, name) (static_cast<void>(level), ::fw::baseline::name)
#endif

}  // namespace fw
