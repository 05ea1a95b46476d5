// SPDX-License-Identifier: Apache-2.0
// A chunk computation in fp64 into which faults can be planted, and the gate's gradient as a difference of sums: what
// the error rule must catch. One batch entry, one sequence, plain inputs; T a multiple of the chunk length.
#pragma once
#include "harness_pieces.hpp"

namespace fw::test {

inline double rounded(fw_dtype dtype, double x) {
  alignas(8) unsigned char cell[8] = {};
  store_f64(cell, dtype, 0, x);
  return load_f64(cell, dtype, 0);
}

struct ChunkFault {
  fw_dtype inverse = FW_F64;  // else Neumann doubling with every matrix held in this type
  fw_dtype gates = FW_F64;    // the type in which the sums of g are held
  int64_t chunk = 16;
};

namespace detail {

class PlantedChunk {
 public:
  PlantedChunk(const Spec &spec, const Operands &all, const ChunkFault &fault)
      : s_(spec), row_(row_of(spec)), all_(all), fault_(fault), C_(fault.chunk) {}

  Outputs run() {
    Outputs out;
    out.values["o"] = make_values({1, s_.T, s_.HV(), s_.V});
    out.values["final_state"] = all_.at("initial_state");
    const double scale = row_.default_scale != 0 ? row_.default_scale : 1 / sqrt(static_cast<double>(s_.K));
    for (int64_t hv = 0; hv < s_.HV(); ++hv) {
      double *S = &out.values["final_state"].data[static_cast<size_t>(hv * s_.K * s_.V)];
      for (int64_t begin = 0; begin < s_.T; begin += C_) {
        read(begin, hv);
        solve(S);
        const Matrix read_out = reading(q_, 1, 1, S);
        double *o = &out.values["o"].data[static_cast<size_t>((begin * s_.HV() + hv) * s_.V)];
        for (int64_t i = 0; i < C_; ++i) {
          for (int64_t v = 0; v < s_.V; ++v)
            o[i * s_.HV() * s_.V + v] = scale * read_out[static_cast<size_t>(i * s_.V + v)];
        }
        std::vector<double> next(static_cast<size_t>(s_.K * s_.V));
        for (int64_t k = 0; k < s_.K; ++k) {
          for (int64_t v = 0; v < s_.V; ++v) {
            double sum = exp(G(C_, k)) * S[k * s_.V + v];
            for (int64_t j = 0; j < C_; ++j) sum += exp(G(C_, k) - G(j + 1, k)) * written(j, k, v);
            next[static_cast<size_t>(k * s_.V + v)] = sum;
          }
        }
        std::copy(next.begin(), next.end(), S);
      }
    }
    return out;
  }

 private:
  using Matrix = std::vector<double>;

  double &at(Matrix &m, int64_t i, int64_t j, int64_t columns) { return m[static_cast<size_t>(i * columns + j)]; }
  double G(int64_t i, int64_t k) const { return G_[static_cast<size_t>(i * s_.K + k)]; }  // sum of the first i gates
  double element(const char *name, int64_t t, int64_t head, int64_t heads, int64_t width, int64_t i) const {
    const auto found = all_.find(name);
    return found == all_.end() ? 1.0 : found->second.data[static_cast<size_t>((t * heads + head) * width + i)];
  }

  // The rows of a chunk: q, x (what reads before erasing), y and k (erased and written along), v' and the sums of g.
  void read(int64_t begin, int64_t hv) {
    const int64_t h = hv / s_.group, K = s_.K;
    const bool is_vector = row_.gate == FW_GATE_VECTOR, is_free = row_.erase == FW_ERASE_INDEPENDENT;
    G_.assign(static_cast<size_t>((C_ + 1) * K), 0);
    Matrix exact(static_cast<size_t>(K));
    for (Matrix *m : {&q_, &x_, &y_, &k_}) m->assign(static_cast<size_t>(C_ * K), 0);
    v_.assign(static_cast<size_t>(C_ * s_.V), 0);
    for (int64_t i = 0; i < C_; ++i) {
      const int64_t t = begin + i;
      const double beta = element("beta", t, hv, s_.HV(), 1, 0);
      for (int64_t k = 0; k < K; ++k) {
        if (row_.gate != FW_GATE_NONE)
          exact[static_cast<size_t>(k)] += element("g", t, hv, s_.HV(), is_vector ? K : 1, is_vector ? k : 0);
        at(G_, i + 1, k, K) = rounded(fault_.gates, exact[static_cast<size_t>(k)]);
        at(q_, i, k, K) = element("q", t, h, s_.H, K, k);
        at(k_, i, k, K) = element("k", t, h, s_.H, K, k);
        if (row_.erase == FW_ERASE_NONE) continue;
        at(y_, i, k, K) = is_free ? -element("b", t, h, s_.H, K, k) : at(k_, i, k, K);
        at(x_, i, k, K) =
            is_free ? element("a", t, h, s_.H, K, k) : beta * element(all_.count("p") ? "p" : "k", t, h, s_.H, K, k);
      }
      for (int64_t v = 0; v < s_.V; ++v) at(v_, i, v, s_.V) = beta * element("v", t, hv, s_.HV(), s_.V, v);
    }
  }

