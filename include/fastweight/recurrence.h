/* SPDX-License-Identifier: Apache-2.0
 * Fastweight: the recurrence family (C99).
 *
 * Per sequence n and value head hv (its query/key head is hv / (HV / H)), the state S is [K,V] in fp32:
 *
 *     S~_t = D_t S_{t-1},   D_t = I | exp(g_t) I | diag(exp(g_t))                 gate:  none | scalar | vector
 *     S_t  = S~_t + k_t v'_t^T                                                    erase: none
 *     S_t  = S~_t + k_t (v'_t - R_t^T e_t)^T,  R_t = S~_t or S_{t-1}              erase: shared key, read after or before the decay
 *     S_t  = S~_t + b_t (S_{t-1}^T a_t)^T + k_t v_t^T                             erase: independent keys
 *     o_t  = scale * S_t^T q_t
 *
 * For a shared key e = beta * erase_gate * (p, or k when there is no p) and v' = beta * write_gate * v, absent factors being 1.
 * Sources, by row: docs/operators/<row>.md.
 *
 * Operands (B batch, T tokens, N sequences, H query/key heads, HV value heads, HV a multiple of H):
 *
 *     q [B,T,H,K]   k, p, erase_gate, a, b [B,T,H,K]   v, write_gate [B,T,HV,V]   beta [B,T,HV]
 *     g [B,T,HV] or [B,T,HV,K]: the NATURAL logarithm of the decay, any value in [-inf, 0]; growth (g > 0) follows the formula
 *     initial_state, final_state [N,HV,K,V] (layout KV) or [N,HV,V,K] (layout VK)      o [B,T,HV,V]
 *     initial_z, final_z [N,H,K] fp32: the running sum of k, the state of linear_attn's normaliser
 *
 * gated_delta_product has k, v and beta of T*n_sub rows: row t*n_sub + j is sub-step j of token t.
 * q, k, v, a, b, p, erase_gate and write_gate share one dtype (fp32, bf16, fp16); g and beta are that dtype or fp32;
 * initial_state is fp32, bf16 or fp16; final_state, final_z fp32; o has any of the three. State, gates and sums are fp32.
 * All operands fp64 (states too): the reference implementation computes in fp64.
 *
 * With cu_seqlens (int32 or int64, [N+1], on the host, from 0 to T, non-decreasing) the batch is 1 and row t belongs to
 * sequence n when cu_seqlens[n] <= t < cu_seqlens[n+1]; otherwise N = B. Empty sequences are legal: final = initial.
 */
#ifndef FASTWEIGHT_RECURRENCE_H
#define FASTWEIGHT_RECURRENCE_H

#include "fastweight/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Catalogue rows. Required operands beside q, k, v / allowed ones are listed in docs/operators/. */
typedef int32_t fw_op;
enum {
  FW_OP_BY_AXES = 0,             /* `gate` and `erase` say what it is; every operand that they can use is allowed */
  FW_OP_LINEAR_ATTN = 1,         /* none, none; optional normaliser */
  FW_OP_SIMPLE_GLA = 2,          /* scalar, none: g */
  FW_OP_RETENTION = 3,           /* scalar, none: g = ln(1 - 2^(-5-h)) for head h of HV, made inside */
  FW_OP_LIGHTNING = 4,           /* scalar, none: g = -(8/HV) (1 - layer_idx/num_layers) h, made inside */
  FW_OP_GLA = 5,                 /* vector, none: g */
  FW_OP_DELTA_RULE = 6,          /* none, shared after: beta */
  FW_OP_GATED_DELTA_RULE = 7,    /* scalar, shared after: g, beta */
  FW_OP_COMBA = 8,               /* scalar, shared before: g, beta, p */
  FW_OP_KDA = 9,                 /* vector, shared after: g, beta */
  FW_OP_GDN2 = 10,               /* vector, shared after: g, erase_gate, write_gate */
  FW_OP_GATED_DELTA_PRODUCT = 11,/* scalar (or none when g is absent), shared after: beta; n_sub */
  FW_OP_IPLR = 12,               /* none, independent: a, b */
  FW_OP_DPLR = 13,               /* vector, independent: a, b, g */
  FW_OP_RWKV7 = 14               /* as dplr, default scale 1 */
};
#define FW_OP_COUNT 15

typedef int32_t fw_gate;
enum { FW_GATE_NONE = 0, FW_GATE_SCALAR = 1, FW_GATE_VECTOR = 2 };

typedef int32_t fw_erase;
enum { FW_ERASE_NONE = 0, FW_ERASE_SHARED_AFTER = 1, FW_ERASE_SHARED_BEFORE = 2, FW_ERASE_INDEPENDENT = 3 };

