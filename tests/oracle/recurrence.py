# SPDX-License-Identifier: Apache-2.0
"""The operator family in NumPy, token by token: the second of the two independent truths.

Written from the formulas of include/fastweight/recurrence.h alone; the C++ reference is written apart from it and the two
agree to 1e-12. Arrays have the layout of that header. Batch and heads are vectorised, tokens are a loop, the reverse
recurrence walks the same tokens backwards over the stored states. Everything is computed in the dtype of q: fp64 is the
truth, fp32 with a Rounding the yardstick that error bounds are measured against (yardstick.py).

Frozen: never edited in a change that edits a kernel (the rule stands in make_golden.py).
"""
from dataclasses import dataclass, fields, replace
from typing import Callable, Optional

import numpy as np

from . import gates

L2_EPS = 1e-6
NORMALIZER_EPS = 1e-10

# row -> (gate, erase)
ROWS = {
    "linear_attn": ("none", "none"),
    "simple_gla": ("scalar", "none"),
    "retention": ("scalar", "none"),
    "lightning": ("scalar", "none"),
    "gla": ("vector", "none"),
    "delta_rule": ("none", "shared_after"),
    "gated_delta_rule": ("scalar", "shared_after"),
    "comba": ("scalar", "shared_before"),
    "kda": ("vector", "shared_after"),
    "gdn2": ("vector", "shared_after"),
    "gated_delta_product": ("scalar", "shared_after"),
    "iplr": ("none", "independent"),
    "dplr": ("vector", "independent"),
    "rwkv7": ("vector", "independent"),
}

OPERANDS = ("q", "k", "v", "a", "b", "p", "erase_gate", "write_gate", "g", "beta", "a_log", "dt_bias",
            "initial_state", "initial_z")


@dataclass
class Call:
    """One call of the family. Operands as in recurrence.h; None means not given."""

    op: str
    q: np.ndarray = None
    k: np.ndarray = None
    v: np.ndarray = None
    a: Optional[np.ndarray] = None
    b: Optional[np.ndarray] = None
    p: Optional[np.ndarray] = None
    erase_gate: Optional[np.ndarray] = None
    write_gate: Optional[np.ndarray] = None
    g: Optional[np.ndarray] = None
    beta: Optional[np.ndarray] = None
    a_log: Optional[np.ndarray] = None
    dt_bias: Optional[np.ndarray] = None
    initial_state: Optional[np.ndarray] = None
    initial_z: Optional[np.ndarray] = None
    cu_seqlens: Optional[np.ndarray] = None
    gate: Optional[str] = None   # by_axes only
    erase: Optional[str] = None  # by_axes only
    scale: Optional[float] = None
    layout: str = "kv"
    normalizer: bool = False
    qk_norm: bool = False
    gate_input: str = "log_decay"
    beta_input: str = "plain"
    n_sub: int = 1
    layer_idx: int = 0
    num_layers: int = 1
    gate_normalizer: float = 16.0
    gate_lower_bound: float = -5.0

    def axes(self):
        gate, erase = (self.gate, self.erase) if self.op == "by_axes" else ROWS[self.op]
        if self.op == "gated_delta_product" and self.g is None:
            gate = "none"
        return gate, erase

    def given(self):
        return {name: getattr(self, name) for name in OPERANDS if getattr(self, name) is not None}

    def with_dtype(self, dtype):
        return replace(self, **{name: np.asarray(x, dtype) for name, x in self.given().items()})

    def settings(self):
        skip = set(OPERANDS) | {"cu_seqlens"}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in skip}


def fixed_gate(op, HV, layer_idx=0, num_layers=1):
    """Log decay [HV] of the rows whose gate is a constant of the head."""
    head = np.arange(HV, dtype=np.float64)
    if op == "retention":
        return np.log1p(-(2.0 ** (-5.0 - head)))
    return -(8.0 / HV) * (1.0 - layer_idx / num_layers) * head


@dataclass
class Rows:
    """What the loop reads, one entry a value head: all maps of operands are applied."""

    q: np.ndarray            # [B,T,HV,K]
    k: np.ndarray            # [B,T*n,HV,K]
    e: Optional[np.ndarray]  # shared key: beta * erase_gate * (p or k)      [B,T*n,HV,K]
    v: np.ndarray            # beta * write_gate * v                         [B,T*n,HV,V]
    a: Optional[np.ndarray]  # [B,T,HV,K]
    b: Optional[np.ndarray]
    g: Optional[np.ndarray]  # [B,T,HV,1] or [B,T,HV,K]


