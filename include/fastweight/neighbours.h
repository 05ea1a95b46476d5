/* SPDX-License-Identifier: Apache-2.0
 * Fastweight: the operations around the recurrence (C99). Same conventions as types.h: zero-filled struct + struct_size
 * asks for defaults, inputs fp32, bf16 or fp16 with any strides, sums and parameters' gradients accumulated in fp32,
 * a gradient in its input's dtype, one shape of verbs:
 *
 *     fw_<op>_check(context, desc, grads or NULL, direction)
 *     fw_<op>_workspace_size(context, desc, direction, &bytes)
 *     fw_<op>_forward(context, desc, workspace, workspace_size)
 *     fw_<op>_backward(context, desc, grads, workspace, workspace_size)
 *     fw_<op>_step(...)          where the operation has a state; the others are called with few rows instead
 *     fw_<op>_explain(context, desc, direction, text, capacity, &needed)
 *
 * On CUDA work is ordered on `stream`, a cudaStream_t of the device that is current on the calling thread (NULL: its default
 * stream), and every tensor and the workspace are memory of that device; cu_seqlens, indices, lengths and positions are clamped
 * by the kernels, not checked. More: `stream` of fw_recurrence.
 */
#ifndef FASTWEIGHT_NEIGHBOURS_H
#define FASTWEIGHT_NEIGHBOURS_H

#include "fastweight/types.h"

#ifdef __cplusplus
extern "C" {
#endif

#define FW_DECLARE_VERBS(op)                                                                                       \
  FW_API fw_status fw_##op##_check(const fw_context *context, const fw_##op *desc, const fw_##op##_grads *grads,   \
                                   fw_direction direction);                                                        \
  FW_API fw_status fw_##op##_workspace_size(const fw_context *context, const fw_##op *desc, fw_direction direction,\
                                            uint64_t *bytes);                                                      \
  FW_API fw_status fw_##op##_forward(fw_context *context, const fw_##op *desc, void *workspace,                    \
                                     uint64_t workspace_size);                                                     \
  FW_API fw_status fw_##op##_backward(fw_context *context, const fw_##op *desc, const fw_##op##_grads *grads,      \
                                      void *workspace, uint64_t workspace_size);                                   \
  FW_API fw_status fw_##op##_explain(const fw_context *context, const fw_##op *desc, fw_direction direction,       \
                                     char *text, uint64_t capacity, uint64_t *needed)

#define FW_DECLARE_STEP(op)                                                                                        \
  FW_API fw_status fw_##op##_step(fw_context *context, const fw_##op *desc, void *workspace, uint64_t workspace_size)

typedef int32_t fw_activation;
enum { FW_ACTIVATION_NONE = 0, FW_ACTIVATION_SILU = 1, FW_ACTIVATION_SIGMOID = 2 };

/* ---- short convolution: depthwise and causal ---------------------------------------------------------------------
 * y_t = act(bias + sum_{j<W} weight[:, j] * x_{t-W+1+j}); rows before the sequence come from initial_state, else 0.
 * The state is the last W-1 rows of x, oldest first. Activation NONE or SILU. */
typedef struct fw_short_conv {
  uint32_t struct_size;
  fw_device device;
  fw_activation activation;
  uint32_t options;
  fw_tensor x;                       /* [B,T,D] */
  fw_tensor weight, bias;            /* [D,W], W >= 1; [D] or absent */
  fw_tensor initial_state;           /* [N,D,W-1] or absent (zeros) */
  fw_tensor cu_seqlens;              /* as in fw_recurrence */
  fw_tensor y, final_state;          /* [B,T,D]; [N,D,W-1] or absent */
  fw_tensor state, state_indices;    /* step: [slots,D,W-1] in place; int32 [N], negative skips (y rows 0) */
  void *stream; /* CUDA only: see above */
} fw_short_conv;
typedef struct fw_short_conv_grads {
  uint32_t struct_size;
  uint32_t reserved;
  fw_tensor dy, d_final_state;                     /* in */
  fw_tensor dx, dweight, dbias, d_initial_state;   /* out */
} fw_short_conv_grads;
FW_DECLARE_VERBS(short_conv);
FW_DECLARE_STEP(short_conv);

/* ---- norms over the last dimension -------------------------------------------------------------------------------
 *   L2   y = x / sqrt(sum x^2 + eps)             default eps 1e-6; no weight, no gate
 *   RMS  y = x / sqrt(mean x^2 + eps) * weight   default eps 1e-6; weight [D] may be absent (1)
 * With a gate (RMS only) y is then multiplied by act(gate), act SILU or SIGMOID: norm first, gate after. y has x's dtype
 * unless its tensor says otherwise. x, gate, y: the same shape, 1 to 5 dimensions. */
typedef int32_t fw_norm_kind;
enum { FW_NORM_L2 = 0, FW_NORM_RMS = 1 };
typedef struct fw_norm {
  uint32_t struct_size;
  fw_device device;
  fw_norm_kind kind;
  fw_activation gate_activation; /* read when gate is given; NONE is refused then */
  double eps;                    /* 0 means the default */
  fw_tensor x, weight, gate, y;
  void *stream; /* CUDA only: see above */
} fw_norm;
typedef struct fw_norm_grads {
  uint32_t struct_size;
  uint32_t reserved;
  fw_tensor dy;                /* in */
  fw_tensor dx, dweight, dgate;/* out */
} fw_norm_grads;
FW_DECLARE_VERBS(norm);

