# SPDX-License-Identifier: Apache-2.0
"""RWKV-7's time mix and channel mix. Parameter names and shapes are those of flash-linear-attention's RWKV7Attention and
RWKV7FeedForward; the initialisation is that of the authors' training code.

Source: Peng et al. 2025, "RWKV-7 Goose" (arXiv 2503.14456).
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from ._base import LinearMixer, check, heads
from ._ops import ops
from ._sequences import last_rows, repad, shifted, unpad
from .norms import GroupNorm


class LoRA(nn.Module):
    """lora.2(act(lora.0 x)): in -> rank -> out, the first without a bias; activation None, "tanh", "sigmoid" or "relu"."""

    def __init__(self, input_dim, output_dim, low_rank_dim, bias=True, activation="tanh"):
        super().__init__()
        kinds = {None: nn.Identity, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
        check(activation in kinds, f"LoRA: activation is {activation!r}, allowed {list(kinds)}")
        self.lora = nn.Sequential(nn.Linear(input_dim, low_rank_dim, bias=False), kinds[activation](), nn.Linear(low_rank_dim, output_dim, bias=bias))
        self.reset_parameters()

    def reset_parameters(self):
        """The first matrix 0, the second orthogonal times 0.1, the bias 0."""
        nn.init.zeros_(self.lora[0].weight)
        rows, columns = self.lora[2].weight.shape
        orthogonal_(self.lora[2].weight, gain=0.1 * (math.sqrt(columns / rows) if columns > rows else 1.0))
        if self.lora[2].bias is not None:
            nn.init.zeros_(self.lora[2].bias)

    def forward(self, x):
        return self.lora(x)


def low_rank(hidden_size, times, head_dim=64):
    """The rank that the authors suggest: times * sqrt(hidden_size), for wider heads in proportion, in steps of 32."""
    return max(32, round(times * hidden_size ** 0.5 * head_dim / 64 / 32) * 32)


def orthogonal_(matrix, gain=1.0):
    """nn.init.orthogonal_ in any dtype: torch's QR has no 16-bit types."""
    if matrix.dtype in (torch.float32, torch.float64):
        return nn.init.orthogonal_(matrix, gain)
    with torch.no_grad():
        return matrix.copy_(nn.init.orthogonal_(torch.empty_like(matrix, dtype=torch.float32), gain))


def ramp(hidden_size):
    """[hidden_size]: i / hidden_size."""
    return torch.arange(hidden_size, dtype=torch.float32) / hidden_size


