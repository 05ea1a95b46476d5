# SPDX-License-Identifier: Apache-2.0
"""What the tests named after field reports share: the usual problem, the usual checks.

Unless an entry says otherwise: unit q and k, beta = sigmoid(normal), B = 1, H = 2, K = V = 32, and both fp32 and bf16.
docs/field_reports.md lists every entry, the test it became or why it has none.
"""
import time

import numpy as np

import c_call
import fastweight_c as fw
from oracle import cases, gates, yardstick

BOTH = ("f32", "bf16")


def problem(op, seed=0, T=64, B=1, H=2, HV=None, K=32, V=32, **how):
    call = cases.make(op, seed=seed, B=B, T=T, H=H, HV=HV, K=K, V=V, **how)
    if not call.normalizer:
        call.q = cases.unit(call.q)
    if call.beta is not None and call.beta_input == "plain":
        call.beta = gates.sigmoid(np.random.default_rng(seed + 1000).standard_normal(call.beta.shape))
    return call


def forward_within(context, call, dtype="f32", what="", **how):
    """Runs forward and holds it to the error rule; returns what the library answered."""
    call = c_call.rounded(call, dtype)
    found = c_call.forward(context, call, dtype, **how)
    assert all(np.isfinite(x).all() for x in found.values()), f"{what}: not finite"
    yardstick.check(found, yardstick.bounds(call, dtype), f"{what} {dtype}")
    return found


def backward_within(context, call, dtype="f32", what="", seeds=None, **how):
    call = c_call.rounded(call, dtype)
    seeds = c_call.rounded_incoming(cases.incoming(call) if seeds is None else seeds, dtype)
    found = c_call.backward(context, call, seeds, dtype, **how)
    assert all(np.isfinite(x).all() for x in found.values()), f"{what}: not finite"
    yardstick.check(found, yardstick.bounds(call, dtype, seeds), f"{what} {dtype}")
    return found


def both_within(context, call, dtypes=BOTH, what="", **how):
    for dtype in dtypes:
        forward_within(context, call, dtype, what, **how)
        backward_within(context, call, dtype, what, **how)


def same_bits(found, expected, what=""):
    assert set(found) == set(expected)
    for name, x in expected.items():
        assert found[name].tobytes() == x.tobytes(), f"{what} {name}: bits differ, by up to {np.nanmax(np.abs(found[name] - x))}"


def error_text(run):
    """The sentence of the failure that run() must end in."""
    try:
        run()
    except fw.Failed as failed:
        return failed.text
    raise AssertionError("expected a refusal, the call went through")


def part_of_heads(call, heads, value_heads):
    """The call with the given slices of q/k heads and value heads."""
    by_head = {"q", "k", "a", "b", "p", "erase_gate"}
    parts = {}
    for name, x in call.given().items():
        if name in ("initial_state",):
            parts[name] = x[:, value_heads]
        elif name == "initial_z":
            parts[name] = x[:, heads]
        elif name in ("a_log", "dt_bias"):
            parts[name] = x[value_heads]
        else:
            parts[name] = x[:, :, heads if name in by_head else value_heads]
    return cases.Call(**{**call.settings(), **parts}, cu_seqlens=call.cu_seqlens)


def tokens_of(call, batch, first, last, **changes):
    """Tokens of one batch row as a call of its own, initial states as given in changes or absent."""
    part = c_call.slice_tokens(call, first, last, cu_seqlens=None)
    part = cases.Call(**{**part.settings(), **{name: x[batch:batch + 1] for name, x in part.given().items()
                                               if name not in ("a_log", "dt_bias")},
                         "a_log": call.a_log, "dt_bias": call.dt_bias})
    for name, x in changes.items():
        setattr(part, name, x)
    return part


def prepared(context, op, desc, direction, grads=None):
    """The call as a function of nothing, set up once: what it takes is the library's time."""
    size = fw.workspace_size(context, op, desc, direction)
    workspace = np.zeros(size + 1, np.uint8)
    verb = getattr(fw.library(), f"fw_{op}_{('forward', 'backward', 'step')[direction]}")
    descriptors = [fw.ct.byref(x) for x in (desc, grads) if x is not None]
    arguments = (context.pointer, *descriptors, workspace.ctypes.data_as(fw.ct.c_void_p), fw.ct.c_uint64(size))

    def call():
        fw.ok(verb(*arguments))

    call.kept = (desc, grads, workspace)
    return call


def seconds(call):
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measured(ratio, limit, times=6):
    """Whether ratio() is below the limit in one of several measurements."""
    found = []
    for _ in range(times):
        found.append(ratio())
        if found[-1] < limit:
            return
    raise AssertionError(f"ratios {found}, allowed {limit}")
