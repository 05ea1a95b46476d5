# SPDX-License-Identifier: Apache-2.0
"""The examples that need torch, run as a reader would run them."""
import importlib.util
import re
import subprocess
import sys

import pytest

from package_calls import ROOT, environment, torch


def run(name, *arguments, needs=("torch",)):
    missing = [module for module in needs if importlib.util.find_spec(module) is None]
    if missing:
        pytest.skip(f"not run: {', '.join(missing)} not installed")
    done = subprocess.run([sys.executable, str(ROOT / "examples" / name), *map(str, arguments)], capture_output=True, text=True, check=False,
                          env=environment(OMP_NUM_THREADS="1"), timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_training_on_a_text(tmp_path):
    plot, folder = tmp_path / "loss.png", tmp_path / "model"
    sizes = ("--steps", 40, "--width", 32, "--batch", 4, "--tokens", 64)
    out, progress = run("train_bytes.py", ROOT / "docs/math.md", *sizes, "--plot", plot, "--save", folder, needs=("torch", "tqdm", "matplotlib", "safetensors"))
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+) bits a byte", out).groups())
    assert first > 7.5 and last < 6.0  # 8 bits a byte for a model that knows nothing; the text's single bytes have 4.6
    assert "40/40" in progress and plot.read_bytes().startswith(b"\x89PNG") and (folder / "model.safetensors").exists()


def test_a_text_that_is_too_short(tmp_path):
    (tmp_path / "short").write_text("abc")
    with pytest.raises(AssertionError, match="file has 3 bytes, allowed more than tokens = 256"):
        run("train_bytes.py", tmp_path / "short", needs=("torch", "tqdm", "matplotlib"))


def test_a_packed_batch():
    out, _ = run("packed_batch.py")
    assert out.count("same bits as alone: True") == 4 and "False" not in out
    assert float(re.search(r"model, packed against one by one: (\S+)", out).group(1)) < 1e-5


def test_streaming_and_going_back():
    out, _ = run("stream_cut_back.py", needs=("torch", "safetensors"))
    assert "restored and repeated, the same bytes: True" in out
    assert re.search(r"\[back to byte 35\]\nThe library is ", out)


def test_a_script_written_for_fla():
    pytest.importorskip("fastweight.fla", reason="not run: torch is not installed")
    out, _ = run("fla_byte_model.py", ROOT / "docs/math.md", "--steps", 12, "--batch", 2, "--tokens", 64)
    losses = [float(x) for x in re.findall(r"([\d.]+) bits a byte", out)]
    assert losses[0] > 7.5 and losses[-1] < losses[0] - 1


def test_its_curve_is_that_of_plain_torch():
    """bench/fla_training.py ends with an error when the curves are farther apart than rounding explains."""
    if torch is None:
        pytest.skip("not run: torch is not installed")
    done = subprocess.run([sys.executable, str(ROOT / "bench/fla_training.py"), "--steps", "8", "--batch", "2", "--tokens", "48", "--no-write"],
                          capture_output=True, text=True, check=False, env=environment(OMP_NUM_THREADS="1"), timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
