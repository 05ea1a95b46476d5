# SPDX-License-Identifier: Apache-2.0
"""Which folders of tests the switch FW_TEST_DEVICE=cuda (package_calls.py) leaves out."""
import os
from pathlib import Path

import pytest

CPU_ONLY = {
    "nn": "layers are compared in fp64 and drawn by generators of the CPU",
    "fla": "the loop that the functions are compared with is fp64 on the CPU; fla's own files run on CUDA with bench/fla_suite.py",
    "hf": "models are compared in fp32 on the CPU",
    "test_ops_table.py": "the table has no device", "test_package.py": "the package has no device", "test_types.py": "types have no device",
    "test_examples.py": "the examples run on the CPU", "test_field_python.py": "layers here are drawn and compared on the CPU",
}


def pytest_collection_modifyitems(items):
    if os.environ.get("FW_TEST_DEVICE", "cpu") != "cuda":
        return
    here = Path(__file__).parent
    for item in items:
        try:
            part = item.path.relative_to(here).parts[0]
        except ValueError:
            continue
        if part in CPU_ONLY:
            item.add_marker(pytest.mark.skip(reason=f"not run on cuda: {CPU_ONLY[part]}"))
