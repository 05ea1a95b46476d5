// SPDX-License-Identifier: Apache-2.0
// From the public descriptor to a Problem: every shape, dtype, position, slot and overlap that can be wrong is
// refused here.
#include <math.h>

#include "core/descriptor.hpp"
#include "core/operands.hpp"
#include "ops/attention/problem.hpp"

namespace fw::attention {
namespace {

constexpr const char *kOp = Op::kName;
constexpr int64_t kNoWindow = int64_t{1} << 60;  // past every position, and position + reach does not overflow

long long ll(int64_t x) { return static_cast<long long>(x); }

fw_status check_number(const char *name, double x, bool is_positive) {
  if (isfinite(x) && (!is_positive || x >= 0)) return FW_OK;
  return fail(FW_INVALID_ARGUMENT, "%s: %s is %g, allowed %s", kOp, name, x,
              is_positive ? "0 or a positive number" : "a finite number");
}

// One int64 a sequence, 0 to kMaxPosition; of the CPU's calls the numbers are read.
fw_status check_positions(const char *name, const fw_tensor &t, int64_t n, bool with_data, fw_device device) {
  const fw_dtype allowed[] = {FW_I64};
  FW_TRY(check_tensor(kOp, name, t, &n, 1, with_data));
  FW_TRY(check_dtype(kOp, name, t, allowed, 1));
  for (int64_t i = 0; with_data && device == FW_DEVICE_CPU && i < n; ++i) {
    const int64_t at = load_int(t, i);
    if (at < 0 || at > kMaxPosition) {
      return fail(FW_INVALID_ARGUMENT, "%s: %s[%lld] is %lld, allowed 0 to 2^52", kOp, name, ll(i), ll(at));
    }
  }
  return FW_OK;
}

fw_status check_shapes(const fw_attention &d, bool with_data, Problem *p) {
  const fw_tensor *const operands[] = {&d.q, &d.k, &d.v};
  const char *const names[] = {"q", "k", "v"};
  for (int32_t i = 0; i < 3; ++i) FW_TRY(check_first(kOp, names[i], *operands[i], 4, 4, with_data, &p->is_f64));
  p->is_f64 = d.q.dtype == FW_F64;
  p->B = d.q.shape[0];
  p->T = d.q.shape[1];
  p->HQ = d.q.shape[2];
  p->D = d.q.shape[3];
  p->HK = d.k.shape[2];
  p->DV = d.v.shape[3];
  if (p->D < 1 || p->DV < 1 || p->HK < 1 || p->HQ < 1) {
    return fail(FW_INVALID_ARGUMENT, "%s: HQ, HK, D, DV are %lld, %lld, %lld, %lld, allowed at least 1", kOp,
                ll(p->HQ), ll(p->HK), ll(p->D), ll(p->DV));
  }
  if (p->HQ % p->HK != 0) {
    return fail(FW_INVALID_ARGUMENT, "%s: q has %lld heads, must be a multiple of the %lld of k", kOp, ll(p->HQ),
                ll(p->HK));
  }
  const int64_t k_shape[] = {p->B, p->T, p->HK, p->D}, v_shape[] = {p->B, p->T, p->HK, p->DV};
  FW_TRY(check_float(kOp, "k", d.k, k_shape, 4, p->is_f64, with_data));
  FW_TRY(check_float(kOp, "v", d.v, v_shape, 4, p->is_f64, with_data));
  p->N = p->B;
  if (given(d.cu_seqlens)) FW_TRY(check_cu_seqlens(kOp, d.cu_seqlens, p->B, p->T, with_data, &p->N, p->device));
  return FW_OK;
}

fw_status check_numbers(const fw_attention &d, Problem *p) {
  if (d.window < 0)
    return fail(FW_INVALID_ARGUMENT, "%s: window is %lld, allowed 0 (full) or more", kOp, ll(d.window));
  FW_TRY(check_number("scale", d.scale, false));
  FW_TRY(check_number("rope_theta", d.rope_theta, true));
  if (d.rope_theta > 0 && p->D % 2 != 0) {
    return fail(FW_INVALID_ARGUMENT, "%s: q has D = %lld, rope_theta needs an even number", kOp, ll(p->D));
  }
  p->reach = d.window > 0 && d.window < kNoWindow ? d.window : kNoWindow;
  p->scale = d.scale != 0 ? d.scale : 1 / sqrt(static_cast<double>(p->D));
  p->theta = d.rope_theta;
  return FW_OK;
}

fw_status check_caches(const fw_attention &d, bool with_data, Problem *p) {
  if (!given(d.k_cache)) return fail(FW_INVALID_ARGUMENT, "%s: k_cache is missing", kOp);
  if (d.k_cache.ndim != 4)
    return fail(FW_INVALID_ARGUMENT, "%s: k_cache has %d dimensions, expected 4", kOp, d.k_cache.ndim);
  const int64_t slots = d.k_cache.shape[0];
  p->capacity = d.k_cache.shape[1];
  const int64_t k_shape[] = {slots, p->capacity, p->HK, p->D}, v_shape[] = {slots, p->capacity, p->HK, p->DV};
  FW_TRY(check_float(kOp, "k_cache", d.k_cache, k_shape, 4, p->is_f64, with_data));
  FW_TRY(check_float(kOp, "v_cache", d.v_cache, v_shape, 4, p->is_f64, with_data));
  if (p->capacity < 1)
    return fail(FW_INVALID_ARGUMENT, "%s: k_cache has capacity %lld, allowed at least 1", kOp, ll(p->capacity));
  FW_TRY(check_positions("cache_lengths", d.cache_lengths, p->N, with_data, p->device));
  FW_TRY(check_state_indices(kOp, d.cache_indices, p->N, slots, with_data, "k_cache", "cache_indices", p->device));
  if (p->reach > p->capacity) p->reach = p->capacity;
  p->k_cache = d.k_cache;
  p->v_cache = d.v_cache;
  p->cache_lengths = d.cache_lengths;
  p->cache_indices = d.cache_indices;
  return FW_OK;
}

}  // namespace

fw_status Op::make_problem(const Desc &d, const Grads *grads, fw_direction direction, bool with_data,
                           Problem *problem) {
  Problem &p = *problem;
  p = Problem{};
  p.direction = direction;
  p.device = d.device;
  p.stream = d.stream;
  FW_TRY(check_device(kOp, d.device));
  FW_TRY(check_shapes(d, with_data, &p));
  FW_TRY(check_numbers(d, &p));
  p.q = d.q;
  p.k = d.k;
  p.v = d.v;
  p.cu_seqlens = d.cu_seqlens;
  const int64_t o_shape[] = {p.B, p.T, p.HQ, p.DV};
  const Operand inputs[] = {{"q", &p.q},
                            {"k", &p.k},
                            {"v", &p.v},
                            {"cu_seqlens", &p.cu_seqlens},
                            {"start_positions", &p.start_positions},
                            {"cache_lengths", &p.cache_lengths},
                            {"cache_indices", &p.cache_indices},
                            {"d_o", &p.d_o}};
  if (direction == FW_STEP) {
    FW_TRY(check_absent(kOp, "start_positions", d.start_positions, "cache_lengths says where a step starts"));
    FW_TRY(check_caches(d, with_data, &p));
  } else {
    FW_TRY(check_absent(kOp, "k_cache", d.k_cache, "caches are for step only"));
    FW_TRY(check_absent(kOp, "v_cache", d.v_cache, "caches are for step only"));
    FW_TRY(check_absent(kOp, "cache_lengths", d.cache_lengths, "caches are for step only"));
    FW_TRY(check_absent(kOp, "cache_indices", d.cache_indices, "caches are for step only"));
    if (given(d.start_positions)) FW_TRY(check_positions("start_positions", d.start_positions, p.N, with_data, p.device));
    p.start_positions = d.start_positions;
  }
  if (direction != FW_BACKWARD) {
    p.o = d.o;
    FW_TRY(check_result(kOp, "o", p.o, o_shape, 4, p.is_f64, with_data, direction));
    const Operand outputs[] = {{"o", &p.o}, {"k_cache", &p.k_cache}, {"v_cache", &p.v_cache}};
    return check_outputs(kOp, outputs, 3, inputs, 8, with_data);
  }
  if (!grads) return FW_OK;
  FW_TRY(check_reserved(kOp, "grads.reserved", grads->reserved));
  p.d_o = grads->d_o;
  p.dq = grads->dq;
  p.dk = grads->dk;
  p.dv = grads->dv;
  FW_TRY(check_float(kOp, "d_o", p.d_o, o_shape, 4, p.is_f64, with_data));
  if (given(p.dq)) FW_TRY(check_float(kOp, "dq", p.dq, p.q.shape, 4, p.is_f64, with_data, p.q.dtype));
  if (given(p.dk)) FW_TRY(check_float(kOp, "dk", p.dk, p.k.shape, 4, p.is_f64, with_data, p.k.dtype));
  if (given(p.dv)) FW_TRY(check_float(kOp, "dv", p.dv, p.v.shape, 4, p.is_f64, with_data, p.v.dtype));
  const Operand outputs[] = {{"dq", &p.dq}, {"dk", &p.dk}, {"dv", &p.dv}};
  return check_outputs(kOp, outputs, 3, inputs, 8, with_data);
}

Sequence sequence(const Problem &p, int64_t n) {
  const Segment rows = segment(p.cu_seqlens, p.T, n);
  Sequence s = {rows.batch, rows.begin, rows.end - rows.begin, 0, 0, 0};
  if (p.direction == FW_STEP) {
    s.first = load_int(p.cache_lengths, n);
    s.slot = given(p.cache_indices) ? load_int(p.cache_indices, n) : n;
    if (s.slot < 0) s.slot = -1;
  } else {
    if (given(p.start_positions)) s.first = load_int(p.start_positions, n);
    s.oldest = s.first;
  }
  return s;
}

int64_t first_row_of_none(const Problem &p) { return given(p.cu_seqlens) ? load_int(p.cu_seqlens, p.N) : p.T; }

}  // namespace fw::attention
