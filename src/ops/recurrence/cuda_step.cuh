// SPDX-License-Identifier: Apache-2.0
// What the decode kernels share: a warp's part of a state in registers, a token's operands, and the token's step. cuda_step.cu says
// how lanes and rows are laid out.
#pragma once
#include "cuda/rows.cuh"
#include "ops/recurrence/cuda_tile.cuh"

namespace fw::recurrence {

using cuda::QuadBits;

constexpr int kChannels = 128, kQuad = 4;

// A token's channels in a warp's shared memory; what a row does not have takes no room.
template <fw_gate kGate, fw_erase kErase>
struct StepChannels {
  static constexpr int kDecay = 2 + (kErase != FW_ERASE_NONE), kB = kDecay + (kGate == FW_GATE_VECTOR);
  static constexpr int kCount = kB + (kErase == FW_ERASE_INDEPENDENT);
  float all[kCount * kChannels];
  __device__ float *at(int which) { return all + which * kChannels; }
  __device__ float *q() { return at(0); }
  __device__ float *k() { return at(1); }
  __device__ float *x() { return at(2); }
  __device__ float *decay() { return at(kDecay); }
  __device__ float *b() { return at(kB); }
};

// A lane's part of a panel: quads of rows, of 4 columns.
template <int kRows>
using StepTile = float[kRows / kQuad][kQuad][kQuad];

// Which part of the state a lane owns. lanes: of the rows of a column. Eight lanes side by side, whose 16 bytes are one access,
// lie along a row of [K,V] (4 lanes of it at K = 128, then the next rows) and along a column of [V,K]: with the other order every
// access met one bank or line eight times over ([K,V] at K = V = 128: 440 in the place of 290 us).
template <int kRows>
struct StepLane {
  int row, column, lanes, row_step;  // row_step: from a lane to the one with the next rows
  __device__ StepLane(int K, bool is_vk) {
    const int lane = threadIdx.x % 32;
    lanes = K / kRows;
    row_step = is_vk ? 1 : 32 / lanes;
    row = (is_vk ? lane % lanes : lane / row_step) * kQuad;
    column = (is_vk ? lane / lanes : lane % row_step) * kQuad;
  }
  __device__ int row_of(int quad) const { return row + quad * lanes * kQuad; }
  __device__ int columns() const { return 32 / lanes * kQuad; }  // of the panel
};

template <class T>
struct alignas(sizeof(T) * kQuad) Pack {
  T at[kQuad];
};

// f(quad, i, offset): pack i of a quad of rows lies at `offset`; along the columns it is row i, else column i.
template <int kRows, bool kByColumn, class F>
__device__ inline void for_packs(const StepLane<kRows> &own, int64_t stride, F f) {
#pragma unroll
  for (int quad = 0; quad < kRows / kQuad; ++quad) {
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      const int64_t row = own.row_of(quad), column = own.column;
      f(quad, i, kByColumn ? (column + i) * stride + row : (row + i) * stride + column);
    }
  }
}
template <int kRows, bool kByColumn, class T>
__device__ inline void load_panel(const T *from, const StepLane<kRows> &own, int64_t stride, StepTile<kRows> &S) {
  Pack<T> x[kRows / kQuad][kQuad];
  for_packs<kRows, kByColumn>(own, stride, [&](int quad, int i, int64_t at) {
    x[quad][i] = *reinterpret_cast<const Pack<T> *>(from + at);
  });
  for_packs<kRows, kByColumn>(own, stride, [&](int quad, int i, int64_t) {
#pragma unroll
    for (int j = 0; j < kQuad; ++j) S[quad][kByColumn ? j : i][kByColumn ? i : j] = cuda::to_float(x[quad][i].at[j]);
  });
}
template <int kRows, bool kByColumn, class T>
__device__ inline void store_panel(T *to, const StepLane<kRows> &own, int64_t stride, const StepTile<kRows> &S) {
  for_packs<kRows, kByColumn>(own, stride, [&](int quad, int i, int64_t at) {
    Pack<T> x;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) cuda::from_float(S[quad][kByColumn ? j : i][kByColumn ? i : j], x.at + j);
    *reinterpret_cast<Pack<T> *>(to + at) = x;
  });
}

