// SPDX-License-Identifier: Apache-2.0
// The scan over chunks of one (sequence, head), with the outputs. The state is kept transposed, S^T, 64 value rows by
// 128 key columns in fp32 sums of one warpgroup; every product has values on M and takes its first operand from registers.
// Grid: kChains 1: CTA pairs (clusters), each CTA one half of the values; kChains 2: one CTA, two chain warpgroups.
// Roles: warpgroup 0: warp 0 loads, kStages deep, k q T P fetched half by half and multicast to the pair, and zeroes the
//        rows past the end in a last, partial chunk; warp 1 + chain stores the chain's outputs.
//        warpgroups 1 ..: chains, each with 64 values; tensor work of a chunk in order of issue:
//          X^T = S^T K^T                  8 x m64n64k16   meanwhile the last outputs leave
//          O^T = S^T Q^T, first half      4 x m64n64k16   meanwhile S decays, W^T = beta (V^T - exp(G) X^T)
//          V'^T = W^T T^T                 4 x m64n64k16
//          O^T, second half               4 x m64n64k16   meanwhile V' becomes bf16
//          S^T += (V' exp(G_end - G))^T K 4 x m64n128k16  meanwhile O is scaled
//          O^T += V'^T P^T                4 x m64n64k16   meanwhile S^T becomes bf16
// Barriers: full[s] (loads to chains), empty[s] (chain warps of both CTAs to the loaders), tail (loads of a partial chunk
// to the loader itself), o_filled, o_emptied (a chain's warps to its storing warp and back).
// Shared memory a stage: k 16384, q 16384, v 8192 a chain, T 8192, P 8192, factors 1040; staging of o 8192 a chain.
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/product.cuh"
#include "ops/recurrence/sm90_scan.cuh"

