// SPDX-License-Identifier: Apache-2.0
#include "cli/neighbour_case.hpp"

#include <algorithm>
#include <span>
#include <string_view>
#include <type_traits>

#include "cli/case_tensor.hpp"

namespace fw::cli {
namespace {

using model::check;

// Each operation as a type: its verbs, and its tensors. kGradients go with kInputs and kIncoming with kOutputs, one
// to one; kInPlace are read and written by step. fill() makes the operands, flops() counts products and sums.
#define FW_CLI_VERBS(op)                                  \
  using Desc = fw_##op;                                   \
  using Grads = fw_##op##_grads;                          \
  static constexpr auto kSize = fw_##op##_workspace_size; \
  static constexpr auto kForward = fw_##op##_forward;     \
  static constexpr auto kBackward = fw_##op##_backward

struct Fill {
  const NeighbourKind &kind;
  fw_direction direction;
  fw_dtype dtype;
  const CaseSize &size;
  int64_t past;
  CaseTensors &make;
};

struct ShortConv {
  FW_CLI_VERBS(short_conv);
  static constexpr auto kStep = fw_short_conv_step;
  static constexpr fw_tensor Desc::*kInputs[] = {&Desc::x, &Desc::weight, &Desc::bias, &Desc::initial_state};
  static constexpr fw_tensor Grads::*kGradients[] = {&Grads::dx, &Grads::dweight, &Grads::dbias,
                                                     &Grads::d_initial_state};
  static constexpr fw_tensor Desc::*kOutputs[] = {&Desc::y, &Desc::final_state};
  static constexpr fw_tensor Grads::*kIncoming[] = {&Grads::dy, &Grads::d_final_state};
  static constexpr fw_tensor Desc::*kInPlace[] = {&Desc::state};
  static constexpr int64_t kTaps = 4;

  static void fill(const Fill &f, Desc &d) {
    const int64_t width = f.size.HV * f.size.V;
    d.activation = FW_ACTIVATION_SILU;
    d.x = f.make.random({f.size.B, f.size.T, width}, f.dtype, -1, 1);
    d.weight = f.make.random({width, kTaps}, f.dtype, -1, 1);
    d.bias = f.make.random({width}, f.dtype, -1, 1);
    d.y = f.make.tensor({f.size.B, f.size.T, width}, f.dtype);
    const fw_tensor state = f.make.random({f.size.B, width, kTaps - 1}, FW_F32, -1, 1);
    (f.direction == FW_STEP ? d.state : d.initial_state) = state;
    if (f.direction != FW_STEP) d.final_state = f.make.like(state);
  }
  // Backward makes the sums of forward again, for the slope of SiLU.
  static double flops(const Desc &d, fw_direction direction) {
    return static_cast<double>(count(d.x) * kTaps) * (direction == FW_BACKWARD ? 6 : 2);
  }
  static double bytes_in_place(const Desc &d) { return 2.0 * static_cast<double>(bytes_of(d.state)); }
};

// Operations without a state.
template <class Desc>
struct Stateless {
  static constexpr std::nullptr_t kStep = nullptr;
  static constexpr std::span<fw_tensor Desc::*const> kInPlace = {};
  static double flops(const Desc &, fw_direction) { return 0; }
  static double bytes_in_place(const Desc &) { return 0; }
};

enum NormVariant : int32_t { kL2 = 0, kRms = 1, kGatedRms = 2 };

struct Norm : Stateless<fw_norm> {
  FW_CLI_VERBS(norm);
  static constexpr fw_tensor Desc::*kInputs[] = {&Desc::x, &Desc::weight, &Desc::gate};
  static constexpr fw_tensor Grads::*kGradients[] = {&Grads::dx, &Grads::dweight, &Grads::dgate};
  static constexpr fw_tensor Desc::*kOutputs[] = {&Desc::y};
  static constexpr fw_tensor Grads::*kIncoming[] = {&Grads::dy};

