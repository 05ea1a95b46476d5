#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Programs built against an older header keep working: structs only grow at their end, enumerators keep their numbers.

tests/abi/abi.txt records every public struct (size), field (offset, size) and enumerator (value) on 64-bit machines.
`tools/check_abi.py --update` records what was added; it refuses what would break.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

import checks

RECORD = "tests/abi/abi.txt"
STRUCT = re.compile(r"typedef struct (\w+) \{(.*?)\} \1;", re.DOTALL)
ENUM = re.compile(r"enum(?: \w+)? \{(.*?)\}", re.DOTALL)


def compiler():
    return shlex.split(os.environ.get("CC", "cc"))


def layout(root):
    """What the headers say now: {("struct", name): (size,), ("field", "struct.name"): (offset, size), ("enum", name): (value,)}"""
    command = compiler() + ["-std=c99", "-E", "-P", f"-I{root / 'include'}", "-xc", "-"]
    answer = subprocess.run(command, input='#include "fastweight/fastweight.h"\n', capture_output=True, text=True, check=True)
    text = re.sub(r"\s+", " ", answer.stdout)
    lines = []
    for name, body in STRUCT.findall(text):
        if not name.startswith("fw_"):
            continue
        lines.append(f'printf("struct {name} %zu\\n", sizeof({name}));')
        for declaration in body.split(";"):
            for declarator in declaration.split(","):
                match = re.search(r"(\w+)\s*(?:\[[^\]]*\])*\s*$", declarator)
                if match:
                    field = match.group(1)
                    lines.append(f'printf("field {name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof((({name} *)0)->{field}));')
    for body in ENUM.findall(text):
        for item in body.split(","):
            match = re.match(r"\s*(FW_\w+)", item)
            if match:
                lines.append(f'printf("enum {match.group(1)} %d\\n", (int){match.group(1)});')
    program = '#include "fastweight/fastweight.h"\n#include <stddef.h>\n#include <stdio.h>\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0;\n}\n"
    with tempfile.TemporaryDirectory() as folder:
        source, target = os.path.join(folder, "layout.c"), os.path.join(folder, "layout")
        pathlib.Path(source).write_text(program, encoding="ascii")
        subprocess.run(compiler() + ["-std=c99", f"-I{root / 'include'}", source, "-o", target], check=True)
        return parse(subprocess.run([target], capture_output=True, text=True, check=True).stdout)


def parse(text):
    found = {}
    for line in text.splitlines():
        words = line.split()
        if words and not line.startswith("#"):
            found[(words[0], words[1])] = tuple(int(word) for word in words[2:])
    return found


def breaks(old, now):
    """What of the record no longer holds."""
    findings = []
    ends = {}
    for (kind, name), numbers in old.items():
        if kind == "field":
            struct = name.split(".")[0]
            ends[struct] = max(ends.get(struct, 0), sum(numbers))
    for (kind, name), numbers in old.items():
        current = now.get((kind, name))
        if current is None:
            findings.append(f"{RECORD}: {kind} {name} is gone")
        elif kind == "struct" and current[0] < numbers[0]:
            findings.append(f"{RECORD}: struct {name} shrank from {numbers[0]} to {current[0]} bytes")
        elif kind != "struct" and current != numbers:
            findings.append(f"{RECORD}: {kind} {name} was {numbers}, is {current}")
    for (kind, name), numbers in now.items():
        if kind == "field" and (kind, name) not in old and numbers[0] < ends.get(name.split(".")[0], 0):
            findings.append(f"{RECORD}: field {name} was added before the end of its struct")
    return findings


def check(root, build):
    del build
    now = layout(root)
    record = root / RECORD
    old = parse(record.read_text()) if record.exists() else {}
    findings = breaks(old, now)
    if not findings and now != old:
        missing = len([key for key in now if key not in old])
        findings.append(f"{RECORD}: {missing} structs, fields or enumerators are not recorded; run tools/check_abi.py --update")
    return findings


def update(root):
    now = layout(root)
    record = root / RECORD
    findings = breaks(parse(record.read_text()), now) if record.exists() else []
    if findings:
        print("\n".join(findings))
        return 1
    lines = [" ".join([kind, name, *map(str, numbers)]) for (kind, name), numbers in now.items()]
    record.write_text("# Written by tools/check_abi.py --update: what programs built against this header rely on.\n" + "\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    if "--update" in sys.argv:
        sys.exit(update(pathlib.Path(__file__).resolve().parent.parent))
    checks.run(check, __doc__)
