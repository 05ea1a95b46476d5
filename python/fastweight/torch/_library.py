# SPDX-License-Identifier: Apache-2.0
"""Every function of fastweight.ops as torch.library operators: fastweight::<name> and fastweight::<name>_backward.

They are made from the table of fastweight.ops. An operator takes the function's arguments in its order (`context` as a
number, no `explain`) and `save`: whether it returns, as its last tensor, what the backward can use instead of computing it
again. A result that was not asked for is a tensor without elements. The shapes of all results follow from the shapes of the
inputs, never from their data.
"""
import itertools
import os
import weakref
from types import SimpleNamespace

import torch
from torch.autograd import forward_ad

from .. import ops
from .._core import Context, Verb
from ..ops import _build

LIBRARY = torch.library.Library("fastweight", "DEF")
NO_GRADIENT = ("cu_seqlens", "start_positions")
SEGMENT_ROWS = 64  # rows between two states of `saved`, whose width is a multiple of STATE_PAD; tests hold it to the engine
STATE_PAD = 16
VMAP_LEVELS = 64  # of torch's older vmap
SCHEMA_TYPES = {"float | None": "float?", "float": "float", "int | None": "int?", "int": "int", "bool": "bool", "object": "ScalarType?",
                "Array": "Tensor", "Array | None": "Tensor?", "Context | None": "int"}

_contexts: weakref.WeakValueDictionary[int, Context] = weakref.WeakValueDictionary()  # a backward keeps its own alive
_numbers = itertools.count(1)


def _context_number(context):
    """What an operator takes for it: 0 for the default context."""
    if context is None:
        return 0
    for number, known in _contexts.items():
        if known is context:
            return number
    number = next(_numbers)
    _contexts[number] = context
    return number


def _context(label, number):
    found = _contexts.get(number)
    if number and found is None:
        raise ValueError(f"{label}: context is number {number} of a graph, which is gone, allowed one that lives as long as the graph")
    return found


def _forces_what_saves_nothing(context):
    forced = (context.force_impl if context is not None else "") or os.environ.get("FW_IMPL", "")
    return forced != "" and not any((x.startswith("cpu_") and x.endswith("_chunk")) or x == "cuda_portable" for x in forced.split(","))


def _dtype(label, name, value):
    if value is None or isinstance(value, torch.dtype):
        return value
    text = value if isinstance(value, str) else getattr(value, "__name__", None) or str(value)
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"{label}: {name} is {value!r}, allowed float32, bfloat16, float16 or float64")
    return found


# ---- shapes of results, from shapes of inputs ----

def _sequences(x, batched):
    return batched.shape[0] if x["cu_seqlens"] is None else x["cu_seqlens"].shape[0] - 1


def _wide(like):
    return torch.float64 if like.dtype == torch.float64 else torch.float32


def _fake_o(x):
    q, v = x["q"], x["v"]
    return q.new_empty((q.shape[0], q.shape[1], v.shape[2], v.shape[3]), dtype=x["o_dtype"] or v.dtype)


def _fake_final_state(x):
    sizes = (x["q"].shape[3], x["v"].shape[3])
    if x["state_layout"] == "vk":
        sizes = sizes[::-1]
    return x["q"].new_empty((_sequences(x, x["q"]), x["v"].shape[2]) + sizes, dtype=_wide(x["q"]))


def _fake_final_z(x):
    q = x["q"]
    return q.new_empty((_sequences(x, q), q.shape[2], q.shape[3]), dtype=_wide(q))