/* ---- gate activations: logits to log decay g, or to beta ---------------------------------------------------------
 * kind and formulas as fw_gate_input of recurrence.h (1 SOFTPLUS, 2 LOG_SIGMOID, 3 BOUNDED, 4 RWKV7), and
 * 5 BETA (sigmoid x), 6 BETA_TWICE (2 sigmoid x). x, y [B,T,HV] or [B,T,HV,K]. Accurate to fp32 down to x = -100. */
typedef int32_t fw_gate_kind;
enum {
  FW_GATE_KIND_SOFTPLUS = 1,
  FW_GATE_KIND_LOG_SIGMOID = 2,
  FW_GATE_KIND_BOUNDED = 3,
  FW_GATE_KIND_RWKV7 = 4,
  FW_GATE_KIND_BETA = 5,
  FW_GATE_KIND_BETA_TWICE = 6
};
typedef struct fw_gate_activation {
  uint32_t struct_size;
  fw_device device;
  fw_gate_kind kind;
  uint32_t reserved;
  double normalizer;  /* LOG_SIGMOID; 0 means 16 */
  double lower_bound; /* BOUNDED; 0 means -5 */
  fw_tensor x, a_log, dt_bias; /* a_log [HV], dt_bias [HV] or [HV,K], fp32, may be absent (0) */
  fw_tensor y;
  void *stream; /* CUDA only: see above */
} fw_gate_activation;
typedef struct fw_gate_activation_grads {
  uint32_t struct_size;
  uint32_t reserved;
  fw_tensor dy;                    /* in */
  fw_tensor dx, d_a_log, d_dt_bias;/* out */
} fw_gate_activation_grads;
FW_DECLARE_VERBS(gate_activation);

/* ---- feature maps, elementwise ----------------------------------------------------------------------------------- */
typedef int32_t fw_feature_map_kind;
enum { FW_FEATURE_IDENTITY = 0, FW_FEATURE_ELU_PLUS_ONE = 1, FW_FEATURE_SILU = 2, FW_FEATURE_RELU = 3 };
typedef struct fw_feature_map {
  uint32_t struct_size;
  fw_device device;
  fw_feature_map_kind kind;
  uint32_t reserved;
  fw_tensor x, y; /* same shape, 1 to 5 dimensions */
  void *stream; /* CUDA only: see above */
} fw_feature_map;
typedef struct fw_feature_map_grads {
  uint32_t struct_size;
  uint32_t reserved;
  fw_tensor dy; /* in */
  fw_tensor dx; /* out */
} fw_feature_map_grads;
FW_DECLARE_VERBS(feature_map);

/* ---- causal softmax attention ------------------------------------------------------------------------------------
 * o_t = sum_s softmax_s(scale * rope(q_t) . rope(k_s)) v_s over s in (t - window, t] of the same sequence (window 0: all
 * s <= t). Query head hq reads key head hq / (HQ / HK). RoPE (rope_theta > 0) turns the whole head in halves: with x1, x2
 * the first and second half, x1' = x1 cos - x2 sin, x2' = x2 cos + x1 sin, angle = position * theta^(-2i/D), computed in
 * fp64. position = row in its sequence + start_positions[n].
 * step: the keys before this call come from the cache, whose slot of the token at position p is p % capacity (keys stored
 * turned); cache_lengths[n] is the number of tokens of the sequence seen so far and is NOT advanced by the call. A token
 * reaches back min(window or all, capacity) tokens, itself included. The call writes its last min(T, capacity) tokens
 * into the cache after it has read it, so T may exceed the capacity. */
typedef struct fw_attention {
  uint32_t struct_size;
  fw_device device;
  int64_t window;         /* 0: full */
  double scale;           /* 0 means D^-1/2 */
  double rope_theta;      /* 0: no RoPE */
  fw_tensor q, k, v;      /* [B,T,HQ,D], [B,T,HK,D], [B,T,HK,DV] */
  fw_tensor cu_seqlens;   /* as in fw_recurrence */
  fw_tensor start_positions; /* int64 [N] or absent (0); forward and backward only */
  fw_tensor o;            /* [B,T,HQ,DV] */
  fw_tensor k_cache, v_cache; /* step: [slots,capacity,HK,D], [slots,capacity,HK,DV], fp32, bf16 or fp16 */
  fw_tensor cache_lengths;    /* step: int64 [N] */
  fw_tensor cache_indices;    /* step: int32 [N] or absent; negative skips (o rows 0) */
  void *stream; /* CUDA only: see above */
} fw_attention;
typedef struct fw_attention_grads {
  uint32_t struct_size;
  uint32_t reserved;
  fw_tensor d_o;        /* in */
  fw_tensor dq, dk, dv; /* out */
} fw_attention_grads;
FW_DECLARE_VERBS(attention);
FW_DECLARE_STEP(attention);

/* ---- linear layer: y = x weight^T + bias ------------------------------------------------------------------------
 * x [M,in], weight [out,in], bias [out] or absent, y [M,out]; each fp32, bf16 or fp16, sums fp32. A row's bits do not depend
 * on M or on the number of threads. */
typedef struct fw_linear {
  uint32_t struct_size;
  fw_device device;
  uint32_t options;
  uint32_t reserved;
  fw_tensor x, weight, bias, y;
  void *stream; /* CUDA only: see above */
} fw_linear;
typedef struct fw_linear_grads {
  uint32_t struct_size;
  uint32_t reserved;
  fw_tensor dy;                 /* in */
  fw_tensor dx, dweight, dbias; /* out */
} fw_linear_grads;
FW_DECLARE_VERBS(linear);

#undef FW_DECLARE_VERBS
#undef FW_DECLARE_STEP

#ifdef __cplusplus
}
#endif
#endif
