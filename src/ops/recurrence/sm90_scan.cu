// SPDX-License-Identifier: Apache-2.0
// The scan over the chunks of one segment of one (sequence, head). The state is kept transposed, S^T, 64 value rows by
// 128 key columns in fp32 sums of one warpgroup; every chain product has values on M and takes its first operand from
// registers. Grid: pairs of CTAs (clusters); 512 threads, 256 with
// a vector gate, 384 for the summary.
// Roles of the scan with outputs, CTA r of a pair having values 64r .. 64r + 63:
//   warpgroup 0: warp 0 loads, kStages deep; k, q and T are fetched half by half and multicast to the pair; in a last,
//                partial chunk it zeroes the rows past the end. Warp 1 stores the outputs.
//   warpgroups 1 and 2, chunk by chunk in turn: scores P = scale * masked, gated Q K^T, 8 x m64n64k16, into the slot (one
//                warpgroup took 1.3 us a chunk and held the chain up); with a vector gate P is loaded.
//   last warpgroup: the chain; tensor work of a chunk in order of issue:
//          X^T = S^T K^T                  8 x m64n64k16   meanwhile the last outputs leave
//          O^T = S^T Q^T                  8 x m64n64k16   meanwhile W^T = beta (V^T - exp(G) X^T)
//          V'^T = W^T T^T                12 x m64n64k16   W and T as two bf16 each; meanwhile S decays
//          S^T += (V' exp(G_end - G))^T K 4 x m64n128k16  meanwhile O is scaled, V' split
//          O^T += V'^T P^T               12 x m64n64k16   V' and P as two bf16; meanwhile S^T becomes bf16
// One bf16 for T, W, P or the V' of the outputs misses the error bound of o when q, k, v and the state have one sign (up to
// 3.2 times the yardstick at 64 tokens, allowed 2.0; with two of each 0.9): errors of one row that the next rows would
// correct stay to the end of the chunk.
// With independent erase keys prep has made of them tiles W, B, K, Q and P (sm90_prep_independent.cu): X^T = S^T W^T, no
// solve, S^T += X^T B + V^T K (8 x m64n128k16), O^T += V^T P^T (4 x m64n64k16).
// Roles of the summary (what a segment does to any state): warpgroup 1 the same chain without outputs, from zero, giving
// H^T; warpgroup 2 the chain with V = 0 from rows 64r .. of the identity, giving rows of Pi^T. No q, no scores.
// Barriers: full[s] (loads to all), scored[s] (scores to the chain), empty[s] (chain warps of both CTAs to the loaders, and to
// the scores, which lie apart from the stages and have the place of those of two chunks before),
// tail (loads of a partial chunk to the loader itself), o_filled, o_emptied (the chain's warps to the storing warp, back).
// X is read by the erase key: k, or p, which has a tile of its own. A write gate multiplies V in fp32.
// Shared memory a stage: k 16384, q 16384, v 8192, T 2 x 8192, factors 2704; P 2 x 2 x 8192; staging of o 8192; 3 stages:
// 216 KB, with p (16384) 2 stages, 189 KB; without an erase no T, one P in each of 3 stages, 160 KB. With a vector gate also
// k exp(G_end - G) 16384, write gate 8192, P 2 x 8192, factors 896; 2 stages: 186 KB, 202 KB with a write gate, 170 KB with
// independent keys.
#include "ops/recurrence/sm90_chain.cuh"
#include "ops/recurrence/sm90_kept.cuh"

