# SPDX-License-Identifier: Apache-2.0
"""A training step with enable() has the unpatched model's loss and gradients.

FLOAT32: the largest difference of a parameter's gradient over its largest entry, 1e-4: both models' float32 errors pass through the
backward of four layers, which was seen to give 2e-5; a gradient without one term of a gate or a norm is off by more than 1e-2.
"""
import pytest
from hf_models import MODELS, assert_all_ran, distance, hf, random_model, tokens, torch

FLOAT32 = 1e-4
each_model = pytest.mark.parametrize("name", MODELS)


def step(model, x, **arguments):
    """Loss and gradients by name."""
    model.zero_grad()
    loss = model(x, labels=x, use_cache=False, **arguments).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(found, expected):
    assert abs(float(found[0] - expected[0])) < 1e-6 * float(expected[0]) and set(found[1]) == set(expected[1])
    for name, gradient in expected[1].items():
        assert distance(found[1][name], gradient) < FLOAT32, name


@each_model
def test_training_step(name):
    model, x = random_model(name), tokens(2, 70)
    model.train()
    expected = step(model, x)
    with hf.enable(name) as enabled:
        found = step(model, x)
        assert_all_ran(enabled, name)
    assert any("A_log" in key for key in expected[1]) and any("conv1d" in key for key in expected[1])
    assert_same(found, expected)


@each_model
def test_activation_checkpointing(name):
    model, x = random_model(name), tokens(1, 20)
    model.train()
    expected = step(model, x)
    model.gradient_checkpointing_enable()
    with hf.enable(name):
        assert_same(step(model, x), expected)


def test_a_packed_training_step_is_the_sum_of_its_sequences():
    """Sequences of 5 and 9, told apart by positions: each alone, its loss weighted by its targets."""
    model, x = random_model("qwen3_next"), tokens(1, 14)
    model.train()
    positions = torch.cat((torch.arange(5), torch.arange(9)))[None]
    labels = x.clone()
    labels[0, 5] = -100  # the first token of the second sequence is nobody's target
    with hf.enable("qwen3_next"):
        model.zero_grad()
        model(x, labels=labels, position_ids=positions, use_cache=False).loss.backward()
        found = {key: parameter.grad.clone() for key, parameter in model.named_parameters()}
        model.zero_grad()
        for start, stop in ((0, 5), (5, 14)):
            (model(x[:, start:stop], labels=x[:, start:stop], use_cache=False).loss * (stop - start - 1) / 12).backward()
    for key, parameter in model.named_parameters():
        assert distance(found[key], parameter.grad) < FLOAT32, key


def test_gradients_through_a_cache_fail_as_the_stock_model_does():
    """The cache is written in place: a backward through two steps is refused by torch, not wrong."""
    model, x = random_model("qwen3_5"), tokens(1, 6)
    for enable in (False, True):
        with hf.enable("qwen3_5") if enable else torch.enable_grad():
            first = model(x[:, :4], use_cache=True)
            model(x[:, 4:5], cache=first.cache)
            last = model(x[:, 5:], cache=first.cache)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                last.logits.sum().backward()


def test_decoding_without_no_grad():
    """Logits and states of the stock model when gradients are recorded and never asked for."""
    model, x = random_model("kimi_linear"), tokens(2, 12)
    expected = model(x[:, :9], use_cache=True)
    expected = [model(x[:, t:t + 1], cache=expected.cache).logits for t in range(9, 12)]
    with hf.enable("kimi_linear"):
        first = model(x[:, :9], use_cache=True)
        found = [model(x[:, t:t + 1], cache=first.cache).logits for t in range(9, 12)]
    assert distance(torch.cat(found), torch.cat(expected)) < 1e-5
