/* SPDX-License-Identifier: Apache-2.0
 * Fastweight: the mathematics as plain functions in fp64 and fp32 (C99). For study, teaching and tests: one head of
 * one sequence, dense row-major arrays, no threads. docs/math.md derives every line and names its test.
 *
 * Conventions
 *  - Every function comes twice: suffix _f64 with double, _f32 with float. The _f32 ones take no step in fp64.
 *  - NULL for an array that is "or NULL" in its comment leaves it out. Inputs are never written; outputs must not
 *    overlap each other or an input. An output is written whole, and only when the function returns FW_OK.
 *  - Unlike the verbs of recurrence.h these functions allocate their temporaries, and free them (FW_OUT_OF_MEMORY
 *    when they cannot). Those that hold a [T,T] matrix refuse T > 16384.
 *  - Decays are products of exp(g_t), never quotients, so every g in [-inf, 0] is fine. The last group is the
 *    exception, on purpose.
 */
#ifndef FASTWEIGHT_FORMS_H
#define FASTWEIGHT_FORMS_H

#include "fastweight/recurrence.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A problem. Operands as in recurrence.h, one head:
 *
 *     shared key:    e = beta * erase_gate * (p, or k when p is NULL), v' = beta * write_gate * v; absent factors: 1
 *     independent:   a reads, b is erased along, v' = v
 *     no erase:      v' = v
 *
 *     q, k, p, erase_gate, a, b [T,K]    v, write_gate [T,V]    beta [T]    g [T] (scalar) or [T,K] (vector)
 *     initial_state [K,V], or NULL for zeros
 *
 * K and V 1..512, T >= 0. scale multiplies q; 0 means K^-1/2. With T > 0: k and v are required, q where o is asked
 * for, g with a gate and only then, a and b with independent keys and only then; p, beta, erase_gate and write_gate
 * go with a shared key only. */
typedef struct fw_form_problem_f64 {
  uint32_t struct_size;
  fw_gate gate;
  fw_erase erase;
  uint32_t reserved;
  int64_t T, K, V;
  double scale;
  const double *q, *k, *v;
  const double *p, *beta, *erase_gate, *write_gate;
  const double *a, *b;
  const double *g;
  const double *initial_state;
} fw_form_problem_f64;
typedef struct fw_form_problem_f32 {
  uint32_t struct_size;
  fw_gate gate;
  fw_erase erase;
  uint32_t reserved;
  int64_t T, K, V;
  double scale;
  const float *q, *k, *v;
  const float *p, *beta, *erase_gate, *write_gate;
  const float *a, *b;
  const float *g;
  const float *initial_state;
} fw_form_problem_f32;

/* ---- forms -------------------------------------------------------------------------------------------------------
 * o [T,V]; final_state [K,V] or NULL.
 *
 * recurrent   token by token.
 * parallel    attention [T,T] or NULL receives A, zero above its diagonal:
 *             o_i = sum over j <= i of A_ij v'_j  +  what is left of the initial state.
 * chunk       chunks of `chunk` >= 1 tokens, the last may be short; SOLVE and FACTORS work for shared and independent
 *             keys alike.
 * normal      every row as S_t = (D_t - y_t x_t^T) S_{t-1} + k_t v'_t^T: x, y [T,K], v_write (v') [T,V], each or
 *             NULL.
 * edges       for j < i, with D_{i:j} the product of the decays of tokens i..j,
 *             L_ij = x_i^T D_{j+1:i-1} y_j and L_k the same with k_j, [T,T], zero on and above the diagonal;
 *             B_i = D_{1:i-1} x_i, [T,K]; each or NULL. */
typedef int32_t fw_chunk_kind;
enum {
  FW_CHUNK_SOLVE = 1,  /* one solve against the incoming state */
  FW_CHUNK_FACTORS = 2 /* factors free of the state (W and U, or W and T L_k V'), then one product with it */
};
FW_API fw_status fw_form_recurrent_f64(const fw_form_problem_f64 *problem, double *o, double *final_state);
FW_API fw_status fw_form_parallel_f64(const fw_form_problem_f64 *problem, double *o, double *final_state,
                                      double *attention);
