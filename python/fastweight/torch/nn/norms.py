# SPDX-License-Identifier: Apache-2.0
"""Norms over the last dimension, in float32 inside: RMSNorm, the gated FusedRMSNormGated, GroupNorm."""
import torch
import torch.nn.functional as F
from torch import nn

from ._ops import ops

GATES = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


class _Norm(nn.Module):
    def __init__(self, hidden_size, elementwise_affine, bias, eps, device, dtype):
        super().__init__()
        self.hidden_size, self.elementwise_affine, self.eps = hidden_size, elementwise_affine, eps
        shape = (hidden_size,)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if elementwise_affine else None
        self.bias = nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) if elementwise_affine and bias else None
        self.reset_parameters()

    def reset_parameters(self):
        """weight 1, bias 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self):
        return f"{self.hidden_size}, elementwise_affine={self.elementwise_affine}, eps={self.eps}"


class RMSNorm(_Norm):
    """y = x / sqrt(mean x^2 + eps) * weight + bias.

    Parameters: weight [hidden_size], bias [hidden_size] (with bias=True), both absent with elementwise_affine=False.
    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), eps inside the root.
    """

    def __init__(self, hidden_size, elementwise_affine=True, bias=False, eps=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        """x [..., hidden_size] -> y; of x + residual when a residual is given; (y, the sum) with prenorm."""
        if residual is not None:
            x = x + residual.to(x.dtype) if not residual_in_fp32 else x.float() + residual.float()
        y = ops.rms_norm(x, self.weight, eps=self.eps)
        y = y if self.bias is None else y + self.bias
        return (y, x) if prenorm else y


class FusedRMSNormGated(_Norm):
    """y = x / sqrt(mean x^2 + eps) * weight * act(gate): the norm first, then the gate.

    activation: "swish" (or "silu") or "sigmoid". Parameter: weight [hidden_size], absent with elementwise_affine=False.
    """

    def __init__(self, hidden_size, elementwise_affine=True, eps=1e-5, activation="swish", device=None, dtype=None):
        if activation not in GATES:
            raise ValueError(f"FusedRMSNormGated: activation is {activation!r}, allowed {sorted(GATES)}")
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        self.activation = activation

    def forward(self, x, g, residual=None, prenorm=False, residual_in_fp32=False):
        """x and g [..., hidden_size] -> y; of x + residual when a residual is given; (y, the sum) with prenorm."""
        if residual is not None:
            x = x + residual.to(x.dtype) if not residual_in_fp32 else x.float() + residual.float()
        y = ops.rms_norm(x, self.weight, gate=g, gate_activation=GATES[self.activation], eps=self.eps)
        return (y, x) if prenorm else y

    def extra_repr(self):
        return f"{super().extra_repr()}, activation={self.activation}"


class GroupNorm(_Norm):
    """Layer norm of each of num_groups contiguous parts of the last dimension, one affine over all of it."""

    def __init__(self, num_groups, hidden_size, elementwise_affine=True, bias=True, eps=1e-5, device=None, dtype=None):
        if hidden_size % num_groups:
            raise ValueError(f"GroupNorm: hidden_size is {hidden_size}, allowed multiples of num_groups, {num_groups}")
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.num_groups = num_groups

    def forward(self, x):
        """x [..., hidden_size]."""
        real = torch.float64 if x.dtype == torch.float64 else torch.float32
        size = self.hidden_size // self.num_groups
        y = F.layer_norm(x.to(real).view(*x.shape[:-1], self.num_groups, size), (size,), eps=self.eps).flatten(-2)
        y = y if self.weight is None else y * self.weight
        return (y if self.bias is None else y + self.bias).to(x.dtype)
