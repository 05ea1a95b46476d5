// SPDX-License-Identifier: Apache-2.0
#include "core/descriptor.hpp"
#include "core/operands.hpp"
#include "cuda/device.hpp"
#include "ops/short_conv/problem.hpp"

namespace fw::short_conv {
namespace {

constexpr const char *kOp = ShortConv::kName;
constexpr int64_t kMaxWidth = int64_t{1} << 30;
constexpr uint32_t kOptions = FW_BATCH_INVARIANT | FW_CHECK_VALUES | FW_ALLOW_TF32;

fw_status check_settings(const fw_short_conv &desc, Problem *p) {
  FW_TRY(check_device(kOp, desc.device));
  if (desc.activation != FW_ACTIVATION_NONE && desc.activation != FW_ACTIVATION_SILU) {
    return fail(FW_INVALID_ARGUMENT, "%s: activation is %d, allowed 0 (none) or 1 (SiLU)", kOp, desc.activation);
  }
  if (desc.options & ~kOptions) {
    return fail(FW_INVALID_ARGUMENT, "%s: options is %u, allowed bits %u", kOp, desc.options, kOptions);
  }
  p->device = desc.device;
  p->stream = desc.stream;
  p->options = desc.options;
  p->has_silu = desc.activation == FW_ACTIVATION_SILU;
  return FW_OK;
}

fw_status check_weights(Problem *p, bool with_data) {
  if (!given(p->weight)) return fail(FW_INVALID_ARGUMENT, "%s: weight is missing", kOp);
  if (p->weight.ndim != 2)
    return fail(FW_INVALID_ARGUMENT, "%s: weight has %d dimensions, expected 2", kOp, p->weight.ndim);
  p->W = p->weight.shape[1];
  if (p->W < 1 || p->W > kMaxWidth) {
    return fail(FW_INVALID_ARGUMENT, "%s: weight has W = %lld, allowed 1 to %lld", kOp, static_cast<long long>(p->W),
                static_cast<long long>(kMaxWidth));
  }
  const int64_t shape[] = {p->D, p->W};
  FW_TRY(check_float(kOp, "weight", p->weight, shape, 2, p->is_f64, with_data));
  return given(p->bias) ? check_float(kOp, "bias", p->bias, shape, 1, p->is_f64, with_data) : FW_OK;
}

// [N,D,W-1]
fw_status check_state(const Problem &p, const char *name, const fw_tensor &t, bool with_data,
                      fw_dtype dtype = FW_NONE) {
  const int64_t shape[] = {p.N, p.D, p.W - 1};
  return given(t) ? check_float(kOp, name, t, shape, 3, p.is_f64, with_data, dtype) : FW_OK;
}

fw_status check_pool(const Problem &p, bool with_data) {
  if (!given(p.state)) return fail(FW_INVALID_ARGUMENT, "%s: state is missing", kOp);
  if (p.state.ndim != 3)
    return fail(FW_INVALID_ARGUMENT, "%s: state has %d dimensions, expected 3", kOp, p.state.ndim);
  const int64_t shape[] = {p.state.shape[0], p.D, p.W - 1};
  FW_TRY(check_float(kOp, "state", p.state, shape, 3, p.is_f64, with_data));
  return check_state_indices(kOp, p.state_indices, p.N, p.state.shape[0], with_data, "state", "state_indices", p.device);
}

fw_status check_gradients(const fw_short_conv_grads &grads, bool with_data, Problem *p) {
  FW_TRY(check_reserved(kOp, "grads.reserved", grads.reserved));
  p->dy = grads.dy;
  p->d_final_state = grads.d_final_state;
  p->dx = grads.dx;
  p->dweight = grads.dweight;
  p->dbias = grads.dbias;
  p->d_initial_state = grads.d_initial_state;
  if (!given(p->dy) && !given(p->d_final_state)) {
    return fail(FW_INVALID_ARGUMENT, "%s: dy and d_final_state are both missing, expected at least one", kOp);
  }
  if (given(p->dy)) FW_TRY(check_float(kOp, "dy", p->dy, p->x.shape, 3, p->is_f64, with_data));
  FW_TRY(check_state(*p, "d_final_state", p->d_final_state, with_data));
  if (given(p->dx)) FW_TRY(check_float(kOp, "dx", p->dx, p->x.shape, 3, p->is_f64, with_data, p->x.dtype));
  if (given(p->dweight)) {
    FW_TRY(check_float(kOp, "dweight", p->dweight, p->weight.shape, 2, p->is_f64, with_data, p->weight.dtype));
  }
  if (!given(p->bias)) FW_TRY(check_absent(kOp, "dbias", p->dbias, "bias is not"));
  if (given(p->dbias))
    FW_TRY(check_float(kOp, "dbias", p->dbias, p->bias.shape, 1, p->is_f64, with_data, p->bias.dtype));
  if (!given(p->initial_state))
    FW_TRY(check_absent(kOp, "d_initial_state", p->d_initial_state, "initial_state is not"));
  FW_TRY(check_state(*p, "d_initial_state", p->d_initial_state, with_data, p->initial_state.dtype));
  const Operand inputs[] = {{"x", &p->x},
                            {"weight", &p->weight},
                            {"bias", &p->bias},
                            {"initial_state", &p->initial_state},
                            {"cu_seqlens", &p->cu_seqlens},
                            {"dy", &p->dy},
                            {"d_final_state", &p->d_final_state}};
  const Operand outputs[] = {
      {"dx", &p->dx}, {"dweight", &p->dweight}, {"dbias", &p->dbias}, {"d_initial_state", &p->d_initial_state}};
  return check_outputs(kOp, outputs, 4, inputs, 7, with_data);
}

}  // namespace

fw_status ShortConv::make_problem(const Desc &desc, const Grads *grads, fw_direction direction, bool with_data,
                                  Problem *p) {
  FW_TRY(check_settings(desc, p));
  p->direction = direction;
  p->x = desc.x;
  p->weight = desc.weight;
  p->bias = desc.bias;
  p->initial_state = desc.initial_state;
  p->cu_seqlens = desc.cu_seqlens;
  FW_TRY(check_first(kOp, "x", p->x, 3, 3, with_data, &p->is_f64));
  p->B = p->N = p->x.shape[0];
  p->T = p->x.shape[1];
  p->D = p->x.shape[2];
  FW_TRY(check_weights(p, with_data));
  if (given(p->cu_seqlens)) FW_TRY(check_cu_seqlens(kOp, p->cu_seqlens, p->B, p->T, with_data, &p->N, p->device));

  const bool is_step = direction == FW_STEP, is_backward = direction == FW_BACKWARD,
             writes = with_data && !is_backward;
  FW_TRY(check_result(kOp, "y", desc.y, p->x.shape, 3, p->is_f64, with_data, direction));
  if (is_step) {
    FW_TRY(check_absent(kOp, "initial_state", desc.initial_state, "a step reads state"));
    FW_TRY(check_absent(kOp, "final_state", desc.final_state, "a step writes state"));
    p->state = desc.state;
    p->state_indices = desc.state_indices;
    FW_TRY(check_pool(*p, with_data));
  } else {
    FW_TRY(check_absent(kOp, "state", desc.state, "only a step has it"));
    FW_TRY(check_absent(kOp, "state_indices", desc.state_indices, "only a step has it"));
    FW_TRY(check_state(*p, "initial_state", p->initial_state, with_data));
    FW_TRY(check_state(*p, "final_state", desc.final_state, writes));
  }
  if (is_backward) return grads ? check_gradients(*grads, with_data, p) : FW_OK;
  p->y = desc.y;
  p->final_state = desc.final_state;
  const Operand inputs[] = {{"x", &p->x},
                            {"weight", &p->weight},
                            {"bias", &p->bias},
                            {"initial_state", &p->initial_state},
                            {"cu_seqlens", &p->cu_seqlens},
                            {"state_indices", &p->state_indices}};
  const Operand outputs[] = {{"y", &p->y}, {"final_state", &p->final_state}, {"state", &p->state}};
  return check_outputs(kOp, outputs, 3, inputs, 6, with_data);
}

fw_status ShortConv::check_more(const Problem &p) {
  FW_TRY(check_present(kOp, "y", p.y, p.direction));
  if (!(p.options & FW_CHECK_VALUES)) return FW_OK;
  fw_tensor cu = p.cu_seqlens, indices = p.state_indices;
  cuda::HostCopy copies[2];
  if (p.device == FW_DEVICE_CUDA) {
    Reason reason;
    if (!cuda::is_available(8, 0, reason)) return FW_OK;  // the candidates refuse with it
    FW_TRY(copies[0].fetch(kOp, "cu_seqlens", p.stream, &cu));
    FW_TRY(copies[1].fetch(kOp, "state_indices", p.stream, &indices));
  }
  int64_t n;
  if (given(cu)) FW_TRY(check_cu_seqlens(kOp, cu, p.B, p.T, true, &n));
  if (given(indices)) FW_TRY(check_state_indices(kOp, indices, p.N, p.state.shape[0], true));
  return FW_OK;
}

Sequence sequence(const Problem &p, int64_t n) {
  const Segment rows = segment(p.cu_seqlens, p.T, n);
  const int64_t slot = given(p.state_indices) ? load_int(p.state_indices, n) : n;
  return {n, rows.batch, rows.begin, rows.end, slot};
}

int64_t sequence_of_row(const Problem &p, int64_t batch, int64_t row) {
  if (!given(p.cu_seqlens)) return batch;
  int64_t low = 0, high = p.N;  // the first sequence that ends after the row
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (load_int(p.cu_seqlens, middle + 1) > row) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

void zero_rows(const fw_tensor &t, int64_t batch, int64_t begin, int64_t end, int64_t d, int64_t n) {
  for (int64_t row = begin; row < end; ++row) {
    const int64_t at = batch * t.strides[0] + row * t.strides[1];
    for (int64_t i = d; i < d + n; ++i) store_f64(t.data, t.dtype, at + i * t.strides[2], 0.0);
  }
}

}  // namespace fw::short_conv
