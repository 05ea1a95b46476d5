// SPDX-License-Identifier: Apache-2.0
// The backward's scan: over the chunks of one segment of one (sequence, head) from the last to the first, the gradient dS of
// the state and that of what a chunk's rows write. dS^T lies as S^T does in the forward scan (sm90_scan.cu): 64 value rows by
// 128 keys in fp32 sums of one warpgroup, a pair of CTAs a head, products with values on M and first operands from registers.
// Roles, CTA r of a pair having values 64r .. 64r + 63:
//   warpgroup 0: warp 0 loads, three stages deep (d_o in the place of v; vector gate: two); warps 1 and 2 store E, from the
//                tile of d_o, and dS.
//   warpgroups 1 and 2, chunk by chunk in turn: scores P as two bf16 images; with a vector gate they are loaded.
//   last warpgroup: the chain; tensor work of a chunk in order of issue:
//          X^T = dS^T K^T                 8 x m64n64k16   K: k, or k exp(G_end - G) of a vector gate; dS leaves as bf16
//          Y^T = d_o^T P                  8 x m64n64k16   meanwhile dS decays, d_o is scaled
//          E^T = (Y + exp(G_end - G) X)^T T   12 x m64n64k16   dV' and T as two bf16 each
//          dS^T += (scale exp(G) d_o)^T Q 4 x m64n128k16  meanwhile E becomes bf16
//          dS^T -= (beta exp(G) E)^T K    4 x m64n128k16
// E is the gradient of beta (V - K S); without an erase it is dV' and the third and fifth products are not made.
// One bf16 each for P, T and dV' misses the bound of dv, dbeta and dg on data of one sign (P: dbeta 1.2, dg 1.2 of the bound,
// T and dV': 2.3): P^T d_o is a large sum, which T^T takes apart again.
// The summary (segments but the first): the same from zero, without keeping; Pi comes from the forward summary.
// Barriers: those of sm90_scan.cu without outputs, and those of sm90_kept.cuh.
// Shared memory a stage: k 16384, q 16384, d_o 8192, T 2 x 8192, factors 2704; P 2 x 2 x 8192 apart; dS 16384; three stages:
// 224 KB. Without an erase one P in each stage and no T: 168 KB. Vector gate: also k exp(G_end - G) 16384, P in each of two
// stages: 194 KB.
#include "ops/recurrence/sm90_chain.cuh"
#include "ops/recurrence/sm90_kept.cuh"

