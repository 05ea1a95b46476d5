# SPDX-License-Identifier: Apache-2.0
"""forward of whole linear-attention layers: no rearrangement that the operators do not need, gates inside, decode in place.

Each stands in for a forward of transformers that it was compared with, known by the digest of its source (_models.py). What it
does not take (`_refusal`) goes to that stock forward, which calls the functions of _functions.py.
"""
import functools
import math
from dataclasses import dataclass

import torch

from .. import ops
from ._functions import SILU, step_conv
from ._packing import boundaries_of
from ._places import is_functional, refusal


@dataclass
class Projected:
    """What a layer projects from its input: mixed [B,T,H*K + H*K + HV*V] before the convolution; z [B,T,..,V], heads in any shape."""

    mixed: torch.Tensor
    z: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    sizes: tuple  # K, V
    key_dim: int  # H*K
    options: dict  # of the row


@dataclass(frozen=True)
class Layer:
    """A kind of layer: its projections, its row, and the names of its gated norm and last projection."""

    project: object  # (layer, hidden [B,T,hidden_size]) -> Projected
    row: object
    step: object
    norm: str
    output: str


@functools.lru_cache(maxsize=64)
def _qkv_order(groups, key_units, value_units, device):
    """Positions of the q, then k, then v units in rows of `groups` times (q, k, v, z)."""
    unit = torch.arange(groups * 2 * (key_units + value_units), device=device).view(groups, -1)
    q, k, v, _ = unit.split((key_units, key_units, value_units, value_units), 1)
    return torch.cat((q.flatten(), k.flatten(), v.flatten()))


def _scalar_gate(layer, beta_input="sigmoid"):
    return {"gate_input": "softplus", "a_log": layer.A_log.float(), "dt_bias": layer.dt_bias.float(), "beta_input": beta_input}


def qwen3_next(layer, hidden):
    """q, k, v and z interleaved by key head in one projection, beta and g in another."""
    B, T, _ = hidden.shape
    groups, K, V = layer.num_k_heads, layer.head_k_dim, layer.head_v_dim
    in_group = layer.num_v_heads // groups
    qkvz = layer.in_proj_qkvz(hidden)
    unit = math.gcd(K, V)
    order = _qkv_order(groups, K // unit, in_group * V // unit, hidden.device)
    mixed = qkvz.view(B, T, -1, unit).index_select(2, order).view(B, T, -1)
    z = qkvz.view(B, T, groups, -1)[..., 2 * K + in_group * V:].unflatten(-1, (in_group, V))
    b, a = layer.in_proj_ba(hidden).view(B, T, groups, 2 * in_group).split((in_group, in_group), -1)
    return Projected(mixed, z, a.flatten(2), b.flatten(2), (K, V), layer.key_dim, _scalar_gate(layer))


def qwen3_5(layer, hidden):
    """One projection for q, k, v in that order, one each for z, beta and g."""
    z = layer.in_proj_z(hidden).unflatten(-1, (-1, layer.head_v_dim))
    return Projected(layer.in_proj_qkv(hidden), z, layer.in_proj_a(hidden), layer.in_proj_b(hidden),
                     (layer.head_k_dim, layer.head_v_dim), layer.key_dim, _scalar_gate(layer))


def olmo_hybrid(layer, hidden):
    """A projection for each of q, k, v, gate, beta and g."""
    mixed = torch.cat((layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)), -1)
    z = layer.g_proj(hidden).unflatten(-1, (-1, layer.head_v_dim))
    return Projected(mixed, z, layer.a_proj(hidden), layer.b_proj(hidden), (layer.head_k_dim, layer.head_v_dim), layer.key_dim,
                     _scalar_gate(layer, "sigmoid_twice" if layer.allow_neg_eigval else "sigmoid"))


def kimi_linear(layer, hidden):
    """A projection for each of q, k, v and beta; low-rank ones for the gate of each key channel and for the output's."""
    K, forget = layer.head_dim, layer.forget_gate
    mixed = torch.cat((layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)), -1)
    g = forget.f_b_proj(forget.f_a_proj(hidden)).unflatten(-1, (-1, K))
    z = layer.g_b_proj(layer.g_a_proj(hidden)).unflatten(-1, (-1, K))
    options = {"gate_input": "softplus", "a_log": forget.A_log.float().flatten(), "dt_bias": forget.dt_bias.float().view(-1, K),
               "beta_input": "sigmoid"}
    return Projected(mixed, z, g, layer.b_proj(hidden), (K, K), layer.qkv_dim, options)


