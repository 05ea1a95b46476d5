# SPDX-License-Identifier: Apache-2.0
"""The operator functions of fla 0.5.2 as data: where fla has them, what they take, which row of ours computes them.

A name in an Entry's signature is the caller's; `renamed` gives the name that the adaptor knows it by. tests/package/fla holds
the signatures against fla's own when a checkout of fla is given.
"""
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One function.

    family: row of the engine by the rank of the gate, see FAMILIES
    module: where fla defines it, under fla.ops
    signature: parameters as text, **kwargs included where fla has it
    checks: names of functions of _checks, in the order in which fla refuses
    keywords: what is read out of **kwargs
    o_like: whose dtype o has
    """

    family: str
    module: str
    signature: str
    checks: tuple = ("packed",)
    keywords: tuple = ()
    renamed: dict = field(default_factory=dict)
    o_like: str = "q"
    form: str = "chunk"
    note: str = ""
    is_top: bool = True  # exported by fla.ops too
    aliases: tuple = ()


# The row for no gate, a scalar gate, a vector gate.
FAMILIES = {
    "sum": ("linear_attn", "simple_gla", "gla"),
    "retention": ("retention", None, None),
    "lightning": ("lightning", None, None),
    "delta": ("delta_rule", "gated_delta_rule", "kda"),
    "product": ("gated_delta_product", "gated_delta_product", None),
    "comba": (None, "comba", None),
    "gdn2": (None, None, "gdn2"),
    "iplr": ("iplr", None, None),
    "dplr": (None, None, "dplr"),
}

STATES = "initial_state=None, output_final_state=False"
SEQLENS = "cu_seqlens=None, cu_seqlens_cpu=None"
NORM = "use_qk_l2norm_in_kernel=False"
BETA = "use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False"
GATE = ("A_log", "dt_bias")
ALIAS = ("alias", "packed")
LENGTH = ("chunk_size",)
V_FIRST = ("transpose_state_layout",)
VECTOR = {"g": "gk"}

ENTRIES = {
    # ---- sums, no erase ----
    "chunk_linear_attn": Entry(
        "sum", "linear_attn.chunk", f"q, k, v, scale=None, {STATES}, normalize=True, cu_seqlens=None"),
    "fused_chunk_linear_attn": Entry(
        "sum", "linear_attn.fused_chunk", f"q, k, v, scale=None, {STATES}, normalize=True, cu_seqlens=None"),
    "fused_recurrent_linear_attn": Entry(
        "sum", "linear_attn.fused_recurrent", f"q, k, v, scale=None, {STATES}, reverse=False, normalize=False, cu_seqlens=None",
        form="recurrent"),
    "chunk_simple_gla": Entry(
        "sum", "simple_gla.chunk", f"q, k, v, g=None, g_gamma=None, scale=None, {STATES}, state_v_first=False, {SEQLENS}, **kwargs",
        ("head_first", "power_of_two", "one_gate", "packed"), LENGTH),
    "fused_chunk_simple_gla": Entry(
        "sum", "simple_gla.fused_chunk", f"q, k, v, g=None, g_gamma=None, scale=None, {STATES}, cu_seqlens=None", ("packed", "one_gate")),
    "fused_recurrent_simple_gla": Entry(
        "sum", "simple_gla.fused_recurrent",
        f"q, k, v, g=None, g_gamma=None, scale=None, {STATES}, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs",
        ALIAS, V_FIRST, form="recurrent"),
    "parallel_simple_gla": Entry(
        "sum", "simple_gla.parallel", f"q, k, v, g=None, scale=None, output_attentions=False, {SEQLENS}, **kwargs",
        ("head_first", "packed", "attentions"), form="auto"),
    "chunk_retention": Entry(
        "retention", "retention.chunk", f"q, k, v, scale=None, {STATES}, cu_seqlens=None, **kwargs", ("head_first", "packed"), LENGTH),
    "fused_chunk_retention": Entry(
        "retention", "retention.fused_chunk", f"q, k, v, scale=None, {STATES}, cu_seqlens=None, **kwargs", ("head_first", "packed")),
    "fused_recurrent_retention": Entry(
        "retention", "retention.fused_recurrent",
        f"q, k, v, scale=None, {STATES}, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs", ALIAS, V_FIRST, form="recurrent"),
    "parallel_retention": Entry(
        "retention", "retention.parallel", "q, k, v, scale=None, output_attentions=False, cu_seqlens=None, **kwargs",
        ("head_first", "packed", "attentions"), form="auto"),
    "chunk_lightning_attn": Entry(
        "lightning", "lightning_attn.chunk", f"q, k, v, layer_idx, num_layers, scale=None, {STATES}, cu_seqlens=None, **kwargs",
        ("head_first", "packed"), LENGTH),
    "fused_recurrent_lightning_attn": Entry(
        "lightning", "lightning_attn.fused_recurrent",
        f"q, k, v, layer_idx, num_layers, scale=None, {STATES}, reverse=False, cu_seqlens=None, **kwargs", ("head_first", "packed"),
        form="recurrent"),
    "chunk_gla": Entry(
        "sum", "gla.chunk", f"q, k, v, g, scale=None, {STATES}, state_v_first=False, {SEQLENS}", ("packed", "gla_shapes"), renamed=VECTOR,
        o_like="v"),
    "fused_recurrent_gla": Entry(
        "sum", "gla.fused_recurrent",
        f"q, k, v, gk=None, gv=None, scale=None, {STATES}, reverse=False, state_v_first=False, cu_seqlens=None, **kwargs", ALIAS, V_FIRST,
        form="recurrent"),
    "fused_chunk_gla": Entry("", "gla.fused_chunk", "**kwargs", ("withdrawn",), note="chunk_gla"),
    # ---- delta rules ----
    "chunk_delta_rule": Entry(
        "delta", "delta_rule.chunk", f"q, k, v, beta, scale=None, {STATES}, {NORM}, {SEQLENS}, **kwargs",
        ("same_dtype", "scalar_beta", "head_first", "chunk_16_32_64", "packed"), LENGTH),
    "fused_recurrent_delta_rule": Entry(
        "delta", "delta_rule.fused_recurrent", f"q, k, v, beta=None, scale=None, {STATES}, {NORM}, cu_seqlens=None",
        ("packed", "positive_scale"), form="recurrent"),
    "fused_chunk_delta_rule": Entry("", "delta_rule.fused_chunk", "**kwargs", ("withdrawn",), note="chunk_delta_rule"),
    "chunk_gated_delta_rule": Entry(
        "delta", "gated_delta_rule.chunk",
        f"q, k, v, g, beta, scale=None, {STATES}, {NORM}, {BETA}, state_v_first=False, {SEQLENS}, chunk_indices=None, cp_context=None, "
        "**kwargs",
        ("alias", "gdn_heads", "head_first", "chunk_16_32_64_gdn", "no_cp", "packed", "a_log_asserted", "negative_eigenvalues"),
        ("use_gate_in_kernel",) + GATE + LENGTH + V_FIRST, aliases=("chunk_gdn",)),
    "fused_recurrent_gated_delta_rule": Entry(
        "delta", "gated_delta_rule.fused_recurrent",
        f"q, k, v, g=None, gk=None, gv=None, beta=None, scale=None, {STATES}, {NORM}, use_gate_in_kernel=False, A_log=None, dt_bias=None, "
        f"{BETA}, state_v_first=False, cu_seqlens=None, **kwargs",
        ("alias", "packed", "a_log_valued", "negative_eigenvalues"), V_FIRST, o_like="v", form="recurrent",
        aliases=("fused_recurrent_gdn",)),
    "chunk_kda": Entry(
        "delta", "kda.chunk",
        f"q, k, v, g, beta, scale=None, {STATES}, {NORM}, use_gate_in_kernel=False, {BETA}, safe_gate=False, lower_bound=None, "
        f"disable_recompute=False, return_intermediate_states=False, state_v_first=False, {SEQLENS}, cp_context=None, **kwargs",
        ("alias", "no_cp", "packed", "a_log_or_bound", "chunk_32_64", "safe_bound", "negative_eigenvalues", "kda_shapes"),
        GATE + LENGTH + V_FIRST, VECTOR),
    "fused_recurrent_kda": Entry(
        "delta", "kda.fused_recurrent",
        f"q, k, v, g, beta, A_log=None, dt_bias=None, scale=None, {STATES}, {NORM}, use_gate_in_kernel=False, {BETA}, lower_bound=None, "
        "state_v_first=False, cu_seqlens=None, **kwargs",
        ("alias", "packed", "a_log_or_bound", "negative_eigenvalues"), V_FIRST, VECTOR, o_like="v", form="recurrent"),
    "chunk_gdn2": Entry(
        "gdn2", "gdn2.chunk",
        f"q, k, v, g, b, w, scale=None, {STATES}, {NORM}, use_gate_in_kernel=False, {SEQLENS}, safe_gate=False, lower_bound=None, "
        "disable_recompute=False, return_intermediate_states=False, state_v_first=False, **kwargs",
        ("alias", "packed", "a_log_or_bound", "chunk_64", "safe_bound", "gdn2_shapes"), GATE + LENGTH + V_FIRST,
        {"g": "gk", "b": "erase_gate", "w": "write_gate"}, is_top=False),
    "fused_recurrent_gdn2": Entry(
        "gdn2", "gdn2.fused_recurrent",
        f"q, k, v, g, b, w, A_log=None, dt_bias=None, scale=None, {STATES}, {NORM}, use_gate_in_kernel=False, lower_bound=None, "
        "state_v_first=False, cu_seqlens=None, **kwargs",
        ("alias", "packed", "a_log_or_bound", "gdn2_shapes"), V_FIRST, {"g": "gk", "b": "erase_gate", "w": "write_gate"}, "v", "recurrent",
        is_top=False),
    "chunk_comba": Entry(
        "comba", "comba.chunk", f"q, k, v, p, g, beta=None, scale=None, {STATES}, {NORM}, {SEQLENS}"),
    "fused_recurrent_comba": Entry(
        "comba", "comba.fused_recurrent", f"q, k, p, v, g, beta=None, scale=None, {STATES}, {NORM}, cu_seqlens=None", form="recurrent",
        note="p comes before v here, after v in chunk_comba."),
    "chunk_gated_delta_product": Entry(
        "product", "gated_delta_product.chunk", f"q, k, v, g, beta, num_householder, scale=None, {STATES}, {NORM}, {SEQLENS}",
        ("product_shapes", "packed"), is_top=False, note="cu_seqlens counts rows of q; k, v and beta have num_householder rows a token."),
    # ---- a diagonal and a low rank ----
    "chunk_iplr_delta_rule": Entry(
        "iplr", "generalized_delta_rule.iplr.chunk", f"q, k, v, a, b, scale=None, {STATES}, {SEQLENS}, **kwargs",
        ("head_first", "power_of_two", "packed"), LENGTH, note="a is the key that reads, b the key that is written along."),
    "fused_recurrent_iplr_delta_rule": Entry(
        "iplr", "generalized_delta_rule.iplr.fused_recurrent", f"q, k, v, a, b, scale=None, {STATES}, cu_seqlens=None",
        ("packed", "positive_scale"), o_like="v", form="recurrent", note="a is the key that reads, b the key that is written along."),
    "chunk_dplr_delta_rule": Entry(
        "dplr", "generalized_delta_rule.dplr.chunk",
        f"q, k, v, a, b, gk, scale=None, {STATES}, {SEQLENS}, safe_gate=False, chunk_size=None, disable_recompute=False, cp_context=None, "
        "lower_bound=None, **kwargs", ("head_first", "negative_bound", "no_cp", "packed"),
        note="a reads the state before the decay. safe_gate and lower_bound are promises about gk and change nothing."),
    "fused_recurrent_dplr_delta_rule": Entry(
        "dplr", "generalized_delta_rule.dplr.fused_recurrent", f"q, k, v, a, b, gk, scale=None, {STATES}, reverse=False, cu_seqlens=None",
        o_like="v", form="recurrent", note="a reads the state before the decay."),
    "chunk_rwkv7": Entry(
        "dplr", "rwkv7.chunk",
        f"r, w, k, v, a, b, scale=1.0, {STATES}, {SEQLENS}, safe_gate=False, chunk_size=None, disable_recompute=False, cp_context=None, "
        "lower_bound=None, **kwargs", ("head_first", "negative_bound", "no_cp", "packed"), renamed={"r": "q", "w": "gk"},
        note="w is the log decay. scale is 1 unless given, None is K^-1/2."),
    "fused_recurrent_rwkv7": Entry(
        "dplr", "rwkv7.fused_recurrent",
        "r, w, k, v, a, b, scale=None, initial_state=None, output_final_state=True, cu_seqlens=None, **kwargs",
        ("head_first", "packed"), renamed={"r": "q", "w": "gk"}, o_like="v", form="recurrent",
        note="scale None is K^-1/2 and the final state is returned unless refused, both unlike chunk_rwkv7."),
    "fused_mul_recurrent_rwkv7": Entry(
        "dplr", "rwkv7.fused_recurrent", f"r, w, k, v, kk, a, scale=1.0, {STATES}, reverse=False, cu_seqlens=None, **kwargs",
        ("head_first", "packed"), renamed={"r": "q", "w": "gk", "a": "write_rate"}, o_like="v", form="recurrent", is_top=False,
        note="The key that reads is -kk, the key that is written along kk * a."),
}