namespace fw::sm90 {
namespace {

template <Sm90Gate kGate, Sm90Erase kErase>
struct __align__(1024) ReverseShared {
  static constexpr int kDepth = kGate == Sm90Gate::kVector ? 2 : 3;
  static constexpr bool kLow = kErase == Sm90Erase::kShared, kApart = kScoresApart<kGate, kErase>;
  static constexpr bool kRowsInStage = true;  // E leaves from the tile of d_o
  Stage<kGate, kErase, kLow, kApart> stage[kDepth];
  unsigned char apart[kApart ? 2 : 0][2 * kTileBytes];
  KeptState kept;
  std::conditional_t<kGate == Sm90Gate::kVector, VectorFactors, Factors> factors[kDepth];
  uint64_t full[kDepth], scored[kDepth], empty[kDepth], tail;
};

// Without a gate and an erase every product is exact: dS is carried divided by the scale, so that d_o stays as it is.
template <Sm90Gate kGate, Sm90Erase kErase>
constexpr bool kUnscaled = kGate == Sm90Gate::kNone && kErase == Sm90Erase::kNone;

template <Sm90Gate kGate, Sm90Erase kErase, bool kKeeps>
__device__ __forceinline__ void run_reverse(const ScanArguments &in, ReverseShared<kGate, kErase> &shared, const Work &work,
                                            float (&s)[64], int thread) {
  constexpr bool kVector = kGate == Sm90Gate::kVector, kScalar = kGate == Sm90Gate::kScalar;
  constexpr bool kSolve = kErase == Sm90Erase::kShared;
  const int warp = thread / 32, lane = thread % 32, t = lane % 4, part = lane / 8;
  const uint32_t corner = swizzled(8 * (part >> 1) + lane % 8, (16 * warp + 8 * (part & 1)) * 2);
  const int chunks = (work.length + kChunk - 1) / kChunk;
  int64_t index = static_cast<int64_t>(work.hv) * in.shape.slots + work.first_slot + chunks - 1;
  uint32_t sa[8][4], kept_parity = 0;
  const auto pack = [&] {
    if constexpr (kUnscaled<kGate, kErase>) {
      float scaled[64];
#pragma unroll
      for (int i = 0; i < 64; ++i) scaled[i] = in.scale * s[i];
      pack_state(sa, scaled);
    } else {
      pack_state(sa, s);
    }
  };
  if constexpr (kUnscaled<kGate, kErase>) {
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] /= in.scale;
  }
  pack();
  Ring<ReverseShared<kGate, kErase>::kDepth> ring;
  int last_slot = 0;
  [[maybe_unused]] int turn = 0;
  float x[32], y[32];
  if (chunks > 0) barrier_wait(shared_address(&shared.full[0]), 0);
  for (int chunk = 0; chunk < chunks; ++chunk, --index) {
    const auto &stage = shared.stage[ring.slot];
    const auto &factors = shared.factors[ring.slot];
    const uint64_t k_sum = rows_along_sum(shared_address(kVector ? stage.k_end : stage.k));
    const uint64_t k_free = rows_along_free(shared_address(stage.k), kTileBytes);
    const uint64_t q_free = rows_along_free(shared_address(stage.q), kTileBytes);
    const uint64_t scores = rows_along_free(shared_address(scores_of(shared, ring.slot, turn)), kTileBytes);
    turn ^= 1;
    product_wait<0>();
    hold(s);
    uint32_t a[4][4], b[4][4], low[4][4];
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      load_tiles_transposed(a[pair], shared_address(stage.v) + corner + 2048 * pair);
    }
    hold(x);
    product_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      multiply_n64(x, sa[step], advance(k_sum, step / 4 * kTileBytes + step % 4 * 32), step > 0);
    }
    product_commit();
    if constexpr (!kVector) barrier_wait(shared_address(&shared.scored[ring.slot]), ring.parity);
    float(&written)[32] = kScalar ? y : x;  // one sum where X needs no factor
    if constexpr (kScalar) hold(y);
    product_fence();
    if constexpr (kSolve) {
      multiply_lower_free(written, a, scores, !kScalar);
      multiply_lower_free(written, a, advance(scores, kTileBytes), 1);
    } else {
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply_n64_free(written, a[step], advance(scores, step * 2048), !kScalar || step > 0);
    }
    product_commit();
    if constexpr (kKeeps) keep_state(shared, in.kept, index, work.rank, sa, s, kept_parity, thread);
    __syncwarp();
    barrier_arrive_at_if(shared_address(&shared.empty[last_slot]), lane % 2, lane < 2 && chunk > 0);
    last_slot = ring.slot;

    // d_o as the first operand of the queries' product, and the decay of dS.
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 four = *reinterpret_cast<const float4 *>(factors.all[t] + 4 * i);
        const float by[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) s[8 * i + e] *= by[e / 4 * 2 + e % 2];
      }
    } else if constexpr (!kUnscaled<kGate, kErase>) {
      float by[16];
      if constexpr (kScalar) {
        read_tokens(by, factors.scale_decay, t);
        const float decay = factors.all[0];
#pragma unroll
        for (int i = 0; i < 64; ++i) s[i] *= decay;
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const uint32_t d = a[i / 4][i % 4];
        b[i / 4][i % 4] = kScalar ? pack_bf16(by[i / 2 * 2] * low_bf16(d), by[i / 2 * 2 + 1] * high_bf16(d))
                                  : pack_bf16(in.scale * low_bf16(d), in.scale * high_bf16(d));
      }
    }
    float rest[16];
    if constexpr (kScalar) read_tokens(rest, factors.rest, t);
    product_wait<0>();
    hold(x);
    if constexpr (kScalar) {
      hold(y);
#pragma unroll
      for (int i = 0; i < 32; ++i) x[i] = fmaf(rest[i / 4 * 2 + i % 2], x[i], y[i]);
    }

    uint32_t c[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      uint32_t &high = c[i / 4][i % 4];
      high = pack_bf16(x[2 * i], x[2 * i + 1]);
      if constexpr (kSolve) low[i / 4][i % 4] = pack_rest(x[2 * i], x[2 * i + 1], high);
    }
    hold(s);
    hold(x);
    product_fence();
    if constexpr (kSolve) {  // E^T = dV'^T T
      const uint64_t solve = rows_along_free(shared_address(stage.solve), kTileBytes);
      const uint64_t solve_low = rows_along_free(shared_address(stage.solve_low), kTileBytes);
      multiply_lower_free(x, c, solve, 0);
      multiply_lower_free(x, c, solve_low, 1);
      multiply_lower_free(x, low, solve, 1);
      product_commit();
    }
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      multiply_n128_free(s, kVector || kUnscaled<kGate, kErase> ? a[step] : b[step], advance(q_free, step * 2048), 1);
    }
    product_commit();
    if constexpr (kSolve) {
      float by[16];
      if constexpr (kScalar) {
        read_tokens(by, factors.beta_decay, t);
      } else {
        read_tokens(by, factors.beta, t);
      }
      product_wait<1>();
      hold(x);
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        c[i / 4][i % 4] = pack_bf16(x[2 * i], x[2 * i + 1]);
        low[i / 4][i % 4] = pack_bf16(-by[i / 2 * 2] * x[2 * i], -by[i / 2 * 2 + 1] * x[2 * i + 1]);
      }
      product_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply_n128_free(s, low[step], advance(k_free, step * 2048), 1);
      product_commit();
    }
    if constexpr (kKeeps) {
      keep_rows(shared, stage.v, c, kept_parity, thread);
      kept_parity ^= 1;
    }
    ring.next();
    if (chunk + 1 < chunks) barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
    product_wait<0>();
    hold(s);
    pack();
  }
  if constexpr (kUnscaled<kGate, kErase>) {
#pragma unroll
    for (int i = 0; i < 64; ++i) s[i] *= in.scale;
  }
}

