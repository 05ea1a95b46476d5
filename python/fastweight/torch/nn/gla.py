# SPDX-License-Identifier: Apache-2.0
"""The layers that decay and add, without an erase: gated linear attention, its scalar-gate form, retention.

Parameter names and shapes are those of flash-linear-attention's layers of these names.
"""
import torch
import torch.nn.functional as F
from torch import nn

from ._base import LinearMixer, check, heads, positive
from ._sequences import positions, rotate
from .norms import FusedRMSNormGated, RMSNorm

ACTIVATIONS = {"swish": F.silu, "silu": F.silu, "sigmoid": torch.sigmoid, "relu": F.relu, "gelu": F.gelu, "elu": F.elu, "tanh": torch.tanh,
               "identity": lambda x: x}


class _AdditiveMixer(LinearMixer):
    """Projections with fewer key and value heads if wanted, a feature map, an output norm with a gate of any activation."""

    activated = ""

    def build(self, expand_k, expand_v, num_heads, num_kv_heads, feature_map, use_short_conv, conv_size, conv_bias, use_output_gate):
        name = type(self).__name__
        for what, found in (("feature_map", feature_map),):
            check(found is None or found in ACTIVATIONS, f"{name}: {what} is {found!r}, allowed None and {sorted(ACTIVATIONS)}")
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        positive(name, num_heads=num_heads, num_kv_heads=self.num_kv_heads)
        check(num_heads % self.num_kv_heads == 0, f"{name}: num_kv_heads is {num_kv_heads}, allowed divisors of num_heads, {num_heads}")
        self.num_kv_groups = num_heads // self.num_kv_heads
        self.expand_k, self.expand_v, self.feature_map = expand_k, expand_v, feature_map
        self.key_dim, self.value_dim = int(self.hidden_size * expand_k), int(self.hidden_size * expand_v)
        positive(name, key_dim=self.key_dim, value_dim=self.value_dim)
        for what, size in (("expand_k", self.key_dim), ("expand_v", self.value_dim)):
            check(size % num_heads == 0, f"{name}: {what} makes {size} channels, allowed multiples of num_heads, {num_heads}")
        self.head_k_dim, self.head_v_dim = self.key_dim // num_heads, self.value_dim // num_heads
        self.key_dim_per_group, self.value_dim_per_group = self.key_dim // self.num_kv_groups, self.value_dim // self.num_kv_groups
        self.use_output_gate = use_output_gate
        self.add_projections((self.key_dim, self.key_dim_per_group, self.value_dim_per_group), use_short_conv, conv_size, conv_bias)
        if use_output_gate:
            self.g_proj = nn.Linear(self.hidden_size, self.value_dim, bias=False)
        self.o_proj = nn.Linear(self.value_dim, self.hidden_size, bias=False)

    def add_norm(self, gate_fn, elementwise_affine, norm_eps, fuse_norm):
        check(gate_fn in ACTIVATIONS, f"{type(self).__name__}: gate_fn is {gate_fn!r}, allowed {sorted(ACTIVATIONS)}")
        self.gate_fn = gate_fn
        if gate_fn == "swish" and fuse_norm and self.use_output_gate:
            self.g_norm_swish_gate = FusedRMSNormGated(self.head_v_dim, elementwise_affine, norm_eps)
        else:
            self.g_norm = RMSNorm(self.head_v_dim, elementwise_affine, eps=norm_eps, dtype=torch.float32)

    def in_heads(self, q, k, v):
        """-> q, k, v in heads, keys and values not yet repeated, after the feature map."""
        q, k, v = heads(q, self.head_k_dim), heads(k, self.head_k_dim), heads(v, self.head_v_dim)
        if self.feature_map is not None:
            q, k = ACTIVATIONS[self.feature_map](q), ACTIVATIONS[self.feature_map](k)
        return q, k, v

    def repeated(self, x):
        """[B,T,num_kv_heads,...] -> [B,T,num_heads,...]: head i of x serves num_kv_groups in a row."""
        return x if self.num_kv_groups == 1 else x.repeat_interleave(self.num_kv_groups, 2)

    def output(self, x, o):
        if hasattr(self, "g_norm_swish_gate"):
            return self.o_proj(self.g_norm_swish_gate(o, heads(self.g_proj(x), self.head_v_dim)).flatten(-2))
        o = self.g_norm(o).flatten(-2)
        return self.o_proj(o * ACTIVATIONS[self.gate_fn](self.g_proj(x)) if self.use_output_gate else o)


