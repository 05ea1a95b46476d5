// SPDX-License-Identifier: Apache-2.0
// The backward's last kernel for a vector gate; what it computes is in sm90_gradients.cu, with a decay for every key.
// Between two rows lies a product of exp(g) <= 1. What row i reads of row j < i goes through boundaries, so that both sides are
// bf16 of decays at most 1 and past rows alone decide (sm90_scores.cuh): between blocks of 16 rows the start of i's and the end
// of j's block, and all decays between in fp32; inside a block, with l the highest bit in which i and j differ, the row between
// them whose lower l bits are 0 (l = 0: two rows, in fp32). The row itself in fp32.
// dg_i is the flow across the decay of row i: from the state or an earlier row to the end or a later row, each a product with
// that decay, never a difference. The flows through one boundary, summed for each row at its two sides, cross the rows between
// that row and the boundary: a triangle of ones times flows by row (bf16). Block m also has what passes all of it.
// The gradients are made as [keys][rows]: sums, operands and decays then lie alike in registers (sm90_gradients_vector.cuh) and
// nothing but scores goes from warp to warp.
// Grid: one CTA a multiprocessor; each takes (slot, query/key head) after another, its value heads in their order, whose dq and
// dk are added up in global memory by the threads that own them. 256 threads; warp w has the keys 16w .. 16w + 15.
//   1. Warpgroup 0 d_o V'^T, warpgroup 1 E V'^T, 8 x m64n64k16; meanwhile <S, dS>, decays (thread (pair, block)), dv. dbeta,
//      B1 and B2 to images.
//   2. Each warpgroup of 64 keys S d_o^T, S E^T, dS V'^T, 8 x m64n64k16 each; meanwhile q and k, decayed to the starts and ends
//      of blocks. Then thread 0 loads the next states and rows.
//   3. Between blocks, mma m16n8k16, added to the sums of 2 as these pass block after block.
//   4. Block after block: from sums to dq and dk, inside the block, dg; in the places of q, k and decays.
//   5. Out; with a norm after the rows' products with dq and dk, gates of logits through their activation
//      (sm90_gradients_made.cuh). Thread 0 loads the next q and k.
// Shared memory: states, gradients 2 x 32768, d_o, V', E, q, k 5 x 16384, B1 and B2 2 x 8192, decays 33792, totals 2048,
// <S, dS> 2048, scores next to the diagonal 512, factors 896; lengths and products of rows 5120, logits 16384, sums 2080: 222 KB.
// Handing over: an mbarrier each for the two loads, else __syncthreads.
#include "cuda/launch.cuh"
#include "ops/recurrence/sm90_gradients_made.cuh"

