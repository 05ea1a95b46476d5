// SPDX-License-Identifier: Apache-2.0
// Host side of the sm_90a backward: what it accepts, the workspace map, launches. In order: prep as in the forward (beta at
// least 2^-40), the scan that keeps states (sm90_scan.cu), the scan in reverse (sm90_reverse.cu), the chunks' gradients
// (sm90_gradients.cu), and what logits need after them (sm90_finish.cu); with several segments each scan has a summary and links
// before it.
#include "ops/recurrence/sm90_backward.hpp"

#include <cmath>

#include "ops/recurrence/sm90_gradients.cuh"
#include "ops/recurrence/sm90_host.cuh"

namespace fw {
namespace {

using namespace sm90;

struct KeptLayout {
  size_t rows, states, dropped;
};

struct Layout {
  TileLayout tiles;
  KeptLayout forward, reverse;
  size_t summary, turned, start, turned_start, partial;
  size_t gate, lengths, dg, dbeta, gate_sums;  // of what is made inside
  size_t total;
};

KeptLayout lay_out_kept(Parts &parts, size_t tiles, bool has_rows, bool is_gated) {
  KeptLayout at = {};
  at.rows = parts.take(has_rows ? tiles * 2 * kTileBytes : 0);
  at.states = parts.take(tiles * 4 * kTileBytes);
  at.dropped = parts.take(is_gated ? tiles * 2 * 512 * sizeof(uint4) : 0);
  return at;
}

bool has_logits(const Sm90Forward &in) { return in.activations.gate_kind != FW_GATE_INPUT_LOG_DECAY; }
bool has_parameters(const Sm90Forward &in) { return has_logits(in) && (in.activations.a_log || in.activations.dt_bias); }
int gate_sum_width(const Sm90Forward &in) { return in.gate == Sm90Gate::kVector ? 1 + kKey : 2; }

Layout layout(const Sm90Forward &in) {
  const size_t tiles = static_cast<size_t>(slots(in)) * in.HV, state = segment_state_bytes(in, true);
  const bool is_gated = kernel_gate(in) != Sm90Gate::kNone, is_vector = in.gate == Sm90Gate::kVector;
  Parts parts;
  Layout at = {};
  at.tiles = lay_out_tiles(parts, in);
  at.forward = lay_out_kept(parts, tiles, in.erase == Sm90Erase::kShared, is_gated);
  at.reverse = lay_out_kept(parts, tiles, true, is_gated);
  at.summary = parts.take(2 * state);
  at.turned = parts.take(2 * state);
  at.start = parts.take(state);
  at.turned_start = parts.take(state);
  const bool adds_heads = is_vector && in.HV > in.H;
  at.partial = parts.take(adds_heads ? static_cast<size_t>(slots(in)) * in.H * (2 * kChunk * kKey * sizeof(float)) : 0);
  at.gate = parts.take(made_gate_bytes(in));
  at.lengths = parts.take(is_vector && in.has_l2norm ? static_cast<size_t>(slots(in)) * in.H * (2 * kChunk * sizeof(float)) : 0);
  const size_t heads = static_cast<size_t>(in.B) * in.T * in.HV * sizeof(float);
  at.dg = parts.take(!is_vector && has_logits(in) ? heads : 0);
  at.dbeta = parts.take(in.activations.beta_kind != FW_BETA_INPUT_PLAIN ? heads : 0);
  at.gate_sums = parts.take(has_parameters(in) ? tiles * gate_sum_width(in) * sizeof(float) : 0);
  at.total = parts.total;
  return at;
}

Kept kept_at(unsigned char *base, const KeptLayout &at, bool has_rows, bool has_dropped) {
  return {has_rows ? base + at.rows : nullptr, base + at.states,
          has_dropped ? reinterpret_cast<uint4 *>(base + at.dropped) : nullptr};
}

// Points the gradients that are not those of the call's own operands to the workspace, from where launch_finish takes them.
FinishArguments prepare_finish(const Sm90Backward &in, const Layout &at, unsigned char *base, GradientArguments &gradients) {
  const Sm90Forward &call = in.call;
  const auto floats = [base](size_t part) { return reinterpret_cast<float *>(base + part); };
  const int64_t token = call.HV;
  const Sm90Strides dense = {call.T * token, token, 1};
  FinishArguments finish = {};
  finish.shape = gradients.shape, finish.activations = call.activations;
  if (has_logits(call) && gradients.has_gate_gradient) {
    if (has_parameters(call) && (in.d_a_log || in.d_dt_bias)) finish.gate_sums = floats(at.gate_sums);
    finish.width = gate_sum_width(call);
    finish.d_a_log = in.d_a_log, finish.d_a_log_head = in.d_a_log_head;
    finish.d_dt_bias = in.d_dt_bias, finish.d_dt_bias_head = in.d_dt_bias_head, finish.d_dt_bias_key = in.d_dt_bias_key;
    if (call.gate == Sm90Gate::kVector) {
      gradients.logits = call.g, gradients.logits_strides = call.g_strides, gradients.logits_type = call.g_type;
      gradients.activations = call.activations, gradients.gate_sums = finish.gate_sums;
    } else {
      finish.g = call.g, finish.g_type = call.g_type, finish.g_strides = call.g_strides;
      finish.to_g = in.dg, finish.to_g_strides = in.dg_strides;
      finish.dg = floats(at.dg);
      gradients.dg = floats(at.dg), gradients.dg_type = Sm90Real::kFloat32, gradients.dg_strides = dense;
    }
  }
  if (call.activations.beta_kind != FW_BETA_INPUT_PLAIN && in.dbeta) {
    finish.beta = call.beta, finish.beta_type = call.beta_type, finish.beta_strides = call.beta_strides;
    finish.to_beta = in.dbeta, finish.to_beta_strides = in.dbeta_strides;
    finish.dbeta = floats(at.dbeta);
    gradients.dbeta = floats(at.dbeta), gradients.dbeta_type = Sm90Real::kFloat32, gradients.dbeta_strides = dense;
  }
  return finish;
}

}  // namespace

const char *sm90_backward_refusal(const Sm90Backward &in) {
  if (const char *why = sm90_forward_refusal(in.call)) return why;
  if (in.call.K != kKey || in.call.V != kKey) return "backward: K and V, allowed 128";
  if (!box_strides(in.d_o, in.d_o_strides) || !box_strides(in.dq, in.dq_strides) || !box_strides(in.dk, in.dk_strides) ||
      !box_strides(in.dv, in.dv_strides)) {
    return "d_o, dq, dk or dv: start or an outer stride is no multiple of 16 bytes, or a stride is negative";
  }
  const auto pairs = [](int64_t stride) { return stride % 2 == 0; };
  const Sm90Strides &dg = in.dg_strides;
  if (in.call.gate == Sm90Gate::kVector && (reinterpret_cast<uintptr_t>(in.dg) % (in.call.g_type == Sm90Real::kFloat32 ? 8 : 4) != 0 ||
                                            !pairs(dg.batch) || !pairs(dg.token) || !pairs(dg.head))) {
    return "dg: start or an outer stride is no multiple of two elements";
  }
  const Sm90Strides &s = in.d_o_strides;
  if (in.d_o && ((s.batch == 0 && in.call.B > 1) || (s.token == 0 && in.call.T > 1) || (s.head == 0 && in.call.HV > 1))) {
    return "d_o: a stride of 0";
  }
  return nullptr;
}

size_t sm90_backward_workspace(const Sm90Forward &in) { return layout(in).total; }

int sm90_backward_launch(const Sm90Backward &in, void *workspace, void *stream_pointer) {
  const Sm90Forward &call = in.call;
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_pointer);
  unsigned char *base = static_cast<unsigned char *>(workspace);
  const Layout at = layout(call);
  const Sm90Gate gate = kernel_gate(call);
  const bool erases = call.erase == Sm90Erase::kShared, is_vector = gate == Sm90Gate::kVector;
  const bool sums_gates = has_parameters(call) && (in.d_a_log || in.d_dt_bias), has_gate_gradient = in.dg || sums_gates;
  const bool has_dropped = gate != Sm90Gate::kNone && has_gate_gradient;

