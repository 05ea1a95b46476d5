// SPDX-License-Identifier: Apache-2.0
#include "ops/recurrence/checks.hpp"

#include <math.h>

#include "core/descriptor.hpp"
#include "core/status.hpp"
#include "ops/recurrence/catalogue.hpp"

namespace fw::recurrence {
namespace {

constexpr int64_t kMaxHeadSize = 512;

long long ll(int64_t x) { return static_cast<long long>(x); }

fw_status check_enum(const char *op, const char *name, int64_t value, int64_t last) {
  if (value >= 0 && value <= last) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: %s is %lld, allowed 0 to %lld", op, name, ll(value), ll(last));
}

fw_status check_number(const char *op, const char *name, double value, bool is_ok, const char *allowed) {
  if (is_ok) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: %s is %g, allowed %s", op, name, value, allowed);
}

// Settings that are no tensors.
fw_status read_settings(const fw_recurrence &d, fw_direction direction, Problem *p, Row *row) {
  const char *op = "recurrence";
  FW_TRY(check_enum(op, "op", d.op, FW_OP_COUNT - 1));
  FW_TRY(check_enum(op, "direction", direction, FW_STEP));
  if (d.op == FW_OP_BY_AXES) {
    FW_TRY(check_enum(op, "gate", d.gate, FW_GATE_VECTOR));
    FW_TRY(check_enum(op, "erase", d.erase, FW_ERASE_INDEPENDENT));
    *row = axes_row(d.gate, d.erase);
  } else {
    *row = *find_row(d.op);
    if (d.gate != 0 || d.erase != 0) {
      return fail(FW_INVALID_ARGUMENT, "%s: gate and erase are %d and %d, allowed 0 and 0 unless op is FW_OP_BY_AXES",
                  row->name, d.gate, d.erase);
    }
  }
  op = row->name;
  p->op_name = row->name;
  p->op = d.op;
  p->gate = row->gate;
  p->erase = row->erase;
  p->direction = direction;
  FW_TRY(check_enum(op, "form", d.form, FW_FORM_PARALLEL));
  FW_TRY(check_enum(op, "device", d.device, FW_DEVICE_CUDA));
  p->device = d.device;
  p->stream = d.stream;
  FW_TRY(check_enum(op, "state_layout", d.state_layout, direction == FW_STEP ? FW_STATE_OPAQUE : FW_STATE_VK));
  FW_TRY(check_enum(op, "normalizer", d.normalizer, FW_NORMALIZER_SUM));
  FW_TRY(check_enum(op, "qk_norm", d.qk_norm, FW_QK_NORM_L2));
  FW_TRY(check_enum(op, "gate_input", d.gate_input, FW_GATE_INPUT_RWKV7));
  FW_TRY(check_enum(op, "beta_input", d.beta_input, FW_BETA_INPUT_SIGMOID_TWICE));
  FW_TRY(check_enum(op, "options", d.options, FW_BATCH_INVARIANT | FW_CHECK_VALUES | FW_ALLOW_TF32));
  p->form = d.form == FW_FORM_AUTO ? FW_FORM_CHUNK : d.form;
  p->state_layout = d.state_layout;
  p->has_normalizer = d.normalizer == FW_NORMALIZER_SUM;
  p->has_l2norm = d.qk_norm == FW_QK_NORM_L2;
  p->gate_input = d.gate_input;
  p->beta_input = d.beta_input;
  p->has_fixed_gate = row->has_fixed_gate;
  if (p->has_normalizer && !row->may_normalize) {
    return fail(FW_INVALID_ARGUMENT, "%s: normalizer is SUM, allowed for linear_attn only", op);
  }
  p->n_sub = d.n_sub == 0 ? 1 : d.n_sub;
  const int64_t most = row->may_have_sub_steps ? 64 : 1;
  if (p->n_sub < 1 || p->n_sub > most) {
    return fail(FW_INVALID_ARGUMENT, "%s: n_sub is %d, allowed 1 to %lld", op, d.n_sub, ll(most));
  }
  FW_TRY(check_number(op, "scale", d.scale, isfinite(d.scale), "finite numbers"));
  FW_TRY(check_number(op, "gate_normalizer", d.gate_normalizer, isfinite(d.gate_normalizer), "finite numbers"));
  FW_TRY(check_number(op, "gate_lower_bound", d.gate_lower_bound,
                      d.gate_lower_bound <= 0 && isfinite(d.gate_lower_bound),
                      "finite numbers below 0, or 0 for the default"));
  FW_TRY(
      check_number(op, "g_min", d.g_min, d.g_min <= 0 && isfinite(d.g_min), "finite numbers below 0, or 0 for none"));
  p->gate_normalizer = d.gate_normalizer == 0 ? 16 : d.gate_normalizer;
  p->gate_lower_bound = d.gate_lower_bound == 0 ? -5 : d.gate_lower_bound;
  p->g_min = d.g_min;
  p->is_batch_invariant = d.options & FW_BATCH_INVARIANT;
  const int64_t num_layers = d.num_layers == 0 ? 1 : d.num_layers;
  if (row->op == FW_OP_LIGHTNING) {
    if (num_layers < 1 || d.layer_idx < 0 || d.layer_idx >= num_layers) {
      return fail(FW_INVALID_ARGUMENT, "%s: layer_idx is %d of num_layers %d, allowed 0 to num_layers - 1", op,
                  d.layer_idx, d.num_layers);
    }
    p->lightning_slope = 1.0 - static_cast<double>(d.layer_idx) / static_cast<double>(num_layers);
  } else if (d.layer_idx != 0 || d.num_layers != 0) {
    return fail(FW_INVALID_ARGUMENT, "%s: layer_idx and num_layers are %d and %d, allowed for lightning only", op,
                d.layer_idx, d.num_layers);
  }
  return FW_OK;
}

// Sizes from q and v, before the operands are compared with them.
fw_status read_sizes(const fw_recurrence &d, Problem *p, const Row &row) {
  const char *op = p->op_name;
  const struct {
    const char *name;
    const fw_tensor &t;
  } firsts[] = {{"q", d.q}, {"k", d.k}, {"v", d.v}};
  for (const auto &first : firsts) {
    if (!given(first.t)) return fail(FW_INVALID_ARGUMENT, "%s: %s is missing", op, first.name);
    if (first.t.ndim != 4) {
      return fail(FW_INVALID_ARGUMENT, "%s: %s has %d dimensions, expected 4", op, first.name, first.t.ndim);
    }
  }
  p->B = d.q.shape[0], p->T = d.q.shape[1], p->H = d.q.shape[2], p->K = d.q.shape[3];
  p->HV = d.v.shape[2], p->V = d.v.shape[3];
  char found[160];
  if (p->B < 0 || p->T < 0) {
    return fail(FW_INVALID_ARGUMENT, "%s: q has shape %s, sizes must not be negative", op,
                shape_text(d.q, found, sizeof found));
  }
  if (p->K < 1 || p->K > kMaxHeadSize) {
    return fail(FW_INVALID_ARGUMENT, "%s: K (last size of q) is %lld, allowed 1 to %lld", op, ll(p->K),
                ll(kMaxHeadSize));
  }
  if (p->V < 1 || p->V > kMaxHeadSize) {
    return fail(FW_INVALID_ARGUMENT, "%s: V (last size of v) is %lld, allowed 1 to %lld", op, ll(p->V),
                ll(kMaxHeadSize));
  }
  if (p->H < 1 || p->HV < 1 || p->HV % p->H != 0) {
    return fail(FW_INVALID_ARGUMENT,
                "%s: v has %lld heads and q has %lld, the first must be a multiple of the second", op, ll(p->HV),
                ll(p->H));
  }
  if (!mul_fits(p->T, p->n_sub, &p->R)) return fail(FW_INVALID_ARGUMENT, "%s: T * n_sub does not fit in 64 bits", op);
  const double default_scale = row.default_scale != 0 ? row.default_scale : 1.0 / sqrt(static_cast<double>(p->K));
  p->scale = d.scale == 0 ? default_scale : d.scale;
  p->scale_f32 = static_cast<float>(p->scale);
  p->lightning_slope *= 8.0 / static_cast<double>(p->HV);
  return FW_OK;
}

struct Operand {
  const char *name;
  const fw_tensor *from;
  fw_tensor *to;
  uint32_t bit;  // catalogue bit, 0: always needed
  int64_t shape[4];
  int32_t ndim;
  bool may_be_fp32;  // beside the dtype of q
};

// Products of the counts stay far from 64 bits, in calls without elements too.
fw_status check_counts(const Problem &p) {
  constexpr int64_t kMost = int64_t{1} << 58;
  int64_t cells = p.N, rows = p.N;
  const bool fits = mul_fits(cells, p.HV, &cells) && mul_fits(cells, p.K * p.V, &cells) && mul_fits(rows, p.R, &rows);
  if (fits && cells <= kMost && rows <= kMost && p.R <= kMost) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: %lld sequences of %lld heads and %lld rows, more than 2^58 elements",
              p.op_name, ll(p.N), ll(p.HV), ll(p.R));
}

fw_status read_operands(const fw_recurrence &d, Problem *p, const Row &row, bool with_data) {
  const char *op = p->op_name;
  const fw_dtype storage[] = {FW_F32, FW_BF16, FW_F16, FW_F64};
  FW_TRY(check_dtype(op, "q", d.q, storage, 4));
  p->is_f64 = d.q.dtype == FW_F64;
  const bool is_vector = p->gate == FW_GATE_VECTOR;
  const Operand operands[] = {
      {"q", &d.q, &p->q, 0, {p->B, p->T, p->H, p->K}, 4, false},
      {"k", &d.k, &p->k, 0, {p->B, p->R, p->H, p->K}, 4, false},
      {"v", &d.v, &p->v, 0, {p->B, p->R, p->HV, p->V}, 4, false},
      {"a", &d.a, &p->a, kA, {p->B, p->T, p->H, p->K}, 4, false},
      {"b", &d.b, &p->b, kB, {p->B, p->T, p->H, p->K}, 4, false},
      {"p", &d.p, &p->p, kP, {p->B, p->T, p->H, p->K}, 4, false},
      {"erase_gate", &d.erase_gate, &p->erase_gate, kEraseGate, {p->B, p->T, p->H, p->K}, 4, false},
      {"write_gate", &d.write_gate, &p->write_gate, kWriteGate, {p->B, p->T, p->HV, p->V}, 4, false},
      {"g", &d.g, &p->g, kG, {p->B, p->T, p->HV, p->K}, is_vector ? 4 : 3, true},
      {"beta", &d.beta, &p->beta, kBeta, {p->B, p->R, p->HV, 0}, 3, true},
  };
  for (const Operand &x : operands) {
    *x.to = *x.from;
    if (!given(*x.from) && (x.bit & row.required)) return fail(FW_INVALID_ARGUMENT, "%s: %s is missing", op, x.name);
    if (!given(*x.from)) continue;
    if (x.bit && !(x.bit & (row.required | row.optional))) {
      return fail(FW_INVALID_ARGUMENT, "%s: %s is given, this operator does not take it", op, x.name);
    }
    const fw_dtype allowed[] = {d.q.dtype, FW_F32};
    FW_TRY(check_dtype(op, x.name, *x.from, allowed, x.may_be_fp32 && !p->is_f64 ? 2 : 1));
    FW_TRY(check_tensor(op, x.name, *x.from, x.shape, x.ndim, with_data));
  }
  if (row.op == FW_OP_GATED_DELTA_PRODUCT && !given(d.g)) p->gate = FW_GATE_NONE;

  const fw_dtype parameter[] = {p->is_f64 ? FW_F64 : FW_F32};
  const bool has_parameters = p->gate_input == FW_GATE_INPUT_SOFTPLUS || p->gate_input == FW_GATE_INPUT_BOUNDED;
  const int64_t parameter_shape[] = {p->HV, p->K};
  p->a_log = d.a_log;
  p->dt_bias = d.dt_bias;
  const struct {
    const char *name;
    const fw_tensor &t;
    int32_t ndim;
  } parameters[] = {{"a_log", d.a_log, 1}, {"dt_bias", d.dt_bias, is_vector ? 2 : 1}};
  for (const auto &x : parameters) {
    if (!given(x.t)) continue;
    if (!has_parameters) {
      return fail(FW_INVALID_ARGUMENT, "%s: %s is given, allowed with gate_input SOFTPLUS or BOUNDED only", op,
                  x.name);
    }
    FW_TRY(check_dtype(op, x.name, x.t, parameter, 1));
    FW_TRY(check_tensor(op, x.name, x.t, parameter_shape, x.ndim, with_data));
  }
  if (p->gate_input != FW_GATE_INPUT_LOG_DECAY && !given(d.g)) {
    return fail(FW_INVALID_ARGUMENT, "%s: gate_input is %d but g (the gate_logits) is missing", op, p->gate_input);
  }
  if (p->beta_input != FW_BETA_INPUT_PLAIN && !given(d.beta)) {
    return fail(FW_INVALID_ARGUMENT, "%s: beta_input is %d but beta (the beta_logits) is missing", op, p->beta_input);
  }
  p->N = p->B;
  p->cu_seqlens = d.cu_seqlens;
  if (given(d.cu_seqlens)) FW_TRY(check_cu_seqlens(op, d.cu_seqlens, p->B, p->T, with_data, &p->N, p->device));
  return check_counts(*p);
}

fw_status check_state(const Problem &p, const char *name, const fw_tensor &t, int64_t count, bool may_be_half,
                      bool is_output, bool with_data) {
  const char *op = p.op_name;
  const fw_dtype allowed[] = {p.is_f64 ? FW_F64 : FW_F32, FW_BF16, FW_F16};
  FW_TRY(check_dtype(op, name, t, allowed, may_be_half && !p.is_f64 ? 3 : 1));
  const bool is_vk = p.state_layout == FW_STATE_VK;
  const int64_t shape[] = {count, p.HV, is_vk ? p.V : p.K, is_vk ? p.K : p.V};
  FW_TRY(check_tensor(op, name, t, shape, 4, with_data));
  return is_output ? check_output(op, name, t) : FW_OK;
}

fw_status check_z(const Problem &p, const char *name, const fw_tensor &t, int64_t count, bool is_output,
                  bool with_data) {
  const char *op = p.op_name;
  if (!p.has_normalizer) {
    return fail(FW_INVALID_ARGUMENT, "%s: %s is given, allowed with normalizer SUM only", op, name);
  }
  const fw_dtype allowed[] = {p.is_f64 ? FW_F64 : FW_F32};
  FW_TRY(check_dtype(op, name, t, allowed, 1));
  const int64_t shape[] = {count, p.H, p.K};
  FW_TRY(check_tensor(op, name, t, shape, 3, with_data));
  return is_output ? check_output(op, name, t) : FW_OK;
}

fw_status check_o(const Problem &p, const char *name, const fw_tensor &t, bool is_output, bool with_data) {
  const fw_dtype allowed[] = {p.is_f64 ? FW_F64 : FW_F32, FW_BF16, FW_F16};
  FW_TRY(check_dtype(p.op_name, name, t, allowed, p.is_f64 ? 1 : 3));
  const int64_t shape[] = {p.B, p.T, p.HV, p.V};
  FW_TRY(check_tensor(p.op_name, name, t, shape, 4, with_data));
  return is_output ? check_output(p.op_name, name, t) : FW_OK;
}

fw_status refuse_given(const Problem &p, const char *name, const fw_tensor &t, const char *when) {
  if (!given(t)) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: %s is given, allowed %s only", p.op_name, name, when);
}

}  // namespace

