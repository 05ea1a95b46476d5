#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Objects of the library never abort, exit or print; those of src/ops, *.isa.cpp and *.unit.cpp never allocate.

Level objects (*.isa.cpp and *.unit.cpp, compiled for an instruction set) also may not define a weak symbol outside the namespace of
their level: the linker would keep one copy, perhaps one with instructions that the machine lacks.
"""

import pathlib
import re
import subprocess

import checks

STOPS = {"abort", "exit", "_exit", "_Exit", "quick_exit", "__assert_fail", "longjmp", "raise", "kill"}
PRINTS = {"printf", "puts", "putchar", "fprintf", "vprintf", "vfprintf", "fputs", "fputc", "putc", "fwrite", "write", "perror",
          "stdout", "stderr", "__printf_chk", "__fprintf_chk", "__vfprintf_chk", "_ZSt4cout", "_ZSt4cerr"}
ALLOCATES = {"malloc", "calloc", "realloc", "aligned_alloc", "posix_memalign", "memalign", "mmap", "strdup"}
NEW = re.compile(r"^_Zn[wa][mj]")
FORMATS = {"snprintf", "vsnprintf", "__snprintf_chk", "__vsnprintf_chk", "sprintf", "__sprintf_chk"}
THROWS = re.compile(r"^(__cxa_throw|__cxa_allocate_exception|_ZSt\d+__throw_)")
LEVELS = {"fw_isa_" + name: name for name in ("baseline", "avx2", "avx512", "amx", "avx512_bf16", "neon_bf16", "amx_model", "pairs_model")}


def objects(build):
    """(object, layer, level): layer core, cpu, ops or api; level "" but for *.isa.cpp and *.unit.cpp."""
    for path in sorted(pathlib.Path(build).glob("CMakeFiles/*.dir/src/**/*.o")):
        parts = path.relative_to(pathlib.Path(build) / "CMakeFiles").parts
        folder = parts[0].removesuffix(".dir")
        if folder in LEVELS or folder in ("fastweight_objects", "fastweight"):
            yield path, parts[2], LEVELS.get(folder, "")


def symbols(path):
    """(undefined names, weak defined names)"""
    answer = subprocess.run(["nm", str(path)], capture_output=True, text=True, check=True)
    undefined, weak = set(), set()
    for line in answer.stdout.splitlines():
        kind, name = line.split()[-2:]
        if kind == "U":
            undefined.add(name.split("@")[0])
        elif kind in "WVu":
            weak.add(name)
    return undefined, weak


def check(root, build):
    del root
    found = list(objects(build))
    if not found:
        raise checks.NotRun(f"no objects of the library in {build}")
    cache = pathlib.Path(build) / "CMakeCache.txt"
    if cache.exists() and re.search(r"^FW_SANITIZE:STRING=.+", cache.read_text(), re.MULTILINE):
        raise checks.NotRun("sanitized objects call the sanitizer's run-time library")
    findings = []
    for path, layer, level in found:
        name = "/".join(path.parts[path.parts.index("src"):]).removesuffix(".o")
        undefined, weak = symbols(path)
        is_hot = layer == "ops" or level
        for symbol in sorted(undefined):
            if symbol in STOPS:
                findings.append(f"{name}: calls {symbol}; the library never ends the program")
            if symbol in PRINTS:
                findings.append(f"{name}: uses {symbol}; the library never prints")
            if is_hot and (symbol in ALLOCATES or NEW.match(symbol)):
                findings.append(f"{name}: calls {symbol}; nothing is allocated in forward, backward or step")
            if is_hot and THROWS.match(symbol):
                findings.append(f"{name}: calls {symbol}; nothing throws there")
            if level and symbol in FORMATS:
                findings.append(f"{name}: calls {symbol}; a kernel formats no text")
        for symbol in sorted(weak):
            if symbol.startswith("DW.ref."):
                continue  # the address of the exception personality routine
            if level and f"{len(level)}{level}" not in symbol:
                findings.append(f"{name} ({level}): defines {symbol} outside namespace {level}; the linker keeps a single copy of it")
    return findings


if __name__ == "__main__":
    checks.run(check, __doc__)
