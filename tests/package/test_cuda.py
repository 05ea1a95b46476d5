# SPDX-License-Identifier: Apache-2.0
"""What only CUDA tensors have: streams, devices, graphs, offsets that lie on the host, memory of torch's allocator."""
import threading

import numpy as np
import pytest

from package_calls import DEVICE, arguments, fastweight, needs_cuda, ops, stored, torch

from oracle import cases

pytestmark = needs_cuda
ROWS = cases.ROW_NAMES


def problem(op="kda", T=70, dtype="f32", **shape):
    """Tensors by name and options of a call."""
    call = cases.make(op, seed=1, strength=0.3, **{**dict(B=2, T=T, H=2, HV=4, K=16, V=24), **shape})
    inputs = stored(call, dtype, as_torch=True)
    return inputs, {name: x for name, x in arguments(call, inputs).items() if name not in inputs}


def step_problem(op, dtype="f32", B=2):
    """Positional tensors, keywords and the state of a step of one token."""
    inputs, options = problem(op, T=1, dtype=dtype, B=B)
    state = inputs.pop("initial_state")
    inputs.pop("initial_z", None)
    options.pop("output_final_state")
    return inputs, options, state


def is_same(found, expected):
    return all((x is None and y is None) or torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# ---- where things are ----

def test_results_and_path():
    inputs, options = problem()
    o, state = ops.kda(**inputs, **options)
    assert o.device == state.device == torch.device(DEVICE, torch.cuda.current_device())
    chosen = next(line for line in ops.kda(**inputs, **options, explain=True).splitlines() if line.startswith("*"))
    assert chosen == f"*{fastweight.last_impl()}: accepted" and not chosen.startswith("*cpu_")


@pytest.mark.parametrize("index_type", (torch.int32, torch.int64))
def test_offsets_of_the_host_are_copied(index_type):
    inputs, options = problem(B=1, cu=[0, 11, 11, 70])
    host = torch.tensor([0, 11, 11, 70], dtype=index_type, device="cpu")
    results = []
    for cu_seqlens in (host, host.numpy(), host.to(DEVICE)):
        options["cu_seqlens"] = cu_seqlens
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        o, state = ops.kda(**leaves, **options)
        results.append([*ops.kda(**inputs, **options), *torch.autograd.grad(o.square().sum() + state.square().sum(), leaves.values())])
    assert is_same(results[0], results[1]) and is_same(results[0], results[2])


def test_a_pool_of_slots():
    inputs, options, state = step_problem("gated_delta_rule")
    pools = [torch.zeros(5, *state.shape[1:]).index_copy_(0, torch.tensor([3]), state[:1]) for _ in range(3)]
    kept = pools[0].clone()
    found = [ops.gated_delta_rule_step(**inputs, **options, state=pool, state_indices=indices) for pool, indices in zip(
        pools, (np.array([3, -1], np.int32), torch.tensor([3, -1], dtype=torch.int32, device="cpu"), torch.tensor([3, -1], dtype=torch.int32)),
        strict=True)]
    alone = state[:1].clone()
    expected = ops.gated_delta_rule_step(**{name: x[:1] for name, x in inputs.items()}, **options, state=alone)
    for o, pool in zip(found, pools, strict=True):
        assert torch.equal(o[:1], expected) and (o[1] == 0).all()
        assert torch.equal(pool[3:4], alone) and torch.equal(pool[[0, 1, 2, 4]], kept[[0, 1, 2, 4]])


def test_several_devices():
    if torch.cuda.device_count() < 2:
        pytest.skip("not run: this machine has one CUDA device")
    inputs, options = problem(dtype="bf16")
    expected = ops.kda(**inputs, **options)
    other = {name: x.to("cuda:1") for name, x in inputs.items()}
    found = ops.kda(**other, **options)
    assert found[0].device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert is_same([x.to("cuda:0") for x in found], expected)
    leaves = {name: x.clone().requires_grad_() for name, x in other.items()}
    gradients = torch.autograd.grad(ops.kda(**leaves, **options)[0].float().sum(), list(leaves.values())[:5])
    assert all(x.device == torch.device("cuda:1") and torch.isfinite(x).all() for x in gradients)
    with pytest.raises(ValueError, match="^kda: v is on cuda:1, the tensors before it are on cuda:0$"):
        ops.kda(**{**inputs, "v": other["v"]}, **options)
    assert torch.cuda.current_device() == 0


def test_refusals():
    inputs, options = problem()
    with pytest.raises(ValueError, match="^kda: k is on cpu, the tensors before it are on cuda:0$"):
        ops.kda(**{**inputs, "k": inputs["k"].cpu()}, **options)
    with pytest.raises(ValueError, match="^kda: k is on cuda:0, the tensors before it are on cpu$"):
        ops.kda(**{**inputs, "q": inputs["q"].cpu()}, **options)
    with pytest.raises(NotImplementedError, match="^kda: no implementation accepts this call .*operands are fp64, computed by the reference only"):
        ops.kda(**{name: x.double() for name, x in inputs.items()}, **options)
    with pytest.raises(NotImplementedError, match="form is parallel"):
        ops.kda(**inputs, **options, form="parallel")
    with pytest.raises(ValueError, match="^kda: beta has shape "):
        ops.kda(**{**inputs, "beta": inputs["beta"][:, 1:]}, **options)
    with pytest.raises(NotImplementedError, match="^kda: implementation reference_recurrent is forced and refuses: device is cuda$"):
        ops.kda(**inputs, **options, context=fastweight.Context(1, force_impl="reference_recurrent"))
    q, state = torch.zeros(1, 1, 2, 8), torch.zeros(1, 2, 8, 8)
    plan = ops.plan(ops.linear_attn_step, q, q, q, state=state)
    with pytest.raises(ValueError, match="^chain: (tensor 0 is on cuda|the plan of linear_attn_step is on cuda), allowed cpu$"):
        ops.chain([plan], (q,))
    with pytest.raises(ValueError, match="^linear_attn_step: k is on cpu, the tensors before it are on cuda:0$"):
        plan(q, q.cpu(), q)
    with pytest.raises(ValueError, match="^linear_attn_step: q is on cpu, the plan was made for cuda:0$"):
        plan(q.cpu(), q.cpu(), q.cpu(), state=state.cpu())


# ---- order and memory ----

def test_work_is_ordered_on_the_current_stream():
    inputs, options = problem()
    expected = ops.kda(**inputs, **options)
    late = {name: torch.zeros_like(x) for name, x in inputs.items()}
    leaf = torch.zeros_like(inputs["q"]).requires_grad_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what the stream of another order would not wait for, about 30 ms
        for name, x in late.items():
            x.copy_(inputs[name])
        found = ops.kda(**late, **options)
        with torch.no_grad():
            leaf.copy_(inputs["q"])
        gradient, = torch.autograd.grad(ops.kda(**{**late, "q": leaf}, **options)[0].sum(), leaf)
        plan = ops.plan(ops.kda, *(late[name] for name in ("q", "k", "v", "g", "beta")), initial_state=late["initial_state"], **options)
        planned = plan(*(late[name] for name in ("q", "k", "v", "g", "beta")))
    stream.synchronize()
    assert is_same(found, expected) and is_same(planned, expected)
    again = inputs["q"].clone().requires_grad_()
    assert torch.equal(gradient, torch.autograd.grad(ops.kda(**{**inputs, "q": again}, **options)[0].sum(), again)[0])


def test_a_thread_of_ones_own():
    inputs, options = problem()
    expected, found = ops.kda(**inputs, **options), []
    threads = [threading.Thread(target=lambda: found.append(ops.kda(**inputs, **options))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cuda.synchronize()
    assert len(found) == 3 and all(is_same(x, expected) for x in found)


def test_memory_comes_from_torch_and_goes_back():
    inputs, options = problem()
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}

    def run():
        o, state = ops.kda(**leaves, **options)
        return torch.autograd.grad(o.sum() + state.sum(), leaves.values())

    run()
    torch.cuda.synchronize()
    before, peak, reserved = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(5):
        run()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before and torch.cuda.memory_reserved() == reserved
    assert torch.cuda.max_memory_allocated() == peak


# ---- graphs ----

def captured(function):
    """A graph of function() and its results."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@pytest.mark.parametrize("op", ROWS)
def test_graph_of_forward_and_backward(op):
    inputs, options = problem(op, dtype="bf16")
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}

    def run():
        results = [x for x in getattr(ops, op)(**leaves, **options) if x is not None]
        gradients = torch.autograd.grad([x.float().square().sum() for x in results], leaves.values())
        return [*(x.detach() for x in results), *gradients]

    graph, found = captured(run)
    for factor in (1.0, 0.5):
        with torch.no_grad():
            for name, x in leaves.items():
                x.copy_(inputs[name] * (factor if name in ("q", "v") else 1))
        graph.replay()
        torch.cuda.synchronize()
        copies = [x.clone() for x in found]
        assert is_same(copies, run())


@pytest.mark.parametrize("is_plan", (False, True))
@pytest.mark.parametrize("op", ROWS)
def test_graph_of_a_step(op, is_plan):
    inputs, options, state = step_problem(op)
    first = state.clone()
    if is_plan:
        names = ("q", "k", "v") + ops._build.ROWS[op].operands
        tensors = [inputs[name] for name in names]
        plan = ops.plan(getattr(ops, op + "_step"), *tensors, state=state, **{name: x for name, x in inputs.items() if name not in names}, **options)

    def run():
        return [plan(*tensors) if is_plan else getattr(ops, op + "_step")(**inputs, **options, state=state)]

    graph, found = captured(run)
    for factor in (1.0, 0.5):
        inputs["q"].mul_(factor)
        state.copy_(first)
        graph.replay()
        torch.cuda.synchronize()
        o, after = found[0].clone(), state.clone()
        state.copy_(first)
        assert torch.equal(o, run()[0]) and torch.equal(after, state) and not torch.equal(after, first)


def test_a_packed_call_in_a_graph_takes_new_offsets():
    inputs, options = problem(B=1, cu=[0, 30, 70])
    options["cu_seqlens"] = torch.tensor([0, 30, 70])
    graph, found = captured(lambda: ops.kda(**inputs, **options))
    options["cu_seqlens"].copy_(torch.tensor([0, 11, 70]))
    graph.replay()
    torch.cuda.synchronize()
    assert is_same([x.clone() for x in found], ops.kda(**inputs, **options))


def test_graph_of_a_training_step_of_a_layer():
    """Weights held in float32, computed under autocast to bfloat16; the optimizer's step is part of the graph."""
    from fastweight.torch import nn as fnn

    torch.manual_seed(0)
    layer = fnn.GatedDeltaNet(hidden_size=64, num_heads=2, head_dim=32, expand_v=1.0, layer_idx=0)
    start = {name: x.clone() for name, x in layer.state_dict().items()}
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x, others = torch.randn(2, 70, 64), torch.randn(3, 2, 70, 64)

    def train():
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = layer(x)[0].float().square().mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def losses(run):
        layer.load_state_dict(start)
        return [run() for x_ in others if x.copy_(x_) is x]

    expected = losses(lambda: train().item())
    layer.load_state_dict(start)
    graph, loss = captured(train)

    def replay():
        graph.replay()
        return loss.item()

    assert losses(replay) == pytest.approx(expected, rel=1e-4) and expected[2] != expected[0]


def test_compiled_into_a_graph_of_cuda():
    """torch.compile(mode="reduce-overhead") captures the operator, forward and backward."""
    inputs, options = problem("gated_delta_rule", dtype="bf16", K=64, V=64)
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}

    def loss(q, scale):
        o, state = ops.gated_delta_rule(**{**leaves, "q": q * scale}, **options)
        return o.float().square().sum() + state.square().sum()

    compiled = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    for factor in (1.0, 0.5, 0.25, 2.0):
        scale = torch.tensor(factor, dtype=torch.bfloat16)
        torch.compiler.cudagraph_mark_step_begin()
        found = [x.clone() for x in torch.autograd.grad(compiled(leaves["q"], scale), leaves.values())]
        expected = torch.autograd.grad(loss(leaves["q"], scale), leaves.values())
        for name, x, y in zip(leaves, found, expected, strict=True):
            assert torch.allclose(x.float(), y.float(), rtol=2e-2, atol=2e-2 * y.float().abs().max().item()), name


# ---- decoding ----

@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("layout", ("kv", "vk"))
def test_an_opaque_state(layout, dtype):
    inputs, options, state = step_problem("kda", dtype="bf16")
    options["state_layout"] = layout
    K, V = inputs["q"].shape[3], inputs["v"].shape[3]
    state = torch.randn(2, 4, *((K, V) if layout == "kv" else (V, K)), dtype=dtype)
    opaque = ops.state_import(state, layout)
    assert opaque.device.type == DEVICE and torch.equal(ops.state_export(opaque, K, V, layout), state)
    plain = state.clone()
    for _ in range(3):
        expected = ops.kda_step(**inputs, **options, state=plain)
        found = ops.kda_step(**inputs, **{**options, "state_layout": "opaque"}, state=opaque)
        assert torch.equal(found, expected)
    assert torch.equal(ops.state_export(opaque, K, V, layout), plain)
    half = ops.state_import(state, layout, dtype="float16")
    assert half.dtype == torch.float16 and torch.equal(ops.state_export(half, K, V, layout, dtype="float32"), state.half().float())
