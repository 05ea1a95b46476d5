# SPDX-License-Identifier: Apache-2.0
"""What a demanding user of torch does around the operators: transforms of torch.func, traces, unusual tensors, hooks on what is
saved, segments of one sequence, written states. Gradients against a plain fp64 token loop."""
import gc

import pytest

from package_calls import IS_CUDA, cpu_only, fastweight, needs_neighbours, no_fp64, ops, to_torch, torch

if torch is None:
    pytest.skip("not run: torch is not installed", allow_module_level=True)

import torch.autograd.forward_ad as forward_ad

from fastweight.torch import _library
from oracle import cases
from test_torch_gradients import NEIGHBOURS
from test_torch_library import row_keywords

# fp32 against fp64 with unit keys: sums of at most 70 x 8 terms, 2^-24 each, 30 times over for the recurrence
AGREE = 1e-4
T, H, K = 70, 2, 8


def operands(T=T, requires_grad=True):
    torch.manual_seed(1)
    q, v = torch.randn(1, T, H, K), torch.randn(1, T, H, K)
    k = torch.nn.functional.normalize(torch.randn(1, T, H, K), dim=-1)
    found = [q, k, v, -torch.rand(1, T, H), torch.rand(1, T, H)]
    return [x.requires_grad_(requires_grad) for x in found]


def token_loop(q, k, v, g, beta, state=None):
    """The gated delta rule of one batch entry."""
    q, k, v, g, beta = (x[0].double() for x in (q, k, v, g, beta))
    S = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]) if state is None else state[0].double()
    rows = []
    for t in range(q.shape[0]):
        S = torch.exp(g[t])[:, None, None] * S
        S = S + torch.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", S, k[t])))
        rows.append(q.shape[2] ** -0.5 * torch.einsum("hkv,hk->hv", S, q[t]))
    return torch.stack(rows)[None] if rows else v[None], S[None]


def ours(*x):
    return ops.gated_delta_rule(*x[:5], initial_state=x[5] if len(x) > 5 else None, output_final_state=True)


def squares(o, state):
    return o.square().sum() + state.square().sum()


def assert_agree(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert (x.double() - y.double()).abs().max() <= AGREE * max(y.double().abs().max(), 1)


def is_same(found, expected):
    return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


# ---- transforms ----

@pytest.mark.parametrize("op", cases.ROW_NAMES)
def test_grad_and_vmap_of_torch_func(op):
    keywords = row_keywords(op, dict(B=1, T=5, H=1, HV=2, K=4, V=4))
    tensors = {name: x.detach() for name, x in keywords.items() if isinstance(x, torch.Tensor)}
    options = {name: x for name, x in keywords.items() if name not in tensors}

    def loss(given):
        return sum(x.square().sum() for x in getattr(ops, op)(**given, **options) if x is not None)

    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items()}
    expected = torch.autograd.grad(loss(leaves), leaves.values())
    assert is_same(torch.func.grad(loss)(tensors).values(), expected)
    two = {name: torch.stack([x, x / 2], dim=-1) for name, x in tensors.items()}
    each = torch.vmap(torch.func.grad(loss), in_dims=-1)(two)
    assert is_same([x[0] for x in each.values()], expected)


@no_fp64
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_under_torch_func(name):
    inputs, options = NEIGHBOURS[name]
    tensors = {key: to_torch(x) for key, x in inputs.items()}

    def loss(given):
        answer = getattr(ops, name)(**given, **options)
        return sum(x.square().sum() for x in (answer if isinstance(answer, tuple) else (answer,)))

    leaves = {key: x.clone().requires_grad_() for key, x in tensors.items()}
    expected = torch.autograd.grad(loss(leaves), leaves.values())
    each = torch.vmap(torch.func.grad(loss))({key: torch.stack([x, x]) for key, x in tensors.items()})
    assert is_same([x[1] for x in each.values()], expected)