fw_status check_slots(const Problem &p) {
  const char *op = p.op_name;
  const int64_t slots = p.state.shape[0];
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t slot = load_int(p.state_indices, n);
    if (slot >= slots) {
      return fail(FW_INVALID_ARGUMENT, "%s: state_indices[%lld] is %lld, allowed below the %lld slots of state", op,
                  ll(n), ll(slot), ll(slots));
    }
  }
  int64_t earlier;
  const int64_t repeated = find_repeated_slot(p.state_indices, p.N, slots, &earlier);
  if (repeated < 0) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: state_indices[%lld] and [%lld] are both %lld, a slot may be used once", op,
              ll(earlier), ll(repeated), ll(load_int(p.state_indices, repeated)));
}

namespace {

fw_status read_step_state(const fw_recurrence &d, Problem *p, bool with_data) {
  const char *op = p->op_name;
  p->state = d.state;
  p->state_z = d.state_z;
  p->state_indices = d.state_indices;
  if (!given(d.state)) return fail(FW_INVALID_ARGUMENT, "%s: state is missing", op);
  const int32_t ndim = p->state_layout == FW_STATE_OPAQUE ? 3 : 4;
  if (d.state.ndim != ndim) {
    return fail(FW_INVALID_ARGUMENT, "%s: state has %d dimensions, expected %d", op, d.state.ndim, ndim);
  }
  const int64_t slots = d.state.shape[0];
  if (p->state_layout == FW_STATE_OPAQUE) {
    const fw_dtype allowed[] = {FW_F32, FW_BF16, FW_F16};
    FW_TRY(check_dtype(op, "state", d.state, allowed, 3));
    const int64_t shape[] = {slots, p->HV, opaque_elements(*p)};
    FW_TRY(check_tensor(op, "state", d.state, shape, 3, with_data));
    FW_TRY(check_output(op, "state", d.state));
  } else {
    FW_TRY(check_state(*p, "state", d.state, slots, true, true, with_data));
  }
  if (given(d.state_z)) FW_TRY(check_z(*p, "state_z", d.state_z, slots, true, with_data));
  if (p->has_normalizer && !given(d.state_z)) return fail(FW_INVALID_ARGUMENT, "%s: state_z is missing", op);
  if (!given(d.state_indices)) {
    if (slots < p->N) {
      return fail(FW_INVALID_ARGUMENT, "%s: state has %lld slots, allowed at least N = %lld without state_indices",
                  op, ll(slots), ll(p->N));
    }
    return FW_OK;
  }
  const fw_dtype index_type[] = {FW_I32};
  const int64_t shape[] = {p->N};
  FW_TRY(check_dtype(op, "state_indices", d.state_indices, index_type, 1));
  FW_TRY(check_tensor(op, "state_indices", d.state_indices, shape, 1, with_data));
  if (!with_data || p->device != FW_DEVICE_CPU) return FW_OK;
  return check_slots(*p);
}

fw_status read_states(const fw_recurrence &d, Problem *p, bool with_data) {
  const bool is_step = p->direction == FW_STEP;
  const bool is_forward = p->direction == FW_FORWARD;
  p->initial_state = d.initial_state;
  p->initial_z = d.initial_z;
  p->o = d.o;
  p->final_state = is_forward ? d.final_state : fw_tensor{};
  p->final_z = is_forward ? d.final_z : fw_tensor{};
  p->saved = d.saved;
  p->saved_size = d.saved_size;
  if (is_step) {
    FW_TRY(refuse_given(*p, "initial_state", d.initial_state, "outside step"));
    FW_TRY(refuse_given(*p, "initial_z", d.initial_z, "outside step"));
    FW_TRY(refuse_given(*p, "final_state", d.final_state, "outside step"));
    FW_TRY(refuse_given(*p, "final_z", d.final_z, "outside step"));
    p->saved = nullptr;
    FW_TRY(read_step_state(d, p, with_data));
  } else {
    FW_TRY(refuse_given(*p, "state", d.state, "in step"));
    FW_TRY(refuse_given(*p, "state_z", d.state_z, "in step"));
    FW_TRY(refuse_given(*p, "state_indices", d.state_indices, "in step"));
    if (given(d.initial_state))
      FW_TRY(check_state(*p, "initial_state", d.initial_state, p->N, true, false, with_data));
    if (given(d.initial_z)) FW_TRY(check_z(*p, "initial_z", d.initial_z, p->N, false, with_data));
  }
  if (p->direction == FW_BACKWARD) return FW_OK;
  if (given(p->final_state)) FW_TRY(check_state(*p, "final_state", p->final_state, p->N, false, true, with_data));
  if (given(p->final_z)) FW_TRY(check_z(*p, "final_z", p->final_z, p->N, true, with_data));
  if (!given(d.o)) {  // a size query may come before the output exists
    return with_data ? fail(FW_INVALID_ARGUMENT, "%s: o is missing", p->op_name) : FW_OK;
  }
  return check_o(*p, "o", d.o, true, with_data);
}

struct Gradient {
  const char *name;
  const fw_tensor *from;
  fw_tensor *to;
  const char *of_name;
  const fw_tensor *of;
};

fw_status read_grads(const fw_recurrence_grads &g, Problem *p, bool with_data) {
  const char *op = p->op_name;
  p->d_o = g.d_o;
  p->d_final_state = g.d_final_state;
  p->d_final_z = g.d_final_z;
  if (given(g.d_o)) FW_TRY(check_o(*p, "d_o", g.d_o, false, with_data));
  if (given(g.d_final_state)) FW_TRY(check_state(*p, "d_final_state", g.d_final_state, p->N, true, false, with_data));
  if (given(g.d_final_z)) FW_TRY(check_z(*p, "d_final_z", g.d_final_z, p->N, false, with_data));
  const Gradient grads[] = {
      {"dq", &g.dq, &p->dq, "q", &p->q},
      {"dk", &g.dk, &p->dk, "k", &p->k},
      {"dv", &g.dv, &p->dv, "v", &p->v},
      {"da", &g.da, &p->da, "a", &p->a},
      {"db", &g.db, &p->db, "b", &p->b},
      {"dp", &g.dp, &p->dp, "p", &p->p},
      {"d_erase_gate", &g.d_erase_gate, &p->d_erase_gate, "erase_gate", &p->erase_gate},
      {"d_write_gate", &g.d_write_gate, &p->d_write_gate, "write_gate", &p->write_gate},
      {"dg", &g.dg, &p->dg, "g", &p->g},
      {"dbeta", &g.dbeta, &p->dbeta, "beta", &p->beta},
      {"d_a_log", &g.d_a_log, &p->d_a_log, "a_log", &p->a_log},
      {"d_dt_bias", &g.d_dt_bias, &p->d_dt_bias, "dt_bias", &p->dt_bias},
      {"d_initial_state", &g.d_initial_state, &p->d_initial_state, "initial_state", &p->initial_state},
      {"d_initial_z", &g.d_initial_z, &p->d_initial_z, "initial_z", &p->initial_z},
  };
  for (const Gradient &x : grads) {
    *x.to = *x.from;
    if (!given(*x.from)) continue;
    if (!given(*x.of)) {
      return fail(FW_INVALID_ARGUMENT, "%s: %s is asked for, but %s is not given", op, x.name, x.of_name);
    }
    FW_TRY(check_dtype(op, x.name, *x.from, &x.of->dtype, 1));
    FW_TRY(check_tensor(op, x.name, *x.from, x.of->shape, x.of->ndim, with_data));
    FW_TRY(check_output(op, x.name, *x.from));
  }
  return FW_OK;
}

// Every output against every input and every later output.
fw_status check_sharing(const Problem &p) {
  struct Named {
    const char *name;
    const fw_tensor *t;
  };
  const Named inputs[] = {{"q", &p.q},
                          {"k", &p.k},
                          {"v", &p.v},
                          {"a", &p.a},
                          {"b", &p.b},
                          {"p", &p.p},
                          {"erase_gate", &p.erase_gate},
                          {"write_gate", &p.write_gate},
                          {"g", &p.g},
                          {"beta", &p.beta},
                          {"a_log", &p.a_log},
                          {"dt_bias", &p.dt_bias},
                          {"initial_state", &p.initial_state},
                          {"initial_z", &p.initial_z},
                          {"d_o", &p.d_o},
                          {"d_final_state", &p.d_final_state},
                          {"d_final_z", &p.d_final_z}};
  const Named outputs[] = {{"o", &p.o},
                           {"final_state", &p.final_state},
                           {"final_z", &p.final_z},
                           {"state", &p.state},
                           {"state_z", &p.state_z},
                           {"dq", &p.dq},
                           {"dk", &p.dk},
                           {"dv", &p.dv},
                           {"da", &p.da},
                           {"db", &p.db},
                           {"dp", &p.dp},
                           {"d_erase_gate", &p.d_erase_gate},
                           {"d_write_gate", &p.d_write_gate},
                           {"dg", &p.dg},
                           {"dbeta", &p.dbeta},
                           {"d_a_log", &p.d_a_log},
                           {"d_dt_bias", &p.d_dt_bias},
                           {"d_initial_state", &p.d_initial_state},
                           {"d_initial_z", &p.d_initial_z}};
  constexpr int kOutputs = sizeof outputs / sizeof outputs[0];
  for (int i = 0; i < kOutputs; ++i) {
    const bool is_written = !(p.direction == FW_BACKWARD && i == 0);
    if (!given(*outputs[i].t) || !is_written) continue;
    for (const Named &in : inputs) FW_TRY(check_disjoint(p.op_name, outputs[i].name, *outputs[i].t, in.name, *in.t));
    for (int j = i + 1; j < kOutputs; ++j) {
      FW_TRY(check_disjoint(p.op_name, outputs[i].name, *outputs[i].t, outputs[j].name, *outputs[j].t));
    }
  }
  return FW_OK;
}

}  // namespace

