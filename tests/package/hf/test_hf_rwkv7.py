# SPDX-License-Identifier: Apache-2.0
"""fla's RWKV-7 with enable("rwkv7") against the same model with plain torch in place of fla's functions, which need a GPU.

FP32: the largest difference over the largest logit, 1e-5, as in test_hf_equal.
"""
import importlib

import pytest
from hf_models import distance, hf, tokens, torch

FP32 = 1e-5
try:  # fla needs triton and einops
    attention, modeling = (importlib.import_module(path) for path in ("fla.layers.rwkv7", "fla.models.rwkv7.modeling_rwkv7"))
    from fla.models.utils import Cache
except Exception as error:  # noqa: BLE001, whatever its import raises here
    pytest.skip(f"not run: fla cannot be imported ({type(error).__name__}: {error})", allow_module_level=True)

MIXES = 6


def plain_token_shift(x, cu_seqlens=None, cache=None, output_cache=False, **_):
    assert cu_seqlens is None
    before = x.new_zeros(x.shape[0], 1, x.shape[2]) if cache is None else cache.view(x.shape[0], 1, -1)
    delta = torch.cat((before, x[:, :-1]), 1) - x
    return (delta, x[:, -1:].clone()) if output_cache else delta


def plain_rwkv7(r, w, k, v, a, b, initial_state, output_final_state, scale=1.0, **_):
    B, T, H, K = r.shape
    state = r.new_zeros(B, H, K, v.shape[-1]) if initial_state is None else initial_state.float()
    rows = []
    for t in range(T):
        read = torch.einsum("bhk,bhkv->bhv", a[:, t], state)
        state = state * w[:, t].exp()[..., None] + b[:, t][..., None] * read[..., None, :] + k[:, t][..., None] * v[:, t][..., None, :]
        rows.append(scale * torch.einsum("bhk,bhkv->bhv", r[:, t], state))
    return torch.stack(rows, 1), state if output_final_state else None


PLAIN = {
    "token_shift": plain_token_shift,
    "chunk_rwkv7": plain_rwkv7,
    "fused_mul_recurrent_rwkv7": lambda r, w, k, v, kk, a, **others: plain_rwkv7(r, w, k, v, -kk, kk * a, **others),
    "fused_addcmul_rwkv7": lambda x, delta, *mixes: tuple(x + delta * mix for mix in mixes),
    "fused_k_rwkv7": lambda k, a, k_a, **_: k * (1 + (a - 1) * k_a),
    "gate_output_correction": lambda o, r, k, r_k, v, g: (o + ((r * k * r_k).sum(-1, keepdim=True) * v).flatten(2)) * g,
}


@pytest.fixture
def plain(monkeypatch):
    """Plain torch in place of fla's functions, under what enable() replaces."""
    for module in (attention, modeling):
        for name, function in PLAIN.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, function)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    ranks = {f"{name}_low_rank_dim": 8 for name in ("decay", "gate", "a", "v")}
    config = modeling.RWKV7Config(hidden_size=48, num_hidden_layers=3, head_dim=16, vocab_size=61, fuse_norm=False, fuse_cross_entropy=False,
                                  fuse_linear_cross_entropy=False, use_l2warp=False, **ranks)
    model = modeling.RWKV7ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embeddings" not in name:
                parameter.normal_(0.0, 0.6 * parameter.shape[1] ** -0.5)
    return model


@torch.no_grad()
def test_prefill_pieces_and_decode(plain, model):
    """One call, and pieces of 70, 5 and single tokens after a cache: chunk and recurrent functions."""
    x = tokens(2, 80)
    expected = model(x).logits
    with hf.enable("rwkv7") as enabled:
        found = model(x).logits
        cache, logits, start = Cache(), [], 0
        for length in (70, 5, 1, 1, 3):
            part = model(x[:, start:start + length], past_key_values=cache, use_cache=True)
            cache, start = part.past_key_values, start + length
            logits.append(part.logits)
        ran = {place.rsplit(".", 1)[1]: count for place, count in enabled.calls().items()}
    assert start == 80 and set(ran) >= set(PLAIN) and all(set(count) == {"fastweight"} for count in ran.values())
    assert distance(found, expected) < FP32 and distance(torch.cat(logits, 1), expected) < FP32


@torch.no_grad()
def test_left_padding(plain, model):
    x = tokens(2, 14)
    mask = torch.ones_like(x)
    mask[0, :5] = 0
    expected = model(x, attention_mask=mask).logits
    with hf.enable("rwkv7"):
        found = model(x, attention_mask=mask).logits
    assert distance(found[mask.bool()], expected[mask.bool()]) < FP32


def test_training_step(plain, model):
    x = tokens(2, 20)

    def gradients():
        model.zero_grad()
        model.train()
        logits = model(x).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
        model.eval()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}

    expected = gradients()
    with hf.enable("rwkv7"):
        found = gradients()
    assert set(found) == set(expected) and any("r_k" in name for name in found)
    for name, gradient in expected.items():
        assert distance(found[name], gradient) < 1e-4, name  # as in test_hf_gradients


def test_fla_is_put_back():
    before = {name: getattr(attention, name) for name in PLAIN}
    with hf.enable("rwkv7"):
        assert all(getattr(attention, name) is not function for name, function in before.items())
    assert all(getattr(attention, name) is function for name, function in before.items())
