// SPDX-License-Identifier: Apache-2.0
// Decode on Hopper with many heads: states stream through shared memory, each read once and written once by a bulk copy.
// States that are one piece of memory a head, K = 64 or 128, V whole panels; 16-bit states one token at a time.
//
// Plan: a CTA a head, a warp a panel of 8 P columns, P = 4 elements of an fp32 state and 8 of a 16-bit one (16 bytes a lane):
// 4 warps and 64 KB of an fp32 state at K = V = 128, three CTAs a multiprocessor; 2 warps and 32 KB of a 16-bit state, six.
// CTAs know nothing of each other, so that while one computes others load and store.
//
//   thread 0        | bulk load of the state |                                          | bulk store |
//   warps, by token | operands of two tokens | sums over S | u, o | S = D S + k u | ... |
//
// The state stays in shared memory: a token reads it for its sums and again to write it, so no register holds it. Eight lanes
// with 16 bytes each lie along a row of [K,V], along a column of [V,K]: 128 bytes, no bank twice. Sums over the other lanes by
// halving: each lane ends with P / 4 columns, whose u and o it makes.
//
// Operands: warp j makes all channels and values of token j, two tokens at once with an fp32 state; with a vector gate q (and a key read after the decay) are multiplied
// by it there, so that the sums take the state as it lies. Barriers: full, the copy's bytes; __syncthreads behind and before
// the operands of two tokens and before the store; __syncwarp behind u.
#include "cuda/device.hpp"
#include "cuda/launch.cuh"
#include "cuda/sm90/copy.cuh"
#include "ops/recurrence/axes.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/sm90_step.cuh"

namespace fw::recurrence {
namespace {

using namespace sm90;

// Behind the state in shared memory. kTogether: tokens whose operands are there at once.
template <fw_gate kGate, fw_erase kErase, int kTogether>
struct StreamShared {
  StepChannels<kGate, kErase> channels[kTogether];
  float values[kTogether][kChannels];                           // v'
  float written[1 + (kErase == FW_ERASE_INDEPENDENT)][kChannels];  // u; what an independent key reads
  float qk[kTogether], qb[kTogether], decay[kTogether];         // decay: of a scalar gate
  uint64_t full;
};

// The first kCount sums of two times as many: those of the lane's half, added up over a pair of lanes.
template <int kCount>
__device__ inline void halve(float *v, bool is_high, int mask) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const float kept = is_high ? v[j + kCount] : v[j], sent = is_high ? v[j] : v[j + kCount];
    v[j] = kept + __shfl_xor_sync(0xffffffffu, sent, mask);
  }
}

template <class T>
constexpr int kPackSize = 16 / static_cast<int>(sizeof(T));
template <class T>
constexpr int kTokens = sizeof(T) == 4 ? 2 : 1;
template <class T>
struct alignas(16) WidePack {
  T at[kPackSize<T>];
};

// A warp's panel of a state [K,V] or [V,K] of T in shared memory.
template <class T, bool kIsVk>
struct StreamPanel {
  static constexpr int kPack = kPackSize<T>, kOwned = kPack / 4;            // columns whose u a lane makes
  static constexpr int kSums = kIsVk ? 2 * kPack : kPack, kDense = kChannels / (8 * kPack);  // packs of a column of [V,K]
  T *state;
  int K, V, first, near, far;  // first: column of the panel; near: of eight lanes side by side; far: of four groups

