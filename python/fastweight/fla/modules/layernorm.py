# SPDX-License-Identifier: Apache-2.0
"""fla.modules.layernorm: layer, group and RMS norms of the last dimension, with a residual before and a linear layer after.

y = norm(x + residual) weight + bias, computed in float32 (float64 for float64), in x's dtype. With prenorm also the sum,
in the residual's dtype (float32 when there is none and residual_in_fp32). A plain RMS norm is fastweight.ops.rms_norm.
"""
import torch
import torch.nn.functional as F

from ... import ops
from ...torch.nn.norms import _Norm
from .._adaptor import wide

__all__ = ["GroupNorm", "GroupNormLinear", "LayerNorm", "LayerNormLinear", "RMSNorm", "RMSNormLinear", "group_norm", "group_norm_linear",
           "layer_norm", "layer_norm_linear", "rms_norm", "rms_norm_linear"]


def beside(parameter, x):
    """A parameter as the engine takes it beside x: in x's dtype or float32."""
    if parameter is None or parameter.dtype in (x.dtype, torch.float32) and x.dtype != torch.float64:
        return parameter
    return parameter.to(x.dtype)


def normed(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False, is_rms_norm=False, num_groups=1,
           gate=None, activation=None):
    """The norm that every function here is; with a gate, its result times silu(gate) or sigmoid(gate) (`activation`)."""
    total = x if residual is None else wide(x) + wide(residual)
    if is_rms_norm and num_groups == 1 and bias is None and eps:  # the engine has no eps of 0
        how = {} if gate is None else {"gate": gate if gate.dtype == x.dtype else gate.to(total.dtype), "gate_activation": activation}
        y = ops.rms_norm(total, beside(weight, total), eps=eps, y_dtype=x.dtype, **how)
    else:
        y = wide(total).unflatten(-1, (num_groups, -1))
        y = y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() if is_rms_norm else F.layer_norm(y, y.shape[-1:], eps=eps)
        y = y.flatten(-2)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
        y = (y if gate is None else y * (F.silu if activation == "silu" else torch.sigmoid)(wide(gate))).to(x.dtype)
    if not prenorm:
        return y
    dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    return y, total.to(dtype)


def layer_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False, is_rms_norm=False):
    return normed(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm)


def group_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False, is_rms_norm=False, num_groups=1):
    return normed(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups)


def rms_norm(x, weight, bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False):
    return normed(x, weight, bias, residual, eps, prenorm, residual_in_fp32, True)


def then_linear(found, prenorm, weight, bias):
    """The linear layer after a norm's result."""
    y, total = found if prenorm else (found, None)
    y = F.linear(y.to(weight.dtype) if not torch.is_autocast_enabled(y.device.type) else y, weight, bias)
    return (y, total) if prenorm else y


def layer_norm_linear(x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False,
                      is_rms_norm=False, num_groups=1):
    found = normed(x, norm_weight, norm_bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, num_groups)
    return then_linear(found, prenorm, linear_weight, linear_bias)


def rms_norm_linear(x, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, eps=1e-5, prenorm=False, residual_in_fp32=False):
    return layer_norm_linear(x, norm_weight, norm_bias, linear_weight, linear_bias, residual, eps, prenorm, residual_in_fp32, True)


group_norm_linear = layer_norm_linear


class Norm(_Norm):
    """What the modules share: weight [hidden_size] (ones) and bias (zeros), absent with elementwise_affine=False."""

    is_rms_norm, num_groups = False, 1

    def __init__(self, hidden_size, elementwise_affine=True, bias=False, eps=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)

    def forward(self, x, residual=None, prenorm=False, residual_in_fp32=False):
        return normed(x, self.weight, self.bias, residual, self.eps, prenorm, residual_in_fp32, self.is_rms_norm, self.num_groups)


class LayerNorm(Norm):
    """Mean and variance of the last dimension."""


class RMSNorm(Norm):
    """Mean of the squares of the last dimension."""

    is_rms_norm = True


class GroupNorm(Norm):
    """num_groups norms of adjacent parts of the last dimension, one affine over all of it."""

    def __init__(self, num_groups, hidden_size, elementwise_affine=True, bias=False, eps=1e-5, is_rms_norm=False, device=None, dtype=None):
        if hidden_size % num_groups:
            raise ValueError(f"GroupNorm: hidden_size is {hidden_size}, allowed multiples of num_groups = {num_groups}")
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.num_groups, self.is_rms_norm = num_groups, is_rms_norm


class _WithLinear:
    def forward(self, x, weight, bias, residual=None, prenorm=False, residual_in_fp32=False):
        return then_linear(super().forward(x, residual, prenorm, residual_in_fp32), prenorm, weight, bias)


class LayerNormLinear(_WithLinear, LayerNorm):  # type: ignore[misc]
    """The norm, then a linear layer whose weight and bias come with the call."""


class RMSNormLinear(_WithLinear, RMSNorm):  # type: ignore[misc]
    """The norm, then a linear layer whose weight and bias come with the call."""


class GroupNormLinear(_WithLinear, GroupNorm):  # type: ignore[misc]
    """The norm, then a linear layer whose weight and bias come with the call."""
