# SPDX-License-Identifier: Apache-2.0
"""Writes tests/oracle/golden: the answers of the NumPy truth as files that need no NumPy to be read.

    python -m oracle.make_golden          (from tests/) writes all files and SHA256SUMS
    python -m oracle.make_golden --check  compares the files with what the oracle says now, writes nothing

One pair a catalogue row: <row>.json lists cases; each case has `op`, `settings` (the fields of a call that differ from their
defaults), `cu_seqlens` when packed, and `tensors`, name -> shape and offset into <row>.bin. Offsets count numbers; the .bin
file is raw little-endian fp64, row-major, back to back. Names are those of recurrence.h: operands, d_o and d_final_* going
in, o, final_* and the gradients coming out. neighbours.json holds the other operations the same way.

The rule. These files and the oracle (recurrence.py, neighbours.py, gates.py, cases.py) are the truth. They never change in
the same change as a kernel or anything else under src/. A change here says in its message which formula was wrong, is
checked against central differences and against the C++ reference, and carries the new SHA256SUMS.
"""
import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from . import cases, gates, neighbours
from .recurrence import Call, backward, forward

GOLDEN = Path(__file__).parent / "golden"
AXES = [(gate, erase) for gate in ("none", "scalar", "vector")
        for erase in ("none", "shared_after", "shared_before", "independent")]


def row_calls(op):
    """name -> call. Sizes are chosen so that B, T, H, HV, K, V differ from each other and T crosses 16, 32 and 64."""
    if op == "by_axes":
        return {f"{gate}_{erase}": cases.make(op, seed=50 + i, B=2, T=9, H=1, HV=2, K=3, V=4, gate=gate, erase=erase)
                for i, (gate, erase) in enumerate(AXES)}
    out = {
        "batch": cases.make(op, seed=20, B=2, T=5, H=1, HV=3, K=3, V=4),
        "packed": cases.make(op, seed=21, T=23, H=2, HV=4, K=5, V=3, cu=[0, 0, 4, 23, 23], layout="vk"),
        "long": cases.make(op, seed=22, T=70, H=1, K=4, V=3, strength=0.2, scale=0.6),
        "no_state": cases.make(op, seed=23, B=3, T=17, H=1, HV=2, K=2, V=7, state=False),
    }
    gated = op in ("simple_gla", "gla", "gated_delta_rule", "kda")
    if gated:
        out["strong_gates"] = cases.make(op, seed=24, T=40, H=1, K=4, V=3, strength=20.0)
        for kind in ("softplus", "log_sigmoid", "bounded", "rwkv7"):
            beta = {"beta_input": "sigmoid_twice"} if op in ("gated_delta_rule", "kda") else {}
            out["gate_" + kind] = cases.make(op, seed=25, B=2, T=6, H=1, HV=2, K=3, V=2, gate_input=kind, qk_norm=True, **beta)
    if op == "linear_attn":
        out["normalizer"] = cases.make(op, seed=26, T=20, H=2, HV=4, K=3, V=4, cu=[0, 7, 7, 20], normalizer=True)
    if op in ("comba", "delta_rule"):
        out["norm_inside"] = cases.make(op, seed=27, T=19, H=1, HV=2, K=4, V=3, qk_norm=True, beta_input="sigmoid")
    if op == "lightning":
        out["layer"] = cases.make(op, seed=28, T=6, H=4, K=3, V=2, layer_idx=3, num_layers=8)
    if op == "gated_delta_product":
        out["no_gate"] = cases.make(op, seed=29, B=2, T=11, H=1, HV=2, K=3, V=4, n_sub=3)
        out["no_gate"].g = None
    return out


def row_cases(op):
    default = Call(op=op).settings()
    for name, call in row_calls(op).items():
        seeds = cases.incoming(call)
        tensors = {**call.given(), **seeds, **forward(call), **backward(call, **seeds)}
        settings = {key: value for key, value in call.settings().items() if value != default[key]}
        entry = {"name": name, "op": op, "settings": settings}
        if call.cu_seqlens is not None:
            entry["cu_seqlens"] = [int(x) for x in call.cu_seqlens]
        yield entry, tensors


