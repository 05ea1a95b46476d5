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
    print("devices    cpu")
    for name in ("numpy", "torch"):
        print(f"{name:<10} {'installed' if util.find_spec(name) else 'not installed'}")
    print(f"rows       {', '.join(name for name, _, _ in _core.catalogue())}")
    if util.find_spec("numpy"):
        import numpy as np

        q = np.zeros((1, 64, 1, 64), np.float32)
        for title, answer in (("forward", fastweight.ops.gated_delta_rule(q, q, q, q[..., 0], q[..., 0], explain=True)),
                              ("step", fastweight.ops.gated_delta_rule_step(q, q, q, q[..., 0], q[..., 0],
                                                                            state=np.zeros((1, 1, 64, 64), np.float32), explain=True))):
            print(f"gated_delta_rule, float32, {title}:")
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
