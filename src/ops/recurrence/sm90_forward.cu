// SPDX-License-Identifier: Apache-2.0
// Host side of the sm_90a forward: what it accepts, the workspace map, tensor maps, launches.
#include "ops/recurrence/sm90_forward.hpp"

#include "ops/recurrence/sm90_host.cuh"
#include "ops/recurrence/sm90_scan.cuh"

namespace fw {
namespace {

using namespace sm90;

struct Layout {
  TileLayout tiles;
  size_t summary, start, total;
};

Layout layout(const Sm90Forward &in) {
  Parts parts;
  Layout at = {};
  at.tiles = lay_out_tiles(parts, in, false);
  at.summary = parts.take(2 * segment_state_bytes(in));
  at.start = parts.take(segment_state_bytes(in));
  at.total = parts.total;
  return at;
}

}  // namespace

const char *sm90_forward_refusal(const Sm90Forward &in) {
  if (in.K != kKey || in.V != kKey) return "K and V, allowed 128";
  if (in.H < 1 || in.HV < 1 || in.HV % in.H != 0) return "HV is no multiple of H";
  if (in.T < 1 || in.N < 1) return "T or the number of sequences is 0";
  if (in.T >= (int64_t{1} << 30) || in.HV > 65535 || slots(in) >= (int64_t{1} << 30)) return "T or HV, too large";
  if (in.N * in.HV >= (int64_t{1} << 29)) return "N * HV, too large";
  if (!box_strides(in.q, in.q_strides) || !box_strides(in.k, in.k_strides) || !box_strides(in.v, in.v_strides) ||
      !box_strides(in.o, in.o_strides)) {
    return "q, k, v or o: start or an outer stride is no multiple of 16 bytes, or a stride is negative";
  }
  const auto pairs = [](int64_t stride) { return stride % 2 == 0; };
  if (in.gate == Sm90Gate::kVector &&
      (reinterpret_cast<uintptr_t>(in.g) % (in.g_type == Sm90Real::kFloat32 ? 8 : 4) != 0 ||
       !pairs(in.g_strides.batch) || !pairs(in.g_strides.token) || !pairs(in.g_strides.head))) {
    return "g: start or an outer stride is no multiple of two elements";
  }
  if (in.gate == Sm90Gate::kVector) {
    for (const int64_t stride : {in.q_strides.token, in.k_strides.token, in.g_strides.token}) {
      if (stride < 0 || stride >= (int64_t{1} << 24)) return "q, k or g: a token stride, allowed 0 to 2^24 - 1 elements";
    }
  }
  // A stride of 0 over a dimension longer than 1 has no tensor map.
  const auto repeats = [&in](const Sm90Strides &s, int64_t heads) {
    return (s.batch == 0 && in.B > 1) || (s.token == 0 && in.T > 1) || (s.head == 0 && heads > 1);
  };
  if (repeats(in.q_strides, in.H) || repeats(in.k_strides, in.H) || repeats(in.v_strides, in.HV)) {
    return "q, k or v: a stride of 0";
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

  ScanArguments scan = {};
  cudaError_t status = encode(&scan.q, in.q, in.q_strides, in.H, in);
  if (status == cudaSuccess) status = encode(&scan.k, in.k, in.k_strides, in.H, in);
  if (status == cudaSuccess) status = encode(&scan.v, in.v, in.v_strides, in.HV, in);
  if (status == cudaSuccess) status = encode(&scan.o, in.o, in.o_strides, in.HV, in);
  if (status != cudaSuccess) return status;
  PrepArguments prep = prep_of(in, shape, tiles);
  prep.k = scan.k;
  scan.shape = shape;
  scan.tiles = tiles;
  scan.scale = in.scale;
  prep.o = in.o, prep.o_strides = in.o_strides, prep.o_rows_left_over = in.cu_seqlens != nullptr;
  status = launch_prep(prep, in.gate, in.erase, stream);
  if (status != cudaSuccess) return status;

  const bool by_key = in.layout == Sm90Layout::kKeyValue;
  scan.segments = segments(in);
  scan.end_state = in.final_state;
  scan.end_key = by_key ? kKey : 1, scan.end_value = by_key ? 1 : kKey;
  scan.o_rows = in.o, scan.o_strides = in.o_strides;
  scan.start_state = in.initial_state, scan.start_key = scan.end_key, scan.start_value = scan.end_value;
  if (scan.segments > 1) {
    float *start = reinterpret_cast<float *>(base + at.start);
    scan.summary = reinterpret_cast<float *>(base + at.summary);
    status = launch_summary(scan, in.gate, in.erase, stream);
    if (status != cudaSuccess) return status;
    const LinkArguments link = {static_cast<int>(in.N * in.HV), scan.segments,   scan.summary, in.initial_state,
                                scan.start_key,                 scan.start_value, start};
    status = launch_link(link, stream);
    if (status != cudaSuccess) return status;
    scan.start_state = start, scan.start_key = 1, scan.start_value = kKey;
  }
  return launch_scan(scan, in.gate, in.erase, stream);
}

}  // namespace fw
