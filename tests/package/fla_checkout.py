# SPDX-License-Identifier: Apache-2.0
"""fla from the checkout that FW_FLA_CHECKOUT names, with fastweight's functions in the place of its own, for as long as a test needs it."""
import contextlib
import os
import sys

import pytest

CHECKOUT = os.environ.get("FW_FLA_CHECKOUT")


@contextlib.contextmanager
def installed():
    """fla can be imported inside; afterwards the names fla and sys.path are what they were."""
    if not CHECKOUT:
        pytest.skip("not run: FW_FLA_CHECKOUT names no checkout of fla")
    import fastweight.fla

    kept, path = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "fla"}, list(sys.path)
    sys.path.insert(0, CHECKOUT)
    try:
        found = fastweight.fla.install()
        if found.stands_in is not None:
            found.uninstall()
            pytest.skip(f"not run: fla cannot be imported: {found.stands_in}")
        yield
        found.uninstall()
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            del sys.modules[name]
        sys.modules.update(kept)
