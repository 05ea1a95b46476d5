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
from ._functions import SILU, activation_of, beside, is_ours, step_conv
from ._packing import boundaries_of
from ._places import is_functional, refusal


@dataclass(slots=True)
class Parts:
    """Views of what a layer projects: `mixed` holds q, k and v in that order, each [B,T,...]; z [B,T,..,V], g and beta with their
    heads in any shape."""

    mixed: tuple[torch.Tensor, ...]
    z: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor


@dataclass(frozen=True)
class Layer:
    """A kind of layer: its projections, its row, and the names of its gated norm and last projection."""

    project: Callable  # (layer, hidden [B,T,hidden_size]) -> the outputs of its projections
    split: Callable  # (layer, these outputs) -> Parts
    gates: Callable  # layer -> the parameters that become a_log [HV] and dt_bias [HV,*gate_shape]
    sizes: Callable  # layer -> H, HV, K, V
    row: Callable
    step: Callable
    norm: str
    output: str
    gate_shape: Callable = lambda layer: ()  # noqa: E731, of g behind its heads
    beta_input: Callable = lambda layer: "sigmoid"  # noqa: E731


def _cached(function):
    """A function with an lru_cache, without it where torch.compile traces: the trace would warn of it and ignore it."""
    return function.__wrapped__ if torch.compiler.is_compiling() else function


def _grouped_sizes(layer):
    return layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim


def _float32(x):
    return x if x.dtype is torch.float32 else x.float()


def project_qwen3_next(layer, hidden):
    modules = layer._modules  # getattr of nn.Module takes 5 us where a token finds Python's own code out of the caches
    return modules["in_proj_qkvz"](hidden), modules["in_proj_ba"](hidden)


def split_qwen3_next(layer, outputs):
    """q, k, v and z interleaved by key head in one projection, beta and g in another."""
    qkvz, ba = outputs
    B, T, _ = qkvz.shape
    groups, heads, K, V = _grouped_sizes(layer)
    in_group = heads // groups
    q, k, v, z = qkvz.view(B, T, groups, -1).split_with_sizes((K, K, in_group * V, in_group * V), 3)
    beta, g = ba.view(B, T, groups, 2, in_group).unbind(3)
    return Parts((q, k, v), z.view(B, T, groups, in_group, V), g, beta)


def project_qwen3_5(layer, hidden):
    return layer.in_proj_qkv(hidden), layer.in_proj_z(hidden), layer.in_proj_a(hidden), layer.in_proj_b(hidden)


def split_qwen3_5(layer, outputs):
    """One projection for q, k, v in that order, one each for z, g and beta."""
    mixed, z, g, beta = outputs
    return Parts((mixed,), z.view(*z.shape[:2], -1, layer.head_v_dim), g, beta)


def project_olmo_hybrid(layer, hidden):
    return (layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden), layer.g_proj(hidden), layer.a_proj(hidden),
            layer.b_proj(hidden))


def split_olmo_hybrid(layer, outputs):
    """A projection for each of q, k, v, z, g and beta."""
    *mixed, z, g, beta = outputs
    return Parts(tuple(mixed), z.view(*z.shape[:2], -1, layer.head_v_dim), g, beta)


def project_kimi_linear(layer, hidden):
    forget = layer.forget_gate
    return (layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden), layer.g_b_proj(layer.g_a_proj(hidden)),
            forget.f_b_proj(forget.f_a_proj(hidden)), layer.b_proj(hidden))


def split_kimi_linear(layer, outputs):
    """A projection for each of q, k, v and beta; low-rank ones for the gate of each key channel and for the output's."""
    *mixed, z, g, beta = outputs
    heads = (*z.shape[:2], -1, layer.head_dim)
    return Parts(tuple(mixed), z.view(heads), g.view(heads), beta)


def _parameter(module, name):
    """getattr, without the lookups of nn.Module where nothing stands in for the parameter."""
    found = module._parameters.get(name)
    return getattr(module, name) if found is None else found


SCALAR_GATE: dict[str, Any] = {"gates": lambda layer: (_parameter(layer, "A_log"), _parameter(layer, "dt_bias")),
                               "sizes": _grouped_sizes, "row": ops.gated_delta_rule, "step": ops.gated_delta_rule_step}
