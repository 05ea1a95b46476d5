# SPDX-License-Identifier: Apache-2.0
"""The golden files replayed through the C library's reference in fp64: 1e-12 of each tensor's peak."""
import numpy as np
import pytest

import c_call
import c_neighbours
import fastweight_c as fw
from oracle import make_golden
from oracle.recurrence import Call

INCOMING = ("d_o", "d_final_state", "d_final_z", "dy")
GRADS_OF = {"short_conv": {"dx": "x", "dweight": "weight", "dbias": "bias", "d_initial_state": "initial_state"},
            "norm": {"dx": "x", "dweight": "weight", "dgate": "gate"},
            "gate_activation": {"dx": "x", "d_a_log": "a_log", "d_dt_bias": "dt_bias"},
            "feature_map": {"dx": "x"}, "attention": {"dq": "q", "dk": "k", "dv": "v"},
            "linear": {"dx": "x", "dweight": "weight", "dbias": "bias"}}
OUTPUTS = ("y", "final_state", "o")


def compare(found, tensors, what):
    assert found, what
    for name, x in found.items():
        scale = np.abs(tensors[name]).max(initial=0)
        assert np.abs(x - tensors[name]).max(initial=0) <= 1e-12 * scale, f"{what}: {name}"


@pytest.mark.parametrize("row", [name for name in make_golden.names() if name != "neighbours"])
def test_row(reference, row):
    for case, tensors in make_golden.load(row):
        operands = {name: x for name, x in tensors.items() if name in Call.__dataclass_fields__}
        call = Call(op=row, cu_seqlens=case.get("cu_seqlens"), **case["settings"], **operands)
        if call.cu_seqlens is not None:
            call.cu_seqlens = np.asarray(call.cu_seqlens, np.int32)
        compare(c_call.forward(reference, call), tensors, f"{row} {case['name']}")
        seeds = {name: x for name, x in tensors.items() if name in INCOMING}
        compare(c_call.backward(reference, call, seeds), tensors, f"{row} {case['name']}")


def test_neighbours(reference):
    for case, tensors in make_golden.load("neighbours"):
        op, grads_of = case["op"], GRADS_OF[case["op"]]
        outgoing = {name: x for name, x in tensors.items() if name in grads_of}
        seeds = {name: x for name, x in tensors.items() if name in INCOMING}
        results = {name: x for name, x in tensors.items() if name in OUTPUTS}
        inputs = {name: x for name, x in tensors.items() if name in grads_of.values()}
        if "cu_seqlens" in case:
            inputs["cu_seqlens"] = np.asarray(case["cu_seqlens"], np.int64)
        shapes = {name: (x.shape, np.float64) for name, x in results.items()}
        compare(c_neighbours.call(reference, op, fw.FORWARD, inputs, shapes, case["settings"]), tensors, case["name"])
        shapes = {name: (x.shape, np.float64) for name, x in outgoing.items()}
        found = c_neighbours.call(reference, op, fw.BACKWARD, inputs, shapes, case["settings"], grads=seeds)
        compare(found, tensors, case["name"])
