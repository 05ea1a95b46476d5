# SPDX-License-Identifier: Apache-2.0
"""docs/layers.md: its programs run as they stand, its names are real and complete."""
import re

import pytest

from nn_helpers import CASES, ROOT, fnn, make, torch

PAGE = (ROOT / "docs" / "layers.md").read_text(encoding="utf-8")


def test_programs_of_the_page_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("safetensors", reason="not run: safetensors is not installed")
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(programs) == 4
    torch.manual_seed(0)
    (tmp_path / "models").symlink_to(ROOT / "models")
    monkeypatch.chdir(tmp_path)
    scope = {}
    for program in programs:
        exec(program, scope)
    assert capsys.readouterr().out.startswith("b'\\x00It was a quiet morning, and")
    assert (tmp_path / "a-model" / "model.safetensors").exists()


def test_the_page_names_every_class_and_every_parameter():
    words = set(re.findall(r"[A-Za-z_]\w*", PAGE))
    assert set(fnn.__all__) - {"LMOutput", "Snapshot"} <= words
    written = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", PAGE, flags=re.DOTALL)))
    expanded = set()
    for text in written:
        parts = re.fullmatch(r"\{([a-z,]+)\}(\w+)(.*)", text)
        expanded |= {f"{first}{parts[2]}" for first in parts[1].split(",")} if parts else {text.split(".")[0].split(" ")[0]}
    for name in CASES:
        for parameter in make(name, layer_idx=CASES[name][1].get("layer_idx", 0)).state_dict():
            assert parameter.split(".")[0] in expanded | {f"x_{letter}" for letter in "rwkvag"}, (name, parameter)
