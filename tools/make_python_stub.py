# SPDX-License-Identifier: Apache-2.0
"""Writes the types of the functions that the table makes: ops/__init__.pyi, and torch/__init__.pyi which names those that
torch differentiates. Needs the package importable.

    python tools/make_python_stub.py [FOLDER]      (python/fastweight)
"""
import sys
from pathlib import Path

from fastweight.ops import _build
from fastweight.ops._table import REQUIRED

HEAD = '''# SPDX-License-Identifier: Apache-2.0
# Written by tools/make_python_stub.py from the table; tests/package/test_ops_table.py holds it to that.
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, overload

from .._core import Chain as Chain, Context, Plan as Plan, state_export as state_export, state_import as state_import

Array = TypeVar("Array")

def plan(function: Callable[..., Any], *tensors: Any, out: Any = None, **arguments: Any) -> Plan: ...
def chain(steps: Iterable[Plan | tuple[Any, Any]], tensors: Iterable[Any]) -> Chain: ...
'''
TYPES = {"o": "Array", "final_state": "Array | None", "final_z": "Array | None", "conv_final_state": "Array | None"}


def parameters(function, explain):
    lines = []
    for argument in function.positional + ("*",) + function.keywords:
        if argument == "*":
            lines.append("    *,")
        elif argument.name == "explain":
            lines.append(f"    explain: Literal[{explain}]{'' if explain == 'True' else ' = ...'},")
        else:
            kind = argument.type if argument.type != "object" else "Any"
            kind = kind.replace("Array | None", "Any") if argument.name in ("cu_seqlens", "state_indices") else kind
            lines.append(f"    {argument.name}: {kind}{'' if argument.default is REQUIRED else ' = ...'},")
    return "\n".join(lines)


def stub(function):
    results = [TYPES.get(name, "Array") for name in function.results]
    answer = results[0] if len(results) == 1 else f"tuple[{', '.join(results)}]"
    return "\n".join(f"@overload\ndef {function.name}(\n{parameters(function, explain)}\n) -> {kind}: ..."
                     for explain, kind in (("False", answer), ("True", "str")))


TORCH_HEAD = '''# SPDX-License-Identifier: Apache-2.0
# Written by tools/make_python_stub.py from the table; tests/package/test_ops_table.py holds it to that.
'''


def stubs():
    """{file below python/fastweight: text}."""
    functions = list(_build.functions())
    differentiated = [function.name for function in functions if function.direction == _build.FORWARD]
    names = "\n".join(f"from ..ops import {name} as {name}" for name in differentiated)
    return {"ops/__init__.pyi": HEAD + "\n" + "\n".join(stub(function) for function in functions) + "\n",
            "torch/__init__.pyi": TORCH_HEAD + names + "\n"}


def main():
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent / "python/fastweight"
    for name, text in stubs().items():
        (folder / name).write_text(text, encoding="ascii")
    return 0


if __name__ == "__main__":
    sys.exit(main())
