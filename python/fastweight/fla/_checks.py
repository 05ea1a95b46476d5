# SPDX-License-Identifier: Apache-2.0
"""What the functions of fla refuse, with fla's types of error.

A check gets the function's name, the arguments by the adaptor's names and what came by **kwargs. The phrases between
backquotes, and those about cu_seqlens, are ones that callers match on. fla also refuses float32 in chunk_delta_rule and
chunk_gated_delta_product, states that are not float32 in chunk_gla, chunk_kda and chunk_gdn2, and K above 256: here these work.
"""
import warnings

import torch

# Arguments of other releases and of inner functions that fla's public ones take and drop. Dropped, the call would mean something else.
ELSEWHERE = {
    "offsets": "cu_seqlens",
    "transpose_state_layout": "state_v_first, where the function has it",
    "inplace_final_state": "fastweight.ops.<row>_step with state=",
    "ssm_state_indices": "fastweight.ops.<row>_step with state_indices=",
    "num_accepted_tokens": "fastweight.ops.<row>_step with state_indices=",
}


def tensors(name, given, renamed):
    """q, k and v are tensors [B,T,H,...]; `renamed` as an Entry has it."""
    spelled = {ours: theirs for theirs, ours in renamed.items()}
    for word in "qkv":
        found = given.get(word)
        if not isinstance(found, torch.Tensor):
            raise TypeError(f"{name}: {spelled.get(word, word)} is of type {type(found).__name__}, allowed torch.Tensor")
        if found.ndim != 4:
            raise ValueError(f"{name}: {spelled.get(word, word)} has shape {list(found.shape)}, allowed [B,T,H,...]")


def dropped(name, keywords, known):
    for word, instead in ELSEWHERE.items():
        found = keywords.get(word)
        if word not in known and found is not None and found is not False:
            raise TypeError(f"{name}: {word} is not an argument, use {instead}")
    if keywords.get("head_first"):
        raise DeprecationWarning(f"{name}: head_first is True, tensors are [B,T,H,...]")


def head_first(name, given, keywords):
    del given
    if "head_first" in keywords:
        raise DeprecationWarning(f"{name}: head_first has been removed, tensors are [B,T,H,...]")


def alias(name, given, keywords):
    if keywords.get("transpose_state_layout") is None:
        return
    if given["state_v_first"]:
        raise ValueError(f"{name}: both `state_v_first` and its old name `transpose_state_layout` are given")
    warnings.warn("`transpose_state_layout` is deprecated and renamed to `state_v_first`.", DeprecationWarning, stacklevel=4)


def packed(name, given, keywords):
    del name, keywords
    cu_seqlens = given.get("cu_seqlens")
    if cu_seqlens is None:
        return
    batch, state = given["q"].shape[0], given.get("initial_state")
    if batch != 1:
        raise ValueError(f"The batch size is expected to be 1 rather than {batch} when using `cu_seqlens`.")
    state = state[0] if isinstance(state, (tuple, list)) else state
    if state is not None and state.shape[0] != len(cu_seqlens) - 1:
        raise ValueError("The number of initial states is expected to be equal to the number of input sequences, "
                         f"i.e., {len(cu_seqlens) - 1} rather than {state.shape[0]}.")


def no_cp(name, given, keywords):
    del keywords
    if given.get("cp_context") is not None:
        raise NotImplementedError(f"{name}: cp_context is given, allowed None: a sequence is not split over ranks here; run each sequence "
                                  "on one rank, or pass the state on by hand with initial_state and output_final_state")


def one_gate(name, given, keywords):
    del keywords
    if given["g"] is not None and given["g_gamma"] is not None:
        raise ValueError(f"{name}: Only one of `g` or `g_gamma` should be provided.")


def attentions(name, given, keywords):
    del keywords
    if given["output_attentions"] and given["cu_seqlens"] is not None:
        raise AssertionError(f"{name}: output_attentions=True is not supported with cu_seqlens")


def _chunk_size(name, keywords, allowed, text, where=""):
    found = keywords.get("chunk_size")
    if found is not None and found not in allowed:
        raise ValueError(f"{name}: `chunk_size` must be {text}{where}, got {found}.")


def chunk_16_32_64(name, given, keywords):
    del given
    _chunk_size(name, keywords, (16, 32, 64), "16, 32, or 64")


def chunk_16_32_64_gdn(name, given, keywords):
    del given
    _chunk_size(name, keywords, (16, 32, 64), "16, 32, or 64", " for Gated Delta Rule")


def chunk_32_64(name, given, keywords):
    del given
    _chunk_size(name, keywords, (32, 64), "either 32 or 64", " for KDA")


def chunk_64(name, given, keywords):
    del given
    _chunk_size(name, keywords, (64,), "64", " for GDN-2")


def power_of_two(name, given, keywords):
    del given
    found = keywords.get("chunk_size")
    if found is not None and (found < 1 or found & (found - 1)):
        raise ValueError(f"{name}: `chunk_size` must be a power of 2, got {found}.")