  __device__ StreamPanel(T *memory, int keys, int values, int warp) : state(memory), K(keys), V(values), first(warp * 8 * kPack) {
    near = threadIdx.x % 8, far = threadIdx.x % 32 / 8;
  }
  // Column `m` of those whose u the lane makes, after `share`.
  __device__ int owned(int m) const {
    if constexpr (kIsVk) return first + 4 * ((near / 4) * kPack + (near / 2 % 2) * (kPack / 2) + (near % 2) * (kPack / 4) + m) + far;
    return first + kPack * near + (far / 2) * (kPack / 2) + (far % 2) * (kPack / 4) + m;
  }
  __device__ void share(float (&sums)[kSums]) const {
    if constexpr (kIsVk) {
      halve<kPack>(sums, near & 4, 4), halve<kPack / 2>(sums, near & 2, 2), halve<kPack / 4>(sums, near & 1, 1);
    } else {
      halve<kPack / 2>(sums, far & 2, 16), halve<kPack / 4>(sums, far & 1, 8);
    }
  }
  // The pack that starts at (row, column).
  __device__ WidePack<T> &pack(int row, int column) const {
    return *reinterpret_cast<WidePack<T> *>(state + (kIsVk ? column * K + row : row * V + column));
  }

  // [0] S^T q, [1] S^T x of the lane's columns, over its rows.
  template <bool kErases>
  __device__ void read(const float *q, const float *x, float (&sums)[2][kSums]) const {
    if constexpr (kIsVk) {
      float queries[kDense][kPack], keys[kDense][kPack];
      take_rows(q, queries);
      if constexpr (kErases) take_rows(x, keys);
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
#pragma unroll
        for (int i = 0; i < kDense; ++i) {
          if (i * 8 * kPack >= K) break;
          const WidePack<T> s = pack((i * 8 + near) * kPack, first + 4 * n + far);
#pragma unroll
          for (int j = 0; j < kPack; ++j) {
            const float y = cuda::to_float(s.at[j]);
            sums[0][n] = fmaf(queries[i][j], y, sums[0][n]);
            if constexpr (kErases) sums[1][n] = fmaf(keys[i][j], y, sums[1][n]);
          }
        }
      }
    } else {
#pragma unroll 2
      for (int row = 4 * far; row < K; row += 16) {
        float query[4], key[4];
        take_quad(q + row, query);
        if constexpr (kErases) take_quad(x + row, key);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const WidePack<T> s = pack(row + i, first + kPack * near);
#pragma unroll
          for (int j = 0; j < kPack; ++j) {
            const float y = cuda::to_float(s.at[j]);
            sums[0][j] = fmaf(query[i], y, sums[0][j]);
            if constexpr (kErases) sums[1][j] = fmaf(key[i], y, sums[1][j]);
          }
        }
      }
    }
  }

  // S = D S + k u^T + b w^T; decay: [K], or of all rows when that is null.
  template <bool kIndependent>
  __device__ void write(const float *k, const float *b, const float *decay, float decay_of_all, const float *u, const float *w) const {
    const auto renew = [](WidePack<T> &s, int j, float d, float key, float value, float other, float read) {
      float y = fmaf(key, value, d * cuda::to_float(s.at[j]));
      if constexpr (kIndependent) y = fmaf(other, read, y);
      cuda::from_float(y, s.at + j);
    };
    if constexpr (kIsVk) {
      float keys[kDense][kPack], others[kDense][kPack], factors[kDense][kPack];
      take_rows(k, keys);
      if constexpr (kIndependent) take_rows(b, others);
      if (decay) take_rows(decay, factors);
#pragma unroll
      for (int n = 0; n < kSums; ++n) {
        const int column = first + 4 * n + far;
        const float value = u[column], read = kIndependent ? w[column] : 0.0f;
#pragma unroll
        for (int i = 0; i < kDense; ++i) {
          if (i * 8 * kPack >= K) break;
          WidePack<T> &place = pack((i * 8 + near) * kPack, column), s = place;
#pragma unroll
          for (int j = 0; j < kPack; ++j) {
            renew(s, j, decay ? factors[i][j] : decay_of_all, keys[i][j], value, kIndependent ? others[i][j] : 0.0f, read);
          }
          place = s;
        }
      }
    } else {
      float value[kPack], read[kPack];
#pragma unroll
      for (int j = 0; j < kPack; ++j) value[j] = u[first + kPack * near + j], read[j] = kIndependent ? w[first + kPack * near + j] : 0.0f;
#pragma unroll 2
      for (int row = 4 * far; row < K; row += 16) {
        float key[4], other[4], factor[4];
        take_quad(k + row, key);
        if constexpr (kIndependent) take_quad(b + row, other);
        if (decay) take_quad(decay + row, factor);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          WidePack<T> &place = pack(row + i, first + kPack * near), s = place;
#pragma unroll
          for (int j = 0; j < kPack; ++j) {
            renew(s, j, decay ? factor[i] : decay_of_all, key[i], value[j], kIndependent ? other[i] : 0.0f, read[j]);
          }
          place = s;
        }
      }
    }
  }

 private:
  __device__ static void take_quad(const float *from, float (&to)[4]) {
    const float4 x = *reinterpret_cast<const float4 *>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  }
  __device__ void take_rows(const float *from, float (&to)[kDense][kPack]) const {
#pragma unroll
    for (int i = 0; i < kDense; ++i) {
      if (i * 8 * kPack >= K) break;
#pragma unroll
      for (int j = 0; j < kPack; j += 4) take_quad(from + (i * 8 + near) * kPack + j, *reinterpret_cast<float(*)[4]>(&to[i][j]));
    }
  }
};

