# SPDX-License-Identifier: Apache-2.0
"""Field reports, group B: wrong or unstable gradients (entries 18 to 30)."""
import numpy as np
import pytest

import c_call
import c_neighbours
import fastweight_c as fw
from field import BOTH, backward_within, both_within, error_text, problem, same_bits, tokens_of
from oracle import cases, gates, neighbours, yardstick
from oracle.recurrence import backward


@pytest.mark.parametrize("K", (16, 32, 64, 96, 100, 128, 256))
@pytest.mark.parametrize("T", (64, 65))
def test_field_018_gradients_at_every_key_size(context, K, T):
    backward_within(context, problem("gated_delta_rule", seed=18, T=T, H=1, K=K, V=16), "f32")


def test_field_019_each_gradient_of_one_chunk(context):
    found = backward_within(context, problem("delta_rule", seed=19, T=64, K=64, V=64), "f32")
    assert {"dq", "dk", "dv", "dbeta"} <= set(found)
    backward_within(context, problem("delta_rule", seed=19, T=64, K=64, V=64), "bf16")


@pytest.mark.parametrize("dtype", BOTH)
def test_field_020_gate_gradient_under_strong_decay(context, dtype):
    call = problem("gated_delta_rule", seed=20, T=70, K=8, V=8, state=False)
    call.g[:] = -6
    seeds = {"d_o": cases.incoming(call)["d_o"]}
    backward_within(context, call, dtype, seeds=seeds)
    truth = backward(c_call.rounded(call, dtype), **c_call.rounded_incoming(seeds, dtype))["dg"]
    assert yardstick.rms(truth) < 2e-3  # a small difference of sums near 1
    logits = problem("gated_delta_rule", seed=20, T=70, K=8, V=8, state=False, gate_input="softplus")
    logits.g[:], logits.a_log[:], logits.dt_bias[:] = 6.0, 0.0, 0.0
    found = backward_within(context, logits, dtype, seeds=seeds)
    assert {"d_a_log", "d_dt_bias"} <= set(found)


@pytest.mark.parametrize("op", ("kda", "gated_delta_rule", "dplr", "linear_attn"))
def test_field_021_rows_of_no_sequence_have_gradient_zero(context, op):
    call = problem(op, seed=21, T=128, K=8, V=8, cu=[0, 50, 100])
    both_within(context, call, BOTH, op)
    for name, x in c_call.backward(context, call, cases.incoming(call), "f32").items():
        if name != "d_initial_state":
            assert not x[:, 100:].any() and x[:, :100].any(), name
    assert not c_call.forward(context, call, "f32")["o"][:, 100:].any()


def test_field_021_no_gradient_of_a_state_that_was_not_given(context):
    call = problem("kda", seed=21, T=8, K=8, V=8, state=False)
    running = c_call.Running(call, "f32")
    grads = fw.RecurrenceGrads(d_o=np.zeros((1, 8, 2, 8), np.float32), d_initial_state=np.zeros((1, 2, 8, 8), np.float32))
    text = error_text(lambda: fw.run(context, "recurrence", running.desc, fw.BACKWARD, grads))
    assert text == "kda: d_initial_state is asked for, but initial_state is not given"


def test_field_022_weight_gradient_sees_the_gated_value(context):
    rng = np.random.default_rng(22)
    x, gate, weight = rng.standard_normal((5, 24)), rng.standard_normal((5, 24)), rng.standard_normal((7, 24))
    gate[:, 11] = 0
    y = c_neighbours.norm(context, "rms", x, gate=gate, gate_activation="silu")
    dy = rng.standard_normal((5, 7))
    inputs = {"x": y.astype(np.float32), "weight": weight.astype(np.float32)}
    found = c_neighbours.call(context, "linear", fw.BACKWARD, inputs, {"dweight": ((7, 24), np.float32)},
                              grads={"dy": dy.astype(np.float32)})["dweight"]
    assert not found[:, 11].any()
    truth = dy.T @ neighbours.norm("rms", x, gate=gate, gate_activation="silu")
    # x, gate, y, dy rounded to fp32 and sums of 5 terms: a dozen round-offs of the largest product
    assert np.abs(found - truth).max() <= 12 * yardstick.U32 * (np.abs(dy).T @ np.abs(y)).max()


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "gla", "dplr"))
def test_field_023_gradient_of_the_initial_state(context, op):
    call = c_call.rounded(problem(op, seed=23, T=130, strength=0.02), "bf16")
    seeds = c_call.rounded_incoming(cases.incoming(call), "bf16")
    found = c_call.backward(context, call, seeds, "bf16", only=("d_initial_state",))["d_initial_state"]
    truth = backward(call, **seeds)["d_initial_state"]
    assert np.linalg.norm(found - truth) <= 0.02 * np.linalg.norm(truth)


