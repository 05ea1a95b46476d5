# SPDX-License-Identifier: Apache-2.0
"""The package as installed: info, marker of types, cost of the import."""
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from package_calls import ROOT, environment, fastweight


def test_info_says_what_runs():
    done = subprocess.run([sys.executable, "-m", "fastweight", "info"], capture_output=True, text=True, check=True, env=environment())
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"fastweight {fastweight.__version__}, Python {sys.version_info.major}.")
    assert any(line.split() == ["level", fastweight.default_context().cpu_level] for line in lines)
    assert any(line.startswith("threads ") for line in lines)
    assert any(line.startswith("CUDA ") for line in lines)
    assert sum(line.startswith("  *cpu_") for line in lines) == 2


def test_without_a_command_it_says_which_there_are():
    done = subprocess.run([sys.executable, "-m", "fastweight"], capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 2 and "info" in done.stderr


def test_the_package_is_typed():
    folder = Path(fastweight.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "ops/__init__.pyi").exists()


def test_the_import_is_cheap():
    """At most 0.15 s of processor time, the best of five processes, the interpreter's own start taken off."""
    def seconds(program):
        text = f"import time; start = time.process_time(); {program}; print(time.process_time() - start)"
        return min(float(subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, env=environment()).stdout)
                   for _ in range(5))
    assert seconds("import fastweight") < 0.15


def test_the_example_of_the_readme_runs():
    done = subprocess.run([sys.executable, str(ROOT / "examples/first.py")], capture_output=True, text=True, check=True, env=environment())
    lines = done.stdout.splitlines()
    # six tokens in chunks and one alone against seven in chunks: 7 * 16 terms of about 1, each with a round-off of 2^-24
    assert float(lines[0].split(":")[1]) < 7 * 16 * 2.0 ** -24
    assert "(1, 6, 2, 8) (1, 2, 16, 8)" in lines[1]
    assert lines[2] == "refused: gated_delta_rule: beta has shape [1,6,2], expected [1,7,2]"


def test_the_page_shows_calls_that_run():
    """The indented lines of docs/python.md that are Python, in order."""
    lines = re.findall(r"^    ((?:from|o|step)\b.*)$", (ROOT / "docs/python.md").read_text(), re.MULTILINE)
    assert len(lines) >= 6
    rng = np.random.default_rng(1)
    q, k, v, g = rng.standard_normal((4, 1, 1, 2, 8)).astype(np.float32)
    scope = {"q": q, "k": k, "v": v, "g": -np.abs(g), "beta": np.full((1, 1, 2), 0.5, np.float32),
             "state": np.zeros((1, 2, 8, 8), np.float32), "other": np.zeros((1, 2, 8, 8), np.float32)}
    exec("\n".join(lines), scope)  # noqa: S102, our own page
    assert scope["o"].shape == (1, 1, 2, 8) and scope["other"].any()


def test_the_extension_keeps_to_the_stable_interface():
    """One wheel for Python 3.12 and later: what a C extension may not call then, and a build for 3.11 would not notice."""
    unstable = re.compile(r"\bPy[A-Za-z]+_(?:GET|SET)_[A-Z]+\b|\bPyObject_Call(?:OneArg|MethodOneArg|MethodNoArgs)\b|\b_Py[A-Za-z]\w*")
    sources = sorted((ROOT / "python/src").glob("*.[ch]pp"))
    assert len(sources) > 8
    for path in sources:
        assert not unstable.findall(path.read_text()), path.name
    assert unstable.findall("PyObject_CallOneArg(f, x)") and unstable.findall("PyTuple_GET_ITEM(t, 0)")
