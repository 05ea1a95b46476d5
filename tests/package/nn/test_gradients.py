# SPDX-License-Identifier: Apache-2.0
"""Gradients of every layer against autograd through its plain form; compile, checkpointing, cached segments."""
import warnings

import pytest

from nn_helpers import CASES, DEVICE, distance, first_values, fnn, inputs, make, seeded, torch
from plain_layers import plain
from torch.utils.checkpoint import checkpoint


def index_of(name):
    return CASES[name][1].get("layer_idx", 0)


def gradients(layer, x, weight, **first):
    x = x.clone().requires_grad_()
    found = torch.autograd.grad((layer(x, **first)[0] * weight).sum(), [x, *layer.parameters()])
    return dict(zip(["x", *(key for key, _ in layer.named_parameters())], found))


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_the_plain_form(name):
    layer, x = make(name, layer_idx=index_of(name)), inputs(2, 37)
    weight = torch.randn(2, 37, 32, generator=seeded(3))
    exact = {key: value.detach().double().requires_grad_() for key, value in layer.named_parameters()}
    y = x.double().requires_grad_()
    first = first_values(name, x)
    o = plain(name, layer, exact, y, **{key: value.double() for key, value in first.items()})
    wanted = dict(zip(["x", *exact], torch.autograd.grad((o * weight).sum(), [y, *exact.values()])))
    found = gradients(layer, x, weight, **first)
    assert found.keys() == wanted.keys()
    scale = max(value.square().mean().sqrt().item() for value in wanted.values())
    for key, value in wanted.items():
        # three times the forward's bound (docs/numbers.md: gradients 3x); beside the largest, what is near 0 counts absolutely
        error = (found[key].double() - value).square().mean().sqrt().item()
        assert found[key].dtype == torch.float32 and error < 3e-5 * value.square().mean().sqrt().item() + 1e-7 * scale, key
    low, low_x = layer.bfloat16(), x.bfloat16()
    rough = gradients(low, low_x, weight.bfloat16(), **{key: value.bfloat16() for key, value in first.items()})
    for key, value in wanted.items():
        assert rough[key].dtype == torch.bfloat16 and torch.isfinite(rough[key]).all(), key
        if value.square().mean().sqrt() > 0.01 * scale and value.numel() > 8:
            # the forward's 0.06 times 3; Comba reads with q - D p, whose parts are about twice as long as their difference
            assert distance(rough[key], value) < (0.36 if "comba" in name else 0.18), key


@pytest.mark.parametrize("name", ["gated_delta_net", "attention_grouped", "rwkv7_first"])
def test_packed_and_padded_gradients_equal_those_apart(name):
    layer, lengths = make(name, layer_idx=index_of(name)), [9, 20]
    parts = [inputs(1, n, seed=30 + n) for n in lengths]
    weights = [torch.randn(1, n, 32, generator=seeded(n)) for n in lengths]
    apart = [gradients(layer, x, w) for x, w in zip(parts, weights)]
    packed = gradients(layer, torch.cat(parts, 1), torch.cat(weights, 1), cu_seqlens=torch.tensor([0, 9, 29]))
    assert distance(packed["x"], torch.cat([a["x"] for a in apart], 1)) < 1e-5
    x, w, mask = torch.zeros(2, 20, 32), torch.zeros(2, 20, 32), torch.zeros(2, 20)
    for i, n in enumerate(lengths):
        x[i, 20 - n:], w[i, 20 - n:], mask[i, 20 - n:] = parts[i][0], weights[i][0], 1
    padded = gradients(layer, x, w, attention_mask=mask)
    for key in packed:
        if key != "x":
            total = sum(a[key] for a in apart)
            assert distance(packed[key], total) < 1e-5 and distance(padded[key], total) < 1e-5, key


