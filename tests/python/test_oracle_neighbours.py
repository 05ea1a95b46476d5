# SPDX-License-Identifier: Apache-2.0
"""The NumPy truth of the neighbours against central differences and closed forms."""
import numpy as np
import pytest

from differences import assert_close, gradient
from oracle import gates, neighbours


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("activation", ("none", "silu"))
@pytest.mark.parametrize("width", (1, 2, 4))
@pytest.mark.parametrize("cu", (None, [0, 1, 1, 6]))
def test_short_conv_gradients(width, activation, cu):
    D, N = 3, 2 if cu is None else 3
    x = normal(0, 2 if cu is None else 1, 6, D)
    inputs = dict(x=x, weight=normal(1, D, width), bias=normal(2, D), initial_state=normal(3, N, D, width - 1))
    dy, d_final = normal(4, *x.shape), normal(5, N, D, width - 1)
    found = neighbours.short_conv_backward(**inputs, cu_seqlens=cu, activation=activation, dy=dy, d_final_state=d_final)

    def loss():
        out = neighbours.short_conv(**inputs, cu_seqlens=cu, activation=activation)
        return (dy * out["y"]).sum() + (d_final * out["final_state"]).sum()

    names = {"x": "dx", "weight": "dweight", "bias": "dbias", "initial_state": "d_initial_state"}
    for name, array in inputs.items():
        assert_close(found[names[name]], gradient(loss, array), name)


def test_short_conv_is_a_convolution():
    x, weight = normal(0, 1, 9, 2), normal(1, 2, 4)
    y = neighbours.short_conv(x, weight)["y"]
    for d in range(2):
        assert np.allclose(y[0, :, d], np.convolve(x[0, :, d], weight[d, ::-1])[:9], atol=1e-14)


def test_short_conv_state_shorter_than_the_window():
    state, x = np.arange(3.0).reshape(1, 1, 3), np.full((1, 1, 1), 9.0)
    out = neighbours.short_conv(x, np.ones((1, 4)), initial_state=state)
    assert out["y"].item() == 12 and out["final_state"].ravel().tolist() == [1, 2, 9]


@pytest.mark.parametrize("kind,weight,gate", (("l2", False, "none"), ("rms", False, "none"), ("rms", True, "none"),
                                              ("rms", True, "silu"), ("rms", True, "sigmoid")))
def test_norm_gradients(kind, weight, gate):
    x = normal(0, 3, 5)
    x[1] *= 1e-3  # a row where eps decides; eps 0.5 keeps the curvature within reach of the differences
    inputs = dict(x=x)
    if weight:
        inputs["weight"] = normal(1, 5)
    if gate != "none":
        inputs["gate"] = normal(2, 3, 5)
    dy = normal(3, 3, 5)
    found = neighbours.norm_backward(kind, dy, **inputs, gate_activation=gate, eps=0.5)
    for name, array in inputs.items():
        expected = gradient(lambda: (dy * neighbours.norm(kind, **inputs, gate_activation=gate, eps=0.5)).sum(), array)
        assert_close(found["d" + name], expected, name)


def test_norm_eps_is_inside_the_root():
    y = neighbours.norm("l2", np.array([1e-4, 0.0]))
    assert y[0] == pytest.approx(1e-4 / np.sqrt(1e-8 + 1e-6), rel=1e-14)


@pytest.mark.parametrize("kind", ("softplus", "log_sigmoid", "bounded", "rwkv7", "sigmoid", "sigmoid_twice"))
@pytest.mark.parametrize("channels", (False, True))
def test_gate_gradients(kind, channels):
    shape = (2, 3, 2) + ((4,) if channels else ())
    inputs = dict(x=normal(0, *shape), a_log=normal(1, 2), dt_bias=normal(2, *shape[2:]))
    dy = normal(3, *shape)
    found = gates.gate_backward(kind, dy, **inputs)
    for result, array in zip(found, inputs.values()):
        assert_close(result, gradient(lambda: (dy * gates.gate(kind, **inputs)).sum(), array), kind)


def test_gate_tails():
    """Relative accuracy at both ends: the leading term of the series is exact to fp64 there."""
    x = np.array([[[-100.0]]])
    assert gates.gate("softplus", x).item() == pytest.approx(-np.exp(-100.0), rel=1e-15)
    assert gates.gate("log_sigmoid", x).item() == pytest.approx(-100 / 16, rel=1e-15)
    assert gates.gate("log_sigmoid", -x).item() == pytest.approx(-np.exp(-100.0) / 16, rel=1e-15)
    assert gates.gate("sigmoid", x).item() == pytest.approx(np.exp(-100.0), rel=1e-15)
    assert gates.gate("bounded", x).item() == pytest.approx(-5 * np.exp(-100.0), rel=1e-15)


@pytest.mark.parametrize("kind", ("identity", "elu_plus_one", "silu", "relu"))
def test_feature_map_slopes(kind):
    x = normal(0, 20)
    x = x[np.abs(x) > 0.02]  # differences may not straddle the kink
    expected = gradient(lambda: gates.feature_map(kind, x).sum(), x)
    assert_close(gates.feature_map_slope(kind, x), expected, kind)


@pytest.mark.parametrize("kind", ("none", "silu", "sigmoid"))
def test_activation_slopes(kind):
    x = normal(0, 20)
    assert_close(gates.activation_slope(kind, x), gradient(lambda: gates.activation(kind, x).sum(), x), kind)


@pytest.mark.parametrize("window", (0, 3))
@pytest.mark.parametrize("theta", (0.0, 100.0))
@pytest.mark.parametrize("cu", (None, [0, 1, 1, 6]))
def test_attention_gradients(window, theta, cu):
    inputs = dict(q=normal(0, 1, 6, 2, 4), k=normal(1, 1, 6, 1, 4), v=normal(2, 1, 6, 1, 3))
    settings = dict(window=window, rope_theta=theta, cu_seqlens=cu, start_positions=[5] if cu is None else None)
    d_o = normal(3, 1, 6, 2, 3)
    found = neighbours.attention_backward(d_o, **inputs, **settings)
    for name, array in inputs.items():
        expected = gradient(lambda: (d_o * neighbours.attention(**inputs, **settings)).sum(), array)
        assert_close(found["d" + name], expected, name)


def test_attention_sees_its_window_only():
    q, k, v = normal(0, 1, 8, 1, 4), normal(1, 1, 8, 1, 4), normal(2, 1, 8, 1, 4)
    o = neighbours.attention(q, k, v, window=3)
    moved = v.copy()
    moved[0, 4] += 1
    changed = np.abs(neighbours.attention(q, k, moved, window=3) - o).max((0, 2, 3)) > 0
    assert changed.tolist() == [False] * 4 + [True] * 3 + [False]


def test_rope_depends_on_the_distance_only():
    q, k = normal(0, 1, 5, 1, 6), normal(1, 1, 5, 1, 6)
    v = normal(2, 1, 5, 1, 2)
    base = neighbours.attention(q, k, v, rope_theta=50.0)
    moved = neighbours.attention(q, k, v, rope_theta=50.0, start_positions=[1000])
    assert np.allclose(base, moved, atol=1e-12) and not np.allclose(base, neighbours.attention(q, k, v), atol=1e-3)


def test_linear_gradients():
    inputs = dict(x=normal(0, 3, 4), weight=normal(1, 2, 4), bias=normal(2, 2))
    dy = normal(3, 3, 2)
    found = neighbours.linear_backward(dy, **inputs)
    for name, array in inputs.items():
        assert_close(found["d" + name], gradient(lambda: (dy * neighbours.linear(**inputs)).sum(), array), name)
