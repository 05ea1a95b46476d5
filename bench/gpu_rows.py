# SPDX-License-Identifier: Apache-2.0
"""Times of the operators on one CUDA device, through the package, each only after its results agreed with fp64.

    python bench/gpu_rows.py --rows gated_delta_rule,kda --budget 300 --peers peers.json --out rows.json

A row is an operator, a shape, a gate strength and a direction. Before it is timed, the same call on the same inputs is compared
with the fp64 reference on the CPU: its first tokens in two groups of heads, and a whole small sequence of the same kind. `ms` is
the median of replays of a CUDA graph with the second-level cache cleared before each; `eager_ms` the same of plain calls.
Backward is (training forward + backward) minus the forward without gradients. Steps: several in one graph without clearing, time a
step. `floor_ms` is the larger of bytes over the copy rate and FLOPs over the bf16 matrix rate, both measured here.
"""
import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
from gpu_timer import Timer, ceilings, host_us
from machine import commit, versions

import fastweight
import fastweight.torch  # here, not in the first call that has gradients
from fastweight import ops
from fastweight.ops import _build

K = V = 128
WIDE, LONG, BATCH, FEW, SHORT = (1, 8192, 64), (1, 32768, 8), (8, 2048, 16), (1, 8192, 16), (1, 2048, 8)
# operator -> {(B, T, HV): goal of forward and backward in ms}
GOALS = {
    "gated_delta_rule": {WIDE: (0.24, 0.65), LONG: (0.14, 0.36), BATCH: (0.10, 0.30), FEW: (0.08, 0.18), SHORT: (0.035, 0.07)},
    "kda": {WIDE: (0.36, 1.1), LONG: (0.19, 0.60), BATCH: (0.18, 0.58), FEW: (0.10, 0.32)},
    "delta_rule": {WIDE: (0.24, 0.65), LONG: (0.14, 0.36)},
    "gla": {WIDE: (0.28, 0.80), LONG: (0.14, 0.42)},
    "gdn2": {WIDE: (0.42, 1.3), LONG: (0.23, 0.70)},
    "rwkv7": {WIDE: (0.58, 1.7), LONG: (0.34, 1.0)},
    "dplr": {WIDE: (0.58, 1.7), LONG: (0.34, 1.0)},
}
# thousands of FLOPs and bytes a token and head at K = V = 128, 16-bit storage, chunks of 64: (forward, backward)
WORK = {"gated_delta_rule": ((170, 1032), (393, 2448)), "delta_rule": ((170, 1028), (393, 2440)), "kda": ((170, 1282), (393, 2948)),
        "gdn2": ((170, 1540), (393, 3464)), "gla": ((98, 1280), (213, 2816)), "rwkv7": ((268, 1792), (661, 3968)),
        "dplr": ((268, 1792), (661, 3968))}
WIDE_GATES = ("gated_delta_rule", "kda", "gdn2")  # g in float32; the others bring it in 16 bits
PEER_NAMES = {"gdn": "gated_delta_rule", "delta": "delta_rule", "gdn_decode": "gated_delta_rule", "kda_decode": "kda"}
CHECKED_TOKENS = 192
# Norm-relative. Operands are rounded to 8 bits once before both sides; inside, bf16 products of up to 64 terms and a state a chunk:
# other engines are at 0.003 forward and 0.005 backward.
ALLOWED = {"forward": 0.01, "backward": 0.02, "step": 0.01}


def cases(wanted):
    """(name, op, direction, sizes, gate, state dtype) of every row."""
    for op, shapes in GOALS.items():
        gates = ("none",) if op == "delta_rule" else ("own",) if op in ("rwkv7", "dplr") else ("strong", "weak")
        for B, T, HV in shapes:
            for gate in gates:
                for direction in ("forward", "backward"):
                    yield f"{op}/{B}x{T}x{HV}/{gate}/{direction}", op, direction, dict(B=B, T=T, H=HV, HV=HV), gate, None
    for direction in ("forward", "backward"):
        yield f"gated_delta_rule/1x8192x16:64/strong/{direction}", "gated_delta_rule", direction, dict(B=1, T=8192, H=16, HV=64), "strong", None
    for op, tokens in (("gated_delta_rule", (1,)), ("kda", (1, 2, 4, 8, 16)), ("dplr", (1, 2, 4, 8, 16))):
        gate = "own" if op == "dplr" else "strong"
        for T in tokens:
            for B in (1, 32, 64, 256) if T == 1 else (64,):
                for dtype in ("float32", "bfloat16") if T == 1 else ("float32",):
                    yield f"{op}/{B}x{T}x32/{gate}/step/{dtype}", op, "step", dict(B=B, T=T, H=32, HV=32), gate, dtype


