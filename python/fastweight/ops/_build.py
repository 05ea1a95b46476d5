# SPDX-License-Identifier: Apache-2.0
"""Makes the functions of fastweight.ops from the table: real signatures, docstrings, one _core.Verb each.

A function is `def kda(q, k, ..., explain=False): ... return _kda_verb((q, k, ..., explain))`, compiled once at import, so that
its cost is that of one tuple. While torch.compile traces it, it names the torch operator instead: use_torch() says how to tell,
and what to call.
"""
import functools
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import _core
from ._table import ARGUMENTS, NEIGHBOURS, REQUIRED, RESULTS, ROWS

FORWARD, STEP = 0, 2
G_TEXT = {"scalar": "[B,T,HV]: natural log of the decay, in [-inf, 0]; q's dtype, or float32 beside 16 bits",
          "vector": "[B,T,HV,K]: natural log of the decay of each key channel, in [-inf, 0]; q's dtype, or float32 beside 16 bits",
          "": "[B,T,HV] (gate \"scalar\") or [B,T,HV,K] (\"vector\"): natural log of the decay"}


@dataclass(frozen=True)
class Function:
    """A function of fastweight.ops before it is made."""

    name: str
    operation: str
    direction: int
    positional: tuple  # Argument
    keywords: tuple
    fixed: dict
    results: tuple
    title: str
    formula: str
    source: str
    page: str

    def arguments(self):
        return self.positional + self.keywords


def _argument(key, row=None, optional=False):
    found = ARGUMENTS[key]
    text = found.text
    if row is not None:
        text = G_TEXT[row.gate] if key == "g" else text
        if key == "scale" and row is ROWS["rwkv7"]:
            text = text.replace("K^-1/2", "1")
        if row.extra == ("n_sub",) and key in ("k", "v", "beta"):
            text = text.replace("[B,T,", "[B,T*n_sub,")
    if optional:
        text += "; None: 0" if key == "g" else "" if key in "ab" else "; None: absent"
        return type(found)(found.name, None, "Array | None", text)
    return type(found)(found.name, found.default, found.type, text)


def _row_functions(name, row, number):
    gates = ("gate_input", "a_log", "dt_bias", "gate_normalizer", "gate_lower_bound", "g_min")
    maps = ("qk_norm",)
    if not row.has_fixed_gate and "g" in row.operands + row.optional:
        maps += gates
    if "beta" in row.operands + row.optional:
        maps += ("beta_input",)
    positional = tuple(_argument(key, row) for key in ("q", "k", "v") + row.operands)
    optional = tuple(_argument(key, row, optional=True) for key in row.optional)
    tail = ("o_dtype", "batch_invariant", "check_values", "allow_tf32", "context", "explain")
    has_z = "normalizer" in row.extra
    for direction in (FORWARD, STEP):
        extra = tuple(_argument(key, row) for key in row.extra if direction == FORWARD or key != "initial_z")
        if direction == FORWARD:
            keys = ("scale", "initial_state", "output_final_state", "cu_seqlens", "form", "state_layout") + maps + tail
            results = ("o", "final_state", "final_z") if has_z else ("o", "final_state")
        else:
            keys = (("state_z",) if has_z else ()) + ("state_indices", "scale", "cu_seqlens", "step_layout") + maps + tail
            results = ("o",)
            extra = (_argument("state"),) + extra
        yield Function(name + ("_step" if direction == STEP else ""), "recurrence", direction, positional,
                       extra + optional + tuple(_argument(key, row) for key in keys), {"op": number}, results, row.title, row.formula,
                       row.source, name)


def _neighbour_functions(name, entry):
    positional = tuple(_argument(key) for key in entry.positional)
    dtype = {"attention": "o_dtype", "gate_activation": "gate_y_dtype"}.get(entry.operation, "y_dtype")
    tail = (dtype, "context", "explain")
    yield Function(name, entry.operation, FORWARD, positional, tuple(_argument(key) for key in entry.keywords + tail), dict(entry.fixed),
                   entry.results, entry.title, entry.formula, entry.source, entry.page)
    if entry.step_keywords:
        yield Function(f"{name}_step", entry.operation, STEP, positional, tuple(_argument(key) for key in entry.step_keywords + tail),
                       dict(entry.fixed), entry.results[:1], entry.title, entry.formula, entry.source, entry.page)


def functions():
    """Every function of fastweight.ops, in the order of the catalogue, by_axes after the rows."""
    numbers = {name: number for number, (name, _, _) in enumerate(_core.catalogue())}
    for name, row in ROWS.items():
        yield from _row_functions(name, row, numbers[name])
    for name, entry in NEIGHBOURS.items():
        yield from _neighbour_functions(name, entry)


@functools.cache
def _paragraph(text, indent):
    return textwrap.fill(text, 118, initial_indent=indent, subsequent_indent=" " * (len(indent) + 2), break_long_words=False,
                         break_on_hyphens=False)


