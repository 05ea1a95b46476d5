# SPDX-License-Identifier: Apache-2.0
"""Every layer token by token in plain torch operators, from the formulas of the papers and of docs/layers.md.

plain(case, parameters, x) -> o [B,T,D] in x's dtype (float64), differentiable by autograd. It shares no code with the layers.
"""
import inspect
import math

import torch
import torch.nn.functional as F

from layer_cases import CASES


def conv(x, p, name, silu=True):
    """x [B,T,D]."""
    weight, bias = p[f"{name}_conv1d.weight"], p.get(f"{name}_conv1d.bias")
    taps = weight.shape[2]
    padded = torch.cat([x.new_zeros(x.shape[0], taps - 1, x.shape[2]), x], 1)
    y = sum(padded[:, j:j + x.shape[1]] * weight[:, 0, j] for j in range(taps))
    y = y if bias is None else y + bias
    return y * torch.sigmoid(y) if silu else y


def qkv(x, p, activated="qkv", silu="qkv"):
    out = []
    for name in "qkv":
        y = x @ p[f"{name}_proj.weight"].T
        if f"{name}_conv1d.weight" in p:
            y = conv(y, p, name, name in silu)
        elif name in activated:
            y = F.silu(y)
        out.append(y)
    return out


def unit(x):
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def rms(x, weight, eps):
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return y if weight is None else y * weight


def split(x, size):
    return x.reshape(*x.shape[:-1], -1, size)


def low_rank(x, p, name):
    y = x @ p[f"{name}.0.weight"].T @ p[f"{name}.1.weight"].T
    return y + p[f"{name}.1.bias"] if f"{name}.1.bias" in p else y


def read(q, k, v, decay=None, steps=None, scale=None):
    """The recurrence. q, k [B,T,H,K], v [B,T,HV,V]; decay [B,T,HV,1 or K] multiplies S; steps(t, S~, S, k) -> S after token t."""
    group = v.shape[2] // q.shape[2]
    q = q.repeat_interleave(group, 2)
    state = q.new_zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    out = []
    for t in range(q.shape[1]):
        kept = state if decay is None else state * decay[:, t, :, :, None]
        state = steps(t, kept, state)
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * (q.shape[-1] ** -0.5 if scale is None else scale))
    return torch.stack(out, 1)


def add(k, v):
    return torch.einsum("bhk,bhv->bhkv", k, v)


def at(state, key):
    return torch.einsum("bhkv,bhk->bhv", state, key)