@dataclass
class Rounding:
    """Where the yardstick rounds. The truth rounds nowhere."""

    read: Callable = lambda x: x     # a state, its gradient, a pseudo-value or its gradient, where a product reads it
    operand: Callable = lambda x: x  # q, k, a, b and the finished erase key


EXACT = Rounding()


@dataclass
class Trail:
    """What the way back reads, by (first state of the segment, row or token)."""

    before: dict  # state before row r
    after: dict   # state after token t
    z: dict       # the normaliser's sum at token t


def l2_norm(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(L2_EPS))


def l2_norm_backward(dy, x):
    y = l2_norm(x)
    return (dy - y * (y * dy).sum(-1, keepdims=True)) / np.sqrt((x * x).sum(-1, keepdims=True) + x.dtype.type(L2_EPS))


def state_to_kv(state, layout):
    return np.swapaxes(state, -1, -2) if layout == "vk" else state


def default_scale(call):
    if call.scale:
        return call.scale
    return 1.0 if call.op == "rwkv7" else call.q.shape[-1] ** -0.5


def log_decay(call):
    """g as the recurrence reads it, [B,T,HV,1] or [B,T,HV,K], or None."""
    gate, _ = call.axes()
    B, T, HV = call.q.shape[0], call.q.shape[1], call.v.shape[2]
    if call.op in ("retention", "lightning"):
        g = fixed_gate(call.op, HV, call.layer_idx, call.num_layers).astype(call.q.dtype)
        return np.broadcast_to(g[None, None, :, None], (B, T, HV, 1))
    if gate == "none":
        return None
    g = gates.gate(call.gate_input, call.g, call.a_log, call.dt_bias, call.gate_normalizer, call.gate_lower_bound)
    return g[..., None] if gate == "scalar" else g


def to_rows(call, rounding=EXACT):
    _, erase = call.axes()
    group = call.v.shape[2] // call.q.shape[2]

    def per_value_head(x):
        return np.repeat(x, group, axis=2)

    q, k, p = call.q, call.k, call.p
    if call.qk_norm:
        q, k, p = l2_norm(q), l2_norm(k), None if p is None else l2_norm(p)
    rows = Rows(q=per_value_head(q), k=per_value_head(k), e=None, v=call.v, a=None, b=None, g=log_decay(call))
    if erase in ("shared_after", "shared_before"):
        rows.e = per_value_head(k if p is None else p)
        if call.erase_gate is not None:
            rows.e = rows.e * per_value_head(call.erase_gate)
        if call.beta is not None:
            beta = gates.gate(call.beta_input, call.beta)[..., None]
            rows.e = rows.e * beta
            rows.v = rows.v * beta
        if call.write_gate is not None:
            rows.v = rows.v * call.write_gate
    if erase == "independent":
        rows.a, rows.b = per_value_head(call.a), per_value_head(call.b)
    for name in ("q", "k", "e", "a", "b"):
        if getattr(rows, name) is not None:
            setattr(rows, name, rounding.operand(getattr(rows, name)))
    return rows


def segments(call):
    """(batch rows, first token, last token + 1, states) of each run of tokens that share a start."""
    if call.cu_seqlens is None:
        B = call.q.shape[0]
        return [(slice(0, B), 0, call.q.shape[1], slice(0, B))]
    cu = [int(x) for x in call.cu_seqlens]
    return [(slice(0, 1), cu[n], cu[n + 1], slice(n, n + 1)) for n in range(len(cu) - 1)]


def dot_key(S, x):
    """S^T x over the key axis: [B,HV,K,V], [B,HV,K] -> [B,HV,V]."""
    return np.einsum("bhkv,bhk->bhv", S, x)


def dot_value(S, y):
    """S y over the value axis: [B,HV,K,V], [B,HV,V] -> [B,HV,K]."""
    return np.einsum("bhkv,bhv->bhk", S, y)


def outer(x, y):
    return x[..., :, None] * y[..., None, :]


def sub_step(S_before, decay, r, rows, erase, rounding):
    """One write: (state after it, the decayed state, the pseudo-value). r indexes [batch rows, row]."""
    S_decayed = S_before if decay is None else decay[..., None] * S_before
    if erase == "independent":
        seen = rounding.read(dot_key(rounding.read(S_before), rows.a[r]))
        return S_decayed + outer(rows.b[r], seen) + outer(rows.k[r], rows.v[r]), S_decayed, seen
    written = rows.v[r]
    if erase != "none":
        read_from = S_decayed if erase == "shared_after" else S_before
        written = rounding.read(written - dot_key(rounding.read(read_from), rows.e[r]))
    return S_decayed + outer(rows.k[r], written), S_decayed, written


