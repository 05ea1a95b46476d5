# SPDX-License-Identifier: Apache-2.0
"""Trains a small byte-level language model on a text file, on a CPU, and plots its loss.

    python examples/train_bytes.py FILE [--steps 200] [--plot loss.png] [--save FOLDER]

The model has three gated-delta layers and one of sliding-window attention. Needs torch, tqdm and matplotlib.
"""
import argparse
import math
from pathlib import Path

import torch
from tqdm import tqdm

from fastweight.torch.nn import HybridLM, LMConfig


def make_model(width):
    return HybridLM(LMConfig(
        vocab_size=256, hidden_size=width, layers=["delta", "delta", "window", "delta"], tie_embeddings=True,
        mixers={"delta": {"type": "GatedDeltaNet", "num_heads": width // 32, "head_dim": 32, "expand_v": 1},
                "window": {"type": "Attention", "num_heads": width // 32, "window_size": 64}}))


def batches(data, batch, tokens, generator):
    """Endless random pieces of the file, [batch, tokens + 1]."""
    while True:
        starts = torch.randint(len(data) - tokens, (batch,), generator=generator)
        yield torch.stack([data[s:s + tokens + 1] for s in starts.tolist()])


def train(model, data, steps, batch, tokens, rate, seed):
    """-> the loss of every step in bits a byte."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 20, 0.1 + 0.9 * (1 - step / steps)))
    losses = []
    bar = tqdm(zip(range(steps), batches(data, batch, tokens, torch.Generator().manual_seed(seed))), total=steps, unit="step")
    for _, ids in bar:
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item() / math.log(2))
        bar.set_postfix_str(f"{losses[-1]:.3f} bits a byte")
    return losses


def plot(losses, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(losses)
    axes.set(xlabel="step", ylabel="bits a byte", title="training loss")
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", type=Path, help="any text, at least a few thousand bytes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256, help="bytes of a piece")
    parser.add_argument("--width", type=int, default=128, help="a multiple of 32")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("loss.png"))
    parser.add_argument("--save", type=Path, help="folder for config.json and model.safetensors")
    arguments = parser.parse_args()
    data = torch.frombuffer(bytearray(arguments.file.read_bytes()), dtype=torch.uint8).long()
    if len(data) <= arguments.tokens:
        parser.error(f"file has {len(data)} bytes, allowed more than tokens = {arguments.tokens}")
    torch.manual_seed(arguments.seed)
    model = make_model(arguments.width)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(data):,} bytes of text")
    losses = train(model, data, arguments.steps, arguments.batch, arguments.tokens, arguments.rate, arguments.seed)
    plot(losses, arguments.plot)
    print(f"loss {losses[0]:.3f} -> {sum(losses[-10:]) / len(losses[-10:]):.3f} bits a byte, plotted in {arguments.plot}")
    if arguments.save:
        model.save_pretrained(arguments.save)
    text = model.eval().generate(torch.tensor([list(b"The ")]), 120, temperature=0.8, seed=arguments.seed)
    print(bytes(text[0].tolist()).decode("utf-8", "replace"))


if __name__ == "__main__":
    main()