namespace fw::sm90 {
namespace {

constexpr int kStages = 3;

template <int kChains>
struct __align__(1024) Stage {
  unsigned char k[2 * kTileBytes];
  unsigned char q[2 * kTileBytes];
  unsigned char v[kChains * kTileBytes];
  unsigned char solve[kTileBytes];
  unsigned char scores[kTileBytes];
  Factors factors;
};

template <int kChains>
struct __align__(1024) ScanShared {
  Stage<kChains> stage[kStages];
  unsigned char o[kChains * kTileBytes];
  uint64_t full[kStages], empty[kStages], tail, o_filled[kChains], o_emptied[kChains];
};

template <Sm90Gate kGate, Sm90Erase kErase, int kChains>
__device__ __forceinline__ void load_chunks(const ScanArguments &in, ScanShared<kChains> &shared, const Span &span,
                                            int hv, int rank, int lane) {
  constexpr bool kPair = kChains == 1;
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  constexpr bool kFactors = kSolve || kGate == Sm90Gate::kScalar;
  constexpr uint32_t kBytes = (4 + kChains + kSolve + 1) * kTileBytes + kFactors * sizeof(Factors);
  const int h = hv / (in.shape.HV / in.shape.H);
  const int chunks = (span.length + kChunk - 1) / kChunk;
  Ring<kStages> ring;
  for (int c = 0; c < chunks; ++c, ring.next()) {
    Stage<kChains> &stage = shared.stage[ring.slot];
    const int row = span.start + c * kChunk, left = span.length - c * kChunk;
    const uint32_t full = shared_address(&shared.full[ring.slot]);
    const uint32_t barrier = left < kChunk ? shared_address(&shared.tail) : full;
    const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + span.first_slot + c;
    barrier_wait(shared_address(&shared.empty[ring.slot]), ring.parity ^ 1);
    if (lane == 0) {
      barrier_expect_bytes(barrier, kBytes);
      const uint32_t k = shared_address(stage.k), q = shared_address(stage.q);
      const uint32_t solve = shared_address(stage.solve), scores = shared_address(stage.scores);
      const unsigned char *from_solve = in.tiles.solve + index * kTileBytes;
      const unsigned char *from_scores = in.tiles.scores + index * kTileBytes;
      if constexpr (kPair) {
        const int half = rank * kTileBytes, part = rank * (kTileBytes / 2);
        load_box_to(k + half, &in.k, barrier, 3, 64 * rank, h, row, span.batch);
        load_box_to(q + half, &in.q, barrier, 3, 64 * rank, h, row, span.batch);
        load_box(shared_address(stage.v), &in.v, barrier, 64 * rank, hv, row, span.batch);
        if constexpr (kSolve) load_bytes_to(solve + part, from_solve + part, kTileBytes / 2, barrier, 3);
        load_bytes_to(scores + part, from_scores + part, kTileBytes / 2, barrier, 3);
      } else {
        for (int half = 0; half < 2; ++half) {
          load_box(k + half * kTileBytes, &in.k, barrier, 64 * half, h, row, span.batch);
          load_box(q + half * kTileBytes, &in.q, barrier, 64 * half, h, row, span.batch);
          load_box(shared_address(stage.v) + half * kTileBytes, &in.v, barrier, 64 * half, hv, row, span.batch);
        }
        if constexpr (kSolve) load_bytes(solve, from_solve, kTileBytes, barrier);
        load_bytes(scores, from_scores, kTileBytes, barrier);
      }
      if constexpr (kFactors) {
        load_bytes(shared_address(&stage.factors), in.tiles.factors + index, sizeof(Factors), barrier);
      }
    }
    __syncwarp();
    if (left < kChunk) {
      barrier_wait(barrier, 0);
      for (int i = lane; i < (kChunk - left) * 8; i += 32) {
        const int offset = (left + i / 8) * 128 + i % 8 * 16;
        for (int half = 0; half < 2; ++half) {
          *reinterpret_cast<uint4 *>(stage.k + half * kTileBytes + offset) = make_uint4(0, 0, 0, 0);
          *reinterpret_cast<uint4 *>(stage.q + half * kTileBytes + offset) = make_uint4(0, 0, 0, 0);
        }
        for (int half = 0; half < kChains; ++half) {
          *reinterpret_cast<uint4 *>(stage.v + half * kTileBytes + offset) = make_uint4(0, 0, 0, 0);
        }
      }
      fence_async_shared();
      __syncwarp();
      if (lane == 0) barrier_arrive(full);
    }
  }
}

// One warp: the outputs of one chain, a chunk at a time, from its staging tile to rows of o.
template <int kChains>
__device__ __forceinline__ void store_outputs(const ScanArguments &in, ScanShared<kChains> &shared, const Span &span,
                                              int hv, int chain, int value, int lane) {
  const unsigned char *staging = shared.o + chain * kTileBytes;
  const uint32_t filled = shared_address(&shared.o_filled[chain]), emptied = shared_address(&shared.o_emptied[chain]);
  uint32_t parity = 0;
  for (int row = span.start, end = span.start + span.length; row < end; row += kChunk, parity ^= 1) {
    barrier_wait(filled, parity);
    if (end - row >= kChunk) {
      if (lane == 0) {
        store_box(&in.o, shared_address(staging), value, hv, row, span.batch);
        store_commit();
        store_wait_read<0>();
        barrier_arrive(emptied);
      }
    } else {
      __nv_bfloat16 *out = static_cast<__nv_bfloat16 *>(in.o_rows) + span.batch * in.o_strides.batch +
                           row * in.o_strides.token + hv * in.o_strides.head + value;
      for (int i = lane; i < (end - row) * 8; i += 32) {
        *reinterpret_cast<uint4 *>(out + i / 8 * in.o_strides.token + i % 8 * 8) =
            *reinterpret_cast<const uint4 *>(staging + swizzled(i / 8, i % 8 * 16));
      }
    }
  }
  if (lane == 0) store_wait<0>();
}

__device__ __forceinline__ float2 pair_at(const float *factors, int tile, int t) {
  return *reinterpret_cast<const float2 *>(factors + 8 * tile + 2 * t);
}

// The 64x128 sums as eight m64k16 first operands.
__device__ __forceinline__ void pack_state(uint32_t (&a)[8][4], const float (&s)[64]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) a[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
}

template <Sm90Gate kGate, Sm90Erase kErase, int kChains>
__device__ __forceinline__ void run_chain(const ScanArguments &in, ScanShared<kChains> &shared, const Span &span, int n,
                                          int hv, int chain, int value, int thread) {
  constexpr bool kPair = kChains == 1, kSolve = kErase == Sm90Erase::kShared, kScalar = kGate == Sm90Gate::kScalar;
  const int warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4, part = lane / 8;
  const int chunks = (span.length + kChunk - 1) / kChunk;
  // This lane's row of the 8x8 tiles of a [tokens][values] tile; + 2048 bytes for 16 tokens.
  const uint32_t corner = swizzled(8 * (part >> 1) + lane % 8, (16 * warp + 8 * (part & 1)) * 2);
  const uint32_t staging = shared_address(shared.o) + chain * kTileBytes + corner;
  const uint32_t filled = shared_address(&shared.o_filled[chain]), emptied = shared_address(&shared.o_emptied[chain]);
  const int64_t state_base = (static_cast<int64_t>(n) * in.shape.HV + hv) * (kKey * kKey) +
                             (value + 16 * warp + g) * in.state_value + 2 * t * in.state_key;
  float s[64], x[32], o[32] = {};
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const int64_t at = state_base + (i & 2) * 4 * in.state_value + (i / 4 * 8 + (i & 1)) * in.state_key;
    s[i] = in.initial_state ? in.initial_state[at] : 0.0f;
  }
  const auto emit = [&](int c) {
    if (lane == 0) barrier_wait(emptied, (c & 1) ^ 1);
    __syncwarp();
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      const float *d = o + 8 * pair;
      store_tiles_transposed(staging + 2048 * pair, pack_bf16(d[0], d[1]), pack_bf16(d[2], d[3]),
                             pack_bf16(d[4], d[5]), pack_bf16(d[6], d[7]));
    }
    fence_async_shared();
    __syncwarp();
    if (lane == 0) barrier_arrive(filled);
  };
  const auto release = [&](int slot) {
    const uint32_t empty = shared_address(&shared.empty[slot]);
    if constexpr (kPair) {
      if (lane < 2) barrier_arrive_at(empty, lane);
    } else {
      if (lane == 0) barrier_arrive(empty);
    }
  };