def draw(op, B, T, H, HV, gate, dtype=torch.bfloat16):
    """Operands of a call by name."""
    row = _build.ROWS[op]

    def randn(*shape):
        return torch.randn(shape, device="cuda")

    k = torch.nn.functional.normalize(randn(B, T, H, K), dim=-1)
    x = {"q": randn(B, T, H, K).to(dtype), "k": k.to(dtype), "v": randn(B, T, HV, V).to(dtype)}
    if "g" in row.operands:
        logits = randn(B, T, HV, K) if row.gate == "vector" else randn(B, T, HV)
        if gate == "own":
            g = -0.6065 * torch.sigmoid(logits)
        else:
            g = torch.nn.functional.logsigmoid(logits)
            g = g.clamp(min=-5) if gate == "strong" else 0.01 * g
        x["g"] = g if op in WIDE_GATES else g.to(dtype)
    if "beta" in row.operands:
        x["beta"] = torch.sigmoid(randn(B, T, HV)).to(dtype)
    if "a" in row.operands:
        x["a"], x["b"] = (-k).to(dtype), (k * torch.rand_like(k)).to(dtype)
    for name, size in (("erase_gate", (H, K)), ("write_gate", (HV, V))):
        if name in row.operands + row.optional:
            x[name] = torch.sigmoid(randn(B, T, *size)).to(dtype)
    return x


