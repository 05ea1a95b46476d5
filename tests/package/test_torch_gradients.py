# SPDX-License-Identifier: Apache-2.0
"""Gradients of every row and neighbour through autograd: against the fp64 oracle's reverse recurrence, by the error rule in
the storage types, and by torch's own gradcheck."""
import numpy as np
import pytest

from package_calls import arguments, fastweight, IS_CUDA, needs_neighbours, no_fp64, ops, ran_kernels, stored, to_numpy, to_torch, torch

if torch is None:
    pytest.skip("not run: torch is not installed", allow_module_level=True)

import c_call
import fastweight_c
from oracle import cases, gates, neighbours, recurrence, yardstick

# As for the forward: sums of at most 64 terms over at most 40 tokens, forward and back.
AGREE = 1e-12
TYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
INCOMING = {"o": "d_o", "final_state": "d_final_state", "final_z": "d_final_z"}


def gradients(call, dtype, seeds, **how):
    """What autograd leaves in each operand, as {"dq": float64 array, ...}; asserts that no input was written."""
    inputs = stored(call, dtype, as_torch=True)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items() if x.is_floating_point()}
    answer = getattr(ops, call.op)(**arguments(call, {**inputs, **leaves}), **how)
    assert answer[0].requires_grad
    if "form" in how and not IS_CUDA:
        assert fastweight.last_impl().endswith(how["form"])
    names = ("o", "final_state", "final_z")[:len(answer)]
    results, incoming = [], []
    for name, x in zip(names, answer):
        if x is None:
            continue
        seed = seeds[INCOMING[name]]
        results.append(x)
        incoming.append(to_torch(np.ascontiguousarray(seed)).to(x.dtype))
    torch.autograd.backward(results, incoming)
    for name, x in leaves.items():
        assert to_numpy(x.detach()).tobytes() == to_numpy(inputs[name]).tobytes(), f"{call.op} wrote to {name}"
        assert x.grad.dtype == x.dtype and x.grad.shape == x.shape
    return {name: fastweight_c.load(to_numpy(leaves[of].grad)) for name, of in c_call.GRADS.items() if of in leaves}


def assert_same(found, expected, what):
    assert set(found) == set(expected), what
    for name, x in expected.items():
        assert np.abs(found[name] - x).max(initial=0) <= AGREE * max(np.abs(x).max(initial=0), 1), f"{what} {name}"


@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_fp64_is_the_oracle(op):
    for shape in (dict(B=2, T=7, H=2, HV=4, K=5, V=3), dict(T=19, H=1, HV=3, K=4, V=7, cu=[0, 0, 1, 12, 12, 19], layout="vk")):
        call = cases.make(op, seed=1, **shape)
        seeds = cases.incoming(call)
        assert_same(gradients(call, "f64", seeds), recurrence.backward(call, **seeds), op)


@pytest.mark.parametrize("dtype", ("f32", "bf16", "f16"))
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_storage_types_hold_the_error_rule(op, dtype):
    call = c_call.rounded(cases.make(op, seed=3, T=70, H=1, HV=2, K=24, V=20, strength=0.3), dtype)
    seeds = c_call.rounded_incoming(cases.incoming(call), dtype)
    found = gradients(call, dtype, seeds)
    assert ran_kernels()
    yardstick.check(found, yardstick.bounds(call, dtype, seeds), f"{op} {dtype}")


@pytest.mark.parametrize("form", ("chunk", "recurrent", "parallel"))
@pytest.mark.parametrize("op", ("linear_attn", "kda", "comba", "gated_delta_product", "dplr"))
def test_forms(op, form):
    if IS_CUDA and form == "parallel":
        pytest.skip("not run on cuda: the parallel form is a reference on the CPU")
    call = c_call.rounded(cases.make(op, seed=5, B=2, T=17, H=1, K=8, V=8, strength=0.3), "f32")
    seeds = c_call.rounded_incoming(cases.incoming(call), "f32")
    found = gradients(call, "f32", seeds, form=form)
    assert ran_kernels()  # the one backward of the kernels
    yardstick.check(found, yardstick.bounds(call, "f32", seeds), f"{op} {form}")


