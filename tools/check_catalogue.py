#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every row of src/ops/recurrence/catalogue.cpp has its number in the header, a page, a NumPy oracle with golden data, a
C++ test and a benchmark; every operation of include/fastweight/neighbours.h has a page and a benchmark.

A test or benchmark reaches a row by its name, by its number, or by going over the whole catalogue (FW_OP_COUNT, in Python
ROW_NAMES of the oracle). What a comment says does not count.
"""

import re

import checks

CATALOGUE = "src/ops/recurrence/catalogue.cpp"
HEADER = "include/fastweight/recurrence.h"
NEIGHBOURS = "include/fastweight/neighbours.h"  # their pages stand beside those of the rows
ROW = re.compile(r'^\s*\{"(\w+)",\s*(FW_OP_\w+),', re.MULTILINE)

# what -> (pattern of the files, patterns one of which must occur in one of them)
PLACES = [
    ("a NumPy oracle", r"tests/oracle/.*\.py", [r"[\"']{row}[\"']", r"\bdef {row}\b"]),
    ("a C++ test", r"tests/.*\.(cpp|hpp)", [r'"{row}"', r"\b{op}\b", r"\bFW_OP_COUNT\b"]),
    ("a benchmark", r"bench/.*\.(cpp|hpp|py|json)", [r'"{row}"', r"'{row}'", r"\b{op}\b", r"\bFW_OP_COUNT\b", r"\bROW_NAMES\b"]),
]
# a neighbour has its own, of the program's bench or of bench/
NEIGHBOUR_BENCHMARK = re.compile(r"(bench/.*|src/cli/(bench|neighbour)\w*)\.(cpp|hpp|py|json)")


def check(root, build):
    del build
    if not (root / CATALOGUE).exists():
        return [f"{CATALOGUE}: missing"]
    rows = ROW.findall(checks.read(root, CATALOGUE))
    if not rows:
        return [f"{CATALOGUE}: no row found"]
    header = checks.read(root, HEADER)
    findings = []
    count = re.search(r"#define FW_OP_COUNT (\d+)", header)
    if not count or int(count.group(1)) != len(rows) + 1:
        findings.append(f"{HEADER}: FW_OP_COUNT is {count.group(1) if count else 'missing'}, the catalogue has {len(rows)} rows and by_axes")
    files = checks.tracked(root)
    texts = [(what, patterns, "\n".join(checks.without_comments(path, checks.read(root, path)) for path in files
                                        if re.fullmatch(where, str(path)))) for what, where, patterns in PLACES]
    for row, op in rows:
        if op != f"FW_OP_{row.upper()}":
            findings.append(f"{CATALOGUE}: row {row} has the number {op}, expected FW_OP_{row.upper()}")
        if not re.search(rf"\b{op} = \d+", header):
            findings.append(f"{HEADER}: no {op}")
        for path in (f"docs/operators/{row}.md", f"tests/oracle/golden/{row}.json"):
            if not (root / path).exists():
                findings.append(f"{row}: {path} is missing")
        for what, patterns, text in texts:
            if not any(re.search(pattern.format(row=row, op=op), text) for pattern in patterns):
                findings.append(f"{row}: {what} is missing")
    neighbours = checks.read(root, NEIGHBOURS) if (root / NEIGHBOURS).exists() else ""
    operations = re.findall(r"^FW_DECLARE_VERBS\((\w+)\)", neighbours, re.MULTILINE)
    timed = "\n".join(checks.without_comments(path, checks.read(root, path)) for path in files if NEIGHBOUR_BENCHMARK.fullmatch(str(path)))
    for operation in operations:
        if not (root / f"docs/operators/{operation}.md").exists():
            findings.append(f"{operation}: docs/operators/{operation}.md is missing")
        if not re.search(rf"[\"']{operation}[\"']", timed):
            findings.append(f"{operation}: a benchmark is missing")
    names = {row for row, _ in rows} | {"by_axes"} | set(operations)
    for path in files:
        if path.match("docs/operators/*.md") and path.stem not in names and path.stem != "README":
            findings.append(f"{path}: no such row in the catalogue")
    return findings


if __name__ == "__main__":
    checks.run(check, __doc__)
