# SPDX-License-Identifier: Apache-2.0
"""Every row of fastweight.ops against the fp64 oracle; NumPy and torch give the same bits; strides, packs, steps."""
import numpy as np
import pytest

from package_calls import (DEVICE, KINDS, arguments, fastweight, forward, needs_torch, numpy_only, ops, ran_kernels, stored, to_numpy, to_torch,
                           torch, values)

import c_call
import fastweight_c
from oracle import cases, recurrence, yardstick

# Both sides sum at most 64 terms a row over at most 40 tokens in fp64: 40 * 64 * 1.1e-16 = 3e-13 of the peak.
AGREE = 1e-12
SHAPE = dict(B=2, T=7, H=2, HV=4, K=5, V=3)
PACKED = dict(T=19, H=1, HV=3, K=4, V=7, cu=[0, 0, 1, 12, 12, 19], layout="vk")


def assert_same(found, expected, what):
    assert set(found) == set(expected), what
    for name, x in expected.items():
        assert found[name].shape == x.shape, f"{what} {name}: {found[name].shape}"
        assert np.abs(found[name] - x).max(initial=0) <= AGREE * np.abs(x).max(initial=0), f"{what} {name}"


@pytest.mark.parametrize("form", ("auto", "recurrent", "parallel"))
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_fp64_is_the_oracle(op, form):
    call = cases.make(op, seed=1, **SHAPE)
    assert_same(forward(call, form=form), recurrence.forward(call), f"{op} {form}")
    assert fastweight.last_impl() == ("reference_parallel" if form == "parallel" else "reference_recurrent")


@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_fp64_packed(op):
    call = cases.make(op, seed=2, **PACKED)
    assert_same(forward(call), recurrence.forward(call), op)


@pytest.mark.parametrize("dtype", ("f32", "bf16", "f16"))
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_storage_types_hold_the_error_rule(op, dtype):
    if dtype == "bf16" and torch is None:
        pytest.skip("not run: torch is not installed, NumPy alone has no bfloat16")
    call = c_call.rounded(cases.make(op, seed=3, T=70, H=1, HV=2, K=24, V=20, strength=0.3), dtype)
    found = forward(call, dtype, as_torch=dtype == "bf16")
    assert ran_kernels()
    assert found["o"].dtype == fastweight_c.STORAGE[dtype] and found["final_state"].dtype == np.float32
    yardstick.check(values(found), yardstick.bounds(call, dtype), f"{op} {dtype}")


@numpy_only
@needs_torch
@pytest.mark.parametrize("dtype", ("f64", "f32", "f16"))
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_numpy_and_torch_give_the_same_bits(op, dtype):
    call = cases.make(op, seed=4, T=21, H=2, HV=4, K=6, V=10)
    first, second = forward(call, dtype), forward(call, dtype, as_torch=True)
    assert first.keys() == second.keys()
    for name, x in first.items():
        assert x.dtype == second[name].dtype and x.tobytes() == second[name].tobytes(), f"{op} {name}"


