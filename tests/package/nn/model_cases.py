# SPDX-License-Identifier: Apache-2.0
"""Small models for the tests."""
from nn_helpers import fnn, seeded, torch

KINDS = {
    "time_mix": {"type": "RWKV7Attention", "head_dim": 8, "decay_low_rank_dim": 4, "gate_low_rank_dim": 4, "a_low_rank_dim": 4, "v_low_rank_dim": 4},
    "gdn": {"type": "GatedDeltaNet", "head_dim": 8, "num_heads": 2, "num_v_heads": 4, "expand_v": 1},
    "sliding": {"type": "Attention", "num_heads": 4, "num_kv_heads": 2, "window_size": 6},
    "kda": {"type": "KimiDeltaAttention", "head_dim": 8, "num_heads": 2},
    "full": {"type": "Attention", "num_heads": 2, "qk_norm": True},
    "retention": {"type": "MultiScaleRetention", "num_heads": 2, "expand_v": 1.0},
    "product": {"type": "GatedDeltaProduct", "head_dim": 8, "num_heads": 2},
}
ALL = ["time_mix", "gdn", "sliding", "kda", "full", "retention", "product", "time_mix"]


def config(layers=ALL, **more):
    return fnn.LMConfig(vocab_size=40, hidden_size=32, layers=list(layers), mixers={name: KINDS[name] for name in dict.fromkeys(layers)},
                        **{"mlp": {"type": "GatedMLP", "intermediate_size": 48}, **more})


def model(layers=ALL, seed=0, dtype=torch.float32, **more):
    """Every matrix drawn wide enough for each layer to matter."""
    torch.manual_seed(seed)
    found = fnn.HybridLM(config(layers, **more))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if parameter.ndim == 2 and "lora" not in name and "r_k" not in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
        found.embed.weight.normal_()
    return found.to(dtype).eval()


def tokens(batch, count, seed=1, low=1):
    return torch.randint(low, 40, (batch, count), generator=seeded(seed))
