# SPDX-License-Identifier: Apache-2.0
"""A HybridLM run as a batch of streams on a GPU, its parameters as they are.

The stages below are pure functions of tensors, so that one compiled copy serves every layer.
"""
import torch
import torch.nn.functional as F

from . import delta_rule as dr
from .attention import AttentionMasks, attend, rope

GDR, SLIDING, FULL = "gated_delta_rule", "sliding_attention", "full_attention"


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
            from . import kernels
            self.inverse, self.chunk_scan = kernels.UnitLowerInverse.apply, kernels.ChunkScan.apply
            self.conv_heads = kernels.ConvHeads.apply


def keep_last(old, added):
    """Moves the rows of `old` [.., P, D] on by the rows of `added` [.., T, D], in place."""
    rows = old.shape[-2]
    if added.shape[-2] >= rows:
        old.copy_(added[..., -rows:, :])
    else:
        old.copy_(torch.cat([old, added], -2)[..., -rows:, :])


class GpuStreams:
    """`model`, a HybridLM of docs/model_format.md, over `batch` streams; the interface of Streams.

    dtype: the type of the matrix products; bf16 for training, fp32 or fp64 for exact evaluation. What is carried (recurrent
    states, convolution tails, attention caches, documents) is kept in fixed buffers, so that a step can be captured.
    Segments are multiples of `chunk`, with use_flex of 128 too.
    """

    def __init__(self, model, batch, device, dtype=torch.float32, stages=None, use_flex=False, chunk=dr.CHUNK):
        self.model, self.stages, self.dtype, self.use_flex, self.chunk = model, stages or Stages(), dtype, use_flex, chunk
        config = model.config
        rows = {kind: -(-config.mixers[kind]["window_size"] // 128) * 128 for kind in (SLIDING, FULL)}
        self.history = max(rows.values())
        self.docs = torch.full((batch, self.history), -1, dtype=torch.int32, device=device)
        self.last_doc = torch.zeros(batch, dtype=torch.int32, device=device)
        self.position = torch.zeros((), dtype=torch.float64, device=device)
        state_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.carried = []
        for kind, block in zip(config.layers, model.layers):
            m = block.mixer
            if kind == GDR:
                self.carried.append({
                    "state": torch.zeros(batch, m.num_v_heads, m.head_k_dim, m.head_v_dim, device=device, dtype=state_dtype),
                    "tail": torch.zeros(batch, m.conv_size - 1, 2 * m.key_dim + m.value_dim, device=device, dtype=dtype)})
            else:
                shape = (batch, m.num_kv_heads, rows[kind], m.head_dim)
                self.carried.append({"k": torch.zeros(shape, device=device, dtype=dtype), "v": torch.zeros(shape, device=device, dtype=dtype)})

    @torch.no_grad()
    def reset(self):
        self.docs.fill_(-1)
        self.last_doc.zero_()
        self.position.zero_()
        for layer in self.carried:
            for x in layer.values():
                x.zero_()

    def mix_gdr(self, block, x, carry, doc, tail_doc):
        m, s, eps = block.mixer, self.stages, self.model.config.norm_eps
        raw, gate, b_raw, a_raw = s.gdr_project(
            x, block.mixer_norm.weight, m.q_proj.weight, m.k_proj.weight, m.v_proj.weight, m.g_proj.weight,
            m.b_proj.weight, m.a_proj.weight, eps, self.dtype)
        q, k, v = s.conv_heads(raw, carry["tail"], doc, tail_doc, (m.num_heads, m.num_heads, m.num_v_heads),
                               (True, True, False), m.q_conv1d.weight, m.k_conv1d.weight, m.v_conv1d.weight)
        q, k, v, beta, a, p, total = s.gdr_chunks(q, k, v, b_raw, a_raw, m.A_log, m.dt_bias, doc, self.chunk)
        b, h = v.shape[:2]
        chunks = doc.view(b, -1, self.chunk)
        prev = dr.previous_doc(chunks, self.last_doc)
        inverse = s.inverse(a, self.dtype)
        u, w, mm, add, decay = s.chunk_terms(inverse, k, v, total, beta, chunks, prev)
        states, last = s.chunk_scan(mm.flatten(0, 1), add.flatten(0, 1), decay.flatten(0, 1), carry["state"].flatten(0, 1))
        x = s.gdr_output(x, states.unflatten(0, (b, h)), u, w, p, q, total, chunks, prev, gate, m.o_norm.weight,
                         m.o_proj.weight, eps, self.dtype)
        with torch.no_grad():
            carry["state"].copy_(last.unflatten(0, (b, h)))
            carry["tail"].copy_(raw[:, -carry["tail"].shape[1]:])
        return x

    def mix_attention(self, block, x, carry, masks, cos, sin):
        m, s, eps = block.mixer, self.stages, self.model.config.norm_eps
        q, k, v = s.attention_inputs(x, block.mixer_norm.weight, m.q_proj.weight, m.k_proj.weight, m.v_proj.weight,
                                     cos, sin, m.num_heads, m.num_kv_heads, eps, self.dtype)
        rows = carry["k"].shape[-2]
        o = attend(q, torch.cat([carry["k"], k], 2), torch.cat([carry["v"], v], 2), masks, rows, m.window_size, self.use_flex)
        with torch.no_grad():
            keep_last(carry["k"], k)
            keep_last(carry["v"], v)
        return s.attention_output(x, o, m.o_proj.weight, self.dtype)

    def hidden(self, tokens):
        """tokens [B,T], the next segment of each stream -> [B,T,d_model]."""
        t, model = tokens.shape[1], self.model
        doc = self.last_doc[:, None] + (tokens == 0).cumsum(1, dtype=torch.int32)
        docs = torch.cat([self.docs, doc], 1)
        attention = model.config.mixers[FULL]
        half = attention["head_dim"] // 2
        i = torch.arange(half, device=tokens.device, dtype=torch.float64)
        place = self.position + torch.arange(t, device=tokens.device, dtype=torch.float64)
        angle = place[:, None] * attention["rope_theta"] ** (-i / half)
        real = torch.float64 if self.dtype == torch.float64 else torch.float32
        cos, sin = angle.cos().to(real), angle.sin().to(real)
        masks = AttentionMasks(docs, t)
        tail_doc = self.docs[:, self.docs.shape[1] - model.config.mixers[GDR]["conv_size"] + 1:]
        x = F.embedding(tokens, model.embed.weight)
        for kind, block, carry in zip(model.config.layers, model.layers, self.carried):
            if kind == GDR:
                x = self.mix_gdr(block, x, carry, doc, tail_doc)
            else:
                x = self.mix_attention(block, x, carry, masks, cos, sin)
            x = self.stages.mlp(x, block.mlp_norm.weight, block.mlp.gate_proj.weight, block.mlp.up_proj.weight,
                                block.mlp.down_proj.weight, model.config.norm_eps, self.dtype)
        with torch.no_grad():
            self.docs.copy_(docs[:, -self.history:])
            self.last_doc.copy_(doc[:, -1])
            self.position += t
        return x

    def losses(self, tokens, target):
        """tokens, target [B,T] -> nats of each target, [B,T]."""
        return self.stages.head_loss(self.hidden(tokens), self.model.norm.weight, self.model.head_weight, target,
                                     self.model.config.norm_eps, self.dtype)

    def logits(self, tokens):
        return head(self.hidden(tokens), self.model.norm.weight, self.model.head_weight, self.model.config.norm_eps, self.dtype)