// A warp makes the operands of a token.
template <fw_gate kGate, fw_erase kErase, int kTogether>
__device__ inline void make_operands(const Problem &p, const cuda::DeviceSegment &segment, int64_t token, int64_t hv, int64_t h, int j,
                                     StreamShared<kGate, kErase, kTogether> &s) {
  const int lane = threadIdx.x % 32, first = lane * kQuad, V = static_cast<int>(p.V);
  StepBits<kGate, kErase> bits;
  bits.ask_all(p, segment.batch, token, hv, h, first % V);
  StepChannels<kGate, kErase> &channels = s.channels[j];
  const StepToken made = make_token(p, bits, hv, channels);
  if (first < V) *reinterpret_cast<float4 *>(s.values[j] + first) = make_float4(made.u[0], made.u[1], made.u[2], made.u[3]);
  if constexpr (kGate == FW_GATE_VECTOR) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const float decay = channels.decay()[first + i];
      channels.q()[first + i] *= decay;
      if constexpr (kErase == FW_ERASE_SHARED_AFTER) channels.x()[first + i] *= decay;
    }
  }
  if (lane == 0) s.qk[j] = made.qk, s.qb[j] = made.qb, s.decay[j] = made.decay;
}

// One token against a warp's panel.
template <fw_gate kGate, fw_erase kErase, int kTogether, class Panel>
__device__ inline void take_token(const Problem &p, const Panel &panel, int j, StreamShared<kGate, kErase, kTogether> &s, int64_t o_offset) {
  constexpr bool kErases = kErase != FW_ERASE_NONE;
  StepChannels<kGate, kErase> &channels = s.channels[j];
  const float decay = kGate == FW_GATE_SCALAR ? s.decay[j] : 1.0f;
  float all[2][Panel::kSums] = {}, sums[2][Panel::kOwned] = {}, u[Panel::kOwned];
  panel.template read<kErases>(channels.q(), kErases ? channels.x() : nullptr, all);
  panel.share(all[0]);
  if constexpr (kErases) panel.share(all[1]);
#pragma unroll
  for (int m = 0; m < Panel::kOwned; ++m) {
    sums[0][m] = all[0][m] * decay;
    if constexpr (kErases) sums[1][m] = kErase == FW_ERASE_SHARED_AFTER ? all[1][m] * decay : all[1][m];
    u[m] = s.values[j][panel.owned(m)];
  }
  erase_value<kErase>(sums, u);
#pragma unroll
  for (int m = 0; m < Panel::kOwned; ++m) {
    const int column = panel.owned(m);
    s.written[0][column] = u[m];
    if constexpr (kErase == FW_ERASE_INDEPENDENT) s.written[1][column] = sums[1][m];
    store_at(p.o, o_offset + column * p.o.strides[3], row_output<kErase>(sums, u, m, s.qk[j], s.qb[j], p.scale_f32));
  }
  __syncwarp();  // u of the panel is there
  panel.template write<kErase == FW_ERASE_INDEPENDENT>(channels.k(), kErase == FW_ERASE_INDEPENDENT ? channels.b() : nullptr,
                                                       kGate == FW_GATE_VECTOR ? channels.decay() : nullptr, decay, s.written[0],
                                                       s.written[kErase == FW_ERASE_INDEPENDENT]);
  __syncwarp();  // u may be written again
}