def wide(x, count):
    return x.repeat_interleave(count // x.shape[2], 2)


def softplus_gate(p, x, a_log):
    return torch.exp(-a_log.exp() * F.softplus(x))


def normed(o, p, a, x, gate, activation):
    o = rms(o, p.get("o_norm.weight"), 1e-5)
    if gate is not None:
        o = o * activation(split(gate, o.shape[-1]))
    return o.flatten(2) @ p["o_proj.weight"].T


def delta_net(x, p, a):
    silu = a["qk_activation"] == "silu"
    q, k, v = qkv(x, p, "qkv" if silu else "v", "qkv" if silu else "v")
    size = p["q_proj.weight"].shape[0] // a["num_heads"]
    q, k, v = split(q, size), split(k, size), split(v, p["v_proj.weight"].shape[0] // a["num_heads"])
    function = {"silu": lambda y: y, "identity": lambda y: y, "relu": torch.relu, "elu": lambda y: torch.where(y > 0, y + 1, y.clamp_max(0).exp())}
    q, k = function[a["qk_activation"]](q), function[a["qk_activation"]](k)
    q, k = (unit(q), unit(k)) if a["qk_norm"] == "l2" else (q / q.sum(-1, keepdim=True), k / k.sum(-1, keepdim=True))
    beta = torch.sigmoid(x @ p["b_proj.weight"].T) if a["use_beta"] else torch.ones_like(q[..., 0])
    beta = beta * 2 if a["allow_neg_eigval"] else beta
    o = read(q, k, v, None, lambda t, kept, state: kept + add(k[:, t], beta[:, t, :, None] * (v[:, t] - at(kept, k[:, t]))))
    return normed(o, p, a, x, x @ p["g_proj.weight"].T if a["use_gate"] else None, F.silu)


def gated_delta_net(x, p, a):
    q, k, v = qkv(x, p)
    q, k, v = unit(split(q, a["head_dim"])), unit(split(k, a["head_dim"])), split(v, int(a["head_dim"] * a["expand_v"]))
    k = wide(k, v.shape[2])
    decay = softplus_gate(p, x @ p["a_proj.weight"].T + p["dt_bias"], p["A_log"])[..., None]
    beta = torch.sigmoid(x @ p["b_proj.weight"].T) * (2 if a["allow_neg_eigval"] else 1)
    o = read(q, k, v, decay, lambda t, kept, state: kept + add(k[:, t], beta[:, t, :, None] * (v[:, t] - at(kept, k[:, t]))))
    return normed(o, p, a, x, x @ p["g_proj.weight"].T if a["use_gate"] else None, F.silu)


def kda(x, p, a):
    q, k, v = qkv(x, p)
    q, k, v = unit(split(q, a["head_dim"])), unit(split(k, a["head_dim"])), split(v, int(a["head_dim"] * a["expand_v"]))
    k = wide(k, v.shape[2])
    z = split(low_rank(x, p, "f_proj") + p["dt_bias"], a["head_dim"])
    rate = p["A_log"].exp()[:, None]
    decay = torch.exp(-rate * F.softplus(z)) if a["lower_bound"] is None else torch.exp(a["lower_bound"] * torch.sigmoid(rate * z))
    beta = torch.sigmoid(x @ p["b_proj.weight"].T) * (2 if a["allow_neg_eigval"] else 1)
    o = read(q, k, v, decay, lambda t, kept, state: kept + add(k[:, t], beta[:, t, :, None] * (v[:, t] - at(kept, k[:, t]))))
    return normed(o, p, a, x, low_rank(x, p, "g_proj"), torch.sigmoid)


def gdn2(x, p, a):
    q, k, v = qkv(x, p)
    q, k, v = unit(split(q, a["head_dim"])), unit(split(k, a["head_dim"])), split(v, int(a["head_dim"] * a["expand_v"]))
    count = v.shape[2]
    z = split(low_rank(x, p, "f_proj") + p["dt_bias"], a["head_dim"])
    decay = wide(torch.exp(-p["A_log"].exp()[:, None] * F.softplus(z)), count)
    erase = wide(split(torch.sigmoid(x @ p["b_proj.weight"].T), a["head_dim"]), count) * (2 if a["allow_neg_eigval"] else 1)
    write = split(torch.sigmoid(x @ p["w_proj.weight"].T), v.shape[-1])
    k = wide(k, count)
    o = read(q, k, v, decay, lambda t, kept, state: kept + add(k[:, t], write[:, t] * v[:, t] - at(kept, erase[:, t] * k[:, t])))
    return normed(o, p, a, x, low_rank(x, p, "g_proj"), torch.sigmoid)


def comba(x, p, a):
    q, k, v = qkv(x, p)
    q, k, v = split(q, a["head_dim"]), split(k, a["head_dim"]), split(v, int(a["head_dim"] * a["expand_v"]))
    key = k * torch.sigmoid(p["decay"])[:, None] if a["use_inner_decay"] else k
    q = q - p["D"][:, None] * key if a["use_output_correction"] else q
    q, k, key = unit(q), wide(unit(k), v.shape[2]), wide(unit(key), v.shape[2])
    decay = softplus_gate(p, x @ p["a_proj.weight"].T + p["dt_bias"], p["A_log"])[..., None]
    beta = torch.sigmoid(x @ p["b_proj.weight"].T)
    o = read(q, k, v, decay, lambda t, kept, state: kept + add(k[:, t], beta[:, t, :, None] * (v[:, t] - at(state, key[:, t]))))
    return normed(o, p, a, x, x @ p["g_proj.weight"].T if a["use_output_gate"] else None, torch.sigmoid)


def gated_delta_product(x, p, a):
    n, (q, k, v) = a["num_householder"], qkv(x, p)
    q = unit(split(q, a["head_dim"]))
    k = unit(k.reshape(*x.shape[:2], n, -1, a["head_dim"]))
    v = v.reshape(*x.shape[:2], n, -1, int(a["head_dim"] * a["expand_v"]))
    k = k.repeat_interleave(v.shape[3] // k.shape[3], 3)
    beta = torch.sigmoid(x @ p["b_proj.weight"].T).reshape(*x.shape[:2], n, -1) * (2 if a["allow_neg_eigval"] else 1)
    decay = softplus_gate(p, x @ p["a_proj.weight"].T + p["dt_bias"], p["A_log"])[..., None] if a["use_forget_gate"] else None

    def steps(t, kept, state):
        for j in range(n):
            kept = kept + add(k[:, t, j], beta[:, t, j, :, None] * (v[:, t, j] - at(kept, k[:, t, j])))
        return kept

    o = read(q, k[:, :, 0], v[:, :, 0], decay, steps)
    return normed(o, p, a, x, x @ p["g_proj.weight"].T if a["use_output_gate"] else None, F.silu)


def additive(x, p, a, decay, turn=None):
    q, k, v = qkv(x, p, "")
    size = p["q_proj.weight"].shape[0] // a["num_heads"]
    value = p["o_proj.weight"].shape[1] // a["num_heads"]
    q, k, v = split(q, size), split(k, size), split(v, value)
    if a["feature_map"] == "relu":
        q, k = torch.relu(q), torch.relu(k)
    if turn is not None:
        q, k = turn(q), turn(k)
    k, v = wide(k, a["num_heads"]), wide(v, a["num_heads"])
    o = read(q, k, v, decay, lambda t, kept, state: kept + add(k[:, t], v[:, t]))
    o = rms(o, p.get("g_norm_swish_gate.weight", p.get("g_norm.weight")), 1e-5).flatten(2)
    gate = {"swish": F.silu, "sigmoid": torch.sigmoid}[a["gate_fn"]]
    if "g_proj.weight" in p:
        o = o * gate(x @ p["g_proj.weight"].T)
    return o @ p["o_proj.weight"].T


def gla(x, p, a):
    g = F.logsigmoid(low_rank(x, p, "gk_proj")) / a["gate_logit_normalizer"]
    g = g if a["clamp_min"] is None else g.clamp_min(a["clamp_min"])
    return additive(x, p, a, wide(split(g, p["q_proj.weight"].shape[0] // a["num_heads"]), a["num_heads"]).exp())


def simple_gla(x, p, a):
    g = F.logsigmoid(x @ p["gk_proj.weight"].T + p["gk_proj.bias"]) / a["gate_logit_normalizer"]
    return additive(x, p, a, g.exp()[..., None])


def turned(y, theta):
    """y [B,T,H,D] at positions 0 .. T-1."""
    half = y.shape[-1] // 2
    angle = torch.tensor([[t * theta ** (-i / half) for i in range(half)] for t in range(y.shape[1])], dtype=torch.float64).to(y)[:, None]
    first, second = y[..., :half], y[..., half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], -1)


def retention(x, p, a):
    rate = torch.tensor([1 - 2.0 ** (-5 - h) for h in range(a["num_heads"])], dtype=torch.float64).to(x)
    return additive(x, p, a, rate[None, None, :, None].expand(*x.shape[:2], -1, 1), lambda y: turned(y, 10000.0))


def lora(x, p, name, act):
    y = act(x @ p[f"{name}.lora.0.weight"].T) @ p[f"{name}.lora.2.weight"].T
    return y + p[f"{name}.lora.2.bias"] if f"{name}.lora.2.bias" in p else y


def rwkv7(x, p, a, v_first=None):
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    xr, xw, xk, xv, xa, xg = (x + (before - x) * p[f"x_{n}"] for n in "rwkvag")
    size = a["head_dim"]
    r, k, v = xr @ p["r_proj.weight"].T, xk @ p["k_proj.weight"].T, xv @ p["v_proj.weight"].T
    decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(lora(xw, p, "w_lora", torch.tanh)))
    if v_first is not None:
        v = v + (v_first - v) * torch.sigmoid(lora(xv, p, "v_lora", lambda y: y))
    rate = torch.sigmoid(lora(xa, p, "a_lora", lambda y: y))
    gate = lora(xg, p, "g_lora", torch.sigmoid)
    key = split(k * p["k_k"], size)
    key = unit(key) if a["fuse_norm"] else key / key.square().sum(-1, keepdim=True).sqrt()
    k = k * (1 + (rate - 1) * p["k_a"])
    r, k, v, rate = split(r, size), split(k, size), split(v, v.shape[-1] // (x.shape[-1] // size)), split(rate, size)
    o = read(r, k, v, split(decay, size), lambda t, kept, state: kept + add(key[:, t] * rate[:, t], -at(state, key[:, t])) + add(k[:, t], v[:, t]),
             scale=1.0)
    center = o - o.mean(-1, keepdim=True)
    o = center / (center.square().mean(-1, keepdim=True) + size * 1e-5).sqrt()
    o = o.flatten(2) * p["g_norm.weight"] + p["g_norm.bias"]
    o = o + ((r * k * p["r_k"]).sum(-1, keepdim=True) * v).flatten(2)
    return (o * gate) @ p["o_proj.weight"].T


def attention(x, p, a):
    size = x.shape[-1] // a["num_heads"]
    q, k, v = (split(x @ p[f"{n}_proj.weight"].T + p.get(f"{n}_proj.bias", 0), size) for n in "qkv")
    if a["qk_norm"]:
        q, k = rms(q, p["q_norm.weight"], 1e-5), rms(k, p["k_norm.weight"], 1e-5)
    q, k = turned(q, a["rope_theta"]), wide(turned(k, a["rope_theta"]), a["num_heads"])
    score = torch.einsum("bthd,bshd->bhts", q, k) * size ** -0.5
    i = torch.arange(x.shape[1])
    seen = (i[:, None] >= i) & (i[:, None] - i < (a["window_size"] or x.shape[1]))
    weight = score.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", weight, wide(v, a["num_heads"])).flatten(2) @ p["o_proj.weight"].T


FORMS = {"DeltaNet": delta_net, "GatedDeltaNet": gated_delta_net, "KimiDeltaAttention": kda, "GatedDeltaNet2": gdn2, "Comba": comba,
         "GatedDeltaProduct": gated_delta_product, "GatedLinearAttention": gla, "SimpleGatedLinearAttention": simple_gla,
         "MultiScaleRetention": retention, "RWKV7Attention": rwkv7, "Attention": attention}


def plain(name, layer, parameters, x, **first):
    """`layer` gives only its constructor's defaults; `parameters` name -> tensor."""
    cls, given = CASES[name]
    arguments = {key: value.default for key, value in inspect.signature(type(layer).__init__).parameters.items()}
    return FORMS[cls](x, parameters, {**arguments, **given}, **first)
