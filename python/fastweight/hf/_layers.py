# SPDX-License-Identifier: Apache-2.0
"""forward of whole linear-attention layers: no rearrangement that the operators do not need, gates inside, decode in place.

Each stands in for a forward of transformers that it was compared with, known by the digest of its source (_models.py). What it
does not take (`_refusal`) goes to that stock forward, which calls the functions of _functions.py.
"""
import functools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import ops
from ._functions import SILU, activation_of, is_ours, step_conv
from ._packing import boundaries_of
from ._places import is_functional, refusal


@dataclass(slots=True)
class Projected:
    """What a layer projects from its input: mixed [B,T,H*K + H*K + HV*V] before the convolution; z [B,T,..,V], heads in any shape."""

    mixed: torch.Tensor
    z: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """A kind of layer: its projections, its row, and the names of its gated norm and last projection."""

    project: Callable  # (layer, hidden [B,T,hidden_size]) -> Projected
    sizes: Callable  # layer -> H, HV, K, V
    row: Callable
    step: Callable
    norm: str
    output: str
    beta_input: Callable = lambda layer: "sigmoid"  # noqa: E731


def _cached(function):
    """A function with an lru_cache, without it where torch.compile traces: the trace would warn of it and ignore it."""
    return function.__wrapped__ if torch.compiler.is_compiling() else function


@functools.lru_cache(maxsize=64)
def _orders(groups, key_units, value_units, in_group, device):
    """Where q, then k, then v units stand in rows of `groups` times (q, k, v, z); and all beta, then all g in (beta, g) by group."""
    unit = torch.arange(groups * 2 * (key_units + value_units), device=device).view(groups, -1)
    q, k, v, _ = unit.split((key_units, key_units, value_units, value_units), 1)
    beta, g = torch.arange(groups * 2 * in_group, device=device).view(groups, 2, in_group).unbind(1)
    return torch.cat((q.flatten(), k.flatten(), v.flatten())), torch.cat((beta.flatten(), g.flatten()))


def _grouped_sizes(layer):
    return layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim


def _float32(x):
    return x if x.dtype is torch.float32 else x.float()


def qwen3_next(layer, hidden):
    """q, k, v and z interleaved by key head in one projection, beta and g in another."""
    B, T, _ = hidden.shape
    groups, heads, K, V = _grouped_sizes(layer)
    in_group, unit = heads // groups, math.gcd(K, V)
    qkv, gates = _cached(_orders)(groups, K // unit, in_group * V // unit, in_group, hidden.device)
    qkvz = layer.in_proj_qkvz(hidden).contiguous()
    mixed = qkvz.view(B, T, -1, unit).index_select(2, qkv).view(B, T, -1)
    z = qkvz.view(B, T, groups, -1).narrow(3, 2 * K + in_group * V, in_group * V).view(B, T, groups, in_group, V)
    beta, g = layer.in_proj_ba(hidden).index_select(2, gates).split_with_sizes((heads, heads), 2)
    return Projected(mixed, z, g, beta, _float32(layer.A_log), _float32(layer.dt_bias))


def qwen3_5(layer, hidden):
    """One projection for q, k, v in that order, one each for z, beta and g."""
    z = layer.in_proj_z(hidden).view(*hidden.shape[:2], -1, layer.head_v_dim)
    return Projected(layer.in_proj_qkv(hidden), z, layer.in_proj_a(hidden), layer.in_proj_b(hidden), _float32(layer.A_log),
                     _float32(layer.dt_bias))


def olmo_hybrid(layer, hidden):
    """A projection for each of q, k, v, gate, beta and g."""
    mixed = torch.cat((layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)), -1)
    z = layer.g_proj(hidden).view(*hidden.shape[:2], -1, layer.head_v_dim)
    return Projected(mixed, z, layer.a_proj(hidden), layer.b_proj(hidden), _float32(layer.A_log), _float32(layer.dt_bias))


def kimi_linear(layer, hidden):
    """A projection for each of q, k, v and beta; low-rank ones for the gate of each key channel and for the output's."""
    heads = (*hidden.shape[:2], -1, layer.head_dim)
    forget = layer.forget_gate
    mixed = torch.cat((layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)), -1)
    g = forget.f_b_proj(forget.f_a_proj(hidden)).view(heads)
    z = layer.g_b_proj(layer.g_a_proj(hidden)).view(heads)
    return Projected(mixed, z, g, layer.b_proj(hidden), _float32(forget.A_log).view(-1),
                     _float32(forget.dt_bias).view(-1, layer.head_dim))


SCALAR_GATE: dict[str, Any] = {"sizes": _grouped_sizes, "row": ops.gated_delta_rule, "step": ops.gated_delta_rule_step}
LAYERS = {
    "qwen3_next": Layer(qwen3_next, **SCALAR_GATE, norm="norm", output="out_proj"),
    "qwen3_5": Layer(qwen3_5, **SCALAR_GATE, norm="norm", output="out_proj"),
    "olmo_hybrid": Layer(olmo_hybrid, **SCALAR_GATE, norm="o_norm", output="o_proj",
                         beta_input=lambda layer: "sigmoid_twice" if layer.allow_neg_eigval else "sigmoid"),
    "kimi_linear": Layer(kimi_linear, lambda layer: (layer.num_heads, layer.num_heads, layer.head_dim, layer.head_dim), ops.kda, ops.kda_step,
                         norm="o_norm", output="o_proj"),
}


