# SPDX-License-Identifier: Apache-2.0
"""Functions with the call of transformers' own: makers that take the Place whose stock function they stand in for.

They never write a state that is passed to them, except causal_conv1d_update, whose call says so.
"""
import functools

import torch

from .. import ops
from ._packing import boundaries_of
from ._places import is_functional, refusal

SILU = ("silu", "swish")


def _activation(name):
    """Ours for transformers' name of an activation, or None for one that the short convolution does not have."""
    return "none" if name is None else "silu" if name in SILU else None


def beside(x, like):
    """A gate or strength in a dtype that the engine takes beside `like`: that of `like`, or float32."""
    return x if x.dtype in (like.dtype, torch.float32) else x.float()


def _delta_rule(place, row):
    def run(query, key, value, g, beta, initial_state, output_final_state, is_normed, cu_seqlens):
        same = {query.dtype} == {key.dtype, value.dtype}
        reason = refusal(query) or refusal(value) if same else "q, k and v of several dtypes"
        if reason:
            return None, reason
        place.count()
        return row(query, key, value, beside(g, query), beside(beta, query), initial_state=initial_state,
                   output_final_state=bool(output_final_state), cu_seqlens=cu_seqlens, qk_norm="l2" if is_normed else "none"), None
    return run


def chunk_delta_rule(row):
    """Maker for q [B,T,H,K], k, v [B,T,HV,V], g, beta [B,T,HV] in chunks; `row` is the function of fastweight.ops."""
    def make(place):
        run = _delta_rule(place, row)

        @functools.wraps(place.stock)
        def chunk(query, key, value, g, beta, chunk_size=64, initial_state=None, output_final_state=False,
                  use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):
            found, reason = run(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
            return found if reason is None else place.pass_on(reason)(
                query, key, value, g=g, beta=beta, chunk_size=chunk_size, initial_state=initial_state, cu_seqlens=cu_seqlens,
                output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs)
        return chunk
    return make


def recurrent_delta_rule(row):
    """As chunk_delta_rule, token by token."""
    row = functools.partial(row, form="recurrent")

    def make(place):
        run = _delta_rule(place, row)

        @functools.wraps(place.stock)
        def recurrent(query, key, value, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
                      cu_seqlens=None, **kwargs):
            found, reason = run(query, key, value, g, beta, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens)
            return found if reason is None else place.pass_on(reason)(
                query, key, value, g=g, beta=beta, initial_state=initial_state, cu_seqlens=cu_seqlens,
                output_final_state=output_final_state, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, **kwargs)
        return recurrent
    return make


def causal_conv1d_fn(place):
    """x [B,D,T], weight [D,W]; packed by cu_seq_lens_q or seq_idx."""
    @functools.wraps(place.stock)
    def conv(hidden_states, weight, bias=None, activation=None, **kwargs):
        name = _activation(activation)
        reason = refusal(hidden_states) or refusal(weight) if name else f"activation {activation}"
        if reason:
            return place.pass_on(reason)(hidden_states, weight, bias, activation=activation, **kwargs)
        place.count()
        y, _ = ops.short_conv(hidden_states.transpose(1, 2), weight, bias=bias, activation=name, cu_seqlens=boundaries_of(kwargs))
        return y.transpose(1, 2)
    return conv


def step_conv(x, weight, bias, activation, window):
    """The short convolution of x [B,T,D] after the window [B,D,W], which is written in place; y [B,T,D].

    The window keeps W rows where W - 1 are read; the oldest moves along so that the window stays what transformers stores.
    """
    if is_functional(x, weight, bias, window):
        y, _ = ops.short_conv(x, weight, bias=bias, activation=activation, initial_state=window[..., 1:])
        window.copy_(torch.cat((window, x.transpose(1, 2)), -1)[..., x.shape[1]:])
        return y
    oldest = window[..., 1] if x.shape[1] == 1 else torch.cat((window, x.transpose(1, 2)), -1)[..., -window.shape[-1]]
    window[..., 0].copy_(oldest)
    return ops.short_conv_step(x, weight, state=window[..., 1:], bias=bias, activation=activation)


def causal_conv1d_update(place):
    """x [B,D,T] and the window [B,D,W], which is written in place."""
    @functools.wraps(place.stock)
    def update(hidden_states, conv_state, weight, bias=None, activation=None, **kwargs):
        name = _activation(activation)
        reason = refusal(hidden_states) or refusal(weight) if name else f"activation {activation}"
        if reason is None and not conv_state.shape[-1] == weight.shape[-1] > 1:
            reason = f"a window of {conv_state.shape[-1]} for {weight.shape[-1]} taps"
        if reason:
            return place.pass_on(reason)(hidden_states, conv_state, weight, bias=bias, activation=activation, **kwargs)
        place.count()
        return step_conv(hidden_states.transpose(1, 2), weight, bias, name, conv_state).transpose(1, 2)
    return update


def activation_of(norm):
    """Ours for the activation of a gated norm, or None."""
    return "silu" if norm.activation in SILU else norm.activation if norm.activation == "sigmoid" else None


def is_ours(norm):
    """Whether a call of this module would be gated_norm's and nothing else."""
    return getattr(type(norm).forward, "is_gated_norm", False) and "forward" not in vars(norm) and activation_of(norm) is not None \
        and not (norm._forward_hooks or norm._forward_pre_hooks)


def gated_norm(place):
    """forward of a module with weight [D], variance_epsilon and activation: x and gate of one shape."""
    @functools.wraps(place.stock)
    def forward(self, hidden_states, gate=None):
        activation = activation_of(self)
        reason = refusal(hidden_states) or refusal(self.weight)
        if reason is None and (gate is None or activation is None):
            reason = "no gate" if gate is None else f"activation {self.activation}"
        if reason:
            return place.pass_on(reason)(self, hidden_states, gate)
        place.count()
        return ops.rms_norm(hidden_states, self.weight, gate=beside(gate, hidden_states), gate_activation=activation, eps=self.variance_epsilon)
    forward.is_gated_norm = True
    return forward


def function_of_fla(ours):
    """Maker of `ours`, a function of fastweight.fla, for a place in fla that holds the one of that name."""
    def make(place):
        @functools.wraps(ours)
        def function(*args, **kwargs):
            place.count()
            return ours(*args, **kwargs)
        return function
    return make
