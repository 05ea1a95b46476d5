# SPDX-License-Identifier: Apache-2.0
"""Six tokens through the gated delta rule, then one more that continues from their state."""
import numpy as np

import fastweight
from fastweight import ops

B, T, H, K, V = 1, 7, 2, 16, 8
rng = np.random.default_rng(0)
q, k = rng.standard_normal((2, B, T, H, K)).astype(np.float32)
v = rng.standard_normal((B, T, H, V)).astype(np.float32)
g = -rng.random((B, T, H)).astype(np.float32)  # the natural log of the decay, at most 0
beta = rng.random((B, T, H)).astype(np.float32)

first, last = slice(0, 6), slice(6, 7)
o, state = ops.gated_delta_rule(q[:, first], k[:, first], v[:, first], g[:, first], beta[:, first], qk_norm="l2", output_final_state=True)
one = ops.gated_delta_rule_step(q[:, last], k[:, last], v[:, last], g[:, last], beta[:, last], qk_norm="l2", state=state)  # in place

whole = ops.gated_delta_rule(q, k, v, g, beta, qk_norm="l2")[0]
print("step against one call over all:", float(np.abs(one - whole[:, last]).max()))
print(fastweight.last_impl(), o.shape, state.shape)
try:
    ops.gated_delta_rule(q, k, v, g, beta[:, first])
except ValueError as error:
    print("refused:", error)