@pytest.mark.parametrize("dtype", BOTH)
def test_field_024_no_gate_and_zero_gates(context, dtype):
    bare = problem("linear_attn", seed=24, T=70)
    zero = cases.Call(op="simple_gla", g=np.zeros((1, 70, 2)), **bare.given())
    free = backward_within(context, bare, dtype)
    gated = backward_within(context, zero, dtype)
    for name, x in free.items():
        # the gated chunk multiplies by exp(0): the same sums, perhaps in another order
        assert np.abs(gated[name] - x).max() <= 2.0 ** (-18 if dtype == "f32" else -8) * np.abs(x).max(), name
    zero.g = None
    text = error_text(lambda: c_call.forward(context, zero, dtype))
    assert text == "simple_gla: g is missing"


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "simple_gla"))
def test_field_025_zero_gates_twenty_times(context, op):
    call = problem(op, seed=25, T=256)
    call.g[:] = 0
    seeds = cases.incoming(call)
    first = c_call.backward(context, call, seeds, "f32", raw=True)
    for _ in range(19):
        same_bits(c_call.backward(context, call, seeds, "f32", raw=True), first, op)


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "delta_rule", "dplr", "comba"))
def test_field_026_two_halves_with_states_passed_by_hand(context, op):
    call = c_call.rounded(problem(op, seed=26, T=128, H=3, K=16, V=16), "f32")
    seeds = c_call.rounded_incoming(cases.incoming(call), "f32")
    allowed = yardstick.bounds(call, "f32", seeds)
    first = tokens_of(call, 0, 0, 64, initial_state=call.initial_state)
    middle = c_call.forward(context, first, "f32")["final_state"]
    second = tokens_of(call, 0, 64, 128, initial_state=middle)
    late = c_call.backward(context, second, {"d_o": seeds["d_o"][:, 64:], "d_final_state": seeds["d_final_state"]}, "f32")
    early = c_call.backward(context, first, {"d_o": seeds["d_o"][:, :64], "d_final_state": late["d_initial_state"]}, "f32")
    found = {name: early[name] if name == "d_initial_state" else np.concatenate([early[name], late[name]], 1) for name in early}
    yardstick.check(found, allowed, op)


def test_field_027_tail_of_the_last_chunk_when_packed(context):
    for r in range(1, 64):
        call = problem("kda", seed=27, T=64 + r, H=1, K=8, V=8, cu=[0, 64, 64 + r])
        seeds = cases.incoming(call)
        packed = c_call.backward(context, call, seeds, "f32", raw=True)
        for n, (first, last) in enumerate(((0, 64), (64, 64 + r))):
            alone = tokens_of(call, 0, first, last, initial_state=call.initial_state[n:n + 1])
            own = {"d_o": seeds["d_o"][:, first:last], "d_final_state": seeds["d_final_state"][n:n + 1]}
            expected = c_call.backward(context, alone, own, "f32", raw=True)
            found = {name: x[n:n + 1] if name == "d_initial_state" else x[:, first:last] for name, x in packed.items()}
            same_bits(found, expected, f"r = {r}, sequence {n}")


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "gdn2", "comba", "rwkv7"))
def test_field_028_gradients_summed_over_the_group(context, op):
    call = problem(op, seed=28, T=40, H=1, HV=2, K=16, V=16)
    backward_within(context, call, "f32", op)
    call = c_call.rounded(problem(op, seed=29, T=40, H=2, HV=6, K=16, V=16), "f32")
    seeds = c_call.rounded_incoming(cases.incoming(call), "f32")
    allowed = yardstick.bounds(call, "f32", seeds)
    by_key_head = [name for name in ("q", "k", "a", "b", "p", "erase_gate") if getattr(call, name) is not None]
    wide = cases.Call(**{**call.settings(), **call.given(),
                         **{name: np.repeat(getattr(call, name), 3, axis=2) for name in by_key_head}})
    found = c_call.backward(context, wide, seeds, "f32")
    for name, of in c_call.GRADS.items():
        if of in by_key_head:
            found[name] = found[name].reshape(1, 40, 2, 3, 16).sum(3)
    yardstick.check(found, allowed, op)