  static void fill(const Fill &f, Desc &d) {
    const int64_t heads = f.kind.number == kL2 ? f.size.H : f.size.HV,
                  width = f.kind.number == kL2 ? f.size.K : f.size.V;
    d.kind = f.kind.number == kL2 ? FW_NORM_L2 : FW_NORM_RMS;
    d.x = f.make.random({f.size.B, f.size.T, heads, width}, f.dtype, -1, 1);
    d.y = f.make.like(d.x);
    if (f.kind.number != kL2) d.weight = f.make.random({width}, f.dtype, 0.5, 1.5);
    if (f.kind.number == kGatedRms) {
      d.gate_activation = FW_ACTIVATION_SILU;
      d.gate = f.make.random_like(d.x);
    }
  }
};

struct GateActivation : Stateless<fw_gate_activation> {
  FW_CLI_VERBS(gate_activation);
  static constexpr fw_tensor Desc::*kInputs[] = {&Desc::x, &Desc::a_log, &Desc::dt_bias};
  static constexpr fw_tensor Grads::*kGradients[] = {&Grads::dx, &Grads::d_a_log, &Grads::d_dt_bias};
  static constexpr fw_tensor Desc::*kOutputs[] = {&Desc::y};
  static constexpr fw_tensor Grads::*kIncoming[] = {&Grads::dy};

  static void fill(const Fill &f, Desc &d) {
    const CaseSize &z = f.size;
    d.kind = f.kind.number;
    const bool is_bounded = d.kind == FW_GATE_KIND_BOUNDED,
               has_heads_only = d.kind == FW_GATE_KIND_SOFTPLUS || d.kind >= FW_GATE_KIND_BETA;
    d.x = has_heads_only ? f.make.random({z.B, z.T, z.HV}, f.dtype, -4, 4)
                         : f.make.random({z.B, z.T, z.HV, z.K}, f.dtype, -4, 4);
    fw_tensor y = d.x;
    y.dtype = FW_F32;
    d.y = f.make.like(y);
    if (d.kind != FW_GATE_KIND_SOFTPLUS && !is_bounded) return;
    d.a_log = f.make.random({z.HV}, FW_F32, -1, 1);
    d.dt_bias = is_bounded ? f.make.random({z.HV, z.K}, FW_F32, -1, 1) : f.make.random({z.HV}, FW_F32, -1, 1);
  }
};

struct FeatureMap : Stateless<fw_feature_map> {
  FW_CLI_VERBS(feature_map);
  static constexpr fw_tensor Desc::*kInputs[] = {&Desc::x};
  static constexpr fw_tensor Grads::*kGradients[] = {&Grads::dx};
  static constexpr fw_tensor Desc::*kOutputs[] = {&Desc::y};
  static constexpr fw_tensor Grads::*kIncoming[] = {&Grads::dy};

  static void fill(const Fill &f, Desc &d) {
    d.kind = f.kind.number;
    d.x = f.make.random({f.size.B, f.size.T, f.size.H, f.size.K}, f.dtype, -2, 2);
    d.y = f.make.like(d.x);
  }
};

struct Attention {
  FW_CLI_VERBS(attention);
  static constexpr auto kStep = fw_attention_step;
  static constexpr fw_tensor Desc::*kInputs[] = {&Desc::q, &Desc::k, &Desc::v};
  static constexpr fw_tensor Grads::*kGradients[] = {&Grads::dq, &Grads::dk, &Grads::dv};
  static constexpr fw_tensor Desc::*kOutputs[] = {&Desc::o};
  static constexpr fw_tensor Grads::*kIncoming[] = {&Grads::d_o};
  static constexpr fw_tensor Desc::*kInPlace[] = {&Desc::k_cache, &Desc::v_cache};

