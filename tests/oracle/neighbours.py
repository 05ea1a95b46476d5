# SPDX-License-Identifier: Apache-2.0
"""The operations around the recurrence in NumPy, forward and backward, in the dtype of x.

Written from include/fastweight/neighbours.h. Gates and feature maps are elementwise and live in gates.py.
Frozen: never edited in a change that edits a kernel (the rule stands in make_golden.py).
"""
import numpy as np

from . import gates


def sequences(B, T, cu_seqlens):
    """(batch row, first token, last token + 1) of each sequence."""
    if cu_seqlens is None:
        return [(n, 0, T) for n in range(B)]
    return [(0, int(cu_seqlens[n]), int(cu_seqlens[n + 1])) for n in range(len(cu_seqlens) - 1)]


# ---- short convolution: x [B,T,D], weight [D,W], bias [D], states [N,D,W-1] oldest first

def _conv_window(x, state, batch, first, last, W):
    """[T+W-1, D]: the remembered rows, then the rows of the sequence."""
    past = np.zeros((W - 1, x.shape[2]), x.dtype) if state is None else state.T
    return np.concatenate([past, x[batch, first:last]])


def short_conv(x, weight, bias=None, initial_state=None, cu_seqlens=None, activation="none"):
    """{"y", "final_state"}"""
    (B, T, D), W = x.shape, weight.shape[1]
    runs = sequences(B, T, cu_seqlens)
    y = np.zeros_like(x)
    final = np.zeros((len(runs), D, W - 1), x.dtype)
    for n, (batch, first, last) in enumerate(runs):
        window = _conv_window(x, None if initial_state is None else initial_state[n], batch, first, last, W)
        for t in range(last - first):
            total = (weight.T * window[t:t + W]).sum(0)
            if bias is not None:
                total = total + bias
            y[batch, first + t] = gates.activation(activation, total)
        final[n] = window[len(window) - (W - 1):].T
    return {"y": y, "final_state": final}


def short_conv_backward(x, weight, bias=None, initial_state=None, cu_seqlens=None, activation="none", dy=None,
                        d_final_state=None):
    """{"dx", "dweight", "dbias", "d_initial_state"}, the last two when their input was given."""
    (B, T, D), W = x.shape, weight.shape[1]
    runs = sequences(B, T, cu_seqlens)
    dx, dweight = np.zeros_like(x), np.zeros_like(weight)
    dbias, d_initial = np.zeros(D, x.dtype), np.zeros((len(runs), D, W - 1), x.dtype)
    for n, (batch, first, last) in enumerate(runs):
        window = _conv_window(x, None if initial_state is None else initial_state[n], batch, first, last, W)
        d_window = np.zeros_like(window)
        if d_final_state is not None and W > 1:
            d_window[len(window) - (W - 1):] = d_final_state[n].T
        for t in range(last - first if dy is not None else 0):
            total = (weight.T * window[t:t + W]).sum(0) + (0 if bias is None else bias)
            d_total = dy[batch, first + t] * gates.activation_slope(activation, total)
            dbias += d_total
            dweight += (d_total * window[t:t + W]).T
            d_window[t:t + W] += weight.T * d_total
        dx[batch, first:last] = d_window[W - 1:]
        d_initial[n] = d_window[:W - 1].T
    out = {"dx": dx, "dweight": dweight}
    if bias is not None:
        out["dbias"] = dbias
    if initial_state is not None:
        out["d_initial_state"] = d_initial
    return out


# ---- norms over the last dimension

def norm(kind, x, weight=None, gate=None, gate_activation="none", eps=1e-6):
    square = (x * x).sum(-1, keepdims=True)
    if kind == "rms":
        square = square / x.shape[-1]
    y = x / np.sqrt(square + eps)
    if weight is not None:
        y = y * weight
    if gate is not None:
        y = y * gates.activation(gate_activation, gate)
    return y


def norm_backward(kind, dy, x, weight=None, gate=None, gate_activation="none", eps=1e-6):
    """{"dx", "dweight", "dgate"}, the last two when their input was given."""
    size = x.shape[-1] if kind == "rms" else 1
    root = np.sqrt((x * x).sum(-1, keepdims=True) / size + eps)
    unit = x / root
    scaled = unit if weight is None else unit * weight
    out = {}
    d_scaled = dy
    if gate is not None:
        out["dgate"] = dy * scaled * gates.activation_slope(gate_activation, gate)
        d_scaled = dy * gates.activation(gate_activation, gate)
    d_unit = d_scaled
    if weight is not None:
        out["dweight"] = (d_scaled * unit).reshape(-1, x.shape[-1]).sum(0)
        d_unit = d_scaled * weight
    out["dx"] = (d_unit - unit * (d_unit * unit).sum(-1, keepdims=True) / size) / root
    return out


