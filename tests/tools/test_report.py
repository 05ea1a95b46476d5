# SPDX-License-Identifier: Apache-2.0
"""tools/test_report.py counts what ran, says what did not and why, and fails when anything failed."""

import json
import pathlib
import subprocess
import sys

REPORT = pathlib.Path(__file__).resolve().parents[2] / "tools" / "test_report.py"

GTEST = """<testsuites><testsuite name="A">
<testcase name="one" status="run" result="completed" classname="A"/>
<testcase name="two" status="run" result="skipped" classname="A"><skipped message="no such CPU"/></testcase>{more}
</testsuite></testsuites>"""
CTEST = """<testsuite>{cases}</testsuite>"""


def report(folder, gtest="", ctest="", checks=(), more=()):
    (folder / "gtest").mkdir(parents=True)
    if gtest:
        (folder / "gtest" / "core_a.xml").write_text(gtest)
    (folder / "ctest.xml").write_text(CTEST.format(cases=ctest))
    for name, status, text in checks:
        (folder / f"{name}.status").write_text(f"{status}\n")
        (folder / f"{name}.out").write_text(text)
    answer = subprocess.run([sys.executable, str(REPORT), str(folder), *more], capture_output=True, text=True, check=False)
    return answer.returncode, answer.stdout


def test_cases_count_once(tmp_path):
    code, text = report(tmp_path, GTEST.format(more=""), '<testcase name="core_a" status="run"/>')
    assert code == 0 and text.endswith("1 passed, 0 failed, 1 not run\n") and "no such CPU" in text


def test_a_failed_case_fails_the_whole(tmp_path):
    failing = '<testcase name="three" status="run" result="completed" classname="A"><failure message="no"/></testcase>'
    code, text = report(tmp_path, GTEST.format(more=failing), '<testcase name="core_a" status="fail"><failure/></testcase>')
    assert code == 1 and text.endswith("1 passed, 1 failed, 1 not run\n") and "A.three" in text


def test_a_program_that_died_is_a_failure(tmp_path):
    code, text = report(tmp_path, "", '<testcase name="core_a" status="fail"><failure/></testcase>')
    assert code == 1 and text.endswith("0 passed, 1 failed, 0 not run\n")


def test_a_program_that_failed_after_its_cases_passed_is_a_failure(tmp_path):
    code, text = report(tmp_path, GTEST.format(more=""), '<testcase name="core_a" status="fail"><failure/></testcase>')
    assert code == 1 and text.endswith("1 passed, 1 failed, 1 not run\n")


def test_a_skipped_program_gives_its_reason(tmp_path):
    skipped = '<testcase name="abi" status="notrun"><skipped message="SKIP_RETURN_CODE=77"/><system-out>not run: no compiler\n</system-out></testcase>'
    code, text = report(tmp_path, "", skipped + '<testcase name="b" status="run"/>')
    assert code == 0 and "abi: no compiler" in text and text.endswith("1 passed, 0 failed, 1 not run\n")


def test_checks_count(tmp_path):
    outcomes = [("check_a", 0, ""), ("check_b", 1, "src/a.cpp:1: wrong\n"), ("check_c", 77, "not run: no library\n")]
    code, text = report(tmp_path, checks=outcomes)
    assert code == 1 and "src/a.cpp:1: wrong" in text and "no library" in text
    assert text.endswith("1 passed, 1 failed, 1 not run\n")


def test_no_test_at_all_is_a_failure(tmp_path):
    code, text = report(tmp_path)
    assert code == 1 and "no test ran" in text


def test_the_result_file_has_the_counts(tmp_path):
    written = tmp_path / "out"
    report(tmp_path / "in", GTEST.format(more=""), "", more=["--write", str(written)])
    text = (written / "full.json").read_text()
    assert '"not run": 1' in text and "no such CPU" in text
    assert json.loads((written / "full_grid.json").read_text()) == []


def test_the_grid_is_added_up_over_its_cases(tmp_path):
    grid = tmp_path / "in" / "grid"
    grid.mkdir(parents=True)
    same = {"op": "kda", "direction": "forward", "dtype": "fp32", "impl": "cpu_avx2_chunk"}
    one = {**same, "cases": 2, "failed": 0, "worst_share": 0.5, "tensor": "o", "case": "first"}
    two = {**same, "cases": 3, "failed": 1, "worst_share": 2.0, "tensor": "final_state", "case": "second"}
    other = {**one, "direction": "backward"}
    (grid / "A.json").write_text(json.dumps([one, other]))
    (grid / "B.json").write_text(json.dumps([two]))
    report(tmp_path / "in", GTEST.format(more=""), "", more=["--write", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "full_grid.json").read_text()) == [other, {**two, "cases": 5}]