  GradientArguments gradients = {};
  cudaError_t status = cudaSuccess;
  const auto map = [&](CUtensorMap *to, const void *tensor, const Sm90Strides &strides, int64_t heads) {
    if (tensor && status == cudaSuccess) status = encode(to, tensor, strides, heads, call);
  };
  map(&gradients.q, call.q, call.q_strides, call.H);
  map(&gradients.k, call.k, call.k_strides, call.H);
  map(&gradients.v, call.v, call.v_strides, call.HV);
  map(&gradients.d_o, in.d_o, in.d_o_strides, call.HV);
  map(&gradients.dq_map, in.dq, in.dq_strides, call.H);
  map(&gradients.dk_map, in.dk, in.dk_strides, call.H);
  if (status != cudaSuccess) return status;

  gradients.shape = shape_of(call);
  gradients.tiles = tiles_at(base, at.tiles);
  if (is_vector && call.has_l2norm) gradients.tiles.lengths = reinterpret_cast<float *>(base + at.lengths);
  gradients.forward = kept_at(base, at.forward, erases, has_dropped);
  gradients.reverse = kept_at(base, at.reverse, true, has_dropped);
  gradients.dq = in.dq, gradients.dq_strides = in.dq_strides;
  gradients.dk = in.dk, gradients.dk_strides = in.dk_strides;
  gradients.dv = in.dv, gradients.dv_strides = in.dv_strides;
  gradients.dg = in.dg, gradients.dg_strides = in.dg_strides;
  gradients.dbeta = in.dbeta, gradients.dbeta_strides = in.dbeta_strides;
  gradients.dg_type = call.g_type, gradients.dbeta_type = call.beta_type;
  gradients.has_l2norm = call.has_l2norm, gradients.has_gate_gradient = has_gate_gradient;
  if (call.HV > call.H) gradients.partial = reinterpret_cast<float *>(base + at.partial);
  gradients.d_o_is_zero = !in.d_o;
  gradients.scale = call.scale;
  gradients.inverse_scale = std::isfinite(1.0f / call.scale) ? 1.0f / call.scale : 0.0f;
  const FinishArguments finish = prepare_finish(in, at, base, gradients);

