# SPDX-License-Identifier: Apache-2.0
"""The operations beside the family against the fp64 oracle, through fastweight.ops."""
import numpy as np
import pytest

from package_calls import fastweight, needs_torch, numpy_only, ops, torch

from oracle import gates, neighbours

pytestmark = numpy_only

# As for the rows: at most a few hundred terms a sum in fp64, and two libraries' exp and log of a few round-offs.
AGREE = 1e-12
RNG = np.random.default_rng(1)
X = RNG.standard_normal((2, 9, 6))
WEIGHT, BIAS = RNG.standard_normal((6, 4)), RNG.standard_normal(6)
LOGITS = 3 * RNG.standard_normal((2, 5, 3, 4))


def same(found, expected):
    assert found.shape == expected.shape and found.dtype == np.float64
    assert np.abs(found - expected).max(initial=0) <= AGREE * np.abs(expected).max(initial=0)


@pytest.mark.parametrize("activation", ("none", "silu"))
def test_short_conv(activation):
    start = RNG.standard_normal((2, 6, 3))
    y, final = ops.short_conv(X, WEIGHT, bias=BIAS, initial_state=start, activation=activation, output_final_state=True)
    expected = neighbours.short_conv(X, WEIGHT, BIAS, start, None, activation)
    same(y, expected["y"])
    same(final, expected["final_state"])
    assert ops.short_conv(X, WEIGHT)[1] is None


def test_short_conv_packed():
    cu = np.array([0, 4, 4, 9])
    y, final = ops.short_conv(X[:1], WEIGHT, cu_seqlens=cu, output_final_state=True)
    expected = neighbours.short_conv(X[:1], WEIGHT, cu_seqlens=cu)
    same(y, expected["y"])
    same(final, expected["final_state"])


def test_short_conv_step_is_forward():
    y, final = ops.short_conv(X, WEIGHT, bias=BIAS, activation="silu", output_final_state=True)
    state = np.zeros((2, 6, 3))
    found = np.concatenate([ops.short_conv_step(X[:, t:t + 1], WEIGHT, bias=BIAS, activation="silu", state=state) for t in range(9)], 1)
    assert found.tobytes() == y.tobytes() and state.tobytes() == final.tobytes()


def test_norms():
    same(ops.l2_norm(X), neighbours.norm("l2", X))
    same(ops.rms_norm(X), neighbours.norm("rms", X))
    weight, gate = RNG.standard_normal(6), RNG.standard_normal(X.shape)
    for activation in ("silu", "sigmoid"):
        same(ops.rms_norm(X, weight, gate=gate, gate_activation=activation, eps=1e-5),
             neighbours.norm("rms", X, weight, gate, activation, 1e-5))
    with pytest.raises(ValueError, match="^norm: gate_activation"):
        ops.rms_norm(X, gate=gate)


@pytest.mark.parametrize("kind, name", (("softplus", "softplus"), ("log_sigmoid", "log_sigmoid"), ("bounded", "bounded"), ("rwkv7", "rwkv7"),
                                        ("beta", "sigmoid"), ("beta_twice", "sigmoid_twice")))
def test_gate_activations(kind, name):
    parameters = {}
    if kind in ("softplus", "bounded"):
        parameters = {"a_log": RNG.standard_normal(3), "dt_bias": RNG.standard_normal((3, 4))}
    same(ops.gate_activation(LOGITS, kind=kind, **parameters), gates.gate(name, LOGITS, **parameters))
    narrow = ops.gate_activation(LOGITS.astype(np.float16), kind=kind)
    assert narrow.dtype == np.float32


@pytest.mark.parametrize("kind", ("identity", "elu_plus_one", "silu", "relu"))
def test_feature_maps(kind):
    same(ops.feature_map(X, kind=kind), gates.feature_map(kind, X))


@pytest.mark.parametrize("options", ({}, {"window": 3}, {"rope_theta": 1e4, "scale": 0.3}))
def test_attention(options):
    q, k, v = RNG.standard_normal((2, 7, 4, 6)), RNG.standard_normal((2, 7, 2, 6)), RNG.standard_normal((2, 7, 2, 5))
    same(ops.attention(q, k, v, **options), neighbours.attention(q, k, v, **options))
    cu = np.array([0, 3, 7])
    same(ops.attention(q[:1], k[:1], v[:1], cu_seqlens=cu, **options), neighbours.attention(q[:1], k[:1], v[:1], cu_seqlens=cu, **options))


def test_attention_step_is_forward():
    q, k, v = (RNG.standard_normal((2, 6, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    whole = ops.attention(q, k, v, rope_theta=1e4)
    k_cache, v_cache = np.zeros((2, 8, 2, 8), np.float32), np.zeros((2, 8, 2, 8), np.float32)
    lengths = np.zeros(2, np.int64)
    for t in range(6):
        one = ops.attention_step(q[:, t:t + 1], k[:, t:t + 1], v[:, t:t + 1], k_cache=k_cache, v_cache=v_cache, cache_lengths=lengths,
                                 rope_theta=1e4)
        lengths += 1
        # sums of 8 and of at most 6 terms in another order: 14 round-offs of 2^-24 and as many for exp
        assert np.abs(one - whole[:, t:t + 1]).max() <= 28 * 2.0 ** -24 * np.abs(v).max()


def test_linear():
    x, weight, bias = RNG.standard_normal((5, 6)), RNG.standard_normal((3, 6)), RNG.standard_normal(3)
    same(ops.linear(x, weight, bias=bias), neighbours.linear(x, weight, bias))
    same(ops.linear(x, weight), neighbours.linear(x, weight))


@needs_torch
def test_torch_gives_the_same_bits():
    x, gate, weight = (RNG.standard_normal(shape).astype(np.float32) for shape in ((2, 9, 6), (2, 9, 6), (6,)))
    taps = WEIGHT.astype(np.float32)
    calls = (lambda f: ops.short_conv(f(x), f(taps), activation="silu")[0], lambda f: ops.l2_norm(f(x)),
             lambda f: ops.rms_norm(f(x), f(weight), gate=f(gate), gate_activation="silu"), lambda f: ops.gate_activation(f(x), kind="rwkv7"),
             lambda f: ops.feature_map(f(x), kind="relu"), lambda f: ops.linear(f(x[0]), f(taps.T)),
             lambda f: ops.attention(f(x[..., None, :]), f(x[..., None, :]), f(x[..., None, :])))
    for call in calls:
        expected, found = call(lambda array: array), call(torch.from_numpy)
        assert isinstance(found, torch.Tensor) and found.numpy().tobytes() == expected.tobytes()
    assert fastweight.last_impl()


def test_explain():
    text = ops.rms_norm(X.astype(np.float32), explain=True)
    assert any(line.startswith("*cpu_") for line in text.splitlines())
