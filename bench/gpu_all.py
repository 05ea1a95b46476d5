# SPDX-License-Identifier: Apache-2.0
"""Everything about one CUDA machine in under ten minutes: a sample of the tests, one under the sanitizers, and all times.

    python bench/gpu_all.py --build build/release --peers h200_peers.json        writes bench/results/<device>.json

The tests are those of the build, on the device (FW_TEST_DEVICE=cuda); the sanitizer sample is one small problem an implementation
and tool; the times are those of bench/gpu_rows.py, each after its check. tools/write_performance.py makes docs/performance.md of it.
Peers: rows of other engines measured on such a device; their times stand as they are.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
FORWARD, BACKWARD, STEP = 0, 1, 2
TESTS = {
    "sm90_forward": ("ops_recurrence_grid", "Grid.ForwardOfSm90"),
    "sm90_backward": ("ops_recurrence_grid", "Grid.BackwardOfSm90*"),
    "cuda_chunk": ("ops_recurrence_grid", "Grid.ForwardOfCudaChunk*"),
    "decode": ("ops_recurrence_grid", "Grid.StepOf*"),
    "chunk_backward": ("ops_recurrence_grid", "Grid.BackwardOfCudaChunk*"),
    "portable": ("ops_recurrence_grid", "Grid.ForwardBf16:Grid.BackwardBf16:Grid.StepBf16"),
    "laws": ("ops_recurrence_laws", "*"),
    "sm90": ("ops_recurrence_sm90", "*"),
    "promises": ("ops_recurrence_promises", "*"),
    "rows": ("ops_recurrence_rows", "*"),
    "refusals": ("ops_recurrence_refusals", "*"),
    "device": ("ops_recurrence_device", "*"),
    "norm": ("neighbours_norm", "*"),
    "short_conv": ("neighbours_short_conv", "*"),
    "attention": ("neighbours_attention", "*"),
}
SIZES = "T=130 H=1 group=2 K=128 V=128 dtype=2 gate_dtype=2 seed=11"
# name: (implementation, direction, op and sizes of one call of the grid)
SANITIZED = {
    "gated_delta_rule forward": ("sm90_chunk", FORWARD, f"op=7 {SIZES}"),
    "kda forward": ("sm90_chunk", FORWARD, f"op=9 {SIZES}"),
    "dplr forward": ("sm90_chunk", FORWARD, f"op=13 {SIZES}"),
    "gated_delta_rule backward": ("sm90_chunk", BACKWARD, f"op=7 {SIZES}"),
    "kda backward": ("sm90_chunk", BACKWARD, f"op=9 {SIZES}"),
    "kda step": ("cuda_step", STEP, f"op=9 B=2 {SIZES}".replace("T=130", "T=2")),
    "kda backward of operands made inside": ("sm90_chunk", BACKWARD, f"op=9 {SIZES} qk_norm=1 gate_input=1 parameters=1 beta_input=1"),
    "gated_delta_rule backward of operands made inside": ("sm90_chunk", BACKWARD, f"op=7 {SIZES} qk_norm=1 gate_input=1 parameters=1 beta_input=1"),
    "kda chunk forward": ("cuda_chunk", FORWARD, "op=9 T=33 H=1 group=2 K=40 V=24 dtype=2 seed=11"),
    "kda chunk backward": ("cuda_chunk", BACKWARD, "op=9 T=33 H=1 group=2 K=40 V=24 dtype=2 seed=11"),
    "dplr chunk backward": ("cuda_chunk", BACKWARD, "op=13 T=33 H=1 group=2 K=40 V=24 dtype=3 seed=11"),
    "kda step of a chunk": ("sm90_step_chunk", STEP, f"op=9 B=2 {SIZES}".replace("T=130", "T=11")),
    "kda streamed step": ("sm90_step", STEP, f"op=9 B=2 {SIZES}".replace("T=130", "T=2")),
    "kda portable forward": ("cuda_portable", FORWARD, "op=9 T=33 H=1 group=2 K=40 V=24 dtype=2 seed=11"),
    "kda portable backward": ("cuda_portable", BACKWARD, "op=9 T=33 H=1 group=2 K=40 V=24 dtype=2 seed=11"),
}
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def run(command, seconds, **environment):
    """(exit status or None when it was too slow, seconds, text)."""
    start = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **environment}, check=False)
        status, text = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as slow:
        status, text = None, (slow.stdout or b"").decode(errors="replace")
    return status, round(time.perf_counter() - start, 1), text


def word_of(status, text):
    if status is None:
        return "not run to its end: too slow"
    if status != 0:
        return "failed"
    return "passed" if "[  PASSED  ]" in text and "[  PASSED  ] 0 tests" not in text else "not run"


def report(kind, name, word, seconds, text):
    print(f"{kind} {name}: {word}, {seconds} s", flush=True)
    if word == "failed":
        print("\n".join(text.splitlines()[-25:]), flush=True)
    return {"result": word, "seconds": seconds}


def run_tests(build, seconds):
    def one(item):
        name, (program, cases) = item
        status, took, text = run([str(build / "tests" / program), f"--gtest_filter={cases}"], seconds, FW_TEST_DEVICE="cuda")
        return name, report("test", name, word_of(status, text), took, text)

    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(one, TESTS.items()))


def run_sanitizers(build, seconds, budget):
    begin = time.perf_counter()
    found = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(found).exists():
        return {"result": "not run: compute-sanitizer was not found"}

    def one(item):
        tool, (name, (impl, direction, case)) = item
        if time.perf_counter() - begin > budget:
            return f"{tool}, {name}, {impl}", report("sanitizer", f"{tool} {name}", "not run: the budget was used up", 0, "")
        command = [found, "--tool", tool, "--error-exitcode", "9", str(build / "tests/ops_recurrence_grid"), "--gtest_filter=Repro.Case"]
        status, took, text = run(command, seconds, FW_TEST_DEVICE="cuda", FW_TEST_CASE=case, FW_TEST_DIRECTION=str(direction), FW_TEST_IMPL=impl)
        return f"{tool}, {name}, {impl}", report("sanitizer", f"{tool} {name}", word_of(status, text), took, text)

    with ThreadPoolExecutor(8) as pool:
        return dict(pool.map(one, [(tool, case) for tool in TOOLS for case in SANITIZED.items()]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, help="a build with tests; without it only times are taken")
    parser.add_argument("--peers", help="file of other engines' times on such a device")
    parser.add_argument("--rows", default="", help="as in gpu_rows.py")
    parser.add_argument("--seconds", type=float, default=120, help="longest time of one test or sanitizer run")
    parser.add_argument("--sanitizer-budget", type=float, default=180, help="seconds after which no further sanitizer run begins")
    parser.add_argument("--budget", type=float, default=400, help="seconds for the times")
    parser.add_argument("--row-seconds", default="0.3", help="as in gpu_rows.py")
    parser.add_argument("--out", type=Path, help="the file (default: bench/results/<device>.json)")
    args = parser.parse_args()
    answer = {"device": "cuda"}
    if args.build:
        answer["tests"] = run_tests(args.build, args.seconds)
        answer["sanitizers"] = run_sanitizers(args.build, args.seconds, args.sanitizer_budget)
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder) / "rows.json"
        command = [sys.executable, str(HERE / "gpu_rows.py"), "--out", str(times), "--budget", str(args.budget), "--rows", args.rows,
                   "--row-seconds", args.row_seconds, *(["--peers", args.peers] if args.peers else [])]
        status = subprocess.run(command, check=False).returncode
        if not times.exists():
            print(f"the times ended with status {status} and no results", file=sys.stderr)
            return 1
        answer.update(json.loads(times.read_text()))
    machine = answer["machine"].replace("NVIDIA ", "").lower().replace(" ", "_")
    answer["device_name"], answer["machine"] = answer["machine"], machine
    out = args.out or HERE / "results" / f"{machine}.json"
    out.write_text(json.dumps(answer, indent=1) + "\n")
    print(f"wrote {out}")
    bad = [name for part in ("tests", "sanitizers") for name, x in answer.get(part, {}).items() if isinstance(x, dict) and x["result"] == "failed"]
    return 1 if bad or status else 0


if __name__ == "__main__":
    sys.exit(main())
