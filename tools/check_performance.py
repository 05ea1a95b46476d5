#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/performance.md and its plots are what tools/write_performance.py makes of bench/results."""

import pathlib

import checks
import write_performance


def check(root, build):
    del build
    findings = []
    for name, text in write_performance.pages(root).items():
        path = pathlib.Path(root) / "docs" / name
        if not path.exists() or path.read_text() != text:
            findings.append(f"docs/{name}: not what bench/results gives; type tools/write_performance.py")
    return findings


if __name__ == "__main__":
    checks.run(check, __doc__)
