#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No commit edits the truth or its tolerances together with a kernel.

Truth: tests/oracle (golden data included), src/ops/recurrence/reference*, tests/ops/tolerances.hpp. Kernels: *.isa.cpp and cpu_*
under src. Looks at every commit reachable from HEAD, of a merge at what differs from all its parents; --base REF: at those since
the merge base with REF. The commits at the edge of a shallow clone have no parents to be compared with and are left out, and so is a root commit,
before which there was no truth.
"""

import argparse
import functools
import re
import shutil
import subprocess
import sys

import checks

TRUTH = re.compile(r"tests/(oracle|golden)/.*|src/ops/recurrence/reference[^/]*|tests/ops/tolerances\.hpp")
KERNEL = re.compile(r"src/(.*/)?([^/]*\.isa\.cpp|cpu_[^/]*\.[hc]pp)")
EXCEPTIONS = frozenset()  # full hashes


def git(root, *arguments):
    command = ["git", "-c", "safe.directory=*", "-c", "core.quotePath=false", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)


def check(root, build, base=None):
    del build
    if not shutil.which("git"):
        raise checks.NotRun("git is not installed")
    top = git(root, "rev-parse", "--show-toplevel")
    if top.returncode != 0 or top.stdout.strip() != str(root):
        raise checks.NotRun(f"{root} is not a git work tree")
    if git(root, "rev-parse", "--verify", "-q", "HEAD").returncode != 0:
        raise checks.NotRun("there is no commit yet")
    span = ["HEAD"]
    if base:
        merge_base = git(root, "merge-base", base, "HEAD")
        if merge_base.returncode != 0:
            raise checks.NotRun(f"HEAD and {base} have no commit in common here")
        span = [f"{merge_base.stdout.strip()}..HEAD"]
    log = git(root, "log", "--diff-merges=combined", "--no-renames", "--name-only",
              "--format=%x00%H %P%x01%s", *span)
    if log.returncode != 0:
        raise checks.NotRun(f"git log: {log.stderr.strip()}")
    findings = []
    for entry in log.stdout.split("\0")[1:]:
        head, _, rest = entry.partition("\x01")
        subject, *names = rest.split("\n")
        commit, *parents = head.split()
        if not parents or commit in EXCEPTIONS:  # git gives the edge of a shallow clone as a root
            continue
        truth = [name for name in names if TRUTH.fullmatch(name)]
        kernels = [name for name in names if KERNEL.fullmatch(name)]
        if truth and kernels:
            findings.append(f"commit {commit[:12]} ({subject}) edits the truth, {truth[0]}, together with a kernel, {kernels[0]}")
    return findings


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--base", help="only commits since the merge base with this")
    known, others = parser.parse_known_args()
    if {"-h", "--help"}.intersection(others):
        parser.print_help()
    sys.argv[1:] = others
    checks.run(functools.partial(check, base=known.base), __doc__)
