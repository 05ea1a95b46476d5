#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Adds up what ./test ran: GoogleTest cases, other ctest entries, pytest cases and tools/check_* scripts.

A program that wrote a GoogleTest report counts by its cases; one that died before writing it counts as one failure.
Prints the failures, then what did not run and why, then "N passed, N failed, N not run". Exit status 1 on a failure.
"""

import argparse
import json
import pathlib
import platform
import sys
import xml.etree.ElementTree as ElementTree

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


def junit_cases(path):
    """Yields (name, status, reason) of a JUnit file written by GoogleTest, ctest or pytest."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = ".".join(filter(None, [case.get("classname"), case.get("name")]))
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            yield name, FAILED, ""
        elif skipped is not None or case.get("result") in ("skipped", "suppressed") or case.get("status") == "disabled":
            reason = (skipped.get("message") or skipped.text or "") if skipped is not None else "disabled"
            # GoogleTest puts the place in the source before the reason
            yield name, NOT_RUN, " ".join(reason.split("not run:")[-1].split()) or "skipped without a reason"
        elif case.get("status") == "notrun":
            yield name, NOT_RUN, "disabled"
        else:
            yield name, PASSED, ""


def skip_reason(output, fallback):
    """The last line of a skipped program's output that starts with "not run:"."""
    lines = [line.strip() for line in (output or "").splitlines() if line.strip().startswith("not run:")]
    return lines[-1][len("not run:"):].strip() if lines else fallback


def collect(results):
    """All outcomes as (group, name, status, reason)."""
    outcomes = []
    reported = set()
    for path in sorted((results / "gtest").glob("*.xml")):
        reported.add(path.stem)
        outcomes += [(path.stem, *case) for case in junit_cases(path)]
    failed_programs = {group for group, _, status, _ in outcomes if status == FAILED}
    ctest = results / "ctest.xml"
    if ctest.exists():
        for case in ElementTree.parse(ctest).getroot().iter("testcase"):
            name = case.get("name")
            status = {"run": PASSED, "fail": FAILED}.get(case.get("status"), NOT_RUN)
            if case.find("failure") is not None:
                status = FAILED
            if name in reported and (status != FAILED or name in failed_programs):
                continue  # its cases are counted already
            reason = ""
            if status == NOT_RUN:
                skipped = case.find("skipped")
                fallback = skipped.get("message") if skipped is not None else "skipped"
                reason = skip_reason(case.findtext("system-out"), fallback)
            outcomes.append(("ctest", name, status, reason))
    if (results / "pytest.xml").exists():
        outcomes += [("pytest", *case) for case in junit_cases(results / "pytest.xml")]
    if (results / "pytest.missing").exists():
        outcomes.append(("pytest", "pytest", FAILED, ""))
    for path in sorted(results.glob("check_*.status")):
        code = int(path.read_text())
        text = path.with_suffix(".out").read_text()
        status = {0: PASSED, 77: NOT_RUN}.get(code, FAILED)
        outcomes.append(("check", path.stem, status, skip_reason(text, "skipped") if status == NOT_RUN else ""))
        if status == FAILED:
            print(f"---- {path.stem}\n{text.rstrip()}")
    return outcomes


def cpu_name():
    try:
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.machine()


def grid_lines(results):
    """One line a (op, direction, dtype, impl), added up over the files that the cases of the long grid left."""
    merged = {}
    for path in sorted((results / "grid").glob("*.json")):
        for line in json.loads(path.read_text()):
            key = tuple(line[name] for name in ("op", "direction", "dtype", "impl"))
            known = merged.setdefault(key, line)
            if known is line:
                continue
            known["cases"] += line["cases"]
            known["failed"] += line["failed"]
            if not line["worst_share"] <= known["worst_share"]:  # NaN is the worst
                known.update({name: line[name] for name in ("worst_share", "tensor", "case")})
    return [merged[key] for key in sorted(merged)]


def write(folder, outcomes, build, results):
    """full.json: counts of each group, and the reasons of what did not run. full_grid.json: the long grid, line by line."""
    cache = (pathlib.Path(build) / "CMakeCache.txt").read_text().splitlines() if build else []
    compiler = next((line.split("=", 1)[1] for line in cache if line.startswith("CMAKE_CXX_COMPILER:")), "")
    groups = {}
    for group, _, status, reason in outcomes:
        entry = groups.setdefault(group, {PASSED: 0, FAILED: 0, NOT_RUN: 0, "reasons": {}})
        entry[status] += 1
        if status == NOT_RUN:
            entry["reasons"][reason] = entry["reasons"].get(reason, 0) + 1
    for entry in groups.values():
        if not entry["reasons"]:
            del entry["reasons"]
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    document = {"cpu": cpu_name(), "compiler": pathlib.Path(compiler).name, "groups": groups}
    (folder / "full.json").write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
    lines = [json.dumps(line) for line in grid_lines(results)]
    (folder / "full_grid.json").write_text("[\n" + ",\n".join(lines) + "\n]\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--write", help="also write full.json (counts) and full_grid.json (the long grid) to this folder")
    parser.add_argument("--build", help="the build folder, for the compiler's name in full.json")
    options = parser.parse_args()
    outcomes = collect(options.results)
    counts = {status: sum(1 for outcome in outcomes if outcome[2] == status) for status in (PASSED, FAILED, NOT_RUN)}
    failures = [f"{group}: {name}" for group, name, status, _ in outcomes if status == FAILED]
    if failures:
        print("failed:")
        for failure in failures[:100]:
            print(f"  {failure}")
        if len(failures) > 100:
            print(f"  ... and {len(failures) - 100} more")
    reasons = {}
    for group, name, status, reason in outcomes:
        if status == NOT_RUN:
            reasons.setdefault((group, reason), []).append(name)
    if reasons:
        print("not run:")
        for (group, reason), names in sorted(reasons.items()):
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            print(f"  {group}: {names[0]}{more}: {reason}")
    if not outcomes:
        print("no test ran")
        counts[FAILED] = 1
    if options.write:
        write(options.write, outcomes, options.build, options.results)
    print(f"{counts[PASSED]} passed, {counts[FAILED]} failed, {counts[NOT_RUN]} not run")
    return 1 if counts[FAILED] else 0


if __name__ == "__main__":
    sys.exit(main())