# ---- causal softmax attention: q [B,T,HQ,D], k [B,T,HK,D], v [B,T,HK,DV]

def rope(x, positions, theta):
    """x [T,H,D], positions [T]; the angle is taken in fp64 for every dtype of x."""
    half = x.shape[-1] // 2
    angle = positions[:, None].astype(np.float64) * theta ** (-2.0 * np.arange(half) / x.shape[-1])
    cos, sin = np.cos(angle).astype(x.dtype)[:, None], np.sin(angle).astype(x.dtype)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def rope_back(dy, positions, theta):
    """The transpose of rope is the turn the other way."""
    return rope(dy, -positions, theta)


def _attention_weights(q, k, scale, window):
    """q, k [T,D] of one head, turned: softmax weights [T,T]."""
    T = q.shape[0]
    query, key = np.arange(T)[:, None], np.arange(T)[None, :]
    seen = key <= query
    if window > 0:
        seen &= key > query - window
    scores = np.where(seen, scale * (q @ k.T), -np.inf)
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return weights / weights.sum(1, keepdims=True)


def attention(q, k, v, window=0, scale=None, rope_theta=0.0, cu_seqlens=None, start_positions=None):
    B, T, HQ, D = q.shape
    group = HQ // k.shape[2]
    scale = scale or D ** -0.5
    o = np.zeros((B, T, HQ, v.shape[3]), q.dtype)
    for n, (batch, first, last) in enumerate(sequences(B, T, cu_seqlens)):
        if first == last:
            continue
        q_n, k_n, v_n = (x[batch, first:last] for x in (q, k, v))
        if rope_theta > 0:
            positions = np.arange(last - first) + (0 if start_positions is None else int(start_positions[n]))
            q_n, k_n = rope(q_n, positions, rope_theta), rope(k_n, positions, rope_theta)
        for hq in range(HQ):
            weights = _attention_weights(q_n[:, hq], k_n[:, hq // group], scale, window)
            o[batch, first:last, hq] = weights @ v_n[:, hq // group]
    return o


def attention_backward(d_o, q, k, v, window=0, scale=None, rope_theta=0.0, cu_seqlens=None, start_positions=None):
    B, T, HQ, D = q.shape
    group = HQ // k.shape[2]
    scale = scale or D ** -0.5
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for n, (batch, first, last) in enumerate(sequences(B, T, cu_seqlens)):
        if first == last:
            continue
        positions = np.arange(last - first) + (0 if start_positions is None else int(start_positions[n]))
        q_n, k_n, v_n = (x[batch, first:last] for x in (q, k, v))
        if rope_theta > 0:
            q_n, k_n = rope(q_n, positions, rope_theta), rope(k_n, positions, rope_theta)
        dq_n, dk_n = np.zeros_like(q_n), np.zeros_like(k_n)
        for hq in range(HQ):
            hk = hq // group
            d_head = d_o[batch, first:last, hq]
            weights = _attention_weights(q_n[:, hq], k_n[:, hk], scale, window)
            dv[batch, first:last, hk] += weights.T @ d_head
            d_weights = d_head @ v_n[:, hk].T
            d_scores = weights * (d_weights - (weights * d_weights).sum(1, keepdims=True))
            dq_n[:, hq] += scale * (d_scores @ k_n[:, hk])
            dk_n[:, hk] += scale * (d_scores.T @ q_n[:, hq])
        if rope_theta > 0:
            dq_n, dk_n = rope_back(dq_n, positions, rope_theta), rope_back(dk_n, positions, rope_theta)
        dq[batch, first:last], dk[batch, first:last] = dq_n, dk_n
    return {"dq": dq, "dk": dk, "dv": dv}


# ---- linear layer: x [M,in], weight [out,in], bias [out]

def linear(x, weight, bias=None):
    y = x @ weight.T
    return y if bias is None else y + bias


def linear_backward(dy, x, weight, bias=None):
    out = {"dx": dy @ weight, "dweight": dy.T @ x}
    if bias is not None:
        out["dbias"] = dy.sum(0)
    return out
