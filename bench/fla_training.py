#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains examples/fla_byte_model.py, a script written for fla, twice from the same start on the same data: with fastweight under
fla's names, and with the same names in plain torch (bench/plain_fla.py).

    python bench/fla_training.py [FILE] [--steps 200]

The steps of both alternate in one process. A third run, plain torch again from weights that differ in the last bit, shows what
rounding alone does to the curve. Writes bench/results/fla_training.json and docs/img/fla_training.svg.
"""
import argparse
import importlib.util
import json
import statistics
import sys
import time
import types

import machine
import plain_fla

import fastweight
import fastweight.fla
import torch

SCRIPT = machine.ROOT / "examples/fla_byte_model.py"
ROUND_OFF = 2.0 ** -23


def load(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_plain():
    """The script with plain_fla under fla's names; afterwards those names are what they were."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "fla"}
    ours, fastweight.fla.install = fastweight.fla.install, lambda: None
    for name in ("fla", "fla.modules", "fla.ops", "fla.ops.gated_delta_rule"):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update({key: x for key, x in vars(plain_fla).items() if not key.startswith("_")})
    try:
        return load("plain_script")
    finally:
        fastweight.fla.install = ours
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            del sys.modules[name]
        sys.modules.update(kept)


class Run:
    def __init__(self, script, start):
        self.script, self.model = script, script.Model()
        self.model.load_state_dict(start)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.losses, self.seconds = [], []

    def step(self, ids):
        start = time.perf_counter()
        self.losses.append(self.script.train_step(self.model, self.optimizer, ids))
        self.seconds.append(time.perf_counter() - start)


def plot(runs, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    matplotlib.rcParams.update({"svg.hashsalt": "fastweight", "font.size": 9})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, style in (("plain", "-"), ("fastweight", "--")):
        left.plot(runs[name].losses, style, label=f"{name}: {statistics.median(runs[name].seconds) * 1e3:.0f} ms a step")
    left.set(xlabel="step", ylabel="bits a byte", title="training loss")
    left.legend()
    for name, label in (("fastweight", "fastweight - plain"), ("plain, last bit changed", "plain from other last bits - plain")):
        right.semilogy([max(abs(a - b), 1e-8) for a, b in zip(runs[name].losses, runs["plain"].losses)], label=label, linewidth=1)
    right.set(xlabel="step", ylabel="bits a byte", title="distance of the curves")
    right.legend()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("file", nargs="?", default=machine.ROOT / "docs/math.md", help="a text (docs/math.md)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plain, ours = load_plain(), load("our_script")
    torch.manual_seed(0)
    start = plain.Model().state_dict()
    generator = torch.Generator().manual_seed(1)
    nudged = {name: x * (1 + ROUND_OFF * torch.randint(-1, 2, x.shape, generator=generator)) for name, x in start.items()}
    runs = {"plain": Run(plain, start), "fastweight": Run(ours, start), "plain, last bit changed": Run(plain, nudged)}
    data = ours.read(options.file)
    for step in range(options.steps):
        ids = ours.piece(data, step, options.batch, options.tokens)
        for run in runs.values():
            run.step(ids)
        if step % 20 == 0 or step == options.steps - 1:
            print(f"step {step:4d}  " + "  ".join(f"{name} {run.losses[-1]:.4f}" for name, run in runs.items()), flush=True)
    distance = {name: max(abs(a - b) for a, b in zip(run.losses, runs["plain"].losses)) for name, run in runs.items() if name != "plain"}
    found = {"machine": machine.machine_class(), "commit": machine.commit(),
             "versions": {"fastweight": fastweight.__version__, "torch": torch.__version__},
             "steps": options.steps, "batch": options.batch, "tokens": options.tokens, "threads": options.threads,
             "parameters": sum(p.numel() for p in runs["plain"].model.parameters()),
             "ms_a_step": {name: round(statistics.median(run.seconds) * 1e3, 1) for name, run in runs.items()},
             "largest_distance_from_plain": {name: float(f"{x:.3g}") for name, x in distance.items()},
             "last_ten_losses": {name: round(statistics.mean(run.losses[-10:]), 4) for name, run in runs.items()},
             "losses": {name: [round(x, 5) for x in run.losses] for name, run in runs.items()}}
    print(json.dumps({key: x for key, x in found.items() if key != "losses"}, indent=1))
    # Within noise: no farther from plain torch than three times what the last bit of the starting weights does.
    if distance["fastweight"] > 3 * distance["plain, last bit changed"] + 1e-5:
        raise SystemExit("the curves are farther apart than rounding explains")
    if not options.no_write:
        (machine.ROOT / "bench/results/fla_training.json").write_text(json.dumps(found, indent=1) + "\n")
        plot(runs, machine.ROOT / "docs/img/fla_training.svg")


if __name__ == "__main__":
    main()
