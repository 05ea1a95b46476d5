# SPDX-License-Identifier: Apache-2.0
"""The torch operators: opcheck, torch.compile, activation checkpointing, autocast, contexts, refusals."""
import copy
import inspect
import subprocess
import sys

import numpy as np
import pytest

from package_calls import DEVICE, IS_CUDA, arguments, cpu_only, environment, fastweight, needs_neighbours, ops, stored, to_torch, torch

if torch is None:
    pytest.skip("not run: torch is not installed", allow_module_level=True)

import torch._dynamo.testing as dynamo_testing

import fastweight.torch as fw_torch
from fastweight.torch import _library
from oracle import cases
from test_torch_gradients import NEIGHBOURS

ROWS = cases.ROW_NAMES
PACKED = dict(T=70, H=1, HV=2, K=5, V=3, cu=[0, 3, 3, 70], layout="vk")


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()


def operator_arguments(name, keywords, save=None):
    """Arguments of torch.ops.fastweight.<name>."""
    operator = _library.OPERATORS[name]
    parameters = inspect.signature(getattr(ops, name)).parameters
    found = [keywords.get(x, None if parameters[x].default is inspect.Parameter.empty else parameters[x].default) for x in operator.inputs]
    found[operator.inputs.index("context")] = 0
    return tuple(found) + ((save,) if operator.saves else ())


def row_keywords(op, shape, dtype="f32"):
    call = cases.make(op, seed=1, strength=0.3, **shape)
    inputs = {name: x.requires_grad_() for name, x in stored(call, dtype, as_torch=True).items()}
    found = arguments(call, inputs)
    if "cu_seqlens" in found:
        found["cu_seqlens"] = to_torch(found["cu_seqlens"])
    return found


@pytest.mark.parametrize("op", ROWS)
def test_opcheck_of_rows(op):
    for shape in (dict(B=2, T=20, H=2, HV=4, K=4, V=16), PACKED):
        torch.library.opcheck(_library.OPERATORS[op].forward_op, operator_arguments(op, row_keywords(op, shape), save=True))
    keywords = row_keywords(op, PACKED)
    keywords["output_final_state"] = False
    torch.library.opcheck(_library.OPERATORS[op].forward_op, operator_arguments(op, keywords, save=False))


@needs_neighbours
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_opcheck_of_neighbours(name):
    inputs, options = NEIGHBOURS[name]
    keywords = {key: to_torch(x).float().requires_grad_() for key, x in inputs.items()}
    torch.library.opcheck(_library.OPERATORS[name].forward_op, operator_arguments(name, {**keywords, **options}))


@pytest.mark.parametrize("op", ("linear_attn", "kda", "gated_delta_product", "rwkv7"))
def test_opcheck_of_a_backward(op):
    keywords = {key: x.detach() if isinstance(x, torch.Tensor) else x for key, x in row_keywords(op, PACKED).items()}
    operator = _library.OPERATORS[op]
    inputs = operator_arguments(op, keywords, save=True)
    results = operator.forward_op(*inputs)
    incoming = [torch.randn_like(x) for x in results[:len(operator.results)]]
    wanted = [inputs[i] is not None for i in operator.differentiable]
    torch.library.opcheck(operator.backward_op, (*incoming, results[-1], *inputs[:-1], wanted))


@pytest.mark.parametrize("op", ROWS)
def test_fake_results_are_the_real_ones(op):
    from torch._subclasses.fake_tensor import FakeTensorMode
    for shape in (dict(B=2, T=130, H=2, HV=4, K=4, V=16), dict(B=1, T=0, K=3, V=2), PACKED):
        for save in (False, True):
            real = operator_arguments(op, row_keywords(op, shape), save=save)
            operator = _library.OPERATORS[op]
            expected = operator.forward_op(*real)
            with FakeTensorMode() as mode:
                found = operator.forward_op(*(mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in real))
            for x, y in zip(found, expected, strict=True):
                assert (x.shape, x.dtype, x.stride()) == (y.shape, y.dtype, y.stride()), op


def test_what_is_saved_is_what_the_engine_asks_for():
    for op in ("linear_attn", "kda", "gated_delta_product"):
        keywords = row_keywords(op, PACKED)
        operator = _library.OPERATORS[op]
        verb_values = operator._values(operator_arguments(op, keywords, save=True)[:-1])
        saved = operator.forward_op(*operator_arguments(op, keywords, save=True))[-1]
        assert saved.numel() * 4 == operator.verb.saved_size(verb_values) > 0


def test_saved_states_change_no_bit():
    keywords = row_keywords("kda", dict(B=1, T=200, H=2, K=16, V=16))
    operator = _library.OPERATORS["kda"]
    inputs = [x.detach() if isinstance(x, torch.Tensor) else x for x in operator_arguments("kda", keywords, save=True)]
    *results, saved = operator.forward_op(*inputs)
    incoming = [torch.ones_like(x) for x in results]
    wanted = [inputs[i] is not None for i in operator.differentiable]
    with_saved = operator.backward_op(*incoming, saved, *inputs[:-1], wanted)
    without = operator.backward_op(*incoming, None, *inputs[:-1], wanted)
    assert all(torch.equal(x, y) for x, y in zip(with_saved, without, strict=True))


