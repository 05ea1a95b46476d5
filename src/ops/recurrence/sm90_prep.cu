// SPDX-License-Identifier: Apache-2.0
// Inverse and gate factors of one chunk of one head, for no gate or a scalar gate; nothing here depends on the state.
// Grid (slots, HV), 128 threads = one warpgroup, 6 CTAs a multiprocessor (4 with a separate erase key).
//   1. thread 0: tiles of k and of a separate erase key by tensor map; meanwhile 64 threads each for beta and for the
//      gates, which are summed in fp64 and kept as two floats in base 2, and all for the lengths of rows.
//   2. x k^T by 8 wgmma m64n64k16; gate factors exp(G_i - G_j), j < i, applied to the fp32 sums.
//   3. L = strict lower part of beta_i x k^T in fp32, T = (I + L)^-1 (sm90_inverse.cuh).
//   4. T leaves as two swizzled bf16 images by bulk store, the factors of tokens as floats.
// What is made inside costs no pass: gates and beta are activated where they are read, and 1 / length of a row of q, k or
// p joins the factors of its token, unrounded, as a decay does (reading q and k for it: 512 bytes a token and head; a
// pass before would write and read those 512 once more). Without a gate a norm or a separate key takes a gate of 0.
// Shared memory: k 16384, then L 18432 in its place, a separate erase key 16384, images of T 2 x 8192, factors 2704,
// row factors 256 bytes.
// Handing over: one mbarrier for the loads; __syncthreads between the numbered steps.
#include "cuda/launch.cuh"
#include "cuda/sm90/barrier.cuh"
#include "cuda/sm90/copy.cuh"
#include "cuda/sm90/matrix.cuh"
#include "cuda/sm90/product.cuh"
#include "ops/recurrence/sm90_gates.cuh"
#include "ops/recurrence/sm90_inverse.cuh"
#include "ops/recurrence/sm90_operands.cuh"
#include "ops/recurrence/sm90_prep.cuh"

namespace fw::sm90 {
namespace {

// The most negative log gate that is told apart from -infinity: its exponential is 0 in fp32 as well.
constexpr double kLeastGate = -1e4;

template <Sm90Erase kErase>
struct __align__(1024) PrepShared {
  union {
    unsigned char k[2 * kTileBytes];
    float l[kChunk * kPitch];
  };
  unsigned char solve[2 * kTileBytes];
  unsigned char separate[kErase == Sm90Erase::kSeparate ? 2 * kTileBytes : 0];
  Factors factors;
  float row_factor[kChunk];  // beta_i x_i
  double carry;
  uint64_t loaded;
};

static_assert(sizeof(PrepShared<Sm90Erase::kShared>) <= 37 * 1024);  // six in a multiprocessor

template <Sm90Gate kGate, Sm90Erase kErase>
__global__ void __launch_bounds__(128, kErase == Sm90Erase::kSeparate ? 4 : 6) prep_kernel(const __grid_constant__ PrepArguments in) {
  constexpr bool kSolve = kErase != Sm90Erase::kNone, kSeparate = kErase == Sm90Erase::kSeparate;
  constexpr bool kScalar = kGate == Sm90Gate::kScalar;
  auto &shared = *cuda::dynamic_shared<PrepShared<kErase>>();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int slot = blockIdx.x, hv = blockIdx.y, h = hv / (in.shape.HV / in.shape.H);
  const uint32_t loaded = shared_address(&shared.loaded);
  const uint32_t k_tile = shared_address(shared.k), x_tile = kSeparate ? shared_address(shared.separate) : k_tile;
  const Chunk chunk = chunk_of(in.shape, slot);
  launch_next();

  zero_rows_outside(in, slot, hv, thread);
  if (chunk.rows == 0) return;

  if (kSolve && thread == 0) {
    barrier_init(loaded, 1);
    barrier_init_fence();
    barrier_expect_bytes(loaded, (kSeparate ? 4 : 2) * kTileBytes);
    for (int half = 0; half < 2; ++half) {
      load_box(k_tile + half * kTileBytes, &in.k, loaded, 64 * half, h, chunk.start, chunk.batch);
      if (kSeparate) load_box(x_tile + half * kTileBytes, &in.x, loaded, 64 * half, h, chunk.start, chunk.batch);
    }
  }

  const int token = thread % kChunk, row = ByToken::row(token), column = ByToken::column(token);
  Factors &factors = shared.factors;
  double sum = 0.0;
  if (thread < kChunk) {
    if constexpr (kGate == Sm90Gate::kScalar) {
      const auto &s = in.g_strides;
      const int64_t at = chunk.batch * s.batch + (chunk.start + token) * s.token + hv * s.head;
      const double gate = token < chunk.rows ? load_gate(in, at, hv) : 0.0;
      sum = gate < kLeastGate ? kLeastGate : gate;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const double before = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += before;
      }
      if (thread == 31) shared.carry = sum;
    }
  } else if constexpr (kSolve) {
    const auto &s = in.beta_strides;
    const int64_t at = chunk.batch * s.batch + (chunk.start + token) * s.token + hv * s.head;
    const float beta = token < chunk.rows ? load_beta(in, at) : 0.0f;
    shared.row_factor[token] = factors.beta.at[row][column] = beta;
  }
  if constexpr (kScalar) {
    const auto at = [](ByToken &to, int i) -> float & { return to.at[ByToken::row(i)][ByToken::column(i)]; };
    const auto query = [&](int i, float x) { factors.query[i] = x; };
    const auto key = [&](int i, float x) { at(factors.key, i) = x; };
    const auto erase = [&](int i, float x) { at(factors.beta_decay, i) = x; };
    if (in.has_l2norm) {
      inverse_lengths(in.q_rows, in.q_strides, chunk, h, in.shape.K, thread, query);
      inverse_lengths(in.k_rows, in.k_strides, chunk, h, in.shape.K, thread, key);
      if (kSeparate) inverse_lengths(in.x_rows, in.x_strides, chunk, h, in.shape.K, thread, erase);
    } else if (thread < kChunk) {
      query(token, 1.0f), key(token, 1.0f), erase(token, 1.0f);
    }
  }
  __syncthreads();
  if constexpr (kScalar) {
    if (thread < kChunk) {
      sum = (thread >= 32 ? sum + shared.carry : sum) * 1.4426950408889634;
      const float high = static_cast<float>(sum);
      factors.gate[token] = make_float2(high, static_cast<float>(sum - static_cast<double>(high)));
    }
    __syncthreads();
    const float2 gate = factors.gate[token];
    if (thread < kChunk) {
      const float decay = power_of_two(gate.x + gate.y), query = factors.query[token] * in.scale;
      float read = decay;
      if (kSolve && in.reads_before) {
        const float2 before = token == 0 ? make_float2(0.0f, 0.0f) : factors.gate[token - 1];
        read = power_of_two(before.x + before.y);
      }
      if constexpr (kSolve) {
        const float erase = factors.beta.at[row][column] * (kSeparate ? factors.beta_decay : factors.key).at[row][column];
        shared.row_factor[token] = erase;
        factors.beta_decay.at[row][column] = erase * read;
      }
      factors.scale_decay.at[row][column] = query * decay;
      factors.query[token] = query;
      if (token == kChunk - 1) factors.all[0] = decay;
    } else {
      const float key = factors.key.at[row][column];
      factors.rest.at[row][column] = key * power_of_two(difference(factors.gate[kChunk - 1], gate));
      factors.to_block_end.at[row][column] = key * power_of_two(difference(factors.gate[token | 15], gate));
    }
    __syncthreads();
  }

