# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks say about a machine: its class, its ceilings, the versions that ran."""
import os
import platform
import subprocess
import threading
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def machine_class():
    """"zen3", "emerald_rapids", ...: the CPU family, which is what results may be compared within."""
    fields = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    except OSError:
        return platform.machine()
    try:
        family, model = int(fields.get("cpu family", -1)), int(fields.get("model", -1))
    except ValueError:
        return platform.machine()
    if fields.get("vendor_id") == "AuthenticAMD":
        if family == 23:
            return "zen2" if model >= 0x30 else "zen1"
        if family == 25:
            return "zen4" if 0x10 <= model <= 0x1F or 0x60 <= model <= 0x7F or 0xA0 <= model <= 0xAF else "zen3"
        return "zen5" if family == 26 else f"amd_family_{family}"
    if fields.get("vendor_id") == "GenuineIntel" and family == 6:
        names = {85: "skylake_sp", 106: "ice_lake", 108: "ice_lake", 143: "sapphire_rapids", 207: "emerald_rapids",
                 173: "granite_rapids", 174: "granite_rapids"}
        return names.get(model, f"intel_family_6_model_{model}")
    if "CPU part" in fields:
        parts = {"0xd0c": "neoverse_n1", "0xd40": "neoverse_v1", "0xd49": "neoverse_n2", "0xd4f": "neoverse_v2"}
        return parts.get(fields["CPU part"], "arm_part_" + fields["CPU part"])
    return f"{platform.machine()}_family_{family}_model_{model}"


def commit():
    try:
        head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(["git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no", "src", "include"],
                                 capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FW_COMMIT", "unknown")  # of a copy of the tree without its history
    return head + (" with changes" if changed else "")


def at_once(threads, work):
    """Seconds until `threads` threads have each done work(i), which must release the interpreter lock."""
    gate = threading.Barrier(threads + 1)
    def body(i):
        gate.wait()
        work(i)
    running = [threading.Thread(target=body, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    gate.wait()
    start = time.perf_counter()
    for thread in running:
        thread.join()
    return time.perf_counter() - start


class Ceilings:
    """Best rates seen, measured a little in every round so that they share the machine's mood with the times."""

    def __init__(self, threads):
        self.threads = threads
        size = 64 << 20  # bytes a thread, far past any L2 and past most shares of an L3
        self.source = [np.ones(size // 4, np.float32) for _ in range(threads)]
        self.target = [np.zeros(size // 4, np.float32) for _ in range(threads)]
        self.n = 768
        rng = np.random.default_rng(0)
        self.left = [rng.standard_normal((self.n, self.n), np.float32) for _ in range(threads)]
        self.product = [np.zeros((self.n, self.n), np.float32) for _ in range(threads)]
        self.copy_gbs = self.matrix_gflops = 0.0

    def measure(self):
        seconds = at_once(self.threads, lambda i: np.copyto(self.target[i], self.source[i]))
        self.copy_gbs = max(self.copy_gbs, 2 * sum(x.nbytes for x in self.source) / seconds / 1e9)

        def multiply(i):
            for _ in range(4):
                np.matmul(self.left[i], self.left[i], out=self.product[i])

        seconds = at_once(self.threads, multiply)
        self.matrix_gflops = max(self.matrix_gflops, 4 * self.threads * 2 * self.n ** 3 / seconds / 1e9)

    def as_json(self):
        return {"copy_gbs": round(self.copy_gbs, 2), "matrix_gflops": round(self.matrix_gflops, 2), "threads": self.threads,
                "copy": "read + written bytes of a copy of 64 MiB a thread",
                "matrix": f"fp32 product {self.n}^3 of NumPy's BLAS, one a thread"}


def versions(**more):
    return {"python": platform.python_version(), "numpy": np.__version__, "system": platform.system(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(), **more}
