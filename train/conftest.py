# SPDX-License-Identifier: Apache-2.0
"""Finds the package where it was built, if it is not installed; one thread: the models are small."""
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
BUILT = Path(os.environ.get("FW_BUILD", Path(__file__).resolve().parents[1] / "build" / "release")) / "python"
if (BUILT / "fastweight").is_dir() and str(BUILT) not in sys.path:
    sys.path.insert(0, str(BUILT))