template <fw_gate kGate, fw_erase kErase, class T>
__global__ void __launch_bounds__(128) stream_step(const __grid_constant__ Problem p) {
  const int warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int K = static_cast<int>(p.K), V = static_cast<int>(p.V), bytes = K * V * static_cast<int>(sizeof(T));
  constexpr int kTogether = kTokens<T>;
  T *state = cuda::dynamic_shared<T>();
  auto &s = *reinterpret_cast<StreamShared<kGate, kErase, kTogether> *>(reinterpret_cast<char *>(state) + bytes);
  const uint32_t full = shared_address(&s.full);
  const StepHead head = begin_head(p, full, threadIdx.x == 0);
  if (head.sequence.slot < 0) return;
  const cuda::DeviceSegment segment = head.sequence.segment;
  const int64_t hv = head.hv, h = head.h;
  T *place = static_cast<T *>(p.state.data) + find_state(p, p.state, head.sequence.slot, hv).base;
  if (threadIdx.x == 0) {
    barrier_expect_bytes(full, bytes);
    load_bytes(shared_address(state), place, bytes, full);
  }
  const auto take_all = [&](const auto &panel) {
#pragma unroll 1
    for (int64_t token = segment.begin; token < segment.end; token += kTogether) {
      const int count = segment.end - token < kTogether ? static_cast<int>(segment.end - token) : kTogether;
      if (token > segment.begin) __syncthreads();  // the operands before are read
      for (int j = warp; j < count; j += warps) make_operands(p, segment, token + j, hv, h, j, s);
      __syncthreads();  // operands are there, and the barrier
      if (token == segment.begin) barrier_wait(full, 0);
#pragma unroll 1
      for (int j = 0; j < count; ++j) take_token(p, panel, j, s, head_offset(p.o, segment.batch, token + j, hv));
    }
  };
  if (p.state_layout == FW_STATE_VK) {
    take_all(StreamPanel<T, true>(state, K, V, warp));
  } else {
    take_all(StreamPanel<T, false>(state, K, V, warp));
  }
  fence_async_shared();
  __syncthreads();  // the state is written
  if (threadIdx.x == 0) {
    store_bytes(place, shared_address(state), bytes);
    store_commit();
    store_wait_read<0>();
  }
}

struct Stream {
  template <fw_gate kGate, fw_erase kErase>
  static void run(const Problem &p) {
    switch (p.state.dtype) {
      case FW_F32: return run_type<kGate, kErase, float>(p);
      case FW_BF16: return run_type<kGate, kErase, __nv_bfloat16>(p);
      default: return run_type<kGate, kErase, __half>(p);
    }
  }
  template <fw_gate kGate, fw_erase kErase, class T>
  static void run_type(const Problem &p) {
    cuda::Launch how = {static_cast<uint32_t>(p.N * p.HV), static_cast<uint32_t>(p.V / (8 * kPackSize<T>)) * 32,
                        p.K * p.V * static_cast<int64_t>(sizeof(T)) + static_cast<int64_t>(sizeof(StreamShared<kGate, kErase, kTokens<T>>)),
                        static_cast<cudaStream_t>(p.stream)};
    how.overlaps = true;
    cuda::launch(how, stream_step<kGate, kErase, T>, p);
  }
};

}  // namespace

void launch_stream_step(const Problem &p) { dispatch_axes<Stream>(p, p); }

}  // namespace fw::recurrence
