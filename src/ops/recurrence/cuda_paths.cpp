// SPDX-License-Identifier: Apache-2.0
// The portable CUDA path: what it accepts, how its workspace is cut, and the order of its kernels.
#include "ops/recurrence/cuda_paths.hpp"

#include "core/ledger.hpp"
#include "core/operands.hpp"
#include "cuda/candidate.hpp"
#include "cuda/device.hpp"
#include "ops/recurrence/checks.hpp"
#include "ops/recurrence/cuda_launch.hpp"
#include "ops/recurrence/cuda_panels.hpp"
#include "ops/recurrence/saved.hpp"

namespace fw::recurrence {

bool cuda_accepts(const fw_context &, const Problem &p, Reason &reason) {
  if (p.device != FW_DEVICE_CUDA) return reason.refuse("device is cpu");
  if (p.is_f64) return reason.refuse("operands are fp64, computed by the reference only");
  if (p.form == FW_FORM_PARALLEL) return reason.refuse("form is parallel");
  if (p.N * p.HV > INT32_MAX / 64) return reason.refuse("more than 2^25 sequences times value heads");
  return cuda::is_available(8, 0, reason);
}

bool cuda_portable_accepts(const fw_context &context, const Problem &p, Reason &reason) {
  if (!cuda_accepts(context, p, reason)) return false;
#if defined(FW_HAVE_CUDA)
  if (p.direction == FW_BACKWARD && reverse_shared_bytes(p) > cuda::shared_memory_limit()) {
    return reason.refuse("a thread block needs %d bytes of shared memory here, the device allows %d", reverse_shared_bytes(p),
                         cuda::shared_memory_limit());
  }
#endif
  return true;
}

bool has_whole_quads(const fw_tensor &t) {
  const int32_t last = t.ndim - 1;
  bool is_aligned = t.strides[last] == 1 && reinterpret_cast<uintptr_t>(t.data) % static_cast<uintptr_t>(4 * dtype_size(t.dtype)) == 0;
  for (int32_t i = 0; i < last; ++i) is_aligned = is_aligned && (t.shape[i] <= 1 || t.strides[i] % 4 == 0);
  return is_aligned;
}

bool cuda_step_accepts(const fw_context &context, const Problem &p, Reason &reason) {
  if (!cuda_accepts(context, p, reason)) return false;
  if (p.has_normalizer) return reason.refuse("the normaliser is asked for");
  if (p.n_sub != 1) return reason.refuse("n_sub is %lld", static_cast<long long>(p.n_sub));
  if (p.K != 64 && p.K != 128) return reason.refuse("K is %lld, this computes 64 and 128", static_cast<long long>(p.K));
  const int64_t panel = step_panel(p.K);
  if (p.V % panel != 0) return reason.refuse("V is %lld, at this K a multiple of %lld is needed", static_cast<long long>(p.V), static_cast<long long>(panel));
  const Operand rows[] = {{"state", &p.state}, {"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"a", &p.a}, {"b", &p.b}, {"p", &p.p},
                          {"erase_gate", &p.erase_gate}, {"write_gate", &p.write_gate}, {"g", p.gate == FW_GATE_VECTOR ? &p.g : &p.p}};
  for (const Operand &row : rows) {
    if (given(*row.tensor) && !has_whole_quads(*row.tensor)) {
      return reason.refuse("%s has a last dimension that is not dense, or rows that do not start at multiples of 4 elements", row.name);
    }
  }
  return true;
}

// What both kernels that stream states through shared memory ask for.
static bool streams_states(const fw_context &context, const Problem &p, Reason &reason, const char *name) {
  if (!cuda_step_accepts(context, p, reason) || !cuda::is_exactly(9, 0, reason)) return false;
  if (p.is_batch_invariant) return reason.refuse("batch_invariant is asked for, which cuda_step gives at every batch");
  const int64_t panel = stream_panel(p.state.dtype), size = dtype_size(p.state.dtype);
  if (p.V % panel != 0 || p.V > kStepWidest) {
    return reason.refuse("V is %lld, of a state of %s this computes multiples of %lld up to %lld", static_cast<long long>(p.V),
                         dtype_name(p.state.dtype), static_cast<long long>(panel), static_cast<long long>(kStepWidest));
  }
  const fw_tensor &t = p.state;
  const bool is_one_piece = t.ndim == 3 ? p.V % kStatePad == 0 : t.strides[2] == t.shape[3];
  if (!is_one_piece) return reason.refuse("a head's state is not one piece of memory");
  for (int32_t i = 0; i < 2; ++i) {
    if (reinterpret_cast<uintptr_t>(t.data) % 16 != 0 || (t.shape[i] > 1 && t.strides[i] * size % 16 != 0)) {
      return reason.refuse("states do not start at multiples of 16 bytes");
    }
  }
  const int64_t heads = p.N * p.HV, least = kStreamHeads * cuda::multiprocessor_count();
  return heads >= least || name_in_list(context.force_impl, name) ||
         reason.refuse("%lld heads, this pays from %lld on", static_cast<long long>(heads), static_cast<long long>(least));
}

bool sm90_step_accepts(const fw_context &context, const Problem &p, Reason &reason) {
  if (p.state.dtype != FW_F32 && (p.T > 1 || given(p.cu_seqlens))) {
    return reason.refuse("the state is %s, which one token a sequence may round", dtype_name(p.state.dtype));
  }
  return streams_states(context, p, reason, "sm90_step");
}

bool sm90_step_chunk_accepts(const fw_context &context, const Problem &p, Reason &reason) {
  if (p.state.dtype != FW_F32) return reason.refuse("the state is %s, this computes fp32", dtype_name(p.state.dtype));
  if (p.state_layout == FW_STATE_VK) return reason.refuse("the state lies as [V,K], this computes [K,V]");
  if (p.q.dtype == FW_F32) return reason.refuse("operands are fp32, this computes bf16 and fp16");
  if (p.state.strides[0] < 0 || p.state.strides[1] < 0) return reason.refuse("strides of state are %lld and %lld, this takes none below 0", static_cast<long long>(p.state.strides[0]), static_cast<long long>(p.state.strides[1]));
  if (p.B * p.T <= 2 * p.N && !name_in_list(context.force_impl, "sm90_step_chunk")) return reason.refuse("%lld tokens of %lld sequences, this pays from three a sequence on", static_cast<long long>(p.B * p.T), static_cast<long long>(p.N));
  return streams_states(context, p, reason, "sm90_step_chunk");
}
uint64_t cuda_step_workspace(const fw_context &, const Problem &) { return 0; }

fw_status cuda_check_values(const Problem &p) {
  Problem host = p;
  cuda::HostCopy cu_seqlens, state_indices, g;
  FW_TRY(cu_seqlens.fetch(p.op_name, "cu_seqlens", p.stream, &host.cu_seqlens));
  if (given(host.cu_seqlens)) FW_TRY(check_cu_seqlens(p.op_name, host.cu_seqlens, p.B, p.T, true, &host.N));
  if (p.direction == FW_STEP && given(p.state_indices)) {
    FW_TRY(state_indices.fetch(p.op_name, "state_indices", p.stream, &host.state_indices));
    FW_TRY(check_slots(host));
  }
  if (p.g_min < 0) FW_TRY(g.fetch(p.op_name, "g", p.stream, &host.g));
  return check_values(host);
}

#if defined(FW_HAVE_CUDA)

RowGradients take_row_gradients(Ledger &ledger, const Problem &p, int32_t panels) {
  RowGradients rows = {};
  rows.panels = panels;
  const int64_t heads = product(product(product(p.B, p.R), p.HV), rows.panels), keys = product(heads, p.K);
  rows.d_q = ledger.take<float>(keys);
  rows.d_k = ledger.take<float>(keys);
  if (p.erase != FW_ERASE_NONE) rows.d_x = ledger.take<float>(keys);
  if (p.erase == FW_ERASE_INDEPENDENT) rows.d_b = ledger.take<float>(keys);
  if (p.gate != FW_GATE_NONE) rows.d_g = ledger.take<float>(p.gate == FW_GATE_VECTOR ? keys : heads);
  if (given(p.beta)) rows.d_beta = ledger.take<float>(heads);
  if (given(p.a_log) || given(p.dt_bias)) {
    rows.gate_sums = ledger.take<float>(product(finish_blocks(p), product(p.HV, 1 + p.K)));
  }
  return rows;
}

Problem states_only(const Problem &p) {
  Problem forward = p;
  forward.direction = FW_FORWARD;
  forward.o = forward.final_state = forward.final_z = fw_tensor{};
  return forward;
}

namespace {

struct Workspace {
  float *divisors;  // [B,T,H]
  float *sums;      // [B,T,H,K]
  float *saved;     // see saved.hpp
  RowGradients rows;

  Workspace(Ledger &ledger, const Problem &p) : divisors(nullptr), sums(nullptr), saved(nullptr), rows{} {
    const bool is_backward = p.direction == FW_BACKWARD;
    if (p.has_normalizer) {
      const int64_t tokens = product(product(p.B, p.T), p.H);
      divisors = ledger.take<float>(tokens);
      if (is_backward) sums = ledger.take<float>(product(tokens, p.K));
    }
    if (!is_backward) return;
    if (!p.saved) saved = ledger.take<float>(static_cast<int64_t>(saved_bytes(p) / 4));
    rows = take_row_gradients(ledger, p, plan_panels(p).count);
    rows.states = ledger.take<float>(product(reverse_blocks(p), reverse_state_floats(p)));
  }
};

void run_backward(const Problem &p, const Workspace &w, float *saved) {
  if (p.N > 0) {
    if (p.has_normalizer) launch_normalizer(states_only(p), w.divisors, w.sums);
    if (!p.saved) launch_recurrent(states_only(p), nullptr, saved);
    launch_reverse(p, w.divisors, saved, w.rows);
    if (p.has_normalizer) launch_normalizer_backward(p, w.divisors, w.sums, w.rows);
  }
  launch_finish(p, w.rows);
  launch_clear(p, p.dv, p.n_sub, p.V);
  launch_clear(p, p.d_write_gate, 1, p.V);
}

void run_forward(const Problem &p, const Workspace &w) {
  if (p.N > 0) {
    if (p.has_normalizer) launch_normalizer(p, w.divisors, nullptr);
    launch_recurrent(p, w.divisors, static_cast<float *>(p.saved));
  }
  launch_clear(p, p.o, 1, p.V);
}

fw_status check_alignment(const Problem &p, const char *name, const void *memory) {
  if (reinterpret_cast<uintptr_t>(memory) % 16 == 0) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: %s is at an address that 16 does not divide, allowed multiples of 16 on CUDA", p.op_name,
              name);
}

}  // namespace

fw_status cuda_check_places(const Problem &p, const void *workspace) {
  const Operand operands[] = {
      {"q", &p.q}, {"k", &p.k}, {"v", &p.v}, {"a", &p.a}, {"b", &p.b}, {"p", &p.p}, {"erase_gate", &p.erase_gate},
      {"write_gate", &p.write_gate}, {"g", &p.g}, {"beta", &p.beta}, {"a_log", &p.a_log}, {"dt_bias", &p.dt_bias},
      {"initial_state", &p.initial_state}, {"initial_z", &p.initial_z}, {"cu_seqlens", &p.cu_seqlens},
      {"final_state", &p.final_state}, {"final_z", &p.final_z}, {"state", &p.state}, {"state_z", &p.state_z},
      {"state_indices", &p.state_indices}, {"d_o", &p.d_o}, {"d_final_state", &p.d_final_state},
      {"d_final_z", &p.d_final_z}, {"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}, {"da", &p.da}, {"db", &p.db},
      {"dp", &p.dp}, {"d_erase_gate", &p.d_erase_gate}, {"d_write_gate", &p.d_write_gate}, {"dg", &p.dg},
      {"dbeta", &p.dbeta}, {"d_a_log", &p.d_a_log}, {"d_dt_bias", &p.d_dt_bias},
      {"d_initial_state", &p.d_initial_state}, {"d_initial_z", &p.d_initial_z},
  };
  FW_TRY(cuda::check_places(p.op_name, operands, sizeof operands / sizeof operands[0], workspace));
  const Operand output[] = {{"o", &p.o}};  // which a backward does not write
  if (p.direction != FW_BACKWARD) FW_TRY(cuda::check_places(p.op_name, output, 1, nullptr));
  if (p.saved) FW_TRY(cuda::check_memory(p.op_name, "saved", p.saved));
  FW_TRY(check_alignment(p, "workspace", workspace));
  return check_alignment(p, "saved", p.saved);
}

uint64_t cuda_workspace(const fw_context &, const Problem &p) {
  if (p.direction == FW_BACKWARD && saved_bytes(p) == UINT64_MAX) return UINT64_MAX;
  Ledger ledger(nullptr);
  const Workspace counted(ledger, p);
  (void)counted;
  return ledger.bytes();
}

fw_status cuda_run(fw_context &, const Problem &p, void *memory) {
  FW_TRY(cuda_check_places(p, memory));
  Ledger ledger(memory);
  const Workspace w(ledger, p);
  float *saved = p.saved ? static_cast<float *>(p.saved) : w.saved;
  if (p.direction == FW_BACKWARD) {
    run_backward(p, w, saved);
  } else {
    run_forward(p, w);
  }
  return cuda::check_launches(p.op_name, "cuda_portable");
}

template <class F>
static fw_status run_step(const Problem &p, const char *impl, F launch) {
  FW_TRY(cuda_check_places(p, nullptr));
  if (p.N > 0) launch(p);
  launch_clear(p, p.o, 1, p.V);
  return cuda::check_launches(p.op_name, impl);
}
fw_status cuda_step_run(fw_context &, const Problem &p, void *) { return run_step(p, "cuda_step", launch_step); }
fw_status sm90_step_run(fw_context &, const Problem &p, void *) { return run_step(p, "sm90_step", launch_stream_step); }
fw_status sm90_step_chunk_run(fw_context &, const Problem &p, void *) {
  int error = 0;
  FW_TRY(run_step(p, "sm90_step_chunk", [&](const Problem &call) { error = launch_chunk_step(call); }));
  return cuda::check_launch(p.op_name, "sm90_step_chunk", error);
}

#else

fw_status cuda_step_run(fw_context &, const Problem &p, void *) { return cuda::check_launches(p.op_name, "cuda_step"); }
fw_status sm90_step_run(fw_context &, const Problem &p, void *) { return cuda::check_launches(p.op_name, "sm90_step"); }
fw_status sm90_step_chunk_run(fw_context &, const Problem &p, void *) { return cuda::check_launches(p.op_name, "sm90_step_chunk"); }
uint64_t cuda_workspace(const fw_context &, const Problem &) { return UINT64_MAX; }
fw_status cuda_run(fw_context &, const Problem &p, void *) { return cuda::check_launches(p.op_name, "cuda_portable"); }
fw_status cuda_move_state(const Problem &p, const fw_tensor &, fw_state_layout, bool) {
  return cuda::check_launches(p.op_name, "cuda_portable");
}

#endif

}  // namespace fw::recurrence