def _refusal(layer, hidden, cache, kwargs):
    reason = refusal(hidden) or refusal(layer.conv1d.weight)
    if reason:
        return reason
    if layer.activation not in SILU:
        return f"activation {layer.activation}"
    if layer.conv_kernel_size < 2:
        return "a convolution of one tap"
    if kwargs.get("cache_params") is not None:
        return "the argument cache_params"
    if cache is None:
        return None
    kinds = type(cache), type(cache.layers[layer.layer_idx])
    if not _cached(_stores_states)(*kinds):
        return f"a cache of type {kinds[0].__name__} with layers of type {kinds[1].__name__}"
    if cache.is_recording_past(layer.layer_idx):
        return "a cache that records its past"
    state = cache.get_conv_state(layer.layer_idx, state_idx=0)
    if state is None:
        return None
    if state.shape[-1] != layer.conv_kernel_size:
        return f"a window of {state.shape[-1]} for {layer.conv_kernel_size} taps"
    if boundaries_of(kwargs) is not None:
        return "packed sequences after a filled cache"
    return None


@functools.lru_cache(maxsize=64)
def _stores_states(cache, layer):
    """Whether the classes of a cache and of its layer keep the two states as transformers' own do."""
    from transformers.cache_utils import Cache, LinearAttentionLayer

    return all(getattr(cache, name) is getattr(Cache, name) for name in
               ("get_conv_state", "get_recurrent_state", "update_conv_state", "update_recurrent_state")) \
        and issubclass(layer, LinearAttentionLayer) and layer.update_conv_state is LinearAttentionLayer.update_conv_state \
        and layer.update_recurrent_state is LinearAttentionLayer.update_recurrent_state


def _heads(mixed, sizes):
    """[B,T,D] after the convolution -> q, k [B,T,H,K], v [B,T,HV,V], views."""
    H, HV, K, V = sizes
    B, T, _ = mixed.shape
    if K == V:
        return mixed.view(B, T, -1, K).split_with_sizes((H, H, HV), 2)
    q, k, v = mixed.split_with_sizes((H * K, H * K, HV * V), 2)
    return q.view(B, T, H, K), k.view(B, T, H, K), v.view(B, T, HV, V)


def _options(layer, kind):
    return {"qk_norm": "l2", "gate_input": "softplus", "beta_input": kind.beta_input(layer)}


class Decoder:
    """One token at a time on the two states of one cache layer, through plans; made anew when a tensor of it is another."""

    def __init__(self, layer, kind, hidden, cache, found):
        store = cache.layers[layer.layer_idx]
        self.layer, self.cache_type, self.shape, self.dtype = weakref.ref(layer), type(cache), hidden.shape, hidden.dtype
        self.window, self.state, self.sizes = store.conv_states[0], store.recurrent_states[0], kind.sizes(layer)
        self.oldest, self.second, rest = self.window[..., 0], self.window[..., 1], self.window[..., 1:]
        weight, norm = layer.conv1d.weight, getattr(layer, kind.norm)
        self.key, self.norm_name = self.key_of(found, weight, layer.conv1d.bias), kind.norm
        # tensors of the calls that the plans are made of are given again at every call, but for the states
        self.conv = ops.plan(ops.short_conv_step, found.mixed, weight.squeeze(1), state=rest, bias=layer.conv1d.bias, activation="silu")
        self.step = ops.plan(kind.step, *_heads(found.mixed, self.sizes), found.g, found.beta, state=self.state, a_log=found.a_log,
                             dt_bias=found.dt_bias, **_options(layer, kind))
        self.norm = self.norm_dtype = None
        if is_ours(norm):
            self.norm_dtype, self.z_stride = norm.weight.dtype, found.z.stride()
            self.norm = ops.plan(ops.rms_norm, torch.empty(found.z.shape, dtype=found.z.dtype), norm.weight, gate=found.z,
                                 gate_activation=activation_of(norm), eps=norm.variance_epsilon)

    @staticmethod
    def key_of(found, weight, bias):
        """What the plans of the convolution and of the step were made for, beside sizes."""
        g, beta = found.g, found.beta
        return found.mixed.dtype, g.dtype, g.stride(), beta.dtype, beta.stride(), weight.dtype, weight.stride(), bias is None or bias.dtype

    def fits(self, layer, hidden, cache, store):
        return (self.layer() is layer and store.conv_states[0] is self.window and store.recurrent_states[0] is self.state and store.has_previous_state[0]
                and not store.record_past and hidden.shape == self.shape and hidden.dtype is self.dtype and type(hidden) is torch.Tensor
                and type(cache) is self.cache_type)

    def __call__(self, layer, found):
        """The gated norm of o, in z's shape; None when the projections are not what the plans were made for: nothing is written then."""
        conv1d = layer.conv1d
        weight, bias = conv1d.weight, conv1d.bias
        if self.key_of(found, weight, bias) != self.key:
            return None
        self.oldest.copy_(self.second)
        mixed = self.conv(found.mixed, weight.squeeze(1)) if bias is None else self.conv(found.mixed, weight.squeeze(1), bias=bias)
        q, k, v = _heads(mixed, self.sizes)
        o = self.step(q, k, v, found.g, found.beta, a_log=found.a_log, dt_bias=found.dt_bias).view(found.z.shape)
        norm = getattr(layer, self.norm_name)
        if self.norm_dtype is not None and is_ours(norm) and norm.weight.dtype is self.norm_dtype and found.z.stride() == self.z_stride:
            return self.norm(o, norm.weight, gate=found.z)
        return norm(o, found.z)


