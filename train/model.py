# SPDX-License-Identifier: Apache-2.0
"""The network of docs/model_format.md for training: packed streams of bytes, carried state, documents kept apart.

A zero byte starts a document. A batch row is a stream: segment after segment of one long sequence, `Carry` holding what
the next segment needs. The stages below are pure functions of tensors, so that one compiled copy serves every layer.
"""
import json
import math
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

import delta_rule as dr
from attention import AttentionMasks, attend, rope

GDR, SLIDING, FULL = "gated_delta_rule", "sliding_attention", "full_attention"


@dataclass
class Config:
    layers: list
    d_model: int = 320
    vocab_size: int = 256
    gated_delta_rule: dict = field(default_factory=lambda: dict(
        n_heads=5, n_value_heads=5, head_k_dim=64, head_v_dim=64, conv_size=4))
    attention: dict = field(default_factory=lambda: dict(
        n_heads=5, n_kv_heads=5, head_dim=64, rope_theta=10000.0, window=512))
    mlp_hidden: int = 832
    norm_eps: float = 1e-6
    max_context: int = 2048
    tie_embeddings: bool = False

    def to_json(self):
        return json.dumps({"format": "fastweight-lm", "version": 1, **asdict(self)}, indent=2) + "\n"

    @staticmethod
    def load(path):
        with open(path, encoding="utf-8") as f:
            fields = json.load(f)
        if fields.pop("format") != "fastweight-lm" or fields.pop("version") != 1:
            raise ValueError(f"{path}: not a fastweight-lm version 1 config")
        return Config(**fields)

    def window(self, kind):
        return self.attention["window"] if kind == SLIDING else self.max_context


def norm(x, weight, eps):
    return F.rms_norm(x.float() if x.dtype == torch.bfloat16 else x, (x.shape[-1],), weight, eps)


def l2norm(x):
    y = x.float() if x.dtype == torch.bfloat16 else x
    return y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6)


def linear(x, weight, dtype):
    return F.linear(x.to(dtype), weight.to(dtype))


# ---- stages ----------------------------------------------------------------------------------------------------------

def mlp(x, norm_w, gate, up, down, eps, dtype):
    h = linear(norm(x, norm_w, eps), torch.cat([gate, up]), dtype)
    g, u = h.chunk(2, -1)
    return x + linear(F.silu(g) * u, down, dtype)


def gdr_project(x, norm_w, wq, wk, wv, wg, wb, wa, eps, dtype):
    """-> the raw q, k and v side by side [B,T,.], the output gate, and beta and g before their functions."""
    weight = torch.cat([wq, wk, wv, wg, wb, wa, wa.new_zeros(-2 * wa.shape[0] % 16, wa.shape[1])])
    z = linear(norm(x, norm_w, eps), weight, dtype)
    qkv, n = wq.shape[0] + wk.shape[0] + wv.shape[0], wa.shape[0]
    raw, gate, small = z.split([qkv, wg.shape[0], z.shape[-1] - qkv - wg.shape[0]], -1)
    return raw, gate, small[..., :n], small[..., n:2 * n]


def conv_heads(raw, tail, doc, tail_doc, heads, norms, *weights):
    """raw [B,T,*], tail [B,W-1,*] before it; weights [n*D,1,W] side by side, the heads n and the norm flag of each.

    -> silu of the causal convolution within documents, normalised per head where flagged, [B,n,T,D] of each.
    """
    t = raw.shape[1]
    full, docs, outs, first = torch.cat([tail, raw], 1), torch.cat([tail_doc, doc], 1), [], 0
    for w, n, flag in zip(weights, heads, norms):
        part = full[:, :, first:first + w.shape[0]]
        y = sum(part[:, j:j + t] * (docs[:, j:j + t] == doc)[..., None] * w[:, 0, j] for j in range(w.shape[2]))
        y = F.silu(y).unflatten(-1, (n, -1)).transpose(1, 2)
        outs.append((l2norm(y) if flag else y).to(raw.dtype))
        first += w.shape[0]
    return outs


