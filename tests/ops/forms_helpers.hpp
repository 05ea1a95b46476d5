// SPDX-License-Identifier: Apache-2.0
// Data for the tests of forms.h, and the recurrence written down once more from its definition.
//
// Sizes are small on purpose: T <= 13, K, V <= 8, entries below 1 and keys no longer than 1, so every value stays
// near 1. A result is then a sum of at most T K T < 1400 products and carries an fp64 rounding error below 1400 *
// 2^-53 = 1.6e-13: kTight = 1e-12. In fp32 the same count gives 8.4e-5: kLoose = 1e-4.
#pragma once
#include <gtest/gtest.h>
#include <math.h>
#include <stdint.h>

#include <limits>
#include <string>
#include <vector>

#include "fastweight/forms.h"

namespace forms_test {

constexpr double kTight = 1e-12;
constexpr double kLoose = 1e-4;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Array = std::vector<double>;

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  double uniform(double low, double high) {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return low + (high - low) * (static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53);
  }
  Array array(int64_t n, double low, double high) {
    Array a(static_cast<size_t>(n));
    for (double &x : a) x = uniform(low, high);
    return a;
  }
  Array unit_rows(int64_t n, int64_t K) {
    Array a = array(n * K, -1, 1);
    for (int64_t t = 0; t < n; ++t) {
      double square = 0;
      for (int64_t i = 0; i < K; ++i) square += a[t * K + i] * a[t * K + i];
      for (int64_t i = 0; i < K; ++i) a[t * K + i] /= sqrt(square);
    }
    return a;
  }

 private:
  uint64_t state_;
};

struct Shape {
  fw_gate gate;
  fw_erase erase;
  int64_t T = 11, K = 5, V = 3;
  bool has_p = false, has_gates = false, has_beta = true, has_state = true;
};

inline std::string describe(const Shape &s) {
  const char *gates[] = {"no gate", "scalar gate", "vector gate"};
  const char *erases[] = {"no erase", "shared after", "shared before", "independent"};
  return std::string(gates[s.gate]) + ", " + erases[s.erase] + (s.has_p ? ", p" : "") +
         (s.has_gates ? ", erase and write gate" : "") + ", T " + std::to_string(s.T) + " K " + std::to_string(s.K) +
         " V " + std::to_string(s.V);
}

// Every <gate, erase>, and the shared key's extra operands.
inline std::vector<Shape> all_shapes() {
  std::vector<Shape> shapes;
  for (fw_gate gate : {FW_GATE_NONE, FW_GATE_SCALAR, FW_GATE_VECTOR}) {
    for (fw_erase erase : {FW_ERASE_NONE, FW_ERASE_SHARED_AFTER, FW_ERASE_SHARED_BEFORE, FW_ERASE_INDEPENDENT}) {
      shapes.push_back({gate, erase});
      shapes.push_back({gate, erase, 13, 4, 8});
      if (erase != FW_ERASE_SHARED_AFTER && erase != FW_ERASE_SHARED_BEFORE) continue;
      shapes.push_back({gate, erase, 9, 6, 2, true, false});
      shapes.push_back({gate, erase, 9, 3, 7, true, true});
      shapes.push_back({gate, erase, 7, 5, 3, false, false, false});
    }
  }
  return shapes;
}

struct Data {
  Shape s;
  Array q, k, v, p, beta, erase_gate, write_gate, a, b, g, S0;

  explicit Data(const Shape &shape, uint64_t seed = 1) : s(shape) {
    Random r(seed);
    const int64_t T = s.T, K = s.K, V = s.V;
    q = r.array(T * K, -1, 1);
    k = r.unit_rows(T, K);
    v = r.array(T * V, -1, 1);
    if (s.gate == FW_GATE_SCALAR) g = r.array(T, -1.5, 0);
    if (s.gate == FW_GATE_VECTOR) g = r.array(T * K, -1.5, 0);
    if (s.erase == FW_ERASE_INDEPENDENT) {
      a = r.unit_rows(T, K);
      b = r.array(T * K, -0.3, 0.3);
      for (int64_t i = 0; i < T * K; ++i) b[i] -= 0.7 * a[i];
    } else if (s.erase != FW_ERASE_NONE) {
      if (s.has_beta) beta = r.array(T, 0.2, 1.2);
      if (s.has_p) p = r.unit_rows(T, K);
      if (s.has_gates) erase_gate = r.array(T * K, 0, 1), write_gate = r.array(T * V, 0, 1);
    }
    if (s.has_state) S0 = r.array(K * V, -1, 1);
  }

