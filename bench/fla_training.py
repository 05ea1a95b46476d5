#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a model written for fla twice from the same start on the same data and compares losses and times.

    python bench/fla_training.py [FILE] [--steps 200]
    python bench/fla_training.py [FILE] --device cuda --fla PATH [--layers delta_net]      # a checkout of flash-linear-attention; triton

On the CPU: examples/fla_byte_model.py with fastweight under fla's names, and with the same names in plain torch (bench/plain_fla.py),
their steps in turn. A third run, plain torch again from weights that differ in the last bit, shows what rounding alone does to the
curve. On CUDA: fla's own model of such layers with float32 weights under autocast to bfloat16, first on fla's kernels, a second time
from weights that differ in the last bit of bfloat16, then after fastweight.fla.install().
Writes bench/results/fla_training.json and docs/img/fla_training.svg; on CUDA fla_training_cuda.json and fla_training_cuda.svg.
"""
import argparse
import importlib.util
import json
import math
import os
import statistics
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import machine
import plain_fla

import fastweight
import fastweight.fla
import torch

SCRIPT = machine.ROOT / "examples/fla_byte_model.py"
ROUND_OFF = {"cpu": 2.0 ** -23, "cuda": 2.0 ** -8}
SIZES = {"cpu": {"batch": 8, "tokens": 128}, "cuda": {"batch": 8, "tokens": 1024}}
WIDTH, HEADS, DEPTH = 512, 4, 4  # on CUDA: K = V = 128
OF_LAYERS = {"delta_net": ("DeltaNetConfig", {"num_heads": HEADS}), "kda": ("KDAConfig", {"num_heads": HEADS, "head_dim": WIDTH // HEADS})}


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


def model_of_fla(layers):
    """fla's model of bytes with DEPTH such layers, of what fla's names hold now; its loss is the mean of the next byte's."""
    import fla.models
    from transformers import AutoModelForCausalLM
    config, more = OF_LAYERS[layers]
    return AutoModelForCausalLM.from_config(getattr(fla.models, config)(
        vocab_size=256, hidden_size=WIDTH, num_hidden_layers=DEPTH, **more)).to("cuda", torch.float32).train()


def compile_side_by_side(threads):
    """Triton's autotuner compiles the variants of a kernel at the same time, not one after the other; what it then measures is as before."""
    from triton.runtime._async_compile import AsyncCompileMode
    from triton.runtime.autotuner import Autotuner
    prune = Autotuner.prune_configs

    def pruned(self, kwargs):
        found, arguments = prune(self, kwargs), tuple(self.nargs.values())
        with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool, ignore_errors=True):
            for config in found:
                self.fn.run(*arguments, **{**kwargs, **config.all_kwargs(), "warmup": True})
        return found

    Autotuner.prune_configs = pruned


def cuda_step(model, optimizer, ids):
    """-> the loss in bits a byte."""
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(ids, labels=ids).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item() / math.log(2)


class Run:
    def __init__(self, model, start, train_step, rate):
        self.model, self.train_step = model, train_step
        self.model.load_state_dict(start)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)
        self.losses, self.seconds = [], []

    def step(self, ids):
        start = time.perf_counter()
        self.losses.append(self.train_step(self.model, self.optimizer, ids))
        self.seconds.append(time.perf_counter() - start)

    def say(self, name):
        print(f"{name}: step {len(self.losses) - 1}, {self.losses[-1]:.4f} bits a byte", flush=True)


def nudged(start, size):
    """The weights that differ in the last bit, up, down or not at all."""
    generator = torch.Generator().manual_seed(1)
    return {name: x * (1 + size * torch.randint(-1, 2, x.shape, generator=generator).to(x.device)) if x.is_floating_point() else x
            for name, x in start.items()}


def on_cpu(data, options):
    """{name: Run}, the first the one that others are compared with, the last the noise."""
    plain, ours = load_plain(), load("our_script")
    torch.manual_seed(0)
    start = plain.Model().state_dict()
    runs = {"plain": Run(plain.Model(), start, plain.train_step, 3e-3), "fastweight": Run(ours.Model(), start, ours.train_step, 3e-3),
            "plain, last bit changed": Run(plain.Model(), nudged(start, ROUND_OFF["cpu"]), plain.train_step, 3e-3)}
    for step in range(options.steps):
        ids = piece(data, step, options.batch, options.tokens + 1)
        for name, run in runs.items():
            run.step(ids)
            if step % 20 == 0 or step == options.steps - 1:
                run.say(name)
    return runs


