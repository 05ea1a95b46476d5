#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a call of fastweight.ops costs: one token, one head, torch tensors (NumPy with --numpy). Prints microseconds.

Processor time of this thread, one thread in the context, the best and the median of many runs of 200 calls; the function
whose result each plan gives is checked first.
"""
import argparse
import statistics
import time

import fastweight
from fastweight import ops


def measure(call, runs=60, count=200):
    call()
    found = []
    for _ in range(runs):
        start = time.thread_time()
        for _ in range(count):
            call()
        found.append((time.thread_time() - start) / count * 1e6)
    return min(found), statistics.median(found)


def inputs(as_numpy, K):
    import numpy as np

    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1, 1, K)).astype(np.float32)
    g, beta = -rng.random((1, 1, 1)).astype(np.float32), rng.random((1, 1, 1)).astype(np.float32)
    found = [q, k / 8, v, g, beta, np.zeros((1, 1, K, K), np.float32)]
    if as_numpy:
        return found
    import torch

    torch.set_num_threads(1)
    return [torch.from_numpy(x) for x in found]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--numpy", action="store_true", help="NumPy arrays instead of torch tensors")
    parser.add_argument("--size", type=int, default=64, help="K = V (64)")
    options = parser.parse_args()
    fastweight.set_num_threads(1)
    q, k, v, g, beta, state = inputs(options.numpy, options.size)
    expected = ops.gated_delta_rule_step(q, k, v, g, beta, state=state * 0)
    plan = ops.plan(ops.gated_delta_rule_step, q, k, v, g, beta, state=state)
    if not bool((plan(q, k, v, g, beta, state=state * 0) == expected).all()):
        raise SystemExit("the plan does not give the result of the function")
    plan(q, k, v, g, beta, state=state)
    calls = {"step through a plan": lambda: plan(q, k, v, g, beta),
             "step": lambda: ops.gated_delta_rule_step(q, k, v, g, beta, state=state),
             "forward": lambda: ops.gated_delta_rule(q, k, v, g, beta),
             "forward, states in and out": lambda: ops.gated_delta_rule(q, k, v, g, beta, initial_state=state, output_final_state=True)}
    print(f"gated_delta_rule, float32, T = 1, H = 1, K = V = {options.size}, {'NumPy' if options.numpy else 'torch'}: us, best and median")
    for name, call in calls.items():
        best, median = measure(call)
        print(f"{best:8.2f} {median:8.2f}  {name}")


if __name__ == "__main__":
    main()
