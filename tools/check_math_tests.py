#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/math.md names the tests that prove it: each named test exists, each numbered equation and each slip names one, each test of
the forms is named, and what the document shows (plots, table) is what tools/plot_study.py makes of docs/data."""

import re

import checks
import plot_study

DOCUMENT = "docs/math.md"
NAMED = re.compile(r"`(Forms|Operators|Inverse)\.(\w+)`")
TEST = re.compile(r"^TEST(?:_F)?\((Forms|Operators|Inverse), (\w+)\)", re.MULTILINE)
EQUATION = re.compile(r"^    .*\s\((\d+)\)$")
TESTS_OF = re.compile(r"^Tests? of \((\d+)\): (.*)$")
SLIPS = "## 11 "


def equations(lines):
    """Findings about the numbered lines: 1, 2, ... in order, each with one line "Test of (n): `Suite.Name`" after it."""
    findings, order, proved = [], [], {}
    for number, line in enumerate(lines, start=1):
        if match := EQUATION.match(line):
            order.append(int(match.group(1)))
            if order[-1] != len(order):
                findings.append(f"{DOCUMENT}:{number}: equation ({order[-1]}), expected ({len(order)})")
        if match := TESTS_OF.match(line):
            equation = int(match.group(1))
            if equation in proved or equation not in order:
                findings.append(f"{DOCUMENT}:{number}: names tests of ({equation}) again, or before the equation")
            if not NAMED.search(match.group(2)):
                findings.append(f"{DOCUMENT}:{number}: names no test of ({equation})")
            proved[equation] = number
    findings += [f"{DOCUMENT}: equation ({equation}) has no line \"Test of ({equation}): ...\"" for equation in order if equation not in proved]
    return findings if order else findings + [f"{DOCUMENT}: no numbered equation"]


def slips(lines):
    """Findings about the rows of the table of slips: the last cell of each names a test."""
    findings, is_inside, n_rows = [], False, 0
    for number, line in enumerate(lines, start=1):
        if line.startswith("## "):
            is_inside = line.startswith(SLIPS)
        if not is_inside or not line.startswith("|") or set(line) <= set("|- "):
            continue
        n_rows += 1
        if n_rows > 1 and not NAMED.search(line.rstrip(" |").rsplit("|", maxsplit=1)[1]):
            findings.append(f"{DOCUMENT}:{number}: a slip that no test shows")
    return findings if n_rows > 1 else findings + [f"{DOCUMENT}: no table of slips in section {SLIPS.strip()}"]


def check(root, build):
    del build
    text = checks.read(root, DOCUMENT)
    tests = {}
    for path in checks.tracked(root):
        if path.match("tests/ops/test_forms_*.cpp"):
            for suite, name in TEST.findall(checks.read(root, path)):
                tests[f"{suite}.{name}"] = path
    findings, named = [], set()
    for number, line in enumerate(text.split("\n"), start=1):
        for suite, name in NAMED.findall(line):
            named.add(f"{suite}.{name}")
            if f"{suite}.{name}" not in tests:
                findings.append(f"{DOCUMENT}:{number}: names the test {suite}.{name}, which is not in tests/ops/test_forms_*.cpp")
    for test in sorted(set(tests) - named):
        findings.append(f"{tests[test]}: {DOCUMENT} does not name {test}")
    lines = text.split("\n")
    findings += equations(lines) + slips(lines)
    for path, made in plot_study.made(root).items():
        if not (root / path).is_file() or checks.read(root, path) != made:
            findings.append(f"{path}: not what tools/plot_study.py makes of docs/data; run it")
    return findings


if __name__ == "__main__":
    checks.run(check, __doc__)
