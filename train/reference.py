# SPDX-License-Identifier: Apache-2.0
"""The network of docs/model_format.md one token at a time, written from that page alone.

It shares no code with the training network, so that each checks the other. Slow and exact: fp32 or fp64 on the CPU.
"""
import json
import math

import torch
import torch.nn.functional as F


class Reference:
    def __init__(self, folder, dtype=torch.float32):
        from safetensors.torch import load_file
        with open(f"{folder}/config.json", encoding="utf-8") as f:
            self.c = json.load(f)
        self.w = {k: v.to(dtype) for k, v in load_file(f"{folder}/model.safetensors").items()}
        self.dtype = dtype
        self.reset()

    def reset(self):
        c, self.position = self.c["gated_delta_rule"], 0
        self.layers = []
        for kind in self.c["layers"]:
            if kind == "gated_delta_rule":
                zeros = lambda n: torch.zeros(c["conv_size"], n, dtype=self.dtype)
                qk = c["n_heads"] * c["head_k_dim"]
                self.layers.append({"q": zeros(qk), "k": zeros(qk), "v": zeros(c["n_value_heads"] * c["head_v_dim"]),
                                    "state": torch.zeros(c["n_value_heads"], c["head_k_dim"], c["head_v_dim"], dtype=self.dtype)})
            else:
                self.layers.append({"k": [], "v": []})

    def rms(self, x, weight):
        return x / (x.square().mean(-1, keepdim=True) + self.c["norm_eps"]).sqrt() * weight

    def gdr(self, x, p, s):
        c = self.c["gated_delta_rule"]
        h, hv, kd, vd = c["n_heads"], c["n_value_heads"], c["head_k_dim"], c["head_v_dim"]
        out = {}
        for name in "qkv":
            s[name] = torch.cat([s[name][1:], (self.w[f"{p}.{name}_proj.weight"] @ x)[None]])
            out[name] = F.silu((s[name].T * self.w[f"{p}.{name}_conv1d.weight"][:, 0]).sum(1))
        unit = lambda y: y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        q, k = (unit(out[n].view(h, kd)).repeat_interleave(hv // h, 0) for n in "qk")
        v = out["v"].view(hv, vd)
        beta = torch.sigmoid(self.w[f"{p}.b_proj.weight"] @ x)
        g = -self.w[f"{p}.A_log"].exp() * F.softplus(self.w[f"{p}.a_proj.weight"] @ x + self.w[f"{p}.dt_bias"])
        state = s["state"] * g.exp()[:, None, None]
        error = v - (state * k[:, :, None]).sum(1)
        s["state"] = state = state + (k * beta[:, None])[:, :, None] * error[:, None, :]
        o = self.rms((state * q[:, :, None]).sum(1) * kd ** -0.5, self.w[f"{p}.o_norm.weight"])
        return self.w[f"{p}.o_proj.weight"] @ (o.flatten() * F.silu(self.w[f"{p}.g_proj.weight"] @ x))

    def attention(self, x, p, s, window):
        c = self.c["attention"]
        n, nk, d = c["n_heads"], c["n_kv_heads"], c["head_dim"]
        angle = torch.tensor([self.position * c["rope_theta"] ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float64)
        cos, sin = angle.cos().to(self.dtype), angle.sin().to(self.dtype)

        def turn(y):
            a, b = y[:, :d // 2], y[:, d // 2:]
            return torch.cat([a * cos - b * sin, b * cos + a * sin], 1)

        q = turn((self.w[f"{p}.q_proj.weight"] @ x).view(n, d))
        s["k"] = (s["k"] + [turn((self.w[f"{p}.k_proj.weight"] @ x).view(nk, d))])[-window:]
        s["v"] = (s["v"] + [(self.w[f"{p}.v_proj.weight"] @ x).view(nk, d)])[-window:]
        k, v = (torch.stack(s[i], 1).repeat_interleave(n // nk, 0) for i in "kv")
        weight = ((k @ q[:, :, None])[..., 0] * d ** -0.5).softmax(-1)
        return self.w[f"{p}.o_proj.weight"] @ (weight[:, None] @ v)[:, 0].flatten()

    @torch.no_grad()
    def step(self, token):
        """The logits after one more byte, [vocab_size]."""
        if token == 0:
            self.reset()
        w, x = self.w, self.w["embed.weight"][token]
        for i, kind in enumerate(self.c["layers"]):
            h = self.rms(x, w[f"layers.{i}.mixer_norm.weight"])
            if kind == "gated_delta_rule":
                x = x + self.gdr(h, f"layers.{i}.mixer", self.layers[i])
            else:
                window = self.c["attention"]["window"] if kind == "sliding_attention" else self.c["max_context"]
                x = x + self.attention(h, f"layers.{i}.mixer", self.layers[i], window)
            h = self.rms(x, w[f"layers.{i}.mlp_norm.weight"])
            m = f"layers.{i}.mlp"
            x = x + w[f"{m}.down_proj.weight"] @ (F.silu(w[f"{m}.gate_proj.weight"] @ h) * (w[f"{m}.up_proj.weight"] @ h))
        self.position += 1
        return w["embed.weight" if self.c["tie_embeddings"] else "lm_head.weight"] @ self.rms(x, w["norm.weight"])


def bits(logits, target):
    """Bits of the byte `target` under `logits`."""
    return -torch.log_softmax(logits.double(), -1)[target].item() / math.log(2)