  uint32_t sa[8][4];
  pack_state(sa, s);
  Ring<kStages> ring;
  int last_slot = 0;
  for (int c = 0; c < chunks; ++c, ring.next()) {
    const Stage<kChains> &stage = shared.stage[ring.slot];
    const uint32_t k = shared_address(stage.k), q = shared_address(stage.q);
    barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);

    // The compiler follows sums in flight around the loop only up to a wait for all of them.
    product_wait<0>();
    hold(s);
    hold(o);
    uint32_t a[4][4];
    if constexpr (kSolve) {
      hold(x);
      product_fence();
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        multiply_n64(x, sa[step], rows_along_sum(k + step / 4 * kTileBytes + step % 4 * 32), step > 0);
      }
      product_commit();
    }

    // The last outputs are complete: hand them over, and the slot back; then the first half of S^T Q^T.
    if (c > 0) {
      emit(c - 1);
      release(last_slot);
    }
    last_slot = ring.slot;
    hold(o);
    product_fence();
#pragma unroll
    for (int step = 0; step < (kSolve ? 4 : 8); ++step) {
      multiply_n64(o, sa[step], rows_along_sum(q + step / 4 * kTileBytes + step % 4 * 32), step > 0);
    }
    product_commit();
    if constexpr (kScalar) {
      const float decay = stage.factors.all[0];
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] *= decay;
    }
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      load_tiles_transposed(a[pair], shared_address(stage.v) + chain * kTileBytes + corner + 2048 * pair);
    }

    if constexpr (kSolve) {
      float2 beta[8], beta_decay[8];
#pragma unroll
      for (int tile = 0; tile < 8; ++tile) {
        beta[tile] = pair_at(stage.factors.beta, tile, t);
        beta_decay[tile] = kScalar ? pair_at(stage.factors.beta_decay, tile, t) : beta[tile];
      }
      product_wait<1>();
      hold(x);
      // W^T = beta (V^T - exp(G) X^T), then V'^T = W^T T^T, the second half of S^T Q^T behind it.
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int tile = 2 * (i / 4) + (i % 4) / 2, e = 4 * tile + 2 * (i % 2);
        const uint32_t v = a[i / 4][i % 4];
        a[i / 4][i % 4] = pack_bf16(beta[tile].x * low_bf16(v) - beta_decay[tile].x * x[e],
                                    beta[tile].y * high_bf16(v) - beta_decay[tile].y * x[e + 1]);
      }
      hold(x);
      product_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        multiply_n64(x, a[step], rows_along_sum(shared_address(stage.solve) + step * 32), step > 0);
      }
      product_commit();
#pragma unroll
      for (int step = 4; step < 8; ++step) {
        multiply_n64(o, sa[step], rows_along_sum(q + kTileBytes + step % 4 * 32), 1);
      }
      product_commit();
    }
    float2 rest[8];
    if constexpr (kScalar) {
#pragma unroll
      for (int tile = 0; tile < 8; ++tile) rest[tile] = pair_at(stage.factors.rest, tile, t);
    }
    if constexpr (kSolve) {
      product_wait<1>();
      hold(x);
    }

    // S^T += (V' exp(G_end - G))^T K
    hold(s);
    uint32_t b[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int tile = 2 * (i / 4) + (i % 4) / 2, e = 4 * tile + 2 * (i % 2);
      uint32_t &v = a[i / 4][i % 4];
      if constexpr (kScalar) {
        b[i / 4][i % 4] = kSolve ? pack_bf16(rest[tile].x * x[e], rest[tile].y * x[e + 1])
                                 : pack_bf16(rest[tile].x * low_bf16(v), rest[tile].y * high_bf16(v));
      }
      if constexpr (kSolve) v = pack_bf16(x[e], x[e + 1]);
    }
    product_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      multiply_n128_free(s, kScalar ? b[step] : a[step], rows_along_free(k + step * 2048, kTileBytes), 1);
    }
    product_commit();

    // O^T = scale exp(G) S^T Q^T + V'^T P^T
    product_wait<1>();
    hold(o);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      float2 decay = make_float2(in.scale, in.scale);
      if constexpr (kScalar) decay = pair_at(stage.factors.scale_decay, tile, t);
      o[4 * tile] *= decay.x, o[4 * tile + 1] *= decay.y;
      o[4 * tile + 2] *= decay.x, o[4 * tile + 3] *= decay.y;
    }
    hold(o);
    product_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      multiply_n64(o, a[step], rows_along_sum(shared_address(stage.scores) + step * 32), 1);
    }
    product_commit();
    product_wait<1>();
    hold(s);
    pack_state(sa, s);
  }
  product_wait<0>();
  hold(s);
  hold(o);
  if (chunks > 0) emit(chunks - 1);
  if (in.final_state) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      in.final_state[state_base + (i & 2) * 4 * in.state_value + (i / 4 * 8 + (i & 1)) * in.state_key] = s[i];
    }
  }
}