namespace fw::sm90 {
namespace {

// One warpgroup: 64 rows of S^T over all chunks of the segment. kValues: V is read, else it is 0. kOutputs: o is written.
// kKeeps: the states at the chunks' starts and V' are kept.
template <Sm90Gate kGate, Sm90Erase kErase, bool kValues, bool kOutputs, bool kKeeps = false, class Shared>
__device__ __forceinline__ void run_chain(const ScanArguments &in, Shared &shared, const Work &work, float (&s)[64], int thread) {
  constexpr bool kVector = kGate == Sm90Gate::kVector;
  constexpr bool kSolve = kSolves<kErase>, kRead = kReads<kErase>, kScalar = kGate == Sm90Gate::kScalar;
  const int warp = thread / 32, lane = thread % 32, t = lane % 4, part = lane / 8;
  // This lane's row of the 8x8 tiles of a [tokens][values] tile; + 2048 bytes for 16 tokens.
  const uint32_t corner = swizzled(8 * (part >> 1) + lane % 8, (16 * warp + 8 * (part & 1)) * 2);
  const uint32_t staging = shared_address(shared.o) + corner;
  // Without an erase what a chunk writes has sums of its own, which fp32 adds to the state: the tensor cores cut their sums, and
  // where no operand is rounded (no gate) the errors of the cuts of all chunks are more than the bound allows.
  constexpr bool kApart = !kRead && kValues;
  float x[32], o[32] = {};
  [[maybe_unused]] float fresh[kApart ? 64 : 1];
  uint32_t emit_parity = 0;
  const auto pack_outputs = [&](uint32_t (&po)[16]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) po[i] = pack_bf16(o[2 * i], o[2 * i + 1]);
  };
  const auto emit = [&](const uint32_t (&po)[16]) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      store_tiles_transposed(staging + 2048 * pair, po[4 * pair], po[4 * pair + 1], po[4 * pair + 2], po[4 * pair + 3]);
    }
    __syncwarp();
    barrier_arrive_if(shared_address(&shared.o_filled), lane == 0);
  };

  uint32_t sa[8][4];
  pack_state(sa, s);
  Ring<Shared::kDepth> ring;
  [[maybe_unused]] int64_t index = static_cast<int64_t>(work.hv) * in.shape.slots + work.first_slot;
  [[maybe_unused]] uint32_t kept_parity = 0;
  int last_slot = 0;
  [[maybe_unused]] int turn = 0;
  if (work.length > 0) barrier_wait(shared_address(&shared.full[0]), 0);
  for (int left = work.length; left > 0; left -= kChunk) {
    const auto &stage = shared.stage[ring.slot];
    const auto &factors = shared.factors[ring.slot];
    const uint64_t x_sum = rows_along_sum(shared_address(kHasX<kGate, kErase> ? stage.x : stage.k));
    const uint64_t q_sum = rows_along_sum(shared_address(stage.q));
    const uint64_t k_free = rows_along_free(shared_address(kVector ? stage.k_end : stage.k), kTileBytes);
    const uint64_t b_free = rows_along_free(shared_address(stage.b_end), kTileBytes);
    const uint64_t solve = rows_along_sum(shared_address(stage.solve));
    // The compiler follows sums in flight around the loop only up to a wait for all of them.
    product_wait<0>();
    hold(s);
    if constexpr (kOutputs) hold(o);
    uint32_t a[4][4] = {}, low[4][4], po[16];
    float beta[16], by_decay[16];
    if constexpr (kValues) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        load_tiles_transposed(a[pair], shared_address(stage.v) + corner + 2048 * pair);
      }
    }
    if constexpr (kSolve) {
      read_tokens(beta, factors.beta, t);
      if constexpr (kScalar) read_tokens(by_decay, factors.beta_decay, t);
    }
    float decay = 1.0f;
    if constexpr (kScalar) decay = factors.all[0];
    if constexpr (kRead) {
      hold(x);
      product_fence();
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        multiply_n64(x, sa[step], advance(x_sum, step / 4 * kTileBytes + step % 4 * 32), step > 0);
      }
      product_commit();
    }

    // S^T Q^T; the last outputs are handed over, and the slot back.
    if constexpr (kOutputs) {
      pack_outputs(po);
      hold(o);
      product_fence();
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        multiply_n64(o, sa[step], advance(q_sum, step / 4 * kTileBytes + step % 4 * 32), step > 0);
      }
      product_commit();
      emit(po);
    }
    if constexpr (kKeeps) keep_state(shared, in.kept, index, work.rank, sa, s, kept_parity, thread);
    __syncwarp();
    barrier_arrive_at_if(shared_address(&shared.empty[last_slot]), lane % 2, lane < 2 && left != work.length);
    last_slot = ring.slot;
    float w[32];
    if constexpr (kSolve && kValues) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const uint32_t v = a[i / 8][i / 2 % 4];
        w[i] = beta[i / 8 * 4 + i / 4 % 2 * 2 + i % 2] * (i % 2 ? high_bf16(v) : low_bf16(v));
      }
      if constexpr (kHasWriteGate<kGate, kErase>) {
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
          load_tiles_transposed(low[pair], shared_address(stage.write_gate) + corner + 2048 * pair);
        }
