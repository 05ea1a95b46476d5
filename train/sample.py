# SPDX-License-Identifier: Apache-2.0
"""Continue a text, token by token on the CPU."""
import argparse
import sys

import torch

from reference import Reference


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("model", help="folder with config.json and model.safetensors")
    ap.add_argument("prompt", nargs="?", default="", help="text to continue; empty starts a document")
    ap.add_argument("--bytes", type=int, default=400, help="how many to write (default 400)")
    ap.add_argument("--temperature", type=float, default=0.9, help="lower is plainer and may loop, 0 takes the likeliest byte (default 0.9)")
    ap.add_argument("--seed", type=int, default=1)
    o = ap.parse_args()
    model, gen = Reference(o.model), torch.Generator().manual_seed(o.seed)
    for token in b"\x00" + o.prompt.encode():
        logits = model.step(token)
    out = bytearray(o.prompt.encode())
    for _ in range(o.bytes):
        if o.temperature > 0:
            token = int(torch.multinomial((logits / o.temperature).softmax(-1), 1, generator=gen))
        else:
            token = int(logits.argmax())
        if token == 0:
            break
        out.append(token)
        logits = model.step(token)
    sys.stdout.buffer.write(bytes(out) + b"\n")


if __name__ == "__main__":
    main()