@pytest.mark.parametrize("op", ("gated_delta_rule", "kda", "comba"))
def test_field_029_zero_rows_under_the_norm_inside(context, op):
    call = problem(op, seed=30, T=40, qk_norm=True, state=False)
    call.k[0, 5], call.q[0, 9] = 0, 0
    seeds = {"d_o": cases.incoming(call)["d_o"]}
    for dtype in BOTH:
        found = backward_within(context, call, dtype, seeds=seeds)
        plain = cases.Call(**{**call.settings(), **call.given(), "qk_norm": False})
        inner = backward(plain, **seeds)
        for name, row in (("dk", 5), ("dq", 9)):
            # at a zero row the norm multiplies the gradient by 1 / sqrt(1e-6) and nothing else
            assert np.abs(found[name][0, row]).max() <= 1.05e3 * np.abs(inner[name]).max()
    zero = np.zeros((3, 8))
    dx = c_neighbours.call(context, "norm", fw.BACKWARD, {"x": zero.astype(np.float32)}, {"dx": ((3, 8), np.float32)},
                           {"kind": "l2"}, grads={"dy": np.ones((3, 8), np.float32)})["dx"]
    assert np.allclose(dx, 1e3, rtol=1e-6)


def test_field_030_a_large_kda_backward(context):
    """d_o is zero from token 100 on: gradients before it are those of 100 tokens, gradients after it are zero."""
    call = c_call.rounded(problem("kda", seed=31, T=2048, H=16, K=128, V=128, state=False), "bf16")
    d_o = fw.load(fw.store(np.random.default_rng(31).standard_normal((1, 2048, 16, 128)), "bf16"))
    d_o[:, 100:] = 0
    found = c_call.backward(context, call, {"d_o": d_o}, "bf16")
    for name in ("dq", "dk", "dv", "dg", "dbeta"):
        assert np.isfinite(found[name]).all() and not found[name][:, 100:].any(), name
    start = tokens_of(call, 0, 0, 100)
    head = cases.Call(**{**start.settings(), **{name: x[:, :, 5:6] for name, x in start.given().items()}})
    mine = {name: x[:, :100, 5:6] for name, x in found.items()}
    yardstick.check(mine, yardstick.bounds(head, "bf16", {"d_o": d_o[:, :100, 5:6]}))


def test_field_020_gate_activation_gradients(context):
    """The gate's own derivative, which the report saw corrupted: logits from -100 to 100 against fp64."""
    x = np.linspace(-100, 100, 84).reshape(1, 7, 12)
    for kind in ("softplus", "log_sigmoid", "bounded", "rwkv7"):
        dx = c_neighbours.call(context, "gate_activation", fw.BACKWARD, {"x": x.astype(np.float32)},
                               {"dx": (x.shape, np.float32)}, {"kind": kind}, grads={"dy": np.ones(x.shape, np.float32)})["dx"]
        truth = gates.gate_backward(kind, np.ones_like(x), x.astype(np.float32).astype(np.float64))[0]
        assert np.allclose(dx, truth, rtol=2e-5, atol=1e-37), kind