#pragma unroll
        for (int i = 0; i < 32; ++i) w[i] *= i % 2 ? high_bf16(low[i / 8][i / 2 % 4]) : low_bf16(low[i / 8][i / 2 % 4]);
      }
      hold(w);
    }

    if constexpr (kSolve) {
      product_wait<kOutputs ? 1 : 0>();
      hold(x);
      // W^T = beta (V^T - exp(G) X^T), then V'^T = W^T T^T
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int n = 4 * (i / 4) + i % 4 / 2 * 2, e = 2 * n + 2 * (i % 2);
        const float *by = kScalar ? by_decay : beta;
        w[2 * i] = kValues ? fmaf(-by[n], x[e], w[2 * i]) : -by[n] * x[e];
        w[2 * i + 1] = kValues ? fmaf(-by[n + 1], x[e + 1], w[2 * i + 1]) : -by[n + 1] * x[e + 1];
        a[i / 4][i % 4] = pack_bf16(w[2 * i], w[2 * i + 1]);
      }
      hold(x);
      product_fence();
      const uint64_t solve_low = rows_along_sum(shared_address(stage.solve_low));
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply_n64(x, a[step], advance(solve, step * 32), step > 0);
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply_n64(x, a[step], advance(solve_low, step * 32), 1);
#pragma unroll
      for (int i = 0; i < 16; ++i) low[i / 4][i % 4] = pack_rest(w[2 * i], w[2 * i + 1], a[i / 4][i % 4]);
      product_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply_n64(x, low[step], advance(solve, step * 32), 1);
      product_commit();
    }
    float rest[16], scale_decay[16];
    if constexpr (kScalar) {
      read_tokens(rest, factors.rest, t);
      if constexpr (kOutputs) read_tokens(scale_decay, factors.scale_decay, t);
    }
    if constexpr (kScalar) {
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] *= decay;
    }
    if constexpr (kVector) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 four = *reinterpret_cast<const float4 *>(factors.all[t] + 4 * i);
        const float by[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) s[8 * i + e] *= by[e / 4 * 2 + e % 2];
      }
    }
    product_wait<0>();
    if constexpr (kRead) hold(x);

    // S^T += (V' exp(G_end - G))^T K
    hold(s);
    if constexpr (kApart) hold(fresh);
    uint32_t b[4][4];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int n = 4 * (i / 4) + i % 4 / 2 * 2, e = 2 * n + 2 * (i % 2);
      uint32_t &v = a[i / 4][i % 4];
      if constexpr (kScalar) {
        b[i / 4][i % 4] = kSolve ? pack_bf16(rest[n] * x[e], rest[n + 1] * x[e + 1])
                                 : pack_bf16(rest[n] * low_bf16(v), rest[n + 1] * high_bf16(v));
      }
      if constexpr (kSolve) v = pack_bf16(x[e], x[e + 1]);
      if constexpr (kRead && !kSolve) b[i / 4][i % 4] = pack_bf16(x[e], x[e + 1]);
    }
    product_fence();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if constexpr (kApart) multiply_n128_free(fresh, kScalar ? b[step] : a[step], advance(k_free, step * 2048), step > 0);
      if constexpr (kRead && (kValues || kSolve)) {
        multiply_n128_free(s, kScalar ? b[step] : a[step], advance(k_free, step * 2048), 1);
      }
      if constexpr (kRead && !kSolve) multiply_n128_free(s, b[step], advance(b_free, step * 2048), 1);
    }
    product_commit();
    if constexpr (kKeeps) {
      if constexpr (kSolve) keep_rows(shared, shared.o, a, kept_parity, thread);
      ++index, kept_parity ^= 1;
    }

    if constexpr (kOutputs) {
      // O^T = scale exp(G) S^T Q^T + V'^T P^T
      product_wait<1>();
      hold(o);
#pragma unroll
      for (int i = 0; i < 32; ++i) o[i] *= kScalar ? scale_decay[i / 4 * 2 + i % 2] : kVector ? 1.0f : in.scale;
      if constexpr (kSolve) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const int e = 2 * (4 * (i / 4) + i % 4 / 2 * 2) + 2 * (i % 2);
          low[i / 4][i % 4] = pack_rest(x[e], x[e + 1], a[i / 4][i % 4]);
        }
      }
      if constexpr (!kVector) barrier_wait(shared_address(&shared.scored[ring.slot]), ring.parity);
      const uint64_t scores = rows_along_sum(shared_address(scores_of(shared, ring.slot, turn)));
      turn ^= 1;
      hold(o);
      product_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) multiply_n64(o, a[step], advance(scores, step * 32), 1);
      if constexpr (kSolve) {
#pragma unroll
        for (int step = 0; step < 4; ++step) multiply_n64(o, low[step], advance(scores, step * 32), 1);
        const uint64_t scores_low = advance(scores, kTileBytes);
#pragma unroll
        for (int step = 0; step < 4; ++step) multiply_n64(o, a[step], advance(scores_low, step * 32), 1);
      }
      product_commit();
      barrier_wait(shared_address(&shared.o_emptied), emit_parity);
      emit_parity ^= 1;
    }
    ring.next();
    if (left > kChunk) barrier_wait(shared_address(&shared.full[ring.slot]), ring.parity);
    product_wait<kOutputs ? 1 : 0>();
    hold(s);
    if constexpr (kApart) {
      hold(fresh);
#pragma unroll
      for (int i = 0; i < 64; ++i) s[i] += fresh[i];
    }
    pack_state(sa, s);
  }
  product_wait<0>();
  hold(s);
  hold(o);
  if (kOutputs && work.length > 0) {
    uint32_t po[16];
    pack_outputs(po);
    emit(po);
  }
}

