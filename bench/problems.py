# SPDX-License-Identifier: Apache-2.0
"""The problems that are timed, our own runners for them, their floors and their truth."""
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "python")]

import c_call  # noqa: E402
import fastweight_c as fw  # noqa: E402
from field import part_of_heads  # noqa: E402
from oracle import cases, gates, yardstick  # noqa: E402
from oracle.recurrence import backward, forward  # noqa: E402

# Floating-point operations a token (sub-step) and value head in units of K V, the least that any form needs: products with the
# state (2 each: read by q, read by the erase key, one or two rank-one writes); backward: rebuilding states, their gradients, and
# one product for each gradient.
STATE_FLOPS = {"none": {"forward": 4, "backward": 10}, "shared": {"forward": 6, "backward": 16},
               "independent": {"forward": 8, "backward": 20}}


def make(op, B, T, H, HV, K, V, dtype, seed=0, n_sub=None):
    """Unit q and k, sigmoid beta, gates of log-sigmoid size; values as the storage type holds them."""
    call = cases.make(op, seed=seed, B=B, T=T, H=H, HV=HV, K=K, V=V, state=False, n_sub=n_sub)
    call.q = cases.unit(call.q)
    rng = np.random.default_rng(seed + 1)
    if call.g is not None:
        call.g = -np.log1p(np.exp(-rng.standard_normal(call.g.shape)))
    if call.beta is not None:
        call.beta = gates.sigmoid(rng.standard_normal(call.beta.shape))
    return c_call.rounded(call, dtype)


def incoming(call, dtype):
    shape = (*call.q.shape[:2], *call.v.shape[2:])
    return fw.load(fw.store(np.random.default_rng(2).standard_normal(shape), dtype))


class Ours:
    """A call that is set up once and timed many times."""

    def __init__(self, context, call, dtype, direction, d_o=None):
        self.context, self.call, self.dtype, self.direction = context, call, dtype, direction
        self.running = c_call.Running(call, dtype)
        desc, shapes = self.running.desc, self.running.shapes
        storage = fw.STORAGE[dtype]
        self.outputs = {}
        self.grads = None
        if direction == "backward":
            self.grads = fw.RecurrenceGrads(d_o=fw.store(d_o, dtype))
            for name, of in c_call.GRADS.items():
                if of in self.running.inputs:
                    like = self.running.inputs[of]
                    self.outputs[name] = np.zeros(like.shape, like.dtype)
                    self.grads.set(name, self.outputs[name])
        else:
            self.outputs["o"] = np.zeros(shapes["o"], storage)
            desc.set("o", self.outputs["o"])
            state = np.zeros(shapes["final_state"], np.float32)
            if direction == "step":
                self.state = state
                desc.set("state", state)
            else:
                self.outputs["final_state"] = state
                desc.set("final_state", state)
        number = {"forward": fw.FORWARD, "backward": fw.BACKWARD, "step": fw.STEP}[direction]
        size = fw.workspace_size(context, "recurrence", desc, number)
        self.workspace = np.zeros(size + 64, np.uint8)
        verb = getattr(fw.library(), f"fw_recurrence_{direction}")
        middle = (fw.ct.byref(self.grads),) if self.grads is not None else ()
        arguments = (context.pointer, fw.ct.byref(desc), *middle, self.workspace.ctypes.data_as(fw.ct.c_void_p),
                     fw.ct.c_uint64(size))
        self.run = lambda: fw.ok(verb(*arguments))

    def answers(self):
        """One call from an empty state: name -> fp64 array."""
        if self.direction == "step":
            self.state[:] = 0
        self.run()
        self.impl = fw.last_impl()
        out = {name: fw.load(x) for name, x in self.outputs.items()}
        if self.direction == "step":
            out["final_state"] = fw.load(self.state)
        return out


class Truth:
    """fp64 answers of the first and the last q/k head (of all heads where the gate depends on the head's number)."""

    def __init__(self, call, direction, d_o=None):
        H, group = call.q.shape[2], call.v.shape[2] // call.q.shape[2]
        self.parts = []
        for h in sorted({0, H - 1}):
            part, cut = call, (slice(None), slice(None))
            if call.op not in ("retention", "lightning"):
                cut = slice(h, h + 1), slice(h * group, (h + 1) * group)
                part = part_of_heads(call, *cut)
            answer = backward(part, d_o=d_o[:, :, cut[1]]) if direction == "backward" else forward(part)
            self.parts.append((cut, answer))
            if part is call:
                break

    def error(self, answers):
        """Largest relative RMS error over the tensors that were answered."""
        worst = 0.0
        for (heads, value_heads), truth in self.parts:
            for name, x in truth.items():
                if name not in answers:
                    continue
                cut = heads if c_call.GRADS.get(name) in ("q", "k", "a", "b", "p", "erase_gate") else value_heads
                mine = answers[name][:, cut] if name == "final_state" else answers[name][:, :, cut]
                worst = max(worst, yardstick.rms(mine - x) / max(yardstick.rms(x), 1e-30))
        return worst


def floor_ms(call, dtype, direction, ceilings):
    """The larger of FLOPs over the measured matrix rate and bytes over the measured copy rate."""
    B, T, H, K = call.q.shape
    HV, V = call.v.shape[2:]
    _, erase = call.axes()
    kind = "shared" if erase.startswith("shared") else erase
    heads = B * T * call.n_sub * HV
    flops = STATE_FLOPS[kind]["backward" if direction == "backward" else "forward"] * K * V * heads
    size = {"f32": 4, "bf16": 2, "f16": 2}[dtype]
    inputs = sum(x.size * (4 if name in ("g", "beta") else size) for name, x in call.given().items())
    moved = inputs * (2 if direction == "backward" else 1) + B * T * HV * V * size
    if direction == "step":
        moved += 2 * B * HV * K * V * 4
    return 1e3 * max(flops / (ceilings.matrix_gflops * 1e9), moved / (ceilings.copy_gbs * 1e9))
