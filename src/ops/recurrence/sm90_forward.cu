// SPDX-License-Identifier: Apache-2.0
// Host side of the sm_90a forward: what it accepts, the workspace map, tensor maps, launches.
#include "ops/recurrence/sm90_forward.hpp"

#include <initializer_list>
#include <utility>

#include "ops/recurrence/sm90_host.cuh"
#include "ops/recurrence/sm90_scan.cuh"

namespace fw {
namespace {

using namespace sm90;

struct Layout {
  TileLayout tiles;
  size_t gate, summary, start, total;
};

Layout layout(const Sm90Forward &in) {
  Parts parts;
  Layout at = {};
  at.tiles = lay_out_tiles(parts, in);
  at.gate = parts.take(made_gate_bytes(in));
  at.summary = parts.take(2 * segment_state_bytes(in, false));
  at.start = parts.take(segment_state_bytes(in, false));
  at.total = parts.total;
  return at;
}

}  // namespace

const char *sm90_forward_refusal(const Sm90Forward &in) {
  const auto fits = [](int64_t size) { return size >= 8 && size <= kKey && size % 8 == 0; };
  if (!fits(in.K) || !fits(in.V)) return "K and V, allowed multiples of 8 up to 128";
  if (in.H < 1 || in.HV < 1 || in.HV % in.H != 0) return "HV is no multiple of H";
  if (in.T < 1 || in.N < 1) return "T or the number of sequences is 0";
  if (in.T >= (int64_t{1} << 30) || in.HV > 65535 || slots(in) >= (int64_t{1} << 30)) return "T or HV, too large";
  if (in.N * in.HV >= (int64_t{1} << 29)) return "N * HV, too large";
  if (!box_strides(in.q, in.q_strides) || !box_strides(in.k, in.k_strides) || !box_strides(in.v, in.v_strides) ||
      !box_strides(in.o, in.o_strides)) {
    return "q, k, v or o: start or an outer stride is no multiple of 16 bytes, or a stride is negative";
  }
  if (in.erase == Sm90Erase::kSeparate) {
    if (in.gate == Sm90Gate::kVector ? !in.erase_gate || !in.write_gate || in.p || in.reads_before
                                     : !in.p || in.erase_gate || in.write_gate) {
      return "the erase key: p with no gate or a scalar gate, or erase_gate and write_gate with a vector gate, allowed";
    }
  } else if (in.erase == Sm90Erase::kShared && in.reads_before && in.gate == Sm90Gate::kVector) {
    return "the erase reads before the decay of a vector gate";
  }
  if (in.erase == Sm90Erase::kIndependent && (in.gate == Sm90Gate::kScalar || !in.a || !in.b)) {
    return "independent erase keys with a scalar gate";
  }
  if (in.gate == Sm90Gate::kNone && in.erase == Sm90Erase::kNone && in.has_l2norm) {
    return "a norm without gate and erase, whose states hold to fp32";
  }
  for (const auto &[base, strides] : {std::pair<const void *, const Sm90Strides &>{in.p, in.p_strides},
                                      {in.erase_gate, in.erase_gate_strides}, {in.write_gate, in.write_gate_strides},
                                      {in.a, in.a_strides}, {in.b, in.b_strides}}) {
    if (base && !box_strides(base, strides)) {
      return "a, b, p, erase_gate or write_gate: start or an outer stride is no multiple of 16 bytes, or a stride is negative";
    }
  }
  const auto pairs = [](int64_t stride) { return stride % 2 == 0; };
  if (in.gate == Sm90Gate::kVector &&
      (reinterpret_cast<uintptr_t>(in.g) % (in.g_type == Sm90Real::kFloat32 ? 8 : 4) != 0 ||
       !pairs(in.g_strides.batch) || !pairs(in.g_strides.token) || !pairs(in.g_strides.head))) {
    return "g: start or an outer stride is no multiple of two elements";
  }
  if (in.gate == Sm90Gate::kVector) {
    if (in.g_strides.token < 0 || in.g_strides.token >= (int64_t{1} << 24)) return "g: the token stride, allowed 0 to 2^24 - 1 elements";
  }
  // A stride of 0 over a dimension longer than 1 has no tensor map.
  const auto repeats = [&in](const Sm90Strides &s, int64_t heads) {
    return (s.batch == 0 && in.B > 1) || (s.token == 0 && in.T > 1) || (s.head == 0 && heads > 1);
  };
  if (repeats(in.q_strides, in.H) || repeats(in.k_strides, in.H) || repeats(in.v_strides, in.HV)) {
    return "q, k or v: a stride of 0";
  }
  if ((in.p && repeats(in.p_strides, in.H)) || (in.write_gate && repeats(in.write_gate_strides, in.HV)) ||
      (in.a && (repeats(in.a_strides, in.H) || repeats(in.b_strides, in.H)))) {
    return "a, b, p or write_gate: a stride of 0";
  }
  return nullptr;
}

size_t sm90_forward_workspace(const Sm90Forward &in) { return layout(in).total; }

int sm90_forward_launch(const Sm90Forward &in, void *workspace, void *stream_pointer) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  unsigned char *base = static_cast<unsigned char *>(workspace);
  const Layout at = layout(in);
  const Shape shape = shape_of(in);
  const Tiles tiles = tiles_at(base, at.tiles);

