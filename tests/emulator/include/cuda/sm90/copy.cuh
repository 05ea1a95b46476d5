// SPDX-License-Identifier: Apache-2.0
// The emulator's file for src/cuda/sm90/copy.cuh.
#pragma once
#include <cuda.h>
#include <cuda_runtime.h>

namespace fw::sm90 {

inline void load_box_to(uint32_t shared, const CUtensorMap *map, uint32_t barrier, uint16_t mask, int c0, int c1, int c2, int c3) {
  const CUtensorMap kept = *map;
  const uint32_t bytes = emulator::box_bytes(kept);
  for (unsigned rank = 0; rank < 16; ++rank) {
    if (!(mask >> rank & 1)) continue;
    unsigned char *to = emulator::shared_at(shared, bytes, "load_box", rank);
    emulator::bulk_load(barrier, bytes, rank, [=] { emulator::copy_box(kept, {c0, c1, c2, c3, 0}, to, shared, true); });
  }
}
inline void load_box(uint32_t shared, const CUtensorMap *map, uint32_t barrier, int c0, int c1, int c2, int c3) {
  load_box_to(shared, map, barrier, static_cast<uint16_t>(1u << emulator::cluster_rank()), c0, c1, c2, c3);
}

inline void load_bytes_to(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier, uint16_t mask) {
  if (shared % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) emulator::stop("load_bytes: no multiple of 16 bytes");
  for (unsigned rank = 0; rank < 16; ++rank) {
    if (!(mask >> rank & 1)) continue;
    unsigned char *to = emulator::shared_at(shared, bytes, "load_bytes", rank);
    emulator::bulk_load(barrier, bytes, rank, [=] { memcpy(to, global, bytes); });
  }
}
inline void load_bytes(uint32_t shared, const void *global, uint32_t bytes, uint32_t barrier) {
  load_bytes_to(shared, global, bytes, barrier, static_cast<uint16_t>(1u << emulator::cluster_rank()));
}

inline void store_box(const CUtensorMap *map, uint32_t shared, int c0, int c1, int c2, int c3) {
  const CUtensorMap kept = *map;
  unsigned char *from = emulator::shared_at(shared, emulator::box_bytes(kept), "store_box");
  emulator::bulk_store([=] { emulator::copy_box(kept, {c0, c1, c2, c3, 0}, from, shared, false); });
}
inline void store_bytes(void *global, uint32_t shared, uint32_t bytes) {
  if (shared % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(global) % 16 != 0) {
    emulator::stop("store_bytes: no multiple of 16 bytes");
  }
  const unsigned char *from = emulator::shared_at(shared, bytes, "store_bytes");
  emulator::bulk_store([=] { memcpy(global, from, bytes); });
}
inline void store_commit() { emulator::bulk_commit(); }
template <int kPending>
void store_wait_read() {
  emulator::bulk_wait(kPending);
}
template <int kPending>
void store_wait() {
  emulator::bulk_wait(kPending);
}
inline void prefetch_bytes(const void *, uint32_t) {}
inline void prefetch_line(const void *) {}
inline void copy_word(uint32_t shared, const void *global) {
  if (reinterpret_cast<uintptr_t>(global) % 4 != 0) emulator::stop("copy_word: no multiple of 4 bytes");
  unsigned char *to = emulator::shared_at(shared, 4, "copy_word");
  emulator::bulk_store([=] { memcpy(to, global, 4); });
}
inline void copy_words_wait() {
  emulator::bulk_commit();
  emulator::bulk_wait(0);
}
inline void prefetch_map(const CUtensorMap *) {}

}  // namespace fw::sm90