def gdr_chunks(q, k, v, b_raw, a_raw, a_log, dt_bias, doc, chunk):
    """q, k [B,H,T,K], v [B,HV,T,V] -> q, k, v, beta split in chunks [B,HV,N,C,.] and the chunks' A, P, G."""
    r = v.shape[1] // q.shape[1]
    if r > 1:
        q, k = q.repeat_interleave(r, 1), k.repeat_interleave(r, 1)
    split = lambda y: y.unflatten(2, (-1, chunk))
    b_raw, a_raw = b_raw.transpose(1, 2).to(a_log.dtype), a_raw.transpose(1, 2).to(a_log.dtype)
    beta = split(torch.sigmoid(b_raw))
    g = split(-torch.exp(a_log)[:, None] * F.softplus(a_raw + dt_bias[:, None]))
    q, k, v = split(q), split(k), split(v)
    return q, k, v, beta, *dr.within_chunks(q, k, g, beta, doc.view(doc.shape[0], -1, chunk))


def gdr_output(x, states, u, w, p, q, total, doc, prev, gate, o_norm, wo, eps, dtype):
    o = dr.chunk_output(states, u, w, p, q, total, doc, prev)
    b, h, n, c, vd = o.shape
    o = norm(o, o_norm, eps).permute(0, 2, 3, 1, 4).reshape(b, n * c, h * vd)
    g = gate.float() if gate.dtype == torch.bfloat16 else gate
    return x + linear(o * F.silu(g), wo, dtype)


def attention_inputs(x, norm_w, wq, wk, wv, cos, sin, heads, kv_heads, eps, dtype):
    """-> q [B,H,T,D], k, v [B,Hkv,T,D]; q and k already turned to their positions in the stream."""
    z = linear(norm(x, norm_w, eps), torch.cat([wq, wk, wv]), dtype)
    b, t, _ = x.shape
    z = z.view(b, t, heads + 2 * kv_heads, -1).transpose(1, 2)
    q, k, v = z.split([heads, kv_heads, kv_heads], 1)
    return rope(q, cos, sin).to(dtype), rope(k, cos, sin).to(dtype), v.contiguous()


def attention_output(x, o, wo, dtype):
    b, h, t, d = o.shape
    return x + linear(o.transpose(1, 2).reshape(b, t, h * d), wo, dtype)


def head(x, norm_w, weight, eps, dtype):
    return linear(norm(x, norm_w, eps), weight, dtype)


def head_loss(x, norm_w, weight, target, eps, dtype):
    """-> nats per position, [B,T]."""
    logits = head(x, norm_w, weight, eps, dtype)
    logits = logits.float() if dtype == torch.bfloat16 else logits
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)


class Stages:
    """The stages in use: as written, or compiled and with the Triton forms of three of them."""

    names = ("mlp", "gdr_project", "gdr_chunks", "gdr_output", "attention_inputs", "attention_output", "head_loss")

    def __init__(self, compile_fn=lambda f: f, triton=False):
        for name in self.names:
            setattr(self, name, compile_fn(globals()[name]))
        self.chunk_terms = compile_fn(dr.chunk_terms)
        self.inverse, self.chunk_scan, self.conv_heads = dr.UnitLowerInverse.apply, dr.chunk_scan, conv_heads
        if triton:
            import kernels
            self.inverse, self.chunk_scan = kernels.UnitLowerInverse.apply, kernels.ChunkScan.apply
            self.conv_heads = kernels.ConvHeads.apply


# ---- state carried from segment to segment ---------------------------------------------------------------------------