FW_API fw_status fw_form_chunk_f64(const fw_form_problem_f64 *problem, int64_t chunk, fw_chunk_kind kind, double *o,
                                   double *final_state);
FW_API fw_status fw_form_normal_f64(const fw_form_problem_f64 *problem, double *x, double *y, double *v_write);
FW_API fw_status fw_form_edges_f64(const fw_form_problem_f64 *problem, double *L, double *L_k, double *B);
FW_API fw_status fw_form_recurrent_f32(const fw_form_problem_f32 *problem, float *o, float *final_state);
FW_API fw_status fw_form_parallel_f32(const fw_form_problem_f32 *problem, float *o, float *final_state,
                                      float *attention);
FW_API fw_status fw_form_chunk_f32(const fw_form_problem_f32 *problem, int64_t chunk, fw_chunk_kind kind, float *o,
                                   float *final_state);
FW_API fw_status fw_form_normal_f32(const fw_form_problem_f32 *problem, float *x, float *y, float *v_write);
FW_API fw_status fw_form_edges_f32(const fw_form_problem_f32 *problem, float *L, float *L_k, float *B);

/* ---- the three operators -----------------------------------------------------------------------------------------
 * erase     W [T,K] = (I + L)^-1 B                  what token t reads of the initial state: S_0^T w_t
 * write     U [T,V] = (I + L_k)^-1 V'               what is written along k_t if memory starts empty and is erased along k
 * feedback  Z [T,V] = (I + L)^-1 (B S_0 + L_k V')   what token t reads back and erases: z_t = S_{t-1}^T x_t
 * With one key for erasing and writing (y = k): Z = W S_0 + V' - U.
 *
 * *_hops    terms [n_hops,T,K] or [n_hops,T,V], n_hops 0..16384: term m is (-L)^m times the right side (for U
 *           (-L_k)^m), the paths of exactly m edges in the graph of tokens. Terms from m = T on are 0. */
typedef int32_t fw_form_method;
enum {
  FW_BY_RECURSION = 1,    /* token by token, on a memory [K,K] or [K,V] */
  FW_BY_INVERSE = 2,      /* the explicit inverse (I + L)^-1 times the right side */
  FW_BY_SUBSTITUTION = 3, /* the same system by forward substitution, no inverse */
  FW_BY_PATHS = 4         /* the sum of the terms of all hop counts */
};
FW_API fw_status fw_form_erase_f64(const fw_form_problem_f64 *problem, fw_form_method method, double *W);
FW_API fw_status fw_form_write_f64(const fw_form_problem_f64 *problem, fw_form_method method, double *U);
FW_API fw_status fw_form_feedback_f64(const fw_form_problem_f64 *problem, fw_form_method method, double *Z);
FW_API fw_status fw_form_erase_hops_f64(const fw_form_problem_f64 *problem, int64_t n_hops, double *terms);
FW_API fw_status fw_form_write_hops_f64(const fw_form_problem_f64 *problem, int64_t n_hops, double *terms);
FW_API fw_status fw_form_feedback_hops_f64(const fw_form_problem_f64 *problem, int64_t n_hops, double *terms);
FW_API fw_status fw_form_erase_f32(const fw_form_problem_f32 *problem, fw_form_method method, float *W);
FW_API fw_status fw_form_write_f32(const fw_form_problem_f32 *problem, fw_form_method method, float *U);
FW_API fw_status fw_form_feedback_f32(const fw_form_problem_f32 *problem, fw_form_method method, float *Z);
FW_API fw_status fw_form_erase_hops_f32(const fw_form_problem_f32 *problem, int64_t n_hops, float *terms);
FW_API fw_status fw_form_write_hops_f32(const fw_form_problem_f32 *problem, int64_t n_hops, float *terms);
FW_API fw_status fw_form_feedback_hops_f32(const fw_form_problem_f32 *problem, int64_t n_hops, float *terms);

/* ---- segments ----------------------------------------------------------------------------------------------------
 * segment   tokens begin .. end-1 of the problem as an affine map S_end = P S_begin + H: P [K,K], H [K,V].
 *           initial_state is not read. begin = end gives P = I, H = 0.
 * compose   (P1, H1) first, then (P2, H2): P = P2 P1, H = P2 H1 + H2. */