def a_log_asserted(name, given, keywords):
    del keywords
    if given.get("use_gate_in_kernel") and given.get("A_log") is None:
        raise AssertionError(f"{name}: A_log must be provided when use_gate_in_kernel=True.")


def a_log_valued(name, given, keywords):
    del keywords
    for word in ("A_log", "g") if given["use_gate_in_kernel"] else ():
        if given[word] is None:
            raise ValueError(f"{name}: `{word}` must be provided when `use_gate_in_kernel=True`.")


def a_log_or_bound(name, given, keywords):
    del keywords
    if given["use_gate_in_kernel"] and given.get("A_log") is None and given["lower_bound"] is None:
        raise ValueError(f"{name}: `A_log` must be provided when `use_gate_in_kernel=True` and `lower_bound` is not set.")


def safe_bound(name, given, keywords):
    del keywords
    if not (given["safe_gate"] and given["use_gate_in_kernel"]):
        return
    bound = given["lower_bound"]
    if bound is None:
        raise ValueError(f"{name}: `lower_bound` must be specified when `safe_gate=True` and `use_gate_in_kernel=True`.")
    if not -5 <= bound < 0:
        raise ValueError(f"{name}: `lower_bound` must be in the safe range [-5, 0), got {bound}.")


def negative_bound(name, given, keywords):
    del keywords
    if given["lower_bound"] is not None and given["lower_bound"] >= 0:
        raise ValueError(f"{name}: `lower_bound` must be negative, got {given['lower_bound']}.")


def negative_eigenvalues(name, given, keywords):
    del keywords
    if given["allow_neg_eigval"] and not given["use_beta_sigmoid_in_kernel"]:
        raise ValueError(f"{name}: `allow_neg_eigval=True` requires `use_beta_sigmoid_in_kernel=True`.")


def positive_scale(name, given, keywords):
    del keywords
    if given["scale"] is not None and not given["scale"] > 0:
        raise AssertionError(f"{name}: scale must be positive, got {given['scale']}.")


def same_dtype(name, given, keywords):
    del keywords
    dtypes = [given[word].dtype for word in "qkv"]
    if len(set(dtypes)) != 1:
        raise AssertionError(f"{name}: q, k, v have dtypes {dtypes}, allowed one dtype")


def _shape(name, word, found, expected):
    if tuple(found.shape) != tuple(expected):
        raise AssertionError(f"{name}: {word} has shape {list(found.shape)}, allowed {list(expected)}")


def scalar_beta(name, given, keywords):
    del keywords
    _shape(name, "beta", given["beta"], given["v"].shape[:3])


def gla_shapes(name, given, keywords):
    del keywords
    shape = given["q"].shape
    _shape(name, "k", given["k"], shape)
    _shape(name, "g", given["gk"], shape)
    _shape(name, "v", given["v"], (*shape[:3], given["v"].shape[-1]))


def gdn_heads(name, given, keywords):
    del keywords
    heads, value_heads = given["q"].shape[2], given["v"].shape[2]
    if heads != given["k"].shape[2]:
        raise ValueError(f"{name}: q and k must have the same number of heads, got {heads} and {given['k'].shape[2]}")
    if value_heads % heads:
        raise ValueError(f"{name}: {value_heads} value heads must be evenly divisible by {heads} heads of q")


def kda_shapes(name, given, keywords):
    del keywords
    batch, tokens, heads, width = given["q"].shape
    value_heads = given["v"].shape[2]
    _shape(name, "k", given["k"], given["q"].shape)
    if value_heads % heads:
        raise AssertionError(f"{name}: {value_heads} value heads must be evenly divisible by {heads} heads of q")
    _shape(name, "g", given["gk"], (batch, tokens, value_heads, width))
    _shape(name, "beta", given["beta"], (batch, tokens, value_heads))


def gdn2_shapes(name, given, keywords):
    del keywords
    for word, label in (("k", "k"), ("gk", "g"), ("erase_gate", "b")):
        _shape(name, label, given[word], given["q"].shape)
    _shape(name, "w", given["write_gate"], given["v"].shape)
    _shape(name, "v", given["v"], (*given["q"].shape[:3], given["v"].shape[-1]))


def product_shapes(name, given, keywords):
    del keywords
    batch, tokens, heads, width = given["q"].shape
    rows = tokens * given["num_householder"]
    _shape(name, "k", given["k"], (batch, rows, heads, width))
    _shape(name, "v", given["v"], (batch, rows, heads, given["v"].shape[-1]))
    _shape(name, "beta", given["beta"], (batch, rows, heads))
    if given["g"] is not None:
        _shape(name, "g", given["g"], (batch, tokens, heads))


def withdrawn(name, given, keywords):
    del given, keywords
    raise NotImplementedError(f"{name} is deprecated, use {name.removeprefix('fused_')}")