namespace fw::sm90 {
namespace {

// ---- loads, by thread 0

// Slots without rows are passed over.
__device__ __forceinline__ Step next_step(const Shape &shape, Step step) {
  if (++step.member < shape.HV / shape.H) {
    ++step.value_head;
    return step;
  }
  step.member = 0;
  const int items = shape.slots * shape.H;
  do {
    step.item += gridDim.x;
    if (step.item >= items) return {-1, 0, 0, 0, 0, {}};
    step.slot = step.item / shape.H;
    step.chunk = chunk_of(shape, step.slot);
  } while (step.chunk.rows == 0);
  step.head = step.item - step.slot * shape.H;
  step.value_head = step.head * (shape.HV / shape.H);
  return step;
}

__device__ __forceinline__ void load_halves(unsigned char *tiles, const CUtensorMap *map, uint64_t *full, int head,
                                            const Chunk &chunk) {
  for (int half = 0; half < 2; ++half) {
    load_box(shared_address(tiles) + half * kTileBytes, map, shared_address(full), 64 * half, head, chunk.start, chunk.batch);
  }
}

template <Sm90Erase kErase>
__device__ __forceinline__ void load_rows(const GradientArguments &in, VectorGradientShared &shared, const Step &step) {
  if (step.item < 0) return;
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  constexpr uint32_t kPair = 2 * kTileBytes, kStates = 4 * kTileBytes;
  const uint32_t full = shared_address(&shared.rows_full);
  const int hv = step.value_head;
  const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + step.slot;
  barrier_expect_bytes(full, 2 * kStates + (in.d_o_is_zero ? 2 : 3) * kPair + (kSolve ? sizeof(VectorFactors) : 0));
  if (!in.d_o_is_zero) load_halves(shared.d_o, &in.d_o, &shared.rows_full, hv, step.chunk);
  if constexpr (kSolve) {
    load_bytes(shared_address(shared.written), in.forward.rows + index * kPair, kPair, full);
    load_bytes(shared_address(&shared.factors), in.tiles.vector_factors + index, sizeof(VectorFactors), full);
  } else {
    load_halves(shared.written, &in.v, &shared.rows_full, hv, step.chunk);
  }
  load_bytes(shared_address(shared.e), in.reverse.rows + index * kPair, kPair, full);
  load_bytes(shared_address(shared.states), in.forward.states + index * kStates, kStates, full);
  load_bytes(shared_address(shared.d_states), in.reverse.states + index * kStates, kStates, full);
  if (in.has_gate_gradient) {
    constexpr uint32_t kDropped = 1024 * sizeof(uint4);
    prefetch_bytes(in.forward.dropped + index * 1024, kDropped);
    prefetch_bytes(in.reverse.dropped + index * 1024, kDropped);
  }
}

template <bool kNormed>
__device__ __forceinline__ void load_keys(const GradientArguments &in, VectorGradientShared &shared, const Step &step) {
  if (step.item < 0) return;
  constexpr uint32_t kLengths = sizeof shared.lengths;
  barrier_expect_bytes(shared_address(&shared.keys_full), 4 * kTileBytes + (kNormed ? kLengths : 0));
  if constexpr (kNormed) {
    const float *lengths = in.tiles.lengths + (static_cast<int64_t>(step.head) * in.shape.slots + step.slot) * (2 * kChunk);
    load_bytes(shared_address(shared.lengths), lengths, kLengths, shared_address(&shared.keys_full));
  }
  load_halves(shared.q, &in.q, &shared.keys_full, step.head, step.chunk);
  load_halves(shared.k, &in.k, &shared.keys_full, step.head, step.chunk);
}

// ---- step 1

__device__ __forceinline__ void keep_decays(VectorGradientShared &shared, const RowDecays &decay, int pair, int block) {
  float2 all = make_float2(1.0f, 1.0f);
#pragma unroll
  for (int r = 0; r < 16; ++r) {
    *reinterpret_cast<float2 *>(shared.decay + (16 * block + r) * kDecayPitch + 2 * pair) = decay[r];
    all = times(all, decay[r]);
  }
  *reinterpret_cast<float2 *>(shared.total[block] + 2 * pair) = all;
}

// d: d_o V'^T of warpgroup 0, E V'^T of warpgroup 1.
template <Sm90Erase kErase>
__device__ __forceinline__ void finish_scores(const GradientArguments &in, VectorGradientShared &shared, const Step &step,
                                              float (&d)[32], int thread) {
  const int warp = thread / 32 % 4, lane = thread % 32, g = lane / 4, t = lane % 4;
  if (thread < 128) {
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] *= in.scale;
    keep_scores<0>(shared, d, warp, lane);
  } else if (kErase == Sm90Erase::kShared) {
    const float beta0 = at_token(shared.factors.beta, 16 * warp + g), beta8 = at_token(shared.factors.beta, 16 * warp + g + 8);
    if (in.dbeta) store_beta_gradient(in, d, beta0, beta8, step.chunk, step.value_head, warp, g, t);
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] *= i & 2 ? -beta8 : -beta0;
    keep_scores<1>(shared, d, warp, lane);
  }
}

// ---- step 2

// d[64 keys][tokens] = states rows^T over the 128 values, of the warpgroup's keys.
__device__ __forceinline__ void multiply_turned_states(float (&d)[32], const unsigned char *states, const unsigned char *rows,
                                                       int group) {
  const uint64_t a = rows_along_free(shared_address(states) + group * kTileBytes, kTileBytes);
  const uint64_t b = rows_along_sum(shared_address(rows));
#pragma unroll
  for (int step = 0; step < 8; ++step) {
    multiply_n64_turned(d, advance(a, step / 4 * 2 * kTileBytes + step % 4 * 2048),
                        advance(b, step / 4 * kTileBytes + step % 4 * 32), step > 0);
  }
}