def test_jacobians():
    q, k, v, g, beta = operands(T=3, requires_grad=False)

    def function(v):
        return ops.gated_delta_rule(q, k, v, g, beta)[0]

    expected = torch.autograd.functional.jacobian(function, v)
    assert torch.equal(torch.func.jacrev(function)(v), expected)
    assert torch.equal(torch.autograd.functional.jacobian(function, v, vectorize=True), expected)
    x = operands()
    o = ours(*x)[0]
    incoming = torch.randn(3, *o.shape)
    batched = torch.autograd.grad(o, x, incoming, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        assert is_same([y[i] for y in batched], torch.autograd.grad(o, x, incoming[i], retain_graph=True))


def test_transforms_that_are_refused():
    x = operands(requires_grad=False)

    def loss(q):
        return ops.gated_delta_rule(q, *x[1:])[0].square().sum()

    sentence = "^gated_delta_rule: q has a forward-mode derivative, allowed reverse mode$"
    with pytest.raises(NotImplementedError, match=sentence):
        torch.func.jvp(loss, (x[0],), (x[1],))
    for requires_grad in (False, True):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=sentence):
            loss(forward_ad.make_dual(x[0].clone().requires_grad_(requires_grad), x[1]))
    with forward_ad.dual_level():
        assert torch.isfinite(loss(x[0]))
    with pytest.raises(NotImplementedError, match="a second derivative is asked for"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(x[0])
    with pytest.raises(ValueError, match="^linear_attn_step: q is a tensor of a torch.func transform or of a trace"):
        torch.vmap(lambda q: ops.linear_attn_step(q, q, q, state=torch.zeros(1, H, K, K)))(torch.zeros(2, 1, 1, H, K))


# ---- traces ----

def test_traces_see_the_call():
    from torch.fx.experimental.proxy_tensor import make_fx
    x, others = operands(requires_grad=False), [y.flip(1).contiguous() for y in operands(requires_grad=False)]
    expected = ours(*others)[0]
    assert torch.equal(make_fx(lambda *x: ours(*x)[0])(*x)(*others), expected)
    for inputs in (x, operands()):
        traced = torch.jit.trace(lambda *x: ours(*x)[0], tuple(inputs))
        assert torch.equal(traced(*others), expected)
    leaves = operands()
    assert is_same(torch.autograd.grad(squares(*ours(*leaves)), leaves), torch.autograd.grad(squares(*torch.jit.trace(ours, tuple(x))(*leaves)), leaves))


def test_compiled_calls_keep_their_defaults():
    torch._dynamo.reset()
    x = operands()
    compiled = torch.compile(lambda *x: ops.gated_delta_rule(*x, scale=0.5, qk_norm=None, form=None, output_final_state=1)[0],
                             fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*x), ops.gated_delta_rule(*x, scale=0.5)[0])
    context = fastweight.Context(1)
    with pytest.raises(Exception, match="gated_delta_rule: context is given, allowed None under torch.compile"):
        torch.compile(lambda *x: ops.gated_delta_rule(*x, context=context)[0], fullgraph=True, backend="aot_eager")(*x)


# ---- options and tensors ----

@needs_neighbours
def test_none_is_the_default_with_gradients_too():
    x = operands()
    none = dict(qk_norm=None, form=None, state_layout=None, gate_input=None, output_final_state=None, batch_invariant=None)
    assert torch.equal(ops.gated_delta_rule(*x, **none)[0], ours(*x)[0])
    assert ops.gated_delta_product(*x[:3], x[4], n_sub=None)[0].requires_grad
    assert ops.attention(*x[:3], window=None).requires_grad


@needs_neighbours
@pytest.mark.parametrize("requires_grad", (False, True))
def test_words_that_only_a_step_or_another_function_takes(requires_grad):
    x = operands(requires_grad=requires_grad)
    with pytest.raises(ValueError, match="^gated_delta_rule: state_layout is 'opaque', allowed \"kv\", \"vk\"$"):
        ops.gated_delta_rule(*x, state_layout="opaque")
    with pytest.raises(ValueError, match="^short_conv: activation is 'sigmoid', allowed \"none\", \"silu\"$"):
        ops.short_conv(x[0][:, :, 0], torch.ones(K, 3), activation="sigmoid")


@cpu_only("mkldnn tensors are on the CPU")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tensors_without_dense_memory():
    q, k, v, g, beta = operands(requires_grad=False)
    nested = "is a nested tensor, allowed dense ones (sequences of several lengths are packed with cu_seqlens)"
    strange = {"has the layout torch.sparse_coo, allowed torch.strided": q.to_sparse(), "has the layout torch._mkldnn, allowed torch.strided": q.to_mkldnn()}
    for layout in (torch.strided, torch.jagged):
        strange[nested + " " * (layout is torch.jagged)] = torch.nested.nested_tensor([q[0], q[0, :5]], layout=layout)
    state = torch.zeros(1, H, K, K)
    for sentence, x in strange.items():
        for label, call in (("gated_delta_rule", lambda x: ops.gated_delta_rule(x, k, v, g, beta)),
                            ("gated_delta_rule", lambda x: ops.gated_delta_rule(operands()[0], x, v, g, beta)),
                            ("gated_delta_rule_step", lambda x: ops.gated_delta_rule_step(x, k, v, g, beta, state=state)),
                            ("state_import", ops.state_import)):
            with pytest.raises(ValueError) as error:
                call(x)
            assert str(error.value).startswith(f"{label}: ") and str(error.value).endswith(sentence.strip())
    fake = torch._subclasses.fake_tensor.FakeTensorMode().from_tensor(q)
    for call in (lambda: ops.plan(ops.linear_attn, fake, fake, fake), lambda: ops.state_import(fake)):
        with pytest.raises(ValueError, match=": (q|state) is a FakeTensor without memory, allowed tensors with memory$"):
            call()


def test_a_state_in_the_own_layout_has_no_gradient():
    state = torch.zeros(1, H, K, K, requires_grad=True)
    with pytest.raises(ValueError, match="^state_import: state requires grad, "):
        ops.state_import(state)
    with torch.no_grad():
        assert torch.equal(ops.state_export(ops.state_import(state), K, K), state)
    with pytest.raises(TypeError, match="^state_import: state is of type NoneType, "):
        ops.state_import(None)


