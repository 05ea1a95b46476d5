# SPDX-License-Identifier: Apache-2.0
"""Shared by tools/check_*.py: the files of the tree, C++ comments, and how a check reports.

A check is a function(root, build) that returns findings "path:line: sentence" or raises NotRun. run() prints them and
exits 0 (nothing found), 1 (findings) or 77 (not run).
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys

CODE_SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".py", ".sh", ".cmake"}
CODE_NAMES = {"CMakeLists.txt", "Makefile", "run", "test"}
CPP_SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}
SKIPPED_FOLDERS = {".git", "build", ".venv", "__pycache__", ".pytest_cache"}


class NotRun(Exception):
    """The check cannot be made here; the text says why."""


def tracked(root):
    """Paths of the tree relative to root: what git would commit, or everything but build folders without git."""
    root = pathlib.Path(root)
    if (root / ".git").exists() and shutil.which("git"):
        command = ["git", "-c", "safe.directory=*", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        answer = subprocess.run(command, capture_output=True, check=False)
        if answer.returncode == 0:
            names = sorted(set(answer.stdout.decode().split("\0")) - {""})
            return [pathlib.PurePosixPath(name) for name in names if (root / name).is_file()]
    found = []
    for path in sorted(root.rglob("*")):
        relative = path.relative_to(root)
        if path.is_file() and not SKIPPED_FOLDERS.intersection(relative.parts):
            found.append(pathlib.PurePosixPath(relative.as_posix()))
    return found


def is_code(path):
    return path.suffix in CODE_SUFFIXES or path.name in CODE_NAMES


def code_files(root):
    return [path for path in tracked(root) if is_code(path)]


def read(root, path):
    return (pathlib.Path(root) / path).read_text(encoding="utf-8", errors="replace")


CPP_TOKEN = re.compile(
    r"""(?P<comment>//[^\n]*|/\*.*?\*/)|(?P<string>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""", re.DOTALL)
HASH_TOKEN = re.compile(
    r'''(?P<string>"""(?:.|\n)*?"""|\'\'\'(?:.|\n)*?\'\'\'|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')'''
    r"""|(?P<comment>(?:(?<=\s)|^)\#[^\n]*)""", re.MULTILINE)


def split_comments(path, text):
    """(code, comments): code has comments and strings blanked; comments is a list of (line number, one line of text)."""
    token = CPP_TOKEN if path.suffix in CPP_SUFFIXES else HASH_TOKEN
    comments = []

    def blank(match):
        piece = match.group(0)
        if match.lastgroup == "comment":
            first = text.count("\n", 0, match.start()) + 1
            body = piece[2:-2] if piece.startswith("/*") else piece.lstrip("/" if piece.startswith("//") else "#")
            for offset, line in enumerate(body.split("\n")):
                comments.append((first + offset, line))
        return "\n" * piece.count("\n") if "\n" in piece else " " * len(piece)

    code = token.sub(blank, text)
    return code, comments


def without_comments(path, text):
    """The text of a source file without its comments; strings stay."""
    token = CPP_TOKEN if path.suffix in CPP_SUFFIXES else HASH_TOKEN
    return token.sub(lambda match: "" if match.lastgroup == "comment" else match.group(0), text)


def run(check, description):
    parser = argparse.ArgumentParser(description=description.strip().split("\n", maxsplit=1)[0])
    here = pathlib.Path(__file__).resolve().parent.parent
    parser.add_argument("--root", type=pathlib.Path, default=here, help="the source tree")
    parser.add_argument("--build", type=pathlib.Path, default=None, help="a build folder (build/release otherwise)")
    options = parser.parse_args()
    build = options.build or options.root / "build" / "release"
    try:
        findings = check(options.root.resolve(), build.resolve())
    except NotRun as reason:
        print(f"not run: {reason}")
        sys.exit(77)
    for finding in findings:
        print(finding)
    sys.exit(1 if findings else 0)