// Warpgroups: loads and stores; two for scores (no or scalar gate) or the first chain of a summary; the chain.
constexpr int threads_of(Sm90Gate gate, bool summary) {
  return summary ? 384 : gate == Sm90Gate::kVector ? 256 : 512;
}

template <Sm90Gate kGate, Sm90Erase kErase, bool kSummary>
__global__ void __launch_bounds__(threads_of(kGate, kSummary), 1) scan_kernel(const __grid_constant__ ScanArguments in) {
  constexpr bool kVector = kGate == Sm90Gate::kVector;
  auto &shared = *cuda::dynamic_shared<ScanShared<kGate, kErase>>();
  const int group = threadIdx.x / 128, thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    init_chain_barriers(shared, kSummary ? 16 : 8);
    barrier_init(shared_address(&shared.o_filled), 4);
    barrier_init(shared_address(&shared.o_emptied), 1);
    barrier_init_fence();
  }
  cluster_barrier();
  if constexpr (kSummary) launch_next();
  launch_wait();
  const Work work = work_of(in, kSummary && !in.turned ? in.segments - 1 : in.segments);
  const int64_t head = static_cast<int64_t>(work.n) * in.shape.HV + work.hv;
  if (group == 0) {
    registers_shrink<56>();
    if (thread < 32) {
      load_chunks<kGate, kErase, kSummary>(in, shared, work, thread);
    } else if (!kSummary && thread < 64) {
      store_outputs(in, shared, work, thread - 32);
    }
  } else if constexpr (kSummary) {
    registers_grow<224>();
    float s[64];
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int64_t at = 64 * work.rank * kKey + state_at(i, thread, 1, kKey);
      s[i] = group == 2 && at / kKey == at % kKey ? 1.0f : 0.0f;
    }
    if (group == 1) {
      run_chain<kGate, kErase, true, false>(in, shared, work, s, thread);
    } else {
      run_chain<kGate, kErase, false, false>(in, shared, work, s, thread);
    }
    float *out = in.summary + ((head * in.segments + work.segment) * 2 + group - 1) * (kKey * kKey);
#pragma unroll
    for (int i = 0; i < 64; i += 2) {
      const int at = 64 * work.rank * kKey + static_cast<int>(state_at(i, thread, 1, kKey));
      if (group == 1) {
        *reinterpret_cast<float2 *>(out + at) = make_float2(s[i], s[i + 1]);
      } else {
        out[summary_word(at / kKey, at % kKey)] = s[i], out[summary_word(at / kKey, at % kKey + 1)] = s[i + 1];
        if (float *turned = in.turned) {
          turned += ((head * in.segments + in.segments - 1 - work.segment) * 2 + 1) * (kKey * kKey);
          turned[summary_word(at % kKey, at / kKey)] = s[i], turned[summary_word(at % kKey + 1, at / kKey)] = s[i + 1];
        }
      }
    }
  } else if (!kVector && group <= 2) {
    if constexpr (!kVector) {
      registers_shrink<104>();
      make_scores<kGate>(in, shared, work, group - 1, thread);
    }
  } else {
    registers_grow<240>();
    float s[64];
    load_state(s, in, head * in.segments + work.segment, work.rank, thread);
    run_chain<kGate, kErase, true, true>(in, shared, work, s, thread);
    if (work.segment == in.segments - 1) store_state(s, in, head, work.rank, thread);
  }
  cluster_barrier();
}