def on_cuda(data, options):
    """The same; the runs follow each other, since install() is for the whole process."""
    sys.path.insert(0, options.fla)
    compile_side_by_side(os.cpu_count())
    torch.manual_seed(0)
    # every side starts from what bfloat16 can hold
    start = {name: x.bfloat16().float() if x.is_floating_point() else x for name, x in model_of_fla(options.layers).state_dict().items()}
    runs = {}
    for name in ("fla", "fla, last bit changed", "fastweight"):
        if name == "fastweight":
            print(str(fastweight.fla.install()).splitlines()[0])
        runs[name] = Run(model_of_fla(options.layers), nudged(start, ROUND_OFF["cuda"]) if "bit" in name else start, cuda_step, 1e-3)
        for step in range(options.steps):
            runs[name].step(piece(data, step, options.batch, options.tokens).cuda())
            if step % 20 == 0 or step == options.steps - 1:
                runs[name].say(name)
    return {name: runs[name] for name in ("fla", "fastweight", "fla, last bit changed")}


def piece(data, step, batch, count):
    """Random pieces of the text, [batch, count]; a step always has the same."""
    starts = torch.randint(len(data) - count + 1, (batch,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[s:s + count] for s in starts.tolist()])


def plot(runs, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    matplotlib.rcParams.update({"svg.hashsalt": "fastweight", "font.size": 9})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    first, ours, noise = runs
    for name, style in ((first, "-"), (ours, "--")):
        left.plot(runs[name].losses, style, label=f"{name}: {statistics.median(runs[name].seconds) * 1e3:.0f} ms a step")
    left.set(xlabel="step", ylabel="bits a byte", title="training loss")
    left.legend()
    for name, label in ((ours, f"{ours} - {first}"), (noise, f"{first} from other last bits - {first}")):
        right.semilogy([max(abs(a - b), 1e-8) for a, b in zip(runs[name].losses, runs[first].losses)], label=label, linewidth=1)
    right.set(xlabel="step", ylabel="bits a byte", title="distance of the curves")
    right.legend()
    figure.savefig(path, metadata={"Date": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("file", nargs="?", default=machine.ROOT / "docs/math.md", help="a text (docs/math.md)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--fla", help="with cuda: the checkout")
    parser.add_argument("--layers", choices=tuple(OF_LAYERS), default="delta_net", help="with cuda: of which kind (delta_net)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    is_cuda = options.device == "cuda"
    options.batch, options.tokens = options.batch or SIZES[options.device]["batch"], options.tokens or SIZES[options.device]["tokens"]
    if is_cuda and (not options.fla or not torch.cuda.is_available()):
        parser.error("--device cuda needs --fla and a torch with a CUDA device")
    torch.set_num_threads(options.threads)
    data = torch.frombuffer(bytearray(Path(options.file).read_bytes()), dtype=torch.uint8).long()
    runs = (on_cuda if is_cuda else on_cpu)(data, options)
    first, ours, noise = runs
    distance = {name: max(abs(a - b) for a, b in zip(run.losses, runs[first].losses)) for name, run in runs.items() if name != first}
    found = {"machine": torch.cuda.get_device_name() if is_cuda else machine.machine_class(), "commit": machine.commit(),
             "versions": {"fastweight": fastweight.__version__, "torch": torch.__version__}, "layers": options.layers if is_cuda else None,
             "steps": options.steps, "batch": options.batch, "tokens": options.tokens, "threads": options.threads,
             "parameters": sum(p.numel() for p in runs[first].model.parameters()),
             "ms_a_step": {name: round(statistics.median(run.seconds) * 1e3, 1) for name, run in runs.items()},
             f"largest_distance_from_{first}": {name: float(f"{x:.3g}") for name, x in distance.items()},
             "last_ten_losses": {name: round(statistics.mean(run.losses[-10:]), 4) for name, run in runs.items()},
             "losses": {name: [round(x, 5) for x in run.losses] for name, run in runs.items()}}
    print(json.dumps({key: x for key, x in found.items() if key != "losses"}, indent=1))
    name = "fla_training_cuda" if is_cuda else "fla_training"
    if not options.no_write:
        (machine.ROOT / f"bench/results/{name}.json").write_text(json.dumps(found, indent=1) + "\n")
        plot(runs, machine.ROOT / f"docs/img/{name}.svg")
    # Within noise: no farther from the first than three times what the last bit of the starting weights does.
    if distance[ours] > 3 * distance[noise] + 1e-5:
        raise SystemExit("the curves are farther apart than rounding explains")


if __name__ == "__main__":
    main()