def neighbour_cases():
    rng = np.random.default_rng(40)
    normal = lambda *shape: rng.standard_normal(shape)  # noqa: E731
    for width in (1, 2, 3, 4, 5, 8):
        cu = [0, 1, 3, 6, 6, 11]
        given = dict(x=normal(1, 11, 5), weight=normal(5, width), bias=normal(5), initial_state=normal(5, 5, width - 1))
        dy, d_final = normal(1, 11, 5), normal(5, 5, width - 1)
        out = neighbours.short_conv(**given, cu_seqlens=cu, activation="silu")
        grads = neighbours.short_conv_backward(**given, cu_seqlens=cu, activation="silu", dy=dy, d_final_state=d_final)
        yield ({"name": f"short_conv_{width}", "op": "short_conv", "settings": {"activation": "silu"}, "cu_seqlens": cu},
               {**given, "dy": dy, "d_final_state": d_final, **out, **grads})
    for kind, gate in (("l2", "none"), ("rms", "none"), ("rms", "silu"), ("rms", "sigmoid")):
        given = dict(x=normal(4, 7))
        if kind == "rms":
            given["weight"] = normal(7)
        if gate != "none":
            given["gate"] = normal(4, 7)
        dy, settings = normal(4, 7), {"kind": kind, "gate_activation": gate}
        yield ({"name": f"norm_{kind}_{gate}", "op": "norm", "settings": settings},
               {**given, "dy": dy, "y": neighbours.norm(**settings, **given),
                **neighbours.norm_backward(dy=dy, **settings, **given)})
    for kind in ("softplus", "log_sigmoid", "bounded", "rwkv7", "sigmoid", "sigmoid_twice"):
        given = dict(x=normal(2, 5, 3, 4) * 3)
        given["x"][0, 0, 0] = [-100, -30, 30, 90]
        if kind in ("softplus", "bounded"):
            given.update(a_log=0.3 * normal(3), dt_bias=normal(3, 4))
        dy = normal(2, 5, 3, 4)
        grads = dict(zip(("dx", "d_a_log", "d_dt_bias"), gates.gate_backward(kind, dy, **given)))
        yield ({"name": "gate_" + kind, "op": "gate_activation", "settings": {"kind": kind}},
               {**given, "dy": dy, "y": gates.gate(kind, **given),
                **{key: value for key, value in grads.items() if value is not None}})
    for kind in ("identity", "elu_plus_one", "silu", "relu"):
        x, dy = normal(3, 6) * 2, normal(3, 6)
        yield ({"name": "feature_" + kind, "op": "feature_map", "settings": {"kind": kind}},
               {"x": x, "dy": dy, "y": gates.feature_map(kind, x), "dx": dy * gates.feature_map_slope(kind, x)})
    for name, window, theta, cu in (("full", 0, 0.0, None), ("window", 5, 100.0, [0, 0, 8, 21])):
        B, T = (2, 9) if cu is None else (1, 21)
        given = dict(q=normal(B, T, 4, 6), k=normal(B, T, 2, 6), v=normal(B, T, 2, 5))
        d_o, settings = normal(B, T, 4, 5), dict(window=window, rope_theta=theta)
        entry = {"name": "attention_" + name, "op": "attention", "settings": settings}
        if cu is not None:
            entry["cu_seqlens"] = cu
        yield entry, {**given, "d_o": d_o, "o": neighbours.attention(**given, **settings, cu_seqlens=cu),
                      **neighbours.attention_backward(d_o, **given, **settings, cu_seqlens=cu)}
    given = dict(x=normal(5, 7), weight=normal(3, 7), bias=normal(3))
    dy = normal(5, 3)
    yield ({"name": "linear", "op": "linear", "settings": {}},
           {**given, "dy": dy, "y": neighbours.linear(**given), **neighbours.linear_backward(dy, **given)})


def pack(entries):
    """(json text, bytes)"""
    listed, chunks, offset = [], [], 0
    for entry, tensors in entries:
        places = {}
        for name, x in tensors.items():
            places[name] = {"shape": list(x.shape), "offset": offset}
            chunks.append(np.ascontiguousarray(x, "<f8").tobytes())
            offset += x.size
        listed.append({**entry, "tensors": places})
    lines = ['{"format": "fastweight-golden", "version": 1, "cases": [']
    for i, case in enumerate(listed):
        tensors = case.pop("tensors")
        lines.append(json.dumps(case)[:-1] + ', "tensors": {')
        lines.append(",\n".join(f" {json.dumps(name)}: {json.dumps(place)}" for name, place in tensors.items()))
        lines.append("}}" if i == len(listed) - 1 else "}},")
    return "\n".join(lines) + "\n]}\n", b"".join(chunks)


def load(name, folder=GOLDEN):
    """[(case, tensors)] of <name>.json and <name>.bin."""
    numbers = np.fromfile(folder / f"{name}.bin", "<f8")
    out = []
    for case in json.loads((folder / f"{name}.json").read_text())["cases"]:
        tensors = {}
        for key, place in case["tensors"].items():
            size = int(np.prod(place["shape"]))
            tensors[key] = numbers[place["offset"]:place["offset"] + size].reshape(place["shape"])
        out.append((case, tensors))
    return out


def names():
    return [*cases.ROW_NAMES, "by_axes", "neighbours"]


def entries_of(name):
    return neighbour_cases() if name == "neighbours" else row_cases(name)


def check():
    """Largest difference between files and oracle, relative to each tensor's peak."""
    worst = 0.0
    for name in names():
        for (case, kept), (entry, now) in zip(load(name), entries_of(name), strict=True):
            assert case["name"] == entry["name"] and set(kept) == set(now)
            for key, x in now.items():
                worst = max(worst, float(np.abs(kept[key] - x).max(initial=0) / max(np.abs(x).max(initial=0), 1e-300)))
    return worst


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare and write nothing")
    if parser.parse_args().check:
        worst = check()
        print(f"largest relative difference {worst:.1e}, allowed 1e-13")
        return 0 if worst <= 1e-13 else 1
    sums = []
    for name in names():
        text, data = pack(entries_of(name))
        (GOLDEN / f"{name}.json").write_text(text)
        (GOLDEN / f"{name}.bin").write_bytes(data)
        sums += [(hashlib.sha256(text.encode()).hexdigest(), f"{name}.json"), (hashlib.sha256(data).hexdigest(), f"{name}.bin")]
    (GOLDEN / "SHA256SUMS").write_text("".join(f"{digest}  {name}\n" for digest, name in sorted(sums, key=lambda x: x[1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