template <Sm90Erase kErase, bool kNormed>
__device__ __forceinline__ void make_sides(const VectorGradientShared &shared, BlockSides &sides, const Lane &lane) {
  const int warp = lane.warp;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    BlockDecays of;
    TreeDecays none;
    make_products<false>(shared, lane, block, 16 * warp + lane.g, of, none);
    uint32_t words[4];
    float k[8], x[8];
    const uint32_t corner = block_corner(warp, block, lane.lane);
    load_tiles_transposed(words, shared_address(shared.k) + corner);
    unpack_rows<kNormed>(k, words, shared, 1, block, lane.t);
    if (block < 3) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = k[i] * of.end[i];
      pack_tile(sides.right[block], x);
    }
    if (block == 0) continue;
    if constexpr (kErase == Sm90Erase::kShared) {
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = k[i] * of.start[i];
      pack_tile(sides.k[block - 1], x);
    }
    load_tiles_transposed(words, shared_address(shared.q) + corner);
    unpack_rows<kNormed>(x, words, shared, 0, block, lane.t);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= of.start[i];
    pack_tile(sides.q[block - 1], x);
  }
}

// ---- step 4

// Adds what the value heads before gave, in the thread's own place of global memory, or leaves the sum there.
__device__ __forceinline__ void add_heads(float (&d)[8], float *partial, int part, int thread, bool is_first, bool is_last) {
  float4 *place = reinterpret_cast<float4 *>(partial) + part * 512 + thread;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float *x = d + 4 * i;
    if (!is_first) {
      const float4 four = place[256 * i];
      x[0] += four.x, x[1] += four.y, x[2] += four.z, x[3] += four.w;
    }
    if (!is_last) place[256 * i] = make_float4(x[0], x[1], x[2], x[3]);
  }
}

template <Sm90Erase kErase, bool kNormed>
__device__ __forceinline__ void run_block(const GradientArguments &in, VectorGradientShared &shared, const Step &step, int block,
                                          Sums &sums, const float (&whole)[2], const float (&pass)[2][4], const Lane &lane) {
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  const int warp = lane.warp, key = 16 * warp + lane.g;
  BlockDecays decays;
  TreeDecays tree;
  make_products<true>(shared, lane, block, key, decays, tree);
  Block of;
  uint32_t words[4];
  const uint32_t corner = block_corner(warp, block, lane.lane);
  load_tiles_transposed(words, shared_address(shared.q) + corner);
  unpack_rows<kNormed>(of.q, words, shared, 0, block, lane.t);
  load_tiles_transposed(words, shared_address(shared.k) + corner);
  unpack_rows<kNormed>(of.k, words, shared, 1, block, lane.t);
  float reads[8], writes[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    of.dq[i] = decays.start[i] * sums.of_q[8 * block + i];
    of.dk[i] = decays.end[i] * sums.of_keys[8 * block + i];
    reads[i] = of.q[i] * of.dq[i];
    writes[i] = of.k[i] * of.dk[i];
    if constexpr (kSolve) {
      const float read = decays.start[i] * sums.of_k[8 * block + i];
      reads[i] = fmaf(of.k[i], read, reads[i]);
      of.dk[i] += read;
    }
    of.dg[i] = whole[i / 2 % 2] + pass[block / 2][i / 2 % 2 * 2 + block % 2];
  }
  run_pairs<kErase>(shared, of, tree, block, lane.t);
  run_tree<kErase>(shared, of, tree, reads, writes, block, lane);

  if (in.partial) {
    const bool is_first = step.member == 0, is_last = step.member + 1 == in.shape.HV / in.shape.H;
    float *partial = in.partial + static_cast<int64_t>(step.item) * (2 * kChunk * kKey);
    add_heads(of.dq, partial, block, 32 * warp + lane.lane, is_first, is_last);
    add_heads(of.dk, partial, 4 + block, 32 * warp + lane.lane, is_first, is_last);
  }
  // When heads are left these are not the sums yet, and q and k are loaded again.
  if constexpr (kNormed) {
    keep_gradients(shared, of, sums, block, lane);
  } else {
    pack_tile(words, of.dq);
    store_tiles_transposed(shared_address(shared.q) + corner, words[0], words[1], words[2], words[3]);
    pack_tile(words, of.dk);
    store_tiles_transposed(shared_address(shared.k) + corner, words[0], words[1], words[2], words[3]);
  }
  float *dg = shared.decay + (16 * block + 2 * lane.t) * kDecayPitch + key;
#pragma unroll
  for (int i = 0; i < 8; ++i) dg[(i / 4 * 8 + i % 2) * kDecayPitch + i / 2 % 2 * 8] = of.dg[i];
}

// ---- step 5