def test_activations_inside():
    call = cases.make("kda", seed=6, B=1, T=9, H=2, K=4, V=3)
    call.qk_norm, call.gate_input, call.beta_input = True, "softplus", "sigmoid_twice"
    rng = np.random.default_rng(1)
    call.a_log, call.dt_bias = rng.standard_normal(2), rng.standard_normal((2, 4))
    seeds = cases.incoming(call)
    found = gradients(call, "f64", seeds)
    assert {"d_a_log", "d_dt_bias"} <= set(found)
    assert_same(found, recurrence.backward(call, **seeds), "kda")


def test_only_what_is_asked_for():
    q, k, v = (torch.randn(1, 40, 2, 8) for _ in range(3))
    beta = torch.rand(1, 40, 2)
    whole = [x.clone().requires_grad_() for x in (q, k, v, beta)]
    ops.delta_rule(*whole)[0].square().sum().backward()
    for i in range(4):
        some = [x.clone().requires_grad_(j == i) for j, x in enumerate((q, k, v, beta))]
        ops.delta_rule(*some)[0].square().sum().backward()
        assert [x.grad is not None for x in some] == [j == i for j in range(4)]
        assert torch.equal(some[i].grad, whole[i].grad)


def test_incoming_gradients_of_any_stride_and_absent_ones():
    call = cases.make("gated_delta_rule", seed=2, B=2, T=20, H=2, K=4, V=4)
    inputs = stored(call, "f64", as_torch=True)

    def grad_of(loss):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        loss(*ops.gated_delta_rule(**arguments(call, leaves))).backward()
        return leaves["k"].grad

    seeds = {"d_o": np.ones((2, 20, 2, 4)), "d_final_state": np.zeros((2, 2, 4, 4))}
    expected = recurrence.backward(call, **seeds)["dk"]
    assert np.abs(grad_of(lambda o, s: o.sum()).numpy() - expected).max() < AGREE * np.abs(expected).max()  # stride 0
    transposed = grad_of(lambda o, s: (o.transpose(1, 3).contiguous() * torch.ones(2, 4, 2, 20, dtype=o.dtype)).sum())
    assert np.abs(transposed.numpy() - expected).max() < AGREE * np.abs(expected).max()
    seeds = {"d_o": np.zeros((2, 20, 2, 4)), "d_final_state": np.ones((2, 2, 4, 4))}
    expected = recurrence.backward(call, **seeds)["dk"]
    assert np.abs(grad_of(lambda o, s: s.sum()).numpy() - expected).max() < AGREE * np.abs(expected).max()


@pytest.mark.parametrize("T, cu", ((0, None), (5, [0, 0, 5, 5])))
def test_empty_sequences_pass_the_state_gradient(T, cu):
    call = cases.make("kda", seed=4, T=T, K=3, V=2, cu=cu)
    seeds = cases.incoming(call)
    assert_same(gradients(call, "f64", seeds), recurrence.backward(call, **seeds), "kda")


def test_minus_infinity_has_gradient_zero():
    q, k, v = (torch.randn(1, 24, 1, 8) for _ in range(3))
    g = torch.zeros(1, 24, 1, 8)
    g[0, 5], g[0, 17, 0, 3] = -torch.inf, -1000.0
    g.requires_grad_()
    leaves = [x.requires_grad_() for x in (q, k, v)]
    ops.kda(*leaves, g, torch.full((1, 24, 1), 0.5))[0].sum().backward()
    assert (g.grad[0, 5] == 0).all() and all(torch.isfinite(x.grad).all() for x in (*leaves, g))


@no_fp64
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_gradcheck(op):
    call = cases.make(op, seed=7, B=1, T=4, H=1, HV=2, K=2, V=2)
    inputs = stored(call, "f64", as_torch=True)
    names = list(inputs)

    def function(*tensors):
        return tuple(x for x in getattr(ops, op)(**arguments(call, dict(zip(names, tensors)))) if x is not None)

    assert torch.autograd.gradcheck(function, [inputs[name].clone().requires_grad_() for name in names])


# ---- the operations beside the family ----