# ---- torch.compile ----

@pytest.mark.parametrize("op", ROWS)
def test_compiles_whole(op):
    keywords = row_keywords(op, dict(B=1, T=20, H=1, HV=2, K=4, V=4))
    tensors = {name: x for name, x in keywords.items() if isinstance(x, torch.Tensor)}
    options = {name: x for name, x in keywords.items() if name not in tensors}
    function = getattr(ops, op)

    def loss(inputs):
        answer = function(**{**inputs, "q": inputs["q"] * 2}, **options)
        return answer[0].sin().sum() + answer[1].sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(tensors), tensors.values())
    found = torch.autograd.grad(compiled(tensors), tensors.values())
    for name, x, y in zip(tensors, found, expected, strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-6), name


@needs_neighbours
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_compile_whole(name):
    inputs, options = NEIGHBOURS[name]
    tensors = {key: to_torch(x).float().requires_grad_() for key, x in inputs.items()}

    def loss(given):
        answer = getattr(ops, name)(**given, **options)
        return (answer[0] if isinstance(answer, tuple) else answer).square().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(tensors), tensors.values(), allow_unused=True)
    found = torch.autograd.grad(compiled(tensors), tensors.values(), allow_unused=True)
    for x, y in zip(found, expected, strict=True):
        assert (x is None and y is None) or torch.allclose(x, y, rtol=1e-5, atol=1e-6)


def test_compiles_for_every_length():
    compiled = torch.compile(lambda q, g, b: fw_torch.gated_delta_rule(q, q, q, g, b)[0] + 1, fullgraph=True, dynamic=True, backend="aot_eager")
    counter = dynamo_testing.CompileCounter()
    counted = torch.compile(lambda q, g, b: fw_torch.gated_delta_rule(q, q, q, g, b)[0] + 1, fullgraph=True, dynamic=True, backend=counter)
    for T in (7, 20, 65, 200):
        q, g, b = torch.randn(1, T, 2, 8), -torch.rand(1, T, 2), torch.rand(1, T, 2)
        expected = ops.gated_delta_rule(q, q, q, g, b)[0] + 1
        assert torch.equal(compiled(q, g, b), expected) and torch.equal(counted(q, g, b), expected)
    assert counter.frame_count == 1


def test_inductor():
    q, b = torch.randn(1, 20, 2, 8, requires_grad=True), torch.rand(1, 20, 2)
    compiled = torch.compile(lambda q: ops.delta_rule(q.relu(), q, q, b, qk_norm="l2")[0].sum(), fullgraph=True)
    found, = torch.autograd.grad(compiled(q), q)
    expected, = torch.autograd.grad(ops.delta_rule(q.relu(), q, q, b, qk_norm="l2")[0].sum(), q)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_make_fx_and_export():
    q, b = torch.randn(1, 20, 2, 8), torch.rand(1, 20, 2)

    class Layer(torch.nn.Module):
        def forward(self, q, b):
            return ops.delta_rule(q, q, q, b)[0]

    exported = torch.export.export(Layer(), (q, b))
    assert any(node.target is torch.ops.fastweight.delta_rule.default for node in exported.graph.nodes)
    assert torch.equal(exported.module()(q, b), ops.delta_rule(q, q, q, b)[0])


# ---- around autograd ----

def leaves():
    return [torch.randn(1, 70, 2, 8).requires_grad_() for _ in range(3)] + [torch.rand(1, 70, 2).requires_grad_()]


