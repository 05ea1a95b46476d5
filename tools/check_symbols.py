#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The shared library exports exactly the fw_* functions that the public headers declare."""

import os
import pathlib
import re
import shlex
import subprocess

import checks

DECLARATION = re.compile(r"\b(fw_\w+)[ \t\n]*\(")


def declared(root):
    """Names of the functions declared with FW_API in include/fastweight/*.h, macros expanded."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    source = '#include "fastweight/fastweight.h"\n'
    command = compiler + ["-std=c99", "-E", "-P", f"-I{root / 'include'}", "-xc", "-"]
    text = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    names = set()
    for statement in re.split(r"[;}]", text):
        if '__attribute__((visibility("default")))' in statement:
            match = DECLARATION.search(statement.split('__attribute__((visibility("default")))', 1)[1])
            if match:
                names.add(match.group(1))
    return names


def exported(library):
    command = ["nm", "-D", "--defined-only", str(library)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return {line.split()[-1].split("@")[0] for line in answer.stdout.splitlines() if line.split()}


def check(root, build):
    library = pathlib.Path(build) / "libfastweight.so"
    if not library.exists():
        raise checks.NotRun(f"no {library.name} in {build}")
    in_headers, in_library = declared(root), exported(library)
    if not in_headers:
        return ["include/fastweight/fastweight.h: no FW_API function found"]
    findings = [f"{library.name}: exports {name}, which is no fw_ name" for name in sorted(in_library) if not name.startswith("fw_")]
    findings += [f"{library.name}: exports {name}, which no public header declares"
                 for name in sorted(in_library - in_headers) if name.startswith("fw_")]
    findings += [f"{library.name}: does not export {name}, which a public header declares" for name in sorted(in_headers - in_library)]
    return findings


if __name__ == "__main__":
    checks.run(check, __doc__)
