# SPDX-License-Identifier: Apache-2.0
"""The operators as functions on NumPy arrays and torch tensors; torch differentiates them (fastweight.torch says how).

One function a row of the catalogue and one `<row>_step` that continues a state in place; the operations beside the family
in the same way; plan() for calls that repeat; state_import() and state_export() for states in the library's own layout.
`help(fastweight.ops.kda)` has shapes, units, errors and source.
"""
import inspect as _inspect

from .._core import Plan, state_export, state_import
from . import _build

_build.make(globals())
__all__ = [function.__name__ for function in _build.VERBS] + ["Plan", "plan", "state_export", "state_import"]


def plan(function, *tensors, **arguments):
    """Checks a call of `function` (of fastweight.ops) once and returns a Plan that runs it with other data.

        step = plan(kda_step, q, k, v, g, beta, state=state)
        o = step(q, k, v, g, beta)          # the state of the plan goes on
        o = step(q, k, v, g, beta, state=other)

    The plan is called with tensors of the same dtypes, shapes and strides, in the order of the function. Tensors given by
    keyword stay until others are given; numbers and options are fixed. One call at a time; a new result each time.
    """
    verb = _build.VERBS.get(function)
    if verb is None:
        raise ValueError(f"plan: function is {function!r}, allowed the functions of fastweight.ops")
    bound = _inspect.signature(function).bind(*tensors, **arguments)
    bound.apply_defaults()
    return Plan(verb, tuple(bound.arguments[name] for name in verb.arguments))
