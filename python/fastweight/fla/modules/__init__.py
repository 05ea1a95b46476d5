# SPDX-License-Identifier: Apache-2.0
"""fla.modules for the models of fastweight's rows: thin torch code, the engine where it has the operation."""
from .convolution import ShortConvolution
from .fused_cross_entropy import FusedCrossEntropyLoss
from .fused_linear_cross_entropy import FusedLinearCrossEntropyLoss
from .fused_norm_gate import (
    FusedLayerNormGated,
    FusedLayerNormSwishGate,
    FusedLayerNormSwishGateLinear,
    FusedRMSNormGated,
    FusedRMSNormSwishGate,
    FusedRMSNormSwishGateLinear,
)
from .l2norm import L2Norm
from .layernorm import GroupNorm, GroupNormLinear, LayerNorm, LayerNormLinear, RMSNorm, RMSNormLinear
from .mlp import GatedMLP
from .rotary import RotaryEmbedding
from . import (
    activations,
    convolution,
    feature_map,
    fused_cross_entropy,
    fused_linear_cross_entropy,
    fused_norm_gate,
    l2norm,
    l2warp,
    layernorm,
    mlp,
    rotary,
    token_shift,
)

__all__ = [
    "FusedCrossEntropyLoss", "FusedLayerNormGated", "FusedLayerNormSwishGate", "FusedLayerNormSwishGateLinear",
    "FusedLinearCrossEntropyLoss", "FusedRMSNormGated", "FusedRMSNormSwishGate", "FusedRMSNormSwishGateLinear", "GatedMLP", "GroupNorm",
    "GroupNormLinear", "L2Norm", "LayerNorm", "LayerNormLinear", "RMSNorm", "RMSNormLinear", "RotaryEmbedding", "ShortConvolution",
    "activations", "convolution", "feature_map", "fused_cross_entropy", "fused_linear_cross_entropy", "fused_norm_gate", "l2norm",
    "l2warp", "layernorm", "mlp", "rotary", "token_shift",
]
