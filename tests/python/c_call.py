# SPDX-License-Identifier: Apache-2.0
"""Runs an oracle call through the C library: poisoned and guarded outputs, inputs checked unchanged, answers as fp64."""
from dataclasses import replace

import numpy as np

import fastweight_c as fw

OPS = {name: i for i, name in enumerate(
    ("by_axes", "linear_attn", "simple_gla", "retention", "lightning", "gla", "delta_rule", "gated_delta_rule", "comba", "kda",
     "gdn2", "gated_delta_product", "iplr", "dplr", "rwkv7"))}
ENUMS = {
    "gate": {None: 0, "none": 0, "scalar": 1, "vector": 2},
    "erase": {None: 0, "none": 0, "shared_after": 1, "shared_before": 2, "independent": 3},
    "gate_input": {"log_decay": 0, "softplus": 1, "log_sigmoid": 2, "bounded": 3, "rwkv7": 4},
    "beta_input": {"plain": 0, "sigmoid": 1, "sigmoid_twice": 2},
    "form": {"auto": 0, "chunk": 1, "recurrent": 2, "parallel": 3},
    "layout": {"kv": 0, "vk": 1, "opaque": 2},
}
GRADS = {"dq": "q", "dk": "k", "dv": "v", "da": "a", "db": "b", "dp": "p", "d_erase_gate": "erase_gate",
         "d_write_gate": "write_gate", "dg": "g", "dbeta": "beta", "d_a_log": "a_log", "d_dt_bias": "dt_bias",
         "d_initial_state": "initial_state", "d_initial_z": "initial_z"}


def storage_of(name, dtype, gate_dtype):
    """Storage of an operand when q has `dtype`."""
    if name in ("a_log", "dt_bias", "initial_z") or name in ("d_final_z", "final_z", "final_state"):
        return "f64" if dtype == "f64" else "f32"
    if name in ("g", "beta"):
        return gate_dtype or ("f64" if dtype == "f64" else "f32")
    if name in ("initial_state", "d_final_state"):
        return "f64" if dtype == "f64" else "f32"
    return dtype


def rounded(call, dtype, gate_dtype=None):
    """The call with every operand rounded to what it is stored as: what the oracle has to be asked about."""
    return replace(call, **{name: fw.load(fw.store(x, storage_of(name, dtype, gate_dtype)))
                            for name, x in call.given().items()})


def rounded_incoming(seeds, dtype):
    return {name: fw.load(fw.store(x, storage_of(name, dtype, None))) for name, x in seeds.items()}


class Running:
    """Descriptor of a call with its inputs in storage; remembers them to see whether the library wrote to any."""

    def __init__(self, call, dtype, gate_dtype=None, form="auto", options=0, views=None, g_min=0.0):
        self.dtype, self.call = dtype, call
        self.inputs = {name: fw.store(x, storage_of(name, dtype, gate_dtype)) for name, x in call.given().items()}
        if call.cu_seqlens is not None:
            self.inputs["cu_seqlens"] = np.asarray(call.cu_seqlens)
        for name, view in (views or {}).items():
            self.inputs[name] = view(self.inputs[name])
        self.copies = {name: x.copy() for name, x in self.inputs.items()}
        self.desc = fw.Recurrence(
            op=OPS[call.op], gate=ENUMS["gate"][call.gate], erase=ENUMS["erase"][call.erase], form=ENUMS["form"][form],
            state_layout=ENUMS["layout"][call.layout], normalizer=int(call.normalizer), qk_norm=int(call.qk_norm),
            gate_input=ENUMS["gate_input"][call.gate_input], beta_input=ENUMS["beta_input"][call.beta_input],
            options=options, n_sub=call.n_sub if call.op == "gated_delta_product" else 0, scale=call.scale or 0.0, g_min=g_min,
            gate_normalizer=call.gate_normalizer if call.gate_input == "log_sigmoid" else 0.0,
            gate_lower_bound=call.gate_lower_bound if call.gate_input == "bounded" else 0.0,
            **({"layer_idx": call.layer_idx, "num_layers": call.num_layers} if call.op == "lightning" else {}),
            **self.inputs)
        B, T, H, K = call.q.shape
        HV, V = call.v.shape[2:]
        N = B if call.cu_seqlens is None else len(call.cu_seqlens) - 1
        state = (N, HV, V, K) if call.layout == "vk" else (N, HV, K, V)
        self.shapes = {"o": (B, T, HV, V), "final_state": state, "final_z": (N, H, K)}
        self.guarded = {}

    def output(self, where, name, shape, dtype):
        self.guarded[name] = fw.Guarded(shape, dtype)
        where.set(name, self.guarded[name].array)

    def finish(self):
        for name, kept in self.copies.items():
            assert self.inputs[name].tobytes() == kept.tobytes(), f"input {name} was changed"
        for name, x in self.guarded.items():
            x.check(name)
        return {name: fw.load(x.array) for name, x in self.guarded.items()}


