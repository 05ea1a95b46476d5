# SPDX-License-Identifier: Apache-2.0
"""Continue a text on the CPU."""
import argparse
import sys

import torch

from evaluate import load_model


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("model", help="folder with config.json and model.safetensors")
    ap.add_argument("prompt", nargs="?", default="", help="text to continue; empty starts a document")
    ap.add_argument("--bytes", type=int, default=400, help="how many to write (default 400)")
    ap.add_argument("--temperature", type=float, default=0.9, help="lower is plainer and may loop, 0 takes the likeliest byte (default 0.9)")
    ap.add_argument("--seed", type=int, default=1)
    o = ap.parse_args()
    model = load_model(o.model)
    prompt = b"\x00" + o.prompt.encode()
    text = model.generate(torch.tensor([list(prompt)]), o.bytes, temperature=o.temperature, seed=o.seed)[0, 1:]
    out = bytes(text.tolist()).rstrip(b"\x00")
    sys.stdout.buffer.write(out + b"\n")


if __name__ == "__main__":
    main()
