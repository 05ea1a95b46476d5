# SPDX-License-Identifier: Apache-2.0
"""What fla keeps beside its operators and its layers call: gates alone, and the parts of RWKV-7 around the recurrence."""
import torch

from . import _adaptor


def _gate_of(name, g, A_log, dt_bias, lower_bound, output_dtype, dims):
    """Gates of [..., HV] (dims 1) or [..., HV, K] (dims 2) as those of [B,T,...]."""
    if A_log is None and lower_bound is None:
        raise ValueError(f"{name}: `A_log` must be provided when `lower_bound` is not set.")
    lead = g.shape[:g.ndim - dims]
    flat = g.reshape(1, -1, *g.shape[g.ndim - dims:])
    found = _adaptor.gate(flat if flat.dtype in (torch.float32, torch.float64) else flat.float(), A_log, dt_bias, lower_bound)
    return found.reshape(*lead, *found.shape[2:]).to(output_dtype or g.dtype)


def fused_kda_gate(g, A_log=None, dt_bias=None, lower_bound=None, output_dtype=torch.float32):
    """Logits [..., HV, K] to log decays: -exp(A_log) softplus(g + dt_bias), or with a lower_bound
    lower_bound sigmoid(exp(A_log) (g + dt_bias)).

    A_log [HV], None: a rate of 1 (with a lower_bound only); dt_bias [HV*K] or None. ValueError without A_log and lower_bound.
    """
    return _gate_of("fused_kda_gate", g, A_log, dt_bias, lower_bound, output_dtype, 2)


def fused_gdn_gate(g, A_log, dt_bias=None, output_dtype=torch.float32):
    """Logits [..., HV] to log decays -exp(A_log) softplus(g + dt_bias); A_log and dt_bias [HV]."""
    return _gate_of("fused_gdn_gate", g, A_log, dt_bias, None, output_dtype, 1)


def fused_addcmul_rwkv7(hidden_states, delta, xr, xw, xk, xv, xa, xg=None):
    """hidden_states + delta * x for each x, a tuple of six; the last is None without xg. Shapes broadcast to [B,T,D].

    In float32 inside, so that the six gradients of hidden_states and of delta are rounded once, not at every sum.
    """
    wide, step = _adaptor.wide(hidden_states), _adaptor.wide(delta)
    return tuple(None if x is None else torch.addcmul(wide, step, _adaptor.wide(x)).to(hidden_states.dtype)
                 for x in (xr, xw, xk, xv, xa, xg))


def fused_k_rwkv7(k, a, ka, cu_seqlens=None, cu_seqlens_cpu=None):
    """k (1 + (a - 1) ka), [B,T,D], in float32 inside; cu_seqlens changes nothing."""
    del cu_seqlens, cu_seqlens_cpu
    wide = _adaptor.wide(k)
    return torch.addcmul(wide, wide * (_adaptor.wide(a) - 1), _adaptor.wide(ka)).to(k.dtype)


def gate_output_correction(o, r, k, r_k, v, g):
    """(o + (sum over D of r k r_k) v) g: o, g [B,T,H*D], r, k, v [B,T,H,D], r_k [H,D]; in float32 inside, rounded once to o's dtype."""
    r, k, r_k, v, wide, g = (_adaptor.wide(x) for x in (r, k, r_k, v, o, g))
    bonus = (r * k * r_k).sum(-1, keepdim=True) * v
    return ((wide + bonus.reshape(o.shape)) * g).to(o.dtype)


def channel_mixing_rwkv7(x, x_prev, x_k, key_weight, value_weight, inplace=True):
    """(relu((x + (shifted - x) x_k) key_weight)^2 value_weight, x[-1, :]): x [B,T,D], x_prev [B,D] or [B,1,D] is the row before the first.

    x[-1, :] is the last batch entry, as in fla. `inplace` is accepted and nothing is overwritten. Sums of gradients in float32.
    """
    del inplace
    if x.dim() != 3:
        raise AssertionError(f"channel_mixing_rwkv7: x has {x.dim()} dimensions, allowed 3")
    wide = _adaptor.wide(x)
    shifted = torch.cat((_adaptor.wide(x_prev).reshape(x.shape[0], 1, x.shape[2]), wide[:, :-1]), 1)
    mixed = torch.addcmul(wide, shifted - wide, _adaptor.wide(x_k)).to(x.dtype)
    return torch.relu(_adaptor.wide(mixed @ key_weight)).square().to(x.dtype) @ value_weight, x[-1, :]


HELPERS = (
    ("kda.gate", fused_kda_gate),
    ("gated_delta_rule.gate", fused_gdn_gate),
    ("rwkv7.fused_addcmul", fused_addcmul_rwkv7),
    ("rwkv7.fused_k_update", fused_k_rwkv7),
    ("rwkv7.gate_output_correction", gate_output_correction),
    ("rwkv7.channel_mixing", channel_mixing_rwkv7),
)