int64_t opaque_elements(const Problem &p) {
  constexpr int64_t kPad = 16;
  return p.K * ((p.V + kPad - 1) / kPad * kPad);
}

fw_status make_problem(const fw_recurrence *desc, const fw_recurrence_grads *grads, fw_direction direction,
                       bool with_data, Problem *problem) {
  fw_recurrence d;
  FW_TRY(read_descriptor("recurrence", desc, &d));
  Problem p = {};
  Row row;
  FW_TRY(read_settings(d, direction, &p, &row));
  FW_TRY(read_sizes(d, &p, row));
  FW_TRY(read_operands(d, &p, row, with_data));
  FW_TRY(read_states(d, &p, with_data));
  if (grads) {
    if (direction != FW_BACKWARD) {
      return fail(FW_INVALID_ARGUMENT, "%s: grads is given, allowed null unless the direction is backward",
                  p.op_name);
    }
    fw_recurrence_grads g;
    FW_TRY(read_descriptor("recurrence", grads, &g, "grads"));
    FW_TRY(read_grads(g, &p, with_data));
  } else if (direction == FW_BACKWARD && with_data) {
    return fail(FW_INVALID_ARGUMENT, "%s: grads is a null pointer", p.op_name);
  }
  if (with_data) FW_TRY(check_sharing(p));
  *problem = p;
  return FW_OK;
}

fw_status check_values(const Problem &p) {
  if (p.g_min < 0 && given(p.g) && p.gate_input == FW_GATE_INPUT_LOG_DECAY) {
    const int64_t width = p.gate == FW_GATE_VECTOR ? p.K : 1;
    for (int64_t i = 0; i < p.B * p.T * p.HV * width; ++i) {
      const int64_t c = i % width, hv = i / width % p.HV, t = i / width / p.HV % p.T, b = i / width / p.HV / p.T;
      const int64_t last = p.gate == FW_GATE_VECTOR ? c * p.g.strides[3] : 0;
      const double g =
          load_f64(p.g.data, p.g.dtype, b * p.g.strides[0] + t * p.g.strides[1] + hv * p.g.strides[2] + last);
      if (g < p.g_min) {
        return fail(FW_INVALID_ARGUMENT, "%s: g[%lld,%lld,%lld] is %g, allowed at least g_min = %g", p.op_name, ll(b),
                    ll(t), ll(hv), g, p.g_min);
      }
    }
  }
  return FW_OK;
}

}  // namespace fw::recurrence
