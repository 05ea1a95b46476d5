# SPDX-License-Identifier: Apache-2.0
"""Small models of fla: name -> the fields of config.json that differ from the defaults of its configuration class."""
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 40, "num_heads": 2, "hidden_ratio": 4, "intermediate_size": 48}
HYBRID = {"layers": [1], "num_heads": 4, "num_kv_heads": 2, "qkv_bias": False, "window_size": 6, "rope_theta": 5000.0}

MODELS = {
    "delta_net": {"model_type": "delta_net", **SIZES, "use_gate": True},
    "gated_deltanet_hybrid": {"model_type": "gated_deltanet", **SIZES, "head_dim": 8, "num_v_heads": 4, "attn": HYBRID},
    "kda": {"model_type": "kda", **SIZES, "head_dim": 8, "attn": [HYBRID, {"layers": [2], "num_heads": 2, "qkv_bias": True, "window_size": None}]},
    "comba": {"model_type": "comba", **SIZES, "head_dim": 8},
    "gated_deltaproduct": {"model_type": "gated_deltaproduct", **SIZES, "head_dim": 8, "num_householder": 3},
    "gla": {"model_type": "gla", **SIZES},
    "retnet": {"model_type": "retnet", **SIZES},
    "rwkv7": {"model_type": "rwkv7", "hidden_size": 32, "num_hidden_layers": 3, "vocab_size": 40, "head_dim": 8, "intermediate_size": 64},
}