LAYERS = {
    "qwen3_next": Layer(project_qwen3_next, split_qwen3_next, **SCALAR_GATE, norm="norm", output="out_proj"),
    "qwen3_5": Layer(project_qwen3_5, split_qwen3_5, **SCALAR_GATE, norm="norm", output="out_proj"),
    "olmo_hybrid": Layer(project_olmo_hybrid, split_olmo_hybrid, **SCALAR_GATE, norm="o_norm", output="o_proj",
                         beta_input=lambda layer: "sigmoid_twice" if layer.allow_neg_eigval else "sigmoid"),
    "kimi_linear": Layer(project_kimi_linear, split_kimi_linear, lambda layer: (layer.forget_gate.A_log, layer.forget_gate.dt_bias),
                         lambda layer: (layer.num_heads, layer.num_heads, layer.head_dim, layer.head_dim), ops.kda, ops.kda_step,
                         norm="o_norm", output="o_proj", gate_shape=lambda layer: (layer.head_dim,)),
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


def _options(layer, kind, gates):
    a_log, dt_bias = gates
    return {"a_log": a_log.view(-1), "dt_bias": dt_bias.view(a_log.numel(), *kind.gate_shape(layer)), "qk_norm": "l2",
            "gate_input": "softplus", "beta_input": kind.beta_input(layer)}


def _gate_shape(layer, kind, parts):
    """Of g as the row takes it; beta's is its first three."""
    return (*parts.beta.shape[:2], kind.sizes(layer)[1], *kind.gate_shape(layer))


class Decoder:
    """One token at a time on the two states of one cache layer, through a chain; made anew when a tensor of it is another."""

    def __init__(self, layer, kind, hidden, cache, outputs):
        store = cache.layers[layer.layer_idx]
        self.layer, self.cache_type, self.shape, self.dtype = weakref.ref(layer), type(cache), hidden.shape, hidden.dtype
        self.flat = (*hidden.shape[:2], -1)
        self.window, self.state, self.kind = store.conv_states[0], store.recurrent_states[0], kind
        norm = getattr(layer, kind.norm)
        self.has_norm = is_ours(norm)
        self.settings = self.settings_of(norm)
        self.places = self.window.data_ptr(), self.state.data_ptr()
        parts, parameters = kind.split(layer, outputs), self.parameters(layer)
        weight, bias, gates = parameters[0].squeeze(1), layer.conv1d.bias, parameters[1:3]
        steps = []

        def dense(shape, *pieces):
            """The pieces one after the other as a tensor of that shape: a view of a single one where there is one, else a copy."""
            if len(pieces) == 1 and (view := _viewed(pieces[0], shape)) is not None:
                return view
            made = torch.empty(shape, dtype=pieces[0].dtype)
            steps.extend(_places(made.view(*shape[:2], -1), pieces))
            return made

        x = dense((*hidden.shape[:2], weight.shape[0]), *parts.mixed)
        shape = _gate_shape(layer, kind, parts)
        g, beta = dense(shape, parts.g), dense(shape[:3], parts.beta)
        mixed = torch.empty_like(x)
        # the window keeps W rows where W - 1 are read; the oldest moves along so that it stays what transformers stores
        steps.append((self.window[..., 0], self.window[..., 1]))
        steps.append(ops.plan(ops.short_conv_step, x, weight, state=self.window[..., 1:], bias=bias, activation="silu", out=mixed))
        q, k, v = _heads(mixed, kind.sizes(layer))
        o = torch.empty_like(v, memory_format=torch.contiguous_format) if self.has_norm else None
        steps.append(ops.plan(kind.step, q, k, v, g, beta, state=self.state, out=o, **_options(layer, kind, gates)))
        if o is not None:
            steps.append(ops.plan(ops.rms_norm, o.view(parts.z.shape), norm.weight, gate=parts.z, gate_activation=activation_of(norm),
                                  eps=norm.variance_epsilon))
        self.chain = ops.chain(steps, (*outputs, *parameters))

    @staticmethod
    def settings_of(norm):
        """What the chain has of a norm beside its weight."""
        return getattr(norm, "variance_epsilon", None), getattr(norm, "activation", None)

    def parameters(self, layer):
        """What the chain reads beside the outputs of the projections; a call may find other tensors there."""
        modules = layer._modules
        conv1d, (a_log, dt_bias) = modules["conv1d"], self.kind.gates(layer)
        found = [_parameter(conv1d, "weight"), _float32(a_log), _float32(dt_bias)]
        if (bias := _parameter(conv1d, "bias")) is not None:
            found.append(bias)
        if self.has_norm:
            found.append(_parameter(modules[self.kind.norm], "weight"))
        return found

    def fits(self, layer, hidden, cache, store):
        return (self.layer() is layer and store.conv_states[0] is self.window and store.recurrent_states[0] is self.state
                and store.has_previous_state[0] and not store.record_past and hidden.shape == self.shape
                and hidden.dtype is self.dtype and type(hidden) is torch.Tensor and type(cache) is self.cache_type
                and (self.window.data_ptr(), self.state.data_ptr()) == self.places)

    def __call__(self, layer, outputs):
        """The gated norm of o, [B,1,..,V]; None when the tensors are not what the chain was made for: nothing is written then."""
        norm = layer._modules[self.kind.norm]
        if is_ours(norm) is not self.has_norm or self.settings_of(norm) != self.settings:
            return None
        try:
            found = self.chain(*outputs, *self.parameters(layer))
        except ValueError:
            return None
        if self.has_norm:
            return found
        z = self.kind.split(layer, outputs).z
        return norm(found.view(z.shape), z)


def _places(made, pieces):
    """(view, piece) of the pieces one after the other in the last dimension of `made` [B,T,D]."""
    sizes = [math.prod(piece.shape[2:]) for piece in pieces]
    return [(view.view(piece.shape), piece) for view, piece in zip(made.split_with_sizes(sizes, 2), pieces, strict=True)]


def _joined(pieces):
    """[B,T,...] each -> [B,T,D]. Written once where that may be: a layer's 2048 tokens take 0.13 s so, 0.18 with cat."""
    if len(pieces) == 1:
        return pieces[0]
    if is_functional(*pieces):
        return torch.cat([x.flatten(2) for x in pieces], 2)
    B, T = pieces[0].shape[:2]
    made = pieces[0].new_empty(B, T, sum(math.prod(x.shape[2:]) for x in pieces))
    for view, piece in _places(made, pieces):
        view.copy_(piece)
    return made


def _viewed(x, shape):
    try:
        return x.view(shape)
    except RuntimeError:
        return None


UNUSUAL = {"cu_seq_lens_q", "seq_idx", "cache_params"}
_decoders: weakref.WeakKeyDictionary[Any, Decoder] = weakref.WeakKeyDictionary()  # by cache layer; it ends with the cache


def _prepare(layer, kind, hidden, cache, outputs):
    """After one token by the general path: a chain for the next ones, on the CPU, where there are chains."""
    if cache is None or hidden.shape[1] != 1 or hidden.is_cuda or torch.is_grad_enabled() or torch.compiler.is_compiling():
        return
    if len({x.dtype for x in outputs}) == 1:
        _decoders[cache.layers[layer.layer_idx]] = Decoder(layer, kind, hidden, cache, outputs)


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


def _remember(layer, kind, parts, mixed, cache, cu):
    """mixed [B,T,D] after the convolution -> o [B,T,HV,V] after the state in the cache, which goes on."""
    shape, gates = _gate_shape(layer, kind, parts), [_float32(x) for x in kind.gates(layer)]
    operands = (*_heads(mixed, kind.sizes(layer)), beside(parts.g, mixed).reshape(shape), beside(parts.beta, mixed).reshape(shape[:3]))
    options, index = _options(layer, kind, gates), layer.layer_idx
    state = None if cache is None else cache.get_recurrent_state(index, state_idx=0)
    if state is not None and mixed.shape[1] == 1 and not is_functional(*operands, state, *gates):
        return kind.step(*operands, state=state, **options)
    o, final_state = kind.row(*operands, initial_state=state, output_final_state=cache is not None, cu_seqlens=cu, **options)
    if cache is not None:
        cache.update_recurrent_state(final_state if cu is None else final_state[-1:], index)
    return o


def layer_forward(kind):
    """Maker of the forward of a layer of this kind (LAYERS)."""
    def make(place):
        @functools.wraps(place.stock)
        def forward(self, hidden_states, cache=None, attention_mask=None, **kwargs):
            decoder = None if attention_mask is not None or kwargs.keys() & UNUSUAL else _decoder_of(self, hidden_states, cache)
            normed = None if decoder is None else decoder(self, kind.project(self, hidden_states))
            if normed is not None:
                place.ran += 1
                return self._modules[kind.output](normed.view(decoder.flat))
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
            outputs = kind.project(self, hidden)
            parts = kind.split(self, outputs)
            o = _remember(self, kind, parts, _convolve(self, _joined(parts.mixed), cache, cu), cache, cu)
            _prepare(self, kind, hidden, cache, outputs)
            return getattr(self, kind.norm)(o.view(parts.z.shape), parts.z)

        return forward
    return make
