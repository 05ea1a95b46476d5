// SPDX-License-Identifier: Apache-2.0
// What the backward's passes over the chunks leave for the chunks' gradients: of every chunk the state at its start, or
// the state's gradient at its end, and what its rows wrote, or its gradient; through shared memory to images in global
// memory. A chain fills the two places, warps that do nothing else store them by bulk copies.
#pragma once
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "ops/recurrence/sm90_scan_data.cuh"

namespace fw::sm90 {

// Beside a tile for rows. filled: four warps of the chain to the storing warp; emptied: back.
struct __align__(1024) KeptState {
  unsigned char state[2 * kTileBytes];
  uint64_t state_filled, state_emptied, rows_filled, rows_emptied;
};

__device__ __forceinline__ void init_kept_barriers(KeptState &kept) {
  barrier_init(shared_address(&kept.state_filled), 4);
  barrier_init(shared_address(&kept.state_emptied), 1);
  barrier_init(shared_address(&kept.rows_filled), 4);
  barrier_init(shared_address(&kept.rows_emptied), 1);
}

// Of four floats the eight bits below their bf16: a float's bits plus what rounding to nearest even adds have the bf16 as upper
// half, and below it these eight. A zero comes back as about 1e-43, inf as the largest float.
__device__ __forceinline__ uint32_t dropped_bits(const float *x) {
  uint32_t bits[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t word = __float_as_uint(x[i]);
    bits[i] = word + 0x7fffu + (x[i] == 0.0f ? 1u : word >> 16 & 1u);
  }
  return __byte_perm(__byte_perm(bits[0], bits[1], 0x0051), __byte_perm(bits[2], bits[3], 0x0051), 0x5410);
}

// Float i of four from a word with its bf16 in half i % 2 and the word of dropped bits; eight bits below, which are not known, are
// as the eight above: no bias.
__device__ __forceinline__ float with_dropped(uint32_t halves, uint32_t dropped, int i) {
  const uint32_t select = (i % 2 ? 0x3200u : 0x1000u) | static_cast<uint32_t>(4 + i) << 4 | static_cast<uint32_t>(4 + i);
  return __uint_as_float(__byte_perm(halves, dropped, select) - 0x7fffu);
}

// One warpgroup: its 64 value rows of a state, as first operands and as sums, to the place and to kept.dropped.
template <class Shared>
__device__ __forceinline__ void keep_state(Shared &shared, const Kept &kept, int64_t index, int rank, const uint32_t (&a)[8][4],
                                           const float (&s)[64], uint32_t parity, int thread) {
  const int warp = thread / 32, lane = thread % 32, part = lane / 8;
  const uint32_t row = 16 * warp + 8 * (part & 1) + lane % 8, place = shared_address(shared.kept.state);
  barrier_wait(shared_address(&shared.kept.state_emptied), parity ^ 1);
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    store_tiles(place + step / 4 * kTileBytes + swizzled(row, step % 4 * 32 + (part >> 1) * 16), a[step][0], a[step][1],
                a[step][2], a[step][3]);
  }
  __syncwarp();
  barrier_arrive_if(shared_address(&shared.kept.state_filled), lane == 0);
  if (kept.dropped) {
    uint4 *to = kept.dropped + (index * 2 + rank) * 512 + thread;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float *x = s + 16 * i;
      to[128 * i] = make_uint4(dropped_bits(x), dropped_bits(x + 4), dropped_bits(x + 8), dropped_bits(x + 12));
    }
  }
}

// The same for 64 values of the rows of a chunk; a: [values][tokens] first operands. A warp writes its own 16 values of the tile.
template <class Shared>
__device__ __forceinline__ void keep_rows(Shared &shared, const unsigned char *tile, const uint32_t (&a)[4][4], uint32_t parity,
                                          int thread) {
  const int warp = thread / 32, lane = thread % 32, part = lane / 8;
  const uint32_t place = shared_address(tile) + swizzled(8 * (part >> 1) + lane % 8, (16 * warp + 8 * (part & 1)) * 2);
  barrier_wait(shared_address(&shared.kept.rows_emptied), parity ^ 1);
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    store_tiles_transposed(place + 2048 * pair, a[pair][0], a[pair][1], a[pair][2], a[pair][3]);
  }
  __syncwarp();
  barrier_arrive_if(shared_address(&shared.kept.rows_filled), lane == 0);
}

// One warp: `bytes` of a place, chunk by chunk, to images `step` bytes apart. place(chunk); read(chunk): it may be written again.
template <class Place, class Read>
__device__ __forceinline__ void store_kept(unsigned char *to, int64_t step, int chunks, Place place, uint32_t bytes,
                                           uint64_t *filled, uint64_t *emptied, int lane, Read read) {
  uint32_t parity = 0;
  for (int i = 0; i < chunks; ++i, parity ^= 1, to += step) {
    barrier_wait(shared_address(filled), parity);
    if (lane == 0) {
      fence_async_shared();
      store_bytes(to, shared_address(place(i)), bytes);
      store_commit();
      store_wait_read<0>();
      barrier_arrive(shared_address(emptied));
      read(i);
    }
    __syncwarp();
  }
  if (lane == 0) store_wait<0>();
}

// Warps 1 and 2 of the moving warpgroup. first: (head, slot) of the chunk that the chain meets first; turn: 1 or -1. Rows lie in
// a tile of their own, or (kRowsInStage) in that of v of their chunk's stage, which then also waits for this warp.
template <class Shared>
__device__ __forceinline__ void store_kept_of(const Kept &kept, Shared &shared, const Work &work, int64_t first, int turn, int thread) {
  const int chunks = (work.length + kChunk - 1) / kChunk, lane = thread % 32;
  constexpr int64_t kRows = 2 * kTileBytes, kState = 4 * kTileBytes;
  if (thread / 32 == 1 && kept.rows) {
    const auto place = [&](int i) -> const unsigned char * {
      if constexpr (Shared::kRowsInStage) {
        return shared.stage[i % Shared::kDepth].v;
      } else {
        return shared.o;
      }
    };
    const auto read = [&](int i) {
      if constexpr (Shared::kRowsInStage) barrier_arrive(shared_address(&shared.empty[i % Shared::kDepth]));
    };
    store_kept(kept.rows + first * kRows + work.rank * (kRows / 2), turn * kRows, chunks, place, kTileBytes,
               &shared.kept.rows_filled, &shared.kept.rows_emptied, lane, read);
  } else if (thread / 32 == 2) {
    store_kept(kept.states + first * kState + work.rank * (kState / 2), turn * kState, chunks,
               [&](int) -> const unsigned char * { return shared.kept.state; }, 2 * kTileBytes, &shared.kept.state_filled,
               &shared.kept.state_emptied, lane, [](int) {});
  }
}

}  // namespace fw::sm90
