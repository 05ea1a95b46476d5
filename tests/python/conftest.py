# SPDX-License-Identifier: Apache-2.0
"""Finds the oracle and the library; without the library its tests are reported as not run."""
import os
import sys
from pathlib import Path

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")
TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))
sys.path.insert(0, str(TESTS / "python"))

import pytest  # noqa: E402

import fastweight_c as fw  # noqa: E402

REFERENCE = "reference_recurrent,reference"


def need_library():
    if fw.library_path() is None:
        pytest.skip("libfastweight.so is not built (FW_LIBRARY, FW_BUILD or build/)")


@pytest.fixture(scope="session")
def context():
    """Two threads, the library's own choice of implementation."""
    need_library()
    with fw.Context(n_threads=2) as made:
        yield made


@pytest.fixture(scope="session")
def one_thread():
    need_library()
    with fw.Context(n_threads=1) as made:
        yield made


@pytest.fixture(scope="session")
def reference():
    """The C++ truth: every operation's reference implementation."""
    need_library()
    with fw.Context(n_threads=1, force_impl=REFERENCE) as made:
        yield made
