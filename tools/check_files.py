#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Files of code: at most 500 lines, an SPDX line, ASCII, no tabs, no name that boasts or counts versions.

Names: a file or identifier with a part fast, optimized, magic, hack, or _v2, or that starts with new_, says nothing about
what the thing is; codes like kernel1 say less.
"""

import re

import checks

MAX_LINES = 500
SPDX = "SPDX-License-Identifier: Apache-2.0"
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
OWN_IN_PYTHON = re.compile(r"(?<!\.)\b[A-Za-z_][A-Za-z0-9_]*")  # x.new_zeros is another library's word
PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
BAD_PARTS = {"fast", "faster", "fastest", "optimized", "optimised", "magic", "hack", "ultra", "turbo", "blazing"}
BAD_SHAPE = re.compile(r"(_v[2-9]$|_v[2-9]_|^new_|[a-z]_new$|^(kernel|impl|method|test|helper|func)_?[0-9]+$)")
NOT_OURS = re.compile(r"^u?int_fast\d+_t$|^fast_gelu_impl$")
# names that only prepare or list what is banned
EXEMPT = {"tools/check_files.py", "tools/check_comments.py"}


def bad_name(name):
    """Why an identifier is banned, or ""."""
    if NOT_OURS.match(name):
        return ""
    parts = {part.lower() for part in PARTS.findall(name)}
    if parts & BAD_PARTS:
        return f"the part {sorted(parts & BAD_PARTS)[0]!r}"
    match = BAD_SHAPE.search(name)
    return f"the form {match.group(0)!r}" if match else ""


def check(root, build):
    del build
    findings = []
    for path in checks.code_files(root):
        raw = (root / path).read_bytes()
        lines = raw.decode("utf-8", errors="replace").split("\n")
        count = len(lines) - 1 if lines[-1] == "" else len(lines)
        if count > MAX_LINES:
            findings.append(f"{path}: {count} lines, allowed {MAX_LINES}")
        is_example = path.parts[0] == "examples" and path.suffix in (".c", ".cpp")  # shown whole in the README
        if not is_example and count and not any(SPDX in line for line in lines[:3]):
            findings.append(f"{path}:1: no line with {SPDX!r} among the first three")
        for number, line in enumerate(lines, start=1):
            if not line.isascii():
                strange = next(char for char in line if not char.isascii())
                findings.append(f"{path}:{number}: {strange!r} is not ASCII")
            if "\t" in line and path.name != "Makefile":
                findings.append(f"{path}:{number}: a tab")
            if line.endswith((" ", "\r")):
                findings.append(f"{path}:{number}: white space at the end of the line")
        if str(path) in EXEMPT:
            continue
        if bad_name(path.stem):
            findings.append(f"{path}: the file's name has {bad_name(path.stem)}")
        code, _ = checks.split_comments(path, "\n".join(lines))
        seen = set()
        identifier = OWN_IN_PYTHON if path.suffix == ".py" else IDENTIFIER
        for number, line in enumerate(code.split("\n"), start=1):
            for name in identifier.findall(line):
                if name not in seen and bad_name(name):
                    seen.add(name)
                    findings.append(f"{path}:{number}: the name {name} has {bad_name(name)}")
    return findings


if __name__ == "__main__":
    checks.run(check, __doc__)
