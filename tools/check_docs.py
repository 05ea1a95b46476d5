#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Documents hold: links and their headings exist, paths and tests in backticks exist, shown programs are the files they claim
to be, and CONTRIBUTING.md names every check.

A shown program: a line <!-- file: examples/first.c --> right before the code block that repeats that file.
"""

import re

import checks

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
TICKED = re.compile(r"`([^`\n]+)`")
TOP_FOLDERS = ("src/", "include/", "docs/", "tests/", "tools/", "train/", "bench/", "cmake/", "examples/", "models/", "python/", ".ci/")
SHOWN = re.compile(r"<!-- file: (\S+) -->\n```\w*\n(.*?)```", re.DOTALL)
TEST = re.compile(r"^TEST(?:_F|_P)?\(\s*(\w+),\s*(\w+)\)", re.MULTILINE)
NAMED_TEST = re.compile(r"`([A-Z]\w+)\.([A-Z]\w+)`")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


def headings(text):
    """Anchors of a document's headings, as GitHub and most renderers make them."""
    found = set()
    for line in FENCE.sub("", text).split("\n"):
        if re.match(r"#{1,6} ", line):
            title = re.sub(r"[`*]", "", line.lstrip("#").strip().lower())
            found.add(re.sub(r"[^\w\- ]", "", title).replace(" ", "-"))
    return found


def ticked_path(name):
    """The path that a piece in backticks names, or ""."""
    if not name.startswith(TOP_FOLDERS) or re.search(r"[<>*{}$ |]|\.\.\.", name):
        return ""
    return name.split(":", 1)[0].split("#", 1)[0]


def check(root, build):
    del build
    files = checks.tracked(root)
    present = {str(path) for path in files}
    for path in files:
        present.update(str(parent) for parent in path.parents)
    tests = {}
    for path in files:
        if path.parts[0] == "tests" and path.suffix == ".cpp":
            for suite, case in TEST.findall(checks.read(root, path)):
                tests.setdefault(suite, set()).add(case)
    findings = []
    for path in files:
        if path.suffix != ".md":
            continue
        text = checks.read(root, path)
        prose = FENCE.sub(lambda match: "\n" * match.group(0).count("\n"), text)
        for number, line in enumerate(prose.split("\n"), start=1):
            where = f"{path}:{number}"
            for match in LINK.finditer(re.sub(r"`[^`]*`", "", line)):
                target = match.group(1) or match.group(2)
                if re.match(r"[a-z]+:", target):
                    continue
                name, _, anchor = target.partition("#")
                aim = path if not name else (path.parent / name)
                parts = []
                for part in aim.parts:
                    if part == ".." and parts:
                        parts.pop()
                    elif part != ".":
                        parts.append(part)
                aim = "/".join(parts)
                if aim.rstrip("/") not in present:
                    findings.append(f"{where}: links to {target}, which is not there")
                elif anchor and aim.endswith(".md") and anchor not in headings(checks.read(root, aim)):
                    findings.append(f"{where}: links to the heading #{anchor}, which {aim} does not have")
            for match in TICKED.finditer(line):
                name = ticked_path(match.group(1))
                if name and name.rstrip("/") not in present:
                    findings.append(f"{where}: names {name}, which is not there")
            for suite, case in NAMED_TEST.findall(line):
                if suite in tests and case not in tests[suite]:
                    findings.append(f"{where}: names the test {suite}.{case}, which is not there")
        for match in SHOWN.finditer(text):
            where = f"{path}:{text.count(chr(10), 0, match.start()) + 1}"
            if match.group(1) not in present:
                findings.append(f"{where}: shows {match.group(1)}, which is not there")
            elif checks.read(root, match.group(1)) != match.group(2):
                findings.append(f"{where}: the program shown is not {match.group(1)} as it stands")
    rules = checks.read(root, "CONTRIBUTING.md") if "CONTRIBUTING.md" in present else ""
    for path in files:
        if path.match("tools/check_*.py") and len(path.parts) == 2 and path.stem not in rules:
            findings.append(f"CONTRIBUTING.md: does not name {path.stem}")
    for name in sorted(set(re.findall(r"\bcheck_\w+", rules))):
        if f"tools/{name}.py" not in present:
            findings.append(f"CONTRIBUTING.md: names {name}, which is not in tools/")
    return findings


if __name__ == "__main__":
    checks.run(check, __doc__)