  static void fill(const Fill &f, Desc &d) {
    const CaseSize &z = f.size;
    d.window = f.kind.number;
    d.rope_theta = z.K % 2 == 0 ? 10000 : 0;
    d.q = f.make.random({z.B, z.T, z.HV, z.K}, f.dtype, -1, 1);
    d.k = f.make.random({z.B, z.T, z.H, z.K}, f.dtype, -1, 1);
    d.v = f.make.random({z.B, z.T, z.H, z.V}, f.dtype, -1, 1);
    d.o = f.make.tensor({z.B, z.T, z.HV, z.V}, f.dtype);
    if (f.direction != FW_STEP) return;
    d.k_cache = f.make.random({z.B, f.past, z.H, z.K}, f.dtype, -1, 1);
    d.v_cache = f.make.random({z.B, f.past, z.H, z.V}, f.dtype, -1, 1);
    d.cache_lengths = f.make.tensor({z.B}, FW_I64);
    for (int64_t n = 0; n < z.B; ++n) static_cast<int64_t *>(d.cache_lengths.data)[n] = f.past;
  }
  // Keys that the queries of a sequence read: `past` of them are in the cache.
  static double pairs(const Desc &d) {
    const int64_t past = d.k_cache.dtype == FW_NONE ? 0 : d.k_cache.shape[1], T = d.q.shape[1];
    double sum = 0;
    for (int64_t t = 0; t < T; ++t) {
      const int64_t seen = past > 0 ? past : t + 1;
      sum += static_cast<double>(d.window > 0 ? std::min(d.window, seen) : seen);
    }
    return sum;
  }
  // Forward: q k and p v; backward: q k, dp and three gradients.
  static double flops(const Desc &d, fw_direction direction) {
    const double D = static_cast<double>(d.q.shape[3]), V = static_cast<double>(d.v.shape[3]);
    const double heads = static_cast<double>(d.q.shape[0] * d.q.shape[2]);
    return heads * pairs(d) * 2 * (direction == FW_BACKWARD ? 3 * D + 2 * V : D + V);
  }
  static double bytes_in_place(const Desc &d) {  // what is read; a token is written
    if (d.k_cache.dtype == FW_NONE) return 0;
    const int64_t capacity = d.k_cache.shape[1];
    const double read =
        d.window > 0 ? std::min(1.0, static_cast<double>(d.window) / static_cast<double>(capacity)) : 1;
    return read * static_cast<double>(bytes_of(d.k_cache) + bytes_of(d.v_cache));
  }
};

struct Linear : Stateless<fw_linear> {
  FW_CLI_VERBS(linear);
  static constexpr fw_tensor Desc::*kInputs[] = {&Desc::x, &Desc::weight, &Desc::bias};
  static constexpr fw_tensor Grads::*kGradients[] = {&Grads::dx, &Grads::dweight, &Grads::dbias};
  static constexpr fw_tensor Desc::*kOutputs[] = {&Desc::y};
  static constexpr fw_tensor Grads::*kIncoming[] = {&Grads::dy};

  static void fill(const Fill &f, Desc &d) {
    const int64_t rows = f.size.B * f.size.T, in = f.size.H * f.size.K, out = f.size.HV * f.size.V;
    d.x = f.make.random({rows, in}, f.dtype, -1, 1);
    d.weight = f.make.random({out, in}, f.dtype, -1, 1);
    d.bias = f.make.random({out}, f.dtype, -1, 1);
    d.y = f.make.tensor({rows, out}, f.dtype);
  }
  static double flops(const Desc &d, fw_direction direction) {
    return static_cast<double>(count(d.x) * d.weight.shape[0]) * (direction == FW_BACKWARD ? 4 : 2);
  }
};

template <class Op>
class CaseOf : public NeighbourCase {
 public:
  CaseOf(const NeighbourKind &kind, fw_direction direction, fw_dtype dtype, const CaseSize &size, int64_t past)
      : direction_(direction), make_(true) {
    desc_.struct_size = sizeof desc_;
    grads_.struct_size = sizeof grads_;
    Op::fill({kind, direction, dtype, size, past, make_}, desc_);
    if (direction != FW_BACKWARD) return;
    for (size_t i = 0; i < std::size(Op::kOutputs); ++i)
      grads_.*Op::kIncoming[i] = make_.random_like(desc_.*Op::kOutputs[i]);
    for (size_t i = 0; i < std::size(Op::kInputs); ++i) grads_.*Op::kGradients[i] = make_.like(desc_.*Op::kInputs[i]);
  }

  double error(fw_context *context) override {
    CaseOf wide(*this, FW_F64);
    wide.run(context);
    run(context);
    double worst = 0;
    const auto compare = [&](const fw_tensor &found, const fw_tensor &expected) {
      if (found.dtype == FW_NONE) return;
      const double one = relative_difference(values(found), values(expected));
      if (!(one <= worst)) worst = one;
    };
    if (direction_ == FW_BACKWARD) {
      for (const auto gradient : Op::kGradients) compare(grads_.*gradient, wide.grads_.*gradient);
      return worst;
    }
    for (const auto output : Op::kOutputs) compare(desc_.*output, wide.desc_.*output);
    for (const auto state : Op::kInPlace) compare(desc_.*state, wide.desc_.*state);
    return worst;
  }

