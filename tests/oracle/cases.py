# SPDX-License-Identifier: Apache-2.0
"""Random calls of every catalogue row, for the tests and for the golden files. Frozen with the oracle."""
import numpy as np

from .recurrence import ROWS, Call

ROW_NAMES = tuple(ROWS)


def unit(x):
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6)


def make(op, seed=0, B=1, T=6, H=1, HV=None, K=3, V=2, cu=None, state=True, gate=None, erase=None, n_sub=None,
         strength=0.5, **settings):
    """A call with every operand that the row can use. Keys have unit length; g is -strength * |normal|."""
    rng = np.random.default_rng(seed)
    HV = HV or H
    if n_sub is None:
        n_sub = 2 if op == "gated_delta_product" else 1
    N = B if cu is None else len(cu) - 1
    rows = T * n_sub
    call = Call(op=op, gate=gate, erase=erase, n_sub=n_sub, **settings)
    gate, erase = (gate, erase) if op == "by_axes" else ROWS[op]

    def normal(*shape):
        return rng.standard_normal(shape)

    call.q, call.k, call.v = normal(B, T, H, K), unit(normal(B, rows, H, K)), normal(B, rows, HV, V)
    if op not in ("retention", "lightning"):
        shape = {"scalar": (B, T, HV), "vector": (B, T, HV, K)}.get(gate)
        if shape is not None:
            logits = call.gate_input != "log_decay"
            call.g = normal(*shape) if logits else -strength * np.abs(normal(*shape))
            if call.gate_input in ("softplus", "bounded"):
                call.a_log = 0.3 * normal(HV)
                call.dt_bias = normal(*((HV, K) if gate == "vector" else (HV,)))
    if erase in ("shared_after", "shared_before"):
        if op == "gdn2" or op == "by_axes":
            call.erase_gate = rng.uniform(0, 1, (B, rows, H, K))
            call.write_gate = rng.uniform(0, 1, (B, rows, HV, V))
        if op != "gdn2":
            logits = call.beta_input != "plain"
            call.beta = normal(B, rows, HV) if logits else rng.uniform(0, 1, (B, rows, HV))
        if op in ("comba", "by_axes"):
            call.p = unit(call.k + 0.3 * normal(B, rows, H, K))
    if erase == "independent":
        call.a = unit(normal(B, T, H, K))
        call.b = -call.a * rng.uniform(0, 1, (B, T, H, 1)) + 0.1 * normal(B, T, H, K)
    if call.normalizer:  # positive features, or the divisor could be anything
        call.q, call.k = np.exp(call.q), np.exp(call.k)
    if state:
        call.initial_state = normal(*((N, HV, V, K) if call.layout == "vk" else (N, HV, K, V)))
        if call.normalizer:
            call.initial_z = np.abs(normal(N, H, K))
    if cu is not None:
        call.cu_seqlens = np.asarray(cu, np.int64)
    return call


def incoming(call, seed=1):
    """Random d_o, d_final_state and, with the normaliser, d_final_z of a call."""
    rng = np.random.default_rng(seed)
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    N = B if call.cu_seqlens is None else len(call.cu_seqlens) - 1
    out = {"d_o": rng.standard_normal((B, T, HV, V)),
           "d_final_state": rng.standard_normal((N, HV, V, K) if call.layout == "vk" else (N, HV, K, V))}
    if call.normalizer:
        out["d_final_z"] = rng.standard_normal((N, H, K))
    return out