# ---- around autograd ----

def test_one_tensor_in_several_places_and_views():
    p, gates = torch.randn(1, H, T, 3 * K).mul(0.2).requires_grad_(), torch.tensor([-0.2, -0.1]).requires_grad_()
    beta = torch.tensor(0.4).requires_grad_()

    def inputs():
        q, k, _ = p.transpose(1, 2).split(K, -1)
        return q, k, k, gates.expand(1, T, H), beta.expand(1, T, H)

    leaves = (p, gates, beta)
    assert_agree(torch.autograd.grad(squares(*ours(*inputs())), leaves), torch.autograd.grad(squares(*token_loop(*inputs())), leaves))
    flat = torch.randn(T + 2 * K).mul(0.2).requires_grad_()
    windows = flat.as_strided((1, T, H, K), (1, 1, K, 1))  # overlap
    rest = (gates.expand(1, T, H), beta.expand(1, T, H))
    found = torch.autograd.grad(squares(*ours(windows, windows, windows, *rest)), flat)
    assert_agree(found, torch.autograd.grad(squares(*token_loop(*[flat.as_strided((1, T, H, K), (1, 1, K, 1))] * 3, *rest)), flat))


def test_segments_of_a_sequence():
    x = operands()
    first = torch.randn(1, H, K, K).requires_grad_()

    def segments(function, is_truncated):
        state, total = first, 0
        for low, high in ((0, 33), (33, 64), (64, 64), (64, T)):
            o, state = function(*(y[:, low:high] for y in x), state.detach() if is_truncated and low == 33 else state)
            total = total + o.square().sum()
        return torch.autograd.grad(total + state.square().sum(), [*x, first])

    for is_truncated in (False, True):
        assert_agree(segments(ours, is_truncated), segments(token_loop, is_truncated))


def test_saved_states_that_a_hook_gives_back_in_another_form():
    x = operands()
    expected = torch.autograd.grad(squares(*ours(*x)), x)

    def backward(unpack):
        with torch.autograd.graph.saved_tensors_hooks(lambda y: y, lambda y: unpack(y) if y.dim() == 1 else y):
            loss = squares(*ours(*x))
        return torch.autograd.grad(loss, x)

    assert is_same(backward(lambda y: torch.stack([y, y], -1)[:, 0]), expected)
    if not IS_CUDA:  # nothing is saved there
        with pytest.raises(ValueError, match="^gated_delta_rule: saved has dtype torch.bfloat16 and 1 dimensions, allowed torch.float32 and 1$"):
            backward(lambda y: y.bfloat16())
        with pytest.raises(ValueError, match="^gated_delta_rule: saved_size is "):
            backward(lambda y: y[:-1])
    with torch.autograd.graph.save_on_cpu():
        loss = squares(*ours(*x))
    assert is_same(torch.autograd.grad(loss, x), expected)


@cpu_only("it is about threads and paths of the CPU")
def test_threads_that_change_between_forward_and_backward():
    x, threads = operands(), torch.get_num_threads()
    expected = torch.autograd.grad(squares(*ours(*x)), x)
    try:
        for first, second in ((1, 5), (5, 1)):
            torch.set_num_threads(first)
            loss = squares(*ours(*x))
            torch.set_num_threads(second)
            assert is_same(torch.autograd.grad(loss, x), expected)
    finally:
        torch.set_num_threads(threads)


@no_fp64
def test_a_step_that_writes_what_a_graph_kept():
    x = [y.detach().double().requires_grad_() for y in operands()]
    state = torch.randn(1, H, K, K, dtype=torch.float64)
    o = ours(*x, state)[0]
    token = [y.detach()[:, :1].float() for y in x]
    narrow = torch.randn(1, H, K, K)
    product = narrow @ torch.ones(K, 1, requires_grad=True)
    ops.gated_delta_rule_step(*token, state=narrow)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()
    step = ops.plan(ops.gated_delta_rule_step, *token, state=narrow)
    version = narrow._version
    step(*token)
    assert narrow._version == version + 1
    o.sum().backward()
    with torch.inference_mode():
        narrow = torch.zeros(1, H, K, K)
    ops.gated_delta_rule_step(*token, state=narrow)  # has no version; written all the same
    assert narrow.abs().max() > 0


@cpu_only("it is about threads and paths of the CPU")
def test_a_context_lives_as_long_as_its_graph():
    x = operands()
    gc.collect()
    before = len(_library._contexts)
    o = ops.gated_delta_rule(*x, context=fastweight.Context(1, force_impl="cpu_baseline_chunk"))[0]
    gc.collect()
    assert len(_library._contexts) == before + 1
    o.sum().backward()
    assert fastweight.last_impl() == "cpu_baseline_chunk"
    del o
    gc.collect()
    assert len(_library._contexts) == before
    with pytest.raises(ValueError, match="^gated_delta_rule: context is number 1000000 of a graph, which is gone, "):
        _library._context("gated_delta_rule", 1000000)