def _fake_saved(x):
    q, k, v = x["q"], x["k"], x["v"]
    rows, count = k.shape[1], _sequences(x, q)
    slots = count * ((rows + SEGMENT_ROWS - 1) // SEGMENT_ROWS) if x["cu_seqlens"] is None else rows // SEGMENT_ROWS + count
    width = v.shape[3] + (1 if x.get("normalizer", "none") == "sum" else 0)
    width = (width + STATE_PAD - 1) // STATE_PAD * STATE_PAD
    return q.new_empty((slots * v.shape[2] * q.shape[3] * width,), dtype=torch.float32)


def _is_asked_for(name, given):
    """Whether a call with these arguments has the result `name`; it is a tensor without elements if not."""
    return ("final" not in name or given["output_final_state"]) and (name != "final_z" or given["normalizer"] == "sum")


def _fake_y(x):
    return x["x"].new_empty(x["x"].shape, dtype=x["y_dtype"])


def _fake_conv_final_state(x):
    return x["x"].new_empty((_sequences(x, x["x"]), x["x"].shape[2], x["weight"].shape[1] - 1))


def _fake_attention_o(x):
    q, v = x["q"], x["v"]
    return q.new_empty((q.shape[0], q.shape[1], q.shape[2], v.shape[3]), dtype=x["o_dtype"] or v.dtype)


FAKES = {
    "o": _fake_o, "final_state": _fake_final_state, "final_z": _fake_final_z, "y": _fake_y,
    "conv_final_state": _fake_conv_final_state, "attention_o": _fake_attention_o,
    "gate_y": lambda x: x["x"].new_empty(x["x"].shape, dtype=x["y_dtype"] or _wide(x["x"])),
    "linear_y": lambda x: x["x"].new_empty((x["x"].shape[0], x["weight"].shape[0]), dtype=x["y_dtype"]),
}
NDIM = {"recurrence": {"q": 4, "k": 4, "v": 4}, "attention": {"q": 4, "k": 4, "v": 4}, "short_conv": {"x": 3, "weight": 2},
        "linear": {"x": 2, "weight": 2}}  # what the shapes are read from


def _is_transformed():
    """Whether a transform of torch.func is active, which the operators' registered gradients do not know."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def _each(name, call, info, in_dims, arguments):
    """torch.vmap: a call for each element, since operands without the new axis may have no batch axis to join it with."""
    if info.batch_size == 0:
        raise ValueError(f"{name}: vmap over 0 elements, allowed 1 and more")
    results = [call(*(x.select(d, i) if isinstance(x, torch.Tensor) and d is not None else x
                      for x, d in zip(arguments, in_dims, strict=True))) for i in range(info.batch_size)]
    if isinstance(results[0], torch.Tensor):
        return torch.stack(results), 0
    kind = type(results[0])
    return kind(torch.stack(x) for x in zip(*results, strict=True)), kind([0] * len(results[0]))


def _level(x):
    """The innermost level of torch's older vmap that x has an axis of, 0 for none. The nesting that torch counts is that of a
    thread, and a backward on CUDA runs in another one; without an axis of a level the answer to its removal has no element."""
    if not isinstance(x, torch.Tensor) or not torch._C._functorch.is_legacy_batchedtensor(x):
        return 0
    return next((level for level in range(VMAP_LEVELS, 0, -1) if torch._remove_batch_dim(x, level, 0, 0).shape[0] > 0), 0)


def _each_of_grads(name, op, arguments):
    """The same for torch's older vmap, which autograd.grad(is_grads_batched=True) and jacobian(vectorize=True) use."""
    levels = [_level(x) for x in arguments]
    level = max(levels)
    is_batched = [x == level for x in levels]
    plain = [torch._remove_batch_dim(x, level, 0, 0) if batched else x for x, batched in zip(arguments, is_batched, strict=True)]
    size = next(x.shape[0] for x, batched in zip(plain, is_batched, strict=True) if batched)
    info = SimpleNamespace(batch_size=size)
    results, _ = _each(name, op, info, [0 if batched else None for batched in is_batched], plain)
    return [torch._add_batch_dim(x, 0, level) for x in results]


def _function_for_transforms(op, keep, differentiate):
    """The operator as the torch.autograd.Function that torch.func takes. A list of results becomes a tuple."""
    def call(*arguments):
        if _is_transformed():
            return Function.apply(*arguments)
        found = op(*arguments)
        return tuple(found) if isinstance(found, list) else found

    name = op._schema.name.removeprefix("fastweight::")

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(*arguments):
            return call(*arguments)

        setup_context = staticmethod(keep)
        backward = staticmethod(differentiate)

        @staticmethod
        def vmap(info, in_dims, *arguments):
            return _each(name, call, info, in_dims, arguments)

    torch.library.register_vmap(op._schema.name, lambda info, in_dims, *arguments: _each(name, op, info, in_dims, arguments), lib=LIBRARY)
    return call


class Operator:
    """The two torch.library operators of one function."""

    def __init__(self, function: _build.Function, verb: Verb):
        self.name, self.verb, self.results, self.operation = function.name, verb, function.results, function.operation
        arguments = function.arguments()
        self.names = [argument.name for argument in arguments]
        kept = [argument for argument in arguments if argument.name != "explain"]
        # None stands for the default of these too, whose types have no None
        self.defaults = {argument.name: argument.default for argument in kept
                         if argument.default not in (None, _build.REQUIRED) and "None" not in argument.type}
        self.inputs = [argument.name for argument in kept]
        self.tensors = [i for i, argument in enumerate(kept) if argument.type.startswith("Array")]
        self.differentiable = [i for i in self.tensors if self.inputs[i] not in NO_GRADIENT]
        self.dtype_names = [argument.name for argument in kept if argument.type == "object"]
        self.final_results = [i for i, name in enumerate(self.results) if "final" in name]
        self.saves = function.operation == "recurrence"
        self._define(kept)

    def _define(self, kept):
        fields = [f"{SCHEMA_TYPES.get(argument.type, 'str')} {argument.name}" for argument in kept]
        count = len(self.results) + (1 if self.saves else 0)
        result = "Tensor" if count == 1 else "(" + ", ".join(["Tensor"] * count) + ")"
        save = ["bool save"] if self.saves else []
        incoming = [f"Tensor? d_result_{i}" for i in range(len(self.results))] + (["Tensor? saved"] if self.saves else [])
        tags = (torch.Tag.pt2_compliant_tag,)
        LIBRARY.define(f"{self.name}({', '.join(fields + save)}) -> {result}", tags=tags)
        LIBRARY.define(f"{self.name}_backward({', '.join(incoming + fields)}, bool[] wanted) -> Tensor[]", tags=tags)
        name, backward = f"fastweight::{self.name}", f"fastweight::{self.name}_backward"
        LIBRARY.impl(self.name, self.forward, "CompositeExplicitAutograd")
        LIBRARY.impl(f"{self.name}_backward", self.backward, "CompositeExplicitAutograd")
        torch.library.register_fake(name, self.fake, lib=LIBRARY)
        torch.library.register_fake(backward, self.fake_backward, lib=LIBRARY)
        torch.library.register_autograd(name, self.differentiate, setup_context=self.keep, lib=LIBRARY)
        torch.library.register_autograd(backward, self.refuse_second, lib=LIBRARY)
        LIBRARY.impl(f"{self.name}_backward", lambda *arguments: _each_of_grads(self.name, self.backward_op, arguments), "Batched")
        self.forward_op = getattr(torch.ops.fastweight, self.name).default
        self.backward_op = getattr(torch.ops.fastweight, f"{self.name}_backward").default
        self.run = _function_for_transforms(self.forward_op, self.keep, self.differentiate)
        self.run_backward = _function_for_transforms(self.backward_op, lambda ctx, inputs, output: None, self.refuse_second)

    def _values(self, inputs):
        """An operator's arguments as the verb takes them."""
        given = dict(zip(self.inputs, inputs, strict=True))
        given["context"] = _context(self.name, given["context"])
        given["explain"] = False
        return tuple(given[name] for name in self.names)

    def forward(self, *arguments):
        inputs, save = (arguments[:-1], arguments[-1]) if self.saves else (arguments, False)
        found = self.verb.forward(self._values(inputs), save)
        result, saved = found if save else (found, None)
        results = [result] if len(self.results) == 1 else list(result)
        if self.saves:
            results.append(saved)
        results = [inputs[0].new_empty(0) if x is None else x for x in results]
        return results[0] if len(results) == 1 else tuple(results)

    def fake(self, *arguments):
        inputs, save = (arguments[:-1], arguments[-1]) if self.saves else (arguments, False)
        x = dict(zip(self.inputs, inputs, strict=True))
        for name, ndim in NDIM.get(self.operation, {}).items():
            if x[name].dim() != ndim:
                raise ValueError(f"{self.name}: {name} has {x[name].dim()} dimensions, allowed {ndim}")
        results = []
        for name in self.results:
            results.append(FAKES[name](x) if _is_asked_for(name, x) else inputs[0].new_empty(0))
        if self.saves:
            results.append(_fake_saved(x) if save else inputs[0].new_empty(0))
        return results[0] if len(results) == 1 else tuple(results)

    def keep(self, ctx, inputs, output):
        ctx.set_materialize_grads(False)
        inputs = inputs[:-1] if self.saves else inputs
        saved = [output[-1]] if self.saves else []
        ctx.save_for_backward(*(inputs[i] for i in self.tensors), *saved)
        is_tensor = set(self.tensors)
        ctx.context = _context(self.name, inputs[self.inputs.index("context")])
        ctx.options = [None if i in is_tensor else x for i, x in enumerate(inputs)]
        if self.saves and ctx.options[self.inputs.index("form")] == "parallel":  # has a forward only
            ctx.options[self.inputs.index("form")] = "auto"

    def differentiate(self, ctx, *incoming):
        inputs, tensors = list(ctx.options), ctx.saved_tensors
        gradients = [None] * (len(inputs) + (1 if self.saves else 0))
        if all(x is None for x in incoming[:len(self.results)]):
            return tuple(gradients)
        for i, x in zip(self.tensors, tensors[:len(self.tensors)], strict=True):
            inputs[i] = x
        saved = [tensors[-1]] if self.saves else []
        wanted = [ctx.needs_input_grad[i] for i in self.differentiable]
        found = iter(self.run_backward(*incoming[:len(self.results)], *saved, *inputs, wanted))
        for i, is_wanted in zip(self.differentiable, wanted, strict=True):
            if is_wanted:
                gradients[i] = next(found)
        return tuple(gradients)

    def _split_backward(self, arguments):
        count = len(self.results)
        incoming, rest = arguments[:count], arguments[count:-1]
        saved, inputs = (rest[0], rest[1:]) if self.saves else (None, rest)
        wanted = [i for i, is_wanted in zip(self.differentiable, arguments[-1], strict=True) if is_wanted]
        return incoming, saved, inputs, wanted

    def backward(self, *arguments):
        incoming, saved, inputs, wanted = self._split_backward(arguments)
        if saved is not None and saved.numel() == 0:
            saved = None
        elif saved is not None:  # a hook on saved tensors may have unpacked it in another form
            if saved.dtype != torch.float32 or saved.dim() != 1:
                raise ValueError(f"{self.name}: saved has dtype {saved.dtype} and {saved.dim()} dimensions, allowed torch.float32 and 1")
            saved = saved.contiguous()
        # a result that was not asked for is a tensor of one dimension, and so is its gradient where a graph makes one
        incoming = tuple(None if x is None or (i in self.final_results and x.dim() == 1) else x for i, x in enumerate(incoming))
        if all(x is None for x in incoming):
            return [torch.zeros_like(inputs[i], memory_format=torch.contiguous_format) for i in wanted]
        places = [self.names.index(self.inputs[i]) for i in wanted]
        return list(self.verb.backward(self._values(inputs), incoming, saved, places))

    def fake_backward(self, *arguments):
        _, _, inputs, wanted = self._split_backward(arguments)
        return [inputs[i].new_empty(inputs[i].shape) for i in wanted]

    def refuse_second(self, ctx, *incoming):
        raise NotImplementedError(f"{self.name}: a second derivative is asked for, allowed first derivatives")

    def _refuse_tangents(self, inputs):
        if forward_ad._current_level < 0:
            return
        for i in self.differentiable:
            if inputs[i] is not None and forward_ad.unpack_dual(inputs[i]).tangent is not None:
                raise NotImplementedError(f"{self.name}: {self.inputs[i]} has a forward-mode derivative, allowed reverse mode")

    def __call__(self, values):
        given = dict(zip(self.names, values, strict=True))
        if given.pop("explain"):
            raise ValueError(f"{self.name}: explain is True, allowed False where a graph is traced")
        context = given["context"]
        if context is not None and torch.compiler.is_dynamo_compiling():
            raise ValueError(f"{self.name}: context is given, allowed None under torch.compile")
        given["context"] = _context_number(context)
        for name, default in self.defaults.items():
            if given[name] is None:
                given[name] = default
        for name in self.dtype_names:
            given[name] = _dtype(self.name, name, given[name])
        inputs = [given[name] for name in self.inputs]
        is_differentiated = False
        for i in self.tensors:
            x = inputs[i]
            if x is not None and self.inputs[i] in NO_GRADIENT:
                x = inputs[i] = torch.as_tensor(x, device=inputs[0].device if isinstance(inputs[0], torch.Tensor) else None)
            if x is not None and not isinstance(x, torch.Tensor):
                raise TypeError(f"{self.name}: {self.inputs[i]} is of type {type(x).__name__}, allowed torch tensors where one is differentiated")
            is_differentiated = is_differentiated or (x is not None and x.requires_grad)
        if not torch.compiler.is_compiling():
            self._refuse_tangents(inputs)
        save = []
        if self.saves:
            # the chunk form alone saves, in float32; a graph of torch.jit.trace is the same with and without gradients; on CUDA a call
            # that is given `saved` runs on cuda_portable, and the backward of sm90_chunk makes the states again
            has_saved = (given["form"] in ("auto", "chunk") and given["q"].dtype != torch.float64 and not _forces_what_saves_nothing(context)
                         and not torch.jit.is_tracing() and not given["q"].is_cuda)
            save = [is_differentiated and has_saved and torch.is_grad_enabled()]
        found = self.run(*inputs, *save)
        if len(self.results) == 1:
            return found[0] if self.saves else found
        return tuple(x if _is_asked_for(name, given) else None for name, x in zip(self.results, found))


OPERATORS = {}
for _function in _build.functions():
    if _function.direction == _build.FORWARD:
        OPERATORS[_function.name] = Operator(_function, _build.VERBS[getattr(ops, _function.name)])


def call(name, values):
    """The function `name` of fastweight.ops through its operator; `values` in the order of its signature."""
    return OPERATORS[name](values)
