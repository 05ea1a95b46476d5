# SPDX-License-Identifier: Apache-2.0
"""tools/check_math_tests.py finds a test that is named but gone, one that is not named, and plots or tables that are stale."""

import pathlib
import shutil
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import check_math_tests  # noqa: E402
import plot_study  # noqa: E402


@pytest.fixture
def tree(tmp_path):
    """docs/math.md, its data and plots, and the tests of the forms, in a tree of their own."""
    for pattern in ("docs/math.md", "docs/data/study_*.json", "docs/img/study_*.svg", "tests/ops/test_forms_*.cpp"):
        for path in ROOT.glob(pattern):
            target = tmp_path / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return tmp_path


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def only(findings, *pieces):
    assert len(findings) == 1, findings
    for piece in pieces:
        assert piece in findings[0]


def test_the_document_holds(tree):
    assert check_math_tests.check(tree, None) == []


def test_a_named_test_that_is_gone(tree):
    change(tree / "tests/ops/test_forms_inverse.cpp", "TEST(Inverse, HornerIsForwardSubstitution)", "TEST(Other, Horner)")
    only(check_math_tests.check(tree, None), "docs/math.md:", "names the test Inverse.HornerIsForwardSubstitution")


def test_a_test_that_is_not_named(tree):
    with (tree / "tests/ops/test_forms_limits.cpp").open("a") as file:
        file.write("TEST(Operators, NobodyNamesThis) {}\n")
    only(check_math_tests.check(tree, None), "tests/ops/test_forms_limits.cpp", "does not name Operators.NobodyNamesThis")


@pytest.mark.parametrize("old, new, pieces", [
    ("Test of (3): ", "Tests: ", ["equation (3) has no line"]),
    ("Test of (8): `Forms.EndStateIsOneDecayAndTwoProducts`.", "Test of (8): `Forms.EndStateIsOneDecayAndTwoProducts` and more.\n\nTest of (8): `Forms.EndStateIsOneDecayAndTwoProducts`.", ["names tests of (8) again"]),
    ("Test of (5): `Operators.SharedKeyGivesFeedbackFromEraseAndWrite`.", "Test of (5): by sizes.", ["names no test of (5)"]),
    ("(6)\n", "(9)\n", ["equation (9), expected (6)"]),
    ("| `Forms.StateSumsToItsOwnToken` |", "| sizes |", ["a slip that no test shows"]),
])
def test_an_equation_or_a_slip_without_a_test(tree, old, new, pieces):
    change(tree / "docs/math.md", old, new)
    findings = check_math_tests.check(tree, None)
    assert any(all(piece in finding for piece in pieces) for finding in findings), findings


def test_a_plot_that_is_stale(tree):
    change(tree / "docs/img/study_paths.svg", "64 tokens", "65 tokens")
    only(check_math_tests.check(tree, None), "docs/img/study_paths.svg", "tools/plot_study.py")


def test_a_table_that_is_stale(tree):
    change(tree / "docs/math.md", "| fp16, 64 | 0.9 |", "| fp16, 64 | 0.91 |")
    only(check_math_tests.check(tree, None), "docs/math.md", "tools/plot_study.py")


def test_data_that_changed(tree):
    change(tree / "docs/data/study_inverse.json", '"size":16,"cosine":0.0,"way":"substitution","max_error":3.1e-08', '"size":16,"cosine":0.0,"way":"substitution","max_error":0.5')
    findings = check_math_tests.check(tree, None)
    assert [finding.split(":")[0] for finding in findings] == ["docs/img/study_inverse.svg", "docs/math.md"]


def test_plots_are_text_of_one_kind(tree):
    for path, text in plot_study.made(tree).items():
        if path.endswith(".svg"):
            assert text.startswith("<svg ") and text.endswith("</svg>\n") and "nan" not in text and "inf" not in text.replace("infinite", "")
