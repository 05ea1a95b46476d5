#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Follows "Adding an operator" of CONTRIBUTING.md to the letter in a copy of the tree: applies its patches, runs its
commands, and asks the new row through the C interface (tests/tools/toy_operator.c).

Exit status 0 when all of it works; the copy is removed unless --keep names a folder for it.
"""

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import checks

ROOT = pathlib.Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(diff|sh)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def section(text, title):
    start = text.index(f"\n## {title}\n")
    end = text.find("\n## ", start + 1)
    return text[start:end if end > 0 else len(text)]


def run(command, copy, environment, text=None):
    print(f"$ {command}", flush=True)
    answer = subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=copy, env=environment, input=text, text=True, check=False)
    if answer.returncode != 0:
        sys.exit(f"failed with status {answer.returncode}: {command}")


def follow(root, copy, python):
    for path in checks.tracked(root):
        target = copy / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / path, target)
    environment = dict(os.environ)
    if python:
        environment["PATH"] = f"{pathlib.Path(python).absolute().parent}{os.pathsep}{environment['PATH']}"
    blocks = BLOCK.findall(section((root / "CONTRIBUTING.md").read_text(), "Adding an operator"))
    if not any(kind == "diff" for kind, _ in blocks) or not any(kind == "sh" for kind, _ in blocks):
        sys.exit("CONTRIBUTING.md: no patches or no commands under \"Adding an operator\"")
    for kind, block in blocks:
        if kind == "diff":
            run("patch -p1 --forward --fuzz=0 --no-backup-if-mismatch", copy, environment, block)
        else:
            for line in block.splitlines():
                run(line, copy, environment)
    run("${CC:-cc} -std=c99 -Wall -Wextra -Werror -Iinclude tests/tools/toy_operator.c -o build/row/toy_operator -Lbuild/row -lfastweight "
        "-Wl,-rpath,$PWD/build/row && build/row/toy_operator", copy, environment)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("--python", help="the python3 that the commands find, for example .venv/bin/python3")
    parser.add_argument("--keep", type=pathlib.Path, help="an empty folder for the copy, which then stays")
    options = parser.parse_args()
    if options.keep:
        options.keep.mkdir(parents=True, exist_ok=True)
        follow(options.root.resolve(), options.keep.resolve(), options.python)
    else:
        with tempfile.TemporaryDirectory(prefix="fastweight-row-") as folder:
            follow(options.root.resolve(), pathlib.Path(folder), options.python)
    print("CONTRIBUTING.md works as written")


if __name__ == "__main__":
    main()
