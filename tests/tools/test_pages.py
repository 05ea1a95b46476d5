# SPDX-License-Identifier: Apache-2.0
"""The call of every page in docs/operators compiles as C99 inside the frame of the index, runs, and gives finite numbers
that are not all zero. Pages of rows, and of the operations beside the family."""

import math
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted(path for path in (ROOT / "docs" / "operators").glob("*.md") if path.name != "README.md")
BUILD = pathlib.Path(os.environ.get("FW_BUILD", ROOT / "build" / "release"))
CODE = re.compile(r"```c\n(.*?)```", re.DOTALL)


def program(page):
    frame = CODE.search((ROOT / "docs/operators/README.md").read_text()).group(1)
    calls = CODE.findall(page.read_text())
    assert len(calls) == 1, "one call a page"
    assert calls[0].count("\n") <= 6
    assert "/* CALL */" in frame
    return frame.replace("/* CALL */", calls[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_call_of_a_page_runs(page, tmp_path):
    library = BUILD / "libfastweight.so"
    if not library.exists():
        pytest.skip(f"no {library.name} in {BUILD}")
    (tmp_path / "page.c").write_text(program(page))
    command = [os.environ.get("CC", "cc"), "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}", "page.c",
               "-o", "page", f"-L{BUILD}", "-lfastweight", f"-Wl,-rpath,{BUILD}"]
    subprocess.run(command, cwd=tmp_path, check=True)
    answer = subprocess.run([str(tmp_path / "page")], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout
    values = [float(line) for line in answer.stdout.split()]
    assert len(values) == 5 * 4 * 2
    assert all(math.isfinite(value) for value in values)
    assert any(value != 0 for value in values)


def test_there_is_a_page_for_every_row_and_none_of_nothing():
    text = (ROOT / "src/ops/recurrence/catalogue.cpp").read_text()
    rows = set(re.findall(r'^\s*\{"(\w+)",\s*FW_OP_', text, re.MULTILINE)) | {"by_axes"}
    neighbours = set(re.findall(r"^FW_DECLARE_VERBS\((\w+)\)", (ROOT / "include/fastweight/neighbours.h").read_text(), re.MULTILINE))
    pages = {path.stem for path in PAGES}
    assert rows <= pages
    assert pages <= rows | neighbours