  // row i of x decayed from after token j to before (or after) its own gate, times row j of y
  double product(Matrix &x, int64_t i, int64_t gates, Matrix &y, int64_t j) {
    double sum = 0;
    for (int64_t k = 0; k < s_.K; ++k) sum += at(x, i, k, s_.K) * exp(G(gates, k) - G(j + 1, k)) * at(y, j, k, s_.K);
    return sum;
  }
  // What every row of x reads of the incoming state and of the tokens up to itself (`own` 0: before itself) that are
  // written; less what they erased, once z is known.
  Matrix reading(Matrix &x, int64_t own, int64_t gates, const double *S) {
    Matrix out(static_cast<size_t>(C_ * s_.V));
    const bool is_erased = n_solved_ > 0;
    for (int64_t i = 0; i < C_; ++i) {
      for (int64_t k = 0; k < s_.K; ++k) {
        const double decayed = at(x, i, k, s_.K) * exp(G(i + gates, k));
        for (int64_t v = 0; v < s_.V; ++v) at(out, i, v, s_.V) += decayed * S[k * s_.V + v];
      }
      for (int64_t j = 0; j < i + own; ++j) {
        const double of_write = product(x, i, i + gates, k_, j),
                     of_erase = is_erased ? product(x, i, i + gates, y_, j) : 0;
        for (int64_t v = 0; v < s_.V; ++v)
          at(out, i, v, s_.V) += of_write * at(v_, j, v, s_.V) - of_erase * at(z_, j, v, s_.V);
      }
    }
    return out;
  }
  double written(int64_t j, int64_t k, int64_t v) {
    return at(k_, j, k, s_.K) * at(v_, j, v, s_.V) - at(y_, j, k, s_.K) * at(z_, j, v, s_.V);
  }

  // Z = T (B S + L_k V'), T = (I + L)^{-1}.
  void solve(const double *S) {
    z_.assign(static_cast<size_t>(C_ * s_.V), 0);
    n_solved_ = 0;
    if (row_.erase == FW_ERASE_NONE) return;
    const int64_t own = row_.erase == FW_ERASE_SHARED_AFTER ? 1 : 0;
    Matrix L(static_cast<size_t>(C_ * C_)), right = reading(x_, 0, own, S);
    for (int64_t i = 0; i < C_; ++i) {
      for (int64_t j = 0; j < i; ++j) at(L, i, j, C_) = product(x_, i, i + own, y_, j);
    }
    Matrix T = fault_.inverse == FW_F64 ? substitution(L) : doubling(L, fault_.inverse);
    for (int64_t i = 0; i < C_; ++i) {
      for (int64_t v = 0; v < s_.V; ++v) {
        for (int64_t j = 0; j <= i; ++j) at(z_, i, v, s_.V) += at(T, i, j, C_) * at(right, j, v, s_.V);
      }
    }
    n_solved_ = C_;
  }
  Matrix substitution(Matrix &L) {
    Matrix T(static_cast<size_t>(C_ * C_));
    for (int64_t i = 0; i < C_; ++i) {
      at(T, i, i, C_) = 1;
      for (int64_t j = 0; j < i; ++j) {
        for (int64_t m = j; m < i; ++m) at(T, i, j, C_) -= at(L, i, m, C_) * at(T, m, j, C_);
      }
    }
    return T;
  }
  // (I - L)(I + L^2)(I + L^4) ..., every matrix rounded when it is made, sums exact.
  Matrix doubling(Matrix &L, fw_dtype dtype) {
    const auto times = [&](Matrix &a, Matrix &b, const Matrix *added) {
      Matrix out(static_cast<size_t>(C_ * C_));
      for (int64_t i = 0; i < C_; ++i) {
        for (int64_t j = 0; j < C_; ++j) {
          double sum = added ? (*added)[static_cast<size_t>(i * C_ + j)] : 0;
          for (int64_t m = 0; m < C_; ++m) sum += at(a, i, m, C_) * at(b, m, j, C_);
          at(out, i, j, C_) = rounded(dtype, sum);
        }
      }
      return out;
    };
    Matrix power(L.size()), T(L.size());
    for (int64_t i = 0; i < C_; ++i) {
      for (int64_t j = 0; j < C_; ++j) {
        at(power, i, j, C_) = rounded(dtype, -at(L, i, j, C_));
        at(T, i, j, C_) = at(power, i, j, C_) + (i == j ? 1 : 0);
      }
    }
    for (int64_t n = 2; n < C_; n *= 2) {
      power = times(power, power, nullptr);
      T = times(T, power, &T);
    }
    return T;
  }