// Four neighbours of a dense row, as they lie in memory.
__device__ inline QuadBits ask(const fw_tensor &t, int64_t offset, int64_t first) {
  return cuda::load_quad_bits(t.data, t.dtype, offset + first);
}
__device__ inline void take(const QuadBits &bits, const fw_tensor &t, float (&to)[kQuad]) {
  cuda::from_quad_bits(bits, t.dtype, to);
}

// A token's operands as they lie in memory: four channels of every key (a lane past K has those of another), the lane's
// columns of v and the write gate.
template <fw_gate kGate, fw_erase kErase>
struct StepBits {
  QuadBits q, k, x, b, erase_gate, decay, v, write_gate;
  uint32_t g, beta;

  __device__ void ask_all(const Problem &p, int64_t batch, int64_t token, int64_t hv, int64_t h, int64_t column) {
    const int first = threadIdx.x * kQuad % static_cast<int>(p.K);
    q = ask(p.q, head_offset(p.q, batch, token, h), first);
    k = ask(p.k, head_offset(p.k, batch, token, h), first);
    v = ask(p.v, head_offset(p.v, batch, token, hv), column);
    if constexpr (kGate == FW_GATE_VECTOR) decay = ask(p.g, head_offset(p.g, batch, token, hv), first);
    if constexpr (kGate == FW_GATE_SCALAR) {
      if (!p.has_fixed_gate) g = cuda::load_bits(p.g.data, p.g.dtype, head_offset(p.g, batch, token, hv));
    }
    if constexpr (kErase == FW_ERASE_INDEPENDENT) {
      x = ask(p.a, head_offset(p.a, batch, token, h), first);
      b = ask(p.b, head_offset(p.b, batch, token, h), first);
    }
    if constexpr (kIsShared<kErase>) {
      if (given(p.beta)) beta = cuda::load_bits(p.beta.data, p.beta.dtype, head_offset(p.beta, batch, token, hv));
      if (given(p.p)) x = ask(p.p, head_offset(p.p, batch, token, h), first);
      if (given(p.erase_gate)) erase_gate = ask(p.erase_gate, head_offset(p.erase_gate, batch, token, h), first);
      if (given(p.write_gate)) write_gate = ask(p.write_gate, head_offset(p.write_gate, batch, token, hv), column);
    }
  }
};

// A token's operands as the warp needs them: channels in shared memory, the lane's columns of v' in u, q . k and q . b, the decay
// of a scalar gate.
struct StepToken {
  float u[kQuad], qk, qb, decay;
};

// 1 / length of a key of which the warp's first K / 4 lanes have four channels each.
__device__ __noinline__ inline float inverse_length(float x, float y, float z, float w) {
  const double sum = static_cast<double>(x) * x + static_cast<double>(y) * y + static_cast<double>(z) * z +
                     static_cast<double>(w) * w;
  return static_cast<float>(rsqrt(cuda::warp_sum(sum) + 1e-6));
}

template <fw_gate kGate, fw_erase kErase>
__device__ inline StepToken make_token(const Problem &p, const StepBits<kGate, kErase> &bits, int64_t hv,
                                       StepChannels<kGate, kErase> &s) {
  const int first = threadIdx.x % 32 * kQuad;
  const bool is_past = first >= static_cast<int>(p.K);
  const auto put = [&](float *to, const float(&of)[kQuad]) {
    *reinterpret_cast<float4 *>(to + first) = make_float4(of[0], of[1], of[2], of[3]);
  };
  const auto key = [&](const QuadBits &from, const fw_tensor &t, bool is_normed, float(&to)[kQuad]) {
    take(from, t, to);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) to[j] = is_past ? 0.0f : to[j];
    if (!is_normed) return;
    const float factor = inverse_length(to[0], to[1], to[2], to[3]);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) to[j] *= factor;
  };
  float q[kQuad], k[kQuad];
  StepToken own = {};
  key(bits.q, p.q, p.has_l2norm, q), key(bits.k, p.k, p.has_l2norm, k);
  put(s.q(), q), put(s.k(), k);
