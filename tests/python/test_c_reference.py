# SPDX-License-Identifier: Apache-2.0
"""The two truths, written apart from each other, say the same: C++ reference against NumPy, fp64, to 1e-12 of the peak."""
import numpy as np
import pytest

import c_call
import fastweight_c as fw
from oracle import cases
from oracle.recurrence import backward, forward

# Both sum at most 64 terms a row over at most 40 tokens in fp64: 40 * 64 * 1.1e-16 = 3e-13 is the most they can differ by when
# no sum cancels; peaks are taken over the tensor, so that single cancelled elements do not decide.
AGREE = 1e-12

VARIANTS = {
    "batch": dict(B=2, T=7, H=2, HV=4, K=5, V=3),
    "packed_vk": dict(T=19, H=1, HV=3, K=4, V=7, cu=[0, 0, 1, 12, 12, 19], layout="vk"),
    "no_state": dict(B=1, T=33, H=2, K=8, V=6, state=False),
    "one_token": dict(B=3, T=1, H=1, HV=2, K=1, V=2),
    "scaled": dict(B=1, T=40, H=1, K=3, V=1, scale=1.7, strength=3.0),
    "no_token": dict(B=2, T=0, H=1, HV=2, K=3, V=2),
}
GATES, ERASES = ("none", "scalar", "vector"), ("none", "shared_after", "shared_before", "independent")


def assert_same(found, expected, what):
    assert set(found) == set(expected), f"{what}: {sorted(set(found) ^ set(expected))}"
    for name, x in expected.items():
        scale = np.abs(x).max(initial=0)
        error = np.abs(found[name] - x).max(initial=0)
        assert error <= AGREE * scale, f"{what} {name}: {error / max(scale, 1e-300):.1e} of the peak"


def compare(context, call, what):
    seeds = cases.incoming(call)
    assert_same(c_call.forward(context, call), forward(call), what + " forward")
    assert fw.last_impl() == "reference_recurrent"
    assert_same(c_call.backward(context, call, seeds), backward(call, **seeds), what + " backward")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_row(reference, op, variant):
    compare(reference, cases.make(op, seed=30, **VARIANTS[variant]), f"{op} {variant}")


@pytest.mark.parametrize("erase", ERASES)
@pytest.mark.parametrize("gate", GATES)
def test_axes(reference, gate, erase):
    compare(reference, cases.make("by_axes", seed=31, B=2, T=9, H=2, HV=4, K=5, V=3, gate=gate, erase=erase), f"{gate} {erase}")


@pytest.mark.parametrize("kind", ("softplus", "log_sigmoid", "bounded", "rwkv7"))
@pytest.mark.parametrize("op", ("simple_gla", "gla", "gated_delta_rule", "kda", "comba", "gdn2", "dplr"))
def test_maps_inside(reference, op, kind):
    beta = {"beta_input": "sigmoid_twice"} if op in ("gated_delta_rule", "kda", "comba") else {}
    compare(reference, cases.make(op, seed=32, B=2, T=9, H=1, HV=2, K=4, V=3, gate_input=kind, qk_norm=True, gate_normalizer=9.0,
                                  gate_lower_bound=-3.0, **beta), f"{op} {kind}")


def test_beta_logits(reference):
    compare(reference, cases.make("delta_rule", seed=33, T=9, HV=2, beta_input="sigmoid", qk_norm=True), "delta_rule logits")


@pytest.mark.parametrize("cu", (None, [0, 3, 3, 20]))
def test_normalizer(reference, cu):
    compare(reference, cases.make("linear_attn", seed=34, T=20, H=2, HV=6, K=3, V=4, cu=cu, normalizer=True), "normalizer")


@pytest.mark.parametrize("n_sub", (1, 2, 3))
@pytest.mark.parametrize("cu", (None, [0, 1, 1, 11]))
def test_product(reference, n_sub, cu):
    call = cases.make("gated_delta_product", seed=35, T=11, HV=2, n_sub=n_sub, cu=cu)
    compare(reference, call, f"product {n_sub}")
    call.g = None
    compare(reference, call, f"product {n_sub} without gate")


def test_lightning_layers(reference):
    for layer in (0, 3, 7):
        compare(reference, cases.make("lightning", seed=36, T=8, H=2, HV=4, layer_idx=layer, num_layers=8), f"layer {layer}")


def test_extreme_gates(reference):
    for op in ("simple_gla", "gla", "gated_delta_rule", "kda", "comba", "dplr", "rwkv7", "gdn2"):
        call = cases.make(op, seed=37, T=12, K=4, V=3)
        call.g[0, 2], call.g[0, 4], call.g[0, 6], call.g[0, 8] = -np.inf, -1000, 0, -1e-8
        compare(reference, call, op)


def test_growth(reference):
    for op in ("simple_gla", "kda", "dplr"):
        call = cases.make(op, seed=38, T=12, K=4, V=3)
        call.g = np.abs(call.g)
        compare(reference, call, op)
