# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels against NumPy within the error rule: spot checks of every row, forward and backward, three storage types.
(The full grid is the C++ tests'.)"""
import numpy as np
import pytest

import c_call
import fastweight_c as fw
from oracle import cases, yardstick

DTYPES = ("f32", "bf16", "f16")


def check_both(context, call, dtype, what, **how):
    call = c_call.rounded(call, dtype)
    seeds = c_call.rounded_incoming(cases.incoming(call), dtype)
    yardstick.check(c_call.forward(context, call, dtype, **how), yardstick.bounds(call, dtype), what)
    assert not fw.last_impl().startswith("reference"), fw.last_impl()
    yardstick.check(c_call.backward(context, call, seeds, dtype, **how), yardstick.bounds(call, dtype, seeds), what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_row(context, op, dtype):
    check_both(context, cases.make(op, seed=40, T=70, H=1, HV=2, K=24, V=20, strength=0.3), dtype, f"{op} {dtype}")


@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_row_packed(context, op):
    check_both(context, cases.make(op, seed=41, T=83, H=2, HV=2, K=9, V=33, cu=[0, 17, 17, 18, 83], layout="vk"), "f32", op)


@pytest.mark.parametrize("op", ("simple_gla", "gla", "gated_delta_rule", "kda", "comba", "dplr"))
def test_strong_gates(context, op):
    check_both(context, cases.make(op, seed=42, T=70, H=1, HV=2, K=16, V=16, strength=8.0), "f32", op)


@pytest.mark.parametrize("op", ("delta_rule", "gated_delta_rule", "kda", "comba"))
def test_similar_keys(context, op):
    call = cases.make(op, seed=43, T=70, H=1, HV=2, K=16, V=16, strength=0.05)
    rng = np.random.default_rng(44)
    call.k = cases.unit(cases.unit(rng.standard_normal(16)) + 0.48 * cases.unit(rng.standard_normal(call.k.shape)))
    if call.p is not None:
        call.p = call.k.copy()
    call.beta = rng.uniform(0.95, 1, call.beta.shape)
    check_both(context, call, "f32", op)


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "rwkv7"))
def test_recurrent_form(context, op):
    check_both(context, cases.make(op, seed=45, T=37, HV=2, K=8, V=12), "f32", op, form="recurrent")


@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_step(context, op):
    call = c_call.rounded(cases.make(op, seed=46, B=2, T=5, H=1, HV=2, K=20, V=24, layout="vk"), "f32")
    state = fw.store(call.initial_state, "f32")
    found = {"o": c_call.step(context, c_call.slice_tokens(call, 0, 5), state)}
    yardstick.check({**found, "final_state": state.astype(np.float64)}, yardstick.bounds(call, "f32"), op)


def test_normalizer(context):
    check_both(context, cases.make("linear_attn", seed=47, T=70, H=2, HV=4, K=8, V=5, normalizer=True), "f32", "normalizer")


def test_maps_inside(context):
    for op, kind in (("gated_delta_rule", "softplus"), ("kda", "bounded"), ("gla", "log_sigmoid"), ("dplr", "rwkv7")):
        beta = {"beta_input": "sigmoid"} if op in ("gated_delta_rule", "kda") else {}
        check_both(context, cases.make(op, seed=48, T=40, HV=2, K=12, V=8, gate_input=kind, qk_norm=True, **beta), "f32", op)


def test_saved_buffer(context):
    for op in ("gated_delta_rule", "kda", "dplr"):
        call = c_call.rounded(cases.make(op, seed=49, T=70, HV=2, K=12, V=8), "f32")
        seeds = cases.incoming(call)
        found = c_call.backward(context, call, seeds, "f32", saved=True)
        yardstick.check(found, yardstick.bounds(call, "f32", c_call.rounded_incoming(seeds, "f32")), op)
