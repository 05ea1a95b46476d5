// SPDX-License-Identifier: Apache-2.0
// The public functions of forms.h for one real type: check, compute into temporaries, copy out. What cannot be
// allocated ends as FW_OUT_OF_MEMORY before anything has been written.
#pragma once
#include <exception>

#include "core/tensor.hpp"
#include "ops/forms/checks.hpp"
#include "ops/forms/decay.hpp"
#include "ops/forms/forms.hpp"

namespace fw::forms {

template <class Body>
fw_status guarded(const char *op, Body body) {
  try {
    return body();
  } catch (const std::exception &) {
    return fail(FW_OUT_OF_MEMORY, "%s: no memory for the temporaries", op);
  }
}

template <class Real>
void copy_out(const Matrix<Real> &from, Real *to) {
  for (size_t i = 0; to && i < from.data.size(); ++i) to[i] = from.data[i];
}

// Checks, then runs body(problem) -> void. `result` is the output that must be there when there are tokens.
template <class Real, class Desc, class Body>
fw_status with_problem(const char *op, const Desc *desc, Needs needs, const char *name, const Real *result,
                       Body body) {
  Operands<Real> operands;
  FW_TRY(check_problem(op, desc, needs, operands));
  if (name && operands.T > 0) FW_TRY(check_pointer(op, name, result));
  return guarded(op, [&] {
    body(make_problem(operands));
    return FW_OK;
  });
}

template <class Real, class Desc>
fw_status call_recurrent(const char *op, const Desc *desc, Real *o, Real *final_state) {
  return with_problem<Real>(op, desc, {true, false}, "o", o, [&](const Problem<Real> &p) {
    const Outputs<Real> out = recurrent(p);
    copy_out(out.o, o);
    copy_out(out.state, final_state);
  });
}

template <class Real, class Desc>
fw_status call_parallel(const char *op, const Desc *desc, Real *o, Real *final_state, Real *attention) {
  return with_problem<Real>(op, desc, {true, true}, "o", o, [&](const Problem<Real> &p) {
    const Outputs<Real> out = parallel(p);
    copy_out(out.o, o);
    copy_out(out.state, final_state);
    copy_out(out.attention, attention);
  });
}

template <class Real, class Desc>
fw_status call_chunk(const char *op, const Desc *desc, int64_t length, fw_chunk_kind kind, Real *o,
                     Real *final_state) {
  FW_TRY(check_range(op, "chunk", length, 1, kMaxSquare));
  FW_TRY(check_range(op, "kind", kind, FW_CHUNK_SOLVE, FW_CHUNK_FACTORS));
  return with_problem<Real>(op, desc, {true, false}, "o", o, [&](const Problem<Real> &p) {
    const Outputs<Real> out = chunk(p, length, kind);
    copy_out(out.o, o);
    copy_out(out.state, final_state);
  });
}

template <class Real, class Desc>
fw_status call_normal(const char *op, const Desc *desc, Real *x, Real *y, Real *v_write) {
  const Real *none = nullptr;
  return with_problem<Real>(op, desc, {false, false}, nullptr, none, [&](const Problem<Real> &p) {
    copy_out(p.x, x);
    copy_out(p.shared ? p.k : p.y, y);
    copy_out(p.v, v_write);
  });
}

template <class Real, class Desc>
fw_status call_edges(const char *op, const Desc *desc, Real *L, Real *L_k, Real *B) {
  const Real *none = nullptr;
  return with_problem<Real>(op, desc, {false, true}, nullptr, none, [&](const Problem<Real> &p) {
    const Edges<Real> e = make_edges(p);
    copy_out(e.L, L);
    copy_out(e.Lk(), L_k);
    copy_out(e.B, B);
  });
}

enum class Operator { kErase, kWrite, kFeedback };

template <class Real, class Desc>
fw_status call_operator(const char *op, Operator which, const Desc *desc, fw_form_method method, Real *result) {
  FW_TRY(check_range(op, "method", method, FW_BY_RECURSION, FW_BY_PATHS));
  const char *name = which == Operator::kErase ? "W" : (which == Operator::kWrite ? "U" : "Z");
  const Needs needs = {false, method != FW_BY_RECURSION};
  return with_problem<Real>(op, desc, needs, name, result, [&](const Problem<Real> &p) {
    copy_out(which == Operator::kErase   ? erase_operator(p, method)
             : which == Operator::kWrite ? write_operator(p, method)
                                         : feedback_operator(p, method),
             result);
  });
}

template <class Real, class Desc>
fw_status call_hops(const char *op, Operator which, const Desc *desc, int64_t n_hops, Real *terms) {
  FW_TRY(check_range(op, "n_hops", n_hops, 0, kMaxSquare));
  return with_problem<Real>(
      op, desc, {false, true}, n_hops > 0 ? "terms" : nullptr, terms, [&](const Problem<Real> &p) {
        const Edges<Real> e = make_edges(p);
        const Matrix<Real> source = which == Operator::kErase   ? e.B
                                    : which == Operator::kWrite ? p.v
                                                                : feedback_source(p, e);
        Real *to = terms;
        for (const Matrix<Real> &term : hops(which == Operator::kWrite ? e.Lk() : e.L, source, n_hops)) {
          copy_out(term, to);
          to += term.rows * term.cols;
        }
      });
}

template <class Real, class Desc>
fw_status call_segment(const char *op, const Desc *desc, int64_t begin, int64_t end, fw_form_method method, Real *P,
                       Real *H) {
  FW_TRY(check_range(op, "method", method, FW_BY_RECURSION, FW_BY_PATHS));
  FW_TRY(check_pointer(op, "P", P));
  FW_TRY(check_pointer(op, "H", H));
  Operands<Real> operands;
  FW_TRY(check_problem(op, desc, {false, method != FW_BY_RECURSION}, operands));
  FW_TRY(check_range(op, "end", end, 0, operands.T));
  FW_TRY(check_range(op, "begin", begin, 0, end));
  return guarded(op, [&] {
    const Segment<Real> s = segment(slice(make_problem(operands), begin, end), method);
    copy_out(s.P, P);
    copy_out(s.H, H);
    return FW_OK;
  });
}

template <class Real>
fw_status call_compose(const char *op, int64_t K, int64_t V, const Real *P1, const Real *H1, const Real *P2,
                       const Real *H2, Real *P, Real *H) {
  FW_TRY(check_range(op, "K", K, 1, kMaxSize));
  FW_TRY(check_range(op, "V", V, 1, kMaxSize));
  const struct {
    const char *name;
    const Real *pointer;
  } arrays[] = {{"P1", P1}, {"H1", H1}, {"P2", P2}, {"H2", H2}, {"P", P}, {"H", H}};
  for (const auto &array : arrays) FW_TRY(check_pointer(op, array.name, array.pointer));
  return guarded(op, [&] {
    const auto load = [&](const Real *from, int64_t cols) {
      Matrix<Real> m(K, cols);
      m.data.assign(from, from + K * cols);
      return m;
    };
    const Matrix<Real> later = load(P2, K);
    Matrix<Real> product(K, K), sum = load(H2, V);
    add_matmul(product, later, load(P1, K));
    add_matmul(sum, later, load(H1, V));
    copy_out(product, P);
    copy_out(sum, H);
    return FW_OK;
  });
}

struct RoundBf16 {
  float operator()(float x) const { return bf16_to_f32(f32_to_bf16(x)); }
};
struct RoundF16 {
  float operator()(float x) const { return f16_to_f32(f32_to_f16(x)); }
};

inline Matrix<double> inverse_in(fw_dtype, fw_inverse_method method, const Matrix<double> &L, int64_t block) {
  return inverse(method, L, block, Exact());
}
inline Matrix<float> inverse_in(fw_dtype arithmetic, fw_inverse_method method, const Matrix<float> &L,
                                int64_t block) {
  if (arithmetic == FW_BF16) return inverse(method, L, block, RoundBf16());
  if (arithmetic == FW_F16) return inverse(method, L, block, RoundF16());
  return inverse(method, L, block, Exact());
}

template <class Real>
fw_status call_inverse(const char *op, fw_inverse_method method, fw_dtype arithmetic, int64_t n, int64_t block,
                       const Real *L, Real *X) {
  constexpr bool is_f64 = sizeof(Real) == 8;
  FW_TRY(check_range(op, "method", method, FW_INVERSE_SUBSTITUTION, FW_INVERSE_HORNER));
  if (is_f64 ? arithmetic != FW_F64 : !is_float32_or_half(arithmetic)) {
    return fail(FW_INVALID_ARGUMENT, "%s: arithmetic is %s, allowed %s", op, dtype_name(arithmetic),
                is_f64 ? "fp64" : "fp32, bf16, fp16");
  }
  FW_TRY(check_range(op, "n", n, 0, kMaxInverse));
  FW_TRY(check_range(op, "block", block, 0, n));
  if (n > 0) FW_TRY(check_pointer(op, "L", L));
  if (n > 0) FW_TRY(check_pointer(op, "X", X));
  return guarded(op, [&] {
    Matrix<Real> strict(n, n);
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < i; ++j) strict(i, j) = L[i * n + j];
    }
    copy_out(inverse_in(arithmetic, method, strict, block > 0 ? block : (n + 3) / 4), X);
    return FW_OK;
  });
}

template <class Real>
fw_status call_decay_quotient(const char *op, int64_t T, int64_t K, const Real *g, int64_t s, int64_t e,
                              Real *near_factor, Real *far_factor, Real *phi, Real *rest) {
  FW_TRY(check_range(op, "T", T, 0, kMaxTokens));
  FW_TRY(check_range(op, "K", K, 1, kMaxSize));
  FW_TRY(check_range(op, "e", e, 0, T));
  FW_TRY(check_range(op, "s", s, 0, e));
  if (T > 0) FW_TRY(check_pointer(op, "g", g));
  return guarded(op, [&] {
    const DecayQuotient<Real> d = decay_quotient(K, g, s, e);
    copy_out(d.near_factor, near_factor);
    copy_out(d.far_factor, far_factor);
    copy_out(d.phi, phi);
    copy_out(d.rest, rest);
    return FW_OK;
  });
}

template <class Real, class Desc>
fw_status call_tempting(const char *op, const Desc *desc, Real *o) {
  return with_problem<Real>(op, desc, {true, true}, "o", o,
                            [&](const Problem<Real> &p) { copy_out(tempting(p), o); });
}

}  // namespace fw::forms