#pragma unroll
  for (int j = 0; j < kQuad; ++j) own.qk = fmaf(q[j], k[j], own.qk);
  own.qk = cuda::warp_sum(own.qk);
  take(bits.v, p.v, own.u);
  if constexpr (kErase == FW_ERASE_INDEPENDENT) {
    float b[kQuad];
    key(bits.x, p.a, false, k), key(bits.b, p.b, false, b);
    put(s.x(), k), put(s.b(), b);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) own.qb = fmaf(q[j], b[j], own.qb);
    own.qb = cuda::warp_sum(own.qb);
  }
  if constexpr (kIsShared<kErase>) {
    float beta = 1;
    if (given(p.beta)) beta = cuda::from_bits(bits.beta, p.beta.dtype);
    if (given(p.beta) && p.beta_input != FW_BETA_INPUT_PLAIN) beta = activated_beta(p, beta);
    if (given(p.p)) key(bits.x, p.p, p.has_l2norm, k);
    const auto multiply = [&](const QuadBits &by, const fw_tensor &t, float(&x)[kQuad]) {
      float factor[kQuad] = {1, 1, 1, 1};
      if (given(t)) take(by, t, factor);
#pragma unroll
      for (int j = 0; j < kQuad; ++j) x[j] *= factor[j] * beta;
    };
    multiply(bits.erase_gate, p.erase_gate, k), multiply(bits.write_gate, p.write_gate, own.u);
    put(s.x(), k);
  }
  if constexpr (kGate == FW_GATE_VECTOR) {
    float decay[kQuad];
    take(bits.decay, p.g, decay);
#pragma unroll
    for (int j = 0; j < kQuad; ++j) decay[j] = is_past ? 0.0f : expf(log_decay(p, hv, first + j, decay[j]));
    put(s.decay(), decay);
  }
  if constexpr (kGate == FW_GATE_SCALAR) {
    own.decay = p.has_fixed_gate ? scalar_decay(fixed_gate(p, hv))
                                 : cuda::exp_rounded(log_decay(p, hv, 0, cuda::from_bits(bits.g, p.g.dtype)));
  }
  return own;
}

// One token: the tile decayed, read, erased and written; o of the lane's columns.
template <fw_gate kGate, fw_erase kErase, int kRows>
__device__ inline void advance(const StepLane<kRows> &own, StepChannels<kGate, kErase> &s, StepToken &token, float scale,
                               StepTile<kRows> &S, float (&o)[kQuad]) {
  float sums[2][kQuad] = {};
  const auto quad_of = [&](const float *from, int quad) {
    return *reinterpret_cast<const float4 *>(from + own.row_of(quad));
  };
#pragma unroll
  for (int i = 0; i < kRows / kQuad; ++i) {
    const float4 q = quad_of(s.q(), i), x = kErase != FW_ERASE_NONE ? quad_of(s.x(), i) : q;
    const float4 same = make_float4(token.decay, token.decay, token.decay, token.decay);
    const float4 decay = kGate == FW_GATE_VECTOR ? quad_of(s.decay(), i) : same;
    read_tile<kGate, kErase>(&q.x, &x.x, &decay.x, S[i], sums);
  }
#pragma unroll
  for (int offset = 1; offset < 16; offset *= 2) {
    if (offset == own.lanes) break;
#pragma unroll
    for (int j = 0; j < kQuad; ++j) {
      sums[0][j] += __shfl_xor_sync(0xffffffffu, sums[0][j], offset * own.row_step);
      if constexpr (kErase != FW_ERASE_NONE) sums[1][j] += __shfl_xor_sync(0xffffffffu, sums[1][j], offset * own.row_step);
    }
  }
  erase_value<kErase>(sums, token.u);
#pragma unroll
  for (int i = 0; i < kRows / kQuad; ++i) {
    const float4 k = quad_of(s.k(), i), b = kErase == FW_ERASE_INDEPENDENT ? quad_of(s.b(), i) : k;
    write_tile<kErase>(&k.x, &b.x, sums, token.u, S[i]);
  }
#pragma unroll
  for (int j = 0; j < kQuad; ++j) o[j] = row_output<kErase>(sums, token.u, j, token.qk, token.qb, scale);
}

