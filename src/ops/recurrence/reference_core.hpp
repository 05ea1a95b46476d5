// SPDX-License-Identifier: Apache-2.0
// One sub-step of the recurrence and its reverse, for every gate and erase: the only copy of these loops.
//   S~ = D S;  r = R^T x, R = S~ (erase shared after) or S (shared before, independent);
//   u = v' - r (shared) or v;  S <- S~ + k u^T (+ b r^T, independent);  x is the erase key e, or a.
// Rounding says what is rounded where: nothing for the truth, the storage type for the yardstick of the tests.
#pragma once
#include <stdint.h>

#include "fastweight/recurrence.h"

namespace fw::recurrence {

// Nothing is rounded.
struct Exact {
  static constexpr bool kIsExact = true;
  template <class Real>
  Real operand(Real x) const { return x; }  // q, k, a, b and the erase key, wherever they are multiplied
  template <class Real>
  Real stored(Real x) const { return x; }   // the state and its gradient when read, pseudo-values and their gradients
};

template <class Real>
struct SubStep {
  const Real *decay;  // [K]; nullptr: no decay before this sub-step
  const Real *k;      // [K]
  const Real *x;      // [K]; nullptr: nothing is erased
  const Real *b;      // [K]; independent keys only
  const Real *v;      // [V], v'
};

template <class Real>
struct SubStepGrads {
  Real *dk, *dx, *db;    // [K]
  Real *dx_unrounded;    // [K]: dx from a value operand that is not rounded
  Real *dv;              // [V]
  Real *dg;              // [K]
};

template <class Real>
struct CoreScratch {
  Real *decayed;          // [K,V]
  Real *r, *u, *dr;       // [V]
};

template <class Real, class Rounding>
struct Core {
  int64_t K, V;
  fw_erase erase;
  Rounding round;

  bool reads_after() const { return erase == FW_ERASE_SHARED_AFTER; }
  bool is_shared() const { return erase == FW_ERASE_SHARED_AFTER || erase == FW_ERASE_SHARED_BEFORE; }

  // out = S^T x
  void read(const Real *S, const Real *x, Real *out) const {
    for (int64_t v = 0; v < V; ++v) out[v] = 0;
    for (int64_t k = 0; k < K; ++k) {
      const Real factor = round.operand(x[k]);
      for (int64_t v = 0; v < V; ++v) out[v] += round.stored(S[k * V + v]) * factor;
    }
  }

  // out[k] (+)= S value; the value operand is taken as it is
  void read_value(const Real *S, const Real *value, bool is_rounded, Real *out, bool adds) const {
    for (int64_t k = 0; k < K; ++k) {
      Real sum = 0;
      for (int64_t v = 0; v < V; ++v) {
        sum += round.stored(S[k * V + v]) * (is_rounded ? round.stored(value[v]) : value[v]);
      }
      out[k] = adds ? out[k] + sum : sum;
    }
  }

  // S += factor * key value^T
  void add_outer(Real factor, const Real *key, const Real *value, Real *S) const {
    for (int64_t k = 0; k < K; ++k) {
      const Real x = factor * round.operand(key[k]);
      for (int64_t v = 0; v < V; ++v) S[k * V + v] += x * round.stored(value[v]);
    }
  }

  void apply_decay(const Real *decay, Real *S) const {
    if (!decay) return;
    for (int64_t k = 0; k < K; ++k) {
      for (int64_t v = 0; v < V; ++v) S[k * V + v] *= decay[k];
    }
  }

  // What is read by the erase key and what is written along k.
  void pseudo_value(const Real *R, const SubStep<Real> &s, Real *r, Real *u) const {
    if (s.x) read(R, s.x, r);
    for (int64_t v = 0; v < V; ++v) u[v] = is_shared() ? s.v[v] - r[v] : s.v[v];
  }

  void forward(const SubStep<Real> &s, Real *S, const CoreScratch<Real> &scratch) const {
    if (reads_after()) apply_decay(s.decay, S);
    pseudo_value(S, s, scratch.r, scratch.u);
    if (!reads_after()) apply_decay(s.decay, S);
    add_outer(1, s.k, scratch.u, S);
    if (erase == FW_ERASE_INDEPENDENT) add_outer(1, s.b, scratch.r, S);
  }

  // S: the state before the sub-step. dS: the gradient of the state after it, turned into that of the state before.
  // dk and db are added to; dx, dx_unrounded, dv and dg (when there is a decay) are overwritten.
  void reverse(const SubStep<Real> &s, const Real *S, Real *dS, const SubStepGrads<Real> &grads,
               const CoreScratch<Real> &scratch) const {
    Real *decayed = scratch.decayed, *dr = scratch.dr;
    for (int64_t i = 0; i < K * V; ++i) decayed[i] = S[i];
    apply_decay(s.decay, decayed);
    const Real *R = reads_after() ? decayed : S;
    pseudo_value(R, s, scratch.r, scratch.u);
    read(dS, s.k, grads.dv);
    read_value(dS, scratch.u, true, grads.dk, true);
    if (erase == FW_ERASE_INDEPENDENT) {
      read(dS, s.b, dr);
      read_value(dS, scratch.r, true, grads.db, true);
    } else {
      for (int64_t v = 0; v < V; ++v) dr[v] = -grads.dv[v];
    }
    if (s.x) {
      read_value(R, dr, true, grads.dx, false);
      if (!Rounding::kIsExact) read_value(R, dr, false, grads.dx_unrounded, false);
      if (reads_after()) add_outer(1, s.x, dr, dS);
    }
    if (s.decay) {
      for (int64_t k = 0; k < K; ++k) {
        Real sum = 0;
        for (int64_t v = 0; v < V; ++v) sum += dS[k * V + v] * decayed[k * V + v];
        grads.dg[k] = sum;
      }
      apply_decay(s.decay, dS);
    }
    if (s.x && !reads_after()) add_outer(1, s.x, dr, dS);
  }
};

}  // namespace fw::recurrence
