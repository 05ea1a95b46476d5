#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""transformers' Qwen3-Next on the CPU, stock and with fastweight.hf.enable(): what its linear layers take.

A random model of four layers (three linear, one softmax) with the head sizes of the released ones. Stock and ours alternate in
one process: the whole prompt, then blocks of single tokens after it, each with its own cache; nothing is written unless they agree.
Two times a linear layer: `layer`, its forward, and `operators`, that minus its projections (nn.Linear), which both share.
Writes bench/results/hf_qwen3_next.json.
"""
import argparse
import functools
import json
import os
import platform
import statistics
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's idle threads sleep: on a shared machine spinning ones slow both sides

import machine  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

import fastweight  # noqa: E402
from fastweight import hf  # noqa: E402

SIZES = {"num_hidden_layers": 4, "hidden_size": 512, "vocab_size": 1024, "intermediate_size": 512, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
         "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "mlp_only_layers": [0, 1, 2, 3], "max_position_embeddings": 4096}
PAGE = machine.ROOT / "docs/coming_from_transformers.md"
AGREE = 1e-5  # largest difference of the logits over the largest logit, float32
STOCK, OURS = "stock", "fastweight"
BLOCK = 8  # tokens of one side before the other's turn; the first of a block is not counted
GOALS = {"prefill": 4.0, "decode": 6.0}  # stock operators over ours


class Clock:
    """Seconds in the linear layers and in the projections inside them: forward of those modules, looked up at every call."""

    def __init__(self, model):
        self.seconds = {"layer": 0.0, "projections": 0.0}
        for module in model.modules():
            if type(module).__name__ == "Qwen3NextGatedDeltaNet":
                self.watch(module, "layer")
                for part in module.children():
                    if isinstance(part, torch.nn.Linear):
                        self.watch(part, "projections")

    def watch(self, module, name):
        seconds = self.seconds

        def forward(*args, **kwargs):
            start = time.perf_counter()
            result = type(module).forward(module, *args, **kwargs)
            seconds[name] += time.perf_counter() - start
            return result

        module.forward = forward

    def of(self, call):
        """Milliseconds of a call: {"layer", "operators"}; and what it returned."""
        self.seconds.update(layer=0.0, projections=0.0)
        result = call()
        layer, projections = self.seconds["layer"], self.seconds["projections"]
        return {"layer": 1e3 * layer, "operators": 1e3 * (layer - projections)}, result


def random_model():
    torch.manual_seed(0)
    model = transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**SIZES)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.uniform_(-4.0, 1.0)
        elif name.endswith("dt_bias"):
            parameter.normal_()
    return model


def distance(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


def measure(model, clock, tokens, prompt, rounds):
    """{(direction, part): {side: [ms]}} and the largest distance of the logits."""
    times = {(direction, part): {STOCK: [], OURS: []} for direction in GOALS for part in ("operators", "layer")}
    results, logits = {}, {}

    def run(side, direction, calls, n_uncounted):
        """The calls one after the other on one side; the times of all but the first ones."""
        enabled = hf.enable("qwen3_next") if side == OURS else None
        logits[side] = []
        for index, arguments in enumerate(calls):
            milliseconds, results[side] = clock.of(functools.partial(model, **arguments))
            logits[side].append(results[side].logits)
            for part, value in milliseconds.items() if index >= n_uncounted else ():
                times[direction, part][side].append(value)
        hf.disable()
        if enabled and any(place.refused for place in enabled.places):
            raise SystemExit(f"calls went to stock functions:\n{enabled}")

    def both(direction, calls_of, n_uncounted):
        for side in (STOCK, OURS):
            run(side, direction, calls_of(side), n_uncounted)
        return distance(torch.cat(logits[OURS], 1), torch.cat(logits[STOCK], 1))

    both("prefill", lambda _: [{"input_ids": tokens[:, :64]}], 1)
    worst = max(both("prefill", lambda _: [{"input_ids": tokens[:, :prompt]}], 0) for _ in range(rounds))
    for start in range(prompt, tokens.shape[1], BLOCK):
        worst = max(worst, both("decode", lambda side, start=start: [
            {"input_ids": tokens[:, t:t + 1], "cache": results[side].cache} for t in range(start, start + BLOCK)], 1))
    if not worst < AGREE:
        raise SystemExit(f"the two differ by {worst} of the largest logit, allowed {AGREE}")
    return times, worst


def rows_of(times, error, threads, batch, prompt):
    for (direction, part), sides in times.items():
        stock, ours = (statistics.median(sides[side]) for side in (STOCK, OURS))
        yield {"direction": direction, "part": part, "threads": threads, "B": batch, "T": prompt if direction == "prefill" else 1,
               "after": 0 if direction == "prefill" else prompt, "measured": len(sides[OURS]), "stock_ms": round(stock, 3),
               "ms": round(ours, 3), "stock_best_ms": round(min(sides[STOCK]), 3), "best_ms": round(min(sides[OURS]), 3),
               "ratio": round(stock / ours, 2), "goal": GOALS[direction] if part == "operators" and batch == 1 else None, "error": float(f"{error:.2e}")}


def table(result):
    """Lines of Markdown for docs/coming_from_transformers.md."""
    yield "| | threads | sequences | stock operators ms | ours ms | ratio | stock layers ms | ours ms | ratio |"
    yield "|---|---|---|---|---|---|---|---|---|"
    rows = {(row["direction"], row["threads"], row["B"], row["part"]): row for row in result["rows"]}
    for direction, threads, batch, part in rows:
        if part != "operators":
            continue
        row, layer = rows[direction, threads, batch, part], rows[direction, threads, batch, "layer"]
        what = f"prompt of {row['T']}" if direction == "prefill" else f"one token after {row['after']}"
        yield (f"| {what} | {threads} | {batch} | {row['stock_ms']:.1f} | {row['ms']:.1f} | {row['ratio']:.1f} | {layer['stock_ms']:.1f} | "
               f"{layer['ms']:.1f} | {layer['ratio']:.1f} |")


def page_with(text, result):
    """The page with the table of these results between its two marks."""
    before, rest = text.split("<!-- times -->")
    after = rest.split("<!-- end of times -->")[1]
    return before + "<!-- times -->\n" + "\n".join(table(result)) + "\n<!-- end of times -->" + after


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt (2048)")
    parser.add_argument("--decode", type=int, default=80, help="tokens after it, in blocks of 8 (80)")
    parser.add_argument("--rounds", type=int, default=3, help="prompts a side (3)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="thread counts (1 2)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4], help="sequences; the prompts share --prompt tokens (1 4)")
    parser.add_argument("--out", default=str(machine.ROOT / "bench/results/hf_qwen3_next.json"), help="result file")
    parser.add_argument("--page", action="store_true", help="measure nothing: write the table of the results into the documentation")
    options = parser.parse_args()
    if options.page:
        PAGE.write_text(page_with(PAGE.read_text(), json.loads(Path(options.out).read_text())))
        return
    torch.set_grad_enabled(False)
    model = random_model()
    clock = Clock(model)
    print("configuration:", json.dumps(SIZES))
    versions = machine.versions(torch=torch.__version__, transformers=transformers.__version__, fastweight=fastweight.__version__)
    result = {"machine": machine.machine_class(), "cpu_level": fastweight.default_context().cpu_level, "commit": machine.commit(),
              "versions": versions, "system": platform.machine(), "ceilings": [], "configuration": SIZES, "dtype": "float32",
              "linear_layers": 3, "rows": []}
    rows = result["rows"]
    for threads in options.threads:
        torch.set_num_threads(threads)
        for batch in options.batches:
            prompt = options.prompt // batch
            shape = (batch, prompt + options.decode // BLOCK * BLOCK)
            tokens = torch.randint(0, SIZES["vocab_size"], shape, generator=torch.Generator().manual_seed(1))
            times, error = measure(model, clock, tokens, prompt, options.rounds)
            rows += rows_of(times, error, threads, batch, prompt)
        ceiling = machine.Ceilings(threads)
        ceiling.measure()
        result["ceilings"].append(ceiling.as_json())
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")  # what there is, should a later one be interrupted
    print("direction  part       threads   B    T     stock ms       our ms   ratio   (three linear layers together, medians)")
    for row in rows:
        print(f"{row['direction']:<10} {row['part']:<10} {row['threads']:>7} {row['B']:>3} {row['T']:>4} {row['stock_ms']:>12.2f} "
              f"{row['ms']:>12.2f} {row['ratio']:>7.2f}")


if __name__ == "__main__":
    main()
