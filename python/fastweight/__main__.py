# SPDX-License-Identifier: Apache-2.0
"""python -m fastweight info: what is installed and which path runs."""
import argparse
import platform
import sys
from importlib import util
from pathlib import Path

import fastweight
from fastweight import _core


def info():
    context = fastweight.default_context()
    folder = Path(fastweight.__file__).parent
    print(f"fastweight {fastweight.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print(f"package    {folder}")
    print(f"level      {context.cpu_level}")
    print(f"threads    {context.threads}")
    for line in _core.cuda_devices().splitlines():
        print(f"CUDA       {line}")
    for name in ("numpy", "torch"):
        print(f"{name:<10} {'installed' if util.find_spec(name) else 'not installed'}")
    print(f"rows       {', '.join(name for name, _, _ in _core.catalogue())}")
    if util.find_spec("numpy"):
        import numpy as np

        explain("float32", np.zeros((1, 64, 1, 64), np.float32), np.zeros((1, 1, 64, 64), np.float32))
    if not _core.cuda_devices().startswith("none") and util.find_spec("torch"):
        import torch

        if torch.cuda.is_available():
            explain("bfloat16 on cuda", torch.zeros(1, 64, 1, 64, dtype=torch.bfloat16, device="cuda"),
                    torch.zeros(1, 1, 64, 64, device="cuda"))
        else:
            print("on cuda: not asked, the installed torch has no CUDA device")


def explain(what, q, state):
    """Which implementation a small call of these types takes."""
    h = q[..., 0]
    for title, answer in (("forward", fastweight.ops.gated_delta_rule(q, q, q, h, h, explain=True)),
                          ("step", fastweight.ops.gated_delta_rule_step(q, q, q, h, h, state=state, explain=True))):
        print(f"gated_delta_rule, {what}, {title}:")
        print("".join(f"  {line}\n" for line in answer.splitlines()), end="")


def main():
    parser = argparse.ArgumentParser(prog="python -m fastweight", description="Fastweight in Python.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="version, instruction-set level, threads, and which path runs")
    parser.parse_args()
    info()
    return 0


if __name__ == "__main__":
    sys.exit(main())
