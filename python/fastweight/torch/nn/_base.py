# SPDX-License-Identifier: Apache-2.0
"""What the token-mixing layers share: padding, cache, projections, short convolutions, the operator, output norm and gate.

A layer of the family is the data of how it differs: its row of the operators, its further parameters, and `operands`.
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

from ._ops import ops
from ._sequences import counts, longest, repad, sequences, unpad
from .cache import Cache
from .convolution import ShortConvolution
from .norms import FusedRMSNormGated, RMSNorm

# A call with a cache of at most this many tokens a sequence runs token by token in place (`<row>_step`): a step of 16 tokens
# took 369 us, the chunk form 251 us, a step of 4 tokens 42 us against 341 us (one AVX-512 core, 4 heads of 64 x 64).
STEP_TOKENS = 16


def check(condition, sentence):
    if not condition:
        raise ValueError(sentence)


def positive(layer, **sizes):
    """ValueError for a size below 1."""
    for name, size in sizes.items():
        check(size >= 1, f"{layer}: {name} is {size}, allowed 1 or more")


class Mixer(nn.Module):
    """A layer that mixes tokens. Subclasses give `mix`."""

    held: tuple[str, ...] = ()  # tensors of the cache that every call with use_cache leaves there
    whole: tuple[str, ...] = ()  # tensors of the cache that `mix` takes and gives for the cache's sequences, not for the pieces of the call

    def __init__(self, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx

    def forward(self, hidden_states, attention_mask=None, past_key_values=None, use_cache=False, output_attentions=False, cu_seqlens=None, **kwargs):
        """hidden_states [B,T,hidden_size] -> (o [B,T,hidden_size], None, the cache or None).

        attention_mask: [B, T or more], nonzero where there is a token, 0 on padding; the last T columns count. Padding is
        skipped as if it were not there, and its rows of o are 0.
        cu_seqlens: [N+1], several sequences in one row, B = 1; then attention_mask is not looked at.
        past_key_values: a Cache that is continued. With use_cache it is moved on (one is made when None); else it is only read.
        """
        name = type(self).__name__
        x, cu_seqlens, indices = unpad(hidden_states, attention_mask, cu_seqlens, name)
        batch, tokens = hidden_states.shape[:2]
        cache, part = past_key_values, {}
        if use_cache and cache is None:
            cache = Cache()
        if cache is not None:
            if not isinstance(cache, Cache):
                raise TypeError(f"{name}: past_key_values is of type {type(cache).__name__}, allowed fastweight.torch.nn.Cache")
            check(self.layer_idx is not None, f"{name}: layer_idx is None, allowed 0 or more with a cache")
            part = cache.take(self.layer_idx, self.whole)
            if part:
                missing = [tensor for tensor in self.held if tensor not in part]
                check(not missing, f"{name}: past_key_values has no {missing} at layer_idx {self.layer_idx}, allowed a cache of this layer")
                held, needed = part["lengths"].shape[0], sequences(x, cu_seqlens)
                check(held == needed, f"{name}: past_key_values holds {held} sequences, allowed {needed} as in the call")
        pieces = None if cache is None else cache.pieces
        o, found, *more = self.mix(x, cu_seqlens, part, use_cache, pieces, **self.unpacked(kwargs, indices))
        if use_cache:
            added = counts(x, cu_seqlens)
            found["lengths"] = part["lengths"] + added if part else added
            cache.put(self.layer_idx, found, tokens, self.whole)
        return (repad(o, indices, batch, tokens), None, cache, *(repad(y, indices, batch, tokens) for y in more))

    def unpacked(self, kwargs, indices):
        """Keywords of `mix` out of those of forward."""
        return {}

    def mix(self, x, cu_seqlens, part, use_cache, pieces):
        """x [B,T,hidden_size] without padding, `part` the cache's tensors -> o and the tensors to put back.

        pieces: Cache.pieces.
        """
        raise NotImplementedError

    def steps(self, x, cu_seqlens, use_cache):
        """Whether this call runs token by token in place."""
        recorded = torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.parameters()))
        return use_cache and not recorded and longest(x, cu_seqlens) <= STEP_TOKENS


def inverse_softplus_of_dt(count, dt_min=0.001, dt_max=0.1, floor=1e-4):
    """[count]: y with softplus(y) = dt, dt log-uniform in [dt_min, dt_max]; the start of dt_bias (Mamba-2, Gated DeltaNet)."""
    dt = torch.exp(torch.rand(count) * (math.log(dt_max) - math.log(dt_min)) + math.log(dt_min)).clamp_min(floor)
    return dt + torch.log(-torch.expm1(-dt))


def without_decay(tensor):
    """A parameter that optimisers should not shrink: they find `_no_weight_decay` on it."""
    parameter = nn.Parameter(tensor)
    parameter._no_weight_decay = True
    return parameter


class LinearMixer(Mixer):
    """Projections, short convolutions, one operator of the family, norm and gate of its output, output projection."""

    row = ""  # of fastweight.ops
    modes = {"chunk": "chunk", "fused_recurrent": "recurrent"}
    _decay: tuple | None = None
    activated = "qkv"  # which of q, k, v get a silu when there is no convolution

    def __init__(self, hidden_size, mode, layer_idx):
        super().__init__(layer_idx)
        check(mode in self.modes, f"{type(self).__name__}: mode is {mode!r}, allowed {list(self.modes)}")
        positive(type(self).__name__, hidden_size=hidden_size)
        self.hidden_size, self.mode, self.held = hidden_size, mode, ("state",)

    # ---- parts of construction

    def add_projections(self, sizes, use_short_conv, conv_size, conv_bias, activations=("silu", "silu", "silu")):
        """q_proj, k_proj, v_proj of the given output sizes and their convolutions."""
        self.use_short_conv, self.conv_size, self.conv_bias = use_short_conv, conv_size, conv_bias
        if use_short_conv:
            positive(type(self).__name__, conv_size=conv_size)
            self.held += ("conv_q", "conv_k", "conv_v")
        for name, size, activation in zip("qkv", sizes, activations):
            setattr(self, f"{name}_proj", nn.Linear(self.hidden_size, size, bias=False))
            if use_short_conv:
                setattr(self, f"{name}_conv1d", ShortConvolution(size, conv_size, bias=conv_bias, activation=activation))

    def add_decay(self, heads, biases, low=0.0, high=16.0, zero=False):
        """A_log [heads], log of U(low, high) (0 with zero), and dt_bias [biases]."""
        self._decay = (low, high, zero)
        self.A_log, self.dt_bias = without_decay(torch.empty(heads)), without_decay(torch.empty(biases))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self):
        """Draws A_log and dt_bias, where the layer has them, as at the start; submodules stay."""
        if self._decay is None:
            return
        low, high, zero = self._decay
        self.A_log.copy_(torch.zeros_like(self.A_log) if zero else torch.empty(self.A_log.shape).uniform_(low, high).log())
        self.dt_bias.copy_(inverse_softplus_of_dt(self.dt_bias.shape[0]))

    def add_output(self, value_dim, head_v_dim, norm_eps, gate=None, activation="swish", low_rank=None):
        """o_norm and o_proj, and g_proj when `gate`: of full rank, or through `low_rank` channels with a bias."""
        if gate:
            self.g_proj = nn.Linear(self.hidden_size, value_dim, bias=False) if low_rank is None else nn.Sequential(
                nn.Linear(self.hidden_size, low_rank, bias=False), nn.Linear(low_rank, value_dim, bias=True))
            self.o_norm = FusedRMSNormGated(head_v_dim, activation=activation, eps=norm_eps)
        else:
            self.o_norm = RMSNorm(head_v_dim, eps=norm_eps, dtype=torch.float32)
        self.o_proj = nn.Linear(value_dim, self.hidden_size, bias=False)

    # ---- parts of forward

    def projected(self, x, cu_seqlens, part, use_cache, in_place):
        """-> q, k, v [B,T,size] after convolution and activation, and the tensors for the cache."""
        found, out = {}, []
        for name in "qkv":
            y = getattr(self, f"{name}_proj")(x)
            key = f"conv_{name}"
            if not self.use_short_conv:
                y = F.silu(y) if name in self.activated else y
            elif in_place:
                conv = getattr(self, f"{name}_conv1d")
                found[key] = part[key] if key in part else y.new_zeros(sequences(x, cu_seqlens), conv.hidden_size, conv.kernel_size[0] - 1)
                y = conv.step(y, found[key], cu_seqlens)
            else:
                y, final = getattr(self, f"{name}_conv1d")(y, cache=part.get(key), output_final_state=use_cache, cu_seqlens=cu_seqlens)
                if use_cache:
                    found[key] = final
            out.append(y)
        return out, found

    def operands(self, x, q, k, v, place):
        """-> q, k, v in heads, the row's further operands, its options. place: a function that gives positions [B,T]."""
        raise NotImplementedError

    def mix(self, x, cu_seqlens, part, use_cache, pieces):
        in_place = self.steps(x, cu_seqlens, use_cache)
        (q, k, v), found = self.projected(x, cu_seqlens, part, use_cache, in_place)
        q, k, v, more, options = self.operands(x, q, k, v, (cu_seqlens, part.get("lengths")))
        o, state = self.recur(q, k, v, more, options, cu_seqlens, part.get("state"), use_cache, in_place)
        if use_cache:
            found["state"] = state
        return self.output(x, o), found

    def recur(self, q, k, v, more, options, cu_seqlens, state, use_cache, in_place):
        """The operator -> o [B,T,HV,V], the state [N,HV,K,V] or None."""
        if in_place:
            if state is None:
                real = torch.float64 if q.dtype == torch.float64 else torch.float32
                state = torch.zeros(sequences(q, cu_seqlens), v.shape[2], q.shape[3], v.shape[3], device=q.device, dtype=real)
            return getattr(ops, f"{self.row}_step")(q, k, v, *more, state=state, cu_seqlens=cu_seqlens, **options), state
        return getattr(ops, self.row)(q, k, v, *more, initial_state=state, output_final_state=use_cache, cu_seqlens=cu_seqlens,
                                      form=self.modes[self.mode], **options)

    def output(self, x, o):
        """o [B,T,HV,V] -> [B,T,hidden_size]."""
        if isinstance(self.o_norm, FusedRMSNormGated):
            o = self.o_norm(o, heads(self.g_proj(x), o.shape[-1]))
        else:
            o = self.o_norm(o)
        return self.o_proj(o.flatten(-2))


def heads(x, size):
    """[..., h*size] -> [..., h, size]."""
    return x.view(*x.shape[:-1], x.shape[-1] // size, size)


def value_heads(name, num_heads, num_v_heads, head_dim, expand_v):
    """The checks that grouped value heads share -> num_v_heads, head_v_dim."""
    num_v_heads = num_heads if num_v_heads is None else num_v_heads
    positive(name, num_heads=num_heads, num_v_heads=num_v_heads, head_dim=head_dim)
    check(expand_v > 0, f"{name}: expand_v is {expand_v}, allowed above 0")
    check(num_v_heads % num_heads == 0, f"{name}: num_v_heads is {num_v_heads}, allowed multiples of num_heads, {num_heads}")
    head_v_dim = int(head_dim * expand_v)
    check(math.isclose(head_dim * expand_v, head_v_dim, rel_tol=1e-5),
          f"{name}: expand_v is {expand_v}, allowed what makes head_dim * expand_v whole, not {head_dim * expand_v}")
    return num_v_heads, head_v_dim
