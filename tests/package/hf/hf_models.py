# SPDX-License-Identifier: Apache-2.0
"""Small random models of transformers for the tests here; without transformers they are reported as not run."""
import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from package_calls import DEVICE, IS_CUDA, fastweight, seeded  # noqa: F401, E402, it finds the package

torch = pytest.importorskip("torch", reason="not run: torch is not installed")
transformers = pytest.importorskip("transformers", minversion="5.24", reason="not run: transformers 5.24 or later is not installed")
from fastweight import hf  # noqa: E402

VOCABULARY = 61
# The first token's o is scale * beta * (q.k) v, and the gated norm divides it by its size: a q.k that cancels would turn a rounding of
# 1e-7 into 1e-4 of a logit, in the stock model alike. An eps of 1e-3 bounds that (and makes a wrong eps visible).
SHARED = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 512, "rms_norm_eps": 1e-3}
ATTENTION = {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
# K = 16, V = 24, three value heads a key head
LINEAR = {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 6}
# every token takes every expert: a choice among them would turn a rounding into another network
EXPERTS = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 2, "num_experts_per_tok": 2}
CONFIGURATIONS = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**ATTENTION, **LINEAR, **EXPERTS, "decoder_sparse_step": 2}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**ATTENTION, **LINEAR}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", {**ATTENTION, **LINEAR, **EXPERTS}),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM",
                    {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, **LINEAR, "linear_num_key_heads": 3,
                     "linear_num_value_heads": 3, "pad_token_id": 0, "eos_token_id": None}),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM",
                    {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 12, "kv_lora_rank": 16,
                     "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12, "linear_head_dim": 16, "linear_num_heads": 3,
                     "layer_types": ["linear_attention"] * 3 + ["full_attention"], "mlp_layer_types": ["dense"] * 4,
                     "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None}),
}
MODELS = tuple(CONFIGURATIONS)


def random_model(name, seed=0, **more):
    """A model whose linear layers matter to its logits: weights of about 0.6 hidden^-1/2, decays from 0.3 to 0.99 a token.

    With hidden^-1/2 the stock model's own float32 error against float64 is 1e-5 of the largest logit: nothing could be told then.
    """
    config_class, model_class, arguments = CONFIGURATIONS[name]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**SHARED, **arguments, **more})
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):
                parameter.uniform_(-4.0, 0.2)
            elif key.endswith("dt_bias"):
                parameter.normal_(0.0, 0.5)
            elif "norm" in key:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.6 * SHARED["hidden_size"] ** -0.5 if parameter.ndim == 2 else 0.4)
    return model


@functools.lru_cache
def shared_model(name):
    """One float32 model a name for the tests that do not change it; built while nothing is replaced."""
    assert hf.enabled() is None
    return random_model(name)


def tokens(*shape, seed=1):
    return torch.randint(1, VOCABULARY, shape, generator=seeded(seed))


def states_of(cache):
    """The tensors of the linear layers of a cache: [(layer, kind, tensor)]."""
    return [(index, kind, getattr(layer, kind)[0]) for index, layer in enumerate(cache.layers) if hasattr(layer, "recurrent_states")
            for kind in ("conv_states", "recurrent_states")]


def distance(found, expected):
    """The largest difference over the largest value."""
    return float((found.detach().double() - expected.detach().double()).abs().max() / expected.detach().double().abs().max())


def assert_all_ran(enabled, name):
    """No call of the model went to a stock function."""
    calls = {place: count for place, count in enabled.calls().items() if f".{name}." in place}
    assert calls and all(set(count) == {"fastweight"} for count in calls.values()), calls
