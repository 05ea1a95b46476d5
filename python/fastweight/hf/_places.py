# SPDX-License-Identifier: Apache-2.0
"""A place is one attribute of a module or class that holds our function while enable() is in force; it counts what ran."""
import functools
import hashlib
import inspect
import io
import tokenize

import torch

from .. import _core

_LAYOUT_TOKENS = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


class Place:
    """`owner`.`attribute`, with the function found there (`stock`) and how often each of the two ran.

    `ran` counts calls that our operators computed; `refused` counts, by reason, those passed on to the stock function.
    """

    def __init__(self, owner, attribute, operators):
        self.owner, self.attribute, self.operators = owner, attribute, operators
        self.stock = vars(owner)[attribute]
        self.ran, self.refused = 0, {}

    @property
    def name(self):
        module = getattr(self.owner, "__module__", None)
        return f"{module}.{self.owner.__qualname__}.{self.attribute}" if module else f"{self.owner.__name__}.{self.attribute}"

    def put(self, function):
        self.function = function
        setattr(self.owner, self.attribute, function)

    def take_back(self):
        """Puts the stock function back, unless somebody has put another one there since; returns whether it did."""
        if vars(self.owner).get(self.attribute) is not self.function:
            return False
        setattr(self.owner, self.attribute, self.stock)
        return True

    def count(self):
        if not torch.compiler.is_compiling():  # a graph would be traced again for every number
            self.ran += 1

    def pass_on(self, reason):
        if not torch.compiler.is_compiling():
            self.refused[reason] = self.refused.get(reason, 0) + 1
        return self.stock


@functools.cache
def _has_cuda():
    """Whether the engine sees a CUDA device."""
    return not _core.cuda_devices().startswith("none")


def refusal(x):
    """Why the engine does not compute from the tensor `x` (whose dtype the others share), or None."""
    if torch.compiler.is_compiling():
        pass  # torch.compile and torch.export take the operators of fastweight.torch
    elif torch.jit.is_tracing():
        return "torch.jit.trace"
    elif type(x) is not torch.Tensor and type(x) is not torch.nn.Parameter:
        return f"a tensor of type {type(x).__name__}"
    if x.device.type != "cpu" and not (x.is_cuda and (torch.compiler.is_compiling() or _has_cuda())):
        return f"tensors on the device {x.device.type}"
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {x.dtype}"
    return None


def is_functional(*tensors):
    """Whether nothing may be written in place: a gradient is recorded, or torch.compile traces."""
    return torch.compiler.is_compiling() or (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors))


def digest(function):
    """SHA-256 (16 digits) of a function's source without comments and layout; None when there is no source."""
    try:
        text = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return None
    tokens = tokenize.generate_tokens(io.StringIO(inspect.cleandoc("\n" + text)).readline)
    try:
        kept = [token.string for token in tokens if token.type not in _LAYOUT_TOKENS]
    except (tokenize.TokenError, IndentationError):
        return None
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]
