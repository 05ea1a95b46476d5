// SPDX-License-Identifier: Apache-2.0
// Short convolution in fp64, channel by channel, on one thread. Workspace: one sequence's gradient before the
// activation (T doubles), the incoming state (W) and the sums of dweight and dbias (W + 1) of one channel.
#include "core/activation_f64.hpp"
#include "core/ledger.hpp"
#include "ops/short_conv/problem.hpp"

namespace fw::short_conv {
namespace {

double at3(const fw_tensor &t, int64_t i, int64_t j, int64_t k) {
  return given(t) ? load_f64(t.data, t.dtype, i * t.strides[0] + j * t.strides[1] + k * t.strides[2]) : 0.0;
}
void put3(const fw_tensor &t, int64_t i, int64_t j, int64_t k, double x) {
  store_f64(t.data, t.dtype, i * t.strides[0] + j * t.strides[1] + k * t.strides[2], x);
}
double weight_at(const Problem &p, int64_t d, int64_t tap) {
  return load_f64(p.weight.data, p.weight.dtype, d * p.weight.strides[0] + tap * p.weight.strides[1]);
}

struct Channel {
  const Problem &p;
  const Sequence &s;
  int64_t d;
  double input(int64_t position) const {
    if (position >= 0) return at3(p.x, s.batch, s.begin + position, d);
    return at3(incoming_state(p), s.slot, d, p.W - 1 + position);
  }
  double before_activation(int64_t position) const {
    double sum = given(p.bias) ? load_f64(p.bias.data, p.bias.dtype, d * p.bias.strides[0]) : 0.0;
    for (int64_t tap = 0; tap < p.W; ++tap) sum += weight_at(p, d, tap) * input(position - (p.W - 1) + tap);
    return sum;
  }
};

struct Memory {
  double *dz, *state, *sums;
};
Memory lay_out(Ledger &ledger, const Problem &p) {
  Memory m = {};
  m.state = ledger.take<double>(p.W);
  if (p.direction == FW_BACKWARD) {
    m.dz = ledger.take<double>(p.T);
    m.sums = ledger.take<double>(p.W + 1);
  }
  return m;
}

void forward_channel(const Channel &c, const fw_tensor &state, int64_t slot, double *memory) {
  const Problem &p = c.p;
  for (int64_t i = 0; i < c.s.length(); ++i) {
    const double z = c.before_activation(i);
    put3(p.y, c.s.batch, c.s.begin + i, c.d, p.has_silu ? silu_f64(z) : z);
  }
  if (!given(state)) return;
  const int64_t first = c.s.length() - (p.W - 1);  // memory first: the new state may lie over the old one
  for (int64_t i = 0; i < p.W - 1; ++i) memory[i] = c.input(first + i);
  for (int64_t i = 0; i < p.W - 1; ++i) put3(state, slot, c.d, i, memory[i]);
}

void backward_channel(const Channel &c, const Memory &m) {
  const Problem &p = c.p;
  const int64_t length = c.s.length(), past = p.W - 1;
  for (int64_t i = 0; i < length; ++i) {
    m.dz[i] = at3(p.dy, c.s.batch, c.s.begin + i, c.d);
    if (p.has_silu) m.dz[i] *= silu_slope_f64(c.before_activation(i));
    for (int64_t tap = 0; tap < p.W; ++tap) m.sums[tap] += m.dz[i] * c.input(i - past + tap);
    m.sums[p.W] += m.dz[i];
  }
  for (int64_t position = -past; position < length; ++position) {
    double sum = 0;
    for (int64_t tap = 0; tap < p.W; ++tap) {
      const int64_t i = position + past - tap;
      if (i >= 0 && i < length) sum += weight_at(p, c.d, tap) * m.dz[i];
    }
    if (position >= length - past) sum += at3(p.d_final_state, c.s.n, c.d, position - (length - past));
    if (position >= 0 && given(p.dx)) put3(p.dx, c.s.batch, c.s.begin + position, c.d, sum);
    if (position < 0 && given(p.d_initial_state)) put3(p.d_initial_state, c.s.n, c.d, position + past, sum);
  }
}

}  // namespace

uint64_t reference_workspace(const fw_context &, const Problem &p) {
  Ledger ledger(nullptr);
  lay_out(ledger, p);
  return ledger.bytes();
}

void reference_run(fw_context &, const Problem &p, void *workspace) {
  Ledger ledger(workspace);
  const Memory m = lay_out(ledger, p);
  const fw_tensor &rows = p.direction == FW_BACKWARD ? p.dx : p.y;
  if (given(p.cu_seqlens) && given(rows)) zero_rows(rows, 0, p.N > 0 ? sequence(p, p.N - 1).end : 0, p.T, 0, p.D);
  for (int64_t d = 0; d < p.D; ++d) {
    for (int64_t i = 0; p.direction == FW_BACKWARD && i <= p.W; ++i) m.sums[i] = 0;
    for (int64_t n = 0; n < p.N; ++n) {
      const Sequence s = sequence(p, n);
      const Channel c = {p, s, d};
      if (p.direction == FW_BACKWARD) {
        backward_channel(c, m);
      } else if (s.slot < 0) {
        zero_rows(p.y, s.batch, s.begin, s.end, d, 1);
      } else {
        forward_channel(c, p.direction == FW_STEP ? p.state : p.final_state, s.slot, m.state);
      }
    }
    for (int64_t tap = 0; given(p.dweight) && tap < p.W; ++tap) {
      store_f64(p.dweight.data, p.dweight.dtype, d * p.dweight.strides[0] + tap * p.dweight.strides[1], m.sums[tap]);
    }
    if (given(p.dbias)) store_f64(p.dbias.data, p.dbias.dtype, d * p.dbias.strides[0], m.sums[p.W]);
  }
}

}  // namespace fw::short_conv