class Carry:
    """Recurrent states, convolution tails and attention caches of a batch of streams; position of the next token."""

    def __init__(self, config, batch, device, dtype):
        c, gd, at = config, config.gated_delta_rule, config.attention
        rows = {kind: -(-c.window(kind) // 128) * 128 for kind in (SLIDING, FULL)}
        self.history = max(rows.values())
        self.docs = torch.full((batch, self.history), -1, dtype=torch.int32, device=device)
        self.last_doc = torch.zeros(batch, dtype=torch.int32, device=device)
        self.position = torch.zeros((), dtype=torch.float64, device=device)
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.layers = []
        for kind in c.layers:
            if kind == GDR:
                hv, kd, vd = gd["n_value_heads"], gd["head_k_dim"], gd["head_v_dim"]
                width = 2 * gd["n_heads"] * kd + hv * vd
                self.layers.append({
                    "state": torch.zeros(batch, hv, kd, vd, device=device, dtype=state_dtype),
                    "tail": torch.zeros(batch, gd["conv_size"] - 1, width, device=device, dtype=dtype)})
            else:
                shape = (batch, at["n_kv_heads"], rows[kind], at["head_dim"])
                self.layers.append({"k": torch.zeros(shape, device=device, dtype=dtype),
                                    "v": torch.zeros(shape, device=device, dtype=dtype)})

    @torch.no_grad()
    def reset(self):
        self.docs.fill_(-1)
        self.last_doc.zero_()
        self.position.zero_()
        for layer in self.layers:
            for x in layer.values():
                x.zero_()


def keep_last(old, new):
    """Moves the rows of `old` [.., P, D] on by the rows of `new` [.., T, D], in place."""
    rows = old.shape[-2]
    if new.shape[-2] >= rows:
        old.copy_(new[..., -rows:, :])
    else:
        old.copy_(torch.cat([old, new], -2)[..., -rows:, :])


# ---- model -----------------------------------------------------------------------------------------------------------

class Block(nn.Module):
    def __init__(self, config, kind):
        super().__init__()
        d, gd, at = config.d_model, config.gated_delta_rule, config.attention
        self.kind = kind
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.mlp, self.mixer = nn.Module(), nn.Module()
        m = self.mixer
        if kind == GDR:
            qk, vv, hv, w = gd["n_heads"] * gd["head_k_dim"], gd["n_value_heads"] * gd["head_v_dim"], gd["n_value_heads"], gd["conv_size"]
            shapes = {"q_proj": (qk, d), "k_proj": (qk, d), "v_proj": (vv, d), "g_proj": (vv, d), "a_proj": (hv, d),
                      "b_proj": (hv, d), "o_proj": (d, vv)}
            m.q_conv1d, m.k_conv1d, m.v_conv1d, m.o_norm = nn.Module(), nn.Module(), nn.Module(), nn.Module()
            for conv, n in ((m.q_conv1d, qk), (m.k_conv1d, qk), (m.v_conv1d, vv)):
                conv.weight = nn.Parameter(torch.empty(n, 1, w).uniform_(-w ** -0.5, w ** -0.5))
            m.o_norm.weight = nn.Parameter(torch.ones(gd["head_v_dim"]))
            m.A_log = nn.Parameter(torch.empty(hv).uniform_(1, 16).log())
            dt = torch.exp(torch.empty(hv).uniform_(math.log(1e-3), math.log(0.1))).clamp_min(1e-4)
            m.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))
        else:
            n, nk = at["n_heads"] * at["head_dim"], at["n_kv_heads"] * at["head_dim"]
            shapes = {"q_proj": (n, d), "k_proj": (nk, d), "v_proj": (nk, d), "o_proj": (d, n)}
        for name, shape in shapes.items():
            setattr(m, name, nn.Linear(shape[1], shape[0], bias=False))
        for name, shape in (("gate_proj", (config.mlp_hidden, d)), ("up_proj", (config.mlp_hidden, d)), ("down_proj", (d, config.mlp_hidden))):
            setattr(self.mlp, name, nn.Linear(shape[1], shape[0], bias=False))
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)
            elif name.endswith("proj.weight"):
                nn.init.normal_(p, std=p.shape[1] ** -0.5)


