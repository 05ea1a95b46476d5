# SPDX-License-Identifier: Apache-2.0
"""enable() and disable(): what they change, what they put back, what they say."""
import importlib

import pytest
from hf_models import DEVICE, MODELS, distance, hf, random_model, shared_model, seeded, tokens, torch, transformers


def snapshot():
    """Every attribute that enable() may replace."""
    found = {}
    for name, model in hf.MODELS.items():
        module = importlib.import_module(f"transformers.models.{model.module}")
        for function in model.functions:
            found[name, function] = getattr(module, function)
        for class_name in (model.norm, model.text_model, model.layer[0]):
            found[name, class_name] = getattr(module, class_name).forward
    return found


def test_everything_is_put_back():
    before = snapshot()
    enabled = hf.enable()
    during = snapshot()
    assert hf.enabled() is enabled and all(during[key] is not before[key] for key in before)
    enabled.uninstall()
    enabled.uninstall()
    assert snapshot() == before and hf.enabled() is None
    hf.disable()


def test_enable_twice_replaces_once():
    before = snapshot()
    hf.enable()
    second = hf.enable("qwen3_next")
    changed = {key for key, function in snapshot().items() if function is not before[key]}
    assert changed == {key for key in before if key[0] == "qwen3_next"}
    assert all(place.stock in before.values() for place in second.places)
    hf.disable()
    assert snapshot() == before


def test_an_error_inside_the_block_disables_too():
    before = snapshot()
    with pytest.raises(RuntimeError), hf.enable():
        raise RuntimeError
    assert snapshot() == before


def test_a_function_that_somebody_else_replaced_meanwhile_stays():
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    stock = module.causal_conv1d_fn
    enabled = hf.enable("qwen3_next")
    try:
        module.causal_conv1d_fn = theirs = lambda *_, **__: None
        enabled.uninstall()
        assert module.causal_conv1d_fn is theirs
        assert any("causal_conv1d_fn" in what and "somebody else" in why for what, why in enabled.left)
    finally:
        module.causal_conv1d_fn = stock


def test_names_are_checked():
    with pytest.raises(ValueError, match="models has 'qwen9', allowed qwen3_next, "):
        hf.enable(["qwen3_next", "qwen9"])
    assert hf.enabled() is None and set(MODELS) <= set(hf.models())


@torch.no_grad()
def test_the_report_says_what_ran_and_what_was_left():
    model, x = random_model("qwen3_next", experts_implementation="eager"), tokens(1, 5)
    with hf.enable("qwen3_next") as enabled:
        assert "calls" not in str(enabled)
        model(x)
        model.double()(x)
        model.float()
    text = str(enabled)
    assert text.startswith("fastweight.hf: disabled") and "qwen3_next.torch_chunk_gated_delta_rule <- gated_delta_rule" in text
    assert "Qwen3NextGatedDeltaNet.forward <- " in text and "(3 calls; 3 to stock: dtype torch.float64)" in text
    assert "softmax attention" in text


@torch.no_grad()
def test_functions_alone_when_the_forward_is_another(monkeypatch):
    """A layer whose forward is not one that ours was compared with keeps it; the functions that it calls are ours."""
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    theirs = module.Qwen3NextGatedDeltaNet.forward

    def forward(self, *args, **kwargs):
        return theirs(self, *args, **kwargs)

    model, x = shared_model("qwen3_next"), tokens(2, 20)
    expected = model(x[:, :19])
    stock = model(x[:, 19:], cache=expected.cache)
    monkeypatch.setattr(module.Qwen3NextGatedDeltaNet, "forward", forward)
    with hf.enable("qwen3_next") as enabled:
        first = model(x[:, :19])
        found = model(x[:, 19:], cache=first.cache)
    assert module.Qwen3NextGatedDeltaNet.forward is forward
    assert any("Qwen3NextGatedDeltaNet.forward" in what for what, _ in enabled.left)
    ran = {place.rsplit(".", 1)[1]: count for place, count in enabled.calls().items()}
    for function in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule", "causal_conv1d_fn", "causal_conv1d_update"):
        assert ran[function] == {"fastweight": 3}, function
    assert distance(found.logits, stock.logits) < 1e-5 and distance(first.logits, expected.logits) < 1e-5


@pytest.mark.parametrize("function", ["torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"])
@torch.no_grad()
def test_functions_do_not_write_what_they_are_given(function):
    """The stock functions leave initial_state alone, and so do ours; any value head ratio; K != V."""
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    generator = seeded(3)
    q, k = torch.randn(2, 2, 7, 3, 16, generator=generator)
    v, state = torch.randn(2, 7, 6, 24, generator=generator), torch.randn(2, 6, 16, 24, generator=generator)
    g, beta = -torch.rand(2, 7, 6, generator=generator), torch.rand(2, 7, 6, generator=generator)
    arguments = {"g": g, "beta": beta, "initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, before = getattr(module, function)(q, k, v, **arguments), state.clone()
    with hf.enable("qwen3_next"):
        found = getattr(module, function)(q, k, v, **arguments)
        assert getattr(module, function)(q, k, v, g=g, beta=beta)[1] is None
    assert torch.equal(state, before)
    assert distance(found[0], expected[0]) < 1e-5 and distance(found[1], expected[1]) < 1e-5


@torch.no_grad()
def test_a_window_of_the_convolution_is_written_as_transformers_does():
    """x of 1, 2 and 6 tokens on a window of 4."""
    module = importlib.import_module("transformers.models.olmo_hybrid.modeling_olmo_hybrid")
    generator = seeded(4)
    weight, bias = torch.randn(10, 4, generator=generator), torch.randn(10, generator=generator)
    for tokens_ in (1, 2, 6):
        x, window = torch.randn(3, 10, tokens_, generator=generator), torch.randn(3, 10, 4, generator=generator)
        mine = window.clone()
        expected = module.causal_conv1d_update(x, window, weight, bias, "silu")
        with hf.enable("olmo_hybrid"):
            found = module.causal_conv1d_update(x, mine, weight, bias, "silu")
        assert torch.equal(mine, window) and distance(found, expected) < 1e-5


def test_tensors_of_other_devices_are_refused():
    from fastweight.hf._places import refusal

    assert refusal(torch.zeros(2, device=DEVICE)) is None and refusal(torch.zeros(2, device="meta")) == "tensors on the device meta"


@torch.no_grad()
def test_deprecated_names_reach_the_stock_forward():
    model = random_model("qwen3_5", seed=8)
    hidden, cache = torch.randn(1, 4, 48), transformers.DynamicCache(config=model.config)
    expected = model.model.layers[0].linear_attn(hidden, cache_params=transformers.DynamicCache(config=model.config))
    with hf.enable("qwen3_5"):
        assert distance(model.model.layers[0].linear_attn(hidden, cache_params=cache), expected) < 1e-5
    assert cache.layers[0].has_previous_state[0]
