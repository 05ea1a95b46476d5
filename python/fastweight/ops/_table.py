# SPDX-License-Identifier: Apache-2.0
"""What fastweight.ops consists of, as data: one entry a catalogue row and a neighbour, one entry an argument.

tests/package/test_table.py holds the rows against the catalogue of the C library: names, axes, operands that it needs and
operands that it refuses; and titles, formulas and sources against docs/operators.
"""
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A row of the catalogue. `operands` are positional after q, k, v; `optional` are keywords."""

    gate: str
    erase: str
    operands: tuple
    title: str
    formula: str
    source: str
    optional: tuple = ()
    extra: tuple = ()  # further keywords
    has_fixed_gate: bool = False


@dataclass(frozen=True)
class Neighbour:
    """A function beside the family. `fixed` are fields of the descriptor that its name says."""

    operation: str
    positional: tuple
    keywords: tuple
    results: tuple
    title: str
    formula: str
    source: str
    page: str
    fixed: tuple = ()
    step_keywords: tuple = ()  # a function <name>_step with these


READ = "o_t  = scale * S_t^T q_t"

ROWS = {
    "linear_attn": Row(
        "none", "none", (), "linear attention", f"S_t = S_{{t-1}} + k_t v_t^T\n{READ.replace('  =', ' =')}",
        'Katharopoulos et al. 2020, "Transformers are RNNs" (arXiv 2006.16236), equations (16) to (20).',
        extra=("normalizer", "initial_z")),
    "simple_gla": Row(
        "scalar", "none", ("g",), "scalar gate", "S_t = exp(g_t) S_{t-1} + k_t v_t^T\no_t = scale * S_t^T q_t",
        'Yang et al. 2023, "Gated linear attention" (arXiv 2312.06635), the scalar case of its recurrence; '
        'Dao and Gu 2024, "Transformers are SSMs" (arXiv 2405.21060)'),
    "retention": Row(
        "scalar", "none", (), "a fixed decay a head",
        "S_t = gamma_h S_{t-1} + k_t v_t^T,   gamma_h = 1 - 2^(-5-h),   h = 0 .. HV-1\no_t = scale * S_t^T q_t",
        'Sun et al. 2023, "Retentive network" (arXiv 2307.08621), equation (6), with the decays of equation (8).',
        has_fixed_gate=True),
    "lightning": Row(
        "scalar", "none", (), "a fixed decay a head and layer",
        "S_t = exp(g_h) S_{t-1} + k_t v_t^T,   g_h = -(8/HV) (1 - layer_idx/num_layers) h,   h = 0 .. HV-1\n"
        "o_t = scale * S_t^T q_t",
        'Qin et al. 2023, "TransNormerLLM" (arXiv 2307.14995), the decay of its LRPE-d; Qin et al. 2024, '
        '"Lightning Attention-2" (arXiv 2401.04658)',
        extra=("layer_idx", "num_layers"), has_fixed_gate=True),
    "gla": Row(
        "vector", "none", ("g",), "vector gate", "S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T\no_t = scale * S_t^T q_t",
        'Yang et al. 2023, "Gated linear attention" (arXiv 2312.06635)'),
    "delta_rule": Row(
        "none", "shared_after", ("beta",), "DeltaNet",
        "S_t = S_{t-1} + k_t (beta_t (v_t - S_{t-1}^T k_t))^T\no_t = scale * S_t^T q_t",
        'Schlag et al. 2021, "Linear Transformers are secretly fast weight programmers" (arXiv 2102.11174)'),
    "gated_delta_rule": Row(
        "scalar", "shared_after", ("g", "beta"), "Gated DeltaNet",
        f"S~_t = exp(g_t) S_{{t-1}}\nS_t  = S~_t + k_t (beta_t (v_t - S~_t^T k_t))^T\n{READ}",
        'Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464), equation (10)'),
    "comba": Row(
        "scalar", "shared_before", ("g", "beta", "p"), "erase before the decay",
        "S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - S_{t-1}^T p_t))^T\no_t = scale * S_t^T q_t",
        'Hu et al. 2025, "Comba: improving bilinear RNNs with closed-loop control" (arXiv 2506.02475)'),
    "kda": Row(
        "vector", "shared_after", ("g", "beta"), "Kimi delta attention",
        f"S~_t = diag(exp(g_t)) S_{{t-1}}\nS_t  = S~_t + k_t (beta_t (v_t - S~_t^T k_t))^T\n{READ}",
        'Kimi team 2025, "Kimi Linear" (arXiv 2510.26692), equation (1)'),
    "gdn2": Row(
        "vector", "shared_after", ("g", "erase_gate", "write_gate"), "Gated DeltaNet-2",
        f"S~_t = diag(exp(g_t)) S_{{t-1}}\nS_t  = S~_t + k_t (write_gate_t * v_t - S~_t^T (erase_gate_t * k_t))^T\n{READ}",
        'Hatamizadeh, Choi and Kautz 2026, "Gated DeltaNet-2" (arXiv 2605.22791)'),
    "gated_delta_product": Row(
        "scalar", "shared_after", ("beta",), "several erase-and-write steps a token",
        "S <- exp(g_t) S_{t-1}\nfor j = 0 .. n-1:   S <- S + k_{t,j} (beta_{t,j} (v_{t,j} - S^T k_{t,j}))^T\n"
        "S_t = S,   o_t = scale * S_t^T q_t",
        'Siems et al. 2025, "DeltaProduct" (arXiv 2502.10297)', optional=("g",), extra=("n_sub",)),
    "iplr": Row(
        "none", "independent", ("a", "b"), "identity plus low rank",
        "S_t = S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T\no_t = scale * S_t^T q_t",
        'The generalised delta rule of Peng et al. 2025, "RWKV-7 Goose" (arXiv 2503.14456), without its decay'),
    "dplr": Row(
        "vector", "independent", ("a", "b", "g"), "diagonal plus low rank",
        "S_t = diag(exp(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T\no_t = scale * S_t^T q_t",
        'as an attention operator: Peng et al. 2025, "RWKV-7" (arXiv 2503.14456)'),
    "rwkv7": Row(
        "vector", "independent", ("a", "b", "g"), "RWKV-7's time mixing",
        "S_t = diag(exp(g_t)) S_{t-1} + b_t (S_{t-1}^T a_t)^T + k_t v_t^T\no_t = scale * S_t^T q_t,   scale = 1 unless given",
        'Peng et al. 2025, "RWKV-7 Goose" (arXiv 2503.14456)'),
    "by_axes": Row(
        "", "", (), "any gate with any erase",
        "e = beta * erase_gate * (p, or k when there is no p),   v' = beta * write_gate * v,   absent factors 1\n"
        "o_t = scale * S_t^T q_t",
        "The two axes are those of the catalogue; every named row is one point.",
        optional=("g", "beta", "p", "erase_gate", "write_gate", "a", "b"), extra=("gate", "erase")),
}

CONV = "z_t = bias + sum over j < W of weight[:, j] * x_{t-W+1+j}\ny_t = z_t   or   z_t sigmoid(z_t)"

NEIGHBOURS = {
    "short_conv": Neighbour(
        "short_conv", ("x", "weight"),
        ("bias", "activation", "conv_initial_state", "output_final_state", "cu_seqlens"), ("y", "conv_final_state"),
        "causal depthwise short convolution", CONV, "", "short_conv",
        step_keywords=("conv_state", "state_indices", "bias", "activation", "cu_seqlens")),
    "l2_norm": Neighbour(
        "norm", ("x",), ("eps",), ("y",), "L2 norm of the last dimension", "y = x / sqrt(sum x^2 + eps)", "", "norm",
        fixed=(("kind", 0),)),
    "rms_norm": Neighbour(
        "norm", ("x", "norm_weight"), ("norm_gate", "gate_activation", "eps"), ("y",), "RMS and gated RMS norm of the last dimension",
        "y = x / sqrt(mean x^2 + eps) * weight * act(gate)",
        'Zhang and Sennrich 2019, "Root Mean Square Layer Normalization" (arXiv 1910.07467), equation (4)', "norm",
        fixed=(("kind", 1),)),
    "gate_activation": Neighbour(
        "gate_activation", ("gate_logits",), ("gate_kind", "a_log", "dt_bias", "normalizer_number", "lower_bound"), ("gate_y",),
        "logits to a log decay g or to beta", "", 'Yang, Kautz and Hatamizadeh 2024, "Gated Delta Networks" (arXiv 2412.06464)',
        "gate_activation"),
    "feature_map": Neighbour(
        "feature_map", ("x",), ("map_kind",), ("y",), "elementwise maps of q and k", "",
        'Katharopoulos et al. 2020, "Transformers are RNNs" (arXiv 2006.16236), equation (7).', "feature_map"),
    "attention": Neighbour(
        "attention", ("attention_q", "attention_k", "attention_v"), ("window", "attention_scale", "rope_theta", "cu_seqlens", "start_positions"),
        ("attention_o",), "causal softmax attention",
        "o_t = sum over s of p_ts v_s\np_t = softmax over s of scale * turn(q_t) . turn(k_s),   s in (t - window, t] of the same sequence",
        "Softmax attention: Vaswani et al. 2017 (arXiv 1706.03762), equation (1).", "attention",
        step_keywords=("k_cache", "v_cache", "cache_lengths", "cache_indices", "window", "attention_scale", "rope_theta", "cu_seqlens")),
    "linear": Neighbour(
        "linear", ("linear_x", "linear_weight"), ("linear_bias",), ("linear_y",), "a linear layer", "y = x weight^T + bias", "", "linear"),
}


@dataclass(frozen=True)
class Argument:
    """`name` as the caller writes it; default None also stands for "the library's own"."""

    name: str
    default: object
    type: str
    text: str


REQUIRED = object()


def _tensor(name, text, required=False):
    return Argument(name, REQUIRED if required else None, "Array" if required else "Array | None", text)


def _number(name, text, default=None, kind="float"):
    return Argument(name, default, f"{kind} | None" if default is None else kind, text)


def _word(name, text, words, default):
    return Argument(name, default, "Literal[" + ", ".join(f'"{word}"' for word in words) + "]", text)


def _flag(name, text):
    return Argument(name, False, "bool", text)


WITH_K, WITH_V = "goes with k, [B,T,H,K]", "goes with v, [B,T,HV,V]"
ARGUMENTS = {
    "q": _tensor("q", "[B,T,H,K]: queries", True),
    "k": _tensor("k", "[B,T,H,K]: keys, in q's dtype", True),
    "v": _tensor("v", "[B,T,HV,V]: values, HV a multiple of H, in q's dtype", True),
    "g": _tensor("g", "", True),  # the text depends on the gate
    "beta": _tensor("beta", "[B,T,HV]: write strength, any real number, (0,1) or (0,2) is usual; q's dtype, or float32 beside 16 bits", True),
    "p": _tensor("p", f"{WITH_K}: the key that the erase reads", True),
    "a": _tensor("a", f"{WITH_K}: the key that reads the state before the decay", True),
    "b": _tensor("b", f"{WITH_K}: the key along which what a read is added", True),
    "erase_gate": _tensor("erase_gate", f"{WITH_K}: multiplies the erase key, (0,1) is usual", True),
    "write_gate": _tensor("write_gate", f"{WITH_V}: multiplies the written value, (0,1) is usual", True),
    "gate": _word("gate", "how the state forgets", ("none", "scalar", "vector"), REQUIRED),
    "erase": _word("erase", "how it erases", ("none", "shared_after", "shared_before", "independent"), REQUIRED),
    "scale": _number("scale", "multiplies q only; None: K^-1/2"),
    "n_sub": _number("n_sub", "sub-steps a token, 1 to 64: k, v and beta have T*n_sub rows, row t*n_sub + j is sub-step j of token t", 1, "int"),
    "layer_idx": _number("layer_idx", "this layer, 0 to num_layers - 1", 0, "int"),
    "num_layers": _number("num_layers", "layers of the model", 1, "int"),
    "normalizer": _word("normalizer", '"sum": o_t is divided by scale * q_t . z_t + 1e-10, z the running sum of k', ("none", "sum"), "none"),
    "initial_z": _tensor("initial_z", "[N,H,K] float32: the normaliser's sum before the first token; None: zeros"),
    "initial_state": _tensor("initial_state", "[N,HV,K,V] (state_layout \"kv\") or [N,HV,V,K] (\"vk\"), float32, bfloat16 or float16, float64 for float64 inputs; None: zeros"),
    "output_final_state": _flag("output_final_state", "whether the state after the last token is returned"),
    "cu_seqlens": _tensor("cu_seqlens", "[N+1] int32 or int64, from 0 to T: B is 1 and row t belongs to sequence n when cu_seqlens[n] <= t < "
                          "cu_seqlens[n+1]; None: N = B"),
    "form": _word("form", '"chunk" is dense work inside chunks (what "auto" takes), "recurrent" token by token, "parallel" the '
                  "whole-sequence matrix form for short T", ("auto", "chunk", "recurrent", "parallel"), "auto"),
    "state_layout": _word("state_layout", "which axis of the state comes first", ("kv", "vk"), "kv"),
    "step_layout": _word("state_layout", 'which axis of the state comes first; "opaque" is the library\'s own', ("kv", "vk", "opaque"), "kv"),
    "qk_norm": _word("qk_norm", '"l2": q, k (and p) are divided by sqrt(sum x^2 + 1e-6) in float32 first', ("none", "l2"), "none"),
    "gate_input": _word("gate_input", "what g holds: the log decay itself, or logits x that become it in float32: \"softplus\" "
                        '-exp(a_log) softplus(x + dt_bias), "log_sigmoid" log_sigmoid(x) / gate_normalizer, "bounded" '
                        'gate_lower_bound * sigmoid(exp(a_log) (x + dt_bias)), "rwkv7" -exp(-1/2) sigmoid(x)',
                        ("log_decay", "softplus", "log_sigmoid", "bounded", "rwkv7"), "log_decay"),
    "a_log": _tensor("a_log", "[HV] float32, for \"softplus\" and \"bounded\"; None: 0"),
    "dt_bias": _tensor("dt_bias", "[HV] (scalar gate) or [HV,K] (vector gate) float32, for \"softplus\" and \"bounded\"; None: 0"),
    "gate_normalizer": _number("gate_normalizer", "of \"log_sigmoid\"; None: 16"),
    "gate_lower_bound": _number("gate_lower_bound", "of \"bounded\", below 0; None: -5"),
    "g_min": _number("g_min", "your promise that g >= g_min, below 0, no clamp; None: no promise"),
    "beta_input": _word("beta_input", 'what beta holds: itself, or logits x that become sigmoid(x) or 2 sigmoid(x)',
                        ("plain", "sigmoid", "sigmoid_twice"), "plain"),
    "state": _tensor("state", "[slots,HV,K,V] (\"kv\") or [slots,HV,V,K] (\"vk\"), float32, bfloat16 or float16: read, and written in place", True),
    "state_z": _tensor("state_z", "[slots,H,K] float32: the normaliser's sum, in place"),
    "state_indices": _tensor("state_indices", "[N] int32: the slot of each sequence; a negative one skips it (its rows of the result are 0); "
                             "None: sequence n has slot n"),
    "o_dtype": Argument("o_dtype", None, "object", "dtype of o (\"float32\", torch.float32, ...); None: v's"),
    "y_dtype": Argument("y_dtype", None, "object", "dtype of the result; None: x's"),
    "gate_y_dtype": Argument("y_dtype", None, "object", "dtype of the result; None: float32"),
    "batch_invariant": _flag("batch_invariant", "the same bits for every batch, packing and number of heads (on the CPU always so)"),
    "check_values": _flag("check_values", "also look at the data: cu_seqlens, state_indices, g >= g_min"),
    "allow_tf32": _flag("allow_tf32", "float32 operands may be rounded to tf32 on matrix units"),
    "context": Argument("context", None, "Context | None", "threads that run it; None: the process's default"),
    "explain": _flag("explain", "compute nothing and return which implementation would run and why the others refuse"),
    "x": _tensor("x", "input, 1 to 5 dimensions, any strides", True),
    "weight": _tensor("weight", "[D,W], W >= 1", True),
    "bias": _tensor("bias", "[D]; None: 0"),
    "activation": _word("activation", "of the result", ("none", "silu"), "none"),
    "conv_initial_state": _tensor("initial_state", "[N,D,W-1]: the rows before the sequence, oldest first; None: zeros"),
    "conv_state": _tensor("state", "[slots,D,W-1]: the last W-1 rows, oldest first; read, and written in place", True),
    "eps": _number("eps", "inside the root; None: 1e-6"),
    "norm_weight": _tensor("weight", "[D]; None: 1"),
    "norm_gate": _tensor("gate", "x's shape: multiplies the normed x after its activation; None: none"),
    "gate_activation": _word("gate_activation", "act of the gate; has to be named when there is one", ("none", "silu", "sigmoid"), "none"),
    "gate_logits": _tensor("x", "[B,T,HV] or [B,T,HV,K]: logits", True),
    "gate_kind": _word("kind", '"softplus" -exp(a_log) softplus(x + dt_bias), "log_sigmoid" log_sigmoid(x) / normalizer, "bounded" '
                       'lower_bound * sigmoid(exp(a_log) (x + dt_bias)), "rwkv7" -exp(-1/2) sigmoid(x), "beta" sigmoid(x), '
                       '"beta_twice" 2 sigmoid(x)', ("softplus", "log_sigmoid", "bounded", "rwkv7", "beta", "beta_twice"), REQUIRED),
    "normalizer_number": _number("normalizer", "of \"log_sigmoid\"; None: 16"),
    "lower_bound": _number("lower_bound", "of \"bounded\", below 0; None: -5"),
    "map_kind": _word("kind", "which map", ("identity", "elu_plus_one", "silu", "relu"), REQUIRED),
    "attention_q": _tensor("q", "[B,T,HQ,D]: queries", True),
    "attention_k": _tensor("k", "[B,T,HK,D]: keys, HQ a multiple of HK", True),
    "attention_v": _tensor("v", "[B,T,HK,DV]: values", True),
    "attention_scale": _number("scale", "None: D^-1/2"),
    "window": _number("window", "tokens that a query reaches back to, itself included; 0: all", 0, "int"),
    "rope_theta": _number("rope_theta", "base of the rotary embedding, applied inside; None: none"),
    "start_positions": _tensor("start_positions", "[N] int64: the position of each sequence's first row; None: 0"),
    "k_cache": _tensor("k_cache", "[slots,capacity,HK,D]: keys, already turned, written in place", True),
    "v_cache": _tensor("v_cache", "[slots,capacity,HK,DV]: values, written in place", True),
    "cache_lengths": _tensor("cache_lengths", "[N] int64: tokens of each sequence so far; not advanced by the call", True),
    "cache_indices": _tensor("cache_indices", "[N] int32: the slot of each sequence; a negative one skips it; None: n"),
    "linear_x": _tensor("x", "[M,in]", True),
    "linear_weight": _tensor("weight", "[out,in]", True),
    "linear_bias": _tensor("bias", "[out]; None: 0"),
}
RESULTS = {
    "o": "o [B,T,HV,V] in o_dtype",
    "final_state": "final_state [N,HV,K,V] or [N,HV,V,K] in float32 (float64 for float64 inputs), None unless asked for",
    "final_z": "final_z [N,H,K] in float32, None without the normaliser or unless asked for",
    "y": "y, x's shape, in y_dtype",
    "conv_final_state": "final_state [N,D,W-1] in x's dtype, None unless asked for",
    "gate_y": "y, x's shape, in y_dtype",
    "attention_o": "o [B,T,HQ,DV] in o_dtype",
    "linear_y": "y [M,out] in y_dtype",
}
