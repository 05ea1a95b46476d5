# SPDX-License-Identifier: Apache-2.0
"""Oracle calls (tests/oracle) as calls of fastweight.ops, on NumPy arrays or torch tensors. Imported by every test here; without
the package its tests are reported as not run.

FW_TEST_DEVICE=cuda puts every torch tensor of the tests on the current CUDA device; what has a meaning on the CPU alone is then
reported as not run."""
import os
import sys
from pathlib import Path

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
BUILT = Path(os.environ.get("FW_BUILD", ROOT / "build" / "release")) / "python"
for folder in (ROOT / "tests", ROOT / "tests" / "python"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
if (BUILT / "fastweight").is_dir() and str(BUILT) not in sys.path:
    sys.path.insert(0, str(BUILT))

fastweight = pytest.importorskip("fastweight", reason="not run: the package fastweight is not built (target fastweight_python) nor installed")
ops = fastweight.ops

try:
    import torch
except ImportError:
    torch = None

DEVICE = os.environ.get("FW_TEST_DEVICE") or "cpu"
IS_CUDA = DEVICE == "cuda"
if DEVICE not in ("cpu", "cuda"):
    raise RuntimeError(f"FW_TEST_DEVICE is {DEVICE}, allowed cpu or cuda")
if IS_CUDA:
    if torch is None or not torch.cuda.is_available():
        raise RuntimeError("FW_TEST_DEVICE is cuda, this Python has no torch with a CUDA device")
    torch.set_default_device("cuda")
    torch.backends.cudnn.allow_tf32 = False  # fp32 is compared with fp32

needs_torch = pytest.mark.skipif(torch is None, reason="not run: torch is not installed")
needs_cuda = pytest.mark.skipif(not IS_CUDA, reason="not run: FW_TEST_DEVICE is not cuda")
numpy_only = pytest.mark.skipif(IS_CUDA, reason="not run on cuda: NumPy arrays are computed on the CPU")
# What tests draw and compare in where the CPU has fp64; CUDA has none.
REAL = torch and (torch.float32 if IS_CUDA else torch.float64)
no_fp64 = pytest.mark.skipif(IS_CUDA, reason="not run on cuda: fp64 is computed by the reference, on the CPU alone")
KINDS = (pytest.param(False, marks=numpy_only), pytest.param(True, marks=needs_torch))  # as_torch


def seeded(seed):
    """A generator of the tests' device."""
    return torch.Generator(DEVICE).manual_seed(seed)


def cpu_only(reason):
    return pytest.mark.skipif(IS_CUDA, reason=f"not run on cuda: {reason}")


def has_neighbours():
    """Whether the operations beside the family run on the device of the tests."""
    return not IS_CUDA or "*" in ops.l2_norm(torch.zeros(1, 8), explain=True)


needs_neighbours = pytest.mark.skipif(not has_neighbours(), reason="not run on cuda: the operations beside the family have no CUDA path here")
OPTIONS = ("normalizer", "qk_norm", "gate_input", "beta_input")


def environment(**more):
    """Of a new process that finds the package where this one did."""
    kept = {name: value for name, value in os.environ.items() if name not in ("FW_NUM_THREADS", "FW_IMPL", "OMP_NUM_THREADS")}
    paths = [str(Path(fastweight.__file__).parents[1])] + ([kept["PYTHONPATH"]] if kept.get("PYTHONPATH") else [])
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), **more}


def to_device(x):
    """A torch tensor of the CPU on the device of the tests, in the same strides."""
    if not IS_CUDA:
        return x
    is_repeated = [stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape)]
    if any(is_repeated):
        return to_device(x[tuple(slice(0, 1) if repeated else slice(None) for repeated in is_repeated)]).expand(x.shape)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


def to_torch(x):
    """A tensor on the device of the tests, on the CPU over the same memory; uint16 is bfloat16. torch has no negative strides:
    such a view is copied."""
    if any(stride < 0 for stride in x.strides):
        x = x.copy()
    found = torch.from_numpy(x)
    return to_device(found.view(torch.bfloat16) if x.dtype == np.uint16 else found)


def to_numpy(x):
    """Bits as they are, bfloat16 as uint16."""
    if torch is None or not isinstance(x, torch.Tensor):
        return x
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).cpu().numpy()


def ran_kernels():
    """Whether the last call of this thread took the chunk form's own kernels, not a reference or another form."""
    name = fastweight.last_impl()
    return name.startswith(("cuda_", "sm")) if IS_CUDA else name.endswith("_chunk")


def arguments(call, inputs, is_step=False):
    """Keywords of fastweight.ops.<row> for an oracle call whose operands are stored as `inputs`."""
    found = dict(inputs)
    if call.cu_seqlens is not None:
        found["cu_seqlens"] = np.asarray(call.cu_seqlens)
    found["state_layout"] = call.layout
    if call.scale:
        found["scale"] = call.scale
    if call.qk_norm:
        found["qk_norm"] = "l2"
    if call.normalizer:
        found["normalizer"] = "sum"
    for name in ("gate_input", "beta_input"):
        default = {"gate_input": "log_decay", "beta_input": "plain"}[name]
        if getattr(call, name) != default:
            found[name] = getattr(call, name)
    if call.op == "gated_delta_product":
        found["n_sub"] = call.n_sub
    if call.op == "lightning":
        found.update(layer_idx=call.layer_idx, num_layers=call.num_layers)
    if call.op == "by_axes":
        found.update(gate=call.gate, erase=call.erase)
    if not is_step:
        found["output_final_state"] = True
    return found


def stored(call, dtype, as_torch=False, views=None):
    """The operands in storage "f64", "f32", "bf16", "f16"; `views` changes the strides of some."""
    import c_call
    import fastweight_c

    if IS_CUDA and dtype == "f64":
        pytest.skip("not run on cuda: fp64 is computed by the reference, on the CPU alone")
    as_torch = as_torch or IS_CUDA
    found = {name: fastweight_c.store(x, c_call.storage_of(name, dtype, None)) for name, x in call.given().items()}
    for name, view in (views or {}).items():
        if name in found:
            found[name] = view(found[name])
    return {name: to_torch(x) for name, x in found.items()} if as_torch else found


def forward(call, dtype="f64", as_torch=False, views=None, **how):
    """{"o", "final_state", "final_z"} as NumPy arrays with the bits of the answer; asserts that no input was written."""
    inputs = stored(call, dtype, as_torch, views)
    kept = {name: to_numpy(x).copy() for name, x in inputs.items()}
    answer = getattr(ops, call.op)(**arguments(call, inputs), **how)
    for name, x in inputs.items():
        assert to_numpy(x).tobytes() == kept[name].tobytes(), f"{call.op} wrote to {name}"
    names = ("o", "final_state", "final_z")[:len(answer)]
    if as_torch or IS_CUDA:
        assert all(isinstance(x, torch.Tensor) and x.device.type == DEVICE for x in answer if x is not None)
    return {name: to_numpy(x) for name, x in zip(names, answer) if x is not None}


def values(found):
    """Bits to float64."""
    import fastweight_c

    return {name: fastweight_c.load(x) for name, x in found.items()}
