# SPDX-License-Identifier: Apache-2.0
"""What the tests of the layers share. Without torch or the package they are reported as not run."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from package_calls import DEVICE, IS_CUDA, cpu_only, seeded  # noqa: F401, finds the package, or skips
import pytest

torch = pytest.importorskip("torch", reason="not run: torch is not installed")
from fastweight.torch import nn as fnn  # noqa: E402
from layer_cases import CASES  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
HIDDEN = 32


def make(name, seed=0, dtype=torch.float32, layer_idx=0, **more):
    """The layer of a case with every parameter drawn: what starts at 0 or 1 would hide a wrong place."""
    cls, arguments = CASES[name]
    generator = seeded(seed)
    torch.manual_seed(seed)
    layer = getattr(fnn, cls)(**{"layer_idx": layer_idx, **arguments, **more})
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2 and "r_k" not in key:
                parameter.copy_(spread * parameter.shape[1] ** -0.5 * 1.5)
            elif "norm" in key and key.endswith("weight"):
                parameter.copy_(1 + 0.3 * spread)
            elif "A_log" not in key and "dt_bias" not in key and "lora" not in key:
                parameter.add_(0.3 * spread)
    return layer.to(dtype).eval()


def inputs(batch, tokens, seed=1, dtype=torch.float32):
    return torch.randn(batch, tokens, HIDDEN, generator=seeded(seed), dtype=torch.float64).to(dtype)


def first_values(name, x):
    """Keywords of forward that a case needs: RWKV-7 beyond layer 0 takes the values of layer 0."""
    if name != "rwkv7_later":
        return {}
    return {"v_first": torch.tanh(x.flip(-1))}


def distance(a, b):
    """RMS of the difference over the RMS of b."""
    a, b = a.detach().double(), b.detach().double()
    return ((a - b).square().mean().sqrt() / b.square().mean().sqrt()).item()


def holds(kept, layers):
    """Whether a snapshot's layers are what a cache's layers hold; of rings the snapshot has the rows in use."""
    return len(kept) == len(layers) and all(a.keys() == b.keys() and all(
        torch.equal(a[key], b[key][:, :a[key].shape[1]] if "keys" in key or "values" in key else b[key]) for key in a) for a, b in zip(kept, layers))
