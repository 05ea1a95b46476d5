# SPDX-License-Identifier: Apache-2.0
"""Parameters: names and shapes are fla's, starts are those of the papers, checkpoints load strictly."""
import copy
import json
import pickle
from pathlib import Path

import pytest

from nn_helpers import CASES, fnn, make, torch
from fastweight.torch.nn.rwkv7 import low_rank

FLA = json.loads((Path(__file__).parent / "fla_parameters.json").read_text(encoding="utf-8"))


def layer(name):
    cls, arguments = CASES[name]
    return getattr(fnn, cls)(**arguments)


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes_are_those_of_fla(name):
    assert {key: list(value.shape) for key, value in layer(name).state_dict().items()} == FLA[name]


@pytest.mark.parametrize("name", CASES)
def test_checkpoint_of_fla_loads_strictly_and_comes_back(name):
    weights = {key: torch.randn(shape) for key, shape in FLA[name].items()}
    found = layer(name)
    found.load_state_dict(weights, strict=True)
    assert all(torch.equal(value, weights[key]) for key, value in found.state_dict().items())


def test_every_case_has_data():
    assert set(FLA) == set(CASES)


def test_decay_starts_as_in_the_papers():
    torch.manual_seed(0)
    wide = fnn.GatedDeltaNet(hidden_size=8, head_dim=1, num_heads=4000, use_gate=False, use_short_conv=False, expand_v=1)
    rate = wide.A_log.exp()
    assert 0 < rate.min() and rate.max() <= 16 and abs(rate.mean() - 8) < 0.4  # U(0, 16): sd 4.6 over 4000, 5 standard errors
    dt = torch.nn.functional.softplus(wide.dt_bias)
    assert 0.00099 < dt.min() and dt.max() < 0.101
    middle = dt.log().mean()
    assert abs(middle - (torch.tensor(0.001).log() + torch.tensor(0.1).log()) / 2) < 0.11  # log-uniform: sd 1.33, 5 standard errors
    kda = fnn.KimiDeltaAttention(hidden_size=8, head_dim=1, num_heads=4000)
    assert 1 <= kda.A_log.exp().min() and abs(kda.A_log.exp().mean() - 8.5) < 0.4
    assert kda.dt_bias.shape == (4000,)
    assert not fnn.KimiDeltaAttention(hidden_size=8, head_dim=4, num_heads=2, safe_gate=True, lower_bound=-5).A_log.any()
    assert fnn.Comba(hidden_size=8, head_dim=4, num_heads=2, correction_factor=0.02).D.tolist() == pytest.approx([0.02, 0.02])
    for name in ("A_log", "dt_bias"):
        assert getattr(wide, name)._no_weight_decay


def test_convolution_and_norms_start_as_torch_and_one():
    torch.manual_seed(0)
    conv = fnn.ShortConvolution(5000, 4, bias=True)
    assert conv.weight.abs().max() <= 0.5 and 0.49 < conv.weight.abs().max() and conv.bias.abs().max() <= 0.5
    assert (fnn.RMSNorm(7).weight == 1).all() and (fnn.FusedRMSNormGated(7).weight == 1).all()
    assert fnn.RMSNorm(7, elementwise_affine=False).weight is None and (fnn.RMSNorm(7, bias=True).bias == 0).all()


def test_rwkv7_starts_as_the_authors_do():
    torch.manual_seed(0)
    size, layers, index = 64, 4, 2
    found = fnn.RWKV7Attention(hidden_size=size, head_dim=16, layer_idx=index, num_hidden_layers=layers)
    i = torch.arange(size) / size
    early = 1 - index / layers
    assert torch.allclose(found.x_r[0, 0], 1 - i ** (0.2 * early)) and torch.allclose(found.x_w[0, 0], 1 - i ** (0.9 * early))
    place = torch.arange(size) / (size - 1)
    inside = (torch.arange(size) % 16 - 7.5) / 7.5
    decay = -6 + 6 * place ** (1 + (index / (layers - 1)) ** 0.3) + 0.5 + 2.5 * inside * inside.abs()
    assert torch.allclose(found.w_lora.lora[2].bias, decay, atol=1e-5)
    assert torch.allclose(found.v_lora.lora[2].bias, 0.73 - 0.4 * (place - 0.5), atol=1e-6)
    assert (found.k_a == 1.02).all() and (found.r_k == -0.04).all() and not found.o_proj.weight.any()
    assert torch.allclose(found.g_norm.weight, torch.full((size,), 0.75 ** 0.7))
    assert torch.allclose(found.k_proj.weight @ found.k_proj.weight.T, 0.01 * torch.eye(size), atol=1e-5)
    assert found.decay_low_rank_dim == 32 and [low_rank(2048, times) for times in (2.5, 1.7, 5)] == [128, 64, 224]


@pytest.mark.parametrize("name", CASES)
def test_copies_and_pickles_hold_the_same(name):
    found = make(name, layer_idx=CASES[name][1].get("layer_idx", 0))
    for other in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        pairs = list(zip(found.state_dict().items(), other.state_dict().items()))
        assert pairs and all(a == b and torch.equal(x, y) and x.data_ptr() != y.data_ptr() for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("make_one, sentence", [
    (lambda: fnn.GatedDeltaNet(num_heads=2, num_v_heads=5), r"GatedDeltaNet: num_v_heads is 5, allowed multiples of num_heads, 2"),
    (lambda: fnn.GatedDeltaNet(head_dim=3, expand_v=1.5), r"GatedDeltaNet: expand_v is 1.5, allowed what makes head_dim \* expand_v whole, not 4.5"),
    (lambda: fnn.DeltaNet(hidden_size=30, num_heads=4), r"DeltaNet: expand_k makes 30 channels, allowed multiples of num_heads, 4"),
    (lambda: fnn.DeltaNet(qk_norm="l1"), r"DeltaNet: qk_norm is 'l1', allowed 'l2', 'sum'"),
    (lambda: fnn.KimiDeltaAttention(safe_gate=True), r"KimiDeltaAttention: lower_bound is None beside safe_gate"),
    (lambda: fnn.GatedLinearAttention(num_heads=4, num_kv_heads=3), r"GatedLinearAttention: num_kv_heads is 3, allowed divisors of num_heads, 4"),
    (lambda: fnn.MultiScaleRetention(mode="scan"), r"MultiScaleRetention: mode is 'scan', allowed \['chunk', 'fused_chunk', 'parallel', 'fused_recurrent'\]"),
    (lambda: fnn.Attention(num_heads=4, num_kv_heads=3), r"Attention: num_kv_heads is 3, allowed divisors of num_heads, 4"),
    (lambda: fnn.ShortConvolution(4, 4, activation="gelu"), r"ShortConvolution: activation is 'gelu'"),
    (lambda: fnn.FusedRMSNormGated(4, activation="gelu"), r"FusedRMSNormGated: activation is 'gelu'"),
    (lambda: fnn.RWKV7Attention(hidden_size=100, head_dim=64), r"RWKV7Attention: hidden_size is 100, allowed multiples of head_dim, 64"),
])
def test_wrong_arguments_are_named(make_one, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_one()