constexpr int threads_of(Sm90Gate gate) { return gate == Sm90Gate::kVector ? 256 : 512; }

template <Sm90Gate kGate, Sm90Erase kErase, bool kSummary>
__global__ void __launch_bounds__(threads_of(kGate), 1) reverse_kernel(const __grid_constant__ ScanArguments in) {
  constexpr bool kVector = kGate == Sm90Gate::kVector;
  auto &shared = *cuda::dynamic_shared<ReverseShared<kGate, kErase>>();
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    init_chain_barriers(shared, kSummary ? 8 : 9);
    init_kept_barriers(shared.kept);
    barrier_init_fence();
  }
  cluster_barrier();
  launch_wait();
  const Work work = kSummary ? work_of(in, in.segments - 1, 1) : work_of(in, in.segments);
  const int64_t head = static_cast<int64_t>(work.n) * in.shape.HV + work.hv;
  const int64_t turned = head * in.segments + in.segments - 1 - work.segment;  // segments from the last to the first
  if (group == 0) {
    registers_shrink<56>();
    if (thread < 32) {
      load_chunks<kGate, kErase, false, true>(in, shared, work, thread);
    } else if constexpr (!kSummary) {
      const int chunks = (work.length + kChunk - 1) / kChunk;
      const int64_t last = static_cast<int64_t>(work.hv) * in.shape.slots + work.first_slot + chunks - 1;
      store_kept_of(in.kept, shared, work, last, -1, thread);
    }
  } else if (!kVector && group <= 2) {
    if constexpr (!kVector) {
      registers_shrink<104>();
      make_scores<kGate>(in, shared, work, group - 1, thread);
    }
  } else {
    registers_grow<240>();
    float s[64];
    if constexpr (kSummary) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] = 0.0f;
    } else {
      load_state(s, in, turned, work.rank, thread);
    }
    run_reverse<kGate, kErase, !kSummary>(in, shared, work, s, thread);
    if constexpr (kSummary) {
      float *out = in.turned + turned * 2 * (kKey * kKey) + 64 * work.rank * kKey;
#pragma unroll
      for (int i = 0; i < 64; i += 2) {
        *reinterpret_cast<float2 *>(out + state_at(i, thread, 1, kKey)) = make_float2(s[i], s[i + 1]);
      }
    } else if (work.segment == 0) {
      store_state(s, in, head, work.rank, thread);
    }
  }
  cluster_barrier();
}

struct Reverse {
  template <Sm90Gate kGate, Sm90Erase kErase>
  static cudaError_t run(const ScanArguments &in, cudaStream_t stream) {
    return launch_pairs<ReverseShared<kGate, kErase>>(reverse_kernel<kGate, kErase, false>, in, in.segments, threads_of(kGate), stream);
  }
};
struct ReverseSummary {
  template <Sm90Gate kGate, Sm90Erase kErase>
  static cudaError_t run(const ScanArguments &in, cudaStream_t stream) {
    return launch_pairs<ReverseShared<kGate, kErase>>(reverse_kernel<kGate, kErase, true>, in, in.segments - 1, threads_of(kGate), stream);
  }
};

}  // namespace

cudaError_t launch_reverse(const ScanArguments &in, Sm90Gate gate, Sm90Erase erase, cudaStream_t stream) {
  return dispatch_rows<Reverse>(gate, erase, in, stream);
}

cudaError_t launch_reverse_summary(const ScanArguments &in, Sm90Gate gate, Sm90Erase erase, cudaStream_t stream) {
  return dispatch_rows<ReverseSummary>(gate, erase, in, stream);
}

}  // namespace fw::sm90
