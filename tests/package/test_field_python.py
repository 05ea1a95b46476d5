# SPDX-License-Identifier: Apache-2.0
"""Field reports about the Python face, by number (docs/field_reports.md): layers, masks, compiled models, meta tensors, builds."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from package_calls import environment, fastweight, needs_torch, ops, torch


@needs_torch
@pytest.mark.parametrize("dtype", ("float32", "bfloat16"))
def test_field_011_a_fresh_rwkv7_layer_gives_numbers(dtype):
    from fastweight.torch.nn import RWKV7Attention
    torch.manual_seed(0)
    layer = RWKV7Attention(hidden_size=64, head_dim=32, layer_idx=0, num_hidden_layers=2).to(getattr(torch, dtype))
    x = torch.randn(2, 40, 64, dtype=getattr(torch, dtype), requires_grad=True)
    o = layer(x)[0]
    o.float().square().mean().backward()
    assert torch.isfinite(o).all() and torch.isfinite(x.grad).all()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters() if p.grad is not None)


@needs_torch
def test_field_041_a_mask_beside_offsets_is_refused():
    from fastweight.torch.nn import GatedDeltaNet
    layer = GatedDeltaNet(hidden_size=32, num_heads=2, head_dim=16, expand_v=1, layer_idx=0)
    x = torch.randn(1, 10, 32)
    expected = layer(x, cu_seqlens=torch.tensor([0, 4, 10]))[0]
    assert not torch.allclose(expected, layer(x)[0], atol=1e-6)
    try:
        found = layer(x, attention_mask=torch.ones(1, 10, dtype=torch.int64), cu_seqlens=torch.tensor([0, 4, 10]))[0]
    except ValueError as error:
        assert "attention_mask" in str(error) or "cu_seqlens" in str(error)
    else:
        assert torch.equal(found, expected)  # a mask of ones hides nothing; the offsets stand


@needs_torch
@pytest.mark.parametrize("kind", ("GatedDeltaNet", "KimiDeltaAttention", "Attention"))
def test_field_093_left_padding_of_a_batch_of_one(kind):
    from fastweight.torch import nn
    torch.manual_seed(0)
    sizes = {} if kind == "Attention" else {"expand_v": 1}
    layer = getattr(nn, kind)(hidden_size=32, num_heads=2, head_dim=16, layer_idx=0, **sizes).eval()
    x = torch.randn(1, 9, 32)
    padded = torch.cat([torch.full((1, 5, 32), 7.0), x], 1)
    mask = torch.tensor([[0] * 5 + [1] * 9])
    with torch.no_grad():
        found, expected = layer(padded, attention_mask=mask)[0][:, 5:], layer(x)[0]
    # the same rows through the same sums; a matrix product of another height may round otherwise
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


@needs_torch
def test_field_123_compiled_whole_for_any_length():
    import torch._dynamo.testing as dynamo_testing

    from fastweight.torch.nn import GatedDeltaNet
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = GatedDeltaNet(hidden_size=32, num_heads=2, head_dim=16, expand_v=1, layer_idx=0)
    counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (20, 33, 47, 90):
        x = torch.randn(1, tokens, 32, requires_grad=True)
        gradients = [torch.autograd.grad(f(x)[0].square().sum(), [x, *layer.parameters()], allow_unused=True) for f in (layer, compiled)]
        for a, b in zip(*gradients, strict=True):
            assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count <= 2  # the second length makes the graph of every length


@needs_torch
@pytest.mark.parametrize("op", ("kda", "short_conv", "rms_norm"))
def test_field_134_meta_tensors_and_autocast(op):
    import fastweight.torch as fw_torch
    operator = fw_torch._OPERATORS[op]
    inputs = {"kda": dict(q=(1, 9, 2, 8), k=(1, 9, 2, 8), v=(1, 9, 2, 4), g=(1, 9, 2, 8), beta=(1, 9, 2)),
              "short_conv": dict(x=(1, 9, 6), weight=(6, 4)), "rms_norm": dict(x=(2, 9, 6), weight=(6,))}[op]
    tensors = {name: torch.rand(shape) for name, shape in inputs.items()}
    if op == "kda":
        tensors["g"] = -tensors["g"]
    real = getattr(ops, op)(**tensors)
    meta = getattr(ops, op)(**{name: x.to("meta").requires_grad_() for name, x in tensors.items()})
    for x, y in zip(*(found if isinstance(found, tuple) else (found,) for found in (real, meta)), strict=True):
        assert (x is None and y is None) or (y.is_meta and y.shape == x.shape and y.dtype == x.dtype)
    with torch.autocast("cpu", torch.bfloat16):
        again = getattr(ops, op)(**tensors)
    assert torch.equal(*(found[0] if isinstance(found, tuple) else found for found in (real, again)))
    assert operator.name == op


def test_field_135_no_torch_is_linked_and_none_is_needed():
    core = Path(fastweight._core.__file__)
    if sys.platform == "linux":
        linked = subprocess.run(["ldd", str(core)], capture_output=True, text=True, check=True).stdout
        names = [Path(line.split()[0]).name for line in linked.splitlines() if line.strip()]
        assert any(name.startswith("libfastweight") for name in names), linked
        assert not any(word in name for word in ("torch", "c10", "cuda", "python") for name in names), linked
    code = ("import sys\n"
            "sys.modules['torch'] = None\n"  # an import of it fails
            "import numpy as np, fastweight\n"
            "q = np.ones((1, 4, 1, 8), np.float32)\n"
            "assert fastweight.ops.linear_attn(q, q, q)[0].shape == q.shape\n")
    subprocess.run([sys.executable, "-c", code], check=True, env=environment(), timeout=120)