// dq or dk of a chunk that has not all rows.
__device__ __forceinline__ void store_short_rows(const unsigned char *tiles, void *out, const Sm90Strides &s, const Chunk &chunk,
                                                 int head, int thread) {
  if (!out) return;
  __nv_bfloat16 *to = static_cast<__nv_bfloat16 *>(out) + chunk.batch * s.batch + chunk.start * s.token + head * s.head;
#pragma unroll 1
  for (int i = thread; i < chunk.rows * 16; i += 256) {
    *reinterpret_cast<uint4 *>(to + i / 16 * s.token + i % 16 * 8) =
        *reinterpret_cast<const uint4 *>(tiles + i % 16 / 8 * kTileBytes + swizzled(i / 16, i % 8 * 16));
  }
}

template <Sm90Erase kErase, bool kWide, bool kNormed>
__global__ void __launch_bounds__(256, 1) gradients_vector_kernel(const __grid_constant__ GradientArguments in) {
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  auto &shared = *cuda::dynamic_shared<VectorGradientShared>();
  const int thread = threadIdx.x;
  Lane lane = make_lane(thread % 32);
  if (thread == 0) {
    barrier_init(shared_address(&shared.rows_full), 1);
    barrier_init(shared_address(&shared.keys_full), 1);
    barrier_init_fence();
  }
  __syncthreads();
  launch_wait();
  if (in.d_o_is_zero) {
    zero_tile_rows<256>(shared.d_o, 0, thread);
    fence_async_shared();
  }
  if (thread == 0) {
    const int heads = in.shape.HV / in.shape.H;
    shared.steps[0] = next_step(in.shape, {static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x), heads - 1, 0, 0, 0, {}});
    load_rows<kErase>(in, shared, shared.steps[0]);
    load_keys<kNormed>(in, shared, shared.steps[0]);
  }
  __syncthreads();
  // The gates of a step are loaded at the end of the one before.
  RowDecays decays;
  const auto load_next = [&](const Step &next, int id) {
    if (next.item >= 0) load_gates<kWide>(in, next.chunk, next.value_head, id % 64, id / 64, decays);
  };
  load_next(shared.steps[0], thread);
  for (uint32_t parity = 0; shared.steps[parity].item >= 0; parity ^= 1) {
    const Step &step = shared.steps[parity];  // read again where it is needed: registers for it would be spilled
    Step &next = shared.steps[parity ^ 1];
    uint32_t id = thread + (static_cast<uint32_t>(step.item) >> 31);  // thread
    lane.place(id);
    barrier_wait(shared_address(&shared.rows_full), parity);
    if (step.chunk.rows < kChunk) {
      barrier_wait(shared_address(&shared.keys_full), parity);
      zero_tile_rows<256>(shared.q, step.chunk.rows, thread);
      zero_tile_rows<256>(shared.k, step.chunk.rows, thread);
      zero_tile_rows<256>(shared.d_o, step.chunk.rows, thread);
      if (!kSolve) zero_tile_rows<256>(shared.written, step.chunk.rows, thread);
      fence_async_shared();
      __syncthreads();
    }
    Sums sums;
    {
      const int group = __shfl_sync(0xffffffffu, lane.warp / 4, 0);  // known to be one for a warp
      float d[32] = {};
      hold(d);
      product_fence();
      // Without an erase both warpgroups make the same: wgmma in a branch would be serialized.
      multiply_rows_of(d, kSolve && group == 1 ? shared.e : shared.d_o, shared.written);
      product_commit();
      DroppedBits dropped;
      if (kWide && in.logits) fetch_logits(in, shared, step, id % 64, id / 64);
      if (in.has_gate_gradient) load_dropped(dropped, in, step, 0, id);
      make_decays<kWide>(step.chunk, id / 64, decays);
      keep_decays(shared, decays, id % 64, id / 64);
      store_value_gradient<256>(in, shared.e, kSolve ? &shared.factors.beta : nullptr, step.chunk, step.value_head, id);
      if (in.has_gate_gradient) sum_kept(in, step, shared, dropped, id);
      product_wait<0>();
      hold(d);
      finish_scores<kErase>(in, shared, step, d, id);
    }
    lane.place(id);
    const int group = __shfl_sync(0xffffffffu, lane.warp / 4, 0);
    hold(sums.of_q);
    if constexpr (kSolve) hold(sums.of_k);
    hold(sums.of_keys);
    product_fence();
    multiply_turned_states(sums.of_q, shared.states, shared.d_o, group);
    if constexpr (kSolve) multiply_turned_states(sums.of_k, shared.states, shared.e, group);
    multiply_turned_states(sums.of_keys, shared.d_states, shared.written, group);
    product_commit();
    __syncthreads();
    BlockSides sides;
    barrier_wait(shared_address(&shared.keys_full), parity);
    lane.place(id);
    make_sides<kErase, kNormed>(shared, sides, lane);
    float beta[16];
    if constexpr (kSolve) read_tokens(beta, shared.factors.beta, lane.t);
    product_wait<0>();
    hold(sums.of_q);
    if constexpr (kSolve) hold(sums.of_k);
    hold(sums.of_keys);
    if constexpr (kSolve) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sums.of_k[i] *= -beta[i / 4 * 2 + i % 2];
    }
    __syncthreads();
    if (thread == 0) {
      next = next_step(in.shape, step);
      load_rows<kErase>(in, shared, next);
    }

    lane.place(id);
    const int key = 16 * lane.warp + lane.g;
    float total[4][2], whole[2] = {0.0f, 0.0f}, pass[2][4] = {};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        total[b][n] = shared.total[b][key + 8 * n];
        if (in.has_gate_gradient) whole[n] += shared.kept[b][key + 8 * n];
      }
      whole[n] *= total[0][n] * total[1][n] * total[2][n] * total[3][n];
    }
    multiply_between<kErase>(shared, sides, sums, total, in.scale, pass, lane);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      lane.place(id);
      run_block<kErase, kNormed>(in, shared, step, block, sums, whole, pass, lane);
    }
    const bool is_last = step.member + 1 == in.shape.HV / in.shape.H;
    if constexpr (kNormed) {
      __syncthreads();
      if (is_last && id < 2 * kChunk) add_along(shared, id);
      __syncthreads();
      lane.place(id);
      if (is_last) {
#pragma unroll
        for (int block = 0; block < 4; ++block) {
          project_block(shared, shared.q, sums.of_q + 8 * block, 0, block, lane);
          project_block(shared, shared.k, sums.of_keys + 8 * block, 1, block, lane);
        }
      }
    }
    fence_async_shared();
    __syncthreads();
    id = threadIdx.x + (static_cast<uint32_t>(step.item) >> 31);
    load_next(next, id);
    if (is_last && step.chunk.rows == kChunk) {
      if (thread == 0) {
        for (int half = 0; half < 2; ++half) {
          const uint32_t at = half * kTileBytes;
          if (in.dq) store_box(&in.dq_map, shared_address(shared.q) + at, 64 * half, step.head, step.chunk.start, step.chunk.batch);
          if (in.dk) store_box(&in.dk_map, shared_address(shared.k) + at, 64 * half, step.head, step.chunk.start, step.chunk.batch);
        }
        store_commit();
      }
    } else if (is_last) {
      store_short_rows(shared.q, in.dq, in.dq_strides, step.chunk, step.head, id);
      store_short_rows(shared.k, in.dk, in.dk_strides, step.chunk, step.head, id);
      __syncthreads();
    }
    store_gates<kWide, kNormed>(in, shared, step, id);
    if (thread == 0) {
      store_wait_read<0>();
      load_keys<kNormed>(in, shared, next);
    }
  }
  if (thread == 0) store_wait<0>();
}

