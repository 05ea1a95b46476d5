// SPDX-License-Identifier: Apache-2.0
// Rows of a chunk from their tensors to fp32, 16 threads a row; the prep's and the gradients' of the chunk form.
#pragma once
#include "cuda/rows.cuh"
#include "ops/recurrence/cuda_chunk.cuh"

namespace fw::recurrence {

constexpr int kGroups = 16;  // threads a row

// Four elements of 16 bits; those from `left` on are 0.
__device__ __forceinline__ uint2 load_halves(const fw_tensor &t, int64_t offset, int64_t channel, int64_t left, bool is_dense) {
  if (left <= 0) return make_uint2(0, 0);
  if (is_dense) return *reinterpret_cast<const uint2 *>(static_cast<const uint16_t *>(t.data) + offset + channel);
  const uint4 x = cuda::load_loose_quad(t.data, t.dtype, offset + channel * t.strides[3], t.strides[3], left);
  return make_uint2(x.x | x.y << 16, x.z | x.w << 16);
}
struct Quad {
  float x[4];
};
__device__ __forceinline__ Quad halves_of(uint2 bits, bool is_bf16) {
  Quad quad;
  cuda::from_quad_bits({{bits.x, bits.y, 0, 0}}, is_bf16 ? FW_BF16 : FW_F16, quad.x);
  return quad;
}
__device__ __forceinline__ float4 as_vector(const Quad &q) { return make_float4(q.x[0], q.x[1], q.x[2], q.x[3]); }
__device__ __forceinline__ Quad read_quad(const float *from) {
  const float4 x = *reinterpret_cast<const float4 *>(from);
  return {{x.x, x.y, x.z, x.w}};
}

// 1 / length of a row that 16 threads hold (eps 1e-6 inside the root).
template <int kQuads>
__device__ __forceinline__ float row_factor(const Quad (&row)[kQuads]) {
  double sum = 0;
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum += static_cast<double>(row[quad].x[e]) * row[quad].x[e];
  }
  for (int offset = kGroups / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  return static_cast<float>(rsqrt(sum + 1e-6));
}

template <fw_gate kGate, fw_erase kErase, int kKeys>
struct ChunkRows {
  static constexpr int kQuads = kKeys / (4 * kGroups);
  static constexpr bool kIndependent = kErase == FW_ERASE_INDEPENDENT;

  const Problem &p;
  ChunkPlace place;
  int64_t hv, h;
  bool is_dense;

  // A row of keys as the tensor has it.
  __device__ __forceinline__ void load_keys(const fw_tensor &t, int64_t offset, bool is_there, uint2 (&to)[kQuads]) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int channel = 4 * (threadIdx.x % kGroups + kGroups * quad);
      to[quad] = load_halves(t, offset, channel, is_there ? p.K - channel : 0, is_dense);
    }
  }
  __device__ __forceinline__ void as_floats(const uint2 (&bits)[kQuads], bool is_normed, Quad (&to)[kQuads]) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) to[quad] = halves_of(bits[quad], p.q.dtype == FW_BF16);
    if (!is_normed) return;
    const float factor = row_factor<kQuads>(to);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