  const Spec &s_;
  const recurrence::Row row_;
  const Operands &all_;
  const ChunkFault fault_;
  const int64_t C_;
  int64_t n_solved_ = 0;
  Matrix G_, q_, x_, y_, k_, v_, z_;
};

}  // namespace detail

inline Outputs planted_chunk(const Spec &spec, const Operands &all, const ChunkFault &fault) {
  return detail::PlantedChunk(spec, all, fault).run();
}

// dg by cancellation. The sums G of the gates enter as exp(G_i - G_j) alone, so dG_i is what the rows that carry
// exp(G_i) give minus what those with exp(-G_i) give, x dx of each, and dg_t the sum of dG from t on; the final state
// carries exp(G_T). The x dx are not small where the gate is strong, but their sums are. `gradients` in the type
// `held`, sums in fp32. One query head a value head.
inline Values dg_by_cancellation(const Spec &spec, const Operands &all, const Outputs &gradients,
                                 const Values &final_state, fw_dtype held) {
  const recurrence::Row row = row_of(spec);
  const int64_t T = spec.T, heads = spec.H, K = spec.K, V = spec.V;
  Values dg = make_values(all.at("g").shape);
  const int64_t width = row.gate == FW_GATE_VECTOR ? K : 1;
  const auto part = [&](const char *name, int64_t t, int64_t h, int64_t k) {
    const auto found = all.find(name);
    if (found == all.end()) return 0.0;
    const size_t at = static_cast<size_t>((t * heads + h) * K + k);
    return found->second.data[at] * rounded(held, gradients.values.at(std::string("d") + name).data[at]);
  };
  const bool is_late = row.erase == FW_ERASE_SHARED_AFTER;  // the erase key reads after its own gate
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t w = 0; w < width; ++w) {
      const int64_t first = width == 1 ? 0 : w, last = width == 1 ? K : w + 1;
      float sum = 0;
      for (int64_t k = first; k < last; ++k) {
        for (int64_t v = 0; v < V; ++v) {
          const size_t at = static_cast<size_t>((h * K + k) * V + v);
          sum += static_cast<float>(final_state.data[at] * all.at("d_final_state").data[at]);
        }
      }
      for (int64_t t = T - 1; t >= 0; --t) {
        float now = 0, before = 0;
        for (int64_t k = first; k < last; ++k) {
          now += static_cast<float>(part("q", t, h, k) - part("k", t, h, k) - part("b", t, h, k));
          (is_late ? now : before) += static_cast<float>(part(all.count("p") ? "p" : "a", t, h, k));
        }
        if (row.op == FW_OP_GATED_DELTA_RULE) {  // k is erase key too: e de = beta dbeta - v dv, counted in k dk
          const size_t at = static_cast<size_t>(t * heads + h);
          double erased = all.at("beta").data[at] * rounded(held, gradients.values.at("dbeta").data[at]);
          for (size_t v = at * static_cast<size_t>(V); v < (at + 1) * static_cast<size_t>(V); ++v)
            erased -= all.at("v").data[v] * rounded(held, gradients.values.at("dv").data[v]);
          now += static_cast<float>(2 * erased);
        }
        sum += now;
        dg.data[static_cast<size_t>((t * heads + h) * width + w)] = sum;
        sum += before;
      }
    }
  }
  return dg;
}

}  // namespace fw::test
