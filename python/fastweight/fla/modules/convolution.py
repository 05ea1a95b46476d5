# SPDX-License-Identifier: Apache-2.0
"""fla.modules.convolution: the causal depthwise short convolution (fastweight.ops.short_conv) with fla's state of W rows.

y_t = act(bias + sum over j < W of weight[:, j] x_{t-W+1+j}) + residual_t. A state [N,D,W] holds the last W rows, oldest first;
the oldest one is carried and never read.
"""
import torch

from ... import ops
from ...torch.nn.convolution import ShortConvolution as _ShortConvolution
from .layernorm import beside

__all__ = ["ShortConvolution", "causal_conv1d", "causal_conv1d_update"]

ACTIVATIONS = {None: "none", "silu": "silu", "swish": "silu"}


def _last(x, state, width, cu_seqlens):
    """[N,D,width]: the last rows of x [B,T,D], continued to the left by `state` (0 when None)."""
    if cu_seqlens is None:
        before = x.new_zeros(x.shape[0], x.shape[2], width) if state is None else state
        return torch.cat((before, x[:, -width:].transpose(1, 2)), -1)[..., -width:]
    starts, ends = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
    back = ends - width + torch.arange(width, device=x.device)  # row of x, below `starts` one of the state
    rows = x[0, back.clamp_min(0)] if x.shape[1] else x.new_zeros(*back.shape, x.shape[2])
    found = rows.masked_fill((back < starts).unsqueeze(-1), 0).transpose(1, 2)
    if state is None:
        return found
    place = (back - starts + width).clamp_max(width - 1)
    older = state.gather(2, place.unsqueeze(1).expand(-1, x.shape[2], -1))
    return torch.where((back < starts).unsqueeze(1), older, found)


def causal_conv1d(x, weight=None, bias=None, residual=None, initial_state=None, output_final_state=False, activation=None, backend="triton",
                  cu_seqlens=None, cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs):
    """x [B,T,D] or [B,T,H,D'] (any strides), weight [D,W] -> (y [B,T,D], state [N,D,W] or None).

    initial_state [N,D,W]. activation "silu", "swish" or None. backend is accepted; each of fla's gives the same here.
    """
    del cu_seqlens_cpu, chunk_indices, kwargs
    if cp_context is not None:
        raise NotImplementedError("causal_conv1d: cp_context is given, allowed None: a sequence is not split over ranks here")
    if backend not in ("triton", "cuda", "mix"):
        raise ValueError(f"Unsupported backend: {backend}, allowed 'triton', 'cuda' and 'mix'")
    if weight is None:
        raise ValueError("causal_conv1d: weight is None, allowed [D,W]")
    shape = x.shape
    x = x.flatten(2)
    state = None if initial_state is None else initial_state.to(x.dtype)
    y, _ = ops.short_conv(x, beside(weight, x), bias=beside(bias, x), activation=ACTIVATIONS.get(activation, "none"),
                          initial_state=None if state is None else state[..., 1:], cu_seqlens=cu_seqlens)
    y = y.reshape(shape)
    y = y if residual is None else y + residual.reshape(shape)
    return y, _last(x, state, weight.shape[1], cu_seqlens) if output_final_state else None


def causal_conv1d_update(x, cache, residual=None, weight=None, bias=None, activation=None):
    """One row a sequence: x [N,D], [N,1,D] or [1,N,D], cache [N,D,W] -> (y, cache); the cache is moved on in place."""
    shape = x.shape
    rows = x.reshape(cache.shape[0], 1, cache.shape[1])
    y, state = causal_conv1d(rows, weight, bias, initial_state=cache.clone(), output_final_state=True, activation=activation)
    with torch.no_grad():
        cache.copy_(state)
    y = y.reshape(shape)
    return y if residual is None else y + residual.reshape(shape), cache


class ShortConvolution(_ShortConvolution):
    """The convolution as a layer; parameters weight [D,1,W] and, with bias=True, bias [D], started as nn.Conv1d does."""

    def __init__(self, hidden_size, kernel_size, bias=False, activation="silu", backend="triton", device=None, dtype=None, **kwargs):
        if backend not in ("triton", "cuda"):
            raise ValueError(f"Invalid backend: {backend}, must be one of ['cuda', 'triton']")
        super().__init__(hidden_size, kernel_size, bias, activation, backend, device, dtype, **kwargs)
        self.backend = backend

    def forward(self, x, residual=None, mask=None, cache=None, output_final_state=False, cu_seqlens=None, chunk_indices=None, **kwargs):
        """x [B,T,D] -> (y, state [N,D,W] or None). mask [B,T] multiplies x, which stays as it is.

        When every sequence has one row a given cache [N,D,W] is moved on in place and returned; otherwise it is only read.
        """
        if mask is not None:
            if cu_seqlens is not None:
                raise ValueError("`mask` and `cu_seqlens` cannot be provided at the same time")
            x = x * mask.unsqueeze(-1).to(x.dtype)
        is_step = x.shape[1] == 1 if cu_seqlens is None else x.shape[1] == len(cu_seqlens) - 1 and bool((cu_seqlens.diff() == 1).all())
        if is_step:
            return self.step(x, residual, cache, output_final_state, cu_seqlens)
        return causal_conv1d(x, self.weight[:, 0], self.bias, residual, cache, output_final_state, self.activation, self.backend,
                             cu_seqlens)

    def step(self, x, residual, cache, output_final_state=False, cu_seqlens=None):
        """One row a sequence; cache None is one of zeros."""
        count = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        cache = x.new_zeros(count, self.hidden_size, self.kernel_size[0]) if cache is None else cache
        y, cache = causal_conv1d_update(x, cache, residual, self.weight[:, 0], self.bias, self.activation)
        return y, cache if output_final_state else None

    @property
    def state_size(self):
        return self.hidden_size * self.kernel_size[0]