  fw_form_problem_f64 problem() const {
    fw_form_problem_f64 d = {};
    d.struct_size = sizeof d;
    d.gate = s.gate, d.erase = s.erase;
    d.T = s.T, d.K = s.K, d.V = s.V;
    const auto pointer = [](const Array &x) { return x.empty() ? nullptr : x.data(); };
    d.q = pointer(q), d.k = pointer(k), d.v = pointer(v), d.p = pointer(p), d.beta = pointer(beta);
    d.erase_gate = pointer(erase_gate), d.write_gate = pointer(write_gate), d.a = pointer(a), d.b = pointer(b);
    d.g = pointer(g), d.initial_state = pointer(S0);
    return d;
  }
  double decay(int64_t t, int64_t i) const {
    return s.gate == FW_GATE_NONE ? 1 : exp(s.gate == FW_GATE_SCALAR ? g[t] : g[t * s.K + i]);
  }
  double erase_key(int64_t t, int64_t i) const {
    const int64_t at = t * s.K + i;
    return (beta.empty() ? 1 : beta[t]) * (erase_gate.empty() ? 1 : erase_gate[at]) * (p.empty() ? k[at] : p[at]);
  }
  double value(int64_t t, int64_t j) const {
    const int64_t at = t * s.V + j;
    return (beta.empty() ? 1 : beta[t]) * (write_gate.empty() ? 1 : write_gate[at]) * v[at];
  }
};

struct Result {
  Array o, state;
  std::vector<Array> states;  // S_t after token t
};

// From the definition, no normal form: decay, read, erase, write, each on its own line.
inline Result definition(const Data &d) {
  const int64_t T = d.s.T, K = d.s.K, V = d.s.V;
  Result r{Array(T * V), d.S0.empty() ? Array(K * V) : d.S0, {}};
  Array &S = r.state;
  for (int64_t t = 0; t < T; ++t) {
    const Array before = S;
    for (int64_t i = 0; i < K; ++i) {
      for (int64_t j = 0; j < V; ++j) S[i * V + j] *= d.decay(t, i);
    }
    const Array decayed = S;
    for (int64_t j = 0; j < V; ++j) {
      double write = d.s.erase == FW_ERASE_NONE || d.s.erase == FW_ERASE_INDEPENDENT ? d.v[t * V + j] : d.value(t, j);
      double read = 0;
      for (int64_t i = 0; i < K && d.s.erase != FW_ERASE_NONE; ++i) {
        if (d.s.erase == FW_ERASE_SHARED_AFTER) read += decayed[i * V + j] * d.erase_key(t, i);
        if (d.s.erase == FW_ERASE_SHARED_BEFORE) read += before[i * V + j] * d.erase_key(t, i);
        if (d.s.erase == FW_ERASE_INDEPENDENT) read += before[i * V + j] * d.a[t * K + i];
      }
      for (int64_t i = 0; i < K; ++i) {
        const double along = d.s.erase == FW_ERASE_INDEPENDENT ? d.b[t * K + i] : -d.k[t * K + i];
        S[i * V + j] += along * read + d.k[t * K + i] * write;
      }
      for (int64_t i = 0; i < K; ++i) r.o[t * V + j] += d.q[t * K + i] * S[i * V + j] / sqrt(static_cast<double>(K));
    }
    r.states.push_back(S);
  }
  return r;
}

