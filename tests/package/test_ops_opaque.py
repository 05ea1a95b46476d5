# SPDX-License-Identifier: Apache-2.0
"""States in the library's own layout: import, steps, export."""
import numpy as np
import pytest

from package_calls import needs_torch, numpy_only, ops, torch

RNG = np.random.default_rng(1)


def operands(B, K, V):
    q, k = RNG.standard_normal((2, B, 1, 2, K)).astype(np.float32)
    v = RNG.standard_normal((B, 1, 4, V)).astype(np.float32)
    return q, k, v, -RNG.random((B, 1, 4, K)).astype(np.float32), RNG.random((B, 1, 4)).astype(np.float32)


@numpy_only
@pytest.mark.parametrize("layout", ("kv", "vk"))
def test_a_step_on_an_opaque_state_is_a_step(layout):
    K, V = 8, 5
    state = RNG.standard_normal((3, 4, K, V) if layout == "kv" else (3, 4, V, K)).astype(np.float32)
    opaque = ops.state_import(state, layout)
    assert ops.state_export(opaque, K, V, layout).tobytes() == state.tobytes()
    plain = state.copy()
    for _ in range(3):
        inputs = operands(3, K, V)
        expected = ops.kda_step(*inputs, state=plain, state_layout=layout)
        assert ops.kda_step(*inputs, state=opaque, state_layout="opaque").tobytes() == expected.tobytes()
    assert ops.state_export(opaque, K, V, layout).tobytes() == plain.tobytes()


@needs_torch
@pytest.mark.parametrize("dtype", ("float32", "bfloat16", "float16"))
def test_torch_and_half_types(dtype):
    state = torch.randn(2, 4, 6, 17)
    opaque = ops.state_import(state, dtype=dtype)
    assert opaque.dtype == getattr(torch, dtype) and opaque.ndim == 3
    back = ops.state_export(opaque, 6, 17, "vk", dtype="float32")
    assert torch.equal(back, state.to(opaque.dtype).float().transpose(2, 3))


@numpy_only
def test_refusals():
    state = np.zeros((2, 4, 6, 5), np.float32)
    with pytest.raises(ValueError, match="^state_import: state has 3 dimensions, expected 4$"):
        ops.state_import(state[0])
    with pytest.raises(ValueError, match="^state_import: state_layout is 'opaque', allowed \"kv\", \"vk\"$"):
        ops.state_import(state, "opaque")
    opaque = ops.state_import(state)
    with pytest.raises(ValueError, match=r"^state_export: state has \d+ elements a head, expected \d+ for K = 7 and V = 5$"):
        ops.state_export(opaque, 7, 5)
    with pytest.raises(ValueError, match="K"):
        ops.state_export(opaque, 0, 5)
    with pytest.raises(ValueError, match="^state_import: dtype is 'int32'"):
        ops.state_import(state, dtype="int32")
    assert ops.state_import(state[:0]).shape[0] == 0
