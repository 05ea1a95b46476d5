# SPDX-License-Identifier: Apache-2.0
"""Host time of a step on CUDA tensors, part by part: one token, one head. Prints microseconds of the calling thread, the best of
many rounds; the device is idle before each round and its queue never full."""
import argparse
import json
from pathlib import Path

import torch
from gpu_timer import host_us

import fastweight
from fastweight import ops


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=64, help="K = V")
    parser.add_argument("--out", help="file of results")
    options = parser.parse_args()
    K = options.size

    def operands(device, B=1):
        q, k, v = torch.randn(3, B, 1, 1, K, device=device).unbind(0)
        g, beta = -torch.rand(B, 1, 1, device=device), torch.rand(B, 1, 1, device=device)
        return [q, k / 8, v, g, beta], torch.zeros(B, 1, K, K, device=device)

    x, state = operands("cuda")
    none, no_state = operands("cuda", B=0)
    cpu, cpu_state = operands("cpu")
    out = torch.empty_like(x[2])
    step = ops.gated_delta_rule_step
    plan, plan_out = ops.plan(step, *x, state=state), ops.plan(step, *x, state=state, out=out)
    expected = step(*x, state=state.clone())
    assert torch.equal(plan(*x, state=state.clone()), expected)
    plan(*x, state=state)
    plan_none = ops.plan(step, *none, state=no_state)
    opaque = ops.state_import(state)
    fastweight.set_num_threads(1)
    plan_cpu = ops.plan(step, *cpu, state=cpu_state)
    parts = {
        "step through a plan": lambda: plan(*x),
        "... that has `out`": lambda: plan_out(*x),
        "... of an empty batch, nothing is launched": lambda: plan_none(*none),
        "... on the CPU": lambda: plan_cpu(*cpu),
        "step": lambda: step(*x, state=state),
        "step on an opaque state": lambda: step(*x, state=opaque, state_layout="opaque"),
        "torch.empty_like": lambda: torch.empty_like(x[2]),
        "torch.add with out": lambda: torch.add(x[0], x[1], out=out),
        "is_cuda and get_device of a tensor": lambda: (x[0].is_cuda, x[0].get_device()),
        "current device exchanged, stream asked": lambda: (torch._C._cuda_exchangeDevice(0), torch._C._cuda_getCurrentRawStream(0)),
        "explain of a plan": plan.explain,
    }
    print(f"gated_delta_rule, float32, T = 1, H = 1, K = V = {K}, {torch.cuda.get_device_name()}: us")
    found = {}
    for name, call in parts.items():
        call()
        found[name] = round(host_us(call, calls=200, rounds=20), 2)
        print(f"{found[name]:8.2f}  {name}", flush=True)
    if options.out:
        Path(options.out).write_text(json.dumps({"machine": torch.cuda.get_device_name(), "size": K, "host_us": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