class Model(nn.Module):
    def __init__(self, config, stages=None, dtype=torch.float32, use_flex=False, chunk=dr.CHUNK):
        """dtype: the type of the matrix products; bf16 for training, fp32 or fp64 for exact evaluation."""
        super().__init__()
        self.config, self.stages, self.dtype, self.use_flex, self.chunk = config, stages or Stages(), dtype, use_flex, chunk
        self.embed = nn.Embedding(config.vocab_size, config.d_model)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList(Block(config, kind) for kind in config.layers)
        self.norm = nn.RMSNorm(config.d_model)
        if not config.tie_embeddings:
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
            nn.init.normal_(self.lm_head.weight, std=0.02)

    @property
    def head_weight(self):
        return self.embed.weight if self.config.tie_embeddings else self.lm_head.weight

    def mix_gdr(self, block, x, carry, doc, tail_doc, last_doc):
        m, c, s = block.mixer, self.config, self.stages
        gd = c.gated_delta_rule
        raw, gate, b_raw, a_raw = s.gdr_project(
            x, block.mixer_norm.weight, m.q_proj.weight, m.k_proj.weight, m.v_proj.weight, m.g_proj.weight,
            m.b_proj.weight, m.a_proj.weight, c.norm_eps, self.dtype)
        q, k, v = s.conv_heads(raw, carry["tail"], doc, tail_doc, (gd["n_heads"], gd["n_heads"], gd["n_value_heads"]),
                               (True, True, False), m.q_conv1d.weight, m.k_conv1d.weight, m.v_conv1d.weight)
        q, k, v, beta, a, p, total = s.gdr_chunks(q, k, v, b_raw, a_raw, m.A_log, m.dt_bias, doc, self.chunk)
        b, h = v.shape[:2]
        chunks = doc.view(b, -1, self.chunk)
        prev = dr.previous_doc(chunks, last_doc)
        inverse = s.inverse(a, self.dtype)
        u, w, mm, add, decay = s.chunk_terms(inverse, k, v, total, beta, chunks, prev)
        states, last = s.chunk_scan(mm.flatten(0, 1), add.flatten(0, 1), decay.flatten(0, 1), carry["state"].flatten(0, 1))
        x = s.gdr_output(x, states.unflatten(0, (b, h)), u, w, p, q, total, chunks, prev, gate, m.o_norm.weight,
                         m.o_proj.weight, c.norm_eps, self.dtype)
        with torch.no_grad():
            carry["state"].copy_(last.unflatten(0, (b, h)))
            carry["tail"].copy_(raw[:, -carry["tail"].shape[1]:])
        return x

    def mix_attention(self, block, x, carry, masks, cos, sin):
        m, c, s = block.mixer, self.config, self.stages
        at = c.attention
        q, k, v = s.attention_inputs(x, block.mixer_norm.weight, m.q_proj.weight, m.k_proj.weight, m.v_proj.weight,
                                     cos, sin, at["n_heads"], at["n_kv_heads"], c.norm_eps, self.dtype)
        rows = carry["k"].shape[-2]
        o = attend(q, torch.cat([carry["k"], k], 2), torch.cat([carry["v"], v], 2), masks, rows, c.window(block.kind), self.use_flex)
        with torch.no_grad():
            keep_last(carry["k"], k)
            keep_last(carry["v"], v)
        return s.attention_output(x, o, m.o_proj.weight, self.dtype)

    def hidden(self, tokens, carry):
        """tokens [B,T], the next segment of each stream; T a multiple of the chunk. Moves `carry` on."""
        c = self.config
        b, t = tokens.shape
        doc = carry.last_doc[:, None] + (tokens == 0).cumsum(1, dtype=torch.int32)
        docs = torch.cat([carry.docs, doc], 1)
        half = c.attention["head_dim"] // 2
        i = torch.arange(half, device=tokens.device, dtype=torch.float64)
        place = carry.position + torch.arange(t, device=tokens.device, dtype=torch.float64)
        angle = place[:, None] * c.attention["rope_theta"] ** (-i / half)
        real = torch.float64 if self.dtype == torch.float64 else torch.float32
        cos, sin = angle.cos().to(real), angle.sin().to(real)
        masks = AttentionMasks(docs, t)
        width = c.gated_delta_rule["conv_size"]
        tail_doc = carry.docs[:, carry.docs.shape[1] - width + 1:]
        x = F.embedding(tokens, self.embed.weight)
        for block, state in zip(self.layers, carry.layers):
            if block.kind == GDR:
                x = self.mix_gdr(block, x, state, doc, tail_doc, carry.last_doc)
            else:
                x = self.mix_attention(block, x, state, masks, cos, sin)
            x = self.stages.mlp(x, block.mlp_norm.weight, block.mlp.gate_proj.weight, block.mlp.up_proj.weight,
                                block.mlp.down_proj.weight, c.norm_eps, self.dtype)
        with torch.no_grad():
            carry.docs.copy_(docs[:, -carry.history:])
            carry.last_doc.copy_(doc[:, -1])
            carry.position += t
        return x

    def losses(self, tokens, target, carry):
        return self.stages.head_loss(self.hidden(tokens, carry), self.norm.weight, self.head_weight, target,
                                     self.config.norm_eps, self.dtype)

    def logits(self, tokens, carry):
        return head(self.hidden(tokens, carry), self.norm.weight, self.head_weight, self.config.norm_eps, self.dtype)
