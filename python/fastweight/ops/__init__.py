# SPDX-License-Identifier: Apache-2.0
"""The operators as functions on NumPy arrays and torch tensors; torch differentiates them (fastweight.torch says how).

One function a row of the catalogue and one `<row>_step` that continues a state in place; the operations beside the family
in the same way; plan() for calls that repeat, chain() for several of them in a row; state_import() and state_export() for
states in the library's own layout.
`help(fastweight.ops.kda)` has shapes, units, errors and source.
"""
import inspect as _inspect

from .._core import Chain, Plan, state_export, state_import
from . import _build

_build.make(globals())
__all__ = [function.__name__ for function in _build.VERBS] + ["Chain", "Plan", "chain", "plan", "state_export", "state_import"]


def plan(function, *tensors, out=None, **arguments):
    """Checks a call of `function` (of fastweight.ops) once and returns a Plan that runs it with other data.

        step = plan(kda_step, q, k, v, g, beta, state=state)
        o = step(q, k, v, g, beta)          # the state of the plan goes on
        o = step(q, k, v, g, beta, state=other)

    The plan is called with tensors of the same dtypes, shapes and strides, in the order of the function. Tensors given by
    keyword stay until others are given; numbers and options are fixed. One call at a time; a new result each time, or with
    `out` (a tensor of the result's shape, any strides; functions with one result) always that one.
    """
    verb = _build.VERBS.get(function)
    if verb is None:
        raise ValueError(f"plan: function is {function!r}, allowed the functions of fastweight.ops")
    bound = _inspect.signature(function).bind(*tensors, **arguments)
    bound.apply_defaults()
    return Plan(verb, tuple(bound.arguments[name] for name in verb.arguments), out)


def chain(steps, tensors):
    """Several plans and copies as one call: a Chain that takes new `tensors` each time and returns the last plan's result.

        mixed, o = torch.empty(1, 1, 3, 2, 16), torch.empty(1, 1, 2, 16)
        q, k, v = mixed.unbind(2)
        steps = [(mixed, x.view(1, 1, 3, 2, 16)),        # a copy: to, from
                 plan(delta_rule_step, q, k, v, beta, state=state, out=o),
                 plan(rms_norm, o, weight)]
        layer = chain(steps, (x, beta))                   # the views of x and beta follow them, weight and state stay
        y = layer(x, beta)

    steps: plans, each made with `out` but for the last one, which may have none; pairs (to, from) of tensors of one dtype and
    shape that share no memory. tensors: what a call brings, in the order of the call, with the dtypes, shapes and strides of
    these. An operand whose memory lies in one of them is taken at the same place in the tensor that the call brings; every
    other one stays the tensor that it was made with. CPU tensors only. One call at a time.

    ValueError before any step has run for tensors unlike those that the chain was made with; RuntimeError when a step fails.
    """
    return Chain(tuple(steps), tuple(tensors))
