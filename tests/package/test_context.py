# SPDX-License-Identifier: Apache-2.0
"""Threads: the default context and its rule, torch's threads beside ours, forks, the GIL."""
import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from package_calls import environment, fastweight, needs_torch, numpy_only, ops

pytestmark = numpy_only

F = np.float32


def run(program, **more):
    """The output of a program in a new process."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300, check=False,
                          env=environment(**more))
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def problem(T=512, H=8, K=64):
    rng = np.random.default_rng(1)
    return rng.standard_normal((1, T, H, K)).astype(F), np.full((1, T, H), -0.1, F), np.full((1, T, H), 0.5, F)


def test_results_do_not_depend_on_threads():
    q, g, beta = problem(T=130)
    expected = ops.gated_delta_rule(q, q / 8, q, g, beta, context=fastweight.Context(1))[0]
    for threads in (2, 3, 5):
        context = fastweight.Context(threads)
        assert context.threads == threads
        assert ops.gated_delta_rule(q, q / 8, q, g, beta, context=context)[0].tobytes() == expected.tobytes()


def test_a_context_tells_what_it_is():
    context = fastweight.Context(threads=1, force_impl="reference_recurrent")
    assert repr(context) == 'Context(threads=1, force_impl="reference_recurrent")'
    assert context.cpu_level in ("baseline", "avx2", "avx512")
    with pytest.raises(ValueError, match="^Context: threads is -1, allowed 1 and more, or 0 for the default$"):
        fastweight.Context(-1)
    with pytest.raises(ValueError, match="nothing_of_this_name"):
        fastweight.Context(1, force_impl="nothing_of_this_name")
    with pytest.raises(ValueError, match="^set_num_threads: threads is -2"):
        fastweight.set_num_threads(-2)


def test_the_default_context_is_one_and_follows_set_num_threads():
    fastweight.set_num_threads(3)
    try:
        first = fastweight.default_context()
        assert first.threads == 3 and fastweight.default_context() is first
        fastweight.set_num_threads(2)
        assert fastweight.default_context().threads == 2 and first.threads == 3
    finally:
        fastweight.set_num_threads(0)


def test_the_environment_says_the_threads():
    program = "import fastweight; print(fastweight.default_context().threads)"
    assert run(program, FW_NUM_THREADS="3") == ["3"]
    assert run("import fastweight; fastweight.set_num_threads(2); print(fastweight.default_context().threads)", FW_NUM_THREADS="3") == ["2"]


@needs_torch
def test_the_default_context_has_as_many_threads_as_torch():
    program = """
        import fastweight, torch
        torch.set_num_threads(3)
        print(fastweight.default_context().threads)
        torch.set_num_threads(1)
        print(fastweight.default_context().threads)
        fastweight.set_num_threads(2)
        print(fastweight.default_context().threads)
    """
    assert run(program) == ["3", "1", "2"]
    assert run(program, FW_NUM_THREADS="4") == ["4", "4", "2"]


@needs_torch
def test_the_package_does_not_import_torch():
    assert run("import fastweight, sys; print('torch' in sys.modules, 'numpy' in sys.modules)") == ["False", "False"]
    assert run("""
        import fastweight, sys, numpy as np
        q = np.zeros((1, 2, 1, 4), np.float32)
        print(type(fastweight.ops.retention(q, q, q)[0]).__name__, 'torch' in sys.modules)
        import torch
        q = torch.from_numpy(q)
        print(type(fastweight.ops.retention(q, q, q)[0]).__name__)
    """) == ["ndarray", "False", "Tensor"]


def test_threads_sleep_between_calls():
    """A pool that spun would use its cores for the whole pause; ours may use a tenth of one."""
    q, g, beta = problem()
    context = fastweight.Context(4)
    ops.gated_delta_rule(q, q / 8, q, g, beta, context=context)
    time.sleep(0.05)
    before, start = time.process_time(), time.monotonic()
    time.sleep(0.5)
    used, passed = time.process_time() - before, time.monotonic() - start
    assert used < 0.1 * passed, f"{used:.3f} s of processor time in a pause of {passed:.3f} s"


@needs_torch
def test_torch_and_we_take_turns():
    """Matrix products of torch between our calls, both with threads: the same bits as alone, and no standstill."""
    program = """
        import time, numpy as np, torch, fastweight
        torch.set_num_threads(2)
        q = torch.randn(1, 256, 8, 64, generator=torch.Generator().manual_seed(1))
        a = torch.randn(256, 256)
        first = fastweight.ops.retention(q, q, q)[0]
        same = True
        for _ in range(20):
            product = a @ a
            same = same and torch.equal(fastweight.ops.retention(q, q, q)[0], first)
        print(same, fastweight.default_context().threads)
    """
    assert run(program) == ["True", "2"]


def test_the_child_of_a_fork_computes():
    program = """
        import os, numpy as np, fastweight
        q = np.random.default_rng(1).standard_normal((1, 300, 8, 64)).astype(np.float32)
        explicit = fastweight.Context(3)
        fastweight.set_num_threads(4)
        plan = fastweight.ops.plan(fastweight.ops.retention, q, q, q)
        def all_ways():
            return (fastweight.ops.retention(q, q, q)[0].tobytes() + fastweight.ops.retention(q, q, q, context=explicit)[0].tobytes()
                    + plan(q, q, q)[0].tobytes())
        expected = all_ways()
        child = os.fork()
        if child == 0:
            good = all_ways() == expected and explicit.threads == 3
            good = good and len(os.listdir('/proc/self/task')) >= 6  # this one, 2 and 3 of the new contexts
            del explicit, plan  # their threads end
            fastweight.set_num_threads(1)
            fastweight.ops.retention(q, q, q)
            os._exit(0 if good and len(os.listdir('/proc/self/task')) == 1 else 1)
        print(os.waitpid(child, 0)[1], all_ways() == expected)
    """
    assert run(program) == ["0", "True"]


def test_the_gil_is_released():
    """While a thread computes, this one goes on: without that it would not wake once between the call's begin and end."""
    q, g, beta = problem(T=8192)
    context = fastweight.Context(1)
    moments = {}

    def work():
        moments["begin"] = time.monotonic()
        ops.gated_delta_rule(q, q, q, g, beta, context=context, form="recurrent")
        moments["end"] = time.monotonic()

    thread = threading.Thread(target=work)
    thread.start()
    awake = []
    while thread.is_alive():
        awake.append(time.monotonic())
        time.sleep(0.001)
    thread.join()
    length = moments["end"] - moments["begin"]
    inside = [x for x in awake if moments["begin"] + 0.1 * length < x < moments["end"] - 0.1 * length]
    assert len(inside) >= 3, f"{len(inside)} of {len(awake)} moments inside a call of {length:.3f} s"


def test_one_context_from_several_threads():
    q, g, beta = problem(T=100)
    context = fastweight.Context(2)
    expected = ops.gated_delta_rule(q, q / 8, q, g, beta, context=context)[0].tobytes()
    found = []

    def work():
        for _ in range(4):
            found.append(ops.gated_delta_rule(q, q / 8, q, g, beta, context=context)[0].tobytes() == expected)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 16


def test_a_forced_implementation_runs():
    q, g, beta = problem(T=5, H=1, K=4)
    ops.gated_delta_rule(q, q, q, g, beta, context=fastweight.Context(1, force_impl="cpu_baseline_chunk"))
    assert fastweight.last_impl() == "cpu_baseline_chunk"
    found = run("""
        import numpy as np, fastweight
        q = np.zeros((1, 2, 1, 4), np.float32)
        fastweight.ops.retention(q, q, q)
        print(fastweight.last_impl())
    """, FW_IMPL="reference_recurrent")
    assert found == ["reference_recurrent"] and os.environ.get("FW_IMPL") is None