def spread(x):
    """The same values with gaps between them, the last axis at twice its stride."""
    wide = np.zeros(x.shape[:-1] + (2 * x.shape[-1],), x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def turned(x):
    """The same values, the token axis backwards in memory."""
    return np.ascontiguousarray(x[:, ::-1])[:, ::-1]


def heads_first(x):
    """The same values, memory in the order [B,H,T,...]."""
    return np.ascontiguousarray(np.swapaxes(x, 1, 2)).swapaxes(1, 2)


@pytest.mark.parametrize("turn", (0, 1, 2))
@pytest.mark.parametrize("as_torch", KINDS)
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_strides_do_not_matter(op, as_torch, turn):
    call = cases.make(op, seed=5, B=2, T=9, H=2, HV=4, K=5, V=6)
    kinds = (heads_first, spread, turned)
    names = ("q", "k", "v", "g", "beta", "a", "b", "p", "erase_gate", "write_gate")
    views = {name: kinds[(i + turn) % 3] for i, name in enumerate(names)}
    views["initial_state"] = (heads_first, spread, spread)[turn]
    dense, strided = forward(call, "f32", as_torch), forward(call, "f32", as_torch, views)
    for name, x in dense.items():
        assert x.tobytes() == strided[name].tobytes(), f"{op} {name}"
        assert strided[name].flags["C_CONTIGUOUS"]


def test_an_operand_of_stride_zero():
    call = cases.make("gated_delta_rule", seed=6, B=1, T=9, H=2, K=4, V=4)
    call.beta = np.broadcast_to(np.float64(0.5), call.beta.shape)
    dense = forward(call, "f32", views={"beta": np.ascontiguousarray})
    broadcast = forward(call, "f32", views={"beta": lambda x: np.broadcast_to(np.float32(0.5), x.shape)})
    assert dense["o"].tobytes() == broadcast["o"].tobytes()


@pytest.mark.parametrize("index_type", (np.int32, np.int64))
def test_a_pack_is_its_sequences(index_type):
    call = cases.make("kda", seed=7, T=30, H=1, HV=2, K=8, V=8, cu=[0, 11, 11, 30])
    packed = forward(call, "f32")
    call.cu_seqlens = call.cu_seqlens.astype(index_type)
    assert forward(call, "f32")["o"].tobytes() == packed["o"].tobytes()
    alone = cases.make("kda", seed=7, T=30, H=1, HV=2, K=8, V=8, cu=[0, 11, 11, 30])
    for name, x in alone.given().items():
        setattr(alone, name, x[:1] if name == "initial_state" else x[:, :11])
    alone.cu_seqlens = None
    assert forward(alone, "f32")["o"].tobytes() == np.ascontiguousarray(packed["o"][:, :11]).tobytes()


@pytest.mark.parametrize("as_torch", KINDS)
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_a_step_is_the_recurrent_form(op, as_torch):
    call = cases.make(op, seed=8, B=2, T=5, H=1, HV=2, K=6, V=4, layout="vk")
    whole = forward(call, "f32", as_torch, form="recurrent")
    inputs = stored(call, "f32", as_torch)
    state = inputs.pop("initial_state")
    before = to_numpy(state).copy()
    tokens = arguments(call, inputs, is_step=True)
    n = call.n_sub
    found = []
    for t in range(5):
        one = {name: x[:, t * n:(t + 1) * n] if name in ("k", "v", "beta", "p", "erase_gate", "write_gate") else x[:, t:t + 1]
               for name, x in inputs.items()}
        found.append(to_numpy(getattr(ops, op + "_step")(**{**tokens, **one}, state=state)))
    assert to_numpy(state).tobytes() == whole["final_state"].tobytes()
    assert np.concatenate(found, 1).tobytes() == whole["o"].tobytes()
    assert before.tobytes() != to_numpy(state).tobytes()


@numpy_only
def test_a_step_through_a_pool_of_slots():
    call = cases.make("gated_delta_rule", seed=9, B=2, T=1, H=1, K=4, V=4)
    inputs = stored(call, "f32")
    first = inputs.pop("initial_state")
    pool = np.zeros((5,) + first.shape[1:], np.float32)
    pool[3] = first[0]
    untouched = pool.copy()
    o = ops.gated_delta_rule_step(**arguments(call, inputs, is_step=True), state=pool, state_indices=np.array([3, -1], np.int32))
    alone = first[:1].copy()
    expected = ops.gated_delta_rule_step(*(inputs[name][:1] for name in ("q", "k", "v", "g", "beta")), state=alone)
    assert o[:1].tobytes() == expected.tobytes() and (o[1] == 0).all()
    assert pool[3].tobytes() == alone[0].tobytes()
    assert pool[[0, 1, 2, 4]].tobytes() == untouched[[0, 1, 2, 4]].tobytes()


def test_the_normaliser_and_its_sum():
    call = cases.make("linear_attn", seed=10, T=9, H=2, HV=4, K=4, V=3, normalizer=True)
    assert_same(forward(call), recurrence.forward(call), "linear_attn")
    inputs = stored(call, "f64")
    state, z = inputs.pop("initial_state"), inputs.pop("initial_z")
    o = ops.linear_attn_step(**inputs, normalizer="sum", state=state, state_z=z)
    expected = recurrence.forward(call)
    assert_same({"o": o, "final_state": state, "final_z": z}, expected, "linear_attn_step")


@pytest.mark.parametrize("op, kind", (("gated_delta_rule", "softplus"), ("kda", "bounded"), ("gla", "log_sigmoid"), ("dplr", "rwkv7")))
def test_gates_and_norms_inside(op, kind):
    beta = {"beta_input": "sigmoid_twice"} if op in ("gated_delta_rule", "kda") else {}
    call = cases.make(op, seed=11, T=9, HV=2, K=4, V=4, gate_input=kind, qk_norm=True, scale=0.7, **beta)
    assert_same(forward(call), recurrence.forward(call), f"{op} {kind}")


@pytest.mark.parametrize("gate", ("none", "scalar", "vector"))
@pytest.mark.parametrize("erase", ("none", "shared_after", "shared_before", "independent"))
def test_by_axes(gate, erase):
    call = cases.make("by_axes", seed=12, gate=gate, erase=erase, **SHAPE)
    assert_same(forward(call), recurrence.forward(call), f"{gate} {erase}")


@numpy_only
def test_what_comes_back():
    q = np.zeros((1, 4, 1, 8), np.float16)
    o, state = ops.linear_attn(q, q, q)[:2]
    assert o.dtype == np.float16 and state is None
    o, state, z = ops.linear_attn(q, q, q, output_final_state=True, o_dtype="float32")
    assert o.dtype == np.float32 and state.dtype == np.float32 and z is None
    assert ops.linear_attn(q, q, q, o_dtype=np.float32)[0].dtype == np.float32
    assert isinstance(ops.linear_attn_step(q, q, q, state=np.zeros((1, 1, 8, 8), np.float32)), np.ndarray)
    o, state = ops.retention(q[:, :0], q[:, :0], q[:, :0], initial_state=np.ones((1, 1, 8, 8), np.float16), output_final_state=True)
    assert o.shape == (1, 0, 1, 8) and (state == 1).all()


@needs_torch
def test_torch_types_come_back():
    q = torch.zeros(1, 4, 1, 8, dtype=torch.bfloat16)
    o, state = ops.retention(q, q, q, output_final_state=True)
    assert o.dtype == torch.bfloat16 and o.device.type == DEVICE and o.is_contiguous() and state.dtype == torch.float32
    assert ops.retention(q, q, q, o_dtype=torch.float32)[0].dtype == torch.float32
    parameter = torch.nn.Parameter(q)
    with torch.no_grad():
        assert type(ops.retention(parameter, parameter, parameter)[0]) is torch.Tensor
    with torch.device("meta"):  # a default device of torch does not reach the result
        assert ops.retention(q, q, q, output_final_state=True)[1].device.type == DEVICE


@numpy_only
@needs_torch
def test_a_mixed_call_follows_the_first_tensor():
    q = torch.ones(1, 4, 1, 8)
    assert isinstance(ops.retention(q, q.numpy(), q.numpy())[0], torch.Tensor)
    assert isinstance(ops.retention(q.numpy(), q, q)[0], np.ndarray)


class OnlyDlpack:
    """Neither a buffer nor a torch tensor."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@numpy_only
def test_what_speaks_dlpack():
    q = np.random.default_rng(13).standard_normal((1, 4, 1, 8)).astype(np.float32)
    expected = ops.retention(q, q, q)[0]
    wrapped = OnlyDlpack(q)
    assert ops.retention(wrapped, wrapped, wrapped)[0].tobytes() == expected.tobytes()


@numpy_only
def test_bfloat16_of_numpy():
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="not run: ml_dtypes is not installed")
    q = np.random.default_rng(14).standard_normal((1, 4, 1, 8)).astype(ml_dtypes.bfloat16)
    o = ops.retention(q, q[..., ::-1], q)[0]
    assert o.dtype == ml_dtypes.bfloat16
    wide = q.astype(np.float32)
    expected = ops.retention(wide, wide[..., ::-1], wide, o_dtype="float32")[0]
    # a round-off of bfloat16 (2^-8 of the peak) for the result and another for operands that the kernel may round
    assert np.abs(o.astype(np.float32) - expected).max() <= 2.0 ** -7 * np.abs(expected).max()


@numpy_only
@needs_torch
def test_to_torch_shares_memory():
    x = np.zeros(3, np.float32)
    to_torch(x)[0] = 1
    assert x[0] == 1