  if constexpr (kSolve) {
    barrier_wait(loaded, 0);
    if (chunk.rows < kChunk) {
      for (int i = thread; i < (kChunk - chunk.rows) * 8; i += 128) {
        for (int half = 0; half < 2; ++half) {
          const int offset = half * kTileBytes + (chunk.rows + i / 8) * 128 + i % 8 * 16;
          *reinterpret_cast<uint4 *>(shared.k + offset) = make_uint4(0, 0, 0, 0);
          if (kSeparate) *reinterpret_cast<uint4 *>(shared.separate + offset) = make_uint4(0, 0, 0, 0);
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
      const uint32_t offset = step / 4 * kTileBytes + step % 4 * 32;
      multiply_n64_shared(kk, rows_along_sum(x_tile + offset), rows_along_sum(k_tile + offset), step > 0);
    }
    product_commit();
    product_wait<0>();
    hold(kk);
    __syncthreads();  // k is read; L takes its place

    decay_scores<kScalar, true>(kk, factors, shared.row_factor[16 * warp + g], shared.row_factor[16 * warp + g + 8], warp,
                                g, t, in.reads_before);
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
    finish_inverse(shared.l, shared_address(shared.solve), warp, lane);
  }
  fence_async_shared();
  __syncthreads();
  if (thread == 0) {
    const int64_t index = static_cast<int64_t>(hv) * in.shape.slots + slot;
    if constexpr (kSolve) {
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
  return cuda::launch({dim3(in.shape.slots, in.shape.HV), 128, sizeof(PrepShared<kErase>), stream}, prep_kernel<kGate, kErase>, in);
}

}  // namespace

cudaError_t launch_prep(const PrepArguments &in, Sm90Gate gate, Sm90Erase erase, cudaStream_t stream) {
  if (erase == Sm90Erase::kIndependent) return launch_prep_independent(in, stream);
  if (gate == Sm90Gate::kVector) return launch_prep_vector(in, erase, stream);
  if (erase == Sm90Erase::kSeparate) {
    if (gate == Sm90Gate::kScalar) return launch<Sm90Gate::kScalar, Sm90Erase::kSeparate>(in, stream);
  } else if (erase == Sm90Erase::kShared) {
    if (gate == Sm90Gate::kNone) return launch<Sm90Gate::kNone, Sm90Erase::kShared>(in, stream);
    if (gate == Sm90Gate::kScalar) return launch<Sm90Gate::kScalar, Sm90Erase::kShared>(in, stream);
  } else {
    if (gate == Sm90Gate::kNone) return launch<Sm90Gate::kNone, Sm90Erase::kNone>(in, stream);
    if (gate == Sm90Gate::kScalar) return launch<Sm90Gate::kScalar, Sm90Erase::kNone>(in, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fw::sm90