FW_API fw_status fw_form_segment_f64(const fw_form_problem_f64 *problem, int64_t begin, int64_t end,
                                     fw_form_method method, double *P, double *H);
FW_API fw_status fw_form_compose_f64(int64_t K, int64_t V, const double *P1, const double *H1, const double *P2,
                                     const double *H2, double *P, double *H);
FW_API fw_status fw_form_segment_f32(const fw_form_problem_f32 *problem, int64_t begin, int64_t end,
                                     fw_form_method method, float *P, float *H);
FW_API fw_status fw_form_compose_f32(int64_t K, int64_t V, const float *P1, const float *H1, const float *P2,
                                     const float *H2, float *P, float *H);

/* ---- the inverse of I + L ----------------------------------------------------------------------------------------
 * L [n,n]: what is on and above its diagonal is not read. X [n,n]: unit lower triangular. n 0..1024.
 * block: rows of a diagonal block for the two block methods, 1..n; 0 means n / 4 rounded up. The others ignore it.
 * arithmetic: how the operands of products are rounded. _f64: FW_F64. _f32: FW_F32, FW_BF16 or FW_F16: each operand
 * is rounded to that type when it is read (fp16 past 65504 to infinity); sums and what is kept between products are
 * fp32. */
typedef int32_t fw_inverse_method;
enum {
  FW_INVERSE_SUBSTITUTION = 1, /* each row from the rows above it */
  FW_INVERSE_NEUMANN = 2,      /* I - L + L^2 - ...: n terms, each formed and added */
  FW_INVERSE_DOUBLING = 3,     /* (I - L)(I + L^2)(I + L^4)...: about 2 log2(n) products */
  FW_INVERSE_BLOCK_MERGE = 4,  /* diagonal blocks by substitution, then neighbours merged upward, sizes doubling */
  FW_INVERSE_BLOCK_ROWS = 5,   /* diagonal blocks by substitution, then block rows from the top down */
  FW_INVERSE_HORNER = 6        /* X <- I - L X, n - 1 times: the Neumann series by Horner's rule */
};
FW_API fw_status fw_form_inverse_f64(fw_inverse_method method, fw_dtype arithmetic, int64_t n, int64_t block,
                                     const double *L, double *X);
FW_API fw_status fw_form_inverse_f32(fw_inverse_method method, fw_dtype arithmetic, int64_t n, int64_t block,
                                     const float *L, float *X);

/* ---- outside promise 1: the quotient of decays, and the form that tempts -----------------------------------------
 * decay_quotient  the factors of tokens s .. e-1 (n = e - s) when one anchor serves a whole chunk. g [T,K]; G its
 *                 running sum from token s on, G_s = 0 before that token, G_e the last. Each output or NULL:
 *                 near_factor [n,K] = exp(G_i - G_s) <= 1   far_factor [n,K] = exp(G_s - G_j) >= 1, overflows
 *                 phi [K] = exp(G_e - G_s)                  rest [n,K] = exp(G_e - G_j) = phi * far_factor on paper
 * tempting        o [T,V] of O = (Q D) S + (Q K^T . M) V' - (Q Y^T . M) Z with ONE decayed K and Y for all rows,
 *                 decayed to the end of the sequence; Z is the true feedback. Right for the last token; with a gate,
 *                 wrong for the others. */
FW_API fw_status fw_form_decay_quotient_f64(int64_t T, int64_t K, const double *g, int64_t s, int64_t e,
                                            double *near_factor, double *far_factor, double *phi, double *rest);
FW_API fw_status fw_form_tempting_f64(const fw_form_problem_f64 *problem, double *o);
FW_API fw_status fw_form_decay_quotient_f32(int64_t T, int64_t K, const float *g, int64_t s, int64_t e,
                                            float *near_factor, float *far_factor, float *phi, float *rest);
FW_API fw_status fw_form_tempting_f32(const fw_form_problem_f32 *problem, float *o);

#ifdef __cplusplus
}
#endif
#endif
