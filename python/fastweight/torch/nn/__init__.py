# SPDX-License-Identifier: Apache-2.0
"""Layers of the family as torch modules, a hybrid language model of them, and its cache.

Parameter names and shapes are those of flash-linear-attention's layers of the same names, so that their checkpoints load
with strict=True. docs/layers.md has the table.
"""
from .attention import Attention
from .cache import Cache, Snapshot
from .config import LMConfig
from .convolution import ShortConvolution
from .delta import Comba, DeltaNet, GatedDeltaNet, GatedDeltaNet2, GatedDeltaProduct, KimiDeltaAttention
from .gla import GatedLinearAttention, MultiScaleRetention, SimpleGatedLinearAttention, SimpleGLA
from .mlp import GatedMLP
from .model import HybridLM, LMOutput
from .norms import FusedRMSNormGated, GroupNorm, RMSNorm
from .rwkv7 import RWKV7Attention, RWKV7FeedForward

__all__ = ["Attention", "Cache", "Comba", "DeltaNet", "FusedRMSNormGated", "GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProduct",
           "GatedLinearAttention", "GatedMLP", "GroupNorm", "HybridLM", "KimiDeltaAttention", "LMConfig", "LMOutput", "MultiScaleRetention",
           "RMSNorm", "RWKV7Attention", "RWKV7FeedForward", "ShortConvolution", "SimpleGLA", "SimpleGatedLinearAttention", "Snapshot"]