typedef int32_t fw_form;
enum {
  FW_FORM_AUTO = 0,      /* = chunk */
  FW_FORM_CHUNK = 1,     /* dense work inside chunks of C tokens, a scan between them */
  FW_FORM_RECURRENT = 2, /* token by token */
  FW_FORM_PARALLEL = 3   /* the whole-sequence masked matrix form; a reference for short T, forward only */
};

typedef int32_t fw_state_layout;
enum {
  FW_STATE_KV = 0,
  FW_STATE_VK = 1,
  FW_STATE_OPAQUE = 2 /* step only: [slots,HV,E], E = fw_recurrence_opaque_size; enters and leaves by import and export */
};

typedef int32_t fw_normalizer;
enum { FW_NORMALIZER_NONE = 0, FW_NORMALIZER_SUM = 1 }; /* SUM: o_t /= scale * q_t . z_t + 1e-10, linear_attn only */

typedef int32_t fw_qk_norm;
enum { FW_QK_NORM_NONE = 0, FW_QK_NORM_L2 = 1 }; /* L2: q, k (and p) become x / sqrt(sum x^2 + 1e-6), in fp32 */

/* What the tensor `g` holds. Everything but LOG_DECAY is gate_logits x, turned into g in fp32:
 *   SOFTPLUS     g = -exp(a_log) softplus(x + dt_bias)
 *   LOG_SIGMOID  g = log_sigmoid(x) / gate_normalizer
 *   BOUNDED      g = lower_bound * sigmoid(exp(a_log) (x + dt_bias))
 *   RWKV7        g = -exp(-1/2) sigmoid(x)
 * a_log [HV]; dt_bias [HV] for a scalar gate, [HV,K] for a vector gate; either may be absent (0). Both fp32. */
typedef int32_t fw_gate_input;
enum {
  FW_GATE_INPUT_LOG_DECAY = 0,
  FW_GATE_INPUT_SOFTPLUS = 1,
  FW_GATE_INPUT_LOG_SIGMOID = 2,
  FW_GATE_INPUT_BOUNDED = 3,
  FW_GATE_INPUT_RWKV7 = 4
};

/* What the tensor `beta` holds: beta itself, or beta_logits x with beta = sigmoid(x) or 2 sigmoid(x). */
typedef int32_t fw_beta_input;
enum { FW_BETA_INPUT_PLAIN = 0, FW_BETA_INPUT_SIGMOID = 1, FW_BETA_INPUT_SIGMOID_TWICE = 2 };

/* Options, or-ed together. */
enum {
  FW_BATCH_INVARIANT = 1, /* same bits for every batch, packing and number of heads (always so on the CPU) */
  FW_CHECK_VALUES = 2,    /* fw_recurrence_check also reads data: cu_seqlens, state_indices, g >= g_min */
  FW_ALLOW_TF32 = 4       /* fp32 operands may be rounded to tf32 on matrix units */
};

typedef struct fw_recurrence {
  uint32_t struct_size;
  fw_op op;
  fw_gate gate;   /* FW_OP_BY_AXES only */
  fw_erase erase; /* FW_OP_BY_AXES only */
  fw_form form;
  fw_device device;
  fw_state_layout state_layout; /* of initial_state, final_state, their gradients, and of `state` in step */
  fw_normalizer normalizer;
  fw_qk_norm qk_norm;
  fw_gate_input gate_input;
  fw_beta_input beta_input;
  uint32_t options;
  int32_t n_sub;           /* gated_delta_product: sub-steps a token; 0 means 1 */
  int32_t layer_idx;       /* lightning */
  int32_t num_layers;      /* lightning; 0 means 1 */
  double scale;            /* multiplies q only; 0 means the default, K^-1/2 (rwkv7: 1) */
  double gate_normalizer;  /* LOG_SIGMOID; 0 means 16 */
  double gate_lower_bound; /* BOUNDED; negative; 0 means -5 */
  double g_min;            /* the caller's promise g >= g_min (negative); 0: none. Not a clamp */

  fw_tensor q, k, v, a, b, p, erase_gate, write_gate, g, beta, a_log, dt_bias;
  fw_tensor initial_state, initial_z, cu_seqlens; /* absent initial state: zeros */
  fw_tensor o, final_state, final_z;              /* final_* absent: not wanted */
  void *saved;                                    /* written by forward, read by backward; NULL: backward recomputes */
  uint64_t saved_size;                            /* bytes; at least fw_recurrence_saved_size when saved is given */

  /* step only; initial_* and final_* must then be absent */
  fw_tensor state;         /* [slots,HV,K,V], [slots,HV,V,K] or opaque; fp32, bf16, fp16; updated in place */
  fw_tensor state_z;       /* [slots,H,K] fp32, with the normaliser */
  fw_tensor state_indices; /* int32 [N]: the slot of each sequence, no slot twice; a negative index skips the sequence
                              (its rows of o become 0). Absent: sequence n uses slot n */

  /* CUDA only: the cudaStream_t that the work is ordered on, of the device that is current on the calling thread; NULL: its
   * default stream. Every tensor, the workspace and `saved` are then memory of that device, the last two aligned to 16
   * bytes. Nothing is allocated, synchronised or read back: cu_seqlens and state_indices are clamped to what exists by the
   * kernels, not checked, unless fw_recurrence_check is called with FW_CHECK_VALUES. Errors that a kernel meets while it runs
   * show up where the caller next looks at the stream. */
  void *stream;
} fw_recurrence;

