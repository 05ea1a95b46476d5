# SPDX-License-Identifier: Apache-2.0
"""Elementwise functions and their derivatives in NumPy: log-decay gates, beta, activations, feature maps.

Truth of the tests: frozen together with recurrence.py and neighbours.py (the rule stands in make_golden.py).
Every function is written for full relative accuracy in fp64 on both tails.
"""
import math

import numpy as np


def sigmoid(x):
    small = np.exp(-np.abs(x))  # in (0, 1]: never overflows
    return np.where(x >= 0, 1 / (1 + small), small / (1 + small))


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def along_heads(parameter, like, has_channels):
    """a_log [HV] or dt_bias [HV] | [HV,K], ready to be added to logits [B,T,HV] or [B,T,HV,K]; absent means 0."""
    if parameter is None:
        return np.zeros((), like.dtype)
    if has_channels and parameter.ndim == 1:
        return parameter[:, None]
    return parameter


def gate(kind, x, a_log=None, dt_bias=None, normalizer=16.0, lower_bound=-5.0):
    """Logits [B,T,HV] or [B,T,HV,K] to what `kind` names; "log_decay" and "plain" return x."""
    has_channels = x.ndim == 4
    shifted = x + along_heads(dt_bias, x, has_channels)
    rate = np.exp(along_heads(a_log, x, has_channels))
    if kind in ("log_decay", "plain"):
        return x
    if kind == "softplus":
        return -rate * softplus(shifted)
    if kind == "log_sigmoid":
        return -softplus(-x) / normalizer
    if kind == "bounded":
        return lower_bound * sigmoid(rate * shifted)
    if kind == "rwkv7":
        return -math.exp(-0.5) * sigmoid(x)
    if kind == "sigmoid":
        return sigmoid(x)
    if kind == "sigmoid_twice":
        return 2 * sigmoid(x)
    raise ValueError(f"unknown gate {kind}")


def gate_backward(kind, dy, x, a_log=None, dt_bias=None, normalizer=16.0, lower_bound=-5.0):
    """(dx, d_a_log, d_dt_bias); the last two are None when the parameter was not given. 0 * inf counts as 0 where dy is 0."""
    has_channels = x.ndim == 4
    shifted = x + along_heads(dt_bias, x, has_channels)
    rate = np.exp(along_heads(a_log, x, has_channels))
    reads_parameters = kind in ("softplus", "bounded")
    d_rate_log = np.zeros_like(x)
    if kind in ("log_decay", "plain"):
        dx = dy.copy()
    elif kind == "softplus":
        dx = -rate * sigmoid(shifted) * dy
        d_rate_log = np.where(dy == 0, 0, -rate * softplus(shifted) * dy)
    elif kind == "log_sigmoid":
        dx = sigmoid(-x) / normalizer * dy
    elif kind == "bounded":
        slope = lower_bound * sigmoid(rate * shifted) * sigmoid(-rate * shifted) * dy
        dx = slope * rate
        d_rate_log = np.where(slope == 0, 0, slope * rate * shifted)
    elif kind == "rwkv7":
        dx = -math.exp(-0.5) * sigmoid(x) * sigmoid(-x) * dy
    elif kind == "sigmoid":
        dx = sigmoid(x) * sigmoid(-x) * dy
    elif kind == "sigmoid_twice":
        dx = 2 * sigmoid(x) * sigmoid(-x) * dy
    else:
        raise ValueError(f"unknown gate {kind}")
    d_a_log = d_dt_bias = None
    if a_log is not None:
        d_a_log = d_rate_log.sum(axis=(0, 1, 3) if has_channels else (0, 1))
    if dt_bias is not None:
        over = (0, 1, 3) if has_channels and dt_bias.ndim == 1 else (0, 1)
        d_dt_bias = (dx if reads_parameters else np.zeros_like(dx)).sum(axis=over)
    return dx, d_a_log, d_dt_bias


def activation(kind, x):
    if kind == "none":
        return x
    if kind == "silu":
        return x * sigmoid(x)
    if kind == "sigmoid":
        return sigmoid(x)
    raise ValueError(f"unknown activation {kind}")


def activation_slope(kind, x):
    if kind == "none":
        return np.ones_like(x)
    if kind == "silu":
        return sigmoid(x) * (1 + x * sigmoid(-x))
    if kind == "sigmoid":
        return sigmoid(x) * sigmoid(-x)
    raise ValueError(f"unknown activation {kind}")


def feature_map(kind, x):
    if kind == "identity":
        return x
    if kind == "elu_plus_one":
        return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))
    if kind == "silu":
        return activation("silu", x)
    if kind == "relu":
        return np.maximum(x, 0)
    raise ValueError(f"unknown feature map {kind}")


def feature_map_slope(kind, x):
    """The slope of relu at 0 is 0."""
    if kind == "identity":
        return np.ones_like(x)
    if kind == "elu_plus_one":
        return np.where(x > 0, 1, np.exp(np.minimum(x, 0)))
    if kind == "silu":
        return activation_slope("silu", x)
    if kind == "relu":
        return (x > 0).astype(x.dtype)
    raise ValueError(f"unknown feature map {kind}")