template <Sm90Erase kErase, bool kWide, bool kNormed>
cudaError_t launch(const GradientArguments &in, cudaStream_t stream) {
  constexpr int kBytes = sizeof(VectorGradientShared);
  static_assert(kBytes <= 232448);
  int device = 0, count = 1;
  cudaError_t status = cudaGetDevice(&device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  const int64_t items = static_cast<int64_t>(in.shape.slots) * in.shape.H;
  return cuda::launch({dim3(static_cast<unsigned>(items < count ? items : count)), 256, kBytes, stream, 1, true},
                      gradients_vector_kernel<kErase, kWide, kNormed>, in);
}

template <Sm90Erase kErase>
cudaError_t launch(const GradientArguments &in, cudaStream_t stream) {
  if (in.has_l2norm) return launch<kErase, true, true>(in, stream);
  return in.g_type == Sm90Real::kFloat32 ? launch<kErase, true, false>(in, stream) : launch<kErase, false, false>(in, stream);
}

}  // namespace

cudaError_t launch_gradients_vector(const GradientArguments &in, Sm90Erase erase, cudaStream_t stream) {
  return erase == Sm90Erase::kShared ? launch<Sm90Erase::kShared>(in, stream) : launch<Sm90Erase::kNone>(in, stream);
}

}  // namespace fw::sm90