/* Gradients. d_o has o's shape; absent incoming gradients are zeros. An outgoing gradient has the shape and dtype of its
 * input, is written whole, and is not computed when absent. d_g and d_beta are the gradients of the tensors `g` and `beta`
 * as given (logits included). dg at g = -inf is 0. */
typedef struct fw_recurrence_grads {
  uint32_t struct_size;
  uint32_t reserved;
  fw_tensor d_o, d_final_state, d_final_z; /* in */
  fw_tensor dq, dk, dv, da, db, dp, d_erase_gate, d_write_gate, dg, dbeta, d_a_log, d_dt_bias; /* out */
  fw_tensor d_initial_state, d_initial_z;                                                      /* out */
} fw_recurrence_grads;

/* Checks all that a run checks, data only with FW_CHECK_VALUES; changes nothing. grads: NULL but for FW_BACKWARD. */
FW_API fw_status fw_recurrence_check(const fw_context *context, const fw_recurrence *desc,
                                     const fw_recurrence_grads *grads, fw_direction direction);

/* Bytes that the call needs. The answer depends on the context (threads) and on everything in desc but data pointers. */
FW_API fw_status fw_recurrence_workspace_size(const fw_context *context, const fw_recurrence *desc,
                                              fw_direction direction, uint64_t *bytes);
FW_API fw_status fw_recurrence_saved_size(const fw_context *context, const fw_recurrence *desc, uint64_t *bytes);

/* Tokens in a chunk of the path that a call would take: splits at its multiples give the same bits (a CUDA path that cuts time
 * into segments: with FW_BATCH_INVARIANT). 1 for recurrent. */
FW_API fw_status fw_recurrence_chunk_length(const fw_context *context, const fw_recurrence *desc, int64_t *tokens);

/* Writes o and, when given, final_state, final_z and saved. */
FW_API fw_status fw_recurrence_forward(fw_context *context, const fw_recurrence *desc, void *workspace,
                                       uint64_t workspace_size);

/* Writes the gradients that are given in grads. desc is the forward's; its o and final_* are not read. */
FW_API fw_status fw_recurrence_backward(fw_context *context, const fw_recurrence *desc, const fw_recurrence_grads *grads,
                                        void *workspace, uint64_t workspace_size);

/* Decode: T >= 0 tokens of each sequence, `state` read and updated in place (rounded once, to nearest even, at the end). */
FW_API fw_status fw_recurrence_step(fw_context *context, const fw_recurrence *desc, void *workspace,
                                    uint64_t workspace_size);

/* One line a candidate, "name: accepted" or "name: refused: reason", in the order of preference, the chosen one marked
 * with "*". Writes at most `capacity` bytes with a closing zero; *needed (may be NULL) is the whole length with it. */
FW_API fw_status fw_recurrence_explain(const fw_context *context, const fw_recurrence *desc, fw_direction direction,
                                       char *text, uint64_t capacity, uint64_t *needed);

/* Elements of one (slot, value head) of an opaque state of this K and V. */
FW_API fw_status fw_recurrence_opaque_size(const fw_context *context, const fw_recurrence *desc, int64_t *elements);

/* Copies between desc->state (opaque) and a plain tensor of `layout` KV or VK, [slots,HV,K,V] or [slots,HV,V,K], fp32,
 * bf16 or fp16. All slots. */
FW_API fw_status fw_recurrence_state_import(const fw_context *context, const fw_recurrence *desc, const fw_tensor *plain,
                                            fw_state_layout layout);
FW_API fw_status fw_recurrence_state_export(const fw_context *context, const fw_recurrence *desc, const fw_tensor *plain,
                                            fw_state_layout layout);

/* The catalogue, for programs that list it. Index 0 .. FW_OP_COUNT-1; NULL past the end. */
FW_API const char *fw_op_name(fw_op op); /* "by_axes", "linear_attn", ... */
FW_API fw_status fw_op_axes(fw_op op, fw_gate *gate, fw_erase *erase);

#ifdef __cplusplus
}
#endif
#endif
