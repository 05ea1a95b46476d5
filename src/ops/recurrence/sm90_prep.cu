// SPDX-License-Identifier: Apache-2.0
// Inverse and gate factors of one chunk of one head, for no gate or a scalar gate; nothing here depends on the state.
// Grid (slots, HV), 128 threads = one warpgroup, 7 CTAs a multiprocessor.
//   1. thread 0: k tile by tensor map; meanwhile 64 threads each for beta and for the gates, which are summed in fp64 and
//      kept as two floats in base 2.
//   2. k k^T by 8 wgmma m64n64k16; gate factors exp(G_i - G_j), j < i, applied to the fp32 sums.
//   3. L = strict lower part of beta_i k k^T in fp32, T = (I + L)^-1 (sm90_inverse.cuh).
//   4. T leaves as a swizzled bf16 image by bulk store, the factors of tokens as floats.
// Shared memory: k 16384, then L 18432 in its place, image of T 8192 (no gate: two), factors and beta 2384 bytes.
// Handing over: one mbarrier for the loads; __syncthreads between the numbered steps.
#include "cuda/launch.cuh"
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/product.cuh"
#include "ops/recurrence/sm90_gates.cuh"
#include "ops/recurrence/sm90_inverse.cuh"
#include "ops/recurrence/sm90_prep.cuh"

namespace fw::sm90 {
namespace {

// The most negative log gate that is told apart from -infinity: its exponential is 0 in fp32 as well.
constexpr double kLeastGate = -1e4;

template <bool kSplit>
struct __align__(1024) PrepShared {
  union {
    unsigned char k[2 * kTileBytes];
    float l[kChunk * kPitch];
  };
  unsigned char solve[kSplit ? 2 * kTileBytes : kTileBytes];
  Factors factors;
  float beta[kChunk];
  double carry;
  uint64_t loaded;
};

template <Sm90Gate kGate, Sm90Erase kErase>
__global__ void __launch_bounds__(128, kGate == Sm90Gate::kNone ? 6 : 7) prep_kernel(const __grid_constant__ PrepArguments in) {
  constexpr bool kSplit = kGate == Sm90Gate::kNone;  // T as two bf16
  auto &shared = *cuda::dynamic_shared<PrepShared<kSplit>>();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int slot = blockIdx.x, hv = blockIdx.y, h = hv / (in.shape.HV / in.shape.H);
  const uint32_t loaded = shared_address(&shared.loaded);
  const uint32_t k_tile = shared_address(shared.k);
  const Chunk chunk = chunk_of(in.shape, slot);
  launch_next();

  zero_rows_outside(in, slot, hv, thread);
  if (chunk.rows == 0) return;

  if (kErase == Sm90Erase::kShared && thread == 0) {
    barrier_init(loaded, 1);
    barrier_init_fence();
    barrier_expect_bytes(loaded, 2 * kTileBytes);
    for (int half = 0; half < 2; ++half) {
      load_box(k_tile + half * kTileBytes, &in.k, loaded, 64 * half, h, chunk.start, chunk.batch);
    }
  }

  const int token = thread % kChunk, row = ByToken::row(token), column = ByToken::column(token);
  Factors &factors = shared.factors;
  double sum = 0.0;
  if (thread < kChunk) {
    if constexpr (kGate == Sm90Gate::kScalar) {
      const auto &s = in.g_strides;
      const int64_t at = chunk.batch * s.batch + (chunk.start + token) * s.token + hv * s.head;
      const float gate = token < chunk.rows ? load_real(in.g, in.g_type, at) : 0.0f;
      sum = gate < kLeastGate ? kLeastGate : static_cast<double>(gate);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const double before = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += before;
      }
      if (thread == 31) shared.carry = sum;
    }
  } else if constexpr (kErase == Sm90Erase::kShared) {
    const auto &s = in.beta_strides;
    const int64_t at = chunk.batch * s.batch + (chunk.start + token) * s.token + hv * s.head;
    const float beta = token < chunk.rows ? load_real(in.beta, in.beta_type, at) : 0.0f;
    shared.beta[token] = factors.beta.at[row][column] = beta;
  }
  __syncthreads();
  if constexpr (kGate == Sm90Gate::kScalar) {
    if (thread < kChunk) {
      sum = (thread >= 32 ? sum + shared.carry : sum) * 1.4426950408889634;
      const float high = static_cast<float>(sum);
      factors.gate[token] = make_float2(high, static_cast<float>(sum - static_cast<double>(high)));
    }
    __syncthreads();
    const float2 gate = factors.gate[token];
    if (thread < kChunk) {
      const float decay = power_of_two(gate.x + gate.y);
      factors.beta_decay.at[row][column] = shared.beta[token] * decay;
      factors.scale_decay.at[row][column] = in.scale * decay;
      if (token == kChunk - 1) factors.all[0] = decay;
    } else {
      factors.rest.at[row][column] = power_of_two(difference(factors.gate[kChunk - 1], gate));
      factors.to_block_end.at[row][column] = power_of_two(difference(factors.gate[token | 15], gate));
    }
    __syncthreads();
  }

