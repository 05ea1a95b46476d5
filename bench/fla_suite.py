#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""fla's own tests for the operators of fastweight, run on fastweight.

    python bench/fla_suite.py --fla PATH            # a checkout of flash-linear-attention; torch, triton, einops, transformers, pytest
    python bench/fla_suite.py --fla PATH --device cuda --workers 16         # and pytest-xdist

fastweight.fla.install() puts our functions in the place of fla's, fla's plain torch references stay. Nothing of the checkout is
edited. A test is passed, failed, skipped by fla's own marks, or not run: over the limit of time, or it launches a Triton kernel of
fla itself, which a CPU cannot. "reference off" names the tests that fail by the error of their own reference, with the numbers.
On CUDA what fails runs once more with fla's own functions, and "fails with fla" is what fails with these too.
Writes bench/results/fla_suite_<device>.json, and a line for each test as it ends beside it in fla_suite_<device>.rows (with fla's
own functions: .own.rows), from which --resume goes on; exits with 1 when a test failed.
"""
import argparse
import collections
import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import fastweight

HERE = Path(__file__).resolve().parent
OPERATORS = ("linear_attn", "simple_gla", "retention", "lightning_attn", "gla", "delta", "gdn", "kda", "gdn2", "comba", "delta_product",
             "gdp", "iplr_delta", "dplr_delta", "rwkv7")
MODULES = ("conv", "l2norm", "l2warp", "layernorm", "rotary", "token_shift", "cross_entropy", "activation")
OUTCOMES = ("passed", "failed", "reference off", "fails with fla", "skipped", "not run")
FILES = tuple(f"tests/ops/test_{name}.py" for name in OPERATORS) + tuple(f"tests/modules/test_{name}.py" for name in MODULES)


def commit_of(checkout):
    found = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    top = subprocess.run(["git", "-C", str(checkout), "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 and Path(top.stdout.strip()) == checkout else None


def run(checkout, tests, more, environment, output):
    """{test: row} of one pytest run over `tests`, files or names; the test in which a process ended, if one did, has failed."""
    command = [sys.executable, "-m", "pytest", "-p", "fla_suite_plugin", "-p", "no:cacheprovider", "-q", "--no-header", "--tb=no", "-W",
               "ignore", *tests, *more]
    known = output.with_suffix(".known")  # every worker leaves out the same tests, whenever it starts
    known.write_text(output.read_text() if output.exists() else "")
    done = subprocess.run(command, cwd=checkout, env={**environment, "FLA_SUITE_OUTPUT": str(output), "FLA_SUITE_KNOWN": str(known)},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    known.unlink()
    rows = {}
    for line in output.read_text().splitlines() if output.exists() else ():
        row = json.loads(line)
        rows[row.pop("name")] = row
    installed = rows.pop("installed", {}).get("why")
    for row in rows.values():
        if row["outcome"] == "started":
            row.update(outcome="failed", why=f"the process ended with {done.returncode}")
    if installed is None or not rows:
        said = done.stdout.strip().splitlines() or [f"exit {done.returncode}"]
        rows["pytest"] = {"outcome": "failed", "why": said[-1][:300], "seconds": 0.0}
    return rows, installed


def again_with_fla(rows, checkout, more, environment, output):
    """Runs what failed with fla's own functions and changes the outcome of what fails with these too."""
    failed = {name: row for name, row in rows.items() if row["outcome"] == "failed" and "::" in name}
    if not failed:
        return
    own, _ = run(checkout, failed, more, {**environment, "FLA_SUITE_OWN": "1"}, output)
    for name, row in failed.items():
        theirs = own.get(name, {"outcome": "not run", "why": "no answer"})
        if theirs["outcome"] == "failed":
            row.update(outcome="fails with fla", why=f"{row['why']} | with fla's functions: {theirs['why']}")
        else:
            row["why"] += f" | with fla's functions: {theirs['outcome']} {theirs['why']}"


