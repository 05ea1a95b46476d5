# SPDX-License-Identifier: Apache-2.0
"""tools/try_contributing.py fails when a patch of CONTRIBUTING.md does not fit, when a command fails, and when there is
nothing to follow."""

import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / "tools" / "try_contributing.py"
PATCH = "```diff\n--- a/a.txt\n+++ b/a.txt\n@@ -1 +1 @@\n-{old}\n+new\n```\n"
COMMAND = "```sh\n{command}\n```\n"


def follow(folder, text):
    (folder / "CONTRIBUTING.md").write_text(f"# Title\n\n## Adding an operator\n\n{text}\n## After\n\n```sh\nfalse\n```\n")
    (folder / "a.txt").write_text("old\n")
    answer = subprocess.run([sys.executable, str(SCRIPT), "--root", str(folder)], capture_output=True, text=True, check=False)
    return answer.returncode, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    "text, piece",
    [
        ("", "no patches or no commands"),
        (PATCH.format(old="old"), "no patches or no commands"),
        (PATCH.format(old="other") + COMMAND.format(command="true"), "patch -p1"),
        (PATCH.format(old="old") + COMMAND.format(command="grep -qx old a.txt"), "grep -qx old a.txt"),
        # everything fits, but there is no library to ask
        (PATCH.format(old="old") + COMMAND.format(command="grep -qx new a.txt"), "toy_operator"),
    ],
)
def test_what_does_not_work_is_a_failure(tmp_path, text, piece):
    code, output = follow(tmp_path, text)
    assert code != 0 and piece in output.splitlines()[-1], output


def test_the_tree_itself_is_not_touched(tmp_path):
    follow(tmp_path, PATCH.format(old="old") + COMMAND.format(command="true"))
    assert (tmp_path / "a.txt").read_text() == "old\n"
