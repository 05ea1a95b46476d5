#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the CPU operators beside other engines, in one process, interleaved, after checking every result.

What is timed
  peers   gated_delta_rule (or --op) of this library against
            transformers_torch  torch_chunk_gated_delta_rule, the plain PyTorch path that transformers ships (decode:
                                torch_recurrent_gated_delta_rule; backward: autograd through it, forward included)
            onnxruntime         com.microsoft.LinearAttention
          on the same problem with the same number of threads. A package that is not installed is said to be not run.
  rows    every row of the catalogue against our own gated_delta_rule: forward and step a token (gated_delta_product: a
          sub-step) and head, backward against the row's own forward. The limits: forward 1.5 times gated_delta_rule's (2.5
          with independent erase keys), backward 6 times its own forward, step 2 times gated_delta_rule's step.
  impls   with --impls: implementations of this library by name, each forced, on the same problem; one that refuses is said
          to be not run.

How
  Every result is first compared with the fp64 recurrence on the first and the last head; a wrong one ends the program and no
  time is printed. Then all candidates run in turn, round after round, with a pause between them so that spinning threads of one
  do not slow the next. The median is reported, and the minimum beside it. The ceilings (copy rate, matrix rate) are measured in
  the same rounds; floor_ms is the larger of FLOPs over the matrix rate and bytes over the copy rate.

Output
  A table, and with --write the file bench/results/<machine>.json: machine, commit, versions, ceilings and rows;
  rows of an earlier run of the same commit stay.

Examples
  bench/peers_cpu.py                                   forward, peers and rows, one thread, default sizes
  bench/peers_cpu.py --threads 2 --write               on two threads; writes the result file
  bench/peers_cpu.py --only peers --directions forward,backward,step --T 512
  bench/peers_cpu.py --only rows --T 1024 --H 8 --dtype bf16
  bench/peers_cpu.py --impls cpu_avx512_chunk,cpu_avx512_bf16_chunk,cpu_amx_chunk --dtype bf16

