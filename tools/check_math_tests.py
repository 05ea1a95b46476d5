#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/math.md names the tests that prove it: each named test exists, each test of the forms is named, and what the document
shows (plots, table) is what tools/plot_study.py makes of docs/data."""

import re

import checks
import plot_study

DOCUMENT = "docs/math.md"
NAMED = re.compile(r"`(Forms|Operators|Inverse)\.(\w+)`")
TEST = re.compile(r"^TEST(?:_F)?\((Forms|Operators|Inverse), (\w+)\)", re.MULTILINE)


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
    for path, made in plot_study.made(root).items():
        if not (root / path).is_file() or checks.read(root, path) != made:
            findings.append(f"{path}: not what tools/plot_study.py makes of docs/data; run it")
    return findings


if __name__ == "__main__":
    checks.run(check, __doc__)
