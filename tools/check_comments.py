#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Comments: no plans for later, no pride, no history, no commented-out code, no banner lines, nothing but the product.

Code in a comment that shows how to call something is indented by three blanks or more. Documents (*.md) are held to the
last rule: no machine paths, no numbers of tickets, no words of a workplace.
"""

import re

import checks

WORDS = [
    (re.compile(r"\b(TODO|FIXME|XXX|WIP)\b"), "work left for later belongs in docs/roadmap.md"),
    (re.compile(r"\b(hack|hacky|magic|kludge)\b", re.IGNORECASE), "say what it is"),
    (re.compile(r"\b(highly optimi[sz]ed|optimi[sz]ed|efficient|efficiently|blazing|lightning-fast|super fast|very fast|elegant|clever|"
                r"state[- ]of[- ]the[- ]art)\b", re.IGNORECASE), "pride; give the measured number"),
    (re.compile(r"\b(first I tried|I tried|used to be|was changed to|now changed|no longer needed|old version|previous version|"
                r"refactored)\b", re.IGNORECASE), "history belongs in commits"),
]
WORKPLACE = [
    (re.compile(r"(?<![\w.])/(work|root|home)/\w"), "a path of one machine"),
    (re.compile(r"\b(issue|issues|ticket|session) (show )?#?\d+", re.IGNORECASE), "a number of a ticket or session"),
    (re.compile(r"\b(worktree of|our workplace|this workplace|the lead'?s? checkout|other helpers?|brief says)\b", re.IGNORECASE),
     "words of a workplace"),
    (re.compile(r"\b(claude|chatgpt|copilot|llm agent|ai-generated)\b", re.IGNORECASE), "who or what wrote it is not said"),
]
RULE = re.compile(r"([-=*#~_/+])\1{3,}")
CPP_CODE = re.compile(
    r"^ ?(?:(?:if|for|while|switch)\s*\(.*\)\s*\{?$|(?:else|do)\s*\{$|\}\s*(?:else\b.*)?$|#\s*(?:include|define|if|endif|pragma)\b.*"
    r"|(?:return|const|auto|int|float|double|void|static|constexpr|using|template|delete|throw|break|continue|goto)\b.*[;{]$"
    r"|[\w.:\[\]*>-]+\s*(?:=|\+=|-=|\*=)\s*[^=].*;$|[\w.:>-]+\([^)]*\)\s*;$)")
PY_CODE = re.compile(
    r"^ ?(?:import \w+$|from [\w.]+ import .+|def \w+\(.*\):.*|class \w+.*:$|return\b.*[()\[\]].*|print\(.*\)$|(?:if|for|while|elif) .*:$"
    r"|\w[\w.]* = \w[\w.]*\(.*\)$|assert .+ == .+)")
EXEMPT = {"tools/check_comments.py", "tools/check_files.py", "tests/tools/test_checks.py"}


def check(root, build):
    del build
    findings = []
    for path in checks.tracked(root):
        if str(path) in EXEMPT:
            continue
        if path.suffix == ".md":
            for number, line in enumerate(checks.read(root, path).split("\n"), start=1):
                findings += [f"{path}:{number}: {why}" for pattern, why in WORKPLACE if pattern.search(line)]
            continue
        if not checks.is_code(path):
            continue
        text = checks.read(root, path)
        for number, line in enumerate(text.split("\n"), start=1):
            findings += [f"{path}:{number}: {why}" for pattern, why in WORKPLACE if pattern.search(line)]
        code_line = CPP_CODE if path.suffix in checks.CPP_SUFFIXES else PY_CODE
        for number, line in checks.split_comments(path, text)[1]:
            stripped = line.rstrip()
            findings += [f"{path}:{number}: {why}: {stripped.strip()!r}" for pattern, why in WORDS if pattern.search(stripped)]
            # one line "---- words ----" titles a section; everything else of that kind is decoration
            is_title = re.match(r" ?-{4} \S", stripped)
            if RULE.search(stripped) and not is_title:
                findings.append(f"{path}:{number}: a banner line")
            if code_line.match(stripped):
                findings.append(f"{path}:{number}: code that is commented out: {stripped.strip()!r}")
    return findings


if __name__ == "__main__":
    checks.run(check, __doc__)