The library is build/release/libfastweight.so, or the one named by FW_LIBRARY. Needs numpy; the peers need torch,
transformers, onnxruntime and onnx.
"""
import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
for variable in ("OPENBLAS_NUM_THREADS", "MKL_DYNAMIC"):
    os.environ.setdefault(variable, "1" if variable.startswith("OPEN") else "FALSE")

import machine  # noqa: E402
import problems  # noqa: E402
import peers as engines  # noqa: E402
from problems import cases, fw  # noqa: E402

# A wrong result is off by far more; a right one by 1e-6 (fp32 sums of 2048 tokens) or one rounding of the stored type.
ALLOWED = {"f32": 1e-4, "bf16": 2e-2, "f16": 4e-3}
PAUSE = 0.03  # seconds; the spinning of OpenMP's and others' idle threads ends within a few milliseconds
ROW_NAMES = cases.ROW_NAMES  # "linear_attn" to "rwkv7": the whole catalogue


class Timed:
    """A candidate: what it is, how it runs, how far it is from the truth, its times in milliseconds."""

    def __init__(self, name, run, error, impl=None):
        self.name, self.run, self.error, self.impl, self.times = name, run, error, impl, []

    @property
    def ms(self):
        return statistics.median(self.times)


def measure(candidates, rounds, ceilings, least_seconds=0.05):
    """Each candidate once a round; short calls are repeated until `least_seconds` have passed and divided."""
    repeats = {}
    for candidate in candidates:
        start = time.perf_counter()
        candidate.run()
        repeats[candidate] = max(1, int(least_seconds / max(time.perf_counter() - start, 1e-7)))
    for _ in range(rounds):
        for candidate in candidates:
            time.sleep(PAUSE)
            candidate.run()
            start = time.perf_counter()
            for _ in range(repeats[candidate]):
                candidate.run()
            candidate.times.append(1e3 * (time.perf_counter() - start) / repeats[candidate])
        ceilings.measure()


def checked(name, runner, truth, dtype):
    error = truth.error(runner.answers())
    if not error <= ALLOWED[dtype]:
        sys.exit(f"{name}: relative error {error:.2e}, allowed {ALLOWED[dtype]:.0e}: nothing is timed")
    return Timed(name, runner.run, error, getattr(runner, "impl", None))


def row_of(candidate, call, dtype, direction, threads, ceilings, peers):
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    return {"op": call.op, "direction": direction, "impl": candidate.impl, "dtype": dtype, "B": B, "T": T, "H": H, "HV": HV,
            "K": K, "V": V, "threads": threads, "ms": round(candidate.ms, 4), "min_ms": round(min(candidate.times), 4),
            "floor_ms": round(problems.floor_ms(call, dtype, direction, ceilings), 4), "error": float(f"{candidate.error:.2e}"),
            "peers": {peer.name: round(peer.ms, 4) for peer in peers}}


def per_head(ms, call):
    """Microseconds a token (sub-step) and value head."""
    return 1e3 * ms / (call.q.shape[0] * call.q.shape[1] * call.n_sub * call.v.shape[2])


def sized(arguments, op, direction):
    T = 1 if direction == "step" else arguments.T
    return problems.make(op, arguments.B, T, arguments.H, arguments.HV or arguments.H, arguments.K, arguments.V, arguments.dtype)


def run_peers(arguments, context, ceilings, versions):
    out = []
    for direction in arguments.directions:
        call = sized(arguments, arguments.op, direction)
        d_o = problems.incoming(call, arguments.dtype)
        truth = problems.Truth(call, direction, d_o)
        ours = checked("fastweight", problems.Ours(context, call, arguments.dtype, direction, d_o), truth, arguments.dtype)
        others = []
        for name in arguments.peers:
            try:
                peer = engines.PEERS[name](call, arguments.dtype, direction, arguments.threads, d_o)
            except engines.NotHere as reason:
                print(f"{call.op} {direction}: {name} not run: {reason}")
                continue
            versions.update(peer.version)
            others.append(checked(name, peer, truth, arguments.dtype))
        measure([ours, *others], arguments.rounds, ceilings)
        out.append(row_of(ours, call, arguments.dtype, direction, arguments.threads, ceilings, others))
        for candidate in (ours, *others):
            note = "" if candidate is ours else f"   {candidate.ms / ours.ms:.2f}x ours"
            print(f"{call.op} {direction:8} {candidate.name:20} {candidate.ms:10.3f} ms (min {min(candidate.times):.3f})"
                  f"  {per_head(candidate.ms, call):7.3f} us a token and head  error {candidate.error:.1e}{note}")
        print(f"{call.op} {direction:8} floor {out[-1]['floor_ms']:.3f} ms, {100 * out[-1]['floor_ms'] / ours.ms:.0f} % of ours")
    return out


def run_impls(arguments, context_of, ceilings):
    """Forced implementations of one call beside each other; the first that runs is what the others are compared with."""
    out = []
    for direction in arguments.directions:
        call = sized(arguments, arguments.op, direction)
        d_o = problems.incoming(call, arguments.dtype)
        truth = problems.Truth(call, direction, d_o)
        candidates = []
        for name in arguments.impls:
            try:
                runner = problems.Ours(context_of(name), call, arguments.dtype, direction, d_o)
                candidates.append(checked(name, runner, truth, arguments.dtype))
            except fw.Failed as reason:
                print(f"{call.op} {direction}: {name} not run: {reason}")
                continue
            if candidates[-1].impl != name:
                print(f"{call.op} {direction}: {name} not run: it is no implementation of this direction")
                candidates.pop()
        if not candidates:
            continue
        measure(candidates, arguments.rounds, ceilings)
        for candidate in candidates:
            row = row_of(candidate, call, arguments.dtype, direction, arguments.threads, ceilings, [])
            out.append({**row, "is_forced": True})
            print(f"{call.op} {direction:8} {candidate.name:24} {candidate.ms:10.3f} ms (min {min(candidate.times):.3f})"
                  f"  {per_head(candidate.ms, call):7.3f} us a token and head  error {candidate.error:.1e}"
                  f"  floor {100 * row['floor_ms'] / candidate.ms:3.0f} %  {candidates[0].ms / candidate.ms:.2f}x {candidates[0].name}")
    return out


def limits(call):
    return {"forward": 2.5 if call.axes()[1] == "independent" else 1.5, "backward": 6.0, "step": 2.0}


def run_rows(arguments, context, ceilings):
    """All rows in one interleaved run a direction; ratios against gated_delta_rule of the same run."""
    rows, forward_ms, worst = [], {}, []
    for direction in ("forward", "backward", "step"):
        calls = {op: sized(arguments, op, direction) for op in arguments.rows}
        candidates = {}
        for op, call in calls.items():
            d_o = problems.incoming(call, arguments.dtype)
            truth = problems.Truth(call, direction, d_o)
            runner = problems.Ours(context, call, arguments.dtype, direction, d_o)
            candidates[op] = checked(op, runner, truth, arguments.dtype)
        measure(list(candidates.values()), arguments.rounds, ceilings)
        base = per_head(candidates["gated_delta_rule"].ms, calls["gated_delta_rule"])
        for op, candidate in candidates.items():
            call = calls[op]
            mine = per_head(candidate.ms, call)
            if direction == "forward":
                forward_ms[op] = mine
            ratio = mine / (forward_ms[op] if direction == "backward" else base)
            limit = limits(call)[direction]
            against = "its forward" if direction == "backward" else "gated_delta_rule"
            verdict = "" if ratio <= limit else "   ABOVE THE LIMIT"
            if verdict:
                worst.append(f"{op} {direction} {ratio:.2f}, limit {limit}")
            print(f"{op:20} {direction:8} {mine:8.3f} us a token and head  {ratio:5.2f}x {against} (limit {limit}){verdict}")
            rows.append(row_of(candidate, call, arguments.dtype, direction, arguments.threads, ceilings, []))
    print("all rows within their limits" if not worst else "above their limits: " + "; ".join(worst))
    return rows


def arguments_of(line):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("peers", "rows"), help="one part (default: both)")
    parser.add_argument("--op", default="gated_delta_rule", choices=ROW_NAMES, help="row for the peers (default %(default)s)")
    parser.add_argument("--directions", default="forward,step", help="for the peers: forward, backward, step (default %(default)s)")
    parser.add_argument("--peers", default=",".join(engines.PEERS), help="default %(default)s")
    parser.add_argument("--impls", default="", help="only these implementations of --op, beside each other")
    parser.add_argument("--rows", default=",".join(ROW_NAMES), help="catalogue rows to time (default: all)")
    parser.add_argument("--B", type=int, default=1, help="batch (default %(default)s)")
    parser.add_argument("--T", type=int, default=2048, help="tokens of forward and backward (default %(default)s; step has 1)")
    parser.add_argument("--H", type=int, default=32, help="q/k heads (default %(default)s)")
    parser.add_argument("--HV", type=int, help="value heads (default: H)")
    parser.add_argument("--K", type=int, default=128, help="key size (default %(default)s)")
    parser.add_argument("--V", type=int, default=128, help="value size (default %(default)s)")
    parser.add_argument("--rows-T", type=int, default=512, help="tokens for the part `rows` (default %(default)s)")
    parser.add_argument("--rows-H", type=int, default=8, help="heads for the part `rows` (default %(default)s)")
    parser.add_argument("--dtype", choices=("f32", "bf16", "f16"), default="f32", help="default %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="default %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default %(default)s")
    parser.add_argument("--write", action="store_true", help="write bench/results/<machine>.json")
    parser.add_argument("--output", help="write to this file instead")
    arguments = parser.parse_args(line)
    for name in ("directions", "peers", "rows", "impls"):
        setattr(arguments, name, [word for word in getattr(arguments, name).split(",") if word])
    for name, known in (("directions", ("forward", "backward", "step")), ("peers", tuple(engines.PEERS)), ("rows", ROW_NAMES)):
        for word in getattr(arguments, name):
            if word not in known:
                parser.error(f"--{name}: {word} is unknown, allowed {', '.join(known)}")
    if "gated_delta_rule" not in arguments.rows:
        arguments.rows.insert(0, "gated_delta_rule")
    if fw.library_path() is None:
        parser.error("libfastweight.so is not built (./run builds it, or set FW_LIBRARY)")
    return arguments


KEY = ("op", "direction", "impl", "dtype", "B", "T", "H", "HV", "K", "V", "threads")


def joined(result, path, threads):
    """The result with the rows that an earlier run of the same commit wrote for other problems or threads."""
    result["ceilings_by_threads"] = {str(threads): result["ceilings"]}
    if not path.exists():
        return result
    old = json.loads(path.read_text())
    if old.get("commit") != result["commit"]:
        return result
    mine = {tuple(row.get(key) for key in KEY) for row in result["rows"]}
    result["rows"] = [row for row in old["rows"] if tuple(row.get(key) for key in KEY) not in mine] + result["rows"]
    result["ceilings_by_threads"] = {**old.get("ceilings_by_threads", {}), **result["ceilings_by_threads"]}
    return result


def main(line=None):
    arguments = arguments_of(line)
    ceilings = machine.Ceilings(arguments.threads)
    ceilings.measure()
    rows, versions = [], {}
    with fw.Context(arguments.threads) as context:
        versions["fastweight"] = fw.library().fw_version().decode()
        versions["cpu_level"] = context.cpu_level
        if arguments.impls:
            forced = {name: fw.Context(arguments.threads, name) for name in arguments.impls}
            rows += run_impls(arguments, forced.__getitem__, ceilings)
        elif arguments.only != "rows":
            rows += run_peers(arguments, context, ceilings, versions)
        if arguments.only != "peers" and not arguments.impls:
            own = argparse.Namespace(**{**vars(arguments), "T": arguments.rows_T, "H": arguments.rows_H, "HV": None})
            rows += run_rows(own, context, ceilings)
    print(f"ceilings: copy {ceilings.copy_gbs:.1f} GB/s, matrix {ceilings.matrix_gflops:.1f} GFLOP/s on {arguments.threads} thread(s)")
    if arguments.write or arguments.output:
        path = Path(arguments.output or problems.ROOT / "bench" / "results" / f"{machine.machine_class()}.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {"machine": machine.machine_class(), "commit": machine.commit(), "versions": machine.versions(**versions),
                  "ceilings": ceilings.as_json(), "rows": rows}
        path.write_text(json.dumps(joined(result, path, arguments.threads), indent=1) + "\n")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