template <Sm90Gate kGate, Sm90Erase kErase>
struct __align__(1024) StatesShared : ScanShared<kGate, kErase, false> {
  static constexpr bool kRowsInStage = false;
  KeptState kept;
};

// The scan without outputs for the backward: warps 0 to 2 load and store, warpgroup 1 is the chain.
template <Sm90Gate kGate, Sm90Erase kErase>
__global__ void __launch_bounds__(256, 1) states_kernel(const __grid_constant__ ScanArguments in) {
  auto &shared = *cuda::dynamic_shared<StatesShared<kGate, kErase>>();
  const int thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    init_chain_barriers(shared, 8);
    init_kept_barriers(shared.kept);
    barrier_init_fence();
  }
  cluster_barrier();
  launch_wait();
  const Work work = work_of(in, in.segments);
  const int64_t head = static_cast<int64_t>(work.n) * in.shape.HV + work.hv;
  if (threadIdx.x < 128) {
    registers_shrink<56>();
    if (thread < 32) {
      load_chunks<kGate, kErase, true>(in, shared, work, thread);
    } else {
      store_kept_of(in.kept, shared, work, static_cast<int64_t>(work.hv) * in.shape.slots + work.first_slot, 1, thread);
    }
  } else {
    registers_grow<240>();
    float s[64];
    load_state(s, in, head * in.segments + work.segment, work.rank, thread);
    run_chain<kGate, kErase, true, false, true>(in, shared, work, s, thread);
  }
  cluster_barrier();
}

template <Sm90Gate kGate, Sm90Erase kErase, bool kSummary>
cudaError_t launch(const ScanArguments &in, cudaStream_t stream) {
  const int segments = !kSummary || in.turned ? in.segments : in.segments - 1;
  return launch_pairs<ScanShared<kGate, kErase>>(scan_kernel<kGate, kErase, kSummary>, in, segments, threads_of(kGate, kSummary), stream);
}

struct Scan {
  template <Sm90Gate kGate, Sm90Erase kErase>
  static cudaError_t run(const ScanArguments &in, cudaStream_t stream) { return launch<kGate, kErase, false>(in, stream); }
};
struct Summary {
  template <Sm90Gate kGate, Sm90Erase kErase>
  static cudaError_t run(const ScanArguments &in, cudaStream_t stream) { return launch<kGate, kErase, true>(in, stream); }
};
struct States {
  template <Sm90Gate kGate, Sm90Erase kErase>
  static cudaError_t run(const ScanArguments &in, cudaStream_t stream) {
    return launch_pairs<StatesShared<kGate, kErase>>(states_kernel<kGate, kErase>, in, in.segments, 256, stream);
  }
};

// Also with erase keys that are not k.
template <class Body>
cudaError_t dispatch(const ScanArguments &in, Sm90Gate gate, Sm90Erase erase, cudaStream_t stream) {
  if (erase == Sm90Erase::kIndependent) return Body::template run<Sm90Gate::kVector, Sm90Erase::kIndependent>(in, stream);
  if (erase != Sm90Erase::kSeparate) return dispatch_rows<Body>(gate, erase, in, stream);
  return gate == Sm90Gate::kVector ? Body::template run<Sm90Gate::kVector, Sm90Erase::kSeparate>(in, stream)
                                   : Body::template run<Sm90Gate::kScalar, Sm90Erase::kSeparate>(in, stream);
}

}  // namespace

cudaError_t launch_scan(const ScanArguments &in, Sm90Gate gate, Sm90Erase erase, cudaStream_t stream) {
  return dispatch<Scan>(in, gate, erase, stream);
}

cudaError_t launch_summary(const ScanArguments &in, Sm90Gate gate, Sm90Erase erase, cudaStream_t stream) {
  return dispatch<Summary>(in, gate, erase, stream);
}

cudaError_t launch_states(const ScanArguments &in, Sm90Gate gate, Sm90Erase erase, cudaStream_t stream) {
  return dispatch_rows<States>(gate, erase, in, stream);
}

}  // namespace fw::sm90