  PrepArguments prep = prep_of(call, gradients.shape, gradients.tiles);
  prep.k = gradients.k, prep.q = gradients.q;
  prep.for_backward = true;
  status = make_gate(call, prep, base + at.gate, stream);
  if (status != cudaSuccess) return status;
  gradients.g = prep.g, gradients.g_strides = prep.g_strides, gradients.g_type = prep.g_type;
  status = launch_prep(prep, gate, call.erase, stream);
  if (status != cudaSuccess) return status;

  const bool by_key = call.layout == Sm90Layout::kKeyValue;
  const int heads = static_cast<int>(call.N * call.HV);
  ScanArguments scan = {};
  scan.q = gradients.q, scan.k = gradients.k, scan.v = gradients.v;
  scan.shape = gradients.shape;
  scan.tiles = gradients.tiles;
  scan.scale = call.scale;
  scan.segments = segments(call, true);
  scan.end_key = by_key ? kKey : 1, scan.end_value = by_key ? 1 : kKey;
  scan.start_key = scan.end_key, scan.start_value = scan.end_value;
  ScanArguments reverse = scan;
  reverse.v = gradients.d_o, reverse.v_is_zero = gradients.d_o_is_zero;
  scan.start_state = call.initial_state, reverse.start_state = in.d_final_state;
  reverse.end_state = in.d_initial_state;
  scan.kept = gradients.forward, reverse.kept = gradients.reverse;
  // The states at the starts of the segments of one direction; the scan then starts from them.
  const auto link = [&](ScanArguments &of, const float *summary, size_t start) {
    float *to = reinterpret_cast<float *>(base + start);
    status = launch_link({heads, of.segments, summary, of.start_state, of.start_key, of.start_value, to}, stream);
    of.start_state = to, of.start_key = 1, of.start_value = kKey;
  };
  if (scan.segments > 1) {
    scan.summary = reinterpret_cast<float *>(base + at.summary);
    scan.turned = reverse.turned = reinterpret_cast<float *>(base + at.turned);
    status = launch_summary(scan, gate, call.erase, stream);
    if (status == cudaSuccess) link(scan, scan.summary, at.start);
    if (status != cudaSuccess) return status;
  }
  status = launch_states(scan, gate, call.erase, stream);
  if (status != cudaSuccess) return status;
  if (scan.segments > 1) {
    status = launch_reverse_summary(reverse, gate, call.erase, stream);
    if (status == cudaSuccess) link(reverse, reverse.turned, at.turned_start);
    if (status != cudaSuccess) return status;
  }
  status = launch_reverse(reverse, gate, call.erase, stream);
  if (status != cudaSuccess) return status;
  status = launch_gradients(gradients, gate, call.erase, stream);
  return status == cudaSuccess ? launch_finish(finish, stream) : status;
}

}  // namespace fw