@pytest.mark.parametrize("use_reentrant", (False, True))
def test_activation_checkpointing(use_reentrant):
    from torch.utils.checkpoint import checkpoint
    inputs = leaves()

    def block(q, k, v, beta):
        return ops.delta_rule(q, k, v, beta, qk_norm="l2")[0]

    expected = torch.autograd.grad(block(*inputs).square().sum(), inputs)
    checkpoint(block, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    assert all(torch.equal(x.grad, y) for x, y in zip(inputs, expected))


def test_second_derivatives_are_refused():
    inputs = leaves()
    first = torch.autograd.grad(ops.delta_rule(*inputs)[0].square().sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="^delta_rule: a second derivative is asked for, allowed first derivatives$"):
        first[0].sum().backward()


def test_an_operand_that_was_written_after_the_forward():
    inputs = leaves()
    o = ops.delta_rule(*inputs)[0]
    with torch.no_grad():
        inputs[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


def test_autocast_casts_nothing():
    inputs = [x.detach() for x in leaves()]
    with torch.autocast(DEVICE, torch.bfloat16):
        o = ops.delta_rule(*inputs)[0]
        assert o.dtype == torch.float32 and torch.equal(o, ops.delta_rule(*inputs)[0])
        grad = [x.clone().requires_grad_() for x in inputs]
        ops.delta_rule(*grad)[0].sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in grad)


def test_without_grad_no_graph():
    inputs = leaves()
    with torch.no_grad():
        assert not ops.delta_rule(*inputs)[0].requires_grad
    assert torch.equal(ops.delta_rule(*inputs)[0], ops.delta_rule(*(x.detach() for x in inputs))[0])


def test_results_by_name():
    inputs = leaves()
    o, state = ops.delta_rule(*inputs)
    assert state is None
    o, state, z = ops.linear_attn(*inputs[:3], output_final_state=True)
    assert state.shape == (1, 2, 8, 8) and z is None
    o, state, z = ops.linear_attn(*(x.exp() for x in inputs[:3]), normalizer="sum", output_final_state=True)
    assert z.shape == (1, 2, 8)
    (o.sum() + z.sum()).backward()
    assert all(torch.isfinite(x.grad).all() for x in inputs[:3])
    assert ops.linear_attn(*inputs[:3], normalizer="sum")[1:] == (None, None)


def test_explain_and_errors_keep_their_words():
    q, k, v, beta = leaves()
    assert f"*{DEVICE}_" in ops.delta_rule(q, k, v, beta, explain=True)
    with pytest.raises(ValueError, match=r"^delta_rule: beta has shape \[1,3\], allowed \[1,70,2\]|^delta_rule: beta"):
        ops.delta_rule(q, k, v, torch.rand(1, 3))
    with pytest.raises(ValueError, match="^delta_rule: form is 'fused', allowed \"auto\", \"chunk\", \"recurrent\", \"parallel\"$"):
        ops.delta_rule(q, k, v, beta, form="fused")
    with pytest.raises(ValueError, match="^delta_rule: o_dtype is 'int32'"):
        ops.delta_rule(q, k, v, beta, o_dtype="int32")
    error = ValueError if IS_CUDA else TypeError
    text = "k is on cpu, the tensors before it are on cuda:0" if IS_CUDA else "k is of type ndarray, allowed torch tensors where one is differentiated"
    with pytest.raises(error, match=f"^delta_rule: {text}$"):
        ops.delta_rule(q, k.detach().cpu().numpy(), v, beta)


@pytest.mark.parametrize("dtype", ("bfloat16", "torch.bfloat16", torch.bfloat16, np.dtype("float16")))
def test_o_dtype(dtype):
    q, k, v, beta = leaves()
    o = ops.delta_rule(q, k, v, beta, o_dtype=dtype)[0]
    assert o.dtype == (torch.float16 if dtype == np.dtype("float16") else torch.bfloat16)
    o.sum().backward()
    assert q.grad.dtype == torch.float32


@cpu_only("it forces a path of the CPU, or starts with NumPy")
def test_a_context_of_ones_own():
    q, k, v, beta = leaves()
    context = fastweight.Context(1, force_impl="reference_recurrent")
    o = ops.delta_rule(q, k, v, beta, context=context)[0]
    assert fastweight.last_impl() == "reference_recurrent"
    o.sum().backward()
    assert fastweight.last_impl() == "reference_recurrent" and torch.isfinite(q.grad).all()


@needs_neighbours
def test_modules_with_our_functions_copy():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8))

        def forward(self, x):
            return ops.rms_norm(x, self.weight)

    layer = Layer()
    twin = copy.deepcopy(layer)
    layer(torch.randn(2, 8)).sum().backward()
    assert layer.weight.grad is not None and twin.weight.grad is None


def test_a_tensor_subclass():
    class Marked(torch.Tensor):
        pass

    q, k, v, beta = (x.detach() for x in leaves())
    expected = ops.delta_rule(q, k, v, beta)[0]
    found = ops.delta_rule(q.as_subclass(Marked), k, v, beta)[0]
    assert torch.equal(found.as_subclass(torch.Tensor), expected)


@cpu_only("it forces a path of the CPU, or starts with NumPy")
def test_torch_is_imported_by_need_only():
    code = ("import sys, fastweight, numpy as np\n"
            "q = np.zeros((1, 4, 1, 8), np.float32)\n"
            "fastweight.ops.linear_attn(q, q, q)\n"
            "assert 'torch' not in sys.modules and 'fastweight.torch' not in sys.modules\n"
            "import torch\n"
            "x = torch.zeros(1, 4, 1, 8)\n"
            "fastweight.ops.linear_attn(x, x, x)\n"
            "assert 'fastweight.torch' not in sys.modules\n"
            "fastweight.ops.linear_attn(x.requires_grad_(), x, x)[0].sum().backward()\n"
            "assert 'fastweight.torch' in sys.modules and x.grad is not None\n")
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=120)
