# SPDX-License-Identifier: Apache-2.0
"""Runs a neighbour through the C library with guarded outputs and inputs checked unchanged; answers as fp64."""
import numpy as np

import fastweight_c as fw

ACTIVATIONS = {"none": 0, "silu": 1, "sigmoid": 2}
KINDS = {"norm": {"l2": 0, "rms": 1},
         "gate_activation": {"softplus": 1, "log_sigmoid": 2, "bounded": 3, "rwkv7": 4, "sigmoid": 5, "sigmoid_twice": 6},
         "feature_map": {"identity": 0, "elu_plus_one": 1, "silu": 2, "relu": 3}}


def numbers(op, settings):
    out = {}
    for name, value in settings.items():
        if name in ("activation", "gate_activation"):
            value = ACTIVATIONS[value]
        elif name == "kind":
            value = KINDS[op][value]
        out[name] = value
    return out


def call(context, op, direction, inputs, outputs, settings=None, grads=None, in_place=None):
    """inputs: name -> storage array. outputs: name -> (shape, numpy dtype); they belong to the descriptor, or to the gradients
    when `grads` (name -> storage array, going in) is given. in_place: name -> array that the call may change."""
    desc_type, grads_type = fw.DESCRIPTORS[op]
    kept = {name: x.copy() for name, x in {**inputs, **(grads or {})}.items()}
    desc = desc_type(**inputs, **(in_place or {}), **numbers(op, settings or {}))
    grad_desc = grads_type(**grads) if grads is not None else None
    guarded = {}
    for name, (shape, dtype) in outputs.items():
        guarded[name] = fw.Guarded(shape, dtype)
        (desc if grad_desc is None else grad_desc).set(name, guarded[name].array)
    fw.run(context, op, desc, direction, grad_desc)
    for name, x in {**inputs, **(grads or {})}.items():
        assert x.tobytes() == kept[name].tobytes(), f"input {name} was changed"
    for name, x in guarded.items():
        x.check(name)
    return {name: fw.load(x.array) for name, x in guarded.items()}


def like(*names_and_arrays):
    """{"dx": (shape, dtype)} from ("dx", x) pairs."""
    return {name: (x.shape, x.dtype) for name, x in names_and_arrays if x is not None}


def short_conv(context, x, weight, bias=None, initial_state=None, cu_seqlens=None, activation="none", final=True, dtype="f32"):
    """Outputs of a forward on fp64 arrays, stored as `dtype`."""
    N = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    inputs = {name: fw.store(value, dtype) for name, value in
              (("x", x), ("weight", weight), ("bias", bias), ("initial_state", initial_state)) if value is not None}
    if cu_seqlens is not None:
        inputs["cu_seqlens"] = np.asarray(cu_seqlens, np.int64)
    outputs = {"y": (x.shape, fw.STORAGE[dtype])}
    if final:
        outputs["final_state"] = ((N, x.shape[2], weight.shape[1] - 1), fw.STORAGE[dtype])
    return call(context, "short_conv", fw.FORWARD, inputs, outputs, {"activation": activation})


def norm(context, kind, x, weight=None, gate=None, gate_activation="none", dtype="f32", eps=0.0):
    inputs = {name: fw.store(value, dtype) for name, value in (("x", x), ("weight", weight), ("gate", gate)) if value is not None}
    settings = {"kind": kind, "gate_activation": gate_activation, "eps": eps}
    return call(context, "norm", fw.FORWARD, inputs, {"y": (x.shape, fw.STORAGE[dtype])}, settings)["y"]
