# SPDX-License-Identifier: Apache-2.0
"""A byte-level language model written for fla (flash-linear-attention), trained on a text file.

    python examples/fla_byte_model.py FILE [--steps 200]

The two lines below are all that fastweight adds: with them it runs on any machine, fla installed or not. Needs torch.
"""
import argparse
import math
import time
from pathlib import Path

import fastweight.fla
fastweight.fla.install()

import torch
import torch.nn.functional as F
from fla.modules import FusedRMSNormGated, RMSNorm, ShortConvolution
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from torch import nn


class Mixer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.conv = ShortConvolution(3 * width, 4, activation="silu")
        self.gates = nn.Linear(width, 2 * heads)
        self.out_gate = nn.Linear(width, width, bias=False)
        self.norm = FusedRMSNormGated(width // heads)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        qkv, _ = self.conv(self.qkv(x))
        q, k, v = qkv.unflatten(-1, (3 * self.heads, -1)).split(self.heads, 2)
        decay, beta = self.gates(x).chunk(2, -1)
        o, _ = chunk_gated_delta_rule(q, k, v, -F.softplus(decay), beta.sigmoid(), use_qk_l2norm_in_kernel=True)
        return self.out(self.norm(o, self.out_gate(x).view_as(o)).flatten(-2))


class Model(nn.Module):
    def __init__(self, width=128, heads=4, depth=2):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.norms = nn.ModuleList(RMSNorm(width) for _ in range(2 * depth + 1))
        self.mixers = nn.ModuleList(Mixer(width, heads) for _ in range(depth))
        self.mlps = nn.ModuleList(nn.Sequential(nn.Linear(width, 3 * width), nn.SiLU(), nn.Linear(3 * width, width)) for _ in range(depth))
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, ids):
        x = self.embed(ids)
        for i, (mixer, mlp) in enumerate(zip(self.mixers, self.mlps)):
            x = x + mixer(self.norms[2 * i](x))
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))


def read(path):
    return torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.uint8).long()


def piece(data, step, batch, tokens):
    """Random pieces of the text, [batch, tokens + 1]; a step always has the same."""
    starts = torch.randint(len(data) - tokens, (batch,), generator=torch.Generator().manual_seed(step))
    return torch.stack([data[s:s + tokens + 1] for s in starts.tolist()])


def train_step(model, optimizer, ids):
    """-> the loss in bits a byte."""
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item() / math.log(2)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("file", help="any text, at least a few thousand bytes")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = read(arguments.file)
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    start = time.perf_counter()
    for step in range(arguments.steps):
        loss = train_step(model, optimizer, piece(data, step, arguments.batch, arguments.tokens).to(device))
        if step % 10 == 0 or step == arguments.steps - 1:
            print(f"step {step:4d}  {loss:.3f} bits a byte  {(time.perf_counter() - start) / (step + 1):.3f} s a step", flush=True)


if __name__ == "__main__":
    main()
