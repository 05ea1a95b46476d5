# SPDX-License-Identifier: Apache-2.0
"""Forward of every layer: against its plain form, and against itself packed, padded, cut and token by token."""
import pytest

from nn_helpers import CASES, DEVICE, IS_CUDA, distance, first_values, fnn, holds, inputs, make, torch
from plain_layers import plain

# float32 against float64 of the same numbers. Sums of up to 64 products lose at most about sqrt(64) * 2^-24 = 5e-7 of their
# RMS, a layer chains some ten of them and the operator's own bound (docs/numbers.md) stays below that: 1e-5.
SINGLE = 1e-5
# Two float32 computations that differ only in the order of their sums.
REORDERED = 3e-6
CACHED = [name for name in CASES if name != "rwkv7_later"]


def index_of(name):
    return CASES[name][1].get("layer_idx", 0)


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("name", CASES)
def test_layer_equals_its_plain_form(name):
    layer, x = make(name, layer_idx=index_of(name)), inputs(2, 70)
    exact = {key: value.double() for key, value in layer.state_dict().items()}
    wanted = plain(name, layer, exact, x.double(), **{k: v.double() for k, v in first_values(name, x).items()})
    found = layer(x, **first_values(name, x))
    assert found[1] is None and found[2] is None and found[0].dtype == torch.float32
    assert wanted.square().mean() > 1e-4 and distance(found[0], wanted) < SINGLE
    if name != "rwkv7_later" and not IS_CUDA:  # no fp64 there
        double = layer.double()(x.double())[0]
        assert distance(double, wanted) < 1e-9


@pytest.mark.parametrize("name", [n for n in CASES if "attention" not in n and "rwkv7" not in n])
def test_modes_agree(name):
    layer, x = make(name), inputs(1, 40)
    wanted = layer(x)[0]
    layer.mode = "fused_recurrent"
    assert distance(layer(x)[0], wanted) < REORDERED


@pytest.mark.parametrize("name", CACHED)
def test_token_by_token_equals_prefill(name):
    layer, x = make(name, layer_idx=index_of(name)), inputs(2, 40)
    wanted = layer(x)[0]
    for cuts in (list(range(41)), [0, 24, 25, 26, 40], [0, 3, 20, 20, 40]):
        cache = fnn.Cache()
        parts = [layer(x[:, a:b], past_key_values=cache, use_cache=True)[0] for a, b in zip(cuts, cuts[1:])]
        assert distance(torch.cat(parts, 1), wanted) < REORDERED
        assert cache.get_seq_length(index_of(name)) == 40 and cache.lengths.tolist() == [40, 40]


@pytest.mark.parametrize("name", CASES)
def test_packed_equals_apart(name):
    layer, lengths = make(name, layer_idx=index_of(name)), [5, 0, 33, 1, 17]
    parts = [inputs(1, n, seed=7 + i) for i, n in enumerate(lengths)]
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    apart = [layer(x, **first_values(name, x))[0] for x in parts if x.shape[1]]
    x = torch.cat(parts, 1)
    first = {k: torch.cat([first_values(name, y)[k] for y in parts], 1) for k in first_values(name, x)}
    assert distance(layer(x, cu_seqlens=cu_seqlens, **first)[0], torch.cat(apart, 1)) < REORDERED


@pytest.mark.parametrize("name", CASES)
def test_left_padding_equals_none(name):
    layer, lengths = make(name, layer_idx=index_of(name)), [30, 11, 1]
    parts = [inputs(1, n, seed=17 + i) for i, n in enumerate(lengths)]
    x, mask = torch.full((3, 30, 32), 1e3), torch.zeros(3, 30, dtype=torch.int64)
    first = {k: torch.zeros(3, 30, 32) for k in first_values(name, x)}
    for i, y in enumerate(parts):
        x[i, 30 - y.shape[1]:], mask[i, 30 - y.shape[1]:] = y[0], 1
        for key in first:
            first[key][i, 30 - y.shape[1]:] = first_values(name, y)[key][0]
    cache = fnn.Cache()
    found = layer(x, attention_mask=mask, past_key_values=cache, use_cache=True, **first)
    later = inputs(3, 6, seed=5)
    more = torch.cat([mask, torch.ones(3, 6, dtype=torch.int64)], 1)
    after = [layer(later[:, t:t + 1], attention_mask=more[:, :31 + t], past_key_values=cache, use_cache=True, **first_values(name, later[:, t:t + 1]))[0]
             for t in range(6)]
    for i, y in enumerate(parts):
        whole = torch.cat([y, later[i:i + 1]], 1)
        first_whole = {k: torch.cat([first_values(name, y)[k], first_values(name, later[i:i + 1])[k]], 1) for k in first}
        wanted = layer(whole, **first_whole)[0][0]
        assert distance(torch.cat([found[0][i, 30 - y.shape[1]:], torch.cat(after, 1)[i]]), wanted) < REORDERED
        assert not found[0][i, :30 - y.shape[1]].any()
    assert cache.lengths.tolist() == [36, 17, 7]