def walk(call, rows, want_states, rounding=EXACT):
    """Forward loop. Returns o, final states [N,HV,K,V], final z and the trail (states in it only when asked)."""
    _, erase = call.axes()
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    n_sub, dtype = call.n_sub, call.q.dtype
    N = B if call.cu_seqlens is None else len(call.cu_seqlens) - 1
    scale = dtype.type(default_scale(call))
    o = np.zeros((B, T, HV, V), dtype)
    final = np.zeros((N, HV, K, V), dtype)
    if call.initial_state is not None:
        final[...] = state_to_kv(call.initial_state, call.layout)
    final_z = np.zeros((N, H, K), dtype)
    if call.initial_z is not None:
        final_z[...] = call.initial_z
    k_of_head = rows.k[:, :, :: HV // H]  # [B,T,H,K] with maps applied: what z sums
    trail = Trail({}, {}, {})
    for batch, first, last, states in segments(call):
        S, z = final[states].copy(), final_z[states].copy()
        for t in range(first, last):
            for j in range(n_sub):
                r = (batch, t * n_sub + j)
                if want_states:
                    trail.before[states.start, t * n_sub + j] = S
                decay = np.exp(rows.g[batch, t]) if rows.g is not None and j == 0 else None
                S, _, _ = sub_step(S, decay, r, rows, erase, rounding)
            read = scale * dot_key(rounding.read(S), rows.q[batch, t])
            if call.normalizer:
                z = z + k_of_head[batch, t]
                trail.z[states.start, t] = z
                weight = scale * (rows.q[batch, t] * np.repeat(z, HV // H, axis=1)).sum(-1) + dtype.type(NORMALIZER_EPS)
                read = read / weight[..., None]
            o[batch, t] = read
            if want_states:
                trail.after[states.start, t] = S
        final[states], final_z[states] = S, z
    return o, final, final_z, trail


def forward(call, rounding=EXACT):
    """{"o", "final_state" in the call's layout, "final_z" with the normaliser}."""
    o, final, final_z, _ = walk(call, to_rows(call, rounding), want_states=False, rounding=rounding)
    out = {"o": o, "final_state": np.ascontiguousarray(state_to_kv(final, call.layout))}
    if call.normalizer:
        out["final_z"] = final_z
    return out


def backward(call, d_o=None, d_final_state=None, d_final_z=None, rounding=EXACT):
    """Gradients of sum(d_o * o) + sum(d_final_state * final_state) + sum(d_final_z * final_z) for every operand given."""
    gate, erase = call.axes()
    rows = to_rows(call, rounding)
    o, _, _, trail = walk(call, rows, want_states=True, rounding=rounding)
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    group, n_sub, dtype = HV // H, call.n_sub, call.q.dtype
    N = B if call.cu_seqlens is None else len(call.cu_seqlens) - 1
    scale = dtype.type(default_scale(call))
    d_o = np.zeros_like(o) if d_o is None else d_o
    dS_in = np.zeros((N, HV, K, V), dtype) if d_final_state is None else state_to_kv(d_final_state, call.layout)
    dz_in = np.zeros((N, H, K), dtype) if d_final_z is None else d_final_z
    d = Rows(**{f.name: None if getattr(rows, f.name) is None else np.zeros(getattr(rows, f.name).shape, dtype)
                for f in fields(Rows)})
    dk_of_head = np.zeros((B, T, H, K), dtype)
    de_for_beta = None if d.e is None else np.zeros_like(d.e)  # equals d.e but for the yardstick's rounding
    rounded = rounding.read
    d_initial, d_initial_z = np.array(dS_in, dtype), np.array(dz_in, dtype)

    for batch, first, last, states in segments(call):
        dS, dz = d_initial[states].copy(), d_initial_z[states].copy()
        for t in reversed(range(first, last)):
            S_after = trail.after[states.start, t]
            q_t, d_read = rows.q[batch, t], d_o[batch, t]
            if call.normalizer:
                z = np.repeat(trail.z[states.start, t], group, axis=1)
                weight = scale * (q_t * z).sum(-1) + dtype.type(NORMALIZER_EPS)
                d_weight = -(d_read * o[batch, t]).sum(-1) / weight
                d_read = d_read / weight[..., None]
                d.q[batch, t] += scale * d_weight[..., None] * z
                dz = dz + (scale * d_weight[..., None] * q_t).reshape(-1, H, group, K).sum(2)
                dk_of_head[batch, t] = dz
            d.q[batch, t] += scale * dot_value(rounded(S_after), d_read)
            dS = dS + scale * outer(q_t, d_read)
            for j in reversed(range(n_sub)):
                r = (batch, t * n_sub + j)
                S_before = trail.before[states.start, r[1]]
                decay = np.exp(rows.g[batch, t]) if rows.g is not None and j == 0 else None
                _, S_decayed, written = sub_step(S_before, decay, r, rows, erase, rounding)
                dS_read, S_read = rounded(dS), rounded(S_decayed if erase == "shared_after" else S_before)
                d.v[r] = dot_key(dS_read, rows.k[r])
                dS_decayed, dS_before = dS, None
                if erase == "independent":
                    seen, d_seen = written, rounded(dot_key(dS_read, rows.b[r]))
                    d.k[r] = dot_value(dS_read, rows.v[r])
                    d.b[r] = dot_value(dS_read, seen)
                    d.a[r] = dot_value(S_read, d_seen)
                    dS_before = outer(rows.a[r], d_seen)
                else:
                    d.k[r] = dot_value(dS_read, written)
                if erase in ("shared_after", "shared_before"):
                    d_written = rounded(d.v[r])
                    de_for_beta[r] = -dot_value(S_read, d.v[r])
                    d.e[r] = -dot_value(S_read, d_written)
                    if erase == "shared_after":
                        dS_decayed = dS - outer(rows.e[r], d_written)
                    else:
                        dS_before = -outer(rows.e[r], d_written)
                if decay is None:
                    dS = dS_decayed
                else:
                    per_channel = decay * (dS_decayed * S_before).sum(-1)  # [B,HV,K]; decay is [B,HV,1] or [B,HV,K]
                    d.g[batch, t] = per_channel if gate == "vector" else per_channel.sum(-1, keepdims=True)
                    dS = decay[..., None] * dS_decayed
                if dS_before is not None:
                    dS = dS + dS_before
        d_initial[states], d_initial_z[states] = dS, dz
    return from_rows(call, d, dk_of_head, de_for_beta, d_initial, d_initial_z)


def from_rows(call, d, dk_of_head, de_for_beta, d_initial, d_initial_z):
    """Undoes to_rows: gradients of the operands as given."""
    gate, erase = call.axes()
    H, group = call.q.shape[2], call.v.shape[2] // call.q.shape[2]

    def per_key_head(x):
        return x.reshape(x.shape[0], x.shape[1], H, group, x.shape[3]).sum(3)

    out = {}
    dq, dk, dp, dv = per_key_head(d.q), per_key_head(d.k), None, d.v
    if call.normalizer:
        dk = dk + dk_of_head
    q, k, p = call.q, call.k, call.p
    if call.qk_norm:
        q, k, p = l2_norm(q), l2_norm(k), None if p is None else l2_norm(p)
    if d.e is not None:
        base = np.repeat(k if p is None else p, group, axis=2)
        erase_gate = 1 if call.erase_gate is None else np.repeat(call.erase_gate, group, axis=2)
        write_gate = 1 if call.write_gate is None else call.write_gate
        beta = 1 if call.beta is None else gates.gate(call.beta_input, call.beta)[..., None]
        if call.erase_gate is not None:
            out["d_erase_gate"] = per_key_head(d.e * base * beta)
        if call.write_gate is not None:
            out["d_write_gate"] = d.v * call.v * beta
        if call.beta is not None:
            d_beta = (de_for_beta * base * erase_gate).sum(-1) + (d.v * call.v * write_gate).sum(-1)
            out["dbeta"] = gates.gate_backward(call.beta_input, d_beta, call.beta)[0]
        d_base = per_key_head(d.e * erase_gate * beta)
        if p is None:
            dk = dk + d_base
        else:
            dp = d_base
        dv = d.v * beta * write_gate
    if erase == "independent":
        out["da"], out["db"] = per_key_head(d.a), per_key_head(d.b)
    if call.qk_norm:
        dq, dk = l2_norm_backward(dq, call.q), l2_norm_backward(dk, call.k)
        dp = None if dp is None else l2_norm_backward(dp, call.p)
    out.update(dq=dq, dk=dk, dv=np.array(dv))
    if dp is not None:
        out["dp"] = dp
    if call.g is not None:
        dg = d.g[..., 0] if gate == "scalar" else d.g
        out["dg"], d_a_log, d_dt_bias = gates.gate_backward(call.gate_input, dg, call.g, call.a_log, call.dt_bias,
                                                            call.gate_normalizer, call.gate_lower_bound)
        if call.a_log is not None:
            out["d_a_log"] = d_a_log
        if call.dt_bias is not None:
            out["d_dt_bias"] = d_dt_bias
    if call.initial_state is not None:
        out["d_initial_state"] = np.ascontiguousarray(state_to_kv(d_initial, call.layout))
    if call.initial_z is not None:
        out["d_initial_z"] = d_initial_z
    return out
