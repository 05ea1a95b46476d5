// SPDX-License-Identifier: Apache-2.0
// Counts calls of the allocator while a CountAllocations lives. Include in one file of a program. Where the allocator
// is a sanitizer's or another libc's, is_counting() is false and a test says "not run".
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <atomic>

namespace fwtest {
inline std::atomic<int64_t> n_allocations{0};
struct CountAllocations {
  int64_t before = n_allocations.load();
  int64_t count() const { return n_allocations.load() - before; }
};
}  // namespace fwtest

#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer) || __has_feature(memory_sanitizer)
#define FWTEST_FOREIGN_ALLOCATOR
#endif
#endif
#if defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) && \
    !defined(FWTEST_FOREIGN_ALLOCATOR)
namespace fwtest {
constexpr bool is_counting() { return true; }
}  // namespace fwtest
extern "C" {
void *__libc_malloc(size_t);
void *__libc_calloc(size_t, size_t);
void *__libc_realloc(void *, size_t);
void *__libc_memalign(size_t, size_t);
void *malloc(size_t n) noexcept { return ++fwtest::n_allocations, __libc_malloc(n); }
void *calloc(size_t n, size_t size) noexcept { return ++fwtest::n_allocations, __libc_calloc(n, size); }
void *realloc(void *p, size_t n) noexcept { return ++fwtest::n_allocations, __libc_realloc(p, n); }
void *memalign(size_t align, size_t n) noexcept { return ++fwtest::n_allocations, __libc_memalign(align, n); }
void *aligned_alloc(size_t align, size_t n) noexcept { return ++fwtest::n_allocations, __libc_memalign(align, n); }
int posix_memalign(void **p, size_t align, size_t n) noexcept {
  ++fwtest::n_allocations;
  *p = __libc_memalign(align, n);
  return *p ? 0 : 12;
}
}
#else
namespace fwtest {
constexpr bool is_counting() { return false; }
}  // namespace fwtest
#endif
