# SPDX-License-Identifier: Apache-2.0
"""Shapes and strides that hypothesis thinks of: every row takes any, its result has the shape, dtype and strides that are
promised, the bits do not depend on strides, and chunk agrees with token by token."""
import numpy as np
import pytest

from package_calls import arguments, numpy_only, ops, stored, torch

pytestmark = numpy_only

hypothesis = pytest.importorskip("hypothesis", reason="not run: hypothesis is not installed")
from hypothesis import given, settings, strategies as st

from oracle import cases

settings.register_profile("here", max_examples=150, deadline=None, derandomize=True)
settings.load_profile("here")


@st.composite
def calls(draw):
    op = draw(st.sampled_from(cases.ROW_NAMES))
    H = draw(st.integers(1, 3))
    shape = {"T": draw(st.integers(0, 40)), "H": H, "HV": H * draw(st.integers(1, 3)), "K": draw(st.integers(1, 20)),
             "V": draw(st.integers(1, 20)), "seed": draw(st.integers(0, 99)), "strength": 0.3}
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, shape["T"]), max_size=4)))
        shape["cu"] = [0, *cuts, shape["T"]]
    else:
        shape["B"] = draw(st.integers(1, 3))
    shape["layout"] = draw(st.sampled_from(("kv", "vk")))
    return cases.make(op, **shape)


def strided(draw, x):
    """The same values, memory in another order, with gaps, or backwards."""
    order = draw(st.permutations(range(x.ndim)))
    steps = [draw(st.sampled_from((1, 1, 2, -1))) for _ in range(x.ndim)]
    wide = np.full([abs(steps[axis]) * x.shape[axis] for axis in order], np.nan, x.dtype)
    view = wide.transpose(np.argsort(order))[tuple(slice(None, None, step) for step in steps)]
    view[...] = x
    return view


@given(calls(), st.data())
def test_strides_change_no_bit(call, data):
    inputs = stored(call, "f32")
    views = {name: strided(data.draw, x) for name, x in inputs.items()}
    dense = getattr(ops, call.op)(**arguments(call, inputs))
    found = getattr(ops, call.op)(**arguments(call, views))
    for x, y in zip(dense, found, strict=True):
        assert (x is None) == (y is None)
        if x is not None:
            assert x.tobytes() == y.tobytes() and y.flags["C_CONTIGUOUS"] and y.dtype == np.float32


@given(calls())
def test_chunk_is_token_by_token(call):
    inputs = stored(call, "f32")
    first = getattr(ops, call.op)(**arguments(call, inputs))
    second = getattr(ops, call.op)(**arguments(call, inputs), form="recurrent")
    B, T, H, K = call.q.shape
    assert first[0].shape == (B, T, *call.v.shape[2:])
    # both are within the error rule of the same truth; here a plain bound: 40 tokens, 20 terms, growth by at most 2 a token of
    # what a round-off leaves; the normaliser may divide by what is nearly 0, so the error is asked for against the largest value
    for x, y in zip(first, second, strict=True):
        if x is not None:
            assert np.abs(x - y).max(initial=0) <= 1e-3 * max(np.abs(y).max(initial=0), 1e-3)


@pytest.mark.skipif(torch is None, reason="not run: torch is not installed")
@given(calls(), st.data())
def test_gradients_have_the_shape_of_their_input(call, data):
    inputs = {name: x.requires_grad_(data.draw(st.booleans())) for name, x in stored(call, "f32", as_torch=True).items()}
    answer = getattr(ops, call.op)(**arguments(call, inputs))
    wanted = [x for x in inputs.values() if x.requires_grad]
    if not wanted:
        assert not answer[0].requires_grad
        return
    found = torch.autograd.grad(sum(x.sum() for x in answer if x is not None), wanted)
    for x, y in zip(found, wanted, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype) and torch.isfinite(x).all()


NUMBERS = st.one_of(st.none(), st.integers(-3, 40), st.floats(allow_nan=True, allow_infinity=True), st.sampled_from(("", "kv", "l2", "chunk")))


@given(st.sampled_from(cases.ROW_NAMES), st.lists(st.lists(st.integers(0, 4), max_size=6), min_size=6, max_size=6),
       st.dictionaries(st.sampled_from(("scale", "form", "state_layout", "qk_norm", "output_final_state", "o_dtype", "cu_seqlens", "initial_state")), NUMBERS))
def test_wrong_arguments_are_refused_in_words(op, shapes, keywords):
    import inspect
    needed = [name for name, x in inspect.signature(getattr(ops, op)).parameters.items() if x.default is inspect.Parameter.empty]
    tensors = [np.zeros(shape, np.float32) for shape in shapes][:len(needed)]
    try:
        answer = getattr(ops, op)(*tensors, **keywords)
    except (ValueError, TypeError, NotImplementedError) as error:
        assert str(error).startswith(op), str(error)
    else:
        assert isinstance(answer, tuple) and answer[0].ndim == 4