// Which slot of the pool and which rows of the call sequence n has; slot -1: it is skipped.
struct StepSequence {
  int64_t slot;
  cuda::DeviceSegment segment;
};
__device__ inline StepSequence step_sequence(const Problem &p, int64_t n) {
  int64_t slot = n;
  if (given(p.state_indices)) {
    slot = load_int(p.state_indices, n);
    if (slot >= p.state.shape[0]) slot = -1;
  }
  const cuda::DeviceSegment segment = cuda::device_segment(p.cu_seqlens, p.T, n);
  return {segment.begin == segment.end ? -1 : slot, segment};
}

// Four neighbouring columns of a token's o, by the lane that owns their first rows.
template <int kRows>
__device__ inline void store_output(const Problem &p, const StepLane<kRows> &own, int64_t batch, int64_t token, int64_t hv,
                                    int64_t column, const float (&o)[kQuad]) {
  if (own.row != 0) return;
  const int64_t offset = head_offset(p.o, batch, token, hv);
  cuda::store_quad(cuda::row_at(p.o, offset, p.o.strides[3]), column, p.V, o);
}
template <int kRows>
__device__ inline void store_zeros(const Problem &p, const StepLane<kRows> &own, const cuda::DeviceSegment &segment, int64_t hv,
                                   int64_t column) {
  const float zeros[kQuad] = {};
  for (int64_t token = segment.begin; token < segment.end; ++token) {
    store_output(p, own, segment.batch, token, hv, column, zeros);
  }
}

// The same by all threads of a block that has a whole head.
__device__ inline void zero_outputs(const Problem &p, const cuda::DeviceSegment &segment, int64_t hv) {
  for (int64_t token = segment.begin; token < segment.end; ++token) {
    const int64_t offset = head_offset(p.o, segment.batch, token, hv);
    for (int column = static_cast<int>(threadIdx.x); column < p.V; column += static_cast<int>(blockDim.x)) {
      store_at(p.o, offset + column * p.o.strides[3], 0.0f);
    }
  }
}

// All tokens of a sequence against the warp's part of its state; `bits` are those of the first.
template <bool kAsksAhead, fw_gate kGate, fw_erase kErase, int kRows>
__device__ inline void take_steps(const Problem &p, const StepLane<kRows> &own, const cuda::DeviceSegment &segment, int64_t hv,
                                  int64_t h, int64_t column, StepBits<kGate, kErase> &bits, StepChannels<kGate, kErase> &s,
                                  StepTile<kRows> &S) {
#pragma unroll 1
  for (int64_t token = segment.begin; token < segment.end; ++token) {
    const bool is_last = token + 1 == segment.end;
    if (!kAsksAhead && token > segment.begin) bits.ask_all(p, segment.batch, token, hv, h, column);
    StepToken operands = make_token(p, bits, hv, s);
    if (kAsksAhead && !is_last) bits.ask_all(p, segment.batch, token + 1, hv, h, column);
    __syncwarp();  // the channels are there
    float o[kQuad];
    advance<kGate, kErase>(own, s, operands, p.scale_f32, S, o);
    store_output(p, own, segment.batch, token, hv, column, o);
    __syncwarp();  // the channels may be written again
  }
}

template <int kRows, class T>
__device__ inline void load_part(const T *from, const StepLane<kRows> &own, bool is_vk, int64_t stride, StepTile<kRows> &S) {
  if (is_vk) {
    load_panel<kRows, true>(from, own, stride, S);
  } else {
    load_panel<kRows, false>(from, own, stride, S);
  }
}
template <int kRows, class T>
__device__ inline void store_part(T *to, const StepLane<kRows> &own, bool is_vk, int64_t stride, const StepTile<kRows> &S) {
  if (is_vk) {
    store_panel<kRows, true>(to, own, stride, S);
  } else {
    store_panel<kRows, false>(to, own, stride, S);
  }
}

}  // namespace fw::recurrence