  if constexpr (kErase == Sm90Erase::kShared) {
    barrier_wait(loaded, 0);
    if (chunk.rows < kChunk) {
      for (int i = thread; i < (kChunk - chunk.rows) * 8; i += 128) {
        for (int half = 0; half < 2; ++half) {
          *reinterpret_cast<uint4 *>(shared.k + half * kTileBytes + (chunk.rows + i / 8) * 128 + i % 8 * 16) =
              make_uint4(0, 0, 0, 0);
        }
      }
      fence_async_shared();
      __syncthreads();
    }
    float kk[32];
    hold(kk);
    product_fence();
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const uint64_t rows = rows_along_sum(k_tile + step / 4 * kTileBytes + step % 4 * 32);
      multiply_n64_shared(kk, rows, rows, step > 0);
    }
    product_commit();
    product_wait<0>();
    hold(kk);
    __syncthreads();  // k is read; L takes its place

    decay_scores<kGate == Sm90Gate::kScalar, true>(kk, factors, shared.beta[16 * warp + g],
                                                   shared.beta[16 * warp + g + 8], warp, g, t);
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
      if (tile > 2 * warp + 1) break;
      float *to = shared.l + (16 * warp + g) * kPitch + 8 * tile + 2 * t;
      *reinterpret_cast<float2 *>(to) = make_float2(kk[4 * tile], kk[4 * tile + 1]);
      *reinterpret_cast<float2 *>(to + 8 * kPitch) = make_float2(kk[4 * tile + 2], kk[4 * tile + 3]);
    }
    __syncthreads();
    if (warp < 2) {
      const int block = 2 * warp + lane / 16;
      invert_block(shared.l + 16 * block * kPitch + 16 * block, lane % 16);
    }
    __syncthreads();
    finish_inverse<kSplit>(shared.l, shared_address(shared.solve), warp, lane);
  }
  fence_async_shared();
  __syncthreads();
  if (thread == 0) {
    const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + slot;
    if constexpr (kErase == Sm90Erase::kShared) {
      constexpr int kBytes = sizeof(shared.solve);
      store_bytes(in.tiles.solve + index * kBytes, shared_address(shared.solve), kBytes);
    }
    store_bytes(in.tiles.factors + index, shared_address(&factors), sizeof(Factors));
    store_commit();
    store_wait<0>();
  }
}

template <Sm90Gate kGate, Sm90Erase kErase>
cudaError_t launch(const PrepArguments &in, cudaStream_t stream) {
  return cuda::launch({dim3(in.shape.slots, in.shape.HV), 128, sizeof(PrepShared<kGate == Sm90Gate::kNone>), stream},
                      prep_kernel<kGate, kErase>, in);
}

}  // namespace

cudaError_t launch_prep(const PrepArguments &in, Sm90Gate gate, Sm90Erase erase, cudaStream_t stream) {
  if (gate == Sm90Gate::kVector) return launch_prep_vector(in, erase, stream);
  if (erase == Sm90Erase::kShared) {
    if (gate == Sm90Gate::kNone) return launch<Sm90Gate::kNone, Sm90Erase::kShared>(in, stream);
    if (gate == Sm90Gate::kScalar) return launch<Sm90Gate::kScalar, Sm90Erase::kShared>(in, stream);
  } else {
    if (gate == Sm90Gate::kNone) return launch<Sm90Gate::kNone, Sm90Erase::kNone>(in, stream);
    if (gate == Sm90Gate::kScalar) return launch<Sm90Gate::kScalar, Sm90Erase::kNone>(in, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fw::sm90