# sizes of the arrays in a docstring's example, and what an example says beside them
SIZES = {"B": 1, "T": 3, "H": 2, "HV": 4, "HQ": 2, "HK": 2, "K": 4, "V": 5, "D": 4, "DV": 5, "N": 1, "W": 3, "W-1": 2, "slots": 1,
         "capacity": 8, "M": 3, "in": 4, "out": 5}
EXAMPLES = {"by_axes": (("g", "B,T,HV"), ', gate="scalar", erase="none", g=-g'), "gate_activation": (("x", "B,T,HV"), ', kind="softplus"'),
            "feature_map": (("x", "B,T,D"), ', kind="silu"'), "short_conv": (("x", "B,T,D"), ""), "l2_norm": (("x", "B,T,D"), ""),
            "rms_norm": (("x", "B,T,D"), "")}


def _sizes(text):
    return tuple(SIZES[x.removesuffix("*n_sub")] for x in text.split(","))


def _example(function):
    """A call on small arrays, as a doctest."""
    (special, shape), options = EXAMPLES.get(function.name.removesuffix("_step"), (("", ""), ""))
    needed = [x for x in function.arguments() if x.type.startswith("Array") and (x.default is REQUIRED or x.name == special)]
    sizes = {x.name: _sizes(shape if x.name == special else re.search(r"\[([^\]]+)\]", x.text).group(1)) for x in needed}
    lines = [">>> import numpy as np", f">>> from fastweight.ops import {function.name}"]
    for name, size in sizes.items():
        make = f"zeros({size}, np.int64)" if name == "cache_lengths" else f"ones({size}, np.float32)"
        lines.append(f">>> {name} = np.{make}")
    call = ["-g" if x.name == "g" else x.name for x in function.positional if x.default is REQUIRED]
    call += [f"{x.name}={x.name}" for x in needed if x not in function.positional and x.name != special]
    found = re.match(r"(\w+) \[([^\]]+)\]", RESULTS[function.results[0]])
    result, size = (found.group(1), _sizes(found.group(2))) if found else ("y", sizes["x"])
    final = [x.removeprefix("conv_") for x in function.results[1:]]
    if final:
        options += ", output_final_state=True"
    return lines + [f">>> {', '.join([result, *final])} = {function.name}({', '.join(call)}{options})", f">>> {result}.shape", str(size)]


def docstring(function):
    what = f"{function.title}: a few tokens, the state in place." if function.direction == STEP else f"{function.title}."
    parts = [what[0].upper() + what[1:], ""]
    if function.formula:
        parts += ["    " + line for line in function.formula.split("\n")] + [""]
    parts += [_paragraph(f"{argument.name}: {argument.text}.", "") for argument in function.arguments()]
    parts += ["", _paragraph("Returns " + ("a tuple: " if len(function.results) > 1 else "") +
                             "; ".join(RESULTS[name] for name in function.results) +
                             ". Torch tensors when the first tensor is one, else NumPy arrays.", "")]
    parts += [_paragraph("Raises ValueError for an argument that is not allowed, NotImplementedError for what no implementation here "
                         "takes, with the library's sentence: operation, argument, value found, value allowed.", "")]
    parts += ["", *_example(function), ""]
    if function.source:
        parts += [_paragraph(f"Source: {function.source}", "")]
    return "\n".join(parts + [f"More: docs/operators/{function.page}.md"])


def signature(function, annotate=False):
    """The parameter list as text."""
    def one(argument):
        text = argument.name + (f": {argument.type}" if annotate else "")
        if argument.default is REQUIRED:
            return text
        return text + (" = " if annotate else "=") + ("..." if annotate else repr(argument.default))
    positional = [one(argument) for argument in function.positional]
    return ", ".join(positional + ["*"] + [one(argument) for argument in function.keywords])


VERBS: dict[Callable[..., Any], _core.Verb] = {}  # of every function of fastweight.ops
_scope: dict[str, Any] = {"_is_tracing": bool}  # the globals of the functions; bool() is False


def use_torch(is_tracing, torch_call):
    """is_tracing() -> bool; torch_call(name, values) -> the result of that function."""
    _scope.update(_is_tracing=is_tracing, _torch_call=torch_call)


def make(namespace):
    """Puts every function into `namespace`; fills VERBS."""
    source, made = [], []
    scope = _scope
    for function in functions():
        names = [argument.name for argument in function.arguments()]
        scope[f"_{function.name}_verb"] = _core.Verb(function.operation, function.direction, function.name, names,
                                                     len(function.positional), function.fixed, len(function.results))
        values = f"({', '.join(names)},)"
        traced = f"    if _is_tracing():\n        return _torch_call({function.name!r}, {values})\n" if function.direction == FORWARD else ""
        source.append(f"def {function.name}({signature(function)}):\n{traced}    return _{function.name}_verb({values})\n")
        made.append(function)
    exec(compile("\n".join(source), "<fastweight.ops>", "exec"), scope)  # noqa: S102, the table is ours
    for function in made:
        python_function = scope[function.name]
        python_function.__module__ = "fastweight.ops"
        python_function.__doc__ = docstring(function)
        namespace[function.name] = python_function
        VERBS[python_function] = scope[f"_{function.name}_verb"]