def summary(rows):
    counted = collections.Counter(row["outcome"] for row in rows.values())
    return {outcome: counted.get(outcome, 0) for outcome in OUTCOMES}


def reasons(rows, outcome):
    return dict(collections.Counter(row["why"] for row in rows.values() if row["outcome"] == outcome).most_common())


def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def report(rows, installed, files, arguments):
    """What is written; prints a line for each file."""
    of_files = {}
    for name in dict.fromkeys([*(test.partition("::")[0] for test in rows), *files]):
        own = {test: row for test, row in rows.items() if test.partition("::")[0] == name}
        of_files[name] = {**summary(own), "seconds": round(sum(row["seconds"] for row in own.values()), 1)}
        print(name, of_files[name])
    return {
        "fla": {"commit": arguments.commit or commit_of(arguments.fla)}, "device": arguments.device, "limit_s": arguments.limit,
        "versions": {"fastweight": fastweight.__version__, "python": sys.version.split()[0],
                     **{name: version(name) for name in ("torch", "triton", "transformers", "pytest")}},
        "installed": installed, "total": summary(rows), "files": of_files,
        "failed": {name: row["why"] for name, row in rows.items() if row["outcome"] == "failed"},
        "reference_off": {name: row["why"] for name, row in rows.items() if row["outcome"] == "reference off"},
        "fails_with_fla": {name: row["why"] for name, row in rows.items() if row["outcome"] == "fails with fla"},
        "skipped": reasons(rows, "skipped"), "not_run": reasons(rows, "not run"),
        "tests_not_run": {name: row["why"] for name, row in rows.items() if row["outcome"] == "not run"},
        "passed": {name: row["seconds"] for name, row in rows.items() if row["outcome"] == "passed"},
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fla", required=True, type=lambda text: Path(text).resolve(), help="the checkout")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--limit", type=int, default=60, help="seconds a test may take (60)")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no further test is begun")
    parser.add_argument("--files", nargs="*", default=None, help=f"files under the checkout (all {len(FILES)} of fastweight's rows)")
    parser.add_argument("--only", default="", help="pytest's -k")
    parser.add_argument("--workers", type=int, default=0, help="processes at a time, through pytest-xdist")
    parser.add_argument("--commit", default=None, help="what to write as the checkout's commit when it is no git work tree")
    parser.add_argument("--resume", action="store_true",
                        help="keep the answers in <output>.rows, but for failures and for those over a smaller limit")
    parser.add_argument("--output", type=Path, default=None, help="bench/results/fla_suite_<device>.json")
    arguments = parser.parse_args()
    files = arguments.files or [name for name in FILES if (arguments.fla / name).exists()]
    if not (arguments.fla / "fla").is_dir() or not files:
        parser.error(f"--fla is {arguments.fla}, which is no checkout of fla")
    paths = [HERE, arguments.fla, Path(fastweight.__file__).resolve().parents[1]]
    environment = {**os.environ, "FLA_SUITE_DEVICE": arguments.device, "FLA_SUITE_LIMIT": str(arguments.limit),
                   "FLA_SUITE_BUDGET": str(arguments.budget), "TRITON_F32_DEFAULT": "ieee",
                   "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])}
    output = (arguments.output or HERE / "results" / f"fla_suite_{arguments.device}.json").resolve()
    lines = output.with_suffix(".rows")
    if not arguments.resume:
        lines.unlink(missing_ok=True)
    own_lines = output.with_suffix(".own.rows")
    if not arguments.resume:
        own_lines.unlink(missing_ok=True)
    workers = ["-n", str(arguments.workers)] if arguments.workers else []
    rows, installed = run(arguments.fla, files, [*workers, *(["-k", arguments.only] if arguments.only else [])], environment, lines)
    if arguments.device == "cuda":
        again_with_fla(rows, arguments.fla, workers, environment, own_lines)
    result = report(rows, installed, files, arguments)
    total = result["total"]
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(total, "written to", output)
    for name, why in list(result["failed"].items())[:20]:
        print("failed:", name, why[:160])
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
