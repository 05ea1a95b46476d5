#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Includes point one way: include <- core <- cpu, cuda <- ops/X (never another op) <- api; model and cli use the public headers (model's kernels cuda::launch).

Inside src/ an own header is named by its path from src/ ("core/status.hpp"), a public one by "fastweight/...". A library
file that loops over a braced list includes <initializer_list>, or a container that does: newer standard libraries no longer
bring it along.
"""

import re

import checks

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)', re.MULTILINE)
OWN_FOLDERS = ("core", "cpu", "cuda", "ops", "api", "model", "cli")
C_HEADERS = {"stddef.h", "stdint.h"}
THIRD_PARTY = ("CLI/", "nlohmann/", "gtest/", "gmock/", "benchmark/", "torch/", "ATen/", "pybind11/", "nanobind/",
               "Python.h", "dlpack/")
BRACED_LOOP = re.compile(r"\bfor \([^;()]* : \{")
BRINGS_LISTS = {"initializer_list", "algorithm", "array", "map", "set", "span", "string", "string_view", "vector"}
CUDA = re.compile(r"^(cuda|cublas|cudnn|cute/|cutlass/|nvrtc|cooperative_groups)")


def allowed_prefixes(path):
    """What a file may include with its path from src/, or None when the rule does not reach it."""
    parts = path.parts
    if parts[0] == "include":
        return ("fastweight/",)
    if parts[0] == "src":
        layer = parts[1]
        if layer == "core":
            return ("fastweight/", "core/")
        if layer in ("cpu", "cuda"):
            return ("fastweight/", "core/", layer + "/")
        if layer == "ops":
            return ("fastweight/", "core/", "cpu/", "cuda/", f"ops/{parts[2]}/")
        if layer == "api":
            return ("fastweight/", "core/", "cpu/", "cuda/", "ops/", "api/")
        if layer == "model":
            return ("fastweight/", "model/", "cuda/launch.cuh") if path.name.startswith("cuda_") else ("fastweight/", "model/")
        if layer == "cli":
            return ("fastweight/", "model/", "cli/")
        return ()
    if parts[0] == "examples":
        return ("fastweight/",)
    if parts[0] == "tests" and len(parts) > 2 and parts[1] in ("model", "cli", "abi"):
        return ("fastweight/", "model/", "cli/", parts[1] + "/", "support/", "common/")
    return None


def check(root, build):
    del build
    findings = []
    for path in checks.code_files(root):
        if path.suffix not in checks.CPP_SUFFIXES:
            continue
        prefixes = allowed_prefixes(path)
        if prefixes is None:
            continue
        text = checks.read(root, path)
        in_library = path.parts[0] == "src" and path.parts[1] not in ("model", "cli")
        braced = BRACED_LOOP.search(text) if in_library else None
        if braced and not BRINGS_LISTS.intersection(match.group(2) for match in INCLUDE.finditer(text)):
            line = text.count("\n", 0, braced.start()) + 1
            findings.append(f"{path}:{line}: loops over a braced list without <initializer_list>")
        for match in INCLUDE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            where = f"{path}:{line}"
            name = match.group(1) or match.group(2)
            is_own = name.startswith(("fastweight/",) + tuple(folder + "/" for folder in OWN_FOLDERS))
            if is_own or match.group(1):
                in_tests = path.parts[0] == "tests" and "/" not in name
                if not name.startswith(prefixes) and not in_tests:
                    findings.append(f"{where}: includes {name}; allowed here: {', '.join(prefixes)}")
                continue
            if path.parts[0] == "include" and path.suffix == ".h" and name not in C_HEADERS:
                findings.append(f"{where}: includes <{name}>; a public C header uses {', '.join(sorted(C_HEADERS))} only")
            if (in_library or path.parts[0] == "include") and name.startswith(THIRD_PARTY):
                findings.append(f"{where}: includes <{name}>; the library depends on nothing beyond threads")
            may_see_cuda = path.parts[:2] == ("src", "cuda") or path.name.startswith(("cuda_", "sm90_"))
            if path.parts[0] in ("src", "include") and CUDA.match(name) and not may_see_cuda:
                findings.append(f"{where}: includes <{name}>; CUDA belongs to src/cuda and ops/*/cuda_*, sm90_*")
    return findings


if __name__ == "__main__":
    checks.run(check, __doc__)