RNG = np.random.default_rng(1)
X = RNG.standard_normal((2, 9, 6))
WEIGHT, BIAS, GATE = RNG.standard_normal((6, 4)), RNG.standard_normal(6), RNG.standard_normal((2, 9, 6))
LOGITS, A_LOG, DT_BIAS = 3 * RNG.standard_normal((2, 5, 3, 4)), RNG.standard_normal(3), RNG.standard_normal((3, 4))
QKV = {"q": RNG.standard_normal((2, 7, 4, 6)), "k": RNG.standard_normal((2, 7, 2, 6)), "v": RNG.standard_normal((2, 7, 2, 5))}
NEIGHBOURS = {
    "short_conv": (dict(x=X, weight=WEIGHT, bias=BIAS, initial_state=RNG.standard_normal((2, 6, 3))),
                   dict(activation="silu", output_final_state=True)),
    "l2_norm": (dict(x=X), {}),
    "rms_norm": (dict(x=X, weight=BIAS, gate=GATE), dict(gate_activation="silu")),
    "gate_activation": (dict(x=LOGITS, a_log=A_LOG, dt_bias=DT_BIAS), dict(kind="softplus")),
    "feature_map": (dict(x=X), dict(kind="elu_plus_one")),
    "attention": (QKV, dict(window=3, rope_theta=1e4)),
    "linear": (dict(x=X[0], weight=RNG.standard_normal((4, 6)), bias=RNG.standard_normal(4)), {}),
}
ORACLE = {
    "short_conv": lambda x, dy: neighbours.short_conv_backward(**x, activation="silu", dy=dy[0], d_final_state=dy[1]),
    "l2_norm": lambda x, dy: neighbours.norm_backward("l2", dy[0], **x),
    "rms_norm": lambda x, dy: neighbours.norm_backward("rms", dy[0], gate_activation="silu", **x),
    "gate_activation": lambda x, dy: dict(zip(("dx", "d_a_log", "d_dt_bias"), gates.gate_backward("softplus", dy[0], **x))),
    "feature_map": lambda x, dy: {"dx": dy[0] * gates.feature_map_slope("elu_plus_one", x["x"])},
    "attention": lambda x, dy: neighbours.attention_backward(dy[0], **x, window=3, rope_theta=1e4),
    "linear": lambda x, dy: neighbours.linear_backward(dy[0], **x),
}
NAMES = {"dx": "x", "dweight": "weight", "dbias": "bias", "d_initial_state": "initial_state", "dgate": "gate", "d_a_log": "a_log",
         "d_dt_bias": "dt_bias", "dq": "q", "dk": "k", "dv": "v"}


def run_neighbour(name, dtype):
    inputs, options = NEIGHBOURS[name]
    wide = ("a_log", "dt_bias")
    leaves = {key: to_torch(x).to(torch.float32 if dtype != torch.float64 and key in wide else dtype).requires_grad_()
              for key, x in inputs.items()}
    answer = getattr(ops, name)(**leaves, **options)
    results = answer if isinstance(answer, tuple) else (answer,)
    incoming = [to_torch(np.random.default_rng(2).standard_normal(x.shape)).to(x.dtype) for x in results]
    torch.autograd.backward(results, incoming)
    return leaves, incoming


@no_fp64
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_in_fp64(name):
    leaves, incoming = run_neighbour(name, torch.float64)
    expected = ORACLE[name](NEIGHBOURS[name][0], [x.numpy() for x in incoming])
    assert {NAMES[key] for key in expected if expected[key] is not None} == set(leaves)
    for key, x in expected.items():
        assert np.abs(leaves[NAMES[key]].grad.numpy() - x).max() <= AGREE * max(np.abs(x).max(), 1), f"{name} {key}"


@needs_neighbours
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_in_storage_types(name, dtype):
    leaves, incoming = run_neighbour(name, dtype)
    inputs = {key: to_numpy(x.detach().double()) for key, x in leaves.items()}
    expected = ORACLE[name](inputs, [to_numpy(x.double()) for x in incoming])
    # sums in fp32 of at most 20 terms of a few times their result's peak, then one round-off of the storage type
    allowed = 40 * 2.0 ** -24 + {torch.float32: 2.0 ** -24, torch.bfloat16: 2.0 ** -8, torch.float16: 2.0 ** -11}[dtype]
    for key, x in expected.items():
        found = leaves[NAMES[key]].grad
        assert found.dtype == leaves[NAMES[key]].dtype
        assert np.abs(to_numpy(found.double()) - x).max() <= allowed * max(np.abs(x).max(), 1), f"{name} {key}"


@no_fp64
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_gradcheck(name):
    inputs, options = NEIGHBOURS[name]
    keys = list(inputs)
    leaves = [to_torch(inputs[key][:1] if name == "attention" else inputs[key]).clone().requires_grad_() for key in keys]
    assert torch.autograd.gradcheck(lambda *tensors: getattr(ops, name)(**dict(zip(keys, tensors)), **options), leaves)
