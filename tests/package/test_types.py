# SPDX-License-Identifier: Apache-2.0
"""The package's types: mypy finds no fault in it, and none in a caller that uses it rightly, but one in a caller that does not."""
import importlib.util
import subprocess
import sys

import pytest

from package_calls import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="not run: mypy is not installed")
CALLER = """
import numpy as np
from fastweight import Context, ops

q: np.ndarray = np.zeros((1, 2, 1, 8), np.float32)
o, state = ops.kda(q, q, q, q, q[..., 0], qk_norm="l2", context=Context(1))
text: str = ops.kda(q, q, q, q, q[..., 0], explain=True)
back: np.ndarray = ops.state_export(ops.state_import(q), 1, 8)
"""


def mypy(*arguments):
    done = subprocess.run([sys.executable, "-m", "mypy", *arguments], capture_output=True, text=True, check=False, cwd=ROOT)
    return done.returncode, done.stdout + done.stderr


def test_the_package(tmp_path):
    code, text = mypy("--cache-dir", str(tmp_path))
    assert code == 0, text


def test_callers(tmp_path):
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    right.write_text(CALLER)
    wrong.write_text(CALLER.replace('qk_norm="l2"', 'qk_norm="l3"').replace("text: str", "text: int"))
    assert mypy("--cache-dir", str(tmp_path / "cache"), str(right))[0] == 0
    code, text = mypy("--cache-dir", str(tmp_path / "cache"), str(wrong))
    assert code == 1 and "qk_norm" in text and '"str", variable has type "int"' in text, text
