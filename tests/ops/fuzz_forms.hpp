// SPDX-License-Identifier: Apache-2.0
// A call of a function of forms.h with fields set to random or extreme values. Arrays come without their length, so a
// size is only ever made smaller than its array or impossible.
#pragma once
#include <stdint.h>
#include <string.h>

#include <vector>

#include "fastweight/forms.h"
#include "harness_tensor.hpp"

namespace fw::test {

#define FW_TEST_FORMS(Name, suffix, Type, kType)                          \
  struct Name {                                                           \
    using Real = Type;                                                    \
    using Problem = fw_form_problem_##suffix;                             \
    static constexpr fw_dtype kDtype = kType;                             \
    static constexpr auto recurrent = fw_form_recurrent_##suffix;         \
    static constexpr auto parallel = fw_form_parallel_##suffix;           \
    static constexpr auto chunk = fw_form_chunk_##suffix;                 \
    static constexpr auto normal = fw_form_normal_##suffix;               \
    static constexpr auto edges = fw_form_edges_##suffix;                 \
    static constexpr auto erase = fw_form_erase_##suffix;                 \
    static constexpr auto write = fw_form_write_##suffix;                 \
    static constexpr auto feedback = fw_form_feedback_##suffix;           \
    static constexpr auto erase_hops = fw_form_erase_hops_##suffix;       \
    static constexpr auto write_hops = fw_form_write_hops_##suffix;       \
    static constexpr auto feedback_hops = fw_form_feedback_hops_##suffix; \
    static constexpr auto segment = fw_form_segment_##suffix;             \
    static constexpr auto compose = fw_form_compose_##suffix;             \
    static constexpr auto inverse = fw_form_inverse_##suffix;             \
    static constexpr auto quotient = fw_form_decay_quotient_##suffix;     \
    static constexpr auto tempting = fw_form_tempting_##suffix;           \
  }
FW_TEST_FORMS(FormsF64, f64, double, FW_F64);
FW_TEST_FORMS(FormsF32, f32, float, FW_F32);
#undef FW_TEST_FORMS

struct FormCall {
  fw_status status;
  int64_t function;
  bool inputs_unchanged, outputs_unchanged;
};

// strange(random): an extreme number.
template <class Forms, class Strange>
FormCall one_form(uint64_t seed, Strange strange) {
  using Real = typename Forms::Real;
  constexpr int64_t kMost = 6, kHops = 8;  // tokens and widths; terms
  Random random(seed);
  const auto filled = [&](bool is_gate) {
    std::vector<Real> all(static_cast<size_t>(kMost * kMost));
    for (Real &x : all) x = static_cast<Real>(is_gate ? -3 * random.uniform() : 0.5 * random.normal());
    return all;
  };
  const std::vector<Real> numbers = filled(false), gates = filled(true), numbers_before = numbers,
                          gates_before = gates;
  std::vector<std::vector<Real>> outputs(4, std::vector<Real>(static_cast<size_t>(kHops * kMost * kMost), Real(777)));
  const std::vector<std::vector<Real>> outputs_before = outputs;
  Real *out[4];
  for (size_t i = 0; i < 4; ++i) out[i] = outputs[i].data();

  int64_t T = random.integer(0, kMost), K = random.integer(1, kMost), V = random.integer(1, kMost);
  typename Forms::Problem p = {};
  p.struct_size = sizeof p;
  p.gate = static_cast<fw_gate>(random.integer(0, 2)), p.erase = static_cast<fw_erase>(random.integer(0, 3));
  const Real *x = numbers.data();
  p.q = p.k = p.v = x;
  if (p.gate != FW_GATE_NONE) p.g = gates.data();
  if (p.erase == FW_ERASE_INDEPENDENT) {
    p.a = p.b = x;
  } else if (p.erase != FW_ERASE_NONE) {
    for (const Real **one : {&p.p, &p.beta, &p.erase_gate, &p.write_gate}) *one = random.chance(0.5) ? x : nullptr;
  }
  if (random.chance(0.5)) p.initial_state = x;
  const auto impossible_or_less = [&](int64_t most) {
    const int64_t values[] = {
        -1,        INT64_MIN,       INT32_MIN, random.integer(0, kMost), most < INT64_MAX ? most + 1 : most,
        INT64_MAX, int64_t{1} << 40};
    return values[random.integer(0, most < INT64_MAX ? 6 : 3)];
  };
  const int64_t function = random.integer(0, 15), n_damages = random.integer(0, 2);
  const bool holds_matrix = function == 1 || function == 4;  // and so has a largest T
  fw_form_method method = static_cast<fw_form_method>(random.integer(1, 4));
  int64_t chunk = random.integer(1, 8), kind = random.integer(1, 2), n_hops = random.integer(0, kHops);
  int64_t begin = random.integer(0, T), end = random.integer(begin, T), n = random.integer(0, kMost), block = 0;
  int64_t way = random.integer(1, 6), arithmetic = Forms::kDtype;
  if (arithmetic == FW_F32) arithmetic = random.integer(FW_F32, FW_F16);
  for (int64_t i = 0; i < n_damages; ++i) {
    const Real **const pointers[] = {&p.q, &p.k, &p.v, &p.p, &p.beta, &p.erase_gate, &p.write_gate, &p.a, &p.b, &p.g};
    switch (random.integer(0, 12)) {
      case 0: T = impossible_or_less(holds_matrix ? 16384 : INT64_MAX); break;
      case 1: K = impossible_or_less(512); break;
      case 2: V = impossible_or_less(512); break;
      case 3: p.gate = static_cast<fw_gate>(strange(random)); break;
      case 4: p.erase = static_cast<fw_erase>(strange(random)); break;
      case 5:
        p.struct_size = static_cast<uint32_t>(random.chance(0.5) ? random.integer(0, sizeof p) : 1u << 30);
        break;
      case 6: p.scale = random.chance(0.5) ? static_cast<double>(NAN) : random.normal(); break;
      case 7: *pointers[random.integer(0, 9)] = random.chance(0.7) ? nullptr : x; break;
      case 8: out[random.integer(0, 3)] = nullptr; break;
      case 9: method = static_cast<fw_form_method>(strange(random)); break;
      case 10: begin = strange(random), way = strange(random); break;
      case 11: end = strange(random), block = strange(random), arithmetic = strange(random); break;
      default:
        chunk = strange(random), kind = strange(random), n = impossible_or_less(1024),
        n_hops = impossible_or_less(16384);
    }
  }
  p.T = T, p.K = K, p.V = V;
  // gates of a vector are read as such: the array is large enough for both
  fw_status status = FW_OK;
  switch (function) {
    case 0: status = Forms::recurrent(&p, out[0], out[1]); break;
    case 1: status = Forms::parallel(&p, out[0], out[1], out[2]); break;
    case 2: status = Forms::chunk(&p, chunk, static_cast<fw_chunk_kind>(kind), out[0], out[1]); break;
    case 3: status = Forms::normal(&p, out[0], out[1], out[2]); break;
    case 4: status = Forms::edges(&p, out[0], out[1], out[2]); break;
    case 5: status = Forms::erase(&p, method, out[0]); break;
    case 6: status = Forms::write(&p, method, out[0]); break;
    case 7: status = Forms::feedback(&p, method, out[0]); break;
    case 8: status = Forms::erase_hops(&p, n_hops, out[0]); break;
    case 9: status = Forms::write_hops(&p, n_hops, out[0]); break;
    case 10: status = Forms::feedback_hops(&p, n_hops, out[0]); break;
    case 11: status = Forms::segment(&p, begin, end, method, out[0], out[1]); break;
    case 12: status = Forms::compose(K, V, x, x, x, out[2] ? x : nullptr, out[0], out[1]); break;
    case 13:
      status =
          Forms::inverse(static_cast<fw_inverse_method>(way), static_cast<fw_dtype>(arithmetic), n, block, x, out[0]);
      break;
    case 14:
      status = Forms::quotient(T, K, p.g ? p.g : gates.data(), begin, end, out[0], out[1], out[2], out[3]);
      break;
    default: status = Forms::tempting(&p, out[0]);
  }
  const auto are_same = [](const std::vector<Real> &a, const std::vector<Real> &b) {
    return memcmp(a.data(), b.data(), a.size() * sizeof(Real)) == 0;
  };
  bool outputs_unchanged = true;
  for (size_t i = 0; i < 4; ++i) outputs_unchanged = outputs_unchanged && are_same(outputs[i], outputs_before[i]);
  return {status, function, are_same(numbers, numbers_before) && are_same(gates, gates_before), outputs_unchanged};
}

}  // namespace fw::test