  PrepArguments prep = prep_of(in, shape, tiles);
  ScanArguments scan = {};
  cudaError_t status = encode(&scan.q, in.q, in.q_strides, in.H, in, in.K);
  if (status == cudaSuccess) status = encode(&scan.k, in.k, in.k_strides, in.H, in, in.K);
  if (status == cudaSuccess) status = encode(&scan.v, in.v, in.v_strides, in.HV, in, in.V);
  if (status == cudaSuccess) status = encode(&scan.o, in.o, in.o_strides, in.HV, in, in.V);
  if (status == cudaSuccess && in.p) status = encode(&scan.x, in.p, in.p_strides, in.H, in, in.K);
  if (status == cudaSuccess && in.write_gate) status = encode(&scan.x, in.write_gate, in.write_gate_strides, in.HV, in, in.V);
  if (status != cudaSuccess) return status;
  if (status == cudaSuccess && in.a) status = encode(&prep.x, in.a, in.a_strides, in.H, in, in.K);
  if (status == cudaSuccess && in.b) status = encode(&prep.b, in.b, in.b_strides, in.H, in, in.K);
  if (status != cudaSuccess) return status;
  prep.q = scan.q, prep.k = scan.k;
  if (in.p) prep.x = scan.x;
  prep.x_rows = static_cast<const __nv_bfloat16 *>(in.p ? in.p : in.erase_gate);
  prep.x_strides = in.p ? in.p_strides : in.erase_gate_strides;
  scan.shape = shape, scan.tiles = tiles, scan.scale = in.scale;
  prep.o = in.o, prep.o_strides = in.o_strides, prep.o_rows_left_over = in.cu_seqlens != nullptr;
  status = make_gate(in, prep, base + at.gate, stream);
  if (status != cudaSuccess) return status;
  const Sm90Gate gate = kernel_gate(in);
  status = launch_prep(prep, gate, in.erase, stream);
  if (status != cudaSuccess) return status;

  const bool by_key = in.layout == Sm90Layout::kKeyValue;
  scan.segments = segments(in, false);
  scan.end_state = in.final_state;
  scan.end_key = by_key ? in.V : 1, scan.end_value = by_key ? 1 : in.K;
  scan.start_keys = shape.K, scan.start_values = shape.V;
  scan.o_rows = in.o, scan.o_strides = in.o_strides;
  scan.start_state = in.initial_state, scan.start_key = scan.end_key, scan.start_value = scan.end_value;
  if (scan.segments > 1) {
    float *start = reinterpret_cast<float *>(base + at.start);
    scan.summary = reinterpret_cast<float *>(base + at.summary);
    status = launch_summary(scan, gate, in.erase, stream);
    if (status != cudaSuccess) return status;
    const LinkArguments link = {static_cast<int>(in.N * in.HV), scan.segments, scan.summary, in.initial_state, scan.start_key,
                                scan.start_value, start, shape.K, shape.V};
    status = launch_link(link, stream);
    if (status != cudaSuccess) return status;
    scan.start_state = start, scan.start_key = 1, scan.start_value = kKey;
    scan.start_keys = scan.start_values = kKey;
  }
  return launch_scan(scan, gate, in.erase, stream);
}

}  // namespace fw
