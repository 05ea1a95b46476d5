# SPDX-License-Identifier: Apache-2.0
"""Field reports, group D: index width and launch limits (entries 47 to 51)."""
import mmap

import numpy as np
import pytest

import c_call
import fastweight_c as fw
from field import both_within, problem, same_bits
from oracle import cases, yardstick


def sparse(elements, dtype):
    """Address space without memory behind it: only pages that are touched exist."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        return np.frombuffer(mmap.mmap(-1, elements * np.dtype(dtype).itemsize, flags=flags), dtype)
    except OSError:
        pytest.skip("the machine refuses this much address space")


def test_field_047_tensors_wider_than_two_to_the_31(context):
    """Two sequences of 20 tokens whose rows lie 2^31 + 640 elements apart, inputs, outputs and gradients alike."""
    call = problem("gated_delta_rule", seed=47, B=2, T=20, K=16, V=16)
    seeds = cases.incoming(call)
    expected = c_call.forward(context, call, "bf16", raw=True)
    expected_grads = c_call.backward(context, call, seeds, "bf16", raw=True)
    far = 2 ** 31 + 640
    buffer = sparse(far + 64 * 1024, np.uint16)
    at = [0]

    def place(x):
        """A view of the buffer with the batch stride `far`, holding x."""
        dense = np.zeros(x.shape[1:], x.dtype)
        view = np.lib.stride_tricks.as_strided(buffer[at[0]:], x.shape, (far * 2, *dense.strides))
        at[0] += (dense.size + 63) // 64 * 64
        view[...] = x
        return view

    running = c_call.Running(call, "bf16", views={name: place for name in ("q", "k", "v")})
    o = place(np.full(expected["o"].shape, 0x7FC0, np.uint16))
    running.desc.set("o", o)
    fw.run(context, "recurrence", running.desc, fw.FORWARD)
    assert o.tobytes() == expected["o"].tobytes()
    grads = fw.RecurrenceGrads(**{name: fw.store(x, c_call.storage_of(name, "bf16", None)) for name, x in seeds.items()})
    views = {name: place(np.full(running.inputs[name[1]].shape, 0x7FC0, np.uint16)) for name in ("dq", "dk", "dv")}
    for name, view in views.items():
        grads.set(name, view)
    fw.run(context, "recurrence", running.desc, fw.BACKWARD, grads)
    same_bits({name: view.copy() for name, view in views.items()}, {name: expected_grads[name] for name in views})


@pytest.mark.parametrize("op", ("gla", "gated_delta_rule"))
def test_field_048_long_context(context, op):
    T = 131072
    rng = np.random.default_rng(48)
    call = problem(op, seed=48, T=T, H=1, K=16, V=16, state=False)
    call.g = -0.01 * np.abs(rng.standard_normal(call.g.shape))
    call = c_call.rounded(call, "f32")
    out = c_call.forward(context, call, "f32")
    start = c_call.slice_tokens(call, 0, T - 64)
    middle = c_call.forward(context, start, "f32")["final_state"]
    tail = c_call.slice_tokens(call, T - 64, T, initial_state=middle)
    yardstick.check({"o": out["o"][:, -64:], "final_state": out["final_state"]}, yardstick.bounds(tail, "f32"))
    d_o = np.zeros_like(out["o"])
    d_o[:, -64:] = rng.standard_normal((1, 64, 1, 16)).astype(np.float32)
    grads = c_call.backward(context, call, {"d_o": d_o}, "f32")
    assert all(np.isfinite(x).all() for x in grads.values())
    allowed = yardstick.bounds(tail, "f32", {"d_o": d_o[:, -64:]})
    allowed.pop("d_initial_state")
    yardstick.check({name: x[:, -64:] for name, x in grads.items()}, allowed)


@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_field_049_sizes_are_computed_in_64_bits(context, op):
    def sizes(B, T, H):
        small = problem(op, T=1, H=1, K=128, V=128, state=False)
        running = c_call.Running(small, "f32")
        for name in (*small.given(), "o"):
            x = getattr(running.desc, name)
            if name == "o":
                x = fw.tensor(np.zeros((1, 1, 1, 128), np.float32))
            per = x.shape[1] if name not in ("a_log", "dt_bias") else 1
            for i, n in enumerate((B, T * per, H)):
                x.shape[i] = n
            stride = 1
            for i in reversed(range(x.ndim)):
                x.strides[i] = stride
                stride *= x.shape[i]
            x.data = None
            setattr(running.desc, name, x)
        return [fw.workspace_size(context, "recurrence", running.desc, fw.FORWARD), fw.saved_size(context, running.desc),
                fw.workspace_size(context, "recurrence", running.desc, fw.BACKWARD)]

    # as many heads in both: with fewer heads than threads the forward takes scratch to share one head's panels
    small, large = sizes(4, 1024, 64), sizes(4, 2 ** 20, 64)
    assert large[1] == small[1] * 1024  # what is saved is per token and head, and exceeds 2^32 bytes
    assert small[1] == 0 or large[1] > 2 ** 32
    assert all(big >= little for big, little in zip(large, small))


def test_field_050_many_sequences(context):
    N = 16385
    call = problem("gated_delta_rule", seed=50, B=N, T=1, H=2, HV=4, K=8, V=8)
    call = c_call.rounded(call, "f32")
    allowed = yardstick.bounds(call, "f32")
    state = fw.store(call.initial_state, "f32")
    o = c_call.step(context, c_call.slice_tokens(call, 0, 1), state)
    yardstick.check({"o": o, "final_state": state.astype(np.float64)}, allowed)
    packed = cases.Call(**{**call.settings(), **{name: x if name == "initial_state" else x.reshape(1, N, *x.shape[2:])
                                                 for name, x in call.given().items()}},
                        cu_seqlens=np.arange(N + 1, dtype=np.int32))
    found = c_call.forward(context, packed, "f32")
    yardstick.check({"o": found["o"].reshape(N, 1, 4, 8), "final_state": found["final_state"]}, allowed)


@pytest.mark.parametrize("K,V", ((72, 72), (24, 40), (80, 96), (100, 100)))
@pytest.mark.parametrize("op", ("gated_delta_rule", "kda"))
def test_field_051_head_sizes_that_are_no_power_of_two(context, op, K, V):
    for B in (1, 2, 8, 9):
        both_within(context, problem(op, seed=B, B=B, T=9, H=1, K=K, V=V), ("f32",), f"{op} B = {B}")
    both_within(context, problem(op, seed=51, T=18, H=1, K=K, V=V), ("bf16",), op)
