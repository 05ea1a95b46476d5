# SPDX-License-Identifier: Apache-2.0
"""The operators of fla as one loop over tokens in float64, written from their formulas, with torch's autograd for gradients.

Also makes the inputs of every function of fastweight.fla.ops, and says what the loop makes of them."""
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from package_calls import IS_CUDA, REAL, fastweight, needs_torch, seeded, torch  # noqa: E402, F401

if torch is None:
    pytest.skip("not run: torch is not installed", allow_module_level=True)

import fastweight.fla.ops as fla_ops  # noqa: E402

# The loop and the engine's float64 reference sum at most 64 terms over 30 tokens each: 64 * 30 * 1.1e-16 = 2e-13 of the peak. CUDA
# has no float64: its functions get float32, 64 * 30 * 6e-8 = 1.2e-4, and the loop float64 of the same numbers.
AGREE = 1.2e-4 if IS_CUDA else 1e-11


def loop(q, k, v, decay=None, *, reads=None, along=None, strength=None, write=None, reads_before=False, state=None, reverse=False):
    """S' = exp(decay) S;  S = S' + k (write v)^T + along (strength * reads^T (S' or S))^T;  o = S^T q. Heads repeated already.

    All [T,HV,...]; decay [T,HV,K or 1,V or 1]; returns (o [T,HV,V], S [HV,K,V])."""
    S = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]) if state is None else state
    rows = [None] * q.shape[0]
    for t in (reversed if reverse else iter)(range(q.shape[0])):
        decayed = S if decay is None else decay[t].exp() * S
        added = k[t].unsqueeze(-1) * (v[t] if write is None else write[t] * v[t]).unsqueeze(-2)
        if reads is not None:
            seen = torch.einsum("hk,hkv->hv", reads[t], S if reads_before else decayed)
            seen = seen if strength is None else seen * strength[t]
            added = added + along[t].unsqueeze(-1) * seen.unsqueeze(-2)
        S = decayed + added
        rows[t] = torch.einsum("hk,hkv->hv", q[t], S)
    return torch.stack(rows) if rows else q.new_zeros(0, *v.shape[1:]), S


def canon(name, a):
    """(q, k, v [B,T,HV,..], the loop's keywords without states) of a call of `name`; everything repeated to value heads."""
    q, k, v = a.get("q", a.get("r")), a["k"], a["v"]
    group = v.shape[2] // q.shape[2]

    def heads(x):
        return x.repeat_interleave(group, 2)

    scale = a.get("scale")
    if scale is None:
        scale = 1.0 if name in ("chunk_rwkv7", "fused_mul_recurrent_rwkv7") else q.shape[-1] ** -0.5
    norm = a.get("use_qk_l2norm_in_kernel")

    def unit(x):
        return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() if norm else x

    q, k = heads(unit(q)) * scale, heads(unit(k))
    decay = None

    def plus(x):
        return x if decay is None else decay + x

    if name.endswith("retention"):
        rates = torch.tensor([math.log(1 - 2.0 ** (-5 - h)) for h in range(v.shape[2])], dtype=v.dtype)
        decay = rates.view(1, 1, -1, 1, 1).expand(*v.shape[:3], 1, 1)
    if "lightning" in name:
        rate = -(8 / v.shape[2]) * (1 - a["layer_idx"] / a["num_layers"])
        decay = (rate * torch.arange(v.shape[2], dtype=v.dtype)).view(1, 1, -1, 1, 1).expand(*v.shape[:3], 1, 1)
    for word in ("g", "gk", "gv", "g_gamma") + (("w",) if "rwkv7" in name else ()):
        x = a.get(word)
        if x is None:
            continue
        if word == "g_gamma":
            decay = plus(x.view(1, 1, -1, 1, 1).expand(*v.shape[:3], 1, 1))
        elif x.ndim == 3:
            decay = plus(x[..., None, None])
        else:
            decay = plus(x.unsqueeze(-2) if word == "gv" else x.unsqueeze(-1))
    more = {}
    if "gdn2" in name:
        more = {"reads": heads(a["b"]) * k, "along": -k, "write": a["w"]}
    elif "delta_rule" in name and "plr" not in name or "kda" in name or "comba" in name or "product" in name:
        beta = a.get("beta")
        beta = torch.ones_like(v[..., :1]) if beta is None else beta if beta.ndim == 4 else beta.unsqueeze(-1)
        p = a.get("p")
        more = {"reads": k if p is None else heads(unit(p)), "along": -k, "strength": beta, "write": beta, "reads_before": "comba" in name}
    elif "kk" in a:
        more = {"reads": -a["kk"], "along": a["kk"] * a["a"], "reads_before": True}
    elif "a" in a:
        more = {"reads": a["a"], "along": a["b"], "reads_before": True}
    return q, k, v, decay, more


