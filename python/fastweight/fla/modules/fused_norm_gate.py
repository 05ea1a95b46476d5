# SPDX-License-Identifier: Apache-2.0
"""fla.modules.fused_norm_gate: a norm times an activated gate, y = norm(x + residual) act(g); the norm first, then the gate."""
from .layernorm import Norm, normed, then_linear

__all__ = ["FusedLayerNormGated", "FusedLayerNormGatedLinear", "FusedLayerNormSwishGate", "FusedLayerNormSwishGateLinear",
           "FusedRMSNormGated", "FusedRMSNormGatedLinear", "FusedRMSNormSwishGate", "FusedRMSNormSwishGateLinear", "layer_norm_gated",
           "layer_norm_swish_gate_linear", "rms_norm_gated", "rms_norm_swish_gate_linear"]

ACTIVATIONS = {"swish": "silu", "silu": "silu", "sigmoid": "sigmoid"}


def _gated(x, g, weight, bias, activation, residual, eps, prenorm, residual_in_fp32, is_rms_norm):
    if activation not in ACTIVATIONS:
        raise ValueError(f"Unsupported activation: {activation}, allowed {sorted(ACTIVATIONS)}")
    return normed(x, weight, bias, residual, eps, prenorm, residual_in_fp32, is_rms_norm, gate=g.reshape(x.shape),
                  activation=ACTIVATIONS[activation])


def layer_norm_gated(x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False, eps=1e-6):
    return _gated(x, g, weight, bias, activation, residual, eps, prenorm, residual_in_fp32, False)


def rms_norm_gated(x, g, weight, bias, activation="swish", residual=None, prenorm=False, residual_in_fp32=False, eps=1e-6):
    return _gated(x, g, weight, bias, activation, residual, eps, prenorm, residual_in_fp32, True)


def layer_norm_swish_gate_linear(x, g, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, prenorm=False,
                                 residual_in_fp32=False, eps=1e-6):
    return then_linear(layer_norm_gated(x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps), prenorm,
                       linear_weight, linear_bias)


def rms_norm_swish_gate_linear(x, g, norm_weight, norm_bias, linear_weight, linear_bias, residual=None, prenorm=False,
                               residual_in_fp32=False, eps=1e-6):
    return then_linear(rms_norm_gated(x, g, norm_weight, norm_bias, "swish", residual, prenorm, residual_in_fp32, eps), prenorm,
                       linear_weight, linear_bias)


class _Gated(Norm):
    activation = "swish"

    def forward(self, x, g, residual=None, prenorm=False, residual_in_fp32=False):
        return _gated(x, g, self.weight, self.bias, self.activation, residual, self.eps, prenorm, residual_in_fp32, self.is_rms_norm)

    def extra_repr(self):
        return f"{super().extra_repr()}, activation={self.activation}"

    def activate(self, activation):
        if activation not in ACTIVATIONS:
            raise ValueError(f"Unsupported activation: {activation}, allowed {sorted(ACTIVATIONS)}")
        self.activation = activation


class FusedLayerNormGated(_Gated):
    """Layer norm times act(g), act "swish" (or "silu") or "sigmoid". Parameters weight and, with bias=True, bias."""

    def __init__(self, hidden_size, elementwise_affine=True, bias=False, activation="swish", eps=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, bias, eps, device, dtype)
        self.activate(activation)


class FusedRMSNormGated(_Gated):
    """RMS norm times act(g), act "swish" (or "silu") or "sigmoid". Parameter weight."""

    is_rms_norm = True

    def __init__(self, hidden_size, elementwise_affine=True, eps=1e-5, activation="swish", device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)
        self.activate(activation)


class FusedLayerNormSwishGate(FusedLayerNormGated):
    """FusedLayerNormGated with "swish"."""

    def __init__(self, hidden_size, elementwise_affine=True, bias=False, eps=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, bias, "swish", eps, device, dtype)


class FusedRMSNormSwishGate(FusedRMSNormGated):
    """FusedRMSNormGated with "swish"."""

    def __init__(self, hidden_size, elementwise_affine=True, eps=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, eps, "swish", device, dtype)


class _GatedLinear(_Gated):
    def __init__(self, hidden_size, elementwise_affine=True, eps=1e-5, device=None, dtype=None):
        super().__init__(hidden_size, elementwise_affine, False, eps, device, dtype)

    def forward(self, x, g, weight=None, bias=None, residual=None, prenorm=False, residual_in_fp32=False):
        return then_linear(super().forward(x, g, residual, prenorm, residual_in_fp32), prenorm, weight, bias)


class FusedLayerNormGatedLinear(_GatedLinear):
    """Layer norm times swish(g), then a linear layer whose weight and bias come with the call."""


class FusedRMSNormGatedLinear(_GatedLinear):
    """RMS norm times swish(g), then a linear layer whose weight and bias come with the call."""

    is_rms_norm = True


class FusedLayerNormSwishGateLinear(FusedLayerNormGatedLinear):
    """FusedLayerNormGatedLinear."""


class FusedRMSNormSwishGateLinear(FusedRMSNormGatedLinear):
    """FusedRMSNormGatedLinear."""
