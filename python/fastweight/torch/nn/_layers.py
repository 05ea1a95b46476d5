# SPDX-License-Identifier: Apache-2.0
"""The classes that a config may name."""
from .attention import Attention
from .delta import Comba, DeltaNet, GatedDeltaNet, GatedDeltaNet2, GatedDeltaProduct, KimiDeltaAttention
from .gla import GatedLinearAttention, MultiScaleRetention, SimpleGatedLinearAttention
from .mlp import GatedMLP
from .rwkv7 import RWKV7Attention, RWKV7FeedForward

__all__ = ["Attention", "Comba", "DeltaNet", "GatedDeltaNet", "GatedDeltaNet2", "GatedDeltaProduct", "GatedLinearAttention", "GatedMLP",
           "KimiDeltaAttention", "MultiScaleRetention", "RWKV7Attention", "RWKV7FeedForward", "SimpleGatedLinearAttention"]