@pytest.mark.parametrize("name", [name for name in CASES if name != "rwkv7_later"])
def test_segments_with_gradients_equal_segments_without(name):
    """A cache continued while gradients are recorded: the same values, gradients within the segment alone."""
    layer, x = make(name, layer_idx=index_of(name)), inputs(2, 40).requires_grad_()
    caches = fnn.Cache(), fnn.Cache()
    recorded = [layer(x[:, a:b], past_key_values=caches[0], use_cache=True)[0] for a, b in ((0, 12), (12, 29), (29, 40))]
    with torch.no_grad():
        wanted = [layer(x[:, a:b], past_key_values=caches[1], use_cache=True)[0] for a, b in ((0, 12), (12, 29), (29, 40))]
    for a, b in zip(recorded, wanted):
        assert distance(a, b) < 5e-6
    (dx,) = torch.autograd.grad(recorded[2].square().sum(), [x])
    assert not dx[:, :29].any() and dx[:, 29:].abs().amax(-1).min() > 0
    for a, b in zip(caches[0].layers, caches[1].layers):
        assert a.keys() == b.keys()
        for key in a:
            assert not a[key].requires_grad and distance(a[key].double() + 1e-30, b[key].double() + 1e-30) < 5e-6, key


def test_segment_gradients_of_attention_equal_those_of_one_pass():
    """The last segment's own gradient, when the past is data."""
    for name in ("attention", "attention_grouped"):
        layer, x = make(name), inputs(2, 30)
        cache = fnn.Cache()
        with torch.no_grad():
            layer(x[:, :21], past_key_values=cache, use_cache=True)
        last = x[:, 21:].clone().requires_grad_()
        (found,) = torch.autograd.grad(layer(last, past_key_values=cache)[0].square().sum(), [last])
        whole = torch.cat([x[:, :21], last], 1)
        (wanted,) = torch.autograd.grad(layer(whole)[0][:, 21:].square().sum(), [last])
        assert distance(found, wanted) < 1e-5


@pytest.mark.parametrize("name", ["gated_delta_net"])
def test_compiled_whole_equals_eager(name):
    layer, x = make(name), inputs(1, 20)
    weight = torch.randn(1, 20, 32, generator=seeded(4))
    wanted = layer(x)[0]
    eager = gradients(layer, x, weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(lambda y: layer(y)[0], fullgraph=True, backend="aot_eager")
        assert distance(compiled(x), wanted) < 3e-6
        y = x.clone().requires_grad_()
        found = torch.autograd.grad((compiled(y) * weight).sum(), [y, *layer.parameters()])
    for key, value in zip(eager, found):
        assert distance(value, eager[key]) < 1e-5, key


@pytest.mark.parametrize("name", ["kda", "gla", "gated_delta_product", "rwkv7_first"])
def test_compiled_whole_under_a_device_of_the_callers(name):
    """torch.device as a context (and torch.set_default_device) is a mode, under which torch.compile sees every call of torch through it."""
    layer, x = make(name, layer_idx=index_of(name)), inputs(1, 20)
    torch._dynamo.reset()
    with torch.device(DEVICE):
        found = torch.compile(lambda y: layer(y)[0], fullgraph=True, backend="aot_eager")(x)
    assert distance(found, layer(x)[0]) < 3e-6


@pytest.mark.parametrize("name", ["kda", "gla", "attention", "gated_delta_product"])
def test_checkpointed_gradients_are_the_same(name):
    layer, x = make(name), inputs(2, 33)
    found = []
    for run in (lambda y: layer(y)[0], lambda y: checkpoint(lambda z: layer(z)[0], y, use_reentrant=False)):
        y = x.clone().requires_grad_()
        found.append(torch.autograd.grad(run(y).square().sum(), [y, *layer.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.parametrize("name", CASES)
def test_autocast_trains_float32_layers(name):
    layer, x = make(name, layer_idx=index_of(name)), inputs(2, 20)
    weight = torch.randn(2, 20, 32, generator=seeded(5))
    first = first_values(name, x)
    wanted = gradients(layer, x, weight, **first)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        y = x.clone().requires_grad_()
        o = layer(y, **first)[0]
    found = dict(zip(wanted, torch.autograd.grad((o.float() * weight).sum(), [y, *layer.parameters()])))
    scale = max(value.square().mean().sqrt().item() for value in wanted.values())
    for key, value in wanted.items():
        assert found[key].dtype == torch.float32 and torch.isfinite(found[key]).all(), key
        if value.square().mean().sqrt() > 0.01 * scale and value.numel() > 8:
            assert distance(found[key], value) < (0.36 if "comba" in name else 0.18), key  # as in bfloat16


def test_a_second_derivative_is_refused():
    layer, x = make("gated_delta_net"), inputs(1, 5).requires_grad_()
    (dx,) = torch.autograd.grad(layer(x)[0].square().sum(), [x], create_graph=True)
    with pytest.raises(NotImplementedError, match="a second derivative is asked for"):
        dx.sum().backward()