UNUSUAL = {"cu_seq_lens_q", "seq_idx", "cache_params"}
_decoders: weakref.WeakKeyDictionary[Any, Decoder] = weakref.WeakKeyDictionary()  # by cache layer; it ends with the cache


def _prepare(layer, kind, hidden, cache, found):
    """After one token by the general path: plans for the next ones."""
    if cache is None or hidden.shape[1] != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    _decoders[cache.layers[layer.layer_idx]] = Decoder(layer, kind, hidden, cache, found)


def _decoder_of(layer, hidden, cache):
    """The Decoder of a token after this cache, or None."""
    if cache is None or hidden.shape[1] != 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    store = cache.layers[layer.layer_idx]
    decoder = _decoders.get(store)
    return decoder if decoder is not None and decoder.fits(layer, hidden, cache, store) else None


def _convolve(layer, x, cache, cu):
    """[B,T,D] -> the same, after the window in the cache, which goes on."""
    weight, bias, index = layer.conv1d.weight.squeeze(1), layer.conv1d.bias, layer.layer_idx
    window = None if cache is None else cache.get_conv_state(index, state_idx=0)
    if window is not None and x.shape[1] == 1:
        return step_conv(x, weight, bias, "silu", window)
    before = None
    if cache is not None:
        W = layer.conv_kernel_size
        before = None if window is None else window[..., 1 - W:].clone()
        last = x if cu is None else x[:, int(cu[-2]):]
        cache.update_conv_state(last[:, -W:].transpose(1, 2), index, conv_kernel_size=W)
    return ops.short_conv(x, weight, bias=bias, activation="silu", initial_state=before, cu_seqlens=cu)[0]


def _remember(layer, kind, found, mixed, cache, cu):
    """mixed [B,T,D] after the convolution -> o [B,T,HV,V] after the state in the cache, which goes on."""
    operands = (*_heads(mixed, kind.sizes(layer)), found.g, found.beta)
    options = {"a_log": found.a_log, "dt_bias": found.dt_bias, **_options(layer, kind)}
    index = layer.layer_idx
    state = None if cache is None else cache.get_recurrent_state(index, state_idx=0)
    if state is not None and mixed.shape[1] == 1 and not is_functional(*operands, state, found.a_log, found.dt_bias):
        o = kind.step(*operands, state=state, **options)
        return o
    o, final_state = kind.row(*operands, initial_state=state, output_final_state=cache is not None, cu_seqlens=cu, **options)
    if cache is not None:
        cache.update_recurrent_state(final_state if cu is None else final_state[-1:], index)
    return o


def layer_forward(kind):
    """Maker of the forward of a layer of this kind (LAYERS)."""
    def make(place):
        @functools.wraps(place.stock)
        def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
            found = normed = None
            decoder = None if kwargs.keys() & UNUSUAL or attention_mask is not None else _decoder_of(self, hidden_states, cache)
            if decoder is not None:
                found = kind.project(self, hidden_states)
                normed = decoder(self, found)
            if normed is None:
                reason = _refusal(self, hidden_states, cache, kwargs)
                if reason:
                    given = {name: x for name, x in (("cache", cache), ("attention_mask", attention_mask)) if x is not None}
                    return place.pass_on(reason)(self, hidden_states, **given, **kwargs)
                normed = tokens(self, hidden_states, cache, attention_mask, boundaries_of(kwargs))
            place.count()
            return getattr(self, kind.output)(normed.view(*hidden_states.shape[:-1], -1))

        def tokens(self, hidden, cache, attention_mask, cu):
            if attention_mask is not None:
                hidden = (hidden * attention_mask[:, :, None]).to(hidden.dtype)
            if cu is not None:
                hidden = hidden.reshape(1, -1, hidden.shape[-1])
            found = kind.project(self, hidden)
            o = _remember(self, kind, found, _convolve(self, found.mixed, cache, cu), cache, cu)
            _prepare(self, kind, hidden, cache, found)
            return getattr(self, kind.norm)(o.view(found.z.shape), found.z)

        return forward
    return make
