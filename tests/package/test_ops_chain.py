# SPDX-License-Identifier: Apache-2.0
"""Chains: the bits of their steps one by one, operands that follow the tensors of a call, what they refuse, and plans with `out`."""
import re
import threading
import weakref

import numpy as np
import pytest

from package_calls import KINDS, cpu_only, needs_torch, ops, torch

pytestmark = cpu_only("a chain runs on the CPU alone")

F = np.float32
H, K = 2, 16


class Layer:
    """One token of a toy layer: q, k, v interleaved by head in one projection x [1,1,H*3*K], beta [1,1,H], weight [K]."""

    def __init__(self, as_torch, seed=0):
        self.rng, self.as_torch = np.random.default_rng(seed), as_torch
        self.state, self.weight = self.new(1, H, K, K), self.new(K)
        mixed, self.o = self.new(1, 1, 3, H, K), self.new(1, 1, H, K)
        self.mixed = mixed
        self.x, self.beta = self.call()
        views = [(mixed[:, :, j], self.x.reshape(1, 1, H, 3, K)[:, :, :, j]) for j in range(3)]
        self.plans = [ops.plan(ops.delta_rule_step, *(mixed[:, :, j] for j in range(3)), self.beta, state=self.state, out=self.o),
                      ops.plan(ops.rms_norm, self.o, self.weight)]
        self.chain = ops.chain([*views, *self.plans], (self.x, self.beta))

    def new(self, *shape):
        found = self.rng.standard_normal(shape).astype(F)
        return torch.from_numpy(found) if self.as_torch else found

    def call(self):
        return self.new(1, 1, H * 3 * K), self.new(1, 1, H)

    def expected(self, x, beta, state):
        parts = x.reshape(1, 1, H, 3, K)
        return ops.rms_norm(ops.delta_rule_step(*(parts[:, :, :, j] for j in range(3)), beta, state=state), self.weight)


def bits(x):
    return np.ascontiguousarray(x).tobytes()


def refused(error, sentence, call, *arguments):
    with pytest.raises(error, match="^" + re.escape(sentence) + "$"):
        call(*arguments)


@pytest.mark.parametrize("as_torch", KINDS)
def test_a_chain_is_its_steps(as_torch):
    layer = Layer(as_torch)
    other = layer.state.clone() if as_torch else layer.state.copy()
    results = []
    for _ in range(3):
        x, beta = layer.call()
        results.append((layer.chain(x, beta), layer.expected(x, beta, other)))
        assert bits(layer.state) == bits(other)
    assert all(bits(found) == bits(expected) for found, expected in results)  # a new result each time
    assert repr(layer.chain) == "<fastweight chain of copy copy copy delta_rule_step rms_norm: 2 tensors>"


def test_what_is_no_tensor_of_the_call_stays():
    layer = Layer(False)
    x, beta = layer.call()
    kept = layer.state.copy()
    first = layer.chain(x, beta)
    layer.state[:] = kept
    layer.weight *= 2
    assert bits(layer.chain(x, beta)) == bits(2 * first)
    layer.state[:] = kept
    layer.plans[0](*(np.zeros((1, 1, H, K), F) for _ in range(3)), beta, state=np.zeros_like(kept))  # a call of a plan changes no chain
    assert bits(layer.chain(x, beta)) == bits(2 * first)


@pytest.mark.parametrize("as_torch", KINDS)
def test_the_same_tensor_with_new_data_or_new_memory(as_torch):
    layer = Layer(as_torch)
    other = layer.state.clone() if as_torch else layer.state.copy()
    x, beta = layer.x, layer.beta
    for i in range(3):
        x *= 0.5 + i
        assert bits(layer.chain(x, beta)) == bits(layer.expected(x, beta, other))
    if as_torch:
        x.data = layer.call()[0]
        assert bits(layer.chain(x, beta)) == bits(layer.expected(x, beta, other))
        x.data = x.data.double()
        refused(ValueError, "chain: tensor 0 has another dtype than the chain was made for", layer.chain, x, beta)


def test_what_a_call_refuses_leaves_all_as_it_was():
    layer = Layer(False)
    x, beta = layer.call()
    kept = [bits(a) for a in (layer.state, layer.mixed, layer.o)]
    refused(TypeError, "chain: the chain takes 2 tensors, found 1", layer.chain, x)
    refused(ValueError, "chain: tensor 1 has another dtype than the chain was made for", layer.chain, x, beta.astype(np.float64))
    refused(ValueError, "chain: tensor 0 has shape [1,1,95], the chain was made for [1,1,96]", layer.chain, x[..., :95], beta)
    wide = np.zeros((1, 1, 2 * H), F)[..., ::2]
    refused(ValueError, "chain: tensor 1 has strides [4,4,2], the chain was made for [2,2,1]", layer.chain, x, wide)
    assert kept == [bits(a) for a in (layer.state, layer.mixed, layer.o)]
    other = layer.state.copy()
    assert bits(layer.chain(x, beta)) == bits(layer.expected(x, beta, other))


