# SPDX-License-Identifier: Apache-2.0
"""bench/fla_suite.py on a small package that stands for a checkout of fla: what counts as passed, failed, skipped and not run."""
import json
import subprocess
import sys

from fla_truth import fastweight  # noqa: F401, skips without torch
from package_calls import ROOT, environment

TEST = '''
import time
import pytest
import torch
from fla.ops import chunk_simple_gla
from fla.utils import device, naive
from fla.ops.launcher import launch

x = torch.rand(1, 5, 2, 4, requires_grad=True)

def test_ours_against_the_reference():
    assert device == "cpu" and chunk_simple_gla.__module__.startswith("fastweight")
    assert torch.allclose(chunk_simple_gla(x, x, x)[0], naive(x, x, x), atol=1e-6)

@pytest.mark.skipif(True, reason="CUDA required")
def test_that_only_asks_for_cuda():
    assert chunk_simple_gla(x, x, x)[0].shape == x.shape

@pytest.mark.skipif(True, reason="a package is missing")
def test_that_fla_skips():
    raise AssertionError

def test_that_launches():
    launch()

def test_that_takes_long():
    try:
        time.sleep(30)
    except Exception:
        pass

def test_that_fails():
    assert chunk_simple_gla(x, x, x)[0].sum() == 0
'''
FILES = {
    "fla/__init__.py": "",
    "fla/utils/__init__.py": "from ._device import device, device_torch_lib, naive\n",
    "fla/utils/_device.py": "import torch\ndevice, device_torch_lib = 'cuda', torch.cuda\n"
                            "def naive(q, k, v):\n    s = torch.einsum('bthk,bshk->bhts', q, k).tril() * q.shape[-1] ** -0.5\n"
                            "    return torch.einsum('bhts,bshv->bthv', s, v)\n",
    "fla/ops/__init__.py": "from .simple_gla import chunk_simple_gla\n__all__ = ['chunk_simple_gla']\n",
    "fla/ops/simple_gla/__init__.py": "from .chunk import chunk_simple_gla\n",
    "fla/ops/simple_gla/chunk.py": "def chunk_simple_gla(*a, **k):\n    raise RuntimeError('a kernel')\n",
    "fla/ops/launcher.py": "from triton.runtime.jit import run\n\ndef launch():\n    run()\n",
    "fla/modules/__init__.py": "__all__ = []\n",
    "triton/__init__.py": "", "triton/runtime/__init__.py": "",
    "triton/runtime/jit.py": "def run():\n    raise RuntimeError('0 active drivers')\n",
    "tests/conftest.py": "from fla.utils import device_torch_lib\nimport torch\nassert device_torch_lib is torch.cpu\n",
    "tests/ops/test_simple_gla.py": TEST,
}


ON_CUDA = '''
from fla.ops import chunk_simple_gla

is_ours = chunk_simple_gla.__module__.startswith("fastweight")

def test_that_passes():
    assert is_ours

def test_that_fails_with_ours_alone():
    assert not is_ours

def test_that_fails_with_both():
    assert is_ours is None
'''


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def test_outcomes(tmp_path):
    write(tmp_path, FILES)
    output = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "bench" / "fla_suite.py"), "--fla", str(tmp_path), "--limit", "2", "--output", str(output)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert output.exists(), done.stdout + done.stderr
    found = json.loads(output.read_text())
    assert found["total"] == {"passed": 2, "failed": 1, "reference off": 0, "fails with fla": 0, "skipped": 1, "not run": 2}, done.stdout
    assert done.returncode == 1
    name = "tests/ops/test_simple_gla.py"
    assert set(found["passed"]) == {f"{name}::test_ours_against_the_reference", f"{name}::test_that_only_asks_for_cuda"}
    assert "AssertionError" in found["failed"][f"{name}::test_that_fails"]
    assert found["skipped"] == {"by fla: a package is missing": 1}
    assert found["tests_not_run"] == {f"{name}::test_that_launches": "launches a Triton kernel of fla in launch",
                                      f"{name}::test_that_takes_long": "over 2 s"}
    (tmp_path / name).write_text(TEST.replace("sum() == 0", "sum() != 0").replace("device == ", "device != "))
    done = subprocess.run([*command, "--resume"], env=environment(), capture_output=True, text=True, check=False)
    again = json.loads(output.read_text())["total"]
    assert done.returncode == 0 and again == {**found["total"], "passed": 3, "failed": 0}, "only what had failed ran again"


def test_what_fails_on_cuda_runs_again_with_flas_functions(tmp_path):
    """The tests are of no device; what --device cuda changes is the second run."""
    write(tmp_path, {**FILES, "tests/conftest.py": "", "tests/ops/test_simple_gla.py": ON_CUDA})
    output = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "bench" / "fla_suite.py"), "--fla", str(tmp_path), "--device", "cuda", "--output", str(output)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    found, name = json.loads(output.read_text()), "tests/ops/test_simple_gla.py"
    assert done.returncode == 1 and list(found["passed"]) == [f"{name}::test_that_passes"], done.stdout
    assert list(found["failed"]) == [f"{name}::test_that_fails_with_ours_alone"]
    assert found["failed"][f"{name}::test_that_fails_with_ours_alone"].endswith("with fla's functions: passed ")
    assert list(found["fails_with_fla"]) == [f"{name}::test_that_fails_with_both"]
