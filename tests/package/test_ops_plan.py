# SPDX-License-Identifier: Apache-2.0
"""Plans: the same bits as the function, new data each call, what they refuse, what they keep."""
import gc
import re
import threading
import weakref

import numpy as np
import pytest

from package_calls import IS_CUDA, KINDS, arguments, fastweight, needs_torch, numpy_only, ops, stored, to_numpy, torch

from oracle import cases

F = np.float32


def decode(op="kda", as_torch=False, K=16, V=8, B=1):
    call = cases.make(op, seed=1, B=B, T=1, H=1, HV=2, K=K, V=V)
    inputs = stored(call, "f32", as_torch)
    state = inputs.pop("initial_state")
    return arguments(call, inputs, is_step=True), state


def positional(op, inputs):
    names = ("q", "k", "v") + ops._build.ROWS[op].operands
    return [inputs[name] for name in names], {name: x for name, x in inputs.items() if name not in names}


@pytest.mark.parametrize("as_torch", KINDS)
@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_a_plan_of_a_step_is_the_step(op, as_torch):
    inputs, state = decode(op, as_torch)
    tensors, others = positional(op, inputs)
    step = getattr(ops, op + "_step")
    mine, other = (state.clone(), state.clone()) if as_torch else (state.copy(), state.copy())
    plan = ops.plan(step, *tensors, state=mine, **others)
    for i in range(3):
        moved = [x * (0.5 + i) if j == 0 else x for j, x in enumerate(tensors)]
        found, expected = plan(*moved), step(*moved, state=other, **others)
        assert to_numpy(found).tobytes() == to_numpy(expected).tobytes()
    assert to_numpy(mine).tobytes() == to_numpy(other).tobytes() != to_numpy(state).tobytes()


@numpy_only
def test_a_plan_of_a_forward():
    call = cases.make("gated_delta_rule", seed=2, T=9, H=2, HV=4, K=8, V=4)
    inputs = stored(call, "f32")
    tensors, others = positional("gated_delta_rule", arguments(call, inputs))
    plan = ops.plan(ops.gated_delta_rule, *tensors, **others)
    o, state = plan(*tensors)
    expected, expected_state = ops.gated_delta_rule(*tensors, **others)
    assert o.tobytes() == expected.tobytes() and state.tobytes() == expected_state.tobytes()
    again, _ = plan(*tensors)
    assert again is not o and not np.shares_memory(again, o)
    assert plan.names == ("q", "k", "v", "g", "beta", "initial_state")
    assert repr(plan).startswith("<fastweight plan of gated_delta_rule: q[1,9,2,8] k[1,9,2,8]")
    assert "_chunk: accepted" in plan.explain()


@numpy_only
def test_a_tensor_given_by_keyword_stays_until_another_is_given():
    inputs, state = decode()
    tensors, others = positional("kda", inputs)
    first, second = state.copy(), state.copy()
    plan = ops.plan(ops.kda_step, *tensors, state=first, **others)
    plan(*tensors)
    assert first.tobytes() != state.tobytes() and second.tobytes() == state.tobytes()
    plan(*tensors, state=second)
    assert second.tobytes() == first.tobytes()
    plan(*tensors)
    assert second.tobytes() != first.tobytes()


@numpy_only
def test_a_plan_refuses_other_tensors():
    inputs, state = decode()
    tensors, others = positional("kda", inputs)
    plan = ops.plan(ops.kda_step, *tensors, state=state, **others)
    q, rest = tensors[0], tensors[1:]
    kept = state.copy()

    def refused(error, sentence, *given, **named):
        with pytest.raises(error, match="^" + re.escape(sentence) + "$"):
            plan(*given, **named)

    refused(ValueError, "kda_step: q has another dtype than the plan was made for", q.astype(np.float64), *rest)
    refused(ValueError, "kda_step: q has shape [1,1,1,8], the plan was made for [1,1,1,16]", np.zeros((1, 1, 1, 8), F), *rest)
    refused(ValueError, "kda_step: q has strides [32,32,32,2], the plan was made for [16,16,16,1]", np.zeros((1, 1, 1, 32), F)[..., ::2], *rest)
    refused(TypeError, "kda_step: the plan takes 5 tensors without a name, found 1", q)
    refused(TypeError, "kda_step: a name is given that the plan has no tensor for", *tensors, beta=tensors[4])
    assert state.tobytes() == kept.tobytes()
    plan(*tensors)
    refused_at_once = "kda: g has 3 dimensions, expected 4"
    with pytest.raises(ValueError, match="^" + re.escape(refused_at_once) + "$"):
        ops.plan(ops.kda_step, q, rest[0], rest[1], rest[3], rest[3], state=state)
    with pytest.raises(ValueError, match="^plan: function is <built-in function len>, allowed the functions of fastweight.ops$"):
        ops.plan(len)


@numpy_only
def test_the_stride_of_a_size_of_one_does_not_matter():
    inputs, state = decode()
    tensors, others = positional("kda", inputs)
    plan = ops.plan(ops.kda_step, *tensors, state=state, **others)
    strange = np.lib.stride_tricks.as_strided(tensors[0], strides=(4, 8, 12, 4))
    plan(strange, *tensors[1:])


@numpy_only
def test_a_plan_keeps_its_state_alive_and_lets_go_of_it():
    class Array(np.ndarray):
        pass

    inputs, state = decode()
    tensors, others = positional("kda", inputs)
    state = state.view(Array)
    watch = weakref.ref(state)
    plan = ops.plan(ops.kda_step, *tensors, state=state, **others)
    del state
    gc.collect()
    assert watch() is not None
    plan(*tensors)
    plan(*tensors, state=np.zeros((1, 2, 16, 8), F))
    gc.collect()
    assert watch() is None


@numpy_only
def test_one_call_at_a_time():
    """Long forwards of one plan from two threads: each runs alone or is refused; nothing is mixed up."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 2048, 4, 64)).astype(F)
    plan = ops.plan(ops.retention, q, q, q)
    expected = plan(q, q, q)[0]
    found, refused = [], []

    def work():
        for _ in range(3):
            try:
                found.append(plan(q, q, q)[0])
            except RuntimeError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found and all(o.tobytes() == expected.tobytes() for o in found)
    assert set(refused) <= {"retention: this plan is running in another thread"}
    assert len(found) + len(refused) == 9


@needs_torch
def test_gradients_are_refused_in_a_plan_too():
    inputs, state = decode(as_torch=True)
    tensors, others = positional("kda", inputs)
    plan = ops.plan(ops.kda_step, *tensors, state=state, **others)
    with pytest.raises(ValueError, match="^kda_step: an input requires grad"):
        plan(tensors[0].clone().requires_grad_(), *tensors[1:])
    with torch.no_grad():
        plan(tensors[0].clone().requires_grad_(), *tensors[1:])
    assert IS_CUDA or fastweight.last_impl().endswith("_recurrent")