def truth(name, a, reverse=False):
    """(o, final_state [N,HV,K,V]) by the loop, in float64."""
    a = {word: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for word, x in a.items()}
    q, k, v, decay, more = canon(name, a)
    bounds = a.get("cu_seqlens")
    spans = [(b, 0, q.shape[1]) for b in range(q.shape[0])] if bounds is None else \
        [(0, i, j) for i, j in zip(bounds.tolist()[:-1], bounds.tolist()[1:])]
    state = a.get("initial_state")
    if state is not None and a.get("state_v_first"):
        state = state.transpose(-1, -2)
    rows, finals = [], []
    for n, (b, i, j) in enumerate(spans):
        def cut(x):
            return x[b, i:j] if isinstance(x, torch.Tensor) else x
        o, S = loop(cut(q), cut(k), cut(v), cut(decay), state=None if state is None else state[n], reverse=reverse,
                    **{word: cut(x) for word, x in more.items()})
        rows.append(o)
        finals.append(S.transpose(-1, -2) if a.get("state_v_first") else S)
    o = torch.stack(rows) if bounds is None else torch.cat(rows).unsqueeze(0)
    return o, torch.stack(finals)


def inputs(name, seed=0, B=2, T=7, H=2, HV=None, K=5, V=3, cu=None, dtype=REAL, state=True, **settings):
    """Random arguments of the function `name`: keys of unit length, gates below 0. `settings` go along as they are."""
    random = seeded(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    def unit(x):
        return torch.nn.functional.normalize(x, dim=-1)

    import inspect
    known = inspect.signature(getattr(fla_ops, name, None) or deep(name)).parameters
    HV = HV or H
    n = settings.get("num_householder", 1)
    made = {"q": normal(B, T, H, K), "k": unit(normal(B, T * n, H, K)), "v": normal(B, T * n, HV, V)}
    made["r"] = made["q"]
    vector = "kda" in name or "gdn2" in name or "gla" in name and "simple" not in name
    made["g"] = -0.3 * normal(*((B, T, HV, K) if vector else (B, T, HV))).abs()
    made["w"] = torch.rand(B, T, HV, V, generator=random, dtype=torch.float64) if "gdn2" in name else -0.3 * normal(B, T, H, K).abs()
    made["beta"] = torch.rand(B, T * n, HV, generator=random, dtype=torch.float64)
    made["p"] = unit(made["k"] + 0.3 * normal(B, T * n, H, K))
    if "gdn2" in name:
        made["b"] = torch.rand(B, T, H, K, generator=random, dtype=torch.float64)
    elif "kk" in known:
        made["kk"], made["a"] = unit(normal(B, T, H, K)), torch.rand(B, T, H, K, generator=random, dtype=torch.float64)
    else:
        made["a"] = unit(normal(B, T, H, K))
        made["b"] = -made["a"] * torch.rand(B, T, H, 1, generator=random, dtype=torch.float64)
    if "gk" in known and known["gk"].default is known["gk"].empty:
        made["gk"] = -0.3 * normal(B, T, H, K).abs()
    made["layer_idx"], made["num_layers"] = 1, 4
    given = {word: made[word] for word in known if word in made}
    if cu is not None:
        given["cu_seqlens"] = torch.tensor(cu, dtype=torch.int32)
    if state and "initial_state" in known:
        N = B if cu is None else len(cu) - 1
        given["initial_state"] = normal(N, HV, V, K) if settings.get("state_v_first") else normal(N, HV, K, V)
    given.update(settings)
    return {word: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x for word, x in given.items()}


def deep(name):
    """A function that fla.ops itself does not export."""
    import importlib
    from fastweight.fla._table import ENTRIES
    return getattr(importlib.import_module(f"fastweight.fla.ops.{ENTRIES[name].module}"), name)


def function(name):
    return getattr(fla_ops, name, None) or deep(name)


def near(found, expected, what, allowed=AGREE):
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    error = (found.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
    peak = max(expected.abs().max().item() if expected.numel() else 0.0, 1e-30)
    assert error <= allowed * peak, f"{what}: {error:.2e} of {peak:.2e}"
