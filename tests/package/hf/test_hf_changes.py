# SPDX-License-Identifier: Apache-2.0
"""What changes between two tokens beside weights: settings of a norm, tensors of a cache, dtypes of projections."""
import copy

import pytest
from hf_models import MODELS, distance, hf, random_model, tokens, torch

FP32 = 1e-5  # as in test_hf_equal
HALF = 1e-2  # a gate rounded to 11 bits by both sides, but by each at its place


def layer_of(model):
    return next(module for module in model.modules() if hasattr(module, "conv1d"))


def decode(model, before):
    """Logits of ten tokens after a prompt of four; before(layer, its part of the cache, t) comes first."""
    x, layer = tokens(2, 14), layer_of(model)
    cache, logits = model(x[:, :4]).cache, []
    for t in range(4, 14):
        before(layer, cache.layers[layer.layer_idx], t)
        logits.append(model(x[:, t:t + 1], cache=cache).logits)
    return torch.cat(logits, 1)


def assert_same(name, before, allowed=FP32):
    model = random_model(name)
    expected = decode(copy.deepcopy(model), before)
    with hf.enable(name):
        assert distance(decode(model, before), expected) < allowed


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_settings_of_the_norm(name):
    def before(layer, store, t):
        norm = getattr(layer, "norm", None) or layer.o_norm
        if t == 7:
            norm.variance_epsilon = 0.5
        elif t == 10:
            norm.variance_epsilon = 1e-3

    assert_same(name, before)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_tensors_of_the_cache(name):
    """Written in place, replaced, and given other memory under the same object."""
    def before(layer, store, t):
        if t == 6:
            store.recurrent_states[0].mul_(0.5)
            store.conv_states[0].zero_()
        elif t == 8:
            store.recurrent_states[0] = 2 * store.recurrent_states[0]
        elif t == 10:
            store.conv_states[0].data = 3 * store.conv_states[0].data
            store.recurrent_states[0].data = store.recurrent_states[0].data.mT.contiguous().mT

    assert_same(name, before)


class Other(torch.nn.Module):
    """A projection whose result has another dtype at every other pair of tokens."""

    def __init__(self, inner, dtype):
        super().__init__()
        self.inner, self.dtype, self.is_on = inner, dtype, False

    def forward(self, x):
        y = self.inner(x)
        return y.to(self.dtype) if self.is_on else y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("name", "projection"), [("qwen3_next", "in_proj_ba"), ("qwen3_5", "in_proj_a"), ("qwen3_5", "in_proj_b"), ("qwen3_5", "in_proj_z"),
                                                  ("olmo_hybrid", "a_proj"), ("olmo_hybrid", "g_proj"), ("kimi_linear", "b_proj")])
@torch.no_grad()
def test_a_projection_of_another_dtype(name, projection, dtype):
    def before(layer, store, t):
        if t == 4:
            setattr(layer, projection, Other(getattr(layer, projection), dtype))
        getattr(layer, projection).is_on = t // 2 % 2 == 1

    assert_same(name, before, {torch.float64: FP32, torch.float16: HALF, torch.bfloat16: 8 * HALF}[dtype])