@pytest.mark.parametrize("name", CACHED)
def test_a_cache_without_use_cache_is_only_read(name):
    layer, x = make(name, layer_idx=index_of(name)), inputs(2, 24)
    cache = fnn.Cache()
    layer(x[:, :20], past_key_values=cache, use_cache=True)
    before = cache.snapshot()
    a, _, same, *_ = layer(x[:, 20:], past_key_values=cache)
    assert same is cache and cache.get_seq_length(index_of(name)) == 20
    assert holds(before.layers, cache.layers)
    assert distance(a, layer(x)[0][:, 20:]) < REORDERED


@pytest.mark.parametrize("name", CASES)
def test_fresh_layers_are_finite_for_zeros_and_for_large_inputs(name):
    cls, arguments = CASES[name]
    torch.manual_seed(0)
    layer = getattr(fnn, cls)(**{"layer_idx": 0, **arguments})
    for scale in (0.0, 1.0, 1e4):
        x = (inputs(2, 70) * scale).requires_grad_()
        with torch.enable_grad():
            o = layer(x, **first_values(name, x.detach()))[0]
            gradients = torch.autograd.grad(o.square().sum(), [x, *layer.parameters()])
        assert torch.isfinite(o).all() and all(torch.isfinite(g).all() for g in gradients)


def test_a_mask_of_wrong_shape_or_a_cache_of_other_size_is_refused():
    layer, x = make("kda"), inputs(2, 4)
    with pytest.raises(ValueError, match=r"KimiDeltaAttention: attention_mask has shape \[2, 3\], allowed \[2, 4 or more\]"):
        layer(x, attention_mask=torch.ones(2, 3))
    with pytest.raises(TypeError, match="KimiDeltaAttention: past_key_values is of type list, allowed fastweight.torch.nn.Cache"):
        layer(x, past_key_values=[])
    _, _, cache = layer(x, use_cache=True)
    with pytest.raises(ValueError, match="KimiDeltaAttention: past_key_values holds 2 sequences, allowed 1 as in the call"):
        layer(x[:1], past_key_values=cache, use_cache=True)
    with pytest.raises(ValueError, match="KimiDeltaAttention: hidden_states has batch 2 beside cu_seqlens, allowed 1"):
        layer(x, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="KimiDeltaAttention: layer_idx is None, allowed 0 or more with a cache"):
        make("kda", layer_idx=None)(x, use_cache=True)
    with pytest.raises(ValueError, match="RWKV7Attention: v_first is None in layer 1, allowed the one that layer 0 returned"):
        make("rwkv7_later", layer_idx=1)(x)


def test_attention_forgets_outside_its_window_and_its_ring_stays_small():
    layer, x = make("attention_grouped"), inputs(1, 60)
    other = x.clone()
    other[0, 20] += 1
    moved = (layer(x)[0] - layer(other)[0]).abs().amax(-1)[0] > 0
    assert moved[20:25].all() and not moved[25:].any() and not moved[:20].any()
    cache = fnn.Cache()
    layer(x, past_key_values=cache, use_cache=True)
    assert cache.layer(0)["keys"].shape == (1, 5, 2, 8)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16_is_near(name):
    layer, x = make(name, layer_idx=index_of(name)), inputs(2, 40)
    wanted = layer(x, **first_values(name, x))[0]
    layer, low = layer.bfloat16(), x.bfloat16()
    found = layer(low, **first_values(name, low))[0]
    # bf16 keeps 2^-9 = 0.2 %; weights, inputs and some ten intermediate tensors are rounded: at most 0.2 % * 10 * 3
    assert found.dtype == torch.bfloat16 and distance(found, wanted) < 0.06
    cache = fnn.Cache()
    if name != "rwkv7_later":
        parts = [layer(low[:, t:t + 1], past_key_values=cache, use_cache=True)[0] for t in range(40)]
        assert distance(torch.cat(parts, 1), wanted) < 0.06


def test_autocast_takes_float32_layers():
    x = inputs(2, 20)
    for name in ("gated_delta_net", "kda", "comba", "gla", "rwkv7_first", "attention_grouped", "gdn2"):
        layer = make(name, layer_idx=index_of(name))
        wanted = layer(x)[0]
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            assert distance(layer(x)[0], wanted) < 0.06
