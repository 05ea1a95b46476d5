# SPDX-License-Identifier: Apache-2.0
"""Every field report is a test or a row of docs/field_reports.md that says why not, and never both."""
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
COUNT = 142


def test_every_report_is_accounted_for():
    tested = {int(number) for path in (*HERE.glob("test_field_*.py"), *HERE.parent.glob("package/**/test_*.py"))
              for number in re.findall(r"^def test_field_(\d{3})_", path.read_text(), re.M)}
    tested |= {int(number) for path in HERE.parent.glob("*/test_*.cpp")
               for number in re.findall(r"^TEST\(FieldReports, Field(\d{3})", path.read_text(), re.M)}
    table = (HERE.parent.parent / "docs" / "field_reports.md").read_text().partition("## Reports without a test")[2]
    listed = [int(number) for number in re.findall(r"^\| (\d+) \|", table, re.M)]
    assert len(listed) == len(set(listed)) and listed == sorted(listed)
    assert not tested & set(listed), "a test and an excuse"
    assert tested | set(listed) == set(range(1, COUNT + 1)), set(range(1, COUNT + 1)) ^ (tested | set(listed))
