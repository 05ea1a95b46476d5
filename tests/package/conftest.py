# SPDX-License-Identifier: Apache-2.0
"""Which files of tests the switch FW_TEST_DEVICE=cuda (package_calls.py) leaves out."""
import os
from pathlib import Path

import pytest

CPU_ONLY = {
    "test_ops_table.py": "the table has no device", "test_package.py": "the package has no device", "test_types.py": "types have no device",
    "test_examples.py": "the examples run on the CPU", "test_field_python.py": "layers here are drawn and compared on the CPU",
    "test_parameters.py": "parameters have no device", "test_fla_install.py": "names have no device",
    "test_fla_suite.py": "the small package stands for one without a device", "test_hf_page.py": "the page was written on the CPU",
}


def pytest_collection_modifyitems(items):
    if os.environ.get("FW_TEST_DEVICE", "cpu") != "cuda":
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.path.name in CPU_ONLY:
            item.add_marker(pytest.mark.skip(reason=f"not run on cuda: {CPU_ONLY[item.path.name]}"))