class GatedLinearAttention(_AdditiveMixer):
    """S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,   g = log_sigmoid(gk_proj x) / gate_logit_normalizer, gk_proj of low rank.

    num_kv_heads: key, value and gate heads. clamp_min: g is not below it. Source: Yang et al. 2023 (arXiv 2312.06635).
    """

    row = "gla"

    def __init__(self, mode="chunk", hidden_size=1024, expand_k=0.5, expand_v=1.0, num_heads=4, num_kv_heads=None, feature_map=None,
                 use_short_conv=False, conv_size=4, conv_bias=False, use_output_gate=True, gate_fn="swish", elementwise_affine=True, norm_eps=1e-5,
                 gate_logit_normalizer=16, gate_low_rank_dim=16, clamp_min=None, fuse_norm=True, layer_idx=None):
        super().__init__(hidden_size, mode, layer_idx)
        self.build(expand_k, expand_v, num_heads, num_kv_heads, feature_map, use_short_conv, conv_size, conv_bias, use_output_gate)
        self.gk_proj = nn.Sequential(nn.Linear(hidden_size, gate_low_rank_dim, bias=False), nn.Linear(gate_low_rank_dim, self.key_dim_per_group))
        self.gate_logit_normalizer, self.clamp_min = gate_logit_normalizer, clamp_min
        self.add_norm(gate_fn, elementwise_affine, norm_eps, fuse_norm)

    def operands(self, x, q, k, v, place):
        q, k, v = self.in_heads(q, k, v)
        g = self.repeated(heads(self.gk_proj(x), self.head_k_dim))
        options = {"gate_input": "log_sigmoid", "gate_normalizer": float(self.gate_logit_normalizer)}
        if self.clamp_min is not None:
            g, options = torch.clamp_min(F.logsigmoid(g) / self.gate_logit_normalizer, self.clamp_min), {}
        return q, self.repeated(k), self.repeated(v), (g,), options


class SimpleGatedLinearAttention(_AdditiveMixer):
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T,   g = log_sigmoid(gk_proj x) / gate_logit_normalizer, one number a head.

    Source: Yang et al. 2023 (arXiv 2312.06635), the scalar case; Dao and Gu 2024 (arXiv 2405.21060).
    """

    row = "simple_gla"

    def __init__(self, mode="chunk", hidden_size=1024, expand_k=1.0, expand_v=1.0, num_heads=4, num_kv_heads=None, feature_map=None,
                 use_short_conv=True, conv_size=4, conv_bias=False, gate_fn="swish", elementwise_affine=True, norm_eps=1e-5,
                 gate_logit_normalizer=16, fuse_norm=True, layer_idx=None):
        super().__init__(hidden_size, mode, layer_idx)
        self.build(expand_k, expand_v, num_heads, num_kv_heads, feature_map, use_short_conv, conv_size, conv_bias, True)
        self.gk_proj = nn.Linear(hidden_size, num_heads)
        self.gate_logit_normalizer = gate_logit_normalizer
        self.add_norm(gate_fn, elementwise_affine, norm_eps, fuse_norm)

    def operands(self, x, q, k, v, place):
        q, k, v = self.in_heads(q, k, v)
        options = {"gate_input": "log_sigmoid", "gate_normalizer": float(self.gate_logit_normalizer)}
        return q, self.repeated(k), self.repeated(v), (self.gk_proj(x),), options


class MultiScaleRetention(_AdditiveMixer):
    """S_t = gamma_h S_{t-1} + k_t v_t^T,   gamma_h = 1 - 2^(-5-h), q and k turned by a rotary embedding of base 10000.

    Source: Sun et al. 2023 (arXiv 2307.08621).
    """

    row = "retention"
    modes = {"chunk": "chunk", "fused_chunk": "chunk", "parallel": "parallel", "fused_recurrent": "recurrent"}

    def __init__(self, mode="chunk", hidden_size=1024, expand_k=1.0, expand_v=2.0, num_heads=8, num_kv_heads=None, feature_map=None,
                 use_short_conv=False, conv_size=4, conv_bias=False, use_output_gate=True, gate_fn="swish", elementwise_affine=True, norm_eps=1e-5,
                 fuse_norm=True, layer_idx=None, **kwargs):
        super().__init__(hidden_size, mode, layer_idx)
        self.build(expand_k, expand_v, num_heads, num_kv_heads, feature_map, use_short_conv, conv_size, conv_bias, use_output_gate)
        check(self.head_k_dim % 2 == 0, f"MultiScaleRetention: a head has {self.head_k_dim} key channels, allowed even")
        self.add_norm(gate_fn, elementwise_affine, norm_eps, fuse_norm)

    def operands(self, x, q, k, v, place):
        q, k, v = self.in_heads(q, k, v)
        at = positions(x, *place)
        return rotate(q, at, 10000.0), self.repeated(rotate(k, at, 10000.0)), self.repeated(v), (), {}


SimpleGLA = SimpleGatedLinearAttention
