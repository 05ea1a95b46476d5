# SPDX-License-Identifier: Apache-2.0
"""Field reports that speak of transformers, named after their numbers in docs/field_reports.md, on its own models with enable()."""
import importlib

import pytest
from hf_models import MODELS, distance, hf, shared_model, seeded, tokens, torch

FP32 = 1e-5  # as in test_hf_equal
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.mark.parametrize("length", [63, 64, 65, 100])
@each_model
@torch.no_grad()
def test_field_036_the_last_token_alone(name, length):
    """prefill(T) and prefill(T-1) + decode(1): logits of the last token and both states."""
    model, x = shared_model(name), tokens(1, length)
    with hf.enable(name):
        whole, cache = model(x), model(x[:, :-1]).cache
        last = model(x[:, -1:], cache=cache)
    assert distance(last.logits[:, 0], whole.logits[:, -1]) < FP32
    for kind in ("conv_states", "recurrent_states"):
        assert distance(getattr(cache.layers[0], kind)[0], getattr(whole.cache.layers[0], kind)[0]) < FP32


@pytest.mark.parametrize("path", ["layers", "functions"])
@torch.no_grad()
def test_field_039_packed_padded_and_separate(path, monkeypatch):
    """Lengths 5 and 9 told apart by positions alone, in whole layers and in the functions that a stock forward calls."""
    model, x = shared_model("qwen3_5"), tokens(1, 14)
    positions = torch.cat((torch.arange(5), torch.arange(9)))[None]
    padded, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
    padded[0, 4:], padded[1], mask[0, 4:], mask[1] = x[0, :5], x[0, 5:], 1, 1
    separate = torch.cat([model(part, use_cache=False).logits for part in (x[:, :5], x[:, 5:])], 1)
    if path == "functions":
        module = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
        stock = module.Qwen3_5GatedDeltaNet.forward
        monkeypatch.setattr(module.Qwen3_5GatedDeltaNet, "forward", lambda self, *args, **kwargs: stock(self, *args, **kwargs))
    with hf.enable("qwen3_5") as enabled:
        packed = model(x, position_ids=positions, use_cache=False).logits
        batch = model(padded, attention_mask=mask, use_cache=False).logits
    assert any("chunk_gated_delta_rule" in place for place in enabled.calls()) == (path == "functions")
    assert distance(packed, separate) < FP32
    assert distance(torch.cat((batch[:1, 4:], batch[1:]), 1), separate) < FP32


@pytest.mark.parametrize("told", ["cu_seq_lens_q", "seq_idx"])
@torch.no_grad()
def test_field_040_the_convolution_stops_at_a_boundary(told):
    """Lengths 1, 2, 3, 5 and four taps."""
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    generator = seeded(1)
    x, weight = torch.randn(1, 6, 11, generator=generator), torch.randn(6, 4, generator=generator)
    ends = (0, 1, 3, 6, 11)
    alone = torch.cat([module.causal_conv1d_fn(x[..., a:b], weight, activation="silu") for a, b in zip(ends, ends[1:], strict=False)], -1)
    given = torch.tensor(ends, dtype=torch.int32) if told == "cu_seq_lens_q" else torch.tensor([[0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3]])
    with hf.enable("qwen3_next"):
        assert distance(module.causal_conv1d_fn(x, weight, activation="silu", **{told: given}), alone) < FP32


@torch.no_grad()
def test_field_061_sizes_that_are_all_different():
    """B, T, H, K, V = 2, 7, 3, 5, 11."""
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    generator = seeded(1)
    q, k = torch.randn(2, 2, 7, 3, 5, generator=generator)
    v, g = torch.randn(2, 7, 3, 11, generator=generator), -torch.rand(2, 7, 3, generator=generator)
    arguments = {"g": g, "beta": torch.rand(2, 7, 3, generator=generator), "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected = module.torch_recurrent_gated_delta_rule(q, k, v, **arguments)
    with hf.enable("qwen3_next"):
        for function in (module.torch_chunk_gated_delta_rule, module.torch_recurrent_gated_delta_rule):
            assert all(distance(y, z) < FP32 for y, z in zip(function(q, k, v, **arguments), expected, strict=True))


@each_model
@torch.no_grad()
def test_field_071_several_tokens_after_a_filled_cache(name):
    model, x = shared_model(name), tokens(1, 15)
    with hf.enable(name):
        cache = model(x[:, :10]).cache
        assert distance(model(x[:, 10:], cache=cache).logits, model(x).logits[:, 10:]) < FP32


@torch.no_grad()
def test_field_072_a_cache_that_cannot_be_cut_back_says_so():
    """As with the stock functions: no cut of the convolution's window without the state."""
    model = shared_model("qwen3_next")
    for enable in (False, True):
        with hf.enable("qwen3_next") if enable else torch.no_grad():
            cache = model(tokens(1, 9)).cache
            assert not cache.is_croppable
            with pytest.raises(RuntimeError, match="does not track past states"):
                cache.crop(-2)


@each_model
@torch.no_grad()
def test_field_093_one_prompt_with_left_padding(name):
    model, x = shared_model(name), tokens(1, 14)
    mask = torch.ones_like(x)
    mask[:, :6] = 0
    with hf.enable(name):
        assert distance(model(x, attention_mask=mask).logits[:, 6:], model(x[:, 6:]).logits) < FP32


@torch.no_grad()
def test_field_136_the_report_says_which_path_ran():
    model, x = shared_model("qwen3_next"), tokens(1, 5)
    with hf.enable("qwen3_next") as enabled:
        model(x)
        model.model.layers[0].linear_attn(torch.zeros(1, 2, 48), cache_params=None)
    counts = next(count for place, count in enabled.calls().items() if place.endswith("GatedDeltaNet.forward"))
    assert counts["fastweight"] == 4