GATED_DELTA_RULE = {"row": ops.gated_delta_rule, "step": ops.gated_delta_rule_step}
LAYERS = {
    "qwen3_next": Layer(qwen3_next, **GATED_DELTA_RULE, norm="norm", output="out_proj"),
    "qwen3_5": Layer(qwen3_5, **GATED_DELTA_RULE, norm="norm", output="out_proj"),
    "olmo_hybrid": Layer(olmo_hybrid, **GATED_DELTA_RULE, norm="o_norm", output="o_proj"),
    "kimi_linear": Layer(kimi_linear, ops.kda, ops.kda_step, norm="o_norm", output="o_proj"),
}


def _refusal(layer, hidden, cache, kwargs):
    reason = refusal(hidden) or refusal(layer.conv1d.weight)
    if reason:
        return reason
    if layer.activation not in SILU:
        return f"activation {layer.activation}"
    if kwargs.get("cache_params") is not None:
        return "the argument cache_params"
    if cache is None:
        return None
    if not _stores_states(type(cache.layers[layer.layer_idx])):
        return f"a cache layer of type {type(cache.layers[layer.layer_idx]).__name__}"
    if cache.is_recording_past(layer.layer_idx):
        return "a cache that records its past"
    state = cache.get_conv_state(layer.layer_idx, state_idx=0)
    if state is None:
        return None
    if state.shape[-1] != layer.conv_kernel_size or layer.conv_kernel_size < 2:
        return f"a window of {state.shape[-1]} for {layer.conv_kernel_size} taps"
    if boundaries_of(kwargs) is not None:
        return "packed sequences after a filled cache"
    return None


@functools.lru_cache(maxsize=64)
def _stores_states(kind):
    """Whether a class of cache layers keeps the two states as transformers' LinearAttentionLayer does."""
    from transformers.cache_utils import LinearAttentionLayer

    return issubclass(kind, LinearAttentionLayer) and kind.update_conv_state is LinearAttentionLayer.update_conv_state \
        and kind.update_recurrent_state is LinearAttentionLayer.update_recurrent_state


def _convolve(layer, x, cache, cu):
    """[B,T,D] -> the same, after the window in the cache, which goes on."""
    weight, bias, index = layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.layer_idx
    state = None if cache is None else cache.get_conv_state(index, state_idx=0)
    if state is not None and x.shape[1] == 1:
        return step_conv(x, weight, bias, "silu", state)
    before = None
    if cache is not None:
        W = layer.conv_kernel_size
        before = None if state is None else state[..., 1 - W:].clone()
        last = x if cu is None else x[:, int(cu[-2]):]
        cache.update_conv_state(last[:, -W:].transpose(1, 2), index, conv_kernel_size=W)
    return ops.short_conv(x, weight, bias=bias, activation="silu", initial_state=before, cu_seqlens=cu)[0]


def _remember(layer, projected, kind, q, k, v, cache, cu):
    """q, k [B,T,H,K], v [B,T,HV,V] -> o [B,T,HV,V] after the state in the cache, which goes on."""
    index, options = layer.layer_idx, {**projected.options, "qk_norm": "l2"}
    state = None if cache is None else cache.get_recurrent_state(index, state_idx=0)
    if state is not None and q.shape[1] == 1 and not is_functional(q, k, v, projected.g, projected.beta, state, options["a_log"],
                                                                   options["dt_bias"]):
        o = kind.step(q, k, v, projected.g, projected.beta, state=state, **options)
        cache.update_recurrent_state(state, index)  # itself: for a cache that does more than to store
        return o
    o, final_state = kind.row(q, k, v, projected.g, projected.beta, initial_state=state, output_final_state=cache is not None,
                              cu_seqlens=cu, **options)
    if cache is not None:
        cache.update_recurrent_state(final_state if cu is None else final_state[-1:], index)
    return o


def layer_forward(kind):
    """Maker of the forward of a layer of this kind (LAYERS)."""
    def make(place):
        @functools.wraps(place.stock)
        def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
            reason = _refusal(self, hidden_states, cache, kwargs)
            if reason:
                given = {name: x for name, x in (("cache", cache), ("attention_mask", attention_mask)) if x is not None}
                return place.pass_on(reason)(self, hidden_states, **given, **kwargs)
            place.count()
            if attention_mask is not None:
                hidden_states = (hidden_states * attention_mask[:, :, None]).to(hidden_states.dtype)
            shape, cu = hidden_states.shape, boundaries_of(kwargs)
            if cu is not None:
                hidden_states = hidden_states.reshape(1, -1, shape[-1])
            found = kind.project(self, hidden_states)
            K, V = found.sizes
            mixed = _convolve(self, found.mixed, cache, cu)
            q, k, v = mixed.split((found.key_dim, found.key_dim, mixed.shape[-1] - 2 * found.key_dim), -1)
            o = _remember(self, found, kind, q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, (-1, V)), cache, cu)
            o = getattr(self, kind.norm)(o.view(found.z.shape), found.z)
            return getattr(self, kind.output)(o.flatten(2)).view(*shape[:-1], -1)
        return forward
    return make