#pragma unroll
      for (int e = 0; e < 4; ++e) to[quad].x[e] *= factor;
    }
  }
  __device__ __forceinline__ void keep(const Quad (&row)[kQuads], int i, float *to) const {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      *reinterpret_cast<float4 *>(to + i * kKeys + 4 * (threadIdx.x % kGroups + kGroups * quad)) = as_vector(row[quad]);
    }
  }

  __device__ __forceinline__ float scalar_gate(const TokenPlace &at) const {
    if (p.has_fixed_gate) return scalar_decay(fixed_gate(p, hv));
    if (at.sub != 0) return 1.0f;
    return scalar_decay(log_decay(p, hv, 0, load_at(p.g, head_offset(p.g, place.batch, at.token, hv))));
  }

  // A row as its tensors have it.
  struct Bits {
    uint2 q[kQuads], k[kQuads], x[kQuads], b[kQuads], erase_gate[kQuads], v[2], write_gate[2];
    cuda::QuadBits g[kQuads];
    TokenPlace at;
    float beta;
    bool is_there;
  };
  __device__ __forceinline__ bool has_write_gate() const { return kIsShared<kErase> && given(p.write_gate); }

  // Row i of the chunk, all loads under way together; past the rows: nothing, undecayed.
  __device__ __forceinline__ void load(int i, Bits &to) const {
    const bool is_there = i < place.rows;
    const int64_t row = place.first + (is_there ? i : 0), batch = place.batch;
    const TokenPlace at = place_of(p, row);
    const bool is_read = is_there && at.sub == p.n_sub - 1;
    const int group = threadIdx.x % kGroups;
    to.at = at, to.is_there = is_there;
    load_keys(p.q, head_offset(p.q, batch, at.token, h), is_read, to.q);
    load_keys(p.k, head_offset(p.k, batch, row, h), is_there, to.k);
    if constexpr (kIsShared<kErase>) {
      if (given(p.p)) load_keys(p.p, head_offset(p.p, batch, at.token, h), is_there, to.x);
      if (given(p.erase_gate)) load_keys(p.erase_gate, head_offset(p.erase_gate, batch, at.token, h), is_there, to.erase_gate);
    }
    if constexpr (kIndependent) {
      load_keys(p.a, head_offset(p.a, batch, at.token, h), is_there, to.x);
      load_keys(p.b, head_offset(p.b, batch, at.token, h), is_there, to.b);
    }
    if constexpr (kGate == FW_GATE_VECTOR) {
      const int64_t offset = head_offset(p.g, batch, at.token, hv);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int channel = 4 * (group + kGroups * quad);
        to.g[quad] = {};
        if (!is_there || channel >= p.K) continue;
        if (is_dense) {
          to.g[quad] = cuda::load_quad_bits(p.g.data, p.g.dtype, offset + channel);
        } else {
          const uint4 x = cuda::load_loose_quad(p.g.data, p.g.dtype, offset + channel * p.g.strides[3], p.g.strides[3], p.K - channel);
          const bool is_fp32 = p.g.dtype == FW_F32;
          to.g[quad] = {{is_fp32 ? x.x : x.x | x.y << 16, is_fp32 ? x.y : x.z | x.w << 16, x.z, x.w}};
        }
      }
    }
    const int64_t from_v = head_offset(p.v, batch, row, hv), from_gate = head_offset(p.write_gate, batch, at.token, hv);
#pragma unroll
    for (int quad = 0; quad < 2; ++quad) {
      const int column = 4 * (group + kGroups * quad);
      const int64_t left = is_there ? p.V - column : 0;
      to.v[quad] = load_halves(p.v, from_v, column, left, is_dense);
      if (has_write_gate()) to.write_gate[quad] = load_halves(p.write_gate, from_gate, column, left, is_dense);
    }
    to.beta = kIsShared<kErase> && is_there ? load_beta(p, batch, row, hv) : 1.0f;
  }

  __device__ __forceinline__ Quad value(const Bits &from, int quad) const { return halves_of(from.v[quad], p.q.dtype == FW_BF16); }
  __device__ __forceinline__ Quad write_gate(const Bits &from, int quad) const {
    return has_write_gate() ? halves_of(from.write_gate[quad], p.q.dtype == FW_BF16) : Quad{{1, 1, 1, 1}};
  }

  // With everything that is done to an operand, to [16][kKeys]; a scalar gate's decay to [16].
  __device__ __forceinline__ void keep_keys(const Bits &from, int i, float *q, float *k, float *x, float *b, float *decay) const {
    const bool is_bf16 = p.q.dtype == FW_BF16;
    const int group = threadIdx.x % kGroups;
    Quad now[kQuads];
    as_floats(from.q, p.has_l2norm, now);
    keep(now, i, q);
    as_floats(from.k, p.has_l2norm, now);
    keep(now, i, k);
    if constexpr (kIsShared<kErase>) {
      if (given(p.p)) as_floats(from.x, p.has_l2norm, now);
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const Quad gate = given(p.erase_gate) ? halves_of(from.erase_gate[quad], is_bf16) : Quad{{1, 1, 1, 1}};
#pragma unroll
        for (int e = 0; e < 4; ++e) now[quad].x[e] *= from.beta * gate.x[e];
      }
      keep(now, i, x);
    }
    if constexpr (kIndependent) {
      as_floats(from.x, false, now);
      keep(now, i, x);
      as_floats(from.b, false, now);
      keep(now, i, b);
    }
    if constexpr (kGate == FW_GATE_VECTOR) {
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int channel = 4 * (group + kGroups * quad);
        cuda::from_quad_bits(from.g[quad], p.g.dtype, now[quad].x);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          now[quad].x[e] = from.is_there && channel + e < p.K ? expf(log_decay(p, hv, channel + e, now[quad].x[e])) : 1.0f;
        }
      }
      keep(now, i, decay);
    }
    if constexpr (kGate == FW_GATE_SCALAR) {
      if (group == 0) decay[i] = from.is_there ? scalar_gate(from.at) : 1.0f;
    }
  }
};

// Whether every tensor that rows come from has whole quads.
bool has_dense_rows(const Problem &p);

}  // namespace fw::recurrence