class RWKV7Attention(LinearMixer):
    """Time mix: r, w, k, v, a, g from token-shifted inputs; S_t = S_{t-1} diag(exp w_t) with the independent erase along the
    normalised key; group norm, bonus r.k, gate.

    layer_idx 0 has no v_lora; later layers mix their values with those of layer 0, `v_first`, which forward takes and
    returns as its fourth result. num_hidden_layers: depth of the model, for the initialisation; None: layer_idx + 1.
    Low ranks that are None are the authors' suggestion for hidden_size. fuse_norm: GroupNorm and the L2 norm with eps
    inside the root in place of torch's; the same parameters.
    """

    row = "rwkv7"

    def __init__(self, mode="chunk", hidden_size=1024, head_dim=64, num_heads=None, decay_low_rank_dim=None, gate_low_rank_dim=None,
                 a_low_rank_dim=None, v_low_rank_dim=None, elementwise_affine=True, norm_eps=1e-5, layer_idx=None, fuse_norm=False, value_dim=None,
                 num_hidden_layers=None, **kwargs):
        super().__init__(hidden_size, mode, layer_idx)
        check(head_dim is not None or num_heads is not None, "RWKV7Attention: head_dim and num_heads are None, allowed one of them")
        self.head_dim = head_dim if head_dim is not None else hidden_size // num_heads
        check(hidden_size % self.head_dim == 0, f"RWKV7Attention: hidden_size is {hidden_size}, allowed multiples of head_dim, {self.head_dim}")
        self.num_heads = hidden_size // self.head_dim
        self.key_dim, self.value_dim = hidden_size, hidden_size if value_dim is None else value_dim
        self.head_v_dim, self.fuse_norm, self.num_hidden_layers = self.value_dim // self.num_heads, fuse_norm, num_hidden_layers
        self.held += ("shift",)
        ranks = {"decay": decay_low_rank_dim or low_rank(hidden_size, 2.5, self.head_dim), "gate": gate_low_rank_dim or low_rank(hidden_size, 5),
                 "a": a_low_rank_dim or low_rank(hidden_size, 2.5, self.head_dim), "v": v_low_rank_dim or low_rank(hidden_size, 1.7, self.head_dim)}
        for name, rank in ranks.items():
            setattr(self, f"{name}_low_rank_dim", rank)
        for name in "rwkvag":
            setattr(self, f"x_{name}", nn.Parameter(torch.zeros(1, 1, hidden_size)))
        self.k_k, self.k_a = nn.Parameter(torch.zeros(self.key_dim)), nn.Parameter(torch.zeros(self.key_dim))
        self.r_k = nn.Parameter(torch.zeros(self.num_heads, self.head_dim))
        self.r_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.key_dim, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.value_dim, bias=False)
        self.o_proj = nn.Linear(self.value_dim, hidden_size, bias=False)
        self.w_lora = LoRA(hidden_size, self.key_dim, ranks["decay"], activation="tanh")
        if layer_idx != 0:
            self.v_lora = LoRA(hidden_size, self.value_dim, ranks["v"], activation=None)
        self.a_lora = LoRA(hidden_size, self.key_dim, ranks["a"], activation=None)
        self.g_lora = LoRA(hidden_size, self.value_dim, ranks["gate"], bias=False, activation="sigmoid")
        eps = self.head_dim * norm_eps
        self.g_norm = (GroupNorm(self.num_heads, self.value_dim, elementwise_affine, True, eps) if fuse_norm
                       else nn.GroupNorm(self.num_heads, self.value_dim, eps=eps, affine=elementwise_affine))
        if layer_idx is not None:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """The authors' start for a layer at this depth."""
        size, layers = self.hidden_size, self.num_hidden_layers or self.layer_idx + 1
        late, early = self.layer_idx / max(1, layers - 1), 1.0 - self.layer_idx / layers
        part = ramp(size)
        for name, power in (("r", 0.2), ("w", 0.9), ("k", 0.7), ("v", 0.7), ("a", 0.9), ("g", 0.2)):
            getattr(self, f"x_{name}").copy_((1.0 - part ** (power * early)).expand(1, 1, size))
        i = torch.arange(size, dtype=torch.float32)
        line = i / max(1, size - 1) - 0.5
        middle = (self.head_dim - 1) / 2
        zigzag = (i % self.head_dim - middle) / max(0.5, middle)
        zigzag = zigzag * zigzag.abs()
        decay = -6 + 6 * (i / max(1, size - 1)) ** (1 + late ** 0.3)
        self.k_k.copy_(0.71 - 0.1 * line)
        self.k_a.fill_(1.02)
        self.r_k.fill_(-0.04)
        for name in "wavg":
            if hasattr(self, f"{name}_lora"):
                getattr(self, f"{name}_lora").reset_parameters()
        self.w_lora.lora[2].bias.copy_(decay + 0.5 + 2.5 * zigzag)
        self.a_lora.lora[2].bias.copy_(-0.19 + 0.3 * zigzag + 0.4 * line)
        if self.layer_idx != 0 and self.value_dim == size:
            self.v_lora.lora[2].bias.copy_(0.73 - 0.4 * line)
        if self.g_norm.weight is not None:
            self.g_norm.weight.fill_(((self.layer_idx + 1) / layers) ** 0.7)
        orthogonal_(self.r_proj.weight)
        orthogonal_(self.k_proj.weight, gain=0.1)
        orthogonal_(self.v_proj.weight)
        nn.init.zeros_(self.o_proj.weight)

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, output_attentions=False, v_first=None,
                cu_seqlens=None, **kwargs):
        """As the other layers, with v_first [B,T,value_dim] of layer 0 in and, as a fourth result, out."""
        return super().forward(hidden_states, attention_mask, past_key_values, use_cache, output_attentions, cu_seqlens, v_first=v_first)

    def unpacked(self, kwargs, indices):
        first = kwargs.get("v_first")
        if first is None:
            check(self.layer_idx == 0, f"RWKV7Attention: v_first is None in layer {self.layer_idx}, allowed the one that layer 0 returned")
        elif indices is not None:
            first = first.flatten(0, 1)[indices][None]
        return {"v_first": first}

    def mix(self, x, cu_seqlens, part, use_cache, pieces, v_first=None):
        in_place = self.steps(x, cu_seqlens, use_cache)
        delta = shifted(x, cu_seqlens, part.get("shift")) - x
        xr, xw, xk, xv, xa, xg = (torch.addcmul(x, delta, getattr(self, f"x_{name}").to(x.dtype)) for name in "rwkvag")
        r, k, v = self.r_proj(xr), self.k_proj(xk), self.v_proj(xv)
        if self.layer_idx == 0:
            v_first = v
        else:
            v = torch.lerp(v, v_first.to(v.dtype), torch.sigmoid(self.v_lora(xv)))
        a, g, w = torch.sigmoid(self.a_lora(xa)), self.g_lora(xg), self.w_lora(xw)
        kk = heads(k * self.k_k.to(k.dtype), self.head_dim)
        kk = ops.l2_norm(kk) if self.fuse_norm else F.normalize(kk, dim=-1).to(kk.dtype)  # autocast on CUDA takes norms in float32
        k = torch.addcmul(k, k * (a - 1), self.k_a.to(k.dtype))
        r, w, k, a, v = heads(r, self.head_dim), heads(w, self.head_dim), heads(k, self.head_dim), heads(a, self.head_dim), heads(v, self.head_v_dim)
        o, state = self.recur(r, k, v, (-kk, kk * a, w), {"gate_input": "rwkv7", "scale": 1.0}, cu_seqlens, part.get("state"), use_cache, in_place)
        found = {"state": state, "shift": last_rows(x, cu_seqlens, part.get("shift"))} if use_cache else {}
        shape = o.shape[:2]
        o = self.g_norm(o.flatten(-2)) if self.fuse_norm else self.g_norm(o.flatten(0, 1).flatten(-2)).view(*shape, self.value_dim)
        bonus = (r * k * self.r_k.to(r.dtype)).sum(-1, keepdim=True) * v
        return self.o_proj((o + bonus.flatten(-2)) * g), found, v_first