  void run(fw_context *context) override {
    const bool has_step = direction_ == FW_STEP && !std::is_same_v<decltype(Op::kStep), const std::nullptr_t>;
    const fw_direction verb = direction_ == FW_STEP && !has_step ? FW_FORWARD : direction_;
    uint64_t bytes = 0;
    check(Op::kSize(context, &desc_, verb, &bytes));
    if (bytes > workspace_.size()) workspace_ = model::Buffer(bytes);
    if (verb == FW_BACKWARD) {
      check(Op::kBackward(context, &desc_, &grads_, workspace_.data(), workspace_.size()));
    } else if (verb == FW_FORWARD) {
      check(Op::kForward(context, &desc_, workspace_.data(), workspace_.size()));
    }
    if constexpr (!std::is_same_v<decltype(Op::kStep), const std::nullptr_t>) {
      if (verb == FW_STEP) check(Op::kStep(context, &desc_, workspace_.data(), workspace_.size()));
    }
  }

  Work work() const override {
    double bytes = Op::bytes_in_place(desc_);
    for (const auto input : Op::kInputs) bytes += static_cast<double>(bytes_of(desc_.*input));
    if (direction_ == FW_BACKWARD) {
      for (const auto incoming : Op::kIncoming) bytes += static_cast<double>(bytes_of(grads_.*incoming));
      for (const auto gradient : Op::kGradients) bytes += static_cast<double>(bytes_of(grads_.*gradient));
    } else {
      for (const auto output : Op::kOutputs) bytes += static_cast<double>(bytes_of(desc_.*output));
    }
    return {bytes, Op::flops(desc_, direction_)};
  }

 private:
  // The same values in another type.
  CaseOf(const CaseOf &other, fw_dtype dtype)
      : direction_(other.direction_), desc_(other.desc_), grads_(other.grads_), make_(true) {
    const auto widen = [&](fw_tensor &t) { t = make_.copy_as(t, dtype); };
    for (const auto t : Op::kInputs) widen(desc_.*t);
    for (const auto t : Op::kOutputs) widen(desc_.*t);
    for (const auto t : Op::kInPlace) widen(desc_.*t);
    for (const auto t : Op::kIncoming) widen(grads_.*t);
    for (const auto t : Op::kGradients) widen(grads_.*t);
  }

  fw_direction direction_;
  typename Op::Desc desc_ = {};
  typename Op::Grads grads_ = {};
  CaseTensors make_;
  model::Buffer workspace_;
};

template <class Op>
std::unique_ptr<NeighbourCase> make(const NeighbourKind &kind, fw_direction direction, fw_dtype dtype,
                                    const CaseSize &size, int64_t past) {
  return std::make_unique<CaseOf<Op>>(kind, direction, dtype, size, past);
}

}  // namespace

const std::vector<NeighbourKind> &neighbour_kinds() {
  static const std::vector<NeighbourKind> kinds = {
      {"short_conv", "4 taps, SiLU", make<ShortConv>, 0},
      {"norm", "L2", make<Norm>, kL2},
      {"norm", "RMS", make<Norm>, kRms},
      {"norm", "RMS, gated", make<Norm>, kGatedRms},
      {"gate_activation", "softplus", make<GateActivation>, FW_GATE_KIND_SOFTPLUS},
      {"gate_activation", "log sigmoid", make<GateActivation>, FW_GATE_KIND_LOG_SIGMOID},
      {"gate_activation", "bounded", make<GateActivation>, FW_GATE_KIND_BOUNDED},
      {"gate_activation", "RWKV-7", make<GateActivation>, FW_GATE_KIND_RWKV7},
      {"gate_activation", "beta", make<GateActivation>, FW_GATE_KIND_BETA},
      {"gate_activation", "beta twice", make<GateActivation>, FW_GATE_KIND_BETA_TWICE},
      {"feature_map", "identity", make<FeatureMap>, FW_FEATURE_IDENTITY},
      {"feature_map", "ELU + 1", make<FeatureMap>, FW_FEATURE_ELU_PLUS_ONE},
      {"feature_map", "SiLU", make<FeatureMap>, FW_FEATURE_SILU},
      {"feature_map", "ReLU", make<FeatureMap>, FW_FEATURE_RELU},
      {"attention", "full", make<Attention>, 0},
      {"attention", "window 256", make<Attention>, 256},
      {"linear", "bias", make<Linear>, 0},
  };
  return kinds;
}

std::string neighbour_names() {
  std::string names;
  const char *last = "";
  for (const NeighbourKind &kind : neighbour_kinds()) {
    if (std::string_view(kind.op) == last) continue;
    names += (names.empty() ? "" : ", ") + std::string(kind.op);
    last = kind.op;
  }
  return names;
}

}  // namespace fw::cli
