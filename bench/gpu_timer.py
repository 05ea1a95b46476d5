# SPDX-License-Identifier: Apache-2.0
"""Times on a CUDA device: medians of event times of graph replays and of plain calls, ceilings, host time of a call."""
import statistics
import time

import torch

CLEARED_BYTES = 256 << 20  # written between runs; the second-level cache of an H200 has 50 MB


class Timer:
    """seconds: replays end after so many; at least 5, at most 200 are taken."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.cleared = torch.empty(CLEARED_BYTES, dtype=torch.uint8, device="cuda")

    def _median(self, run, clears):
        times, start = [], time.perf_counter()
        while len(times) < 5 or (len(times) < 200 and time.perf_counter() - start < self.seconds):
            if clears:
                self.cleared.zero_()
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            run()
            after.record()
            after.synchronize()
            times.append(before.elapsed_time(after))
        return statistics.median(times)

    def graph(self, function, clears=True):
        """Milliseconds of one replay of a graph of function()."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = function()
        graph.replay()
        torch.cuda.synchronize()
        found = self._median(graph.replay, clears)
        del results, graph
        return found

    def eager(self, function, clears=True):
        """Milliseconds of one plain call."""
        function()
        torch.cuda.synchronize()
        return self._median(function, clears)


def host_us(function, calls=500, rounds=7):
    """Microseconds of the calling thread for one call: the best round, the device idle before each."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        best = min(best, (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return best * 1e6


def ceilings():
    """Copy rate (read and written bytes of 1 GiB) and bf16 matrix rate (8192^3), the second-level cache cleared between runs."""
    timer = Timer(0.2)
    source, target = (torch.zeros(1 << 30, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy_ms = timer.eager(lambda: target.copy_(source))
    n = 8192
    left = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(left)
    matrix_ms = timer.eager(lambda: torch.mm(left, left, out=out))
    return {"copy_gbs": round(2 * (1 << 30) / copy_ms / 1e6, 1), "matrix_gflops": round(2 * n ** 3 / matrix_ms / 1e6, 0),
            "copy": "read + written bytes of a copy of 1 GiB", "matrix": f"bf16 product {n}^3 of torch"}
