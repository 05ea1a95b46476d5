# SPDX-License-Identifier: Apache-2.0
"""The error rule itself: an honest computation passes, planted faults are caught."""
import numpy as np
import pytest

from oracle import cases, yardstick
from oracle.recurrence import Rounding, backward, forward


def held(storage, op="gated_delta_rule", T=96):
    """The data on which a narrow state shows: beta 0.02, g -1e-3, a state tens of times larger than the writes."""
    call = cases.make(op, seed=1, T=T, H=2, K=16, V=8)
    call.beta = np.full_like(call.beta, 0.02)
    call.g = np.full_like(call.g, -1e-3)
    call.initial_state *= 30
    seeds = cases.incoming(call)
    seeds["d_final_state"] *= 30
    if storage != "f32":
        bits = yardstick.BITS[storage]
        for x in (call.q, call.k, call.v, seeds["d_o"]):
            x[...] = yardstick.to_bits(x, bits)
    else:
        call = call.with_dtype(np.float32).with_dtype(np.float64)
        seeds = {name: x.astype(np.float32).astype(np.float64) for name, x in seeds.items()}
    return call, seeds


def answers(call, seeds, rounding=Rounding()):
    call32 = call.with_dtype(np.float32)
    out = {**forward(call32, rounding),
           **backward(call32, **{name: x.astype(np.float32) for name, x in seeds.items()}, rounding=rounding)}
    return {name: x.astype(np.float64) for name, x in out.items()}


def allowed(call, seeds, storage):
    return {**yardstick.bounds(call, storage), **yardstick.bounds(call, storage, seeds)}


@pytest.mark.parametrize("storage", ("f32", "bf16", "f16"))
@pytest.mark.parametrize("op", ("gated_delta_rule", "kda"))
def test_honest_fp32_passes(op, storage):
    call, seeds = held(storage, op)
    found = answers(call, seeds)
    yardstick.check({name: yardstick.stored(name, x, storage) for name, x in found.items()}, allowed(call, seeds, storage))


@pytest.mark.parametrize("fault", ("operands", "reads"))
def test_half_precision_inside_an_fp32_call_is_caught(fault):
    call, seeds = held("f32")
    def narrow(x):
        return yardstick.to_bits(x, 8)
    found = answers(call, seeds, Rounding(read=narrow) if fault == "reads" else Rounding(operand=narrow))
    with pytest.raises(AssertionError, match="RMS error"):
        yardstick.check(found, allowed(call, seeds, "f32"))


def test_bf16_state_is_caught_in_a_bf16_call():
    call, seeds = held("bf16")
    parts, state = [], call.initial_state
    for t in range(call.q.shape[1]):
        part = cases.Call(op=call.op, **{name: getattr(call, name)[:, t:t + 1] for name in ("q", "k", "v", "g", "beta")},
                          initial_state=state).with_dtype(np.float32)
        out = forward(part)
        parts.append(out["o"])
        state = yardstick.to_bits(out["final_state"], 8)
    found = {"o": np.concatenate(parts, 1).astype(np.float64), "final_state": state.astype(np.float64)}
    with pytest.raises(AssertionError, match="RMS error"):
        yardstick.check(found, yardstick.bounds(call, "bf16"))


def test_rounding_to_bits():
    x = np.array([1 + 2.0 ** -8, 1 + 2.0 ** -7, 1 + 3 * 2.0 ** -8, -np.inf, 3e38, 0], np.float64)
    assert yardstick.to_bits(x, 8)[:4].tolist() == [1, 1 + 2.0 ** -7, 1 + 2.0 ** -6, -np.inf]
    half = np.random.default_rng(0).standard_normal(1000)
    assert np.array_equal(yardstick.to_bits(half, 11), half.astype(np.float16).astype(np.float64))
