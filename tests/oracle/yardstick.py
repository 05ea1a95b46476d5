# SPDX-License-Identifier: Apache-2.0
"""How far from the truth a kernel may be: DESIGN.md section 2, rule 8, as numbers.

The yardstick is the token loop of recurrence.py in fp32, its products reading states and pseudo-values rounded to the storage
type and operands rounded off the storage grid, x -> round(c x) / c. Two runs (c = 1.3; c = 1.7 with the key axis reversed),
the larger error counts. For fp32 storage nothing is rounded and the two runs differ by the order of the key axis alone.

    RMS allowed  = m (1 + 4 / sqrt n) yardstick + 4 u32 rms(truth)
    max allowed  = 1.5 m (1 + 4 / sqrt n) yardstick + 4 u32 max|truth| + u_storage max|truth|

with m = 2 (o), 2.5 (states), 3 (gradients), six times that for fp32, and u the round-off of the type (half an ulp of 1). dg
is a difference of q dq and k dk: four fp32 round-offs of both are added. A tensor under 64 elements takes the largest
relative error of the yardstick's run. Frozen with the oracle; never loosened.
"""
from dataclasses import replace

import numpy as np

from .recurrence import Rounding, backward, forward

BITS = {"bf16": 8, "f16": 11}
ROUND_OFF = {"f32": 2.0 ** -24, "bf16": 2.0 ** -8, "f16": 2.0 ** -11}
U32 = 2.0 ** -24
ON_KEY_AXIS = {"q": -1, "k": -1, "a": -1, "b": -1, "p": -1, "erase_gate": -1, "initial_z": -1}


def to_bits(x, bits):
    """fp32 or fp64 to the nearest even of that many significant bits, without limits of the exponent."""
    word, width = (np.uint32, 24) if x.dtype == np.float32 else (np.uint64, 53)
    drop = word(width - bits)
    one = word(1)
    raw = np.ascontiguousarray(x).view(word)
    odd = (raw >> drop) & one
    rounded = ((raw + ((one << (drop - one)) - one + odd)) >> drop) << drop
    return np.where(np.isfinite(x), rounded.view(x.dtype), x)


def rounding_of(call, storage, c):
    if storage == "f32":
        return Rounding()
    bits = BITS[storage]
    operand = (lambda x: x) if call.axes() == ("none", "none") else lambda x: to_bits(x * x.dtype.type(c), bits) / x.dtype.type(c)
    return Rounding(read=lambda x: to_bits(x, bits), operand=operand)


def reverse_keys(tensors, call):
    """Operands, incoming or outgoing tensors with the key axis turned round."""
    out = {}
    key = -1 if call.layout == "vk" else -2
    for name, x in tensors.items():
        bare = name[2:] if name.startswith("d_") else name[1:] if name in ("dq", "dk", "da", "db", "dp", "dg") else name
        if bare in ON_KEY_AXIS or bare == "final_z" or (bare in ("g", "dt_bias") and call.axes()[0] == "vector"):
            x = np.flip(x, -1)
        elif bare in ("initial_state", "final_state"):
            x = np.flip(x, key)
        out[name] = x
    return out


def rms(x):
    return float(np.sqrt(np.mean(np.square(x)))) if x.size else 0.0


def peak(x):
    return float(np.abs(x).max(initial=0))


def multiple_of(name):
    if name == "o":
        return 2.0
    return 2.5 if name in ("final_state", "final_z", "state") else 3.0


def both_runs(call, storage, seeds):
    """What the yardstick answers, twice; gradients too when seeds are given."""
    call32 = call.with_dtype(np.float32)
    seeds32 = None if seeds is None else {name: x.astype(np.float32) for name, x in seeds.items()}
    for c, is_reversed in ((1.3, False), (1.7, True)):
        is_reversed = is_reversed and not call.normalizer
        one, ins = call32, seeds32
        if is_reversed:
            one = replace(call32, **reverse_keys(call32.given(), call))
            ins = None if seeds is None else reverse_keys(seeds32, call)
        rounding = rounding_of(call, storage, c)
        out = forward(one, rounding) if seeds is None else backward(one, **ins, rounding=rounding)
        yield reverse_keys(out, call) if is_reversed else out


def is_stored_narrow(name):
    """What has the type of q: outputs and gradients but for states and gates, which are fp32."""
    return name not in ("final_state", "final_z", "d_initial_state", "d_initial_z", "dg", "dbeta", "d_a_log", "d_dt_bias")


def stored(name, x, storage):
    """As the caller would get it."""
    return to_bits(x, BITS[storage]) if storage != "f32" and is_stored_narrow(name) else x


def bounds(call, storage, seeds=None):
    """name -> (truth, allowed rms, allowed max) of forward's outputs, or of backward's gradients when seeds are given.
    call and seeds hold fp64 values that the storage type can represent."""
    truth = forward(call) if seeds is None else backward(call, **seeds)
    errors = {name: [0.0, 0.0] for name in truth}
    for run in both_runs(call, storage, seeds):
        for name, x in truth.items():
            error = stored(name, run[name], storage).astype(np.float64) - x
            errors[name] = [max(errors[name][0], rms(error)), max(errors[name][1], peak(error))]
    relative = [max((e[i] / size(x) for e, x in ((errors[n], truth[n]) for n in truth) if size(x) > 0), default=0.0)
                for i, size in enumerate((rms, peak))]
    out = {}
    for name, x in truth.items():
        yard = errors[name] if x.size >= 64 else [relative[0] * rms(x), relative[1] * peak(x)]
        m = multiple_of(name) * (6 if storage == "f32" else 1) * (1 + 4 / np.sqrt(max(x.size, 1)))
        allowed = [m * yard[0] + 4 * U32 * rms(x), 1.5 * m * yard[1] + 4 * U32 * peak(x)]
        if storage != "f32" and is_stored_narrow(name):
            allowed[1] += ROUND_OFF[storage] * peak(x)
        if name == "dg":
            for part in products(call, truth):
                allowed = [allowed[0] + 4 * U32 * rms(part), allowed[1] + 4 * U32 * peak(part)]
        out[name] = (x, *allowed)
    return out


def products(call, truth):
    """q dq and k dk, summed over K first for a scalar gate."""
    for name in ("q", "k"):
        product = np.abs(getattr(call, name) * truth["d" + name])
        yield product.sum(-1) if call.axes()[0] == "scalar" else product


def check(found, allowed, what=""):
    """found: name -> fp64 array. Every name of `allowed` must be there, and within."""
    for name, (truth, allowed_rms, allowed_max) in allowed.items():
        assert found[name].shape == truth.shape, f"{what} {name}: shape {found[name].shape}, expected {truth.shape}"
        error = found[name] - truth
        assert rms(error) <= allowed_rms, f"{what} {name}: RMS error {rms(error):.3e}, allowed {allowed_rms:.3e}"
        assert peak(error) <= allowed_max, f"{what} {name}: error {peak(error):.3e}, allowed {allowed_max:.3e}"
