# SPDX-License-Identifier: Apache-2.0
"""Central differences of fourth order, one element at a time."""
import numpy as np

# Step and bound: the truncation error is h^4 |f^(5)| / 30 < 1e-11 |f^(5)| and the rounding error 1.5 eps |f| / h < 1e-12 |f|
# at h = 4e-3; the losses here have |f| and fifth derivatives up to about 1e3, so 2e-8 of the largest gradient is wide
# enough for every row and a wrong term, which shows in the first or second digit, is not.
STEP = 4e-3
BOUND = 2e-8


def gradient(loss, x):
    """d loss() / d x, where loss reads the array x in place."""
    out = np.zeros_like(x)
    for index in np.ndindex(x.shape):
        kept = x[index]
        values = []
        for step in (STEP, -STEP, 2 * STEP, -2 * STEP):
            x[index] = kept + step
            values.append(loss())
        x[index] = kept
        out[index] = (8 * (values[0] - values[1]) - (values[2] - values[3])) / (12 * STEP)
    return out


def assert_close(found, expected, what, bound=BOUND):
    scale = max(1.0, float(np.abs(expected).max(initial=0)))
    error = float(np.abs(found - expected).max(initial=0)) / scale
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    assert error <= bound, f"{what}: {error:.2e} of the largest gradient, allowed {bound:.0e}"
