# SPDX-License-Identifier: Apache-2.0
"""docs/coming_from_transformers.md: its example runs, its names are enable()'s, its times are those of the result file."""
import contextlib
import io
import json
import re
import sys

from hf_models import hf
from package_calls import ROOT

PAGE = (ROOT / "docs/coming_from_transformers.md").read_text()


def test_the_example_runs():
    lines = re.findall(r"^    (.*)$", PAGE, re.M)
    text, scope = io.StringIO(), {}
    with contextlib.redirect_stdout(text):
        exec("\n".join(lines), scope)  # noqa: S102, our own page
    assert len(lines) >= 10 and scope["text"].shape == (1, 28) and "replaced:" in text.getvalue()
    assert hf.enabled() is None


def test_every_name_of_enable_is_on_the_page():
    listed = re.findall(r"`(\w+)`", "\n".join(line.split("|")[1] for line in PAGE.splitlines() if re.match(r"\| `\w+`", line)))
    assert sorted(listed) == sorted(hf.models())


def test_the_times_are_those_of_the_result_file():
    sys.path.insert(0, str(ROOT / "bench"))
    import hf_qwen3_next

    result = json.loads((ROOT / "bench/results/hf_qwen3_next.json").read_text())
    assert hf_qwen3_next.page_with(PAGE, result) == PAGE
    assert all(row["error"] < hf_qwen3_next.AGREE for row in result["rows"])