def test_what_a_chain_is_not_made_of():
    layer = Layer(False)
    step, norm = layer.plans
    tensors = (layer.x, layer.beta)
    pair = (layer.mixed[:, :, 0], layer.mixed[:, :, 1])
    without_out = ops.plan(ops.rms_norm, layer.o, layer.weight)
    last = "chain: the last step is no plan, allowed plans and pairs (to, from) before a plan"
    refused(ValueError, last, ops.chain, [], tensors)
    refused(ValueError, last, ops.chain, [step, pair], tensors)
    refused(TypeError, "chain: step 0 is 3, allowed a plan or a pair (to, from)", ops.chain, [3, norm], tensors)
    refused(ValueError, "chain: the plan of rms_norm has no out, allowed only for the last step", ops.chain, [without_out, norm], tensors)
    unlike = "chain: step 0 copies between two dtypes or shapes, allowed one"
    refused(ValueError, unlike, ops.chain, [(pair[0], pair[1][..., :8]), norm], tensors)
    refused(ValueError, unlike, ops.chain, [(pair[0], pair[1].astype(np.float64)), norm], tensors)


@pytest.mark.parametrize("dtype", (np.float16, np.float32, np.float64))
def test_copies_of_any_strides(dtype):
    """Turned, with gaps, backwards, broadcast, of one element, and empty: what NumPy's assignment writes, and nothing beside it."""
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((1, 1, 4)).astype(F), np.ones(4, F)
    base = rng.standard_normal((4, 3, 6)).astype(dtype)
    views = (base, base.transpose(2, 0, 1), base[::2, :, 1::2], base[:, ::-1], np.broadcast_to(base[:1], (3, 3, 6)), base[:1, :1, :1],
             base[:, :0], base[1, 1])
    for view in views:
        for gap in (1, 2):
            room, expected = (np.full((*view.shape[:-1], gap * view.shape[-1] + 1), 7, dtype) for _ in range(2))
            inner = slice(0, gap * view.shape[-1], gap)
            expected[..., inner] = view
            ops.chain([(room[..., inner], view), ops.plan(ops.rms_norm, x, weight)], (x,))(x)
            assert bits(room) == bits(expected)


def test_a_plan_with_out():
    layer = Layer(False)
    rng = np.random.default_rng(4)
    q, k, v = rng.standard_normal((3, 1, 1, H, K)).astype(F)
    beta, state = layer.beta, layer.state.copy()
    room = np.full((1, 1, H, 2 * K), 7, F)
    out = room[..., ::2]
    plan = ops.plan(ops.delta_rule_step, q, k, v, beta, state=layer.state, out=out)
    assert plan(q, k, v, beta) is out
    assert bits(out) == bits(ops.delta_rule_step(q, k, v, beta, state=state)) and (room[..., 1::2] == 7).all()

    def make(function, *arguments, **others):
        return lambda: ops.plan(function, *arguments, **others)

    refused(ValueError, "gated_delta_rule: out is given, allowed for functions with one result",
            make(ops.gated_delta_rule, q, k, v, -np.abs(beta), beta, out=out))
    with pytest.raises(ValueError, match=r"^delta_rule: o .*"):
        ops.plan(ops.delta_rule_step, q, k, v, beta, state=state, out=np.zeros((1, 1, H, K + 1), F))
    frozen = np.zeros((1, 1, H, K), F)
    frozen.flags.writeable = False
    refused(ValueError, "delta_rule_step: out is read-only, it is written by the call",
            make(ops.delta_rule_step, q, k, v, beta, state=state, out=frozen))


def test_a_chain_keeps_its_tensors_alive_and_lets_go_of_those_of_a_call():
    layer = Layer(False)

    class Array(np.ndarray):
        pass

    x, beta = layer.call()
    x = x.view(Array)
    watch = weakref.ref(x)
    layer.chain(x, beta)
    del x
    other = layer.state.copy()
    x, beta = layer.call()
    layer.plans = layer.mixed = layer.o = None
    assert bits(layer.chain(x, beta)) == bits(layer.expected(x, beta, other))
    assert watch() is None


def test_one_call_at_a_time():
    """Long calls of one chain from two threads: each runs alone or is refused."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((1, 2048, 4, 64)).astype(F)
    o = np.empty_like(q)
    chain = ops.chain([(o, q), ops.plan(ops.retention, o, o, o)], (q,))
    expected = ops.retention(q, q, q)[0]
    found, refusals = [], []

    def work():
        for _ in range(3):
            try:
                found.append(chain(q)[0])
            except RuntimeError as error:
                refusals.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found and all(bits(x) == bits(expected) for x in found)
    assert set(refusals) <= {"chain: this chain is running in another thread"} and len(found) + len(refusals) == 9


@needs_torch
def test_autograd_knows_what_was_written_and_a_chain_differentiates_nothing():
    layer = Layer(True)
    versions = [x._version for x in (layer.state, layer.mixed, layer.o)]
    layer.chain(*layer.call())
    assert all(x._version > before for x, before in zip((layer.state, layer.mixed, layer.o), versions, strict=True))
    x, beta = layer.call()
    x.requires_grad_()
    refused(ValueError, "chain: an input requires grad, a chain computes no gradients; call it under torch.no_grad()", layer.chain, x, beta)
    with torch.no_grad():
        other = layer.state.clone()
        assert bits(layer.chain(x, beta)) == bits(layer.expected(x, beta, other))
