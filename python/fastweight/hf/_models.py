# SPDX-License-Identifier: Apache-2.0
"""What enable() knows: for each model the module of transformers and what of it is replaced, as data."""
from dataclasses import dataclass

from .. import ops
from ._functions import causal_conv1d_fn, causal_conv1d_update, chunk_delta_rule, recurrent_delta_rule

CONVOLUTIONS = {"causal_conv1d_fn": (causal_conv1d_fn, "short_conv"), "causal_conv1d_update": (causal_conv1d_update, "short_conv_step")}
DELTA_RULES = {"torch_chunk_gated_delta_rule": (chunk_delta_rule(ops.gated_delta_rule), "gated_delta_rule"),
               "torch_recurrent_gated_delta_rule": (recurrent_delta_rule(ops.gated_delta_rule), "gated_delta_rule"), **CONVOLUTIONS}
KIMI_RULES = {"chunk_kimi_delta_attention": (chunk_delta_rule(ops.kda), "kda"),
              "recurrent_kimi_delta_attention": (recurrent_delta_rule(ops.kda), "kda"), **CONVOLUTIONS}


@dataclass(frozen=True)
class Model:
    """`module` under transformers.models, and the names in it."""

    module: str
    functions: dict  # name -> (maker, operators)
    norm: str
    layer: tuple  # class, key of LAYERS
    text_model: str


OTHER_PARTS = ("softmax attention, RMS norms without a gate, MLP or experts, rotary embedding", "not part of a linear layer")
# Of the forwards in transformers 5.24.0, in the order of MODELS; Qwen3.5 and its mixture of experts share one.
DIGESTS = frozenset(("c49b88a00ee94c12", "7eab078461e7f273", "971e8593d9595fbe", "ade02cf745b7ec84"))
MODELS = {
    "qwen3_next": Model("qwen3_next.modeling_qwen3_next", DELTA_RULES, "Qwen3NextRMSNormGated", ("Qwen3NextGatedDeltaNet", "qwen3_next"),
                        "Qwen3NextModel"),
    "qwen3_5": Model("qwen3_5.modeling_qwen3_5", DELTA_RULES, "Qwen3_5RMSNormGated", ("Qwen3_5GatedDeltaNet", "qwen3_5"),
                     "Qwen3_5TextModel"),
    "qwen3_5_moe": Model("qwen3_5_moe.modeling_qwen3_5_moe", DELTA_RULES, "Qwen3_5MoeRMSNormGated",
                         ("Qwen3_5MoeGatedDeltaNet", "qwen3_5"), "Qwen3_5MoeTextModel"),
    "olmo_hybrid": Model("olmo_hybrid.modeling_olmo_hybrid", DELTA_RULES, "OlmoHybridRMSNormGated",
                         ("OlmoHybridGatedDeltaNet", "olmo_hybrid"), "OlmoHybridModel"),
    "kimi_linear": Model("kimi_linear.modeling_kimi_linear", KIMI_RULES, "KimiLinearRMSNormGated",
                         ("KimiLinearDeltaAttention", "kimi_linear"), "KimiLinearModel"),
}

# Models of fla: names in its modules, each replaced by the function of fastweight.fla with that name.
FLA_FUNCTIONS = ("chunk_rwkv7", "fused_mul_recurrent_rwkv7", "fused_addcmul_rwkv7", "fused_k_rwkv7", "gate_output_correction", "l2_norm",
                 "token_shift")
FLA_MODELS = {"rwkv7": {"fla.layers.rwkv7": FLA_FUNCTIONS, "fla.models.rwkv7.modeling_rwkv7": ("token_shift",)}}