template <Sm90Gate kGate, Sm90Erase kErase, int kChains>
__global__ void __launch_bounds__(128 * (kChains + 1), 1) scan_kernel(const __grid_constant__ ScanArguments in) {
  extern __shared__ __align__(1024) unsigned char raw[];
  ScanShared<kChains> &shared = *reinterpret_cast<ScanShared<kChains> *>(raw);
  constexpr bool kPair = kChains == 1;
  const int thread = threadIdx.x, group = thread / 128;
  const int rank = kPair ? static_cast<int>(cluster_rank()) : 0;
  const int tile = kPair ? blockIdx.x / 2 : blockIdx.x, n = tile / in.shape.HV, hv = tile % in.shape.HV;
  const Span span = span_of(in.shape, n);
  if (thread == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared_address(&shared.full[s]), 1);
      barrier_init(shared_address(&shared.empty[s]), 4 * kChains * (kPair ? 2 : 1));
    }
    barrier_init(shared_address(&shared.tail), 1);
    for (int chain = 0; chain < kChains; ++chain) {
      barrier_init(shared_address(&shared.o_filled[chain]), 4);
      barrier_init(shared_address(&shared.o_emptied[chain]), 1);
    }
    barrier_init_fence();
  }
  if constexpr (kPair) {
    cluster_barrier();
  } else {
    __syncthreads();
  }
  launch_wait();
  if (group == 0) {
    registers_shrink<56>();
    const int warp = thread / 32;
    if (warp == 0) {
      load_chunks<kGate, kErase, kChains>(in, shared, span, hv, rank, thread);
    } else if (warp <= kChains) {
      store_outputs(in, shared, span, hv, warp - 1, (kPair ? rank : warp - 1) * 64, thread % 32);
    }
  } else {
    registers_grow<kPair ? 240 : 224>();
    const int chain = group - 1;
    run_chain<kGate, kErase, kChains>(in, shared, span, n, hv, chain, (kPair ? rank : chain) * 64, thread % 128);
  }
  if constexpr (kPair) cluster_barrier();
}

template <Sm90Gate kGate, Sm90Erase kErase, int kChains>
cudaError_t launch(const ScanArguments &in, cudaStream_t stream) {
  auto kernel = scan_kernel<kGate, kErase, kChains>;
  constexpr int kBytes = sizeof(ScanShared<kChains>);
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (status != cudaSuccess) return status;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(in.shape.N) * in.shape.HV * (kChains == 1 ? 2 : 1));
  config.blockDim = dim3(128 * (kChains + 1));
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {2, 1, 1};
  config.attrs = attributes;
  config.numAttrs = kChains == 1 ? 2 : 1;
  return cudaLaunchKernelEx(&config, kernel, in);
}

template <Sm90Gate kGate, Sm90Erase kErase>
cudaError_t launch(const ScanArguments &in, int chains, cudaStream_t stream) {
  return chains == 1 ? launch<kGate, kErase, 1>(in, stream) : launch<kGate, kErase, 2>(in, stream);
}

}  // namespace

cudaError_t launch_scan(const ScanArguments &in, Sm90Gate gate, Sm90Erase erase, int chains, cudaStream_t stream) {
  if (erase == Sm90Erase::kShared) {
    if (gate == Sm90Gate::kNone) return launch<Sm90Gate::kNone, Sm90Erase::kShared>(in, chains, stream);
    if (gate == Sm90Gate::kScalar) return launch<Sm90Gate::kScalar, Sm90Erase::kShared>(in, chains, stream);
  } else {
    if (gate == Sm90Gate::kNone) return launch<Sm90Gate::kNone, Sm90Erase::kNone>(in, chains, stream);
    if (gate == Sm90Gate::kScalar) return launch<Sm90Gate::kScalar, Sm90Erase::kNone>(in, chains, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fw::sm90