def difference(found, expected):
    """Norm-relative, nan when a value is none."""
    found, expected = found.double().cpu(), expected.double().cpu()
    return ((found - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def part(x, heads, H, tokens):
    """One batch entry's first tokens in one query head and its value heads, as fp64 on the CPU."""
    first, group = heads
    low, high = (first * group, (first + 1) * group) if x.shape[2] != H else (first, first + 1)
    return x[:1, :tokens, low:high].double().cpu()


class Row:
    """The operands of a row and its calls."""

    def __init__(self, op, direction, sizes, gate, state_dtype, context, g_min):
        self.op, self.direction, self.sizes = op, direction, sizes
        self.inputs = draw(op, gate=gate, **sizes)
        self.options = {"context": context} if context is not None else {}
        if g_min is not None and _build.ROWS[op].gate == "vector":
            self.options["g_min"] = g_min
        self.gate = gate
        if direction == "step":
            self.state = 0.1 * torch.randn(sizes["B"], sizes["HV"], K, V, device="cuda")
            self.state = self.state.to(getattr(torch, state_dtype))
            self.function = getattr(ops, op + "_step")
        else:
            self.function = getattr(ops, op)
            self.d_o = torch.randn_like(self.inputs["v"])

    def forward(self):
        with torch.no_grad():
            return self.function(**self.inputs, **self.options)[0]

    def train(self, d_o=None):
        leaves = {name: x.detach().requires_grad_() for name, x in self.inputs.items()}
        o = self.function(**leaves, **self.options)[0]
        return torch.autograd.grad(o, list(leaves.values()), self.d_o if d_o is None else d_o)

    def step(self):
        return self.function(**self.inputs, **self.options, state=self.state)

    def errors(self):
        """The largest difference of what the direction makes from fp64 on the first tokens of two groups of heads."""
        H, HV, T = self.sizes["H"], self.sizes["HV"], self.sizes["T"]
        tokens, found = min(T, CHECKED_TOKENS), []
        if self.direction == "forward":
            results = [self.forward()]
        elif self.direction == "backward":
            d_o = torch.zeros_like(self.d_o)
            d_o[:1, :tokens] = self.d_o[:1, :tokens]
            results = self.train(d_o)
        else:
            kept = self.state.clone()
            results = [self.step()]
        for first in sorted({0, H - 1}):
            heads = (first, HV // H)
            given = {name: part(x, heads, H, tokens) for name, x in self.inputs.items()}
            if self.direction == "step":
                before = kept[:1, first:first + 1].double().cpu()
                o, state = getattr(ops, self.op)(**given, form="recurrent", initial_state=before, output_final_state=True)[:2]
                found += [difference(part(results[0], heads, H, tokens), o), difference(self.state[:1, first:first + 1], state)]
                continue
            leaves = {name: x.requires_grad_() for name, x in given.items()}
            o = getattr(ops, self.op)(**leaves)[0]
            if self.direction == "forward":
                found.append(difference(part(results[0], heads, H, tokens), o.detach()))
                continue
            expected = torch.autograd.grad(o, list(leaves.values()), part(self.d_o, heads, H, tokens))
            found += [difference(part(x, heads, H, tokens), y) for x, y in zip(results, expected, strict=True)]
        return max(found, key=lambda x: math.inf if math.isnan(x) else x)


def floor_ms(op, direction, sizes, state_bytes, rates):
    tokens = sizes["B"] * sizes["T"] * sizes["HV"]
    if direction == "step":
        return 2 * sizes["B"] * sizes["HV"] * K * V * state_bytes / rates["copy_gbs"] / 1e6
    kflops, size = WORK[op][direction == "backward"]
    return tokens * max(kflops / rates["matrix_gflops"], size / rates["copy_gbs"] / 1e3) / 1e3


def peers_of(peers, op, direction, sizes, gate, state_dtype):
    """{name: ms} of the best row of each other engine that ran the same problem from a graph."""
    gates = {"strong": "std", "weak": "weak", "own": "std", "none": "std"}
    found = {}
    for x in peers:
        is_decode = x["op"].endswith("_decode")
        if PEER_NAMES.get(x["op"], x["op"]) != ("rwkv7" if op == "dplr" else op) or is_decode != (direction == "step") or x["timing"] != "graph":
            continue
        if (x["B"], x["T"], x["H"], x["HV"]) != tuple(sizes[y] for y in ("B", "T", "H", "HV")) or x["gate"] != gates[gate]:
            continue
        if is_decode and {"float32": "fp32", "bfloat16": "bf16"}[state_dtype] + " state" not in x["dtype"]:
            continue
        ms = x["bwd_ms" if direction == "backward" else "fwd_ms"]
        if ms is not None:
            found[x["peer"]] = min(ms, found.get(x["peer"], math.inf))
    return found


def measure(case, args, timer, rates, checked):
    name, op, direction, sizes, gate, state_dtype = case
    torch.manual_seed(0)
    context = fastweight.Context(1, force_impl=args.impl) if args.impl else None
    start = time.perf_counter()
    row = Row(op, direction, sizes, gate, state_dtype, context, None if args.no_g_min else -5.0)
    call = {"forward": row.forward, "backward": row.train, "step": row.step}[direction]
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    first_call = time.perf_counter() - begin
    result = {"name": name, "op": op, "direction": direction, "gate": gate, "dtype": "bf16", **sizes, "K": K, "V": V,
              "first_call_s": round(first_call, 4)}
    if state_dtype:
        result["state"] = state_dtype
    errors = [row.errors()]
    small = (op, direction, gate, state_dtype)
    if direction != "step" and small not in checked:
        checked[small] = Row(op, direction, dict(B=1, T=CHECKED_TOKENS - 1, H=2, HV=2), gate, None, context, -5.0).errors()
    errors.append(checked.get(small, 0.0))
    row.step() if direction == "step" else row.forward()  # a backward runs in a thread of torch's, which has a last_impl of its own
    result["impl"] = fastweight.last_impl()
    result["error"] = float(f"{max(errors, key=lambda x: math.inf if math.isnan(x) else x):.3g}")
    if not result["error"] <= ALLOWED[direction]:
        return {**result, "not_timed": f"error {result['error']}, allowed {ALLOWED[direction]}"}
    if direction == "step":
        steps = 5 if sizes["B"] == 256 else 20
        result["ms"] = timer.graph(lambda: [row.step() for _ in range(steps)], clears=False) / steps
        if sizes["B"] == 1:
            names = ("q", "k", "v") + _build.ROWS[op].operands
            plan = ops.plan(row.function, *(row.inputs[x] for x in names), state=row.state, **row.options,
                            **{x: y for x, y in row.inputs.items() if x not in names})
            tensors = [row.inputs[x] for x in names]
            result["plan_host_us"] = round(host_us(lambda: plan(*tensors)), 2)
            result["call_host_us"] = round(host_us(row.step), 2)
    elif direction == "forward":
        result["ms"], result["eager_ms"] = timer.graph(row.forward), timer.eager(row.forward)
    else:
        result["ms"] = timer.graph(row.train) - timer.graph(row.forward)
        result["eager_ms"] = timer.eager(row.train) - timer.eager(row.forward)
    state_bytes = 4 if state_dtype == "float32" else 2
    result["floor_ms"] = floor_ms(op, direction, sizes, state_bytes, rates)
    result["share_of_floor"] = round(result["floor_ms"] / result["ms"], 3)
    if direction == "step":
        result["state_gbs"] = round(2 * sizes["B"] * sizes["HV"] * K * V * state_bytes / result["ms"] / 1e6, 1)
    elif sizes["H"] == sizes["HV"]:
        result["goal_ms"] = GOALS[op][sizes["B"], sizes["T"], sizes["HV"]][direction == "backward"]
    result["peers"] = peers_of(args.peer_rows, op, direction, sizes, gate, state_dtype)
    for key in ("ms", "eager_ms", "floor_ms"):
        if key in result:
            result[key] = float(f"{result[key]:.4g}")
    return {**result, "row_s": round(time.perf_counter() - start, 2)}


def line_of(x):
    if "ms" not in x:
        return f"{x['name']:<48} {x.get('impl', ''):<14} not timed: {x.get('not_timed')}"
    best = min(x["peers"].items(), key=lambda y: y[1], default=None)
    return (f"{x['name']:<48} {x['impl']:<14} {x['ms']:9.4f} ms, floor {x['floor_ms']:.4f}, error {x['error']:.2g}" +
            (f", goal {x['goal_ms']}" if "goal_ms" in x else "") + (f", {best[0]} {best[1]}" if best else "") +
            (f", host {x['plan_host_us']} us a plan, {x['call_host_us']} a call" if "plan_host_us" in x else ""))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="comma-separated parts of row names (operator/BxTxHV/gate/direction); all without it")
    parser.add_argument("--impl", default="", help="an implementation by name; without it the first that accepts")
    parser.add_argument("--budget", type=float, default=600, help="seconds; rows that would start later are not run")
    parser.add_argument("--row-seconds", type=float, default=0.3, help="replays of a row end after so many seconds")
    parser.add_argument("--peers", help="file of other engines' times on such a device, a list of rows")
    parser.add_argument("--no-g-min", action="store_true", help="do not declare g >= -5 for vector gates")
    parser.add_argument("--out", help="file of results")
    args = parser.parse_args()
    start = time.perf_counter()
    if not torch.cuda.is_available():
        print("not run: torch has no CUDA device here", file=sys.stderr)
        return 1
    args.peer_rows = json.loads(Path(args.peers).read_text()) if args.peers else []
    wanted = [x for x in args.rows.split(",") if x]
    rates = ceilings()
    answer = {"machine": torch.cuda.get_device_name(), "commit": commit(), "versions": versions(torch=torch.__version__, cuda=torch.version.cuda,
              fastweight=fastweight.__version__), "ceilings": rates, "g_min": None if args.no_g_min else -5.0, "rows": []}
    print(f"{answer['machine']}: copy {rates['copy_gbs']} GB/s, bf16 matrix {rates['matrix_gflops']} GFLOP/s", flush=True)
    timer, checked = Timer(args.row_seconds), {}
    for case in cases(wanted):
        if wanted and not any(x in case[0] for x in wanted):
            continue
        if time.perf_counter() - start > args.budget:
            result = {"name": case[0], "not_timed": "the budget was used up"}
        else:
            try:
                result = measure(case, args, timer, rates, checked)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                result = {"name": case[0], "not_timed": f"{type(error).__name__}: {error}"}
        torch.cuda.empty_cache()
        answer["rows"].append(result)
        print(line_of(result), flush=True)
        if args.out:
            Path(args.out).write_text(json.dumps(answer, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