class RWKV7FeedForward(nn.Module):
    """Channel mix: value(relu(key(x + delta * x_k))^2), delta the token shift. Its cache part is `ffn_shift` of the layer.

    forward(x, attention_mask, state, cu_seqlens) -> (y, state), state a Cache or None, as flash-linear-attention's; the cache
    is moved on unless use_cache is False.
    """

    def __init__(self, hidden_size, hidden_ratio=None, intermediate_size=None, hidden_act="sqrelu", layer_idx=None, num_hidden_layers=None):
        super().__init__()
        self.layer_idx = layer_idx
        check(hidden_act == "sqrelu", f"RWKV7FeedForward: hidden_act is {hidden_act!r}, allowed 'sqrelu'")
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        self.hidden_ratio = 4 if hidden_ratio is None else hidden_ratio
        self.intermediate_size = 32 * -(-int(hidden_size * self.hidden_ratio) // 32) if intermediate_size is None else intermediate_size
        self.x_k = nn.Parameter(torch.zeros(hidden_size))
        self.key = nn.Linear(hidden_size, self.intermediate_size, bias=False)
        self.value = nn.Linear(self.intermediate_size, hidden_size, bias=False)
        if layer_idx is not None:
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """The authors' start for a layer at this depth."""
        early = 1.0 - self.layer_idx / (self.num_hidden_layers or self.layer_idx + 1)
        self.x_k.copy_(1.0 - ramp(self.hidden_size) ** early ** 4)
        orthogonal_(self.key.weight)
        nn.init.zeros_(self.value.weight)

    def forward(self, x, attention_mask=None, state=None, cu_seqlens=None, use_cache=True, **kwargs):
        batch, tokens = x.shape[:2]
        packed, cu_seqlens, indices = unpad(x, attention_mask, cu_seqlens, "RWKV7FeedForward")
        part = {} if state is None else state.take(self.layer_idx)
        before = part.get("ffn_shift")
        delta = shifted(packed, cu_seqlens, before) - packed
        y = self.value(F.relu(self.key(torch.addcmul(packed, delta, self.x_k.to(x.dtype)))).square())
        if state is not None and use_cache:
            state.put(self.layer_idx, {"ffn_shift": last_rows(packed, cu_seqlens, before)}, 0)
        return repad(y, indices, batch, tokens), state
