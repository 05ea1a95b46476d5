# SPDX-License-Identifier: Apache-2.0
"""The Triton forms against the plain ones; on a GPU, or anywhere with TRITON_INTERPRET=1."""
import os

import pytest

try:
    import torch
except ImportError:
    print("not run: torch is not installed")
    pytest.skip("not run: torch is not installed", allow_module_level=True)
pytest.importorskip("triton", reason="not run: triton is not installed")
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("not run: no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

pytest.importorskip("fastweight", reason="not run: the package fastweight is not built (target fastweight_python) nor installed")

import model
from gpu import delta_rule as dr
from gpu import form, kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def rand(*shape):
    return torch.randn(*shape, device=DEVICE)


def close(a, b, bound=3e-3):
    assert (a - b).norm() <= bound * b.norm(), ((a - b).norm() / b.norm()).item()


def compare(compiled, plain, tensors):
    results = []
    for form in (compiled, plain):
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = form(*leaves)
        out = out if isinstance(out, (tuple, list)) else (out,)
        torch.manual_seed(9)
        loss = sum((o * rand(*o.shape)).sum() for o in out if o.requires_grad)
        results.append((out, torch.autograd.grad(loss, leaves)))
    for part in zip(*results):
        for a, b in zip(*part):
            close(a.detach(), b.detach())


def test_inverse():
    compare(lambda a: kernels.UnitLowerInverse.apply(a, torch.float32), lambda a: dr.UnitLowerInverse.apply(a, torch.float32),
            [(rand(3, 2, 64, 64) * 0.1).tril(-1)])


def test_scan():
    s0 = rand(3, 16, 32)
    plain = lambda m, u, a: (dr.chunk_scan(m, u, a, s0)[0], dr.chunk_scan(m, u, a, s0)[1].detach())
    compare(lambda m, u, a: kernels.ChunkScan.apply(m, u, a, s0), plain,
            [rand(3, 5, 16, 16) * 0.1, rand(3, 5, 16, 32), torch.rand(3, 5, device=DEVICE)])


def test_conv_heads():
    raw, tail = rand(2, 128, 2 * 32 + 64 + 10), rand(2, 3, 2 * 32 + 64)
    docs = (torch.rand(2, 131, device=DEVICE) < 0.1).cumsum(1).int()
    shaped = lambda f: lambda x, *w: f(x[:, :, :128], tail, docs[:, 3:], docs[:, :3], (2, 2, 2), (True, True, False), *w)
    compare(shaped(kernels.ConvHeads.apply), shaped(form.conv_heads), [raw, rand(32, 1, 4), rand(32, 1, 4), rand(64, 1, 4)])


def test_model_with_kernels():
    settings = model.config(["gated_delta_rule"], d_model=32, mlp_hidden=32, max_context=128,
                            gated_delta_rule=dict(n_heads=1, n_value_heads=2, head_k_dim=16, head_v_dim=32, conv_size=4))
    x = torch.randint(0, 256, (2, 128), device=DEVICE)
    x[0, 70] = x[1, 0] = 0
    grads = []
    for stages in (form.Stages(triton=True), form.Stages()):
        torch.manual_seed(0)
        m = model.make(settings).to(DEVICE)
        torch.nn.init.normal_(m.layers[0].mixer.o_proj.weight, std=0.3)
        runner = form.GpuStreams(m, 2, DEVICE, stages=stages)
        for _ in range(2):
            loss = runner.losses(x, x.roll(-1, 1)).mean()
        grads.append([loss.detach()] + list(torch.autograd.grad(loss, list(m.parameters()))))
    for a, b in zip(*grads):
        close(a, b, 1e-2)
