#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every public C header compiles alone as C99 and as C++20 (with and without exceptions), every .hpp as C++20."""

import os
import shlex
import shutil
import subprocess
import tempfile

import checks

WARNINGS = ["-pedantic", "-Wall", "-Wextra", "-Werror"]


def compilers():
    """(command, is it C++)"""
    c = shlex.split(os.environ.get("CC", "gcc" if shutil.which("gcc") else "cc"))
    cxx = shlex.split(os.environ.get("CXX", "g++" if shutil.which("g++") else "c++"))
    found = [(c, False), (cxx, True)]
    if shutil.which("clang"):
        found.append((["clang"], False))
    if shutil.which("clang++"):
        found.append((["clang++"], True))
    return found


def check(root, build):
    del build
    headers = [path for path in checks.tracked(root) if path.parts[0] == "include" and path.suffix in (".h", ".hpp")]
    if not headers:
        return ["include: no header found"]
    findings = []
    with tempfile.TemporaryDirectory() as folder:
        for path in headers:
            name = "/".join(path.parts[1:])
            for command, is_cpp in compilers():
                if path.suffix == ".hpp" and not is_cpp:
                    continue
                modes = [["-std=c++20"], ["-std=c++20", "-fno-exceptions"]] if is_cpp else [["-std=c99"]]
                for mode in modes:
                    source = os.path.join(folder, "alone.cpp" if is_cpp else "alone.c")
                    with open(source, "w", encoding="ascii") as out:
                        out.write(f"#include <{name}>\nint after_the_header;\n")
                    line = command + mode + WARNINGS + [f"-I{root / 'include'}", "-fsyntax-only", source]
                    answer = subprocess.run(line, capture_output=True, text=True, check=False)
                    if answer.returncode != 0:
                        first = next((text for text in answer.stderr.splitlines() if "error" in text), answer.stderr[:200])
                        findings.append(f"{path}: {command[0]} {' '.join(mode)}: {first}")
    return findings


if __name__ == "__main__":
    checks.run(check, __doc__)
