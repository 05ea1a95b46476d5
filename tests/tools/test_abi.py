# SPDX-License-Identifier: Apache-2.0
"""tools/check_abi.py lets structs grow at their end and finds everything that would break a program built before."""

import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))

import check_abi  # noqa: E402

BEFORE = """#include <stdint.h>
typedef struct fw_a { uint32_t struct_size; int32_t x, y; } fw_a;
enum { FW_ONE = 1, FW_TWO = 2 };
"""


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "include/fastweight").mkdir(parents=True)
    (tmp_path / "tests/abi").mkdir(parents=True)
    (tmp_path / "include/fastweight/fastweight.h").write_text(BEFORE)
    assert check_abi.update(tmp_path) == 0
    return tmp_path


def now(tree, text):
    (tree / "include/fastweight/fastweight.h").write_text(text)
    return check_abi.check(tree, None)


def test_the_same_header_passes(tree):
    assert now(tree, BEFORE) == []


@pytest.mark.parametrize(
    "before, after, piece",
    [
        ("int32_t x, y;", "int32_t y, x;", "fw_a.x"),
        ("int32_t x, y;", "int64_t x, y;", "fw_a.x"),
        ("int32_t x, y;", "int32_t x;", "fw_a.y is gone"),
        ("uint32_t struct_size;", "uint32_t struct_size; int32_t z;", "before the end"),
        ("FW_TWO = 2", "FW_TWO = 3", "FW_TWO"),
        ("FW_ONE = 1, ", "", "FW_ONE is gone"),
    ],
)
def test_what_breaks_is_found_and_not_recorded(tree, before, after, piece):
    findings = now(tree, BEFORE.replace(before, after))
    assert findings and any(piece in finding for finding in findings)
    assert check_abi.update(tree) == 1


@pytest.mark.parametrize("before, after", [("y; }", "y, z; }"), ("FW_TWO = 2", "FW_TWO = 2, FW_THREE = 3")])
def test_growth_wants_to_be_recorded(tree, before, after):
    text = BEFORE.replace(before, after)
    findings = now(tree, text)
    assert len(findings) == 1 and "--update" in findings[0]
    assert check_abi.update(tree) == 0
    assert now(tree, text) == []