def forward(context, call, dtype="f64", o_dtype=None, final=True, raw=False, **how):
    running = Running(call, dtype, **how)
    running.output(running.desc, "o", running.shapes["o"], fw.STORAGE[o_dtype or dtype])
    if final:
        wide = np.float64 if dtype == "f64" else np.float32
        running.output(running.desc, "final_state", running.shapes["final_state"], wide)
        if call.normalizer:
            running.output(running.desc, "final_z", running.shapes["final_z"], wide)
    fw.run(context, "recurrence", running.desc, fw.FORWARD)
    out = running.finish()
    return {name: x.array for name, x in running.guarded.items()} if raw else out


def backward(context, call, seeds, dtype="f64", only=None, raw=False, saved=False, **how):
    """Gradients of everything that is given, or of `only`. saved: forward fills a saved buffer that backward then reads."""
    running = Running(call, dtype, **how)
    keep = None
    if saved:
        o = fw.Guarded(running.shapes["o"], fw.STORAGE[dtype])
        running.desc.set("o", o.array)
        keep = fw.Guarded((fw.saved_size(context, running.desc),), np.uint8, offset=1)
        running.desc.saved, running.desc.saved_size = keep.array.ctypes.data, keep.size
        fw.run(context, "recurrence", running.desc, fw.FORWARD)
        keep.check("saved")
        running.desc.o = fw.Tensor()
    stored = {name: fw.store(x, storage_of(name, dtype, None)) for name, x in seeds.items()}
    grads = fw.RecurrenceGrads(**stored)
    for name, of in GRADS.items():
        if of in running.inputs and (only is None or name in only):
            running.output(grads, name, running.inputs[of].shape, running.inputs[of].dtype)
    fw.run(context, "recurrence", running.desc, fw.BACKWARD, grads)
    out = running.finish()
    return {name: x.array for name, x in running.guarded.items()} if raw else out


def step(context, call, state, dtype="f32", o_dtype=None, state_z=None, indices=None, raw=False, **how):
    """T tokens of every sequence onto `state` (storage array, changed in place). The call must not have initial states."""
    running = Running(call, dtype, **how)
    desc = running.desc
    running.output(desc, "o", running.shapes["o"], fw.STORAGE[o_dtype or dtype])
    desc.set("state", state)
    desc.set("state_z", state_z)
    if indices is not None:
        desc.set("state_indices", np.asarray(indices, np.int32))
    fw.run(context, "recurrence", desc, fw.STEP)
    out = running.finish()
    return running.guarded["o"].array if raw else out["o"]


def slice_tokens(call, first, last, **changes):
    """Tokens [first, last) of an unpacked call, without its initial states."""
    n = call.n_sub
    parts = {}
    for name, x in call.given().items():
        if name in ("a_log", "dt_bias", "initial_state", "initial_z"):
            continue
        per = n if name in ("k", "v", "beta", "p", "erase_gate", "write_gate") else 1
        parts[name] = x[:, first * per:last * per]
    return replace(call, **{"initial_state": None, "initial_z": None, **parts, **changes})