inline double max_difference(const Array &a, const Array &b) {
  EXPECT_EQ(a.size(), b.size());
  double worst = 0;
  for (size_t i = 0; i < a.size() && i < b.size(); ++i) {
    const double gap = a[i] == b[i] ? 0 : fabs(a[i] - b[i]);
    if (!(gap <= worst)) worst = gap;
    if (gap != gap) return kInf;
  }
  return worst;
}

inline double largest(const Array &a) {
  double worst = 0;
  for (double x : a) worst = fabs(x) > worst ? fabs(x) : worst;
  return worst;
}

// A poisoned output with guard bands, checked when it goes.
class Output {
 public:
  explicit Output(int64_t n) : data_(static_cast<size_t>(n + 2 * kGuard), kNan), n_(n) {
    for (int64_t i = 0; i < kGuard; ++i) data_[i] = data_[n + kGuard + i] = 12345.0;
  }
  ~Output() {
    for (int64_t i = 0; i < kGuard; ++i) {
      EXPECT_EQ(data_[i], 12345.0);
      EXPECT_EQ(data_[n_ + kGuard + i], 12345.0);
    }
  }
  operator double *() { return data_.data() + kGuard; }
  Array array() const { return Array(data_.begin() + kGuard, data_.begin() + kGuard + n_); }

 private:
  static constexpr int64_t kGuard = 8;
  Array data_;
  int64_t n_;
};

// C [m,n] = A [m,l] B [l,n]
inline Array multiply(const Array &A, const Array &B, int64_t m, int64_t l, int64_t n) {
  Array C(m * n);
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t k = 0; k < l; ++k) {
      for (int64_t j = 0; j < n; ++j) C[i * n + j] += A[i * l + k] * B[k * n + j];
    }
  }
  return C;
}

struct Graph {
  Array L, L_k, B;
};
inline Graph graph(const Data &d) {
  const int64_t T = d.s.T;
  Output L(T * T), L_k(T * T), B(T * d.s.K);
  const fw_form_problem_f64 problem = d.problem();
  EXPECT_EQ(fw_form_edges_f64(&problem, L, L_k, B), FW_OK) << fw_last_error();
  return {L.array(), L_k.array(), B.array()};
}

using OperatorFn = fw_status (*)(const fw_form_problem_f64 *, fw_form_method, double *);
inline Array run_operator(OperatorFn fn, const Data &d, fw_form_method method, int64_t columns) {
  Output out(d.s.T * columns);
  const fw_form_problem_f64 problem = d.problem();
  EXPECT_EQ(fn(&problem, method, out), FW_OK) << fw_last_error();
  return out.array();
}
inline Array erase(const Data &d, fw_form_method method = FW_BY_SUBSTITUTION) {
  return run_operator(fw_form_erase_f64, d, method, d.s.K);
}
inline Array write(const Data &d, fw_form_method method = FW_BY_SUBSTITUTION) {
  return run_operator(fw_form_write_f64, d, method, d.s.V);
}
inline Array feedback(const Data &d, fw_form_method method = FW_BY_SUBSTITUTION) {
  return run_operator(fw_form_feedback_f64, d, method, d.s.V);
}

// B S_0 + L_k V'
inline Array feedback_source_of(const Data &d) {
  const Shape &s = d.s;
  const Graph e = graph(d);
  Output v(s.T * s.V);
  const fw_form_problem_f64 problem = d.problem();
  EXPECT_EQ(fw_form_normal_f64(&problem, nullptr, nullptr, v), FW_OK);
  Array source = multiply(e.L_k, v.array(), s.T, s.T, s.V);
  const Array from_state = multiply(e.B, d.S0, s.T, s.K, s.V);
  for (size_t i = 0; i < source.size(); ++i) source[i] += from_state[i];
  return source;
}

inline Result recurrent(const Data &d) {
  Output o(d.s.T * d.s.V), state(d.s.K * d.s.V);
  const fw_form_problem_f64 problem = d.problem();
  EXPECT_EQ(fw_form_recurrent_f64(&problem, o, state), FW_OK) << fw_last_error();
  return {o.array(), state.array(), {}};
}

}  // namespace forms_test
